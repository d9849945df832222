//! Block status: the extents of a range in a metadata context.

use crate::request::Blocks;
use block::{DirtyBitmap, IoError, StatusExtent, StatusReport};
use exports::Target;
use nbd::Replies;
use nbd::request::{CMD_FLAG_REQ_ONE, Header};

/// Maximum queries to the device for one request. A device may answer for a part of a range, such
/// as one of several disks.
const MAX_QUERIES: usize = 16;

/// Flag of an extent of a dirty bitmap.
const DIRTY: u32 = 1;

/// An extent of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    /// Bytes.
    len: u64,
    /// Flags of the metadata context.
    flags: u32,
}

/// Reads the status of a request's range from the device: extents from the request's offset on in
/// the context `base:allocation`.
pub(crate) async fn extents(header: &Header, target: &Target) -> Result<Vec<Extent>, IoError> {
    let blocks = Blocks::of(header, target.block_size());
    let report = Box::new(StatusReport::new());
    for _ in 0..MAX_QUERIES {
        let covered = report.covered();
        let left = blocks.len as u64 - covered;
        // Only bytes of its last extent find room in a full report.
        if left == 0 || report.len() == StatusReport::MAX_EXTENTS {
            break;
        }
        target.block_status(&report, blocks.offset + covered, left).await?;
    }
    Ok(cut(report.extents().take(most_extents(header)), blocks.head as u64, header.len))
}

/// The extents of a request's range in the context of a dirty bitmap.
pub(crate) fn dirty(header: &Header, bitmap: &dyn DirtyBitmap) -> Vec<Extent> {
    let (mut extents, mut done): (Vec<Extent>, u64) = (Vec::new(), 0);
    for _ in 0..StatusReport::MAX_EXTENTS {
        if done == header.len {
            break;
        }
        let (is_dirty, len) = bitmap.run(header.offset + done, header.len - done);
        let flags = if is_dirty { DIRTY } else { 0 };
        let count = extents.len();
        match extents.last_mut().filter(|last| last.flags == flags) {
            Some(last) => last.len += len,
            None if count == most_extents(header) => break,
            None => extents.push(Extent { len, flags }),
        }
        done += len;
    }
    extents
}

/// Most extents of a context in the reply to a request.
fn most_extents(header: &Header) -> usize {
    if header.flags & CMD_FLAG_REQ_ONE != 0 { 1 } else { StatusReport::MAX_EXTENTS }
}

/// The extents without their first `head` bytes, up to `len` bytes in all.
fn cut(extents: impl Iterator<Item = StatusExtent>, head: u64, len: u64) -> Vec<Extent> {
    let (mut skip, mut left) = (head, len);
    let mut kept = Vec::new();
    for extent in extents {
        let skipped = skip.min(extent.len);
        skip -= skipped;
        let len = (extent.len - skipped).min(left);
        left -= len;
        if len > 0 {
            kept.push(Extent { len, flags: extent.status.bits().into() });
        }
    }
    kept
}

/// Appends the descriptors of extents. Those of compact headers have 32 bits for a length, which
/// holds every requested length.
pub(crate) fn encode(extents: &[Extent], form: Replies, bytes: &mut Vec<u8>) {
    bytes.reserve(extents.len() * form.descriptor_len());
    for Extent { len, flags } in extents {
        if form == Replies::Extended {
            bytes.extend(len.to_be_bytes());
            bytes.extend(u64::from(*flags).to_be_bytes());
        } else {
            bytes.extend((*len as u32).to_be_bytes());
            bytes.extend(flags.to_be_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::Status;

    #[test]
    fn extents_begin_and_end_with_the_request() {
        let extents = [(4096, Status::DATA), (4096, Status::ZERO_HOLE), (4096, Status::DATA)];
        let cut = |head, len| {
            let extents = extents.map(|(len, status)| StatusExtent { len, status });
            cut(extents.into_iter(), head, len).iter().map(|extent| extent.len).collect::<Vec<_>>()
        };
        assert_eq!(cut(0, 12288), [4096, 4096, 4096]);
        assert_eq!(cut(100, 12000), [3996, 4096, 3908]);
        assert_eq!(cut(4096, 1), [1]);
        assert_eq!(cut(100, 50), [50]);
    }
}
