//! Which parts of a regular file have data, as its file system says.
//!
//! `lseek(2)` may read metadata from the disk, so a core never calls it: each device has a thread
//! for its queries, from the first query on. The position of the file has no other user, because
//! all transfers carry their offset.
//!
//! Source: `lseek(2)`, "Seeking file data and holes".

use super::image_lock::ImageFile;
use block::{IoError, IoFuture, Status, StatusExtent, StatusReport};
use futures_channel::oneshot;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

/// The queries of one device. Dropping it ends their thread.
#[derive(Default)]
pub(super) struct Queries(Mutex<Option<Sender<Query>>>);

/// A query on its way to the thread.
struct Query {
    file: Arc<ImageFile>,
    block_size: u64,
    offset: u64,
    len: u64,
    answer: oneshot::Sender<io::Result<Vec<StatusExtent>>>,
}

impl Queries {
    /// Asks for the status of a range of `file` in blocks of `block_size`. The future appends the
    /// answer to `report`. It ends with [`IoError::NoMemory`] when no thread can be started, and
    /// with [`IoError::Medium`] when the file system cannot read its metadata.
    pub(super) fn ask<'a>(
        &self,
        file: &Arc<ImageFile>,
        block_size: u32,
        report: &'a StatusReport,
        offset: u64,
        len: u64,
    ) -> IoFuture<'a> {
        let (sender, answer) = oneshot::channel();
        let query = Query { file: file.clone(), block_size: block_size.into(), offset, len, answer: sender };
        if let Err(error) = self.send(query) {
            tracing::warn!(%error, "cannot start a thread that looks for holes in a file");
            return IoFuture::ready(Err(IoError::NoMemory));
        }
        IoFuture::new(async move {
            let answer = answer.await.unwrap_or_else(|_| Err(io::Error::other("the thread has ended")));
            let extents = answer.map_err(|error| {
                tracing::warn!(%error, offset, len, "cannot look for holes in a file");
                IoError::Medium
            })?;
            extents.iter().all(|extent| report.push(extent.len, extent.status));
            Ok(())
        })
    }

    /// Hands a query to the thread, which starts with the first one.
    fn send(&self, query: Query) -> io::Result<()> {
        let mut sender = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let sender = match &mut *sender {
            Some(sender) => sender,
            None => {
                let (to, queries) = channel::<Query>();
                reactor::spawn_thread("file-extents", move || {
                    reactor::unbind_thread();
                    queries.into_iter().for_each(Query::answer);
                })?;
                sender.insert(to)
            }
        };
        sender.send(query).map_err(|_| io::Error::other("the thread has ended"))
    }
}

impl Query {
    fn answer(self) {
        let extents = extents(&self.file, self.block_size, self.offset, self.len);
        // The file must not stay open and locked because of a query that has been answered.
        drop(self.file);
        // The future of a query may have been dropped at the end of its core.
        let _ = self.answer.send(extents);
    }
}

/// The extents of the range's first bytes, at most as many as a report holds. A hole is reported as
/// far as it has whole blocks; all else is data. Everything behind the end of the file is a hole.
fn extents(file: &File, block_size: u64, offset: u64, len: u64) -> io::Result<Vec<StatusExtent>> {
    let end = offset + len;
    let mut found = Vec::new();
    let mut at = offset;
    while at < end && found.len() + 2 <= StatusReport::MAX_EXTENTS {
        let data = seek(file, at, libc::SEEK_DATA)?.unwrap_or(end).min(end) & !(block_size - 1);
        if data > at {
            found.push(StatusExtent { len: data - at, status: Status::ZERO_HOLE });
            at = data;
        }
        if at == end {
            break;
        }
        // A block that has any data is data.
        let hole = seek(file, at, libc::SEEK_HOLE)?.unwrap_or(end).max(at + 1);
        let hole = hole.checked_next_multiple_of(block_size).unwrap_or(end).min(end);
        found.push(StatusExtent { len: hole - at, status: Status::DATA });
        at = hole;
    }
    Ok(found)
}

/// The next byte from `at` on that has data, or that has none. `None` if there is none, and, for a
/// file system that does not know, if all is data.
fn seek(file: &File, at: u64, whence: libc::c_int) -> io::Result<Option<u64>> {
    let Ok(at) = libc::off64_t::try_from(at) else { return Ok(None) };
    // SAFETY: moves the position of an open file, which has no other user.
    let found = unsafe { libc::lseek64(file.as_raw_fd(), at, whence) };
    if let Ok(found) = u64::try_from(found) {
        return Ok(Some(found));
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::ENXIO) => Ok(None),
        Some(libc::EINVAL | libc::EOPNOTSUPP) if whence == libc::SEEK_DATA => Ok(Some(at as u64)),
        Some(libc::EINVAL | libc::EOPNOTSUPP) => Ok(None),
        _ => Err(error),
    }
}
