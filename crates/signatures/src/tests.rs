//! A device in memory with one signature at a time.

use super::*;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

const MIB: usize = 1 << 20;

/// A device that reads from memory, of which some blocks of 512 bytes are unreadable.
fn probe_of(bytes: &[u8], unreadable: &[u64]) -> Result<Findings, IoError> {
    let read = async |offset: u64, len: usize| {
        assert!(offset.is_multiple_of(512) && len.is_multiple_of(512) && len <= 64 << 10, "{offset} {len}");
        let range = offset..offset + len as u64;
        match unreadable.iter().any(|block| range.contains(block)) {
            true => Err(IoError::Medium),
            false => Ok(bytes[offset as usize..][..len].to_vec()),
        }
    };
    match pin!(probe(bytes.len() as u64, 512, read)).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(findings) => findings,
        Poll::Pending => unreachable!("memory does not wait"),
    }
}

fn device(capacity: usize, edits: &[(u64, &[u8])]) -> Vec<u8> {
    let mut bytes = vec![0; capacity];
    for (offset, magic) in edits {
        bytes[*offset as usize..][..magic.len()].copy_from_slice(magic);
    }
    bytes
}

fn found(capacity: usize, edits: &[(u64, &[u8])]) -> Vec<(&'static str, u64)> {
    let findings = probe_of(&device(capacity, edits), &[]).unwrap();
    findings.signatures.iter().map(|signature| (signature.kind, signature.offset)).collect()
}

