//! Encodes and decodes superblocks: little-endian, crc32c over all bytes. `docs/on-disk-formats.md`
//! has the table of fields.

use super::{
    EpochId, HISTORY, Label, MAX_OWNER_BYTES, Member, MemberState, Reason, Reshape, Spare, Superblock, Table,
};
use crate::config::MAX_NAME_BYTES;
use crate::geometry::MAX_ZONES;
use crate::metadata::layout::{COPY_BYTES, Layout};
use crate::metadata::maintenance::{Maintenance, Window};
use crate::{ArrayConfig, Consistency, Geometry, Level, Matrix, Uuid, Zone, Zones};

/// First bytes of every superblock.
pub const MAGIC: [u8; 8] = *b"FrstRaid";
/// The version of the format. A program refuses every other one.
pub const VERSION: u32 = 1;
/// Bytes before the table of members.
pub const HEAD_BYTES: usize = 1024;

const MEMBER_BYTES: usize = 32;
const CRC_AT: usize = 16;
const ROLE_MEMBER: u32 = 0;
const ROLE_SPARE: u32 = 1;
const NO_CURSOR: u64 = u64::MAX;
const IS_CLEAN: u16 = 1;
const IS_CREATING: u16 = 2;
const IS_LOGGING: u16 = 4;
const SCRUB_REPAIRS: u16 = 8;
const SCRUB_IS_SCHEDULED: u16 = 16;
const ZONES_AT: usize = 432;
const ZONE_BYTES: usize = 16;

/// The compatible feature of settings for scrubs and read errors. Their fields lie in the zeroes
/// between zones.
const COMPAT_MAINTENANCE: u64 = 1;
const SCRUB_PERIOD_AT: usize = 436;
const SCRUB_WINDOW_AT: usize = 452;
const READ_ERRORS_AT: usize = 468;
const SCRUB_CANCELLED_AT: usize = 484;

/// Incompatible features that this version knows: a bit and its name.
const INCOMPAT: [(u64, &str); 2] = [(1, "reshape"), (2, "zones")];
/// Features that this version knows and that only writers must know.
const RO_COMPAT: u64 = 0;

/// Why bytes are no superblock.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The bytes do not begin with the magic.
    #[error("no superblock")]
    NoMagic,
    /// The bytes differ from the written ones.
    #[error("superblock checksum {stored:#010x}: expected {computed:#010x}")]
    Checksum {
        /// The checksum in the superblock.
        stored: u32,
        /// The checksum of its bytes.
        computed: u32,
    },
    /// The format has another version.
    #[error("superblock version {0}: supported is version {VERSION}")]
    Version(u32),
    /// The array needs features that this version does not know.
    #[error("superblock features {0:#x}: unknown to this version")]
    Incompatible(u64),
    /// A field has an invalid value.
    #[error("superblock field {field}: invalid value {value}")]
    Field {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
    },
}

impl DecodeError {
    /// Whether a later version of Freestone wrote the superblock, and may read it.
    pub fn is_of_later_version(&self) -> bool {
        match self {
            DecodeError::Version(_) | DecodeError::Incompatible(_) => true,
            DecodeError::NoMagic | DecodeError::Checksum { .. } | DecodeError::Field { .. } => false,
        }
    }
}

fn invalid<T>(field: &'static str, value: impl ToString) -> Result<T, DecodeError> {
    Err(DecodeError::Field { field, value: value.to_string() })
}

impl Label {
    /// The label as bytes: see [`Superblock::encode`].
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Label::Member(superblock) => superblock.encode(),
            Label::Spare(spare) => spare.encode(),
        }
    }

    /// Decodes the label in `bytes`, of any content and length.
    ///
    /// # Errors
    /// Names the invalid field.
    pub fn decode(bytes: &[u8]) -> Result<Label, DecodeError> {
        if bytes.len() < HEAD_BYTES || bytes[..8] != MAGIC {
            return Err(DecodeError::NoMagic);
        }
        let input = Input(bytes);
        let len = input.u32(12) as usize;
        if !(HEAD_BYTES..=bytes.len()).contains(&len) {
            return invalid("length", len);
        }
        let (stored, computed) = (input.u32(CRC_AT), checksum(&bytes[..len]));
        if stored != computed {
            return Err(DecodeError::Checksum { stored, computed });
        }
        // Every version has magic, version, length and checksum at these offsets.
        if input.u32(8) != VERSION {
            return Err(DecodeError::Version(input.u32(8)));
        }
        let unknown = input.u64(40) & !INCOMPAT.iter().fold(0, |known, (bit, _)| known | bit);
        if unknown != 0 {
            return Err(DecodeError::Incompatible(unknown));
        }
        match input.u32(20) {
            ROLE_MEMBER => decode_member(&Input(&bytes[..len])).map(|member| Label::Member(Box::new(member))),
            ROLE_SPARE => decode_spare(&input).map(Label::Spare),
            role => invalid("role", role),
        }
    }
}

