//! The amount of guest memory that a process watches. The only test of this binary, since the limit
//! belongs to the process.

use std::fs::File;
use std::os::fd::FromRawFd;
use virtio::memory::{GuestMemory, MAX_REGIONS, MemoryError, RegionSpec};

fn guest(file: &File, regions: usize) -> Result<GuestMemory, MemoryError> {
    let spec = |i: u64| RegionSpec {
        guest_addr: i << 30,
        len: 4096,
        user_addr: i << 30,
        fd: file.try_clone().unwrap().into(),
        fd_offset: 0,
    };
    GuestMemory::map((0..regions as u64).map(spec).collect())
}

#[test]
fn guests_with_many_regions_leave_room_for_those_with_few_and_what_cannot_be_watched_is_refused() {
    // One descriptor for each region, more than most shells allow.
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: reads and writes a live structure; the descriptor is fresh and ours.
    let file = unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit);
        limit.rlim_cur = limit.rlim_max;
        libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
        File::from_raw_fd(libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC))
    };
    file.set_len(4096).unwrap();
    if limit.rlim_max < 17_000 {
        eprintln!("only {} descriptors: the limit cannot be reached", limit.rlim_max);
        return;
    }
    let mut guests = Vec::new();
    let refused = loop {
        match guest(&file, MAX_REGIONS) {
            Ok(memory) => guests.push(memory),
            Err(error) => break error,
        }
    };
    // Eight such guests once filled the limit of a process.
    assert!(guests.len() >= 16, "{} guests", guests.len());
    assert!(matches!(refused, MemoryError::NoRoom(MAX_REGIONS)), "{refused}");
    let many = guests.len();
    let refused = loop {
        match guest(&file, 16) {
            Ok(memory) => guests.push(memory),
            Err(error) => break error,
        }
    };
    assert!(guests.len() - many >= 250, "{} guests with few regions", guests.len() - many);
    let MemoryError::Map { source, .. } = refused else { panic!("{refused}") };
    assert!(source.to_string().contains("already watches"), "{source}");
    // Removed guests free room.
    guests.truncate(many - 1);
    guest(&file, MAX_REGIONS).unwrap();
}
