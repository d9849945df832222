//! One core's view of the device under test, with words for what checks do all the time.

use crate::{BufferSource, Layout, Subject, caught};
use block::{Channel, Data, Device, Flags, IoResult, Limits, Op, Request, StatusExtent, StatusReport};
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;

/// Fills memory before a read, so that bytes that the device did not write are visible.
const POISON: u8 = 0xa5;

#[derive(Clone)]
pub struct Client {
    pub channel: Rc<dyn Channel>,
    pub device: Arc<dyn Device>,
    pub limits: Limits,
    pub keeps_data: bool,
    pub seed: u64,
    buffers: Arc<dyn BufferSource>,
}

impl Client {
    /// Opens a channel on the calling core.
    pub fn new(subject: &Subject) -> Client {
        let device = subject.device.clone();
        let channel = device.open_channel().unwrap_or_else(|e| panic!("cannot open a channel: {e}"));
        let (limits, buffers) = (device.limits(), subject.buffers.clone());
        Client { channel, device, limits, keeps_data: subject.keeps_data, seed: subject.seed, buffers }
    }

    pub fn block_size(&self) -> u64 {
        u64::from(self.limits.block_size)
    }

    /// `len` rounded down to what one transfer of the suite may have.
    pub fn transfer_len(&self, len: usize) -> usize {
        len.min(self.limits.max_transfer as usize).min(reactor::MAX_BUFFER / 2)
    }

    /// A write of `bytes` from memory cut as `layout` says.
    pub async fn write_as(&self, offset: u64, bytes: &[u8], flags: Flags, layout: &Layout) -> IoResult {
        assert_eq!(bytes.len(), layout.len());
        let mut buffer = self.buffers.take(layout.skip + bytes.len()).await;
        buffer.bytes()[layout.skip..][..bytes.len()].copy_from_slice(bytes);
        let (mut buffer, result) = buffer.transfer(&*self.channel, Op::Write, flags, offset, layout).await;
        let is_same = &buffer.bytes()[layout.skip..][..bytes.len()] == bytes;
        assert!(is_same, "a write changed the caller's memory");
        result
    }

    /// A read into memory cut as `layout` says; checks that the memory around it stays as it was.
    pub async fn read_as(&self, offset: u64, layout: &Layout) -> (Vec<u8>, IoResult) {
        let len = layout.len();
        let mut buffer = self.buffers.take(layout.skip + len + 1).await;
        buffer.bytes().fill(POISON);
        let (mut buffer, result) =
            buffer.transfer(&*self.channel, Op::Read, Flags::NONE, offset, layout).await;
        let bytes = buffer.bytes();
        for outside in [&bytes[..layout.skip], &bytes[layout.skip + len..]] {
            assert!(outside == vec![POISON; outside.len()], "a read wrote beyond the caller's memory");
        }
        (bytes[layout.skip..][..len].to_vec(), result)
    }

    pub async fn try_write(&self, offset: u64, len: usize) -> IoResult {
        self.write_as(offset, &vec![POISON; len], Flags::NONE, &Layout::whole(len)).await
    }

    pub async fn try_read(&self, offset: u64, len: usize) -> IoResult {
        self.read_as(offset, &Layout::whole(len)).await.1
    }

    /// A write that must succeed.
    pub async fn write(&self, offset: u64, bytes: &[u8]) {
        let result = self.write_as(offset, bytes, Flags::NONE, &Layout::whole(bytes.len())).await;
        assert_eq!(result, Ok(()), "write of {} bytes at {offset}", bytes.len());
    }

    /// A read that must succeed.
    pub async fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let (bytes, result) = self.read_as(offset, &Layout::whole(len)).await;
        assert_eq!(result, Ok(()), "read of {len} bytes at {offset}");
        bytes
    }

    /// A read that must return `expected`, if the device keeps data.
    pub async fn expect(&self, offset: u64, expected: &[u8], when: &str) {
        let (bytes, result) = self.read_as(offset, &Layout::whole(expected.len())).await;
        assert_eq!(result, Ok(()), "read of {} bytes at {offset} {when}", expected.len());
        self.compare(offset, &bytes, expected, when);
    }

    /// Names the first byte that is not as expected.
    pub fn compare(&self, offset: u64, bytes: &[u8], expected: &[u8], when: &str) {
        if !self.keeps_data || bytes == expected {
            return;
        }
        if let Some(at) = bytes.iter().zip(expected).position(|(a, b)| a != b) {
            let (got, wanted) = (bytes[at], expected[at]);
            panic!("byte {} is {got:#04x}, not {wanted:#04x}, {when}", offset + at as u64);
        }
    }

    /// An operation without memory.
    pub async fn command(&self, op: Op, flags: Flags, offset: u64, len: u64) -> IoResult {
        let req = Request { op, flags, len, data: Data::none() };
        self.channel.submit(&req, offset).await
    }

    /// A query of block status, for its result.
    pub async fn try_status(&self, offset: u64, len: u64) -> IoResult {
        let report = StatusReport::new();
        let result = self.channel.block_status(&report, offset, len).await;
        assert!(result.is_ok() || report.is_empty(), "a refused query is answered with {report:?}");
        result
    }

    /// The status of a range, from as many queries as the device wants.
    pub async fn status(&self, offset: u64, len: u64) -> Vec<StatusExtent> {
        let mut all = Vec::new();
        let mut done = 0;
        while done < len {
            let report = StatusReport::new();
            let result = self.channel.block_status(&report, offset + done, len - done).await;
            assert_eq!(result, Ok(()), "status of {} bytes at {}", len - done, offset + done);
            let covered = report.covered();
            assert!((1..=len - done).contains(&covered), "a status of {} bytes covers {covered}", len - done);
            let is_whole = |extent: &StatusExtent| extent.len.is_multiple_of(self.block_size());
            assert!(report.extents().all(|extent| is_whole(&extent)), "parts of blocks: {report:?}");
            all.extend(report.extents());
            done += covered;
        }
        all
    }

    pub async fn flush(&self) {
        assert_eq!(self.command(Op::Flush, Flags::NONE, 0, 0).await, Ok(()), "flush");
    }

    /// Runs `count` tasks at once and waits for all; then fails as the first that failed did.
    pub async fn all_at_once<F: Future<Output = ()> + 'static>(
        &self,
        count: usize,
        task: impl Fn(usize, Client) -> F,
    ) {
        let left = Rc::new(Cell::new(count));
        let failure = Rc::new(RefCell::new(None));
        for i in 0..count {
            let (left, failure) = (left.clone(), failure.clone());
            let future = caught(task(i, self.clone()));
            reactor::current().spawn(async move {
                if let Err(panic) = future.await {
                    failure.borrow_mut().get_or_insert(panic);
                }
                left.set(left.get() - 1);
            });
        }
        while left.get() > 0 {
            reactor::yield_now().await;
        }
        let failure = failure.take();
        if let Some(panic) = failure {
            std::panic::resume_unwind(panic);
        }
    }
}

/// Bytes that differ from place to place and from version to version. `offset` is a multiple of 8.
pub fn pattern(offset: u64, len: usize, version: u8) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fill(&mut bytes, offset / 8 + (u64::from(version) << 48));
    bytes
}

/// Fills `bytes` with words that differ, counting from `first`.
pub fn fill(bytes: &mut [u8], first: u64) {
    // Words, not bytes: the suite runs without optimisation too.
    for (i, word) in bytes.chunks_mut(8).enumerate() {
        let value = (first.wrapping_add(i as u64)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        word.copy_from_slice(&value.to_le_bytes()[..word.len()]);
    }
}
