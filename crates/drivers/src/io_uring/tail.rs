//! The end of a regular file inside a block. The device includes the whole block, and the file
//! keeps its length. Bytes beyond its end read as zeroes, and only zeroes may be written there.
//!
//! Direct I/O moves whole blocks and would extend the file. So a request that changes the last
//! block uses a second descriptor of the file, which uses the page cache. The kernel keeps both
//! consistent.

use super::operation::Backing;
use block::{IoError, Op, Request};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// [`Tail::end`] of a file that ends on a block boundary, or that may grow.
const NO_END: u64 = u64::MAX;
/// Bytes that are compared with zeroes at a time.
const LOOK_BYTES: usize = 512;

/// The end of the file, shared by all queues of a device.
pub(super) struct Tail {
    end: AtomicU64,
    /// The file opened without direct I/O.
    buffered: OnceLock<File>,
    has_refused: AtomicBool,
}

impl Tail {
    /// A file without restrictions.
    pub fn none() -> Tail {
        Tail { end: AtomicU64::new(NO_END), buffered: OnceLock::new(), has_refused: AtomicBool::new(false) }
    }

    /// Sets the current size of the file.
    ///
    /// # Errors
    /// When the second descriptor that the last block of a direct file needs cannot be opened.
    pub fn set_size(&self, file: &File, backing: &Backing, size: u64, is_read_only: bool) -> io::Result<()> {
        let is_whole = backing.is_block_device || size.is_multiple_of(u64::from(backing.block_size));
        if !is_whole && backing.is_direct && !is_read_only && self.buffered.get().is_none() {
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            let _ = self.buffered.set(OpenOptions::new().read(true).write(true).open(path)?);
        }
        self.end.store(if is_whole { NO_END } else { size }, Ordering::Relaxed);
        Ok(())
    }

    /// The offset beyond which no byte may change.
    #[inline(always)]
    pub fn end(&self) -> u64 {
        self.end.load(Ordering::Relaxed)
    }

    /// The descriptor for requests that change the last block, if it differs from the device's own.
    pub fn fd(&self) -> Option<RawFd> {
        self.buffered.get().map(AsRawFd::as_raw_fd)
    }

    /// The part of a request before the end of the file.
    ///
    /// # Errors
    /// [`IoError::Medium`] for a write of other data than zeroes beyond the end, which the file
    /// cannot hold.
    pub fn clip<'a>(&self, req: &Request<'a>, offset: u64) -> Result<Request<'a>, IoError> {
        let kept = self.end().saturating_sub(offset).min(req.len);
        if req.op == Op::Write && !is_zero(&req.part(kept, req.len - kept)) {
            if !self.has_refused.swap(true, Ordering::Relaxed) {
                let end = self.end();
                tracing::warn!(
                    end,
                    "write beyond the end of an image file refused: only zeroes may be written there"
                );
            }
            return Err(IoError::Medium);
        }
        Ok(req.part(0, kept))
    }
}

fn is_zero(req: &Request<'_>) -> bool {
    let mut bytes = [0; LOOK_BYTES];
    let len = req.data.len();
    (0..len).step_by(LOOK_BYTES).all(|at| {
        let count = LOOK_BYTES.min(len - at);
        req.data.part(at, count).copy_to(&mut bytes[..count]);
        bytes[..count].iter().all(|byte| *byte == 0)
    })
}
