//! Inaccessible pages around every mapping of a file.
//!
//! The linker prefers this `mmap` to that of the C library for all code of the executable. So
//! mappings get guard pages without a change of the code under test.

use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Inaccessible bytes on either side, more than any error in a ring's arithmetic can skip.
const GUARD: usize = 1 << 20;
const PAGE: usize = 4096;

/// First byte and rounded length of each guarded mapping.
static LIVE: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

/// Number of existing mappings of files.
pub fn live_mappings() -> usize {
    live().len()
}

fn live() -> MutexGuard<'static, Vec<(usize, usize)>> {
    LIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// # Safety
/// As `mmap(2)`.
unsafe fn raw_map(addr: usize, len: usize, prot: i32, flags: i32, fd: i32, offset: i64) -> *mut c_void {
    // SAFETY: by contract.
    unsafe { libc::syscall(libc::SYS_mmap, addr, len, prot, flags, fd, offset) as *mut c_void }
}

/// # Safety
/// As `munmap(2)`.
unsafe fn raw_unmap(addr: usize, len: usize) -> i32 {
    // SAFETY: by contract.
    unsafe { libc::syscall(libc::SYS_munmap, addr, len) as i32 }
}

/// As `mmap(2)`. A shared mapping of a file at an address of the system's choice gets guard pages.
///
/// # Safety
/// As `mmap(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    addr: *mut c_void,
    len: usize,
    prot: i32,
    flags: i32,
    fd: i32,
    offset: i64,
) -> *mut c_void {
    let is_plain = addr.is_null() && fd >= 0 && flags & libc::MAP_SHARED != 0 && flags & libc::MAP_FIXED == 0;
    let rounded = len.checked_next_multiple_of(PAGE).filter(|&rounded| is_plain && rounded > 0);
    let Some((rounded, all)) = rounded.and_then(|rounded| Some((rounded, rounded.checked_add(2 * GUARD)?)))
    else {
        // SAFETY: by contract.
        return unsafe { raw_map(addr.addr(), len, prot, flags, fd, offset) };
    };
    // SAFETY: a fresh reservation, in the middle of which the mapping is placed; it is released if
    // that fails.
    unsafe {
        let reserve = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let base = raw_map(0, all, libc::PROT_NONE, reserve, -1, 0);
        if base == libc::MAP_FAILED {
            return base;
        }
        let mapped = raw_map(base.addr() + GUARD, len, prot, flags | libc::MAP_FIXED, fd, offset);
        if mapped == libc::MAP_FAILED {
            // io_uring does not support a chosen address for its rings.
            raw_unmap(base.addr(), all);
            return raw_map(0, len, prot, flags, fd, offset);
        }
        live().push((mapped.addr(), rounded));
        mapped
    }
}

/// As `munmap(2)`; the guard pages are removed with their mapping.
///
/// # Safety
/// As `munmap(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(addr: *mut c_void, len: usize) -> i32 {
    let mut live = live();
    let guarded = live.iter().position(|&(base, _)| base == addr.addr());
    let Some(guarded) = guarded else {
        drop(live);
        // SAFETY: by contract.
        return unsafe { raw_unmap(addr.addr(), len) };
    };
    let (base, rounded) = live.swap_remove(guarded);
    drop(live);
    assert_eq!(len.next_multiple_of(PAGE), rounded, "a mapping is unmapped whole");
    // SAFETY: the mapping with its guards, as it was created.
    unsafe { raw_unmap(base - GUARD, rounded + 2 * GUARD) }
}
