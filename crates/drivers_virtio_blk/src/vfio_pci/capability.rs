//! Locates the registers of a virtio PCI function from its configuration space.
//!
//! ```text
//!   0x34 ─► │ id 9 │ next │ len │ type │ bar │ id │ - │ - │ offset u32 │ length u32 │ (notify: multiplier u32) │
//! ```
//!
//! Source: VIRTIO 1.3, 4.1.4; PCI Local Bus 3.0, 6.7.

/// Bytes of the configuration space that contain capabilities.
pub const CONFIG_SPACE: usize = 256;
/// Largest number of capabilities of four bytes each; a longer list is circular.
const MAX_CAPABILITIES: usize = (CONFIG_SPACE - 64) / 4;
/// Vendor of virtio functions.
const VENDOR: u16 = 0x1af4;
/// Block devices since virtio 1.0, and those that also support older drivers.
const DEVICES: [u16; 2] = [0x1042, 0x1001];
/// Capability ID of vendors.
const VENDOR_SPECIFIC: u8 = 9;
/// BARs of a function.
const BARS: u8 = 6;

/// A part of a BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Index of the BAR.
    pub bar: u8,
    /// Offset in the BAR in bytes.
    pub offset: u32,
    /// Length in bytes.
    pub len: u32,
}

/// Locations of the registers of a virtio function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Places {
    /// The registers common to all devices.
    pub common: Place,
    /// Doorbells.
    pub notify: Place,
    /// Distance between two doorbells in bytes; 0: all share one.
    pub notify_step: u32,
    /// The configuration space of the block device.
    pub device: Place,
}

/// Finds the registers of a virtio block function, or returns the reason why its configuration
/// space is invalid.
pub fn find(space: &[u8; CONFIG_SPACE]) -> Result<Places, String> {
    let (vendor, device) = (u16_at(space, 0), u16_at(space, 2));
    if vendor != VENDOR || !DEVICES.contains(&device) {
        return Err(format!("PCI function {vendor:04x}:{device:04x} is not a virtio block device"));
    }
    const HAS_CAPABILITIES: u16 = 1 << 4;
    if u16_at(space, 6) & HAS_CAPABILITIES == 0 {
        return Err("the PCI function has no capabilities".into());
    }
    let mut found: [Option<(Place, u32)>; 5] = [None; 5];
    let mut at = usize::from(space[0x34] & !3);
    for _ in 0..MAX_CAPABILITIES {
        if at < 64 {
            break;
        }
        if let Some((kind, place, step)) = virtio_capability(space, at) {
            // The first usable capability counts.
            if let Some(slot) = found.get_mut(usize::from(kind)).filter(|slot| slot.is_none()) {
                *slot = Some((place, step));
            }
        }
        at = usize::from(space[at + 1] & !3);
    }
    let [_, common, notify, _, device] = found;
    let missing = |what: &str| format!("the PCI function has no {what} (virtio before 1.0?)");
    let (common, _) = common.ok_or_else(|| missing("common registers"))?;
    let (notify, notify_step) = notify.ok_or_else(|| missing("doorbells"))?;
    let (device, _) = device.ok_or_else(|| missing("configuration of a block device"))?;
    Ok(Places { common, notify, notify_step, device })
}

/// The virtio capability at `at`, if any: its type, place and distance between doorbells.
fn virtio_capability(space: &[u8; CONFIG_SPACE], at: usize) -> Option<(u8, Place, u32)> {
    let entry = space.get(at..at + 16)?;
    let (len, kind, bar) = (usize::from(entry[2]), entry[3], entry[4]);
    if entry[0] != VENDOR_SPECIFIC || len < 16 || bar >= BARS {
        return None;
    }
    let place = Place { bar, offset: u32_at(space, at + 8), len: u32_at(space, at + 12) };
    let has_step = len >= 20 && at + 20 <= CONFIG_SPACE;
    Some((kind, place, if has_step { u32_at(space, at + 16) } else { 0 }))
}