impl Superblock {
    /// The superblock as bytes, in whole pages of 4 KiB, at most [`COPY_BYTES`].
    pub fn encode(&self) -> Vec<u8> {
        sealed(self.table.members.len(), |out| encode_member(out, self))
    }
}

impl Spare {
    /// The superblock as bytes: one page of 4 KiB.
    pub fn encode(&self) -> Vec<u8> {
        sealed(0, |out| encode_spare(out, self))
    }
}

fn sealed(members: usize, fill: impl FnOnce(&mut Fields<'_>)) -> Vec<u8> {
    let len = HEAD_BYTES + members * MEMBER_BYTES;
    let mut bytes = vec![0; len.next_multiple_of(4096)];
    assert!(bytes.len() as u64 <= COPY_BYTES, "{members} members");
    let mut out = Fields(&mut bytes);
    out.put(0, MAGIC);
    out.put(8, VERSION.to_le_bytes());
    out.put(12, (len as u32).to_le_bytes());
    fill(&mut out);
    let crc = checksum(&out.0[..len]);
    out.put(CRC_AT, crc.to_le_bytes());
    bytes
}

/// The crc32c of a superblock with its checksum field as zero.
fn checksum(bytes: &[u8]) -> u32 {
    let before = crc32c::crc32c(&bytes[..CRC_AT]);
    crc32c::crc32c_append(crc32c::crc32c_append(before, &[0; 4]), &bytes[CRC_AT + 4..])
}

/// The fixed fields of a superblock, for writing.
struct Fields<'a>(&'a mut [u8]);

impl Fields<'_> {
    fn put<const N: usize>(&mut self, at: usize, value: [u8; N]) {
        self.0[at..at + N].copy_from_slice(&value);
    }

    fn put_text(&mut self, at: usize, text: &str, most: usize) {
        let mut len = text.len().min(most);
        while !text.is_char_boundary(len) {
            len -= 1;
        }
        self.0[at..at + len].copy_from_slice(&text.as_bytes()[..len]);
    }
}

/// The fixed fields of a superblock, for reading. All offsets lie below [`HEAD_BYTES`], which
/// `Label::decode` checks, or in the table of members, which `decode_member` checks.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn bytes<const N: usize>(&self, at: usize) -> [u8; N] {
        self.0[at..at + N].try_into().expect("N bytes")
    }

    fn u16(&self, at: usize) -> u16 {
        u16::from_le_bytes(self.bytes(at))
    }

    fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.bytes(at))
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.bytes(at))
    }

    fn text(&self, field: &'static str, at: usize, most: usize) -> Result<String, DecodeError> {
        let bytes = &self.0[at..at + most];
        let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
        match std::str::from_utf8(text) {
            Ok(text) if !text.chars().any(char::is_control) => Ok(text.to_owned()),
            _ => invalid(field, format!("{text:02x?}")),
        }
    }

    fn cursor(&self, at: usize) -> Option<u64> {
        Some(self.u64(at)).filter(|cursor| *cursor != NO_CURSOR)
    }
}

fn encode_spare(out: &mut Fields<'_>, spare: &Spare) {
    out.put(20, ROLE_SPARE.to_le_bytes());
    out.put(48, spare.array.unwrap_or_default().0);
    out.put_text(64, &spare.array_name, MAX_NAME_BYTES);
    out.put(176, spare.member.0);
    out.put(192, spare.created_ns.to_le_bytes());
    out.put(208, spare.member_bytes.to_le_bytes());
    out.put_text(320, &spare.owner, MAX_OWNER_BYTES);
}

