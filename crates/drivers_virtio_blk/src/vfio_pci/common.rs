//! The registers that every virtio PCI function has, and the configuration space of a block device.
//!
//! Source: VIRTIO 1.3, 4.1.4.3 (common configuration), 4.1.3.1 (widths of accesses), 5.2.4 (block).

use super::bar::Window;
use std::io;
use std::time::{Duration, Instant};
use virtio::blk::ConfigSpace;
use virtio::status;

const DEVICE_FEATURE_SELECT: u64 = 0x00;
const DEVICE_FEATURE: u64 = 0x04;
const DRIVER_FEATURE_SELECT: u64 = 0x08;
const DRIVER_FEATURE: u64 = 0x0c;
const CONFIG_MSIX_VECTOR: u64 = 0x10;
const NUM_QUEUES: u64 = 0x12;
const DEVICE_STATUS: u64 = 0x14;
const CONFIG_GENERATION: u64 = 0x15;
const QUEUE_SELECT: u64 = 0x16;
const QUEUE_SIZE: u64 = 0x18;
const QUEUE_MSIX_VECTOR: u64 = 0x1a;
const QUEUE_ENABLE: u64 = 0x1c;
const QUEUE_NOTIFY_OFF: u64 = 0x1e;
const QUEUE_DESC: u64 = 0x20;
const QUEUE_DRIVER: u64 = 0x28;
const QUEUE_DEVICE: u64 = 0x30;
/// Bytes of the registers listed above.
pub const COMMON_BYTES: u64 = 0x38;

/// No interrupt.
pub const NO_VECTOR: u16 = 0xffff;
/// Value of the registers of a removed function.
const PULLED: u8 = 0xff;
/// Number of attempts to read a configuration space that changes meanwhile.
const MAX_TRIES: u32 = 100;
/// Offsets and lengths of the configuration space's fields, including gaps: each is read with its
/// own width.
const CONFIG_FIELDS: [(usize, usize); 27] = [
    (0, 4),
    (4, 4),
    (8, 4),
    (12, 4),
    (16, 2),
    (18, 1),
    (19, 1),
    (20, 4),
    (24, 1),
    (25, 1),
    (26, 2),
    (28, 4),
    (32, 1),
    (33, 1),
    (34, 2),
    (36, 4),
    (40, 4),
    (44, 4),
    (48, 4),
    (52, 4),
    (56, 1),
    (57, 1),
    (58, 1),
    (59, 1),
    (60, 4),
    (64, 4),
    (68, 4),
];

/// The common registers. Some select the object of others, so only one caller may use them at a
/// time.
#[derive(Debug)]
pub struct Common(pub Window);

impl Common {
    /// The features that the device offers.
    ///
    /// # Errors
    /// When the device does not answer; also for the other methods.
    pub fn offered(&self) -> io::Result<u64> {
        let mut features = 0;
        for half in [0, 1] {
            self.0.write_u32(DEVICE_FEATURE_SELECT, half)?;
            features |= u64::from(self.0.read_u32(DEVICE_FEATURE)?) << (32 * half);
        }
        Ok(features)
    }

    /// Sets the features in use.
    pub fn set_features(&self, features: u64) -> io::Result<()> {
        for half in [0, 1] {
            self.0.write_u32(DRIVER_FEATURE_SELECT, half)?;
            self.0.write_u32(DRIVER_FEATURE, (features >> (32 * half)) as u32)?;
        }
        Ok(())
    }

    /// Number of virtqueues.
    pub fn num_queues(&self) -> io::Result<u16> {
        self.0.read_u16(NUM_QUEUES)
    }

    /// The device's status.
    pub fn status(&self) -> io::Result<u8> {
        self.0.read_u8(DEVICE_STATUS)
    }

    /// Adds bits to the device's status. Returns the new status.
    pub fn add_status(&self, bits: u8) -> io::Result<u8> {
        self.0.write_u8(DEVICE_STATUS, self.status()? | bits)?;
        self.status()
    }

