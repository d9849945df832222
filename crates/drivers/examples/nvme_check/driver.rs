//! A queue with words for one request at a time, and memory for it.

use block::{Data, Flags, IoResult, Queue, Request, Segment};
use drivers::direct::{DirectQueue, Zone, ZoneAction, ZoneRequest};
use drivers::nvme_uring::{NvmeFile, NvmeQueue};
use std::time::Duration;

/// How long a request may take before it counts as lost.
const DEADLINE: Duration = Duration::from_secs(60);

/// Bytes that tell where they belong.
pub fn pattern(offset: u64, len: usize, version: u64) -> Vec<u8> {
    let words = (0..len as u64 / 8).map(|i| (offset + 8 * i).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ version);
    words.flat_map(u64::to_le_bytes).collect()
}

pub struct Driver {
    pub queue: NvmeQueue,
    pub results: Vec<(u32, IoResult)>,
}

impl Driver {
    pub fn new(file: &NvmeFile, is_polled: bool) -> Driver {
        let queue = file.open_queue(64, is_polled).expect("a queue");
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
        let list = [Segment { base: bytes.as_ptr().cast_mut(), len: bytes.len() }];
        // SAFETY: as in `run`; a write only reads its memory.
        self.run(&Request::write(unsafe { Data::new(&list) }, flags), offset)
    }

    pub fn read(&mut self, offset: u64, len: usize) -> Result<Vec<u8>, block::IoError> {
        let mut bytes = vec![0xa5; len];
        let list = [Segment { base: bytes.as_mut_ptr(), len }];
        // SAFETY: as in `run`.
        self.run(&Request::read(unsafe { Data::new(&list) }), offset)?;
        Ok(bytes)
    }

    /// Up to `max` zones from the one at `offset` on.
    pub fn report(&mut self, offset: u64, max: u32) -> Result<Vec<Zone>, block::IoError> {
        let mut zones = vec![Zone::default(); max as usize];
        let mut reported = u32::MAX;
        let req = ZoneRequest::Report { offset, zones: zones.as_mut_ptr(), max, reported: &raw mut reported };
        // SAFETY: zones and number outlive the request, which is waited for.
        unsafe { self.queue.push_zone(0, req) }?;
        self.finish()?;
        zones.truncate(reported as usize);
        Ok(zones)
    }

    pub fn zone(&mut self, req: ZoneRequest) -> IoResult {
        // SAFETY: no memory.
        unsafe { self.queue.push_zone(0, req) }?;
        self.finish()
    }

    pub fn manage(&mut self, action: ZoneAction, offset: u64) -> IoResult {
        self.zone(ZoneRequest::Manage(action, offset))
    }

    pub fn manage_all(&mut self, action: ZoneAction) -> IoResult {
        self.zone(ZoneRequest::ManageAll(action))
    }
}
