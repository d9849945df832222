//! Keeps a benchmark from overwriting the content of a device.

use super::Mapped;
use crate::error::Error;
use block::{Channel, Device, Flags, IoError, Op};
use drivers::shared_buffer::SharedBuffer;
use reactor::CoreRef;
use std::cell::Cell;
use std::sync::Arc;

/// Bytes of one read: no more, so that an unreadable block hides only its neighbours.
const STEP: u64 = 4096;

/// Looks for signatures of file systems and the like.
///
/// # Errors
/// When the device has one, has unreadable blocks where one could be, or fails.
pub fn refuse_to_destroy(core: &CoreRef, device: &Arc<dyn Device>) -> Result<(), Error> {
    let name = device.name();
    let findings = probe(core, device)?;
    match findings.is_empty() {
        true => Ok(()),
        false => Err(Error::Runtime(format!("device {name} holds {findings}: writing needs --force"))),
    }
}

fn probe(core: &CoreRef, device: &Arc<dyn Device>) -> Result<signatures::Findings, Error> {
    let limits = device.limits();
    let block = u64::from(limits.block_size);
    let step = STEP.max(block).min(limits.capacity);
    let (memory, buffers) = SharedBuffer::allocate(1, step as usize)
        .map_err(|e| Error::Runtime(format!("cannot allocate a buffer: {e}")))?;
    let _mapped = Mapped::new(device, memory)?;
    let device = device.clone();
    core.block_on(move |_| async move {
        let reader = Reader {
            channel: &*device.open_channel()?,
            capacity: limits.capacity,
            buffer: Cell::new(buffers.into_iter().next()),
        };
        let read = async |offset: u64, len: usize| reader.read(offset, len).await;
        signatures::probe(limits.capacity, limits.block_size, read)
            .await
            .map_err(|error| Error::Runtime(format!("device {}: cannot be read: {error}", device.name())))
    })?
}

struct Reader<'a> {
    channel: &'a dyn Channel,
    capacity: u64,
    /// `None` while a request has it.
    buffer: Cell<Option<SharedBuffer>>,
}

impl Reader<'_> {
    /// Any range of whole blocks. Every request has the buffer's length.
    async fn read(&self, offset: u64, len: usize) -> Result<Vec<u8>, IoError> {
        let mut bytes = Vec::with_capacity(len);
        while bytes.len() < len {
            let buffer = self.buffer.take().expect("idle");
            let step = buffer.len() as u64;
            let at = offset + bytes.len() as u64;
            // Where the device's end is nearer than a step, start before it.
            let from = at.min(self.capacity - step);
            let (buffer, result) = buffer.transfer(self.channel, Op::Read, Flags::NONE, from).await;
            let mut piece = vec![0; step as usize];
            buffer.read(&mut piece);
            self.buffer.set(Some(buffer));
            result?;
            let fresh = &piece[(at - from) as usize..];
            bytes.extend_from_slice(&fresh[..fresh.len().min(len - bytes.len())]);
        }
        Ok(bytes)
    }
}
