//! What a device holds that somebody might miss: well-known marks of partition tables, file systems, volume
//! managers and images in its first and last blocks.

/// How much of the device's start has to be read.
pub const FIRST_BYTES: usize = 136 << 10;
/// How much of the device's end has to be read.
pub const LAST_BYTES: usize = 136 << 10;

/// Marks at the start: (what it says, offset, bytes).
const AT_START: &[(&str, usize, &[u8])] = &[
    ("a GPT partition table", 512, b"EFI PART"),
    ("a GPT partition table", 4096, b"EFI PART"),
    ("an ext2/3/4 file system", 1024 + 56, &[0x53, 0xef]),
    ("an XFS file system", 0, b"XFSB"),
    ("a Btrfs file system", 0x1_0040, b"_BHRfS_M"),
    ("an F2FS file system", 1024, &[0x10, 0x20, 0xf5, 0xf2]),
    ("an NTFS file system", 3, b"NTFS    "),
    ("an exFAT file system", 3, b"EXFAT   "),
    ("a SquashFS file system", 0, b"hsqs"),
    ("an ISO 9660 file system", 0x8001, b"CD001"),
    ("a bcachefs file system", 4096 + 24, &[0xc6, 0x85, 0x73, 0xf6, 0x66, 0xce, 0x90, 0xa9]),
    ("a bcache device", 4096 + 24, &[0xc6, 0x85, 0x73, 0xf6, 0x4e, 0x1a, 0x45, 0xca]),
    ("a Freestone pool", 64 << 10, b"FsPool\0\0"),
    ("a LUKS volume", 0, b"LUKS\xba\xbe"),
    ("an LVM physical volume", 512, b"LABELONE"),
    ("a swap area", 4096 - 10, b"SWAPSPACE2"),
    ("a Linux RAID member", 0, &[0xfc, 0x4e, 0x2b, 0xa9]),
    ("a Linux RAID member", 4096, &[0xfc, 0x4e, 0x2b, 0xa9]),
    ("a ZFS pool member", 128 << 10, &[0x0c, 0xb1, 0xba, 0x00]),
    ("a qcow2 image", 0, b"QFI\xfb"),
    ("a VMDK image", 0, b"KDMV"),
    ("a VHDX image", 0, b"vhdxfile"),
    ("a partition table or boot sector", 510, &[0x55, 0xaa]),
];

/// Marks at the end: (what it says, bytes before the end, bytes).
const AT_END: &[(&str, usize, &[u8])] = &[
    ("a GPT partition table", 512, b"EFI PART"),
    ("a GPT partition table", 4096, b"EFI PART"),
    ("a Linux RAID member", 8 << 10, &[0xfc, 0x4e, 0x2b, 0xa9]),
    ("a Linux RAID member", 64 << 10, &[0xfc, 0x4e, 0x2b, 0xa9]),
    ("a Linux RAID member", 128 << 10, &[0xfc, 0x4e, 0x2b, 0xa9]),
];

/// What the device seems to hold, given its first and last bytes (less than the constants where the device
/// is smaller).
pub fn find(first: &[u8], last: &[u8]) -> Option<&'static str> {
    let at_start = AT_START.iter().find(|(_, offset, mark)| is_at(first, *offset, mark));
    let at_end = || {
        AT_END
            .iter()
            .find(|(_, before, mark)| last.len().checked_sub(*before).is_some_and(|at| is_at(last, at, mark)))
    };
    at_start.or_else(at_end).map(|(what, ..)| *what)
}

fn is_at(bytes: &[u8], offset: usize, mark: &[u8]) -> bool {
    bytes.get(offset..).is_some_and(|rest| rest.starts_with(mark))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mark_lies_in_what_is_read_and_is_found() {
        for (what, offset, mark) in AT_START {
            let mut first = vec![0; FIRST_BYTES];
            first[*offset..offset + mark.len()].copy_from_slice(mark);
            assert_eq!(find(&first, &[]), Some(*what));
        }
        for (what, before, mark) in AT_END {
            let mut last = vec![0; LAST_BYTES];
            let at = LAST_BYTES - before;
            last[at..at + mark.len()].copy_from_slice(mark);
            assert_eq!(find(&[], &last), Some(*what));
        }
    }

    #[test]
    fn an_empty_device_holds_nothing_whatever_its_size() {
        for len in [0, 1, 511, 512, 4096, FIRST_BYTES] {
            assert_eq!(find(&vec![0; len], &vec![0; len]), None);
        }
    }
}