/// Signatures by the formats' documents, not by the table: size of the device, offset, bytes, kind.
const FIXTURES: &[(usize, u64, &[u8], &str)] = &[
    (8 * MIB, 0x438, &[0x53, 0xef], "ext2/3/4"),
    (8 * MIB, 0, b"XFSB", "XFS"),
    (8 * MIB, 0x10040, b"_BHRfS_M", "Btrfs"),
    (
        8 * MIB,
        0x1018,
        &[0xc6, 0x85, 0x73, 0xf6, 0x66, 0xce, 0x90, 0xa9, 0xd9, 0x6a, 0x60, 0xcf, 0x80, 0x3d, 0xf7, 0xef],
        "bcachefs",
    ),
    (
        8 * MIB,
        0x1018,
        &[0xc6, 0x85, 0x73, 0xf6, 0x4e, 0x1a, 0x45, 0xca, 0x82, 0x65, 0xf5, 0x7f, 0x48, 0xba, 0x6d, 0x81],
        "bcache",
    ),
    (8 * MIB, 0x400, &[0x10, 0x20, 0xf5, 0xf2], "F2FS"),
    // Uberblocks in each of the four labels of a vdev, of either byte order.
    (8 * MIB, 0x20000, &[0x0c, 0xb1, 0xba, 0, 0, 0, 0, 0], "ZFS"),
    (8 * MIB, 0x40000 + 0x3fc00, &[0, 0, 0, 0, 0, 0xba, 0xb1, 0x0c], "ZFS"),
    (8 * MIB, 0x780000 + 0x20400, &[0x0c, 0xb1, 0xba, 0, 0, 0, 0, 0], "ZFS"),
    (8 * MIB + 4096, 0x7c0000 + 0x20000, &[0x0c, 0xb1, 0xba, 0, 0, 0, 0, 0], "ZFS"),
    (8 * MIB, 3, b"NTFS    ", "NTFS"),
    (8 * MIB, 3, b"EXFAT   ", "exFAT"),
    (8 * MIB, 54, b"FAT12   ", "FAT"),
    (8 * MIB, 54, b"FAT16   ", "FAT"),
    (8 * MIB, 82, b"FAT32   ", "FAT"),
    // MS-DOS 3.3: a jump and a parameter block without a name.
    (
        8 * MIB,
        0,
        &[
            0xeb, 0x34, 0x90, b'M', b'S', b'D', b'O', b'S', b'3', b'.', b'3', 0, 2, 2, 1, 0, 2, 112, 0, 160,
            5, 0xf9,
        ],
        "FAT",
    ),
    (8 * MIB, 1024, &[b'H', b'+', 0, 4], "HFS+"),
    (8 * MIB, 1024, b"BD", "HFS"),
    (8 * MIB, 32, b"NXSB", "APFS"),
    (8 * MIB, 0x10034, b"ReIsEr2Fs", "ReiserFS"),
    (8 * MIB, 0x8000, b"JFS1", "JFS"),
    (8 * MIB, 0x406, &[0x34, 0x34], "NILFS2"),
    (8 * MIB + 512, 0x7ff006, &[0x34, 0x34], "NILFS2, second superblock"),
    (8 * MIB, 0, b"hsqs", "SquashFS"),
    (8 * MIB, 0x400, &[0xe2, 0xe1, 0xf5, 0xe0], "EROFS"),
    (8 * MIB, 0x8001, b"CD001", "ISO 9660"),
    (8 * MIB, 0x8801, b"NSR03", "UDF"),
    (8 * MIB, 0x9001, b"NSR02", "UDF"),
    (8 * MIB, 0x2000 + 1372, &[0x54, 0x19, 0x01, 0], "UFS"),
    (8 * MIB, 4086, b"SWAPSPACE2", "swap space"),
    (8 * MIB, 65526, b"SWAPSPACE2", "swap space"),
    (8 * MIB, 512, b"EFI PART", "GPT"),
    (8 * MIB, 4096, b"EFI PART", "GPT"),
    (8 * MIB, 0x7ffe00, b"EFI PART", "GPT, second copy"),
    (8 * MIB, 0x7ff000, b"EFI PART", "GPT, second copy"),
    (8 * MIB, 0, b"LABELONE", "LVM physical volume"),
    (8 * MIB, 512, b"LABELONE", "LVM physical volume"),
    (8 * MIB, 1024, b"LABELONE", "LVM physical volume"),
    (8 * MIB, 1536, b"LABELONE", "LVM physical volume"),
    (8 * MIB, 0x7f0000, &[0xfc, 0x4e, 0x2b, 0xa9], "Linux MD 0.90"),
    (8 * MIB, 0x7f0000, &[0xa9, 0x2b, 0x4e, 0xfc], "Linux MD 0.90"),
    (8 * MIB + 4096, 0x7f0000, &[0xfc, 0x4e, 0x2b, 0xa9], "Linux MD 0.90"),
    (8 * MIB, 0x7fe000, &[0xfc, 0x4e, 0x2b, 0xa9], "Linux MD 1.0"),
    (8 * MIB + 512, 0x7fe000, &[0xfc, 0x4e, 0x2b, 0xa9], "Linux MD 1.0"),
    (8 * MIB, 0, &[0xfc, 0x4e, 0x2b, 0xa9], "Linux MD 1.1"),
    (8 * MIB, 4096, &[0xfc, 0x4e, 0x2b, 0xa9], "Linux MD 1.2"),
    (8 * MIB, 0x7ffe00, &[0xde, 0x11, 0xde, 0x11], "DDF RAID"),
    (8 * MIB, 0x7ffc00, b"Intel Raid ISM Cfg Sig. 1.0.00", "Intel RAID"),
    (8 * MIB, 0, b"LUKS\xba\xbe\0\x02", "LUKS"),
    (8 * MIB, 0x4000, b"SKUL\xba\xbe", "LUKS header, second copy"),
    (8 * MIB, 0x8000, b"SKUL\xba\xbe", "LUKS header, second copy"),
    (8 * MIB, 0x40_0000, b"SKUL\xba\xbe", "LUKS header, second copy"),
    (8 * MIB, 3, b"-FVE-FS-", "BitLocker"),
    (8 * MIB, 0, b"dmvdo001", "VDO"),
    (8 * MIB, 0, b"bluestore block device\n", "BlueStore"),
    (8 * MIB, 0x7ff000 + 60, &[0x83, 0x74, 0x02, 0x6b], "DRBD"),
    (8 * MIB, 0x7ff000 + 60, &[0x83, 0x74, 0x02, 0x6d], "DRBD"),
    (8 * MIB, 0, b"integrt\0", "dm-integrity"),
    (8 * MIB, 32, b"ORCLDISK", "Oracle ASM"),
    (8 * MIB, 0x1000, b"FrstRaid", "Freestone array"),
    (8 * MIB, 0x4000, b"FrstRaid", "Freestone array"),
    (8 * MIB + 512, 0x7fa000, b"FrstRaid", "Freestone array"),
    (8 * MIB + 512, 0x7fd000, b"FrstRaid", "Freestone array"),
    (8 * MIB, 0x10000, b"FsPool\0\0", "Freestone pool"),
    (8 * MIB, 0x200000, b"FsPool\0\0", "Freestone pool"),
    (8 * MIB, 0, b"QFI\xfb\0\0\0\x03", "qcow image"),
    (8 * MIB, 0, b"QFI\xfb\0\0\0\x01", "qcow image"),
    (8 * MIB, 0, b"QED\0", "QED image"),
    (8 * MIB, 0, b"KDMV", "VMDK image"),
    (8 * MIB, 0, b"COWD", "VMDK image"),
    (8 * MIB, 0, b"# Disk DescriptorFile\nversion=1\n", "VMDK image"),
    (8 * MIB, 0, b"vhdxfile", "VHDX image"),
    (8 * MIB, 0, b"conectix", "VHD image"),
    (8 * MIB, 0x7ffe00, b"conectix", "VHD image"),
    (8 * MIB, 64, &[0x7f, 0x10, 0xda, 0xbe], "VDI image"),
    (8 * MIB, 0, b"WithoutFreeSpace", "Parallels image"),
    (8 * MIB, 0, b"WithouFreSpacExt", "Parallels image"),
];