fn decode_spare(input: &Input<'_>) -> Result<Spare, DecodeError> {
    Ok(Spare {
        member: Uuid(input.bytes(176)),
        array: Some(Uuid(input.bytes(48))).filter(|uuid| *uuid != Uuid::default()),
        array_name: input.text("array name", 64, MAX_NAME_BYTES)?,
        member_bytes: input.u64(208),
        created_ns: input.u64(192),
        owner: input.text("owner", 320, MAX_OWNER_BYTES)?,
    })
}

fn encode_member(out: &mut Fields<'_>, superblock: &Superblock) {
    let Superblock { member, slot, layout, unknown_ro_compat, table } = superblock;
    let uses = [table.reshape.is_some(), !table.config.geometry.zones.is_empty()];
    let incompat: u64 = INCOMPAT.iter().zip(uses).filter(|(_, used)| *used).map(|((bit, _), _)| bit).sum();
    out.put(20, ROLE_MEMBER.to_le_bytes());
    out.put(32, unknown_ro_compat.to_le_bytes());
    out.put(40, incompat.to_le_bytes());
    encode_config(out, &table.config);
    out.put(99, [table.initial_region]);
    out.put(106, slot.to_le_bytes());
    let flag = |is_set, flag| if is_set { flag } else { 0 };
    let flags = flag(table.is_clean, IS_CLEAN)
        | flag(table.is_creating, IS_CREATING)
        | flag(table.is_logging, IS_LOGGING)
        | flag(table.scrub_repairs, SCRUB_REPAIRS)
        | flag(table.scrub_is_scheduled, SCRUB_IS_SCHEDULED);
    out.put(138, flags.to_le_bytes());
    out.put(140, (table.members.len() as u32).to_le_bytes());
    out.put(144, table.generation.to_le_bytes());
    out.put(152, table.epoch.to_le_bytes());
    out.put(424, table.settled.to_le_bytes());
    // A larger difference is stored as `u32::MAX`, a later served epoch, which drops no line.
    out.put(244, u32::try_from(table.epoch - table.served_epoch).unwrap_or(u32::MAX).to_le_bytes());
    out.put(160, table.nonce);
    out.put(176, member.0);
    out.put(192, table.created_ns.to_le_bytes());
    out.put(200, table.updated_ns.to_le_bytes());
    encode_layout(out, layout);
    out.put(296, table.resync_cursor.unwrap_or(NO_CURSOR).to_le_bytes());
    out.put(304, table.scrub_cursor.unwrap_or(NO_CURSOR).to_le_bytes());
    out.put(312, table.scrubbed_ns.to_le_bytes());
    out.put_text(320, &table.owner, MAX_OWNER_BYTES);
    if let Some(reshape) = &table.reshape {
        encode_reshape(out, reshape);
    }
    encode_maintenance(out, table.maintenance, table.scrub_cancelled_s);
    let newest = table.history.len().saturating_sub(HISTORY);
    for (i, epoch) in table.history[newest..].iter().enumerate() {
        out.put(512 + 16 * i, epoch.epoch.to_le_bytes());
        out.put(512 + 16 * i + 8, epoch.id.to_le_bytes());
    }
    for (i, member) in table.members.iter().enumerate() {
        let (state, value) = match member.state {
            MemberState::Live => (0, 0),
            MemberState::Rebuilding { cursor } => (1, cursor),
            MemberState::Missing { since } => (2, since),
        };
        let at = HEAD_BYTES + i * MEMBER_BYTES;
        out.put(at, member.uuid.0);
        out.put(at + 16, [state, member.reason as u8]);
        out.put(at + 24, value.to_le_bytes());
    }
}

