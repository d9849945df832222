//! Checked devices, opened read-only, and decoding of numbers.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;

/// Reads bytes at an offset: a device, or the data of an array.
pub trait Source {
    /// Its size in bytes.
    fn bytes(&self) -> u64;
    /// `len` bytes from `offset` on.
    fn read(&self, offset: u64, len: usize) -> io::Result<Vec<u8>>;
}

/// A file or a block device.
pub struct Device {
    file: File,
    bytes: u64,
}

impl Device {
    /// Opens it.
    pub fn open(path: &str) -> io::Result<Device> {
        let mut file = File::open(path)?;
        let bytes = file.seek(SeekFrom::End(0))?;
        Ok(Device { file, bytes })
    }
}

impl Source for Device {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read(&self, offset: u64, len: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.file.read_exact_at(&mut bytes, offset)?;
        Ok(bytes)
    }
}

fn number(bytes: &[u8], at: usize, len: usize) -> u64 {
    bytes[at..at + len].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// The 16-bit number at `at`.
pub fn u16_at(bytes: &[u8], at: usize) -> usize {
    number(bytes, at, 2) as usize
}

/// The 32-bit number at `at`.
pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
    number(bytes, at, 4) as u32
}

/// The 64-bit number at `at`.
pub fn u64_at(bytes: &[u8], at: usize) -> u64 {
    number(bytes, at, 8)
}

/// Whether nothing was ever written there.
pub fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}
