//! First sectors that no fixed bytes identify: their fields decide.

/// Bytes of a sector that is judged.
pub const SECTOR: usize = 512;

/// The boot signature of a PC's first sector.
const BOOT: [u8; 2] = [0x55, 0xaa];

/// Whether an MBR has a partition: the boot signature alone says nothing, as boot sectors of file
/// systems have it, too.
pub fn is_partitioned(sector: &[u8]) -> bool {
    let is_in_use = |entry: &[u8]| entry[0] & 0x7f == 0 && entry[4] != 0 && entry[12..16] != [0; 4];
    sector[510..512] == BOOT && sector[446..510].chunks(16).any(is_in_use)
}

/// Whether a sector can boot: the boot signature, and code before the disk's number at byte 440.
/// The file system behind it may be one that the table lacks. An empty partition table has no code.
pub fn is_bootable(sector: &[u8]) -> bool {
    sector[510..512] == BOOT && sector[..440].iter().any(|byte| *byte != 0)
}

/// Whether a sector has the parameter block of a FAT file system: formats of MS-DOS before 4.0 have
/// no name in it.
pub fn is_fat(sector: &[u8]) -> bool {
    let number = |at: usize| u16::from_le_bytes([sector[at], sector[at + 1]]);
    let jumps = sector[0] == 0xe9 || (sector[0] == 0xeb && sector[2] == 0x90);
    let (sector_bytes, cluster_sectors) = (number(11), sector[13]);
    let (reserved, fats, media) = (number(14), sector[16], sector[21]);
    jumps
        && sector_bytes.is_power_of_two()
        && (512..=4096).contains(&sector_bytes)
        && cluster_sectors.is_power_of_two()
        && reserved > 0
        && (1..=2).contains(&fats)
        && (media == 0xf0 || media >= 0xf8)
}

/// Whether a sector is a Sun disk label: its magic has two bytes only, so the checksum counts as
/// well.
pub fn is_sun_label(sector: &[u8]) -> bool {
    let sum = sector.chunks(2).fold([0, 0], |sum, word| [sum[0] ^ word[0], sum[1] ^ word[1]]);
    sector[508..510] == [0xda, 0xbe] && sum == [0, 0]
}
