//! Keeps a benchmark from writing over what somebody might miss.

use super::Mapped;
use super::signature::{self, FIRST_BYTES, LAST_BYTES};
use crate::error::Error;
use block::{Channel, Device, Flags, Op};
use drivers::shared_buffer::SharedBuffer;
use reactor::CoreRef;
use std::sync::Arc;

/// Bytes of one read.
const STEP: u64 = 64 << 10;

/// Looks at the device's ends for marks of file systems and the like.
///
/// # Errors
/// When there is one, or the device cannot be read.
pub fn refuse_to_destroy(core: &CoreRef, device: &Arc<dyn Device>) -> Result<(), Error> {
    let (first, last) = read_ends(core, device)?;
    match signature::find(&first, &last) {
        None => Ok(()),
        Some(what) => {
            let name = device.name();
            Err(Error::Runtime(format!("device {name}: seems to hold {what}: writing needs --force")))
        }
    }
}

/// The device's first and last bytes.
fn read_ends(core: &CoreRef, device: &Arc<dyn Device>) -> Result<(Vec<u8>, Vec<u8>), Error> {
    let limits = device.limits();
    let block = u64::from(limits.block_size);
    let step = STEP.min(u64::from(limits.max_transfer) / block * block).max(block).min(limits.capacity);
    let (memory, buffers) = SharedBuffer::allocate(1, step as usize)
        .map_err(|e| Error::Runtime(format!("cannot allocate a buffer: {e}")))?;
    let _mapped = Mapped::new(device, memory)?;
    let device = device.clone();
    core.block_on(move |_| async move {
        let mut reader = Reader {
            channel: &*device.open_channel()?,
            name: device.name(),
            capacity: limits.capacity,
            buffer: buffers.into_iter().next(),
        };
        let first = reader.read(0, limits.capacity.min(FIRST_BYTES as u64)).await?;
        let len = limits.capacity.min(LAST_BYTES as u64);
        Ok((first, reader.read(limits.capacity - len, len).await?))
    })?
}

struct Reader<'a> {
    channel: &'a dyn Channel,
    name: &'a str,
    capacity: u64,
    /// `None` while a request has it.
    buffer: Option<SharedBuffer>,
}

impl Reader<'_> {
    /// Any range of the device; both ends of what is read are aligned as the buffer's length is.
    async fn read(&mut self, offset: u64, len: u64) -> Result<Vec<u8>, Error> {
        let mut bytes = Vec::with_capacity(len as usize);
        while (bytes.len() as u64) < len {
            let buffer = self.buffer.take().expect("idle");
            let step = buffer.len() as u64;
            let at = offset + bytes.len() as u64;
            // All reads have one length: where the next block border is nearer to the end, start before it.
            let from = (at / step * step).min(self.capacity - step);
            let (buffer, result) = buffer.transfer(self.channel, Op::Read, Flags::NONE, from).await;
            result.map_err(|error| {
                Error::Runtime(format!("device {}: cannot read byte {from}: {error}", self.name))
            })?;
            let mut piece = vec![0; step as usize];
            buffer.read(&mut piece);
            self.buffer = Some(buffer);
            let fresh = &piece[(at - from) as usize..];
            bytes.extend_from_slice(&fresh[..fresh.len().min(len as usize - bytes.len())]);
        }
        Ok(bytes)
    }
}
