//! Chapters "A member" and "The superblock" of the format document.

use crate::Findings;
use crate::device::{Source, is_zero, u16_at, u32_at, u64_at};
use crate::math::crc32c_without;

const MAGIC: &[u8] = b"FrstRaid";
const COPY_BYTES: u64 = 12 << 10;
const KNOWN: u64 = 3;

/// A valid copy of a superblock.
#[derive(Clone)]
pub struct Superblock(pub Vec<u8>);

/// Consecutive stripes that lie on some groups in turn.
pub struct Zone {
    pub first_group: usize,
    pub groups: usize,
    pub rows: u64,
}

impl Superblock {
    /// The copy in `bytes`, or what is wrong with it.
    fn decode(bytes: &[u8]) -> Result<Superblock, String> {
        if is_zero(bytes) {
            return Err("empty".into());
        }
        if &bytes[..8] != MAGIC {
            return Err(format!("magic {:02x?}", &bytes[..8]));
        }
        let len = u32_at(bytes, 12) as usize;
        if len < 1024 || len > bytes.len() {
            return Err(format!("length {len}"));
        }
        let (stored, computed) = (u32_at(bytes, 16), crc32c_without(&bytes[..len], 16));
        if stored != computed {
            return Err(format!("checksum {stored:#010x}, computed {computed:#010x}"));
        }
        let block = Superblock(bytes[..len].to_vec());
        if u32_at(bytes, 8) != 1 {
            return Err(format!("version {}", u32_at(bytes, 8)));
        }
        if u64_at(bytes, 40) & !KNOWN != 0 {
            return Err(format!("unknown features {:#x}", u64_at(bytes, 40)));
        }
        if !block.is_spare() {
            block.check()?;
        }
        Ok(block)
    }

    /// Whether all that arithmetic relies on is in range.
    fn check(&self) -> Result<(), String> {
        let b = &self.0;
        let fields = [
            ("level", b[96] > 9),
            ("consistency", b[97] > 2),
            ("matrix", b[98] > 2 || b[98] == 0 && self.k() > 1 && self.m() > 0),
            ("groups", !(1..=256).contains(&self.groups())),
            ("data and parity strips", self.k() == 0 || self.k() + self.m() > 64 || self.m() > 16),
            ("members", self.members() != self.groups() * (self.k() + self.m()) || self.members() > 256),
            ("length", self.0.len() != 1024 + 32 * self.members()),
            ("slot", self.slot() >= self.members()),
            ("strip", !self.strip().is_power_of_two() || !(4096..=1 << 20).contains(&self.strip())),
            ("stripes of a group", self.rows() == 0 || self.rows() > 1 << 40),
            ("region", self.region_bytes() == 0 || !self.region_bytes().is_multiple_of(self.strip())),
            ("lanes", (b[97] != 0) != (self.lanes() > 0 && self.lane_bytes() > 0)),
            ("lane", !self.lane_bytes().is_multiple_of(4096)),
            ("generation", self.generation() == 0),
            ("scrub window", u64_at(b, 24) & 1 != 0 && (u16_at(b, 452) > 1439 || u16_at(b, 454) > 1439)),
        ];
        if let Some((field, _)) = fields.iter().find(|(_, is_wrong)| *is_wrong) {
            return Err(format!("field {field} out of range"));
        }
        let mut end = 32 << 10;
        let areas = [
            ("write-intent bitmap", u64_at(b, 224), 2 * 4096 * u64::from(u32_at(b, 220))),
            ("bad blocks", u64_at(b, 232), 2 * u64::from(u32_at(b, 240))),
            ("log", u64_at(b, 248), u64_at(b, 256)),
            ("reserve", u64_at(b, 264), u64_at(b, 272)),
            ("data", self.data_offset(), u64_at(b, 288)),
            ("last superblocks", self.member_bytes().wrapping_sub(2 * COPY_BYTES), 2 * COPY_BYTES),
        ];
        for (name, offset, len) in areas {
            let next = offset.checked_add(len).filter(|_| offset >= end && (offset | len) % 4096 == 0);
            end = next.ok_or_else(|| format!("{name} at {offset}, {len} bytes: not where it can be"))?;
        }
        if self.rows() * self.strip() > u64_at(b, 288)
            || self.regions().div_ceil(4032) > u32_at(b, 220).into()
        {
            return Err(format!("{} stripes of a group: too many for the member", self.rows()));
        }
        if u64::from(self.lane_bytes()) * self.lanes() as u64 > u64_at(b, 256) {
            return Err(format!("{} lanes: too many for the log", self.lanes()));
        }
        Ok(())
    }

