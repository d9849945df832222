//! What happens when somebody truncates a file that is mapped here as guest memory.
//!
//! The next access beyond the new end raises SIGBUS, which ends the process and with it every other client.
//! A program that serves clients it does not trust calls [`contain_truncation`]: from then on the page in
//! question becomes private memory of zeroes, and only the client that took its own memory away sees nonsense.
//! Libraries do not call it: signal handlers belong to the program. See `mmap(2)` and `sigaction(2)`.

use std::io;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Mappings that are watched over at a time; those beyond are not. 64 clients with 64 regions each.
const MAX_RANGES: usize = 4096;

struct Range {
    /// 0 while the place is free.
    start: AtomicUsize,
    len: AtomicUsize,
}

static RANGES: [Range; MAX_RANGES] =
    [const { Range { start: AtomicUsize::new(0), len: AtomicUsize::new(0) } }; MAX_RANGES];
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();
static HAS_WARNED: AtomicBool = AtomicBool::new(false);

/// Lets the process survive clients that truncate the memory they share with it. Calling it again does nothing.
///
/// # Errors
/// When the system refuses the signal handler.
pub fn contain_truncation() -> io::Result<()> {
    // SAFETY: all-zero is a valid `sigaction`.
    let mut before: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: asks only.
    if unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut before) } != 0 {
        return Err(io::Error::last_os_error());
    }
    if BEFORE.set(before).is_err() {
        return Ok(());
    }
    // SAFETY: as above.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_sigbus as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler has the signature that SA_SIGINFO asks for and does only what a handler may.
    match unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Watches over a mapping; the place to give to [`forget`]. `None` when there are too many.
pub(crate) fn watch(start: usize, len: usize) -> Option<usize> {
    let place = RANGES.iter().position(|range| {
        range.start.compare_exchange(0, start, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    })?;
    RANGES[place].len.store(len, Ordering::Release);
    Some(place)
}

/// Ends that, before the mapping goes.
pub(crate) fn forget(place: usize) {
    RANGES[place].len.store(0, Ordering::Release);
    RANGES[place].start.store(0, Ordering::Release);
}

/// Only system calls that may be made in a signal handler, and atomics.
extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel hands over a valid structure.
    let addr = unsafe { (*info).si_addr() }.addr();
    if is_watched(addr) && replace_page(addr) {
        if !HAS_WARNED.swap(true, Ordering::Relaxed) {
            let text = b"freestone: a client truncated its guest memory: it is served zeroes from now on\n";
            // SAFETY: writes a constant.
            unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
        }
        return;
    }
    // Not ours: whoever was there before decides (the standard library's, which knows stack overflows).
    let before = BEFORE.get().expect("set before the handler is");
    if before.sa_flags & libc::SA_SIGINFO == 0 {
        // SAFETY: the default action then ends the process at the same instruction.
        unsafe { libc::sigaction(libc::SIGBUS, before, ptr::null_mut()) };
        return;
    }
    type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
    // SAFETY: with SA_SIGINFO the field holds such a function.
    let handler: Handler = unsafe { std::mem::transmute::<usize, Handler>(before.sa_sigaction) };
    handler(signal, info, context);
}

fn is_watched(addr: usize) -> bool {
    RANGES.iter().any(|range| {
        let (start, len) = (range.start.load(Ordering::Acquire), range.len.load(Ordering::Acquire));
        addr.wrapping_sub(start) < len
    })
}

/// Puts a private page of zeroes where the file has none any more.
fn replace_page(addr: usize) -> bool {
    const PAGE: usize = 4096; // a huge page is refused below, and then the process ends as it did before
    let page = (addr & !(PAGE - 1)) as *mut libc::c_void;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: the page lies in a mapping of ours that lives while it is watched, and holds nothing any more.
    unsafe { libc::mmap(page, PAGE, protection, flags, -1, 0) != libc::MAP_FAILED }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::Mapping;
    use std::fs::File;
    use std::os::fd::{AsFd, FromRawFd};

    #[test]
    fn memory_whose_file_was_truncated_reads_as_zeroes_and_takes_writes() {
        contain_truncation().unwrap();
        contain_truncation().unwrap();
        // SAFETY: a fresh descriptor of a C string's name.
        let file = unsafe { File::from_raw_fd(libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC)) };
        file.set_len(3 * 4096).unwrap();
        let mapping = Mapping::new(file.as_fd(), 0, 3 * 4096).unwrap();
        let at = |offset: usize| mapping.addr().wrapping_add(offset);
        // SAFETY: all inside the mapping, which nobody else uses.
        unsafe {
            at(0).write_volatile(1);
            at(8192).write_volatile(2);
            file.set_len(4096).unwrap();
            assert_eq!(at(8192).read_volatile(), 0);
            at(8193).write_volatile(3);
            at(4096).write_volatile(4);
            assert_eq!((at(0).read_volatile(), at(8193).read_volatile()), (1, 3));
        }
        assert_eq!(file.metadata().unwrap().len(), 4096);
        assert!(is_watched(at(8192).addr()));
    }

    #[test]
    fn exactly_what_is_mapped_is_watched() {
        const START: usize = 1 << 60; // where no mapping of another test can be
        let place = watch(START, 8192).unwrap();
        assert!(is_watched(START) && is_watched(START + 8191));
        assert!(!is_watched(START - 1) && !is_watched(START + 8192));
        forget(place);
        assert!(!is_watched(START));
    }
}
