//! Checks of registered memory.

use super::driver::{Disk, Driver, pattern};
use block::{Data, Flags, MemoryRegion, Request, Segment};
use drivers::virtio_blk_uring::VirtioBlkUringFile;
use std::ptr;

const MIB: usize = 1 << 20;
/// Bytes of registered memory.
const LEN: usize = 4 * MIB;

pub fn run(file: &VirtioBlkUringFile, is_polled: bool) {
    let mut driver = Driver::new(file, is_polled);
    let mapping = Mapping::new(LEN);
    file.map_region(&mapping.region());
    let bytes = pattern(0, LEN, 1);
    mapping.fill(&bytes);
    let block = file.shape().block_size;
    // One command, several commands, and lists whose segments lie in registered memory or next to
    // it.
    for (at, lens) in [
        (0, vec![block]),
        (4096, vec![3 * MIB]),
        (512, vec![64 << 10, 4096, 128 << 10, 8192]),
        (0, vec![4096; 40]),
        (LEN - 4096, vec![4096]),
    ] {
        let mut next = at;
        let list: Vec<Segment> = lens
            .iter()
            .map(|len| {
                next += len;
                Segment { base: mapping.base.wrapping_add(next - len), len: *len }
            })
            .collect();
        // SAFETY: the mapping outlives the requests, which are waited for.
        let data = unsafe { Data::new(&list) };
        let len = data.len();
        assert_eq!(driver.run(&Request::write(data, Flags::FUA), MIB as u64), Ok(()), "{lens:?} at {at}");
        let got = driver.read(MIB as u64, len).expect("read");
        assert!(*got == bytes[at..at + len], "written: {lens:?} at {at}");
        let mut expected = vec![0; LEN];
        mapping.fill(&expected);
        assert_eq!(driver.run(&Request::read(data), MIB as u64), Ok(()), "{lens:?} at {at}");
        expected[at..at + len].copy_from_slice(&bytes[at..at + len]);
        assert!(mapping.bytes() == expected, "read: {lens:?} at {at}");
        mapping.fill(&bytes);
    }
    takes_its_place(&mut driver, file, &mapping);
    file.unmap_region(&mapping.region());
    assert!(driver.read(0, block).is_ok(), "after the memory was taken back");
}

/// New memory at the address of registered memory, registered as well: requests move its bytes.
fn takes_its_place<Q: drivers::direct::DirectQueue>(
    driver: &mut Driver<Q>,
    file: &VirtioBlkUringFile,
    mapping: &Mapping,
) {
    file.unmap_region(&mapping.region());
    mapping.replace();
    assert!(mapping.bytes() == vec![0; LEN], "other pages");
    file.map_region(&mapping.region());
    let bytes = pattern(7, MIB, 2);
    assert_eq!(driver.write(0, &bytes, Flags::NONE), Ok(()));
    let list = [Segment { base: mapping.base, len: MIB }];
    // SAFETY: the mapping outlives the request, which is waited for.
    let req = Request::read(unsafe { Data::new(&list) });
    assert_eq!(driver.run(&req, 0), Ok(()));
    assert!(mapping.bytes()[..MIB] == bytes, "the bytes went into pages that were there before");
}

/// Pages of this process at one address.
struct Mapping {
    base: *mut u8,
    len: usize,
}

impl Mapping {
    fn new(len: usize) -> Mapping {
        Mapping { base: map(ptr::null_mut(), len, 0), len }
    }

    /// Other pages at the same address.
    fn replace(&self) {
        map(self.base, self.len, libc::MAP_FIXED);
    }

    fn region(&self) -> MemoryRegion {
        MemoryRegion { addr: self.base.addr(), len: self.len, fd: None, fd_offset: 0 }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: mapped, initialized by the kernel, and not written while this is borrowed.
        unsafe { std::slice::from_raw_parts(self.base, self.len) }
    }

    fn fill(&self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.len);
        // SAFETY: mapped, and of this length.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.base, self.len) };
    }
}

fn map(at: *mut u8, len: usize, flags: i32) -> *mut u8 {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags;
    // SAFETY: anonymous memory, at an address of the kernel's choice or in place of our own.
    let base = unsafe { libc::mmap(at.cast(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    assert_ne!(base, libc::MAP_FAILED, "mmap: {}", std::io::Error::last_os_error());
    base.cast()
}
