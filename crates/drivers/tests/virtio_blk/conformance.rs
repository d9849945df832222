//! The suite that every device passes.

use crate::server::Server;
use block::{Channel, Data, Device, Flags, Op, Request, Segment};
use conformance::{BufferSource, Layout, RequestBuffer, Suite, Transfer};
use drivers::shared_memory::SharedMemory;
use drivers::virtio_blk::{Choice, Options, VirtioBlk};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

const BUFFERS: usize = 64;

/// Buffers that the server knows.
#[derive(Clone)]
struct SharedBuffers {
    memory: Arc<SharedMemory>,
    free: Arc<Mutex<Vec<usize>>>,
}

struct SharedBuffer {
    from: SharedBuffers,
    index: usize,
    len: usize,
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

fn run(change: impl FnOnce(&mut Options)) {
    let Some(server) = Server::start() else { return };
    let mut options = Options::new(server.socket());
    change(&mut options);
    let device = VirtioBlk::open(&options).unwrap();
    let memory = Arc::new(SharedMemory::new(BUFFERS * reactor::MAX_BUFFER).unwrap());
    device.map_region(&memory.region()).unwrap();
    let buffers = SharedBuffers { memory, free: Arc::new(Mutex::new((0..BUFFERS).collect())) };
    Suite::new(Arc::new(device)).buffers(Arc::new(buffers)).run();
}

#[test]
fn the_client_is_a_device_as_every_other() {
    run(|_| ());
}

#[test]
fn the_client_is_a_device_without_indirect_descriptors() {
    run(|options| {
        options.indirect = Choice::Off;
        options.event_idx = Choice::Off;
        options.queue_size = 16;
    });
}
