//! A reshape, window by window. Its cursor stands in the superblock.

use super::keeper::Keeper;
use super::status::{Kind, Meter};

impl Keeper {
    /// Works on a reshape; whether there was anything to do. Empty slots are filled when the
    /// reshape cannot continue, or the array has no redundancy left. It stands still until they are
    /// full.
    pub(super) async fn work_on_reshape(&mut self) -> bool {
        let is_filling = self.array().members().is_any_filling();
        if !is_filling && !self.must_fill_first() && self.reshape().await {
            return true;
        }
        let has_filled = self.fill_empty().await;
        if has_filled && !self.array().members().is_any_filling() {
            self.is_reshape_blocked = false;
        }
        has_filled
    }

    /// Moves windows to the end of a reshape, or until something else comes first; whether there
    /// was anything to do.
    async fn reshape(&mut self) -> bool {
        if self.is_reshape_blocked {
            return false;
        }
        let array = self.array().clone();
        let geometry = array.config().geometry;
        let member_bytes = |bytes: u64| bytes / geometry.data as u64;
        let window = self.window() as u64 * geometry.stripe_bytes();
        let mut meter = Meter::new(self.core.now_ns(), 0);
        while let Some(moved) = array.moved() {
            let done_bytes = member_bytes(moved.done);
            self.show(Kind::Reshape, None, done_bytes, meter.rate(self.core.now_ns(), done_bytes));
            if self.must_stop() || self.must_fill_first() {
                return true;
            }
            if let Err(sleep) = self.begin(member_bytes(window)) {
                sleep.await;
                continue;
            }
            let result = match array.move_window(window).await {
                Ok(false) => array.end_reshape().await,
                result => result.map(|_| ()),
            };
            if let Err(error) = result {
                self.is_reshape_blocked = true;
                let percent = moved.done * 100 / moved.total.max(1);
                self.event(format!("the reshape stops at {percent} %: {error}"));
                return true;
            }
            reactor::yield_now().await;
        }
        self.log(|log| log.totals.jobs += 1);
        self.event("the array has its new shape".into());
        true
    }
}