    pub fn is_spare(&self) -> bool {
        u32_at(&self.0, 20) == 1
    }
    pub fn array(&self) -> &[u8] {
        &self.0[48..64]
    }
    pub fn name(&self) -> String {
        String::from_utf8_lossy(&self.0[64..96]).trim_end_matches('\0').into()
    }
    pub fn matrix(&self) -> u8 {
        self.0[98]
    }
    pub fn initial_bits(&self) -> u8 {
        self.0[99]
    }
    pub fn groups(&self) -> usize {
        u16_at(&self.0, 100)
    }
    pub fn k(&self) -> usize {
        u16_at(&self.0, 102)
    }
    pub fn m(&self) -> usize {
        u16_at(&self.0, 104)
    }
    pub fn slot(&self) -> usize {
        u16_at(&self.0, 106)
    }
    pub fn strip(&self) -> u64 {
        u32_at(&self.0, 108).into()
    }
    /// Stripes of a group.
    pub fn rows(&self) -> u64 {
        u64_at(&self.0, 112)
    }
    pub fn lane_bytes(&self) -> u32 {
        u32_at(&self.0, 124)
    }
    pub fn region_bytes(&self) -> u64 {
        u64_at(&self.0, 128)
    }
    pub fn regions(&self) -> u64 {
        (self.rows() * self.strip()).div_ceil(self.region_bytes())
    }
    pub fn lanes(&self) -> usize {
        u16_at(&self.0, 136)
    }
    pub fn is_clean(&self) -> bool {
        u16_at(&self.0, 138) & 1 != 0
    }
    /// Whether the table counts only where a later, complete one names the member.
    pub fn is_creating(&self) -> bool {
        u16_at(&self.0, 138) & 2 != 0
    }
    pub fn members(&self) -> usize {
        u32_at(&self.0, 140) as usize
    }
    pub fn generation(&self) -> u64 {
        u64_at(&self.0, 144)
    }
    pub fn nonce(&self) -> &[u8] {
        &self.0[160..176]
    }
    pub fn member_bytes(&self) -> u64 {
        u64_at(&self.0, 208)
    }
    pub fn data_offset(&self) -> u64 {
        u64_at(&self.0, 280)
    }
    pub fn is_reshaping(&self) -> bool {
        u32_at(&self.0, 384) != 0
    }
    /// UUID of the member in a slot.
    pub fn member(&self, slot: usize) -> &[u8] {
        &self.0[1024 + 32 * slot..][..16]
    }
    /// State of the member in a slot: 0 live, 1 rebuilding, 2 missing.
    pub fn state(&self, slot: usize) -> u8 {
        self.0[1024 + 32 * slot + 16]
    }

    pub fn zones(&self) -> Vec<Zone> {
        let zone = |at: usize| Zone {
            first_group: u16_at(&self.0, at),
            groups: u16_at(&self.0, at + 2),
            rows: u64_at(&self.0, at + 8),
        };
        (0..5).map(|i| zone(432 + 16 * i)).take_while(|zone| zone.groups > 0).collect()
    }

    /// Returns the fields that are equal on all members: without the checksum and per-member
    /// fields.
    pub fn common(&self) -> Vec<u8> {
        let mut bytes = self.0.clone();
        for own in [16..20, 106..108, 176..192, 208..244, 248..296] {
            bytes[own].fill(0);
        }
        bytes
    }
}

/// Reads all copies of a device and returns the newest; `None` when there is none.
pub fn read(name: &str, device: &dyn Source, findings: &mut Findings) -> Option<Superblock> {
    let read = |copy: usize, offset: u64| {
        let bytes = device.read(offset, COPY_BYTES as usize).map_err(|error| error.to_string());
        let bytes = bytes.and_then(|bytes| Superblock::decode(&bytes));
        (copy, offset, bytes)
    };
    let device_end = device.bytes() & !4095;
    let mut copies = vec![read(0, 4096), read(1, 16 << 10)];
    // The first two say where the last two are; without them, where they are on a device that has
    // not grown.
    let newest = copies.iter().filter_map(|(.., copy)| copy.as_ref().ok()).max_by_key(|copy| copy.order());
    let end = newest.map_or(device_end, Superblock::member_bytes);
    if end > device_end || end < 64 << 10 {
        if newest.is_some() {
            findings.add(
                name,
                "superblock",
                0,
                format!("{end} bytes of the member, {device_end} of the device"),
            );
        }
        return newest.cloned();
    }
    copies.extend([read(2, end - 2 * COPY_BYTES), read(3, end - COPY_BYTES)]);
    let valid = || copies.iter().filter_map(|(copy, _, block)| Some((*copy, block.as_ref().ok()?)));
    let (place, newest) = valid().max_by_key(|(_, block)| block.order())?;
    for (copy, offset, block) in &copies {
        let what = format!("superblock copy {copy}");
        let twin = copies[(copy + 2) % 4].2.as_ref().ok();
        match block {
            // One set may be torn by a crash; what comes after it writes that set first.
            Err(_) if !newest.is_clean() && !newest.is_spare() && copy % 2 != place % 2 => {}
            Err(why) => findings.add(name, &what, *offset, why.clone()),
            Ok(block) if newest.is_clean() && twin.is_some_and(|twin| twin.0 != block.0) => {
                let generation = block.generation();
                findings.add(
                    name,
                    &what,
                    *offset,
                    format!("generation {generation} differs from its twin copy"),
                );
            }
            Ok(block) if copy % 2 != place % 2 && block.order() == newest.order() && !block.is_spare() => {
                let generation = block.generation();
                findings.add(name, &what, *offset, format!("generation {generation} stands in both sets"));
            }
            Ok(_) => {}
        }
    }
    Some(newest.clone())
}

impl Superblock {
    /// By which the newest copy is found; a spare has no generation.
    fn order(&self) -> u64 {
        if self.is_spare() { 0 } else { self.generation() }
    }
}
