//! Buffers in memory that a device knows, for the suite that every device passes.

use block::{Channel, Data, Device, DeviceError, Flags, Op, Request, Segment};
use conformance::{BufferSource, Layout, RequestBuffer, Transfer};
use drivers::shared_memory::SharedMemory;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

const BUFFERS: usize = 64;

/// Buffers that a device knows.
#[derive(Clone)]
pub struct SharedBuffers {
    memory: Arc<SharedMemory>,
    free: Arc<Mutex<Vec<usize>>>,
}

/// One of them.
struct SharedBuffer {
    from: SharedBuffers,
    index: usize,
    len: usize,
}

impl SharedBuffers {
    /// New buffers, which `device` knows from now on.
    pub fn new(device: &dyn Device) -> Result<SharedBuffers, DeviceError> {
        let memory = SharedMemory::new(BUFFERS * reactor::MAX_BUFFER)
            .map_err(|e| DeviceError::new(device.name(), "no memory for buffers").because(e))?;
        device.map_region(&memory.region())?;
        Ok(SharedBuffers { memory: Arc::new(memory), free: Arc::new(Mutex::new((0..BUFFERS).collect())) })
    }
}

impl BufferSource for SharedBuffers {
    fn take(&self, len: usize) -> Pin<Box<dyn Future<Output = Box<dyn RequestBuffer>>>> {
        let from = self.clone();
        Box::pin(async move {
            loop {
                let index = from.free.lock().unwrap().pop();
                if let Some(index) = index {
                    return Box::new(SharedBuffer { from, index, len }) as Box<dyn RequestBuffer>;
                }
                reactor::yield_now().await;
            }
        })
    }
}

impl Drop for SharedBuffer {
    fn drop(&mut self) {
        self.from.free.lock().unwrap().push(self.index);
    }
}

impl RequestBuffer for SharedBuffer {
    fn bytes(&mut self) -> &mut [u8] {
        let Segment { base, len } = self.from.memory.segment(self.index * reactor::MAX_BUFFER, self.len);
        // SAFETY: the piece is this buffer's alone, and no request uses it now.
        unsafe { std::slice::from_raw_parts_mut(base, len) }
    }

    fn transfer<'a>(
        self: Box<Self>,
        channel: &'a dyn Channel,
        op: Op,
        flags: Flags,
        offset: u64,
        layout: &'a Layout,
    ) -> Transfer<'a> {
        Box::pin(async move {
            let mut at = self.index * reactor::MAX_BUFFER + layout.skip;
            let mut next = |len| {
                at += len;
                self.from.memory.segment(at - len, len)
            };
            let segments: Vec<Segment> = layout.lens.iter().map(|len| next(*len)).collect();
            // SAFETY: this future owns buffer and list until the request has completed.
            let data = unsafe { Data::new(&segments) };
            let req = Request { op, flags, len: data.len() as u64, data };
            let result = channel.submit(&req, offset).await;
            (self as Box<dyn RequestBuffer>, result)
        })
    }
}