fn u16_at(space: &[u8; CONFIG_SPACE], at: usize) -> u16 {
    u16::from_le_bytes([space[at], space[at + 1]])
}

fn u32_at(space: &[u8; CONFIG_SPACE], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| space[at + i]))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A function with these capabilities at these offsets, linked in order.
    fn function(capabilities: &[(usize, [u8; 20])]) -> [u8; CONFIG_SPACE] {
        let mut space = [0; CONFIG_SPACE];
        space[..4].copy_from_slice(&[0xf4, 0x1a, 0x42, 0x10]);
        space[6] = 1 << 4;
        let mut link = 0x34;
        for (at, bytes) in capabilities {
            space[link] = *at as u8;
            let len = (CONFIG_SPACE - at).min(20);
            space[*at..at + len].copy_from_slice(&bytes[..len]);
            link = at + 1;
        }
        space
    }

    fn capability(kind: u8, bar: u8, offset: u32, len: u32) -> [u8; 20] {
        let mut bytes = [0; 20];
        bytes[..5].copy_from_slice(&[VENDOR_SPECIFIC, 0, 20, kind, bar]);
        bytes[8..12].copy_from_slice(&offset.to_le_bytes());
        bytes[12..16].copy_from_slice(&len.to_le_bytes());
        bytes[16..20].copy_from_slice(&4u32.to_le_bytes());
        bytes
    }

    fn good() -> [(usize, [u8; 20]); 4] {
        [
            (0x98, [0x11, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
            (0x40, capability(1, 4, 0, 0x38)),
            (0x54, capability(2, 4, 0x3000, 0x1000)),
            (0x70, capability(4, 4, 0x2000, 0x1000)),
        ]
    }

    #[test]
    fn the_places_of_a_function_are_found_among_other_capabilities() {
        let places = find(&function(&good())).unwrap();
        assert_eq!(places.common, Place { bar: 4, offset: 0, len: 0x38 });
        assert_eq!(places.notify, Place { bar: 4, offset: 0x3000, len: 0x1000 });
        assert_eq!((places.notify_step, places.device.offset), (4, 0x2000));
    }

    #[test]
    fn the_first_place_that_can_be_used_counts() {
        let mut list = vec![(0xb0, capability(1, 6, 0, 0x38))];
        list.extend(good());
        list.push((0xd0, capability(1, 2, 0, 0x38)));
        assert_eq!(find(&function(&list)).unwrap().common.bar, 4);
    }

    #[test]
    fn errors_name_missing_capabilities() {
        let without = |i: usize| {
            let mut list = good().to_vec();
            list.remove(i);
            find(&function(&list)).unwrap_err()
        };
        assert!(without(1).contains("common registers"));
        assert!(without(2).contains("doorbells"));
        assert!(without(3).contains("configuration of a block device"));
        let mut other = function(&good());
        other[2] = 0x41;
        assert!(find(&other).unwrap_err().contains("1af4:1041 is not a virtio block device"));
        let mut bare = function(&good());
        bare[6] = 0;
        assert!(find(&bare).is_err());
    }

    #[test]
    fn a_hostile_configuration_space_is_an_error_or_harmless() {
        assert!(find(&[0xff; CONFIG_SPACE]).is_err());
        // A cycle, and a capability that ends beyond the configuration space.
        let mut circle = function(&[(0x40, capability(1, 4, 0, 0x38))]);
        circle[0x41] = 0x40;
        assert!(find(&circle).is_err());
        assert!(find(&function(&[(0xfc, capability(1, 4, 0, 0x38))])).is_err());
        // The list's links and headers may contain any byte.
        for byte in 0..=255u8 {
            for at in [0x34, 0x40, 0x41, 0x42, 0x43, 0x44] {
                let mut space = function(&good());
                space[at] = byte;
                let _ = find(&space);
            }
        }
    }
}
