//! Where the suite's requests get their memory.

use block::{Channel, Flags, IoResult, Op};
use reactor::Buffer;
use std::future::Future;
use std::pin::Pin;

/// The future of [`RequestBuffer::transfer`], which returns the buffer with the result.
pub type Transfer<'a> = Pin<Box<dyn Future<Output = (Box<dyn RequestBuffer>, IoResult)> + 'a>>;

/// A part of a buffer that one request uses: it starts `skip` bytes into the buffer and is cut into
/// segments of `lens` bytes, one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Bytes before the first segment.
    pub skip: usize,
    /// Length of each segment in bytes.
    pub lens: Vec<usize>,
}

impl Layout {
    /// One aligned segment of `len` bytes.
    pub fn whole(len: usize) -> Layout {
        Layout { skip: 0, lens: vec![len] }
    }

    /// Bytes in all segments.
    pub fn len(&self) -> usize {
        self.lens.iter().sum()
    }

    /// Whether there is no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Memory for one request at a time.
pub trait RequestBuffer {
    /// All its bytes. Not called while a request uses it.
    fn bytes(&mut self) -> &mut [u8];

    /// Runs a read or write of `layout` at `offset`. Owning the buffer until the request has
    /// completed is what makes this safe.
    fn transfer<'a>(
        self: Box<Self>,
        channel: &'a dyn Channel,
        op: Op,
        flags: Flags,
        offset: u64,
        layout: &'a Layout,
    ) -> Transfer<'a>;
}

/// Where buffers come from. Called on the core that uses the buffer.
pub trait BufferSource: Send + Sync {
    /// Returns a buffer of at least `len` bytes (at most [`reactor::MAX_BUFFER`]), aligned as the
    /// device requires. May wait until other buffers are returned.
    fn take(&self, len: usize) -> Pin<Box<dyn Future<Output = Box<dyn RequestBuffer>>>>;
}

/// The reactor's buffers: what devices of this process can use as they are.
pub struct PoolBuffers;

impl BufferSource for PoolBuffers {
    fn take(&self, len: usize) -> Pin<Box<dyn Future<Output = Box<dyn RequestBuffer>>>> {
        Box::pin(async move { Box::new(reactor::current().buffers().take(len).await) as Box<_> })
    }
}

impl RequestBuffer for Buffer {
    fn bytes(&mut self) -> &mut [u8] {
        self.as_mut_slice()
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
            let (buffer, result) =
                self.transfer_in_segments(channel, op, flags, offset, layout.skip, &layout.lens).await;
            (Box::new(buffer) as Box<dyn RequestBuffer>, result)
        })
    }
}
