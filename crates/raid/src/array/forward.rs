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

use super::calls::Forwarded;
use super::registry;
use super::remote::LocalFuture;
use super::request::{Source, StripeRequest, WriteRequest};
use super::stripe_owner::StripeOwner;
use block::{IoError, IoFuture, IoResult};
use reactor::{CallRequest, Core, CoreStopped, Reply};
use std::rc::Rc;

impl CallRequest for Forwarded {
    type Answer = IoResult;

    // It waits at the gate and for its rows, whatever else arrives before or after.
    const IS_ORDERED: bool = false;

    fn start(self, core: &Core, reply: Reply<Forwarded>) {
        let Some(owner) = registry::find(self.array) else { return reply.send(Err(IoError::DeviceGone)) };
        core.start_request(IoFuture::new(async move {
            reply.send(owner.carry_out_forwarded(self.request).await);
            Ok(())
        }));
    }
}

impl StripeOwner {
    /// Carries a request out on the owner of its stripe, or here if it is a write that any core may
    /// do. When the owner has ended, another owns the stripe.
    pub async fn on_owner(&self, request: StripeRequest) -> IoResult {
        if self.owns(request.stripe()) || request.is_write() && self.is_writer(request.stripe()) {
            return IoFuture::new(self.carry_out(request)).await;
        }
        IoFuture::new(self.forward_request(request)).await
    }

    pub(super) async fn forward_request(&self, request: StripeRequest) -> IoResult {
        loop {
            let (owners, owner) = self.owners_with(request.stripe());
            if owners[owner].is_same(&self.here) {
                return IoFuture::new(self.carry_out(request)).await;
            }
            let mut in_use = self.calls.take(&request);
            let call = in_use.call.as_mut().expect("just taken");
            match call.run(&owners[owner], Forwarded { array: self.shared.id, request }).await {
                Ok(result) => return result,
                Err(CoreStopped) => Box::pin(self.shared.take_over()).await?,
            }
        }
    }

    /// Runs work on the owner of a stripe, another core than this one. When that core has ended,
    /// another owns it. Requests go by [`StripeOwner::on_owner`], which allocates nothing.
    pub async fn forward<R, W>(&self, stripe: u64, work: W) -> Result<R, IoError>
    where
        R: Send + 'static,
        W: FnOnce(Rc<StripeOwner>) -> LocalFuture<Result<R, IoError>> + Clone + Send + 'static,
    {
        loop {
            let core = self.owner_of(stripe);
            match registry::run(&core, self.shared.id, work.clone()).await {
                Ok(result) => return result.unwrap_or(Err(IoError::DeviceGone)),
                Err(CoreStopped) => self.shared.take_over().await?,
            }
        }
    }

    /// Carries out a request of another core. A write to a mirror tries the short way again, which
    /// it could not take there.
    async fn carry_out_forwarded(&self, request: StripeRequest) -> IoResult {
        if let StripeRequest::Write { rect, data: Some(data), flags } = request
            && self.shared.config.is_mirror()
            && self.write_copies(&WriteRequest { rect, source: Source::Data(data.data()), flags }).await?
        {
            return Ok(());
        }
        self.carry_out(request).await
    }

    /// Carries out a request, on the core that owned its stripe when it was sent.
    async fn carry_out(&self, request: StripeRequest) -> IoResult {
        match request {
            StripeRequest::Read { stripe, strip, offset, data } => {
                // In memory of its own: a write's future would be as large.
                IoFuture::new(self.read(stripe, strip, offset, data.data())).await
            }
            StripeRequest::Write { rect, data, flags } => {
                let source = data.map_or(Source::Zeroes, |data| Source::Data(data.data()));
                self.write(&WriteRequest { rect, source, flags }).await
            }
        }
    }
}
