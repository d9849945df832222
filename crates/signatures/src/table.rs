//! The table: every format that is looked for, and its places.
//!
//! Sources: the formats' own headers and specifications. These are Linux `uapi/linux` and
//! `drivers/md`, UEFI for GPT, ECMA-119 and ECMA-167, SNIA DDF 2.0, and those of QEMU's image
//! formats, VMDK, VHD and VHDX. The choice follows `wipefs` of util-linux.
//! `docs/on-disk-formats.md` has the places of Freestone's own.

use crate::judge::{self, SECTOR};
use std::ops::Range;

/// A format: what is at which places.
pub struct Rule {
    /// Its name.
    pub kind: &'static str,
    places: Places,
    /// The test of its content.
    pub test: Test,
    /// It counts only where no other format is found.
    pub is_last_resort: bool,
}

/// Offsets in bytes.
enum Places {
    FromStart(&'static [u64]),
    BeforeEnd(&'static [u64]),
    /// By the device's capacity in bytes.
    By(fn(u64) -> Vec<u64>),
}

/// Required content of a place.
pub enum Test {
    /// Exactly these bytes.
    Is(&'static [u8]),
    /// A sector with fields that fit.
    Sector(fn(&[u8]) -> bool),
}

impl Test {
    /// Whether `bytes`, as many as [`Test::len`] says, pass.
    pub fn holds(&self, bytes: &[u8]) -> bool {
        match self {
            Test::Is(magic) => bytes == *magic,
            Test::Sector(judge) => judge(bytes),
        }
    }

    fn len(&self) -> u64 {
        match self {
            Test::Is(magic) => magic.len() as u64,
            Test::Sector(_) => SECTOR as u64,
        }
    }
}

impl Rule {
    /// The ranges to look at on a device of `capacity` bytes, without those that do not lie on it.
    pub fn ranges(&self, capacity: u64) -> Vec<Range<u64>> {
        let offsets = match self.places {
            Places::FromStart(offsets) => offsets.to_vec(),
            Places::BeforeEnd(offsets) => {
                offsets.iter().filter_map(|back| capacity.checked_sub(*back)).collect()
            }
            Places::By(places) => places(capacity),
        };
        let range = |offset: u64| offset..offset.saturating_add(self.test.len());
        offsets.into_iter().map(range).filter(|range| range.end <= capacity).collect()
    }
}

const fn start(kind: &'static str, offsets: &'static [u64], magic: &'static [u8]) -> Rule {
    Rule { kind, places: Places::FromStart(offsets), test: Test::Is(magic), is_last_resort: false }
}

const fn end(kind: &'static str, back: &'static [u64], magic: &'static [u8]) -> Rule {
    Rule { kind, places: Places::BeforeEnd(back), test: Test::Is(magic), is_last_resort: false }
}

const fn by(kind: &'static str, places: fn(u64) -> Vec<u64>, magic: &'static [u8]) -> Rule {
    Rule { kind, places: Places::By(places), test: Test::Is(magic), is_last_resort: false }
}

const fn first_sector(kind: &'static str, judge: fn(&[u8]) -> bool) -> Rule {
    Rule { kind, places: Places::FromStart(&[0]), test: Test::Sector(judge), is_last_resort: false }
}

/// First bytes of every superblock of a member or spare of a Freestone array.
pub const FREESTONE_ARRAY: &[u8; 8] = b"FrstRaid";
/// First bytes of every copy of a Freestone pool's table.
pub const FREESTONE_POOL: &[u8; 8] = b"FsPool\0\0";

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// `MD_SB_MAGIC`. Superblocks 0.90 have the byte order of the machine that wrote them.
const MD: &[u8] = &0xa92b_4efc_u32.to_le_bytes();
const MD_BIG: &[u8] = &0xa92b_4efc_u32.to_be_bytes();
const ZFS: u64 = 0x00ba_b10c;
const BCACHE: &[u8] = b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81";
const BCACHEFS: &[u8] = b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef";
/// The end of the first page, for pages of 4 to 64 KiB, less the signature of ten bytes.
const SWAP: &[u64] = &[4086, 8182, 16374, 32758, 65526];
/// `struct fs.fs_magic`, in the four places of a UFS superblock.
const UFS: &[u64] = &[1372, 8 * KIB + 1372, 64 * KIB + 1372, 256 * KIB + 1372];
/// Places of Promise's metadata: bytes before the end.
const PROMISE: &[u64] = &[
    16 * 512,
    63 * 512,
    255 * 512,
    256 * 512,
    399 * 512,
    591 * 512,
    675 * 512,
    735 * 512,
    911 * 512,
    951 * 512,
    974 * 512,
    991 * 512,
    3087 * 512,
];
/// A second LUKS2 header follows the first one, which has one of these sizes.
const LUKS_SECOND: &[u64] =
    &[16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB];

/// Every rule. Kinds may repeat: one finding a kind is reported.
pub const RULES: &[Rule] = &[
    by("Freestone array", freestone_array, FREESTONE_ARRAY),
    start("Freestone pool", &[64 * KIB, MIB, 2 * MIB, 3 * MIB], FREESTONE_POOL),
    // File systems.
    start("ext2/3/4", &[1080], b"\x53\xef"),
    start("XFS", &[0], b"XFSB"),
    start("XFS log", &[0], b"\xfe\xed\xba\xbe"),
    start("Btrfs", &[64 * KIB + 64], b"_BHRfS_M"),
    start("bcachefs", &[3584, 4120], BCACHEFS),
    start("F2FS", &[1024], b"\x10\x20\xf5\xf2"),
    by("ZFS", zfs_uberblocks, &ZFS.to_le_bytes()),
    by("ZFS", zfs_uberblocks, &ZFS.to_be_bytes()),
    start("NTFS", &[3], b"NTFS    "),
    start("exFAT", &[3], b"EXFAT   "),
    start("ReFS", &[3], b"ReFS\0"),
    start("FAT", &[54], b"FAT"),
    start("FAT", &[82], b"FAT32"),
    first_sector("FAT", judge::is_fat),
    start("HFS", &[1024], b"BD"),
    start("HFS+", &[1024], b"H+\0\x04"),
    start("HFS+", &[1024], b"HX\0\x05"),
    start("APFS", &[32], b"NXSB"),
    start("ReiserFS", &[8 * KIB + 52, 64 * KIB + 52], b"ReIsEr"),
    start("Reiser4", &[64 * KIB], b"ReIsEr4"),
    start("JFS", &[32 * KIB], b"JFS1"),
    start("NILFS2", &[1030], b"\x34\x34"),
    by("NILFS2, second superblock", nilfs_second, b"\x34\x34"),
    start("SquashFS", &[0], b"hsqs"),
    start("SquashFS", &[0], b"sqsh"),
    start("EROFS", &[1024], b"\xe2\xe1\xf5\xe0"),
    start("cramfs", &[0, 512], b"\x45\x3d\xcd\x28"),
    start("romfs", &[0], b"-rom1fs-"),
    start("ISO 9660", &[32 * KIB + 1], b"CD001"),
    start("ISO 9660", &[32 * KIB + 9], b"CDROM"),
    by("UDF", udf_descriptors, b"NSR0"),
    start("UFS", UFS, &0x0001_1954_u32.to_le_bytes()),
    start("UFS", UFS, &0x0001_1954_u32.to_be_bytes()),
    start("UFS", UFS, &0x1954_0119_u32.to_le_bytes()),
    start("UFS", UFS, &0x1954_0119_u32.to_be_bytes()),
    start("GFS", &[64 * KIB], b"\x01\x16\x19\x70"),
    start("OCFS2", &[1024, 2048, 4096, 8192], b"OCFSV2"),
    start("VMFS", &[2 * MIB], b"\x5e\xf1\xab\x2f"),
    start("VMFS volume", &[MIB], b"\x0d\xd0\x01\xc0"),
    start("VxFS", &[1024], b"\xf5\xfc\x01\xa5"),
    start("BeFS", &[544], b"BFS1"),
    start("BeFS", &[544], b"1SFB"),
    start("HPFS", &[8192], b"\x49\xe8\x95\xf9"),
    start("zonefs", &[0], b"SFOZ"),
    start("swap space", SWAP, b"SWAPSPACE2"),
    start("swap space", SWAP, b"SWAP-SPACE"),
    start("hibernation image", SWAP, b"S1SUSPEND"),
    start("hibernation image", SWAP, b"S2SUSPEND"),
    start("hibernation image", SWAP, b"ULSUSPEND"),
    start("hibernation image", SWAP, b"LINHIB0001"),
    // Partition tables.
    start("GPT", &[512, 4096], b"EFI PART"),
    end("GPT, second copy", &[512, 4096], b"EFI PART"),
    start("Apple partition map", &[512], b"PM\0\0"),
    start("BSD disk label", &[512], b"\x57\x45\x56\x82"),
    start("SGI disk label", &[0], b"\x0b\xe5\xa9\x41"),
    start("Windows dynamic disk", &[3072], b"PRIVHEAD"),
    first_sector("Sun disk label", judge::is_sun_label),
    first_sector("partition table (MBR)", judge::is_partitioned),
    // Arrays, volume managers, caches and encryption.
    start("LVM physical volume", &[0, 512, 1024, 1536], b"LABELONE"),
    start("Stratis", &[516, 4612], b"!Stra0tis\x86\xff\x02^\x41rh"),
    by("Linux MD 0.90", md_0_90, MD),
    by("Linux MD 0.90", md_0_90, MD_BIG),
    by("Linux MD 1.0", md_1_0, MD),
    start("Linux MD 1.1", &[0], MD),
    start("Linux MD 1.2", &[4096], MD),
    end("DDF RAID", &[512, 4096, 257 * 512], b"\xde\x11\xde\x11"),
    end("Intel RAID", &[1024, 8192], b"Intel Raid ISM Cfg Sig. "),
    end("LSI RAID", &[512], b"$XIDE$"),
    end("NVIDIA RAID", &[1024], b"NVIDIA"),
    end("Promise RAID", PROMISE, b"Promise Technology, Inc."),
    start("LUKS", &[0], b"LUKS\xba\xbe"),
    start("LUKS header, second copy", LUKS_SECOND, b"SKUL\xba\xbe"),
    start("BitLocker", &[3], b"-FVE-FS-"),
    start("BitLocker", &[424], b"\x3b\xd6\x67\x49\x29\x2e\xd8\x4a\x83\x99\xf6\xa3\x39\xe3\xd0\x01"),
    start("VDO", &[0], b"dmvdo001"),
    start("bcache", &[4120], BCACHE),
    start("dm-integrity", &[0], b"integrt\0"),
    start("dm-verity", &[0], b"verity\0\0"),
    start("dm-snapshot", &[0], b"SnAp"),
    by("DRBD", drbd, b"\x83\x74\x02\x6b"),
    by("DRBD", drbd, b"\x83\x74\x02\x6c"),
    by("DRBD", drbd, b"\x83\x74\x02\x6d"),
    start("BlueStore", &[0], b"bluestore block device"),
    start("Oracle ASM", &[32], b"ORCLDISK"),
    start("SPDK blobstore", &[0], b"SPDKBLOB"),
    start("SPDK RAID", &[0], b"SPDKRAID"),
    // Disk images.
    start("qcow image", &[0], b"QFI\xfb"),
    start("QED image", &[0], b"QED\0"),
    start("VMDK image", &[0], b"KDMV"),
    start("VMDK image", &[0], b"COWD"),
    start("VMDK image", &[0], b"# Disk DescriptorFile"),
    start("VHDX image", &[0], b"vhdxfile"),
    start("VHD image", &[0], b"conectix"),
    end("VHD image", &[512, 511], b"conectix"),
    start("VDI image", &[64], b"\x7f\x10\xda\xbe"),
    start("Parallels image", &[0], b"WithoutFreeSpace"),
    start("Parallels image", &[0], b"WithouFreSpacExt"),
    start("Bochs image", &[0], b"Bochs Virtual HD Image"),
    end("Apple disk image", &[512], b"koly"),
    Rule { is_last_resort: true, ..first_sector("boot sector", judge::is_bootable) },
];

/// Two superblock copies behind the first 4 KiB and two before the last whole 4 KiB, 12 KiB each.
fn freestone_array(capacity: u64) -> Vec<u64> {
    let end = capacity & !4095;
    let last = [24 * KIB, 12 * KIB].into_iter().filter_map(|back| end.checked_sub(back));
    [4 * KIB, 16 * KIB].into_iter().chain(last).collect()
}

/// The ring of uberblocks in the second half of each of the four labels of 256 KiB.
fn zfs_uberblocks(capacity: u64) -> Vec<u64> {
    let label = 256 * KIB;
    let end = capacity / label * label;
    let last = [2 * label, label].into_iter().filter_map(|back| end.checked_sub(back));
    let labels = [0, label].into_iter().chain(last);
    labels.flat_map(|label| (128..256).map(move |block| label + block * KIB)).collect()
}

/// In the last whole 4 KiB, which hold the second superblock; its magic is at byte 6.
fn nilfs_second(capacity: u64) -> Vec<u64> {
    (capacity / 4096).checked_sub(1).map(|page| page * 4096 + 6).into_iter().collect()
}

/// Volume structure descriptors have 2 KiB or one block, from byte 32 Ki on; the name is at byte 1.
fn udf_descriptors(_: u64) -> Vec<u64> {
    (0..64).map(|i| 32 * KIB + 2 * KIB * i + 1).collect()
}

/// The last 64 KiB that are aligned to 64 KiB.
fn md_0_90(capacity: u64) -> Vec<u64> {
    (capacity & !(64 * KIB - 1)).checked_sub(64 * KIB).into_iter().collect()
}

/// 8 KiB before the end, rounded down to 4 KiB.
fn md_1_0(capacity: u64) -> Vec<u64> {
    ((capacity & !511).checked_sub(8 * KIB)).map(|offset| offset & !4095).into_iter().collect()
}

/// The magic at byte 60 of the last whole 4 KiB.
fn drbd(capacity: u64) -> Vec<u64> {
    (capacity & !4095).checked_sub(4096).map(|offset| offset + 60).into_iter().collect()
}
