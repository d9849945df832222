//! One request of the kernel: its execution and answer.

use super::uapi::{Descriptor, op};
use block::{Data, Flags, IoError, IoResult, Op, Request};
use exports::{QueueStats, Target};
use reactor::Buffer;

/// Executes a request that moves no data.
pub(super) async fn control(target: &Target, descriptor: &Descriptor, stats: &QueueStats) -> IoResult {
    let fua = if descriptor.has(op::F_FUA) { target.durable() } else { Flags::NONE };
    let offset = descriptor.offset().ok_or(IoError::OutOfRange);
    let (op, result) = match descriptor.op() {
        op::FLUSH => (Op::Flush, target.flush().await),
        op::DISCARD => {
            let request = Request::discard(descriptor.len());
            (Op::Discard, modify(target, &request, offset).await)
        }
        op::WRITE_ZEROES => {
            let keep = if descriptor.has(op::F_NOUNMAP) { Flags::NO_UNMAP } else { Flags::NONE };
            let request = Request::write_zeroes(descriptor.len(), fua.with(keep));
            (Op::WriteZeroes, modify(target, &request, offset).await)
        }
        _ => return Err(IoError::Unsupported),
    };
    stats.count_request(op, 0);
    result
}

async fn modify(target: &Target, request: &Request<'_>, offset: Result<u64, IoError>) -> IoResult {
    target.modify(request, offset?).await
}

/// Fills `buffer` from the device.
pub(super) async fn read(
    target: &Target,
    descriptor: &Descriptor,
    buffer: &Buffer,
    stats: &QueueStats,
) -> IoResult {
    let segment = buffer.segment();
    // SAFETY: the caller keeps the buffer until this has ended, and nothing else refers to it.
    let data = unsafe { Data::one(&segment) };
    let result = transfer(target, Op::Read, descriptor, data).await;
    stats.count_request(Op::Read, segment.len as u64);
    result
}

/// Writes the request's data from the front of `buffer` to the device.
pub(super) async fn write(
    target: &Target,
    descriptor: &Descriptor,
    buffer: &Buffer,
    stats: &QueueStats,
) -> IoResult {
    let segment = buffer.segment();
    // SAFETY: as in `read`. The kernel has copied the data before, and changes it no more.
    let data = unsafe { Data::one(&segment).stable() };
    // The kernel may have copied less than it had announced; it sends another request for the rest.
    let data = data.part(0, data.len().min(descriptor.len() as usize));
    let result = transfer(target, Op::Write, descriptor, data).await;
    stats.count_request(Op::Write, data.len() as u64);
    result
}

/// Reads or writes the kernel's own buffer, which is registered as `tag` with the ring number
/// `ring`.
///
/// # Errors
/// [`IoError::Unsupported`] if the device must look at the bytes. Then the request counts as not
/// executed, and is to be repeated with a buffer.
pub(super) async fn registered(
    target: &Target,
    op: Op,
    descriptor: &Descriptor,
    (ring, tag): (u32, u16),
    stats: &QueueStats,
) -> IoResult {
    // The kernel registers the buffer before it hands the request over, and unregisters it at its
    // commit, which follows. The queue closes its ring after its last request.
    let data = Data::registered(ring, tag, descriptor.len() as usize);
    let result = transfer(target, op, descriptor, data).await;
    if result != Err(IoError::Unsupported) {
        stats.count_request(op, descriptor.len());
    }
    result
}

async fn transfer(target: &Target, op: Op, descriptor: &Descriptor, data: Data<'_>) -> IoResult {
    let offset = descriptor.offset().ok_or(IoError::OutOfRange)?;
    if op == Op::Read {
        return target.submit(&Request::read(data), offset).await;
    }
    let flags = if descriptor.has(op::F_FUA) { target.durable() } else { Flags::NONE };
    target.modify(&Request::write(data, flags), offset).await
}

/// The result of a request for the kernel: bytes, or a negative errno that its block layer knows.
#[inline]
pub(super) fn answer(result: IoResult, bytes: u64) -> i32 {
    let errno = match result {
        Ok(()) => return bytes as i32, // no request is longer than 1 MiB
        Err(IoError::OutOfRange | IoError::Misaligned | IoError::Invalid) => libc::EINVAL,
        // Programs expect EIO for a medium error, so ENODATA is not used.
        Err(IoError::ReadOnly | IoError::Medium) => libc::EIO,
        Err(IoError::Unsupported) => libc::EOPNOTSUPP,
        Err(IoError::NoSpace) => libc::ENOSPC,
        Err(IoError::Corrupt) => libc::EILSEQ,
        Err(IoError::TimedOut) => libc::ETIMEDOUT,
        Err(IoError::DeviceGone) => libc::ENODEV,
        Err(IoError::NoMemory) => libc::ENOMEM,
        Err(IoError::TooManyActiveZones) => libc::EOVERFLOW,
        Err(IoError::TooManyOpenZones) => libc::ETOOMANYREFS,
    };
    -errno
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_one_that_the_kernels_block_layer_knows() {
        assert_eq!(answer(Ok(()), 4096), 4096);
        assert_eq!(answer(Err(IoError::Medium), 4096), -libc::EIO);
        assert_eq!(answer(Err(IoError::Unsupported), 0), -libc::EOPNOTSUPP);
        assert_eq!(answer(Err(IoError::NoSpace), 0), -libc::ENOSPC);
        assert_eq!(answer(Err(IoError::DeviceGone), 0), -libc::ENODEV);
        assert_eq!(answer(Err(IoError::OutOfRange), 0), -libc::EINVAL);
        assert_eq!(answer(Err(IoError::Corrupt), 0), -libc::EILSEQ);
    }
}
