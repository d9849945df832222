//! A queue with memory and methods that run one request at a time.

use block::{Data, Flags, IoResult, Request, Segment};
use drivers::direct::DirectQueue;
use std::io;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

/// Timeout after which a request counts as lost.
const DEADLINE: Duration = Duration::from_secs(60);

/// Bytes that identify their offset.
pub fn pattern(offset: u64, len: usize, version: u64) -> Vec<u8> {
    let words = (0..len as u64 / 8).map(|i| (offset + 8 * i).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ version);
    words.flat_map(u64::to_le_bytes).collect()
}

/// Bytes that start at a page.
pub struct Memory {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Memory {
    pub fn new(len: usize) -> Memory {
        let bytes = vec![0xa5; len + 4096];
        let start = bytes.as_ptr().align_offset(4096);
        Memory { bytes, start, len }
    }

    pub fn of(content: &[u8]) -> Memory {
        let mut memory = Memory::new(content.len());
        memory.copy_from_slice(content);
        memory
    }

    pub fn segment(&mut self) -> Segment {
        Segment { base: self.as_mut_ptr(), len: self.len }
    }
}

impl Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

/// An open device.
pub trait Disk {
    type Queue: DirectQueue + 'static;

    fn open_queue(&self, depth: u32, is_polled: bool) -> io::Result<Self::Queue>;
    fn shape(&self) -> Shape;
}

/// The properties of a device that the checks depend on. Sizes are in bytes.
pub struct Shape {
    pub capacity: u64,
    pub block_size: usize,
    /// Longest transfer of one command.
    pub max_transfer: usize,
    /// Alignment of every memory segment's address and length.
    pub memory_alignment: usize,
    pub has_zones: bool,
}

pub struct Driver<Q> {
    pub queue: Q,
    pub results: Vec<(u32, IoResult)>,
}

impl<Q: DirectQueue> Driver<Q> {
    pub fn new(disk: &impl Disk<Queue = Q>, is_polled: bool) -> Driver<Q> {
        let queue = disk.open_queue(64, is_polled).expect("a queue");
        Driver { queue, results: Vec::new() }
    }

    /// Waits until `count` requests have ended.
    pub fn wait(&mut self, count: usize) {
        while self.results.len() < count {
            self.queue.wait((count - self.results.len()) as u32, Some(DEADLINE), None).expect("in time");
            self.queue.reap(&mut |slot, result| self.results.push((slot, result)));
        }
    }

    /// Runs one request to its end.
    pub fn run(&mut self, req: &Request<'_>, offset: u64) -> IoResult {
        // SAFETY: the memory outlives this function, which waits for the completion.
        unsafe { self.queue.push(0, req, offset) }?;
        self.finish()
    }

    pub fn finish(&mut self) -> IoResult {
        self.wait(1);
        assert_eq!(self.results.len(), 1);
        self.results.pop().expect("it has ended").1
    }

    pub fn write(&mut self, offset: u64, bytes: &[u8], flags: Flags) -> IoResult {
        let mut memory = Memory::of(bytes);
        let list = [memory.segment()];
        // SAFETY: as in `run`.
        self.run(&Request::write(unsafe { Data::new(&list) }, flags), offset)
    }

    pub fn read(&mut self, offset: u64, len: usize) -> Result<Memory, block::IoError> {
        let mut bytes = Memory::new(len);
        let list = [bytes.segment()];
        // SAFETY: as in `run`.
        self.run(&Request::read(unsafe { Data::new(&list) }), offset)?;
        Ok(bytes)
    }
}