fn decode_member(input: &Input<'_>) -> Result<Superblock, DecodeError> {
    let config = decode_config(input)?;
    let layout = decode_layout(input);
    if let Err(error) = layout.check(&config) {
        return invalid("layout", error);
    }
    if Layout::superblocks_at(layout.member_bytes).is_none() {
        return invalid("size", layout.member_bytes);
    }
    let members = decode_members(input, config.geometry.members())?;
    let slot = input.u16(106);
    if usize::from(slot) >= members.len() {
        return invalid("slot", slot);
    }
    let (generation, epoch) = (input.u64(144), input.u64(152));
    // The counter must have room to grow: no array commits 2^63 times.
    if generation == 0 || generation >> 63 != 0 || epoch >> 63 != 0 || input.u64(424) > generation {
        return invalid("generation", generation);
    }
    let unserved = u64::from(input.u32(244));
    let Some(served_epoch) = epoch.checked_sub(unserved) else {
        return invalid("epochs since it served", unserved);
    };
    let flags = input.u16(138);
    let reshape = decode_reshape(input, &config, &layout)?;
    let (maintenance, scrub_cancelled_s) = decode_maintenance(input)?;
    let table = Table {
        history: decode_history(input, epoch)?,
        config,
        generation,
        settled: input.u64(424),
        epoch,
        served_epoch,
        nonce: input.bytes(160),
        is_clean: flags & IS_CLEAN != 0,
        is_creating: flags & IS_CREATING != 0,
        is_logging: flags & IS_LOGGING != 0,
        initial_region: input.0[99],
        members,
        resync_cursor: input.cursor(296),
        scrub_cursor: input.cursor(304),
        scrub_repairs: flags & SCRUB_REPAIRS != 0,
        scrub_is_scheduled: flags & SCRUB_IS_SCHEDULED != 0,
        scrub_cancelled_s,
        maintenance,
        scrubbed_ns: input.u64(312),
        reshape,
        owner: input.text("owner", 320, MAX_OWNER_BYTES)?,
        created_ns: input.u64(192),
        updated_ns: input.u64(200),
    };
    let unknown_ro_compat = input.u64(32) & !RO_COMPAT;
    Ok(Superblock { member: Uuid(input.bytes(176)), slot, layout, unknown_ro_compat, table })
}

/// Default settings leave their fields zero.
fn encode_maintenance(out: &mut Fields<'_>, maintenance: Maintenance, cancelled_s: u32) {
    if maintenance == Maintenance::default() && cancelled_s == 0 {
        return;
    }
    let Maintenance { scrub_period_s, scrub_window, read_errors } = maintenance;
    let Window { start_minute, end_minute } =
        scrub_window.unwrap_or(Window { start_minute: 0, end_minute: 0 });
    out.put(24, COMPAT_MAINTENANCE.to_le_bytes());
    out.put(SCRUB_PERIOD_AT, scrub_period_s.to_le_bytes());
    out.put(SCRUB_WINDOW_AT, start_minute.to_le_bytes());
    out.put(SCRUB_WINDOW_AT + 2, end_minute.to_le_bytes());
    out.put(READ_ERRORS_AT, read_errors.to_le_bytes());
    out.put(SCRUB_CANCELLED_AT, cancelled_s.to_le_bytes());
}

/// Settings for scrubs and read errors, and when a scheduled scrub was last cancelled, in seconds
/// since 1970.
fn decode_maintenance(input: &Input<'_>) -> Result<(Maintenance, u32), DecodeError> {
    if input.u64(24) & COMPAT_MAINTENANCE == 0 {
        return Ok((Maintenance::default(), 0));
    }
    let window =
        Window { start_minute: input.u16(SCRUB_WINDOW_AT), end_minute: input.u16(SCRUB_WINDOW_AT + 2) };
    if !window.is_valid() {
        return invalid("scrub window", format!("{} to {}", window.start_minute, window.end_minute));
    }
    let maintenance = Maintenance {
        scrub_period_s: input.u32(SCRUB_PERIOD_AT),
        scrub_window: window.or_none(),
        read_errors: input.u32(READ_ERRORS_AT),
    };
    Ok((maintenance, input.u32(SCRUB_CANCELLED_AT)))
}

fn decode_members(input: &Input<'_>, count: usize) -> Result<Vec<Member>, DecodeError> {
    if input.u32(140) as usize != count || input.0.len() != HEAD_BYTES + count * MEMBER_BYTES {
        return invalid("members", input.u32(140));
    }
    let member = |i| {
        let at = HEAD_BYTES + i * MEMBER_BYTES;
        let value = input.u64(at + 24);
        let state = match input.0[at + 16] {
            0 => MemberState::Live,
            1 => MemberState::Rebuilding { cursor: value },
            2 => MemberState::Missing { since: value },
            state => return invalid("member state", state),
        };
        let Some(reason) = Reason::ALL.get(usize::from(input.0[at + 17])) else {
            return invalid("member reason", input.0[at + 17]);
        };
        Ok(Member { uuid: Uuid(input.bytes(at)), state, reason: *reason })
    };
    (0..count).map(member).collect()
}

