//! Freestone, through the functions that C programs call.

use crate::{Engine, MAX_DEPTH, Settings};
use ours::capi::*;
use ours::raw::{Completion, IoQueue, Region};
use std::ffi::{CStr, CString};
use std::mem::MaybeUninit;
use std::ptr::{null_mut, without_provenance_mut};

pub struct Ours {
    blkio: *mut Blkio,
    queue: *mut IoQueue,
    region: Region,
    completions: Box<[MaybeUninit<Completion>; MAX_DEPTH]>,
}

fn check(result: i32) {
    // SAFETY: the library's own C string.
    assert!(result >= 0, "{result}: {}", unsafe { CStr::from_ptr(blkio_get_error_msg()) }.to_string_lossy());
}

impl Ours {
    pub fn open(settings: &Settings) -> Ours {
        let mut blkio = null_mut();
        let text = |text: &str| CString::new(text).unwrap();
        let mut region = Region { addr: 0, len: 0, iova: 0, fd_offset: 0, fd: -1, flags: 0 };
        // SAFETY: the pointers are to objects of our own, and calls come in the order that the API
        // requires.
        let queue = unsafe {
            check(blkio_create(text(settings.driver).as_ptr(), &raw mut blkio));
            check(blkio_set_str(blkio, c"path".as_ptr(), text(settings.path).as_ptr()));
            if settings.direct {
                check(blkio_set_bool(blkio, c"direct".as_ptr(), true));
            }
            check(blkio_connect(blkio));
            check(blkio_start(blkio));
            check(blkio_alloc_mem_region(blkio, &raw mut region, settings.bytes.next_multiple_of(4096)));
            check(blkio_map_mem_region(blkio, &raw const region));
            blkio_get_queue(blkio, 0)
        };
        Ours { blkio, queue, region, completions: Box::new([const { MaybeUninit::uninit() }; MAX_DEPTH]) }
    }
}

impl Engine for Ours {
    fn capacity(&self) -> u64 {
        let mut capacity = 0;
        // SAFETY: as in `open`.
        check(unsafe { blkio_get_uint64(self.blkio, c"capacity".as_ptr(), &raw mut capacity) });
        capacity
    }

    fn memory(&self) -> *mut u8 {
        self.region.addr as *mut u8
    }

    #[inline]
    fn read(&mut self, offset: u64, buffer: *mut u8, len: usize, token: usize) {
        // SAFETY: the buffer lies in the region, which lives as long as the queue.
        unsafe { blkioq_read(self.queue, offset, buffer.cast(), len, without_provenance_mut(token), 0) }
    }

    #[inline]
    fn complete(&mut self, min: usize, done: &mut Vec<usize>) {
        let place = self.completions.as_mut_ptr().cast();
        // SAFETY: the array has room for as many completions.
        let count = unsafe { blkioq_do_io(self.queue, place, min as i32, MAX_DEPTH as i32, null_mut()) };
        check(count);
        for completion in &self.completions[..count as usize] {
            // SAFETY: the library has filled it in.
            let completion = unsafe { completion.assume_init_ref() };
            assert_eq!(completion.ret, 0);
            done.push(completion.user_data);
        }
    }

    fn completion_fd(&mut self) -> i32 {
        // SAFETY: the queue lives.
        unsafe {
            blkioq_set_completion_fd_enabled(self.queue, true);
            blkioq_get_completion_fd(self.queue)
        }
    }
}

impl Drop for Ours {
    fn drop(&mut self) {
        // SAFETY: the last use.
        unsafe { blkio_destroy(&raw mut self.blkio) };
    }
}
