//! Block status: the extents of a range in the context `base:allocation`.

use super::request::Blocks;
use super::wire::{CMD_FLAG_REQ_ONE, Form, Header};
use crate::target::Target;
use block::{IoError, StatusExtent, StatusReport};

/// Maximum queries to the device for one request. A device may answer for a part of a range, such
/// as one of several disks.
const MAX_QUERIES: usize = 16;

/// Reads the status of a request's range from the device: extents from the request's offset on.
pub(super) async fn extents(header: &Header, target: &Target) -> Result<Vec<StatusExtent>, IoError> {
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
    let most = if header.flags & CMD_FLAG_REQ_ONE != 0 { 1 } else { StatusReport::MAX_EXTENTS };
    Ok(cut(report.extents().take(most), blocks.head as u64, header.len))
}

/// The extents without their first `head` bytes, up to `len` bytes in all.
fn cut(extents: impl Iterator<Item = StatusExtent>, head: u64, len: u64) -> Vec<StatusExtent> {
    let (mut skip, mut left) = (head, len);
    let mut kept = Vec::new();
    for extent in extents {
        let skipped = skip.min(extent.len);
        skip -= skipped;
        let len = (extent.len - skipped).min(left);
        left -= len;
        if len > 0 {
            kept.push(StatusExtent { len, ..extent });
        }
    }
    kept
}

/// The descriptors of a reply. Those of compact headers have 32 bits for a length, which holds
/// every requested length.
pub(super) fn encode(extents: &[StatusExtent], form: Form) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(extents.len() * form.descriptor_len());
    for StatusExtent { len, status } in extents {
        let flags = status.bits();
        if form == Form::Extended {
            bytes.extend(len.to_be_bytes());
            bytes.extend(u64::from(flags).to_be_bytes());
        } else {
            bytes.extend((*len as u32).to_be_bytes());
            bytes.extend(u32::from(flags).to_be_bytes());
        }
    }
    bytes
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
