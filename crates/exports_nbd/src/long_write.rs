//! A long write, and how it is cut into fragments.

use block::{IoError, IoResult};
use exports::stream::FRAGMENT;
use nbd::request::Header;
use std::cell::Cell;
use std::future::Future;
use std::rc::Rc;

/// A long write, received in fragments.
#[derive(Clone)]
pub(crate) struct LongWrite {
    /// The whole request.
    pub(crate) header: Header,
    /// Bytes of the write that this fragment and the earlier ones cover.
    pub(crate) end: u64,
    /// The error of the first fragment that failed.
    failed: Rc<Cell<Option<IoError>>>,
}

impl LongWrite {
    pub(crate) fn new(header: Header) -> LongWrite {
        LongWrite { header, end: 0, failed: Rc::default() }
    }

    /// Bytes that later fragments will cover.
    pub(crate) fn left(&self) -> u64 {
        self.header.len - self.end
    }

    /// The next fragment: the updated write, and the fragment's own header.
    pub(crate) fn next(&self, block_size: u32) -> (LongWrite, Header) {
        let offset = self.header.offset + self.end;
        let len = self.left().min(fragment_at(offset, block_size));
        let header = Header { offset, len, ..self.header };
        (LongWrite { end: self.end + len, ..self.clone() }, header)
    }

    /// Stores a fragment with `execute`, unless an earlier one has failed. Returns `None` when more
    /// fragments follow, else the result of the whole write.
    pub(crate) async fn store(&self, execute: impl Future<Output = IoResult>) -> Option<IoResult> {
        if self.failed.get().is_none() {
            self.failed.set(execute.await.err());
        }
        (self.left() == 0).then(|| self.failed.get().map_or(Ok(()), Err))
    }
}

/// Length of the longest fragment that starts at `offset`: together with all of its first block it
/// fits the memory of one fragment.
pub(crate) fn fragment_at(offset: u64, block_size: u32) -> u64 {
    FRAGMENT as u64 - offset % u64::from(block_size)
}
