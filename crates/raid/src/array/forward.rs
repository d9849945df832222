//! Requests for stripes that another core owns.
//!
//! ```text
//!   core of the request                     owner of the stripe
//!   StripeOwner::on_owner ─── Forwarded ───► a task from the core's free list
//!        │ waits                             StripeOwner::carry_out ─► copies of the caller's memory
//!        ▼                                             │
//!   returns ◄───────────── result ─────────────────────┘
//! ```
//!
//! Nothing is allocated once both cores are warm. A request goes as plain data in the memory of a
//! call, which its core uses again. Its future is in memory of the owner's free list. The owner is
//! woken once for all requests that arrive before it looks.
//!
//! The owner uses the caller's memory only while it carries the request out. So the caller returns
//! after the answer, or after the owner has ended and has dropped the request.

use super::registry;
use super::stripe_owner::{Caller, Source, StripeOwner, WriteRequest};
use crate::stripe::rect::Rect;
use block::{Flags, IoError, IoFuture, IoResult};
use reactor::{Call, CallRequest, Core, CoreStopped, Reply};
use std::cell::RefCell;

/// Calls of a core that are kept for reuse.
const SPARE_CALLS: usize = 256;

/// A request that the owner of its stripe carries out.
#[derive(Clone, Copy)]
pub(crate) enum StripeRequest {
    /// See [`StripeOwner::read`].
    Read { stripe: u64, strip: usize, offset: u32, data: Caller<'static> },
    /// See [`StripeOwner::write`]; zeroes if there is no data.
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

    fn stripe(&self) -> u64 {
        match self {
            StripeRequest::Read { stripe, .. } => *stripe,
            StripeRequest::Write { rect, .. } => rect.stripe,
        }
    }

    fn has_memory(&self) -> bool {
        !matches!(self, StripeRequest::Write { data: None, .. })
    }
}

/// A request on its way to the owner of its stripe.
pub(crate) struct Forwarded {
    /// The number of the array's shape.
    array: u64,
    request: StripeRequest,
}

impl CallRequest for Forwarded {
    type Answer = IoResult;

    fn start(self, core: &Core, reply: Reply<Forwarded>) {
        let Some(owner) = registry::find(self.array) else { return reply.send(Err(IoError::DeviceGone)) };
        core.spawn_request(IoFuture::new(async move {
            reply.send(owner.carry_out(self.request).await);
            Ok(())
        }));
    }
}

/// The calls of one core that serve no request now.
#[derive(Default)]
pub(crate) struct SpareCalls(RefCell<Vec<Call<Forwarded>>>);

/// A call that serves a request.
struct InUse<'a> {
    spare: &'a SpareCalls,
    call: Option<Call<Forwarded>>,
    has_memory: bool,
}

impl SpareCalls {
    fn take(&self, request: &StripeRequest) -> InUse<'_> {
        let call = self.0.borrow_mut().pop().unwrap_or_default();
        InUse { spare: self, call: Some(call), has_memory: request.has_memory() }
    }
}

impl Drop for InUse<'_> {
    fn drop(&mut self) {
        let Some(call) = self.call.take() else { return };
        if call.is_under_way() {
            if self.has_memory && !std::thread::panicking() {
                reactor::die(
                    "a request was dropped before the owner of its stripe had finished with its memory",
                );
            }
            return;
        }
        let spare = &mut *self.spare.0.borrow_mut();
        if spare.len() < SPARE_CALLS {
            spare.push(call);
        }
    }
}

impl StripeOwner {
    /// Carries a request out on the owner of its stripe. When that core has ended, another owns the
    /// stripe.
    pub async fn on_owner(&self, request: StripeRequest) -> IoResult {
        if self.owns(request.stripe()) {
            return IoFuture::new(self.carry_out(request)).await;
        }
        IoFuture::new(self.forward_request(request)).await
    }

    async fn forward_request(&self, request: StripeRequest) -> IoResult {
        loop {
            let (owners, owner) = self.owners_with(request.stripe());
            if owners[owner].is_same(&self.here) {
                return IoFuture::new(self.carry_out(request)).await;
            }
            let mut in_use = self.calls.take(&request);
            let call = in_use.call.as_mut().expect("just taken");
            match call.run(&owners[owner], Forwarded { array: self.shared.id, request }).await {
                Ok(result) => return result,
                Err(CoreStopped) => self.shared.take_over().await?,
            }
        }
    }

    /// Carries out a request, on the core that owned its stripe when it was sent.
    async fn carry_out(&self, request: StripeRequest) -> IoResult {
        match request {
            StripeRequest::Read { stripe, strip, offset, data } => {
                self.read(stripe, strip, offset, data.data()).await
            }
            StripeRequest::Write { rect, data, flags } => {
                let source = data.map_or(Source::Zeroes, |data| Source::Data(data.data()));
                self.write(&WriteRequest { rect, source, flags }).await
            }
        }
    }
}
