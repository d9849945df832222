//! What a device holds already: signatures of file systems, partition tables and other arrays, at their places near the
//! device's ends.
//!
//! Sources: the headers of the formats themselves (Linux `uapi/linux/raid/md_p.h`, the ext4, XFS, Btrfs, F2FS, LUKS and
//! ZFS on-disk formats, the UEFI specification for GPT, SNIA DDF 2.0). Not every format that exists: those that someone
//! would miss.

use super::io;
use super::layout::Layout;
use super::superblock::MAGIC;
use block::{Channel, IoError, Limits};

/// A signature that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Signature {
    /// What it belongs to.
    pub kind: &'static str,
    /// Where, in bytes from the device's beginning.
    pub offset: u64,
}

impl std::fmt::Display for Signature {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} at byte {}", self.kind, self.offset)
    }
}

/// Bytes at the beginning that are looked at: up to the first ZFS label's end.
const HEAD_BYTES: u64 = 256 << 10;
/// Bytes at the end: two ZFS labels, and Linux MD's superblock 0.90.
const TAIL_BYTES: u64 = 640 << 10;

/// Signatures at fixed places from the beginning.
const FIXED: &[(&str, u64, &[u8])] = &[
    ("XFS", 0, b"XFSB"),
    ("LUKS", 0, b"LUKS\xba\xbe"),
    ("LUKS header, second copy", 16384, b"SKUL\xba\xbe"),
    ("BlueStore", 0, b"bluestore block device"),
    ("VDO", 0, b"dmvdo001"),
    ("NTFS", 3, b"NTFS    "),
    ("exFAT", 3, b"EXFAT   "),
    ("FAT", 54, b"FAT"),
    ("FAT", 82, b"FAT32"),
    ("LVM physical volume", 0, b"LABELONE"),
    ("LVM physical volume", 512, b"LABELONE"),
    ("LVM physical volume", 1024, b"LABELONE"),
    ("LVM physical volume", 1536, b"LABELONE"),
    ("GPT", 512, b"EFI PART"),
    ("GPT", 4096, b"EFI PART"),
    ("F2FS", 1024, b"\x10\x20\xf5\xf2"),
    ("ext2/3/4", 1080, b"\x53\xef"),
    ("swap space", 4086, b"SWAPSPACE2"),
    ("swap space", 4086, b"SWAP-SPACE"),
    ("bcache", 4120, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"),
    ("ISO 9660", 32769, b"CD001"),
    ("Freestone pool", 64 << 10, b"FsPool\0\0"),
    ("Btrfs", 65600, b"_BHRfS_M"),
    ("Linux MD 1.1", 0, &MD),
    ("Linux MD 1.2", 4096, &MD),
];

/// `MD_SB_MAGIC`, little-endian.
const MD: [u8; 4] = 0xa92b_4efc_u32.to_le_bytes();
const ZFS: u64 = 0x00ba_b10c;

/// Looks for signatures of others and of our own.
///
/// # Errors
/// When the device's ends cannot be read.
pub async fn probe(channel: &dyn Channel, limits: &Limits) -> Result<Vec<Signature>, IoError> {
    let capacity = limits.capacity;
    let head_bytes = capacity.min(HEAD_BYTES);
    let tail_at = capacity.saturating_sub(TAIL_BYTES) & !4095;
    let ends = Ends {
        capacity,
        head: io::read_long(channel, 0, head_bytes as usize).await?,
        tail_at,
        tail: io::read_long(channel, tail_at, (capacity - tail_at) as usize).await?,
    };
    Ok(ends.signatures())
}

/// Both ends of a device.
struct Ends {
    capacity: u64,
    head: Vec<u8>,
    tail_at: u64,
    tail: Vec<u8>,
}

impl Ends {
    fn signatures(&self) -> Vec<Signature> {
        let mut found: Vec<Signature> = Vec::new();
        let mut note = |kind, offset, is_there| {
            if is_there && !found.iter().any(|other: &Signature| other.kind == kind) {
                found.push(Signature { kind, offset });
            }
        };
        for offset in Layout::superblocks_at(self.capacity).into_iter().flatten() {
            note("Freestone array", offset, self.has(offset, &MAGIC));
        }
        for (kind, offset, magic) in FIXED {
            note(kind, *offset, self.has(*offset, magic));
        }
        let sectors = self.capacity / 512;
        // Their distance from the end, as md(4) rounds it.
        let md_0 = (sectors & !127).saturating_sub(128) * 512;
        let md_10 = (sectors.saturating_sub(16) & !7) * 512;
        note("Linux MD 0.90", md_0, self.has(md_0, &MD));
        note("Linux MD 1.0", md_10, self.has(md_10, &MD));
        for block_size in [512, 4096] {
            let offset = self.capacity.saturating_sub(block_size);
            note("GPT, second copy", offset, self.has(offset, b"EFI PART"));
        }
        let last = self.capacity.saturating_sub(512);
        note("DDF RAID", last, self.has(last, &[0xde, 0x11, 0xde, 0x11]));
        let imsm = self.capacity.saturating_sub(1024);
        note("Intel RAID", imsm, self.has(imsm, b"Intel Raid ISM Cfg Sig. "));
        let zfs = self.zfs();
        note("ZFS", zfs.unwrap_or(0), zfs.is_some());
        note("partition table (MBR)", 510, self.is_mbr());
        found
    }

    /// Bytes of the device that lie in one of its ends.
    fn at(&self, offset: u64, len: usize) -> Option<&[u8]> {
        let part = |bytes: &'_ [u8], from: u64| -> Option<std::ops::Range<usize>> {
            let start = usize::try_from(offset.checked_sub(from)?).ok()?;
            let end = start.checked_add(len)?;
            (end <= bytes.len()).then_some(start..end)
        };
        match part(&self.head, 0) {
            Some(range) => Some(&self.head[range]),
            None => part(&self.tail, self.tail_at).map(|range| &self.tail[range]),
        }
    }

    fn has(&self, offset: u64, magic: &[u8]) -> bool {
        self.at(offset, magic.len()) == Some(magic)
    }

    /// An uberblock in one of the four labels of 256 KiB: 128 KiB into the label, of whichever byte order.
    fn zfs(&self) -> Option<u64> {
        let end = self.capacity & !((256 << 10) - 1);
        let labels = [0, end.saturating_sub(512 << 10), end.saturating_sub(256 << 10)];
        let blocks = labels.into_iter().flat_map(|label| (128..256).map(move |block| label + (block << 10)));
        blocks
            .into_iter()
            .find(|offset| self.has(*offset, &ZFS.to_le_bytes()) || self.has(*offset, &ZFS.to_be_bytes()))
    }

    /// The boot signature with a partition entry in use. File systems have the signature too, but not the entries.
    fn is_mbr(&self) -> bool {
        let entry_in_use = |i: u64| {
            let entry = self.at(446 + 16 * i, 16);
            entry.is_some_and(|entry| entry[0] & 0x7f == 0 && entry[4] != 0 && entry[12..] != [0; 4])
        };
        self.has(510, &[0x55, 0xaa]) && (0..4).any(entry_in_use)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(capacity: usize, edits: &[(u64, &[u8])]) -> Ends {
        let mut bytes = vec![0; capacity];
        for (offset, magic) in edits {
            bytes[*offset as usize..*offset as usize + magic.len()].copy_from_slice(magic);
        }
        let (head, tail_at) =
            (capacity.min(HEAD_BYTES as usize), capacity.saturating_sub(TAIL_BYTES as usize) & !4095);
        Ends {
            capacity: capacity as u64,
            head: bytes[..head].to_vec(),
            tail_at: tail_at as u64,
            tail: bytes[tail_at..].to_vec(),
        }
    }

    fn kinds(capacity: usize, edits: &[(u64, &[u8])]) -> Vec<&'static str> {
        ends(capacity, edits).signatures().into_iter().map(|signature| signature.kind).collect()
    }

    #[test]
    fn every_signature_is_found_where_it_belongs() {
        for (kind, offset, magic) in FIXED {
            assert_eq!(kinds(4 << 20, &[(*offset, magic)]), [*kind]);
            assert_eq!(kinds(4 << 20, &[(*offset + 8192 * 3 + 5, magic)]), [""; 0], "{kind}");
        }
        assert_eq!(kinds(4 << 20, &[]), [""; 0]);
    }

    #[test]
    fn signatures_at_the_end_follow_the_size() {
        let mib = 1u64 << 20;
        for (size, offset, magic, kind) in [
            (4 * mib, 4 * mib - 65536, &MD[..], "Linux MD 0.90"),
            (4 * mib + 4096, 4 * mib - 65536, &MD, "Linux MD 0.90"),
            (4 * mib + 512, 4 * mib - 8192, &MD, "Linux MD 1.0"),
            (4 * mib, 4 * mib - 512, b"EFI PART", "GPT, second copy"),
            (4 * mib, 4 * mib - 4096, b"EFI PART", "GPT, second copy"),
            (4 * mib, 4 * mib - 512, &[0xde, 0x11, 0xde, 0x11], "DDF RAID"),
            (4 * mib, 4 * mib - 1024, b"Intel Raid ISM Cfg Sig. ", "Intel RAID"),
            (4 * mib, 130 << 10, &ZFS.to_be_bytes(), "ZFS"),
            (4 * mib + 512, (4 * mib) - (384 << 10) + 1024, &ZFS.to_le_bytes(), "ZFS"),
            (4 * mib, 4 * mib - 24576, &MAGIC, "Freestone array"),
        ] {
            assert_eq!(kinds(size as usize, &[(offset, magic)]), [kind], "{offset}");
        }
    }

    #[test]
    fn a_boot_sector_is_a_partition_table_when_it_has_partitions() {
        let entry = [0x80, 0, 0, 0, 0x83, 0, 0, 0, 0, 8, 0, 0, 0, 8, 0, 0];
        assert_eq!(kinds(1 << 20, &[(510, &[0x55, 0xaa]), (446, &entry)]), ["partition table (MBR)"]);
        assert_eq!(kinds(1 << 20, &[(510, &[0x55, 0xaa])]), [""; 0]);
    }

    #[test]
    fn the_smallest_devices_can_be_looked_at() {
        for capacity in [0, 512, 4096, 70000 / 512 * 512] {
            kinds(capacity, &[]);
        }
    }
}
