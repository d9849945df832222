//! Sizes of log entries, computed from numbers alone: a configuration is checked with them.

/// Bytes of a header.
pub const HEADER_BYTES: usize = 512;
/// Alignment and padding of entries: a whole sector of any drive.
pub const UNIT: u32 = 4096;

/// Bytes in a lane of an entry with `payload_bytes` of payload.
pub const fn entry_bytes(payload_bytes: u64) -> u64 {
    (HEADER_BYTES as u64 + payload_bytes).next_multiple_of(UNIT as u64)
}

/// Bytes of the longest entry in a lane of `lane_bytes` bytes.
pub fn max_entry_bytes(lane_bytes: u32) -> u64 {
    // Half a lane: the newest entry on a member is never overwritten, a marker's unit is reserved,
    // and two operations should fit. One buffer holds an entry.
    u64::from(lane_bytes / 2 / UNIT * UNIT).min(reactor::MAX_BUFFER as u64)
}

/// Most bytes of each strip that one entry can cover if it contains the new data of `redo_strips`
/// strips. A multiple of the block size; 0 if the lanes are too small.
pub fn max_len(lane_bytes: u32, strip_bytes: u32, block_size: u32, redo_strips: usize) -> u32 {
    let payload = max_entry_bytes(lane_bytes).saturating_sub(HEADER_BYTES as u64);
    let len = payload / (1 + redo_strips as u64) / u64::from(block_size) * u64::from(block_size);
    len.min(strip_bytes.into()) as u32
}
