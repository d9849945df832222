//! One core's access to a file: its queue, and transfers from and to registered buffers.
//!
//! A registered buffer belongs to the ring of an export. So its transfers go to that ring
//! ([`reactor::SharedRing`]), and all other requests to the queue's own.

use super::entry::registered_entry;
use super::operation::{Next, Operation, Ways};
use super::queue::{Shared, UringQueue};
use block::{Channel, IoError, IoFuture, IoResult, Op, Request, SharedLimits, StatusReport};
use reactor::{QueueChannel, SharedRing};
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::sync::Arc;

/// The channel of a file that takes registered buffers.
pub(super) struct UringChannel {
    queue: Rc<QueueChannel<UringQueue>>,
    limits: Arc<SharedLimits>,
    shared: Arc<Shared>,
}

impl UringChannel {
    /// Serves `queue` on the calling core.
    pub fn open(queue: UringQueue, limits: Arc<SharedLimits>, shared: Arc<Shared>) -> Rc<Self> {
        let queue = QueueChannel::open(queue, limits.clone());
        Rc::new(UringChannel { queue, limits, shared })
    }

    /// Reads or writes a registered buffer.
    ///
    /// # Errors
    /// [`IoError::Unsupported`] where the bytes must be looked at (at the end of a file inside a
    /// block) or copied (for the alignment of memory).
    async fn transfer_registered(&self, req: &Request<'_>, offset: u64) -> IoResult {
        self.limits.check(req, offset)?;
        let Shared { file, backing, tail, .. } = &*self.shared;
        if req.op == Op::Write && offset.saturating_add(req.len) > tail.end() {
            return Err(IoError::Unsupported);
        }
        let (mut operation, mut ways) = (Operation::idle(), Ways::all());
        // SAFETY: the buffer stays registered until the request has completed, by the contract of
        // `Data::registered`.
        unsafe { operation.begin(req, offset, &ways, backing) }?;
        loop {
            let entry = registered_entry(&operation, file.as_raw_fd());
            let (ring, entry) = entry.expect("a part of a registered buffer is registered");
            let ring = SharedRing::of(ring);
            // SAFETY: as above; the entry points at no memory of this process.
            let answer = unsafe { ring.run(entry) }.await;
            if answer == -libc::EINVAL {
                // Direct I/O demands more of the memory: a copy has that alignment.
                return Err(IoError::Unsupported);
            }
            if let Next::Finished(result) = operation.complete(answer, &mut ways, backing) {
                return self.shared.judge(req.op, req.flags, result);
            }
        }
    }
}

impl Channel for UringChannel {
    #[inline]
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        if req.data.is_registered() && !req.data.is_empty() {
            return IoFuture::new(self.transfer_registered(req, offset));
        }
        self.queue.submit(req, offset)
    }

    #[inline]
    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        self.queue.block_status(report, offset, len)
    }
}
