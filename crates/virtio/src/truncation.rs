//! Survives clients that truncate a file that is mapped as guest memory.
//!
//! The next access beyond the new end raises SIGBUS, which would end the process and with it every
//! other client. A program that serves untrusted clients calls [`contain_truncation`]. From then on
//! private zeroes replace the mapping from that page to its end, and the region counts as lost. The
//! queues of that client are broken ([`losses`]); other clients are not affected. Libraries do not
//! call it: signal handlers belong to the program. See `mmap(2)` and `sigaction(2)`.
//!
//! A mapping is replaced to its end at once, not page by page. Otherwise a client that touches
//! every second page would exhaust the mappings that the kernel allows a process
//! (`vm.max_map_count`), and the next page would end the process.

use std::io;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Largest number of mappings that a process watches. Each may become two, and the kernel allows a
/// process 65,530 by default.
const MAX_RANGES: usize = 16_384;
/// Number of them reserved for clients with few regions.
pub(crate) const RESERVED: usize = 4_096;

struct Range {
    /// First address; 0 while the place is free.
    start: AtomicUsize,
    /// Bytes; 0 while no mapping is watched.
    len: AtomicUsize,
    /// Bytes of a page, the unit of replacement.
    page: AtomicUsize,
    /// A part was replaced.
    is_lost: AtomicBool,
}

static RANGES: [Range; MAX_RANGES] = [const {
    Range {
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        page: AtomicUsize::new(0),
        is_lost: AtomicBool::new(false),
    }
}; MAX_RANGES];
/// Places in use.
static WATCHED: AtomicUsize = AtomicUsize::new(0);
static LOSSES: AtomicUsize = AtomicUsize::new(0);
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();
static HAS_WARNED: AtomicBool = AtomicBool::new(false);

/// Makes the process survive clients that truncate shared memory. Further calls do nothing.
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
    // SAFETY: the handler has the signature that SA_SIGINFO requires and makes only
    // async-signal-safe calls.
    match unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Watches a mapping of whole pages of `page` bytes. Returns the place to pass to [`forget`].
///
/// # Errors
/// When the process watches as many mappings as it can.
pub(crate) fn watch(start: usize, len: usize, page: usize) -> io::Result<usize> {
    let free =
        |range: &Range| range.start.compare_exchange(0, start, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    let Some(place) = RANGES.iter().position(free) else {
        let text = format!("the process already watches {MAX_RANGES} regions of guest memory, the limit");
        return Err(io::Error::new(io::ErrorKind::QuotaExceeded, text));
    };
    WATCHED.fetch_add(1, Ordering::Relaxed);
    let range = &RANGES[place];
    range.page.store(page, Ordering::Relaxed);
    range.is_lost.store(false, Ordering::Relaxed);
    range.len.store(len, Ordering::Release);
    Ok(place)
}

/// Stops watching before the mapping is removed.
pub(crate) fn forget(place: usize) {
    RANGES[place].len.store(0, Ordering::Release);
    RANGES[place].start.store(0, Ordering::Release);
    WATCHED.fetch_sub(1, Ordering::Relaxed);
}

/// Number of further mappings that can be watched.
pub(crate) fn room() -> usize {
    MAX_RANGES.saturating_sub(WATCHED.load(Ordering::Relaxed))
}

/// Whether a part of the mapping at `place` was replaced.
pub(crate) fn is_lost(place: usize) -> bool {
    RANGES[place].is_lost.load(Ordering::Acquire)
}

/// Number of regions of guest memory lost in this process. While it does not change, no further
/// region was lost.
#[inline]
pub fn losses() -> usize {
    LOSSES.load(Ordering::Acquire)
}

/// Makes only async-signal-safe system calls, and uses atomics.
extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel hands over a valid structure.
    let (addr, code) = unsafe { ((*info).si_addr().addr(), (*info).si_code) };
    // No client causes failed memory, and zeroes in its place could end up on a disk.
    let is_failed_memory = matches!(code, libc::BUS_MCEERR_AR | libc::BUS_MCEERR_AO);
    if !is_failed_memory && range_of(addr).is_some_and(|range| replace_rest(range, addr)) {
        if !HAS_WARNED.swap(true, Ordering::Relaxed) {
            let text = b"freestone: a client truncated its guest memory: it is served zeroes from now on\n";
            // SAFETY: writes a constant.
            unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
        }
        return;
    }
    // Not our mapping: the previous handler decides (the standard library's detects stack
    // overflows).
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

fn range_of(addr: usize) -> Option<&'static Range> {
    RANGES.iter().find(|range| {
        let (start, len) = (range.start.load(Ordering::Acquire), range.len.load(Ordering::Acquire));
        addr.wrapping_sub(start) < len
    })
}

