//! Memory for the conformance suite that the server shares.

use block::{Channel, Data, Flags, IoResult, Op, Request, Segment};
use conformance::{BufferSource, Layout, RequestBuffer, Transfer};
use drivers::shared_memory::SharedMemory;
use reactor::{MAX_BUFFER, yield_now};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

const PAGE: usize = 4096;

/// One piece of shared memory, cut into buffers as they are asked for.
#[derive(Clone)]
pub struct SharedBuffers {
    pub memory: Arc<SharedMemory>,
    places: Arc<Mutex<Places>>,
}

#[derive(Default)]
struct Places {
    /// Total bytes cut off so far.
    cut: usize,
    /// Offsets of free buffers, by the exponent of their length.
    free: [Vec<usize>; 21],
}

impl SharedBuffers {
    pub fn new(bytes: usize) -> SharedBuffers {
        SharedBuffers { memory: Arc::new(SharedMemory::new(bytes).unwrap()), places: Arc::default() }
    }

    fn try_take(&self, len: usize) -> Option<usize> {
        let mut places = self.places.lock().unwrap();
        if let Some(offset) = places.free[len.ilog2() as usize].pop() {
            return Some(offset);
        }
        let offset = places.cut;
        (offset + len <= self.memory.len()).then(|| {
            places.cut += len;
            offset
        })
    }
}

impl BufferSource for SharedBuffers {
    fn take(&self, len: usize) -> Pin<Box<dyn Future<Output = Box<dyn RequestBuffer>>>> {
        assert!(len <= MAX_BUFFER);
        let (source, len) = (self.clone(), len.max(PAGE).next_power_of_two());
        Box::pin(async move {
            loop {
                match source.try_take(len) {
                    Some(offset) => {
                        return Box::new(SharedBuffer { source, offset, len }) as Box<dyn RequestBuffer>;
                    }
                    None => yield_now().await,
                }
            }
        })
    }
}

struct SharedBuffer {
    source: SharedBuffers,
    offset: usize,
    len: usize,
}

impl Drop for SharedBuffer {
    fn drop(&mut self) {
        self.source.places.lock().unwrap().free[self.len.ilog2() as usize].push(self.offset);
    }
}

impl RequestBuffer for SharedBuffer {
    fn bytes(&mut self) -> &mut [u8] {
        let base = self.source.memory.base().wrapping_add(self.offset);
        // SAFETY: the piece is ours until it goes back, and no request uses it now.
        unsafe { std::slice::from_raw_parts_mut(base, self.len) }
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
            let mut at = self.offset + layout.skip;
            let segments: Vec<Segment> = layout
                .lens
                .iter()
                .map(|&len| {
                    at += len;
                    self.source.memory.segment(at - len, len)
                })
                .collect();
            // SAFETY: buffer and list live until the request has ended, right below.
            let data = unsafe { Data::new(&segments) };
            let request = match op {
                Op::Read => Request::read(data),
                _ => Request::write(data, flags),
            };
            let result: IoResult = channel.submit(&request, offset).await;
            (self as Box<dyn RequestBuffer>, result)
        })
    }
}