fn decode_history(input: &Input<'_>, epoch: u64) -> Result<Vec<EpochId>, DecodeError> {
    let at = |i: usize| EpochId { epoch: input.u64(512 + 16 * i), id: input.u64(512 + 16 * i + 8) };
    let history: Vec<EpochId> =
        (0..HISTORY).map(at).take_while(|entry| *entry != EpochId { epoch: 0, id: 0 }).collect();
    let is_rising = history.windows(2).all(|pair| pair[0].epoch < pair[1].epoch);
    match history.last() {
        Some(last) if last.epoch == epoch && is_rising => Ok(history),
        _ => invalid("history", format!("{history:?} at epoch {epoch}")),
    }
}

fn encode_config(out: &mut Fields<'_>, config: &ArrayConfig) {
    out.put(48, config.uuid.0);
    out.put_text(64, &config.name, MAX_NAME_BYTES);
    out.put(96, [level_number(config.level), consistency_number(config.consistency), config.matrix as u8]);
    out.put(100, (config.geometry.groups as u16).to_le_bytes());
    out.put(102, (config.geometry.data as u16).to_le_bytes());
    out.put(104, (config.geometry.parity as u16).to_le_bytes());
    out.put(108, config.geometry.strip_bytes.to_le_bytes());
    out.put(112, config.geometry.group_stripes.to_le_bytes());
    out.put(120, config.block_size.to_le_bytes());
    out.put(124, config.lane_bytes.to_le_bytes());
    out.put(128, config.region_bytes.to_le_bytes());
    out.put(136, config.lanes.to_le_bytes());
    for (i, zone) in config.geometry.zones.list().enumerate() {
        let at = ZONES_AT + i * ZONE_BYTES;
        out.put(at, zone.first_group.to_le_bytes());
        out.put(at + 2, zone.groups.to_le_bytes());
        out.put(at + 8, zone.rows.to_le_bytes());
    }
}

/// The zones of a superblock. A program that does not know the feature refuses the superblock.
fn decode_zones(input: &Input<'_>) -> Result<Zones, DecodeError> {
    if input.u64(40) & INCOMPAT[1].0 == 0 {
        return Ok(Zones::NONE);
    }
    let zone = |i: usize| {
        let at = ZONES_AT + i * ZONE_BYTES;
        Zone { first_group: input.u16(at), groups: input.u16(at + 2), rows: input.u64(at + 8) }
    };
    let list: Vec<Zone> = (0..MAX_ZONES).map(zone).take_while(|zone| zone.groups > 0).collect();
    match Zones::new(&list) {
        Some(zones) if !zones.is_empty() => Ok(zones),
        _ => invalid("zones", format!("{list:?}")),
    }
}

fn decode_config(input: &Input<'_>) -> Result<ArrayConfig, DecodeError> {
    let consistency = match input.0[97] {
        0 => Consistency::None,
        1 => Consistency::Bitmap,
        2 => Consistency::Ppl,
        number => return invalid("consistency", number),
    };
    let config = ArrayConfig {
        uuid: Uuid(input.bytes(48)),
        name: input.text("array name", 64, MAX_NAME_BYTES)?,
        level: decode_level(input.0[96])?,
        geometry: Geometry {
            groups: input.u16(100).into(),
            data: input.u16(102).into(),
            parity: input.u16(104).into(),
            strip_bytes: input.u32(108),
            group_stripes: input.u64(112),
            zones: decode_zones(input)?,
        },
        matrix: decode_matrix(input.0[98])?,
        consistency,
        block_size: input.u32(120),
        region_bytes: input.u64(128),
        lanes: input.u16(136),
        lane_bytes: input.u32(124),
    };
    match config.check() {
        Ok(()) => Ok(config),
        Err(error) => invalid("configuration", error),
    }
}

fn level_number(level: Level) -> u8 {
    // The index in `Level::ALL` is part of the format.
    Level::ALL.iter().position(|other| *other == level).expect("every level") as u8
}

