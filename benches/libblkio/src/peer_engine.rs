//! The crate `blkio`, which libblkio's C functions wrap.

use crate::{Engine, MAX_DEPTH, Settings};
use peer::{Blkio, Blkioq, Completion, MemoryRegion, ReqFlags};
use std::mem::MaybeUninit;

pub struct Peer {
    queue: Blkioq,
    blkio: Blkio,
    region: MemoryRegion,
    completions: Box<[MaybeUninit<Completion>; MAX_DEPTH]>,
}

impl Peer {
    pub fn open(settings: &Settings) -> Peer {
        let mut blkio = Blkio::new(settings.driver).unwrap();
        blkio.set_str("path", settings.path).unwrap();
        if settings.direct {
            blkio.set_bool("direct", true).unwrap();
        }
        blkio.connect().unwrap();
        let queue = blkio.start().unwrap().queues.remove(0);
        let region = blkio.alloc_mem_region(settings.bytes.next_multiple_of(4096)).unwrap();
        blkio.map_mem_region(&region).unwrap();
        Peer { queue, blkio, region, completions: Box::new([const { MaybeUninit::uninit() }; MAX_DEPTH]) }
    }
}

impl Engine for Peer {
    fn capacity(&self) -> u64 {
        self.blkio.get_u64("capacity").unwrap()
    }

    fn memory(&self) -> *mut u8 {
        self.region.addr as *mut u8
    }

    #[inline]
    fn read(&mut self, offset: u64, buffer: *mut u8, len: usize, token: usize) {
        self.queue.read(offset, buffer, len, token, ReqFlags::empty());
    }

    #[inline]
    fn complete(&mut self, min: usize, done: &mut Vec<usize>) {
        let count = self.queue.do_io(&mut self.completions[..], min, None, None).unwrap();
        for completion in &self.completions[..count] {
            // SAFETY: the library has filled it in.
            let completion = unsafe { completion.assume_init_ref() };
            assert_eq!(completion.ret, 0);
            done.push(completion.user_data);
        }
    }

    fn completion_fd(&mut self) -> i32 {
        self.queue.set_completion_fd_enabled(true);
        self.queue.get_completion_fd().unwrap()
    }
}
