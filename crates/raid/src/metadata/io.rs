//! Reads and writes metadata: small transfers with their own memory.
//!
//! They do not use the core's buffers: a request that holds many buffers may wait for this
//! metadata.

use block::{Channel, Flags, IoError, IoResult, Limits, Op, Request};
use reactor::{Buffer, BufferPool, MAX_BUFFER};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;

use super::Layout;

/// Longest transfer of metadata; every device accepts it.
pub(super) const MAX_TRANSFER: usize = 128 << 10;

/// A member that metadata is written to: the caller's channel and the member's layout.
#[derive(Clone)]
pub struct Target {
    /// The member's number in the array.
    pub slot: usize,
    /// The channel of the calling core.
    pub channel: Rc<dyn Channel>,
    /// The member's layout.
    pub layout: Layout,
}

/// The members that metadata is written to, as seen by the calling core: those that are live or
/// being rebuilt.
///
/// Asked once for each write. A write counts once it is durable on all of them.
pub trait Targets {
    /// The present members.
    fn targets(&self) -> Vec<Target>;
}

impl Targets for [Target] {
    fn targets(&self) -> Vec<Target> {
        self.to_vec()
    }
}

impl Targets for Vec<Target> {
    fn targets(&self) -> Vec<Target> {
        self.clone()
    }
}

/// Members that could not be written or read: the caller marks them failed and tries again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("metadata I/O failed on members {0:?}")]
pub struct MemberFailures(pub Vec<(usize, IoError)>);

/// Reads `len` bytes, at most [`MAX_BUFFER`].
pub(super) async fn read(channel: &dyn Channel, offset: u64, len: usize) -> Result<Buffer, IoError> {
    let buffer = BufferPool::new(MAX_BUFFER).take(len).await;
    let (buffer, result) = buffer.transfer(channel, Op::Read, Flags::NONE, offset).await;
    result.map(|()| buffer)
}

/// Reads a range of any length in parts.
pub(super) async fn read_long(channel: &dyn Channel, offset: u64, len: usize) -> Result<Vec<u8>, IoError> {
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        let part = (len - bytes.len()).min(MAX_TRANSFER);
        bytes.extend_from_slice(read(channel, offset + bytes.len() as u64, part).await?.as_slice());
    }
    Ok(bytes)
}

/// Makes `bytes` durable.
pub(crate) async fn write(channel: &dyn Channel, offset: u64, bytes: &[u8]) -> IoResult {
    for (i, part) in bytes.chunks(MAX_TRANSFER).enumerate() {
        let mut buffer = BufferPool::new(MAX_BUFFER).take(part.len()).await;
        buffer.as_mut_slice().copy_from_slice(part);
        let at = offset + (i * MAX_TRANSFER) as u64;
        buffer.transfer(channel, Op::Write, Flags::FUA, at).await.1?;
    }
    Ok(())
}

/// Makes a range read as zeroes, durably, at any cost.
pub(crate) async fn zero(channel: &dyn Channel, limits: &Limits, offset: u64, len: u64) -> IoResult {
    match zero_cheaply(channel, limits, offset, len).await {
        Err(IoError::Unsupported) => {}
        result => return result,
    }
    let mut done = 0;
    while done < len {
        let part = (len - done).min(MAX_TRANSFER as u64);
        write(channel, offset + done, &vec![0; part as usize]).await?;
        done += part;
    }
    Ok(())
}

/// Makes a range read as zeroes, durably, without a transfer of zeroes.
///
/// # Errors
/// [`IoError::Unsupported`] if the device needs a transfer of zeroes; part of the range may be
/// zeroes then.
pub(crate) async fn zero_cheaply(channel: &dyn Channel, limits: &Limits, offset: u64, len: u64) -> IoResult {
    let most = limits.max_write_zeroes.min(1 << 30) & !4095;
    if most == 0 {
        return Err(IoError::Unsupported);
    }
    let mut done = 0;
    while done < len {
        let part = (len - done).min(most);
        let req = Request::write_zeroes(part, Flags::FUA.with(Flags::NO_FALLBACK));
        channel.submit(&req, offset + done).await?;
        done += part;
    }
    Ok(())
}

/// Waits for any number of futures. Polls each again on every wake: for control paths.
pub(crate) async fn all<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    let mut futures: Vec<Pin<Box<F>>> = futures.into_iter().map(Box::pin).collect();
    let mut results: Vec<Option<F::Output>> = futures.iter().map(|_| None).collect();
    std::future::poll_fn(|cx| {
        for (future, result) in futures.iter_mut().zip(&mut results) {
            if result.is_none()
                && let Poll::Ready(ready) = future.as_mut().poll(cx)
            {
                *result = Some(ready);
            }
        }
        if results.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    results.into_iter().flatten().collect()
}