fn decode_level(number: u8) -> Result<Level, DecodeError> {
    Level::ALL.get(usize::from(number)).copied().map_or_else(|| invalid("level", number), Ok)
}

fn consistency_number(consistency: Consistency) -> u8 {
    match consistency {
        Consistency::None => 0,
        Consistency::Bitmap => 1,
        Consistency::Ppl => 2,
    }
}

fn decode_matrix(number: u8) -> Result<Matrix, DecodeError> {
    Matrix::from_number(number).map_or_else(|| invalid("matrix", number), Ok)
}

fn encode_layout(out: &mut Fields<'_>, layout: &Layout) {
    out.put(208, layout.member_bytes.to_le_bytes());
    out.put(216, layout.alignment.to_le_bytes());
    out.put(220, layout.map_pages.to_le_bytes());
    out.put(224, layout.map_offset.to_le_bytes());
    out.put(232, layout.bad_offset.to_le_bytes());
    out.put(240, layout.bad_bytes.to_le_bytes());
    out.put(248, layout.log_offset.to_le_bytes());
    out.put(256, layout.log_bytes.to_le_bytes());
    out.put(264, layout.reserve_offset.to_le_bytes());
    out.put(272, layout.reserve_bytes.to_le_bytes());
    out.put(280, layout.data_offset.to_le_bytes());
    out.put(288, layout.data_bytes.to_le_bytes());
}

fn decode_layout(input: &Input<'_>) -> Layout {
    Layout {
        member_bytes: input.u64(208),
        alignment: input.u32(216),
        map_pages: input.u32(220),
        map_offset: input.u64(224),
        bad_offset: input.u64(232),
        bad_bytes: input.u32(240),
        log_offset: input.u64(248),
        log_bytes: input.u64(256),
        reserve_offset: input.u64(264),
        reserve_bytes: input.u64(272),
        data_offset: input.u64(280),
        data_bytes: input.u64(288),
    }
}

fn encode_reshape(out: &mut Fields<'_>, reshape: &Reshape) {
    out.put(384, 1u32.to_le_bytes());
    out.put(388, (reshape.old_geometry.groups as u16).to_le_bytes());
    out.put(390, (reshape.old_geometry.data as u16).to_le_bytes());
    out.put(392, (reshape.old_geometry.parity as u16).to_le_bytes());
    out.put(394, [reshape.old_matrix as u8, level_number(reshape.old_level)]);
    out.put(396, reshape.old_geometry.strip_bytes.to_le_bytes());
    out.put(400, reshape.old_geometry.group_stripes.to_le_bytes());
    out.put(408, reshape.cursor.to_le_bytes());
    out.put(416, reshape.shift.to_le_bytes());
}