    /// Whether the device needs a reset or is missing.
    pub fn is_broken(&self) -> bool {
        self.status().map_or(true, |status| status == PULLED || status & status::NEEDS_RESET != 0)
    }

    /// Resets the device and waits until it has released all memory. Returns `false` on a timeout.
    pub fn reset(&self, timeout: Duration) -> bool {
        let start = Instant::now();
        if self.0.write_u8(DEVICE_STATUS, 0).is_err() {
            return false;
        }
        while start.elapsed() < timeout {
            match self.status() {
                Ok(0) => return true,
                Ok(PULLED) | Err(_) => return false,
                Ok(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        false
    }

    /// Sets the interrupt for configuration changes. Returns whether the device accepted it.
    pub fn set_config_vector(&self, vector: u16) -> io::Result<bool> {
        self.0.write_u16(CONFIG_MSIX_VECTOR, vector)?;
        Ok(self.0.read_u16(CONFIG_MSIX_VECTOR)? == vector)
    }

    /// Largest size of a virtqueue that has not been set up; 0 if the virtqueue does not exist.
    pub fn max_queue_size(&self, index: u16) -> io::Result<u16> {
        self.0.write_u16(QUEUE_SELECT, index)?;
        self.0.read_u16(QUEUE_SIZE)
    }

    /// Sets up a virtqueue with descriptors, driver area and device area. Returns the number of its
    /// doorbell.
    pub fn set_queue(&self, index: u16, size: u16, areas: [u64; 3]) -> io::Result<u16> {
        self.0.write_u16(QUEUE_SELECT, index)?;
        self.0.write_u16(QUEUE_SIZE, size)?;
        for (register, addr) in [QUEUE_DESC, QUEUE_DRIVER, QUEUE_DEVICE].into_iter().zip(areas) {
            self.0.write_u32(register, addr as u32)?;
            self.0.write_u32(register + 4, (addr >> 32) as u32)?;
        }
        self.0.read_u16(QUEUE_NOTIFY_OFF)
    }

    /// Sets the interrupt of a virtqueue and enables it. Returns whether the device accepted the
    /// interrupt.
    pub fn enable_queue(&self, index: u16, vector: u16) -> io::Result<bool> {
        self.0.write_u16(QUEUE_SELECT, index)?;
        self.0.write_u16(QUEUE_MSIX_VECTOR, vector)?;
        let got = self.0.read_u16(QUEUE_MSIX_VECTOR)?;
        self.0.write_u16(QUEUE_ENABLE, 1)?;
        Ok(got == vector)
    }

    /// Reads a consistent configuration space from `window`.
    pub fn read_config(&self, window: &Window) -> io::Result<ConfigSpace> {
        for _ in 0..MAX_TRIES {
            let before = self.0.read_u8(CONFIG_GENERATION)?;
            let mut bytes = [0; ConfigSpace::BYTES];
            for (at, len) in CONFIG_FIELDS.into_iter().filter(|(at, len)| (at + len) as u64 <= window.len()) {
                let place = at as u64;
                match len {
                    1 => bytes[at] = window.read_u8(place)?,
                    2 => bytes[at..at + 2].copy_from_slice(&window.read_u16(place)?.to_le_bytes()),
                    _ => bytes[at..at + 4].copy_from_slice(&window.read_u32(place)?.to_le_bytes()),
                }
            }
            if self.0.read_u8(CONFIG_GENERATION)? == before {
                return Ok(ConfigSpace::from_bytes(&bytes));
            }
        }
        Err(io::Error::other("the configuration space keeps changing"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_cover_the_configuration_space_without_gap_and_aligned() {
        let mut next = 0;
        for (at, len) in CONFIG_FIELDS {
            assert_eq!(at, next);
            assert!(at.is_multiple_of(len));
            next = at + len;
        }
        assert_eq!(next, ConfigSpace::BYTES);
    }
}
