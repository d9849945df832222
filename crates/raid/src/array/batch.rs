//! Batches of requests to members, submitted and awaited together, in the engine's own buffers.
//!
//! Memory, requests and futures of a batch are in one list that is reused. So a write of a stripe
//! allocates nothing after its owner has warmed up.

use block::{Channel, Data, Flags, IoError, IoFuture, IoResult, Op, Request, Segment};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

/// Stripes of one request that are written at a time.
const STRIPES_AT_ONCE: usize = 8;

/// A batch of requests to members.
#[derive(Default)]
pub struct Batch {
    entries: Vec<Entry>,
    /// Whether the requests have been submitted: the entries must not move any more.
    is_running: bool,
}

struct Entry {
    /// Declared before the channel and the request, which it borrows: fields are dropped in order.
    future: Option<IoFuture<'static>>,
    request: Request<'static>,
    segment: Segment,
    offset: u64,
    channel: Rc<dyn Channel>,
    tag: u32,
    result: IoResult,
}

impl Batch {
    /// Adds a request whose memory is `memory`.
    ///
    /// # Safety
    /// The memory stays valid until the batch has run, and no other code accesses it meanwhile (for
    /// a write: no other code writes to it).
    pub unsafe fn add(
        &mut self,
        tag: u32,
        channel: Rc<dyn Channel>,
        op: Op,
        flags: Flags,
        memory: Segment,
        offset: u64,
    ) {
        assert!(!self.is_running, "a batch is filled before it runs");
        let request = Request { op, flags, len: memory.len as u64, data: Data::none() };
        self.entries.push(Entry {
            future: None,
            request,
            segment: memory,
            offset,
            channel,
            tag,
            result: Ok(()),
        });
    }

    /// Adds a request without memory.
    pub fn add_plain(&mut self, tag: u32, channel: Rc<dyn Channel>, request: Request<'static>, offset: u64) {
        assert!(!self.is_running, "a batch is filled before it runs");
        let segment = Segment { base: std::ptr::null_mut(), len: 0 };
        self.entries.push(Entry { future: None, request, segment, offset, channel, tag, result: Ok(()) });
    }

    /// Submits all requests and waits for all of them.
    pub fn run(&mut self) -> impl Future<Output = ()> + '_ {
        Running(self)
    }

    /// The result of each request, with its tag.
    pub fn results(&self) -> impl Iterator<Item = (u32, IoResult)> + '_ {
        self.entries.iter().map(|entry| (entry.tag, entry.result))
    }

    /// Requests that failed.
    pub fn failures(&self) -> impl Iterator<Item = (u32, IoError)> + '_ {
        self.results().filter_map(|(tag, result)| result.err().map(|error| (tag, error)))
    }

    /// Clears the batch for reuse.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.is_running = false;
    }

    fn submit(&mut self) {
        self.is_running = true;
        let count = self.entries.len();
        let entries = self.entries.as_mut_ptr();
        for i in 0..count {
            // SAFETY: `i` is in bounds. Nothing is pushed or removed until `clear`, which drops
            // futures first (an unfinished one ends the process). So the segment, request and
            // channel do not move while the future lives. The request is not changed after this.
            unsafe {
                let entry = entries.add(i);
                if (*entry).request.op.has_data() {
                    (*entry).request.data = Data::one(&(*entry).segment);
                }
                let request: &'static Request<'static> = &(*entry).request;
                let channel: &'static dyn Channel = &*Rc::as_ptr(&(*entry).channel);
                (*entry).future = Some(channel.submit(request, (*entry).offset));
            }
        }
    }
}

struct Running<'a>(&'a mut Batch);

impl Future for Running<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if !self.0.is_running {
            self.0.submit();
        }
        let mut is_pending = false;
        for entry in &mut self.0.entries {
            let Some(future) = &mut entry.future else { continue };
            match Pin::new(future).poll(cx) {
                Poll::Ready(result) => {
                    entry.result = result;
                    entry.future = None;
                }
                Poll::Pending => is_pending = true,
            }
        }
        if is_pending { Poll::Pending } else { Poll::Ready(()) }
    }
}

/// Runs the writes of a request, several at a time. All run to their end, even if some fail;
/// returns one of the errors.
pub(super) async fn all<F: Future<Output = IoResult>>(mut writes: impl Iterator<Item = F>) -> IoResult {
    let mut running: Vec<Pin<Box<F>>> = Vec::new();
    let mut result = Ok(());
    std::future::poll_fn(|cx| {
        loop {
            while running.len() < STRIPES_AT_ONCE
                && let Some(write) = writes.next()
            {
                running.push(Box::pin(write));
            }
            let before = running.len();
            running.retain_mut(|write| match write.as_mut().poll(cx) {
                Poll::Ready(end) => {
                    result = result.and(end);
                    false
                }
                Poll::Pending => true,
            });
            match (running.is_empty(), running.len() == before) {
                (true, true) => return Poll::Ready(result),
                (_, true) => return Poll::Pending,
                _ => {}
            }
        }
    })
    .await
}