fn decode_reshape(
    input: &Input<'_>,
    config: &ArrayConfig,
    layout: &Layout,
) -> Result<Option<Reshape>, DecodeError> {
    match input.u32(384) {
        0 => return Ok(None),
        1 => {}
        state => return invalid("reshape", state),
    }
    let reshape = Reshape {
        old_level: decode_level(input.0[395])?,
        old_matrix: decode_matrix(input.0[394])?,
        old_geometry: Geometry {
            groups: input.u16(388).into(),
            data: input.u16(390).into(),
            parity: input.u16(392).into(),
            strip_bytes: input.u32(396),
            group_stripes: input.u64(400),
            zones: Zones::NONE,
        },
        cursor: input.u64(408),
        shift: input.u64(416),
    };
    if let Err(error) = reshape.check(config) {
        return invalid("reshape", error);
    }
    // The logs of both geometries have the same number of lanes.
    let log_bytes = 2 * u64::from(config.lanes) * u64::from(config.lane_bytes);
    if layout.log_bytes < log_bytes {
        return invalid("reshape", format!("a log of {} bytes, not {log_bytes}", layout.log_bytes));
    }
    Ok(Some(reshape))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::testing::{config, superblock};
    use proptest::prelude::*;

    fn full() -> Superblock {
        let mut superblock = superblock(&config(21, 3), 5);
        let table = &mut superblock.table;
        (table.generation, table.settled, table.is_clean, table.initial_region) = (77, 76, true, 5);
        (1..60).for_each(|id| table.begin_epoch(id));
        table.begin_unserved_epoch(60);
        table.take_out(3, Reason::TimedOut);
        table.members[4].state = MemberState::Rebuilding { cursor: 1 << 40 };
        table.members[4].reason = Reason::Replacing;
        (table.resync_cursor, table.scrub_cursor, table.scrubbed_ns) = (Some(4096), Some(0), 9);
        (table.scrub_repairs, table.scrub_is_scheduled, table.scrub_cancelled_s) = (true, true, 1 << 31);
        let scrub_window = Some(Window { start_minute: 1320, end_minute: 360 });
        table.maintenance = Maintenance { scrub_period_s: 864_000, scrub_window, read_errors: 7 };
        table.owner = "höst".into();
        // 420 strips of data are 21 old rows and 20 new ones: the new geometry has 20 rows more.
        let old_geometry = Geometry { data: 20, parity: 2, ..table.config.geometry };
        let (old_level, old_matrix) = (Level::Raid6, Matrix::Powers);
        let (cursor, shift) = (420 * 4096, 20 * 4096);
        table.reshape = Some(Reshape { old_level, old_matrix, old_geometry, cursor, shift });
        table.config.geometry.group_stripes += 20;
        table.config.lanes = 1;
        (superblock.layout.data_offset, superblock.layout.data_bytes) =
            (superblock.layout.data_offset + shift, superblock.layout.data_bytes + shift);
        superblock
    }

    /// Of an array that gained a group twice, and has grown by size.
    fn zoned() -> Superblock {
        let mut config = config(3, 1);
        for _ in 0..2 {
            config.geometry = config.geometry.with_groups_added(1).unwrap();
            config.geometry.group_stripes += 3;
        }
        superblock(&config, 11)
    }

    fn reseal(bytes: &mut [u8]) {
        let len = (Input(bytes).u32(12) as usize).clamp(HEAD_BYTES, bytes.len());
        let crc = checksum(&bytes[..len]);
        Fields(bytes).put(CRC_AT, crc.to_le_bytes());
    }

    #[test]
    fn an_encoded_superblock_is_decoded() {
        for members in [1, 24, 64] {
            let label = Label::Member(Box::new(superblock(&config(members, 0), 0)));
            assert_eq!(Label::decode(&label.encode()), Ok(label));
        }
        let label = Label::Member(Box::new(full()));
        assert_eq!(Label::decode(&label.encode()), Ok(label));
        let label = Label::Member(Box::new(zoned()));
        assert_eq!(Label::decode(&label.encode()), Ok(label));
        for array in [None, Some(Uuid([3; 16]))] {
            let spare = Spare {
                member: Uuid([9; 16]),
                array,
                array_name: if array.is_some() { "vm".into() } else { String::new() },
                member_bytes: 1 << 33,
                created_ns: 5,
                owner: "host".into(),
            };
            assert_eq!(Label::decode(&Label::Spare(spare.clone()).encode()), Ok(Label::Spare(spare)));
        }
    }

    #[test]
    fn an_array_of_256_members_fits_into_a_copy() {
        let mut config = config(14, 2);
        config.geometry.groups = 16;
        let label = Label::Member(Box::new(superblock(&config, 255)));
        let bytes = label.encode();
        assert_eq!(bytes.len() as u64, COPY_BYTES);
        assert_eq!(Label::decode(&bytes), Ok(label));
    }

    #[test]
    fn a_flipped_bit_is_found_wherever_it_is() {
        let bytes = full().encode();
        let len = Input(&bytes).u32(12) as usize;
        for bit in 0..len * 8 {
            let mut broken = bytes.clone();
            broken[bit / 8] ^= 1 << (bit % 8);
            assert!(Label::decode(&broken).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn a_feature_that_is_not_known_is_refused_by_its_number() {
        let mut bytes = full().encode();
        bytes[44] = 4;
        reseal(&mut bytes);
        let error = Label::decode(&bytes).unwrap_err();
        assert_eq!(error, DecodeError::Incompatible(4 << 32));
        assert!(error.to_string().contains("0x400000000"), "{error}");
        let mut bytes = full().encode();
        bytes[8] = 2;
        reseal(&mut bytes);
        assert_eq!(Label::decode(&bytes), Err(DecodeError::Version(2)));
    }

    #[test]
    fn zones_are_a_feature_that_a_reader_must_know_and_must_make_sense() {
        let bytes = zoned().encode();
        assert_eq!(Input(&bytes).u64(40), 2);
        assert_eq!(Input(&full().encode()).u64(40), 1);
        for (at, value) in [(ZONES_AT, 1), (ZONES_AT + 2, 0), (ZONES_AT + 8, 1), (100, 2), (112, 15)] {
            let mut bytes = bytes.clone();
            bytes[at] = value;
            reseal(&mut bytes);
            assert!(matches!(Label::decode(&bytes), Err(DecodeError::Field { .. })), "byte {at}");
        }
        let mut without = superblock(&config(3, 1), 0).encode();
        without[40] = 2;
        reseal(&mut without);
        let error = Label::decode(&without).unwrap_err().to_string();
        assert_eq!(error, "superblock field zones: invalid value []");
    }

    #[test]
    fn choices_about_upkeep_share_the_zeroes_of_zones_and_old_superblocks_have_the_defaults() {
        let mut zoned = zoned();
        let plain = zoned.encode();
        assert_eq!(Input(&plain).u64(24), 0, "by default nothing is written");
        let scrub_window = Some(Window { start_minute: 1439, end_minute: 1 });
        zoned.table.maintenance = Maintenance { scrub_period_s: u32::MAX, scrub_window, read_errors: 0 };
        zoned.table.scrub_cancelled_s = u32::MAX;
        let bytes = zoned.encode();
        assert_eq!(Label::decode(&bytes), Ok(Label::Member(Box::new(zoned.clone()))));
        // A program without the feature writes zeroes here.
        for places in [436..440, 452..456, 468..472, 484..488] {
            assert!(plain[places].iter().all(|byte| *byte == 0));
        }
        let mut old = bytes.clone();
        old[24] = 0;
        reseal(&mut old);
        let Ok(Label::Member(found)) = Label::decode(&old) else { panic!() };
        assert_eq!((found.table.maintenance, found.table.scrub_cancelled_s), (Maintenance::default(), 0));
        assert_eq!(found.table.config, zoned.table.config);
        let mut beyond = bytes;
        beyond[SCRUB_WINDOW_AT] += 1;
        reseal(&mut beyond);
        let error = Label::decode(&beyond).unwrap_err().to_string();
        assert_eq!(error, "superblock field scrub window: invalid value 1440 to 1");
    }

    #[test]
    fn a_feature_that_only_a_writer_must_know_is_told() {
        let mut bytes = full().encode();
        bytes[32] = 8;
        reseal(&mut bytes);
        let Ok(Label::Member(superblock)) = Label::decode(&bytes) else { panic!() };
        assert_eq!(superblock.unknown_ro_compat, 8);
    }

    proptest! {
        #[test]
        fn any_bytes_are_decoded_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
            let _ = Label::decode(&bytes);
            let mut bytes = bytes;
            if bytes.len() >= 12 {
                bytes[..8].copy_from_slice(&MAGIC);
                bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
            }
            let _ = Label::decode(&bytes);
        }

        #[test]
        fn changed_bytes_under_a_right_checksum_are_refused_or_make_a_sound_superblock(
            is_zoned in any::<bool>(),
            changes in proptest::collection::vec((0..HEAD_BYTES + 24 * MEMBER_BYTES, any::<u8>()), 1..12),
        ) {
            let mut bytes = if is_zoned { zoned() } else { full() }.encode();
            changes.iter().for_each(|(at, value)| bytes[*at] = *value);
            reseal(&mut bytes);
            if let Ok(Label::Member(superblock)) = Label::decode(&bytes) {
                prop_assert!(superblock.table.config.check().is_ok());
                prop_assert!(superblock.layout.check(&superblock.table.config).is_ok());
                prop_assert_eq!(superblock.table.members.len(), superblock.table.config.geometry.members());
                prop_assert!(usize::from(superblock.slot) < superblock.table.members.len());
                let again = Label::Member(superblock.clone()).encode();
                prop_assert_eq!(Label::decode(&again), Ok(Label::Member(superblock)));
            }
        }
    }
}
