//! Calls to the owners of stripes, kept for reuse (`forward.rs`).

use super::request::StripeRequest;
use reactor::Call;
use std::cell::RefCell;

/// Calls of a core that are kept for reuse.
const SPARE_CALLS: usize = 256;

/// A request on its way to the owner of its stripe.
pub(crate) struct Forwarded {
    /// The number of the array's shape.
    pub array: u64,
    pub request: StripeRequest,
}

/// The calls of one core that serve no request now.
#[derive(Default)]
pub(crate) struct SpareCalls(RefCell<Vec<Call<Forwarded>>>);

/// A call that serves a request.
pub(crate) struct InUse<'a> {
    spare: &'a SpareCalls,
    /// There until this is dropped.
    pub call: Option<Call<Forwarded>>,
    has_memory: bool,
}

impl SpareCalls {
    /// A call that serves `request`, from those that are kept if there is one.
    pub fn take(&self, request: &StripeRequest) -> InUse<'_> {
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