/// Replaces the part of the mapping without file content by private zeroes: from the page of `addr`
/// to the mapping's end.
fn replace_rest(range: &Range, addr: usize) -> bool {
    let page = range.page.load(Ordering::Relaxed);
    let (start, len) = (range.start.load(Ordering::Acquire), range.len.load(Ordering::Acquire));
    let from = addr / page * page;
    // Mark the region first: no effect of the zeroes may be attributed to the client.
    range.is_lost.store(true, Ordering::Release);
    LOSSES.fetch_add(1, Ordering::AcqRel);
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    let at = ptr::without_provenance_mut(from);
    // SAFETY: whole pages of a mapping of ours that lives while it is watched. The file has no byte
    // there.
    unsafe { libc::mmap(at, start + len - from, protection, flags, -1, 0) != libc::MAP_FAILED }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::Mapping;
    use std::fs::File;
    use std::os::fd::{AsFd, FromRawFd};

    fn memfd(flags: libc::c_uint, len: u64) -> Option<File> {
        // SAFETY: a fresh descriptor of a C string's name.
        let fd = unsafe { libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC | flags) };
        // SAFETY: it is ours alone.
        let file = (fd >= 0).then(|| unsafe { File::from_raw_fd(fd) })?;
        file.set_len(len).unwrap();
        Some(file)
    }

    /// Mappings of this process that begin in the range.
    fn mappings(start: usize, len: usize) -> usize {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let first = |line: &str| usize::from_str_radix(line.split('-').next().unwrap(), 16).unwrap();
        maps.lines().filter(|line| (start..start + len).contains(&first(line))).count()
    }

    #[test]
    fn memory_whose_file_was_truncated_reads_as_zeroes_and_takes_writes() {
        contain_truncation().unwrap();
        contain_truncation().unwrap();
        let file = memfd(0, 3 * 4096).unwrap();
        let mapping = Mapping::new(file.as_fd(), 0, 3 * 4096).unwrap();
        let at = |offset: usize| mapping.addr().wrapping_add(offset);
        assert!(!mapping.is_lost());
        let before = losses();
        // SAFETY: all inside the mapping, which only this test uses.
        unsafe {
            at(0).write_volatile(1);
            at(8192).write_volatile(2);
            file.set_len(4096).unwrap();
            assert_eq!(at(8192).read_volatile(), 0);
            at(4096).write_volatile(4);
            at(8193).write_volatile(3);
            assert_eq!(
                (at(0).read_volatile(), at(4096).read_volatile(), at(8193).read_volatile()),
                (1, 4, 3)
            );
        }
        assert_eq!(file.metadata().unwrap().len(), 4096);
        assert!(mapping.is_lost() && losses() > before);
    }

    #[test]
    fn a_region_whose_pages_are_touched_one_by_one_stays_two_mappings() {
        contain_truncation().unwrap();
        const PAGES: usize = 1000;
        let file = memfd(0, (PAGES * 4096) as u64).unwrap();
        let mapping = Mapping::new(file.as_fd(), 0, (PAGES * 4096) as u64).unwrap();
        file.set_len(4096).unwrap();
        for page in (1..PAGES).rev().step_by(2) {
            // SAFETY: inside the mapping, which only this test uses.
            unsafe { mapping.addr().wrapping_add(page * 4096).write_volatile(1) };
        }
        assert_eq!(mappings(mapping.addr().addr(), PAGES * 4096), 2);
    }

    #[test]
    fn huge_pages_that_are_not_there_end_nothing() {
        contain_truncation().unwrap();
        const HUGE: usize = 2 << 20;
        // Without huge pages in the machine's pool the first access fails as after a truncation.
        let Some(file) = memfd(libc::MFD_HUGETLB | libc::MFD_HUGE_2MB, 2 * HUGE as u64) else {
            eprintln!("skipped: this kernel has no huge pages of 2 MiB");
            return;
        };
        let mapping = Mapping::new(file.as_fd(), 0, 2 * HUGE as u64).unwrap();
        file.set_len(0).unwrap();
        for offset in [HUGE + 5000, 5000] {
            let at = mapping.addr().wrapping_add(offset);
            // SAFETY: inside the mapping, which only this test uses.
            unsafe {
                assert_eq!(at.read_volatile(), 0);
                at.write_volatile(7);
                assert_eq!(at.read_volatile(), 7);
            }
        }
        assert!(mapping.is_lost());
    }

    #[test]
    fn exactly_what_is_mapped_is_watched() {
        const START: usize = 1 << 60; // where no mapping of another test can be
        let is_watched = |addr| range_of(addr).is_some();
        let place = watch(START, 8192, 4096).unwrap();
        assert!(is_watched(START) && is_watched(START + 8191));
        assert!(!is_watched(START - 1) && !is_watched(START + 8192));
        forget(place);
        assert!(!is_watched(START));
    }
}