#[test]
fn every_format_is_found_by_the_bytes_of_its_document() {
    for (capacity, offset, magic, kind) in FIXTURES {
        let found = found(*capacity, &[(*offset, magic)]);
        assert_eq!(found.iter().map(|(kind, _)| *kind).collect::<Vec<_>>(), [*kind], "{kind} at {offset}");
        let at = found[0].1;
        assert!(at == *offset || *kind == "FAT", "{kind}: {at}, not {offset}");
    }
}

#[test]
fn every_place_of_every_rule_is_read_and_reported() {
    for rule in RULES {
        let table::Test::Is(magic) = rule.test else { continue };
        for range in rule.ranges(8 * MIB as u64) {
            let found = found(8 * MIB, &[(range.start, magic)]);
            assert!(found.contains(&(rule.kind, range.start)), "{} at {}: {found:?}", rule.kind, range.start);
        }
    }
}

#[test]
fn the_same_bytes_elsewhere_are_no_signature() {
    for (capacity, offset, magic, kind) in FIXTURES {
        let elsewhere = (*capacity as u64 / 2) + offset % 4096 + 13;
        assert_eq!(found(*capacity, &[(elsewhere, magic)]), [], "{kind}");
    }
}

#[test]
fn an_mbr_counts_by_its_partitions_and_a_boot_sector_by_its_code() {
    let entry = [0x80, 0, 0, 0, 0x83, 0, 0, 0, 0, 8, 0, 0, 0, 8, 0, 0];
    let boot: (u64, &[u8]) = (510, &[0x55, 0xaa]);
    assert_eq!(found(MIB, &[boot, (446, &entry)]), [("partition table (MBR)", 0)]);
    assert_eq!(found(MIB, &[boot, (494, &entry)]), [("partition table (MBR)", 0)]);
    assert_eq!(found(MIB, &[(446, &entry)]), []);
    // An empty table: the boot signature and the disk's number.
    assert_eq!(found(MIB, &[boot, (440, &[1, 2, 3, 4])]), []);
    assert_eq!(found(MIB, &[boot, (0, &[0xfa, 0x31, 0xc0])]), [("boot sector", 0)]);
    // Boot code of a file system is that of the file system.
    assert_eq!(found(MIB, &[boot, (0, b"\xeb\x52\x90NTFS    ")]), [("NTFS", 3)]);
}

#[test]
fn a_sun_label_counts_with_its_checksum() {
    let magic: (u64, &[u8]) = (508, &[0xda, 0xbe]);
    assert_eq!(found(MIB, &[magic]), []);
    assert_eq!(found(MIB, &[magic, (510, &[0xda, 0xbe])]), [("Sun disk label", 0)]);
}

#[test]
fn an_unreadable_block_counts_where_a_signature_could_be() {
    let bytes = device(8 * MIB, &[(1080, &[0x53, 0xef])]);
    let findings = probe_of(&bytes, &[64 << 10, (8 << 20) - 512]).unwrap();
    assert_eq!(findings.signatures, [Signature { kind: "ext2/3/4", offset: 1080 }]);
    assert_eq!(findings.unreadable, [64 << 10, (8 << 20) - 4096]);
    assert_eq!(
        findings.to_string(),
        "ext2/3/4 at byte 1080, an unreadable block at byte 65536, an unreadable block at byte 8384512"
    );
    // Between the places: in the middle of the device, and in a gap that is read along.
    assert!(probe_of(&vec![0; 8 * MIB], &[6 << 20, 20 << 10]).unwrap().is_empty());
}

#[test]
fn a_message_names_some_unreadable_blocks_and_counts_the_rest() {
    let all: Vec<u64> = (0..64).map(|block| block * 512).collect();
    let text = probe_of(&vec![0; MIB], &all).unwrap().to_string();
    assert!(text.starts_with("an unreadable block at byte 0, an unreadable block at byte 4096, "), "{text}");
    assert!(text.ends_with("3 more unreadable blocks"), "{text}");
}

#[test]
fn a_device_that_is_gone_is_an_error() {
    let read = async |_, _| Err(IoError::DeviceGone);
    let result = pin!(probe(1 << 20, 512, read)).poll(&mut Context::from_waker(Waker::noop()));
    assert_eq!(result, Poll::Ready(Err(IoError::DeviceGone)));
}

#[test]
fn devices_of_any_size_can_be_looked_at() {
    for capacity in [0, 512, 1024, 4096, 4608, 12 << 10, 70_144, 256 << 10, 300 << 10, 1 << 20] {
        assert!(probe_of(&vec![0; capacity], &[]).unwrap().is_empty(), "{capacity}");
    }
}
