//! Little-endian fields at fixed places of a structure (Base 1.5: all are little-endian). Callers
//! check lengths before; an access beyond the structure's end is a bug and panics.

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

pub(crate) fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}

/// Writes a field's bytes (`to_le_bytes`, or an array as it is) at byte `at`.
pub(crate) fn put<const N: usize>(bytes: &mut [u8], at: usize, field: [u8; N]) {
    bytes[at..at + N].copy_from_slice(&field);
}

/// Writes text to a field of `len` bytes, padded with `fill` or cut off.
pub(crate) fn put_text(bytes: &mut [u8], at: usize, len: usize, text: &str, fill: u8) {
    let field = &mut bytes[at..at + len];
    field.fill(fill);
    let fits = text.len().min(len);
    field[..fits].copy_from_slice(&text.as_bytes()[..fits]);
}

/// The text of a field up to the first zero byte, without trailing spaces. Bytes that are not UTF-8
/// are replaced.
pub(crate) fn text_at(bytes: &[u8], at: usize, len: usize) -> String {
    let field = &bytes[at..at + len];
    let end = field.iter().position(|byte| *byte == 0).unwrap_or(len);
    String::from_utf8_lossy(&field[..end]).trim_end_matches(' ').to_owned()
}
