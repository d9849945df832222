//! The mark of a device: its creator, and the name of the served device.
//!
//! The driver stores 64 bits for the server that creates a device. A successor reads them before a
//! takeover, so that a disk never continues over other data.

/// The upper half of every mark.
const OURS: u64 = 0x4672_5374; // "FrSt"

/// The mark of a disk that serves the device called `name`.
pub(super) fn mark(name: &str) -> u64 {
    OURS << 32 | u64::from(hash(name))
}

/// Whether Freestone created a device with this mark.
pub(super) fn is_ours(mark: u64) -> bool {
    mark >> 32 == OURS
}

/// FNV-1a: the same in every version, unlike the standard library's hash.
fn hash(text: &str) -> u32 {
    text.bytes().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_ours_and_tells_devices_apart() {
        assert_eq!(hash("foobar"), 0xbf9c_f968); // as published with the algorithm
        assert!(is_ours(mark("mem")) && !is_ours(0) && !is_ours(u64::from(hash("mem"))));
        assert_ne!(mark("io_uring:a"), mark("io_uring:b"));
    }
}
