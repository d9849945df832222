//! A BAR of a function and windows in it: registers, mapped if the kernel allows it.
//!
//! Registers are read and written with the width that the specification requires. Their values are
//! volatile, and all ones when the function was removed.

use super::capability::Place;
use super::vfio::{RegionInfo, Vfio};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// A BAR.
#[derive(Debug)]
pub struct Bar {
    vfio: Arc<Vfio>,
    info: RegionInfo,
    /// First byte of the mapping; null where there is none.
    base: *mut u8,
}

// SAFETY: the mapping belongs to the process, not to a thread, and is only accessed as volatile.
unsafe impl Send for Bar {}
// SAFETY: as above.
unsafe impl Sync for Bar {}

impl Bar {
    /// BAR `index` of the function.
    ///
    /// # Errors
    /// When the function has no such BAR, or it cannot be mapped.
    pub fn open(vfio: &Arc<Vfio>, index: u8) -> io::Result<Bar> {
        let info = vfio.region(index.into())?;
        let mut base: *mut u8 = std::ptr::null_mut();
        if info.can_map && info.len > 0 {
            let (len, protection) = (info.len as usize, libc::PROT_READ | libc::PROT_WRITE);
            let (fd, offset) = (vfio.device().as_raw_fd(), info.offset as i64);
            // SAFETY: a new mapping at an address of the kernel's choice touches nothing that
            // exists.
            base = unsafe {
                libc::mmap(std::ptr::null_mut(), len, protection, libc::MAP_SHARED, fd, offset).cast()
            };
            if base.cast() == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(Bar { vfio: vfio.clone(), info, base })
    }

    /// Address of `N` bytes in the mapping; `None` without a mapping.
    ///
    /// # Panics
    /// When the bytes do not lie in the BAR, or are not aligned to their length.
    #[inline]
    fn mapped<const N: usize>(&self, at: u64) -> Option<*mut u8> {
        assert!(
            at.checked_add(N as u64).is_some_and(|end| end <= self.info.len),
            "{at:#x} of {:?}",
            self.info
        );
        assert!(at.is_multiple_of(N as u64), "{at:#x} is not aligned to {N}");
        (!self.base.is_null()).then(|| self.base.wrapping_add(at as usize))
    }

    fn read_unmapped<const N: usize>(&self, at: u64) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.vfio.device().read_exact_at(&mut bytes, self.info.offset + at)?;
        Ok(bytes)
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if !self.base.is_null() {
            // SAFETY: exactly what `open` mapped, and no other pointers to it exist.
            let result = unsafe { libc::munmap(self.base.cast(), self.info.len as usize) };
            debug_assert_eq!(result, 0, "munmap: {}", io::Error::last_os_error());
        }
    }
}

/// A part of a BAR.
#[derive(Clone, Debug)]
pub struct Window {
    bar: Arc<Bar>,
    offset: u64,
    len: u64,
}

/// Reads and writes of one width.
macro_rules! access {
    ($read:ident, $write:ident, $type:ty, $bytes:expr) => {
        /// Reads a register.
        ///
        /// # Errors
        /// When the function does not answer.
        ///
        /// # Panics
        /// When the register does not lie in the window, or is not aligned.
        pub fn $read(&self, at: u64) -> io::Result<$type> {
            let at = self.at(at, $bytes as u64);
            match self.bar.mapped::<$bytes>(at) {
                // SAFETY: mapped, inside and aligned.
                Some(register) => Ok(<$type>::from_le(unsafe { register.cast::<$type>().read_volatile() })),
                None => Ok(<$type>::from_le_bytes(self.bar.read_unmapped(at)?)),
            }
        }

        /// Writes a register.
        ///
        /// # Errors
        /// When the function cannot be reached.
        ///
        /// # Panics
        /// As the read.
        #[inline]
        pub fn $write(&self, at: u64, value: $type) -> io::Result<()> {
            let at = self.at(at, $bytes as u64);
            match self.bar.mapped::<$bytes>(at) {
                Some(register) => {
                    // SAFETY: mapped, inside and aligned.
                    unsafe { register.cast::<$type>().write_volatile(value.to_le()) };
                    Ok(())
                }
                None => self.bar.vfio.device().write_all_at(&value.to_le_bytes(), self.bar.info.offset + at),
            }
        }
    };
}

impl Window {
    /// The part of `bar` at `place`, of at least `needed` bytes.
    ///
    /// # Errors
    /// When the part does not lie in the BAR, is too short, or is not aligned to 4 bytes.
    pub fn new(bar: &Arc<Bar>, place: Place, needed: u64) -> Result<Window, String> {
        let (offset, len) = (u64::from(place.offset), u64::from(place.len));
        let is_inside = offset + len <= bar.info.len;
        if !is_inside || len < needed || !offset.is_multiple_of(4) {
            return Err(format!("registers at {place:x?} do not fit a BAR of {:#x} bytes", bar.info.len));
        }
        Ok(Window { bar: bar.clone(), offset, len })
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    #[inline]
    fn at(&self, at: u64, bytes: u64) -> u64 {
        assert!(at.checked_add(bytes).is_some_and(|end| end <= self.len), "{at:#x} of {:#x}", self.len);
        self.offset + at
    }

    access!(read_u8, write_u8, u8, 1);
    access!(read_u16, write_u16, u16, 2);
    access!(read_u32, write_u32, u32, 4);
}
