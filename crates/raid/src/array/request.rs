//! Requests for one stripe, and the memory of their callers.

use crate::stripe::rect::Rect;
use block::{Data, Flags};

/// The new content of a write.
#[derive(Clone, Copy)]
pub(crate) enum Source<'a> {
    /// The caller's memory.
    Data(Data<'a>),
    /// Zeroes.
    Zeroes,
    /// The scratch's own content: zeroes in place of strips that cannot be reconstructed. They stay
    /// bad.
    Lost,
}

/// A write of a rectangle of one stripe.
#[derive(Clone, Copy)]
pub(crate) struct WriteRequest<'a> {
    pub rect: Rect,
    pub source: Source<'a>,
    pub flags: Flags,
}

/// A caller's memory on its way to another core.
#[derive(Clone, Copy)]
pub(crate) struct Caller<'a>(Data<'a>);

// SAFETY: the caller keeps memory and segment list valid until its request has completed, and waits
// on its own core while another copies. `Data` holds nothing that belongs to a thread.
unsafe impl Send for Caller<'_> {}

impl Caller<'static> {
    /// # Safety
    /// The caller's request does not complete before the copy is no longer used.
    pub unsafe fn new(data: Data<'_>) -> Caller<'static> {
        // SAFETY: only the lifetime changes; the caller of this function answers for it.
        Caller(unsafe { std::mem::transmute::<Data<'_>, Data<'static>>(data) })
    }

    /// The memory.
    pub fn data(self) -> Data<'static> {
        self.0
    }
}

/// A request that the owner of its stripe carries out.
#[derive(Clone, Copy)]
pub(crate) enum StripeRequest {
    /// Reads a part of a strip.
    Read { stripe: u64, strip: usize, offset: u32, data: Caller<'static> },
    /// Writes a rectangle; zeroes if there is no data.
    Write { rect: Rect, data: Option<Caller<'static>>, flags: Flags },
}

impl StripeRequest {
    /// A write.
    ///
    /// # Safety
    /// As for [`Caller::new`].
    pub unsafe fn write(request: WriteRequest<'_>) -> StripeRequest {
        let WriteRequest { rect, source, flags } = request;
        let data = match source {
            // SAFETY: by contract.
            Source::Data(data) => Some(unsafe { Caller::new(data) }),
            Source::Zeroes | Source::Lost => None,
        };
        StripeRequest::Write { rect, data, flags }
    }

    /// The stripe.
    pub fn stripe(&self) -> u64 {
        match self {
            StripeRequest::Read { stripe, .. } => *stripe,
            StripeRequest::Write { rect, .. } => rect.stripe,
        }
    }

    /// Whether it writes.
    pub fn is_write(&self) -> bool {
        matches!(self, StripeRequest::Write { .. })
    }

    /// Whether it uses memory of its caller.
    pub fn has_memory(&self) -> bool {
        !matches!(self, StripeRequest::Write { data: None, .. })
    }
}
