//! Members with more corrected read errors than their budget: replaced by a spare while they are
//! still read from.

use super::keeper::Keeper;
use super::status::JOB;
use crate::array::WINDOW_NS;

impl Keeper {
    /// Live members that exceed the budget, as slots. A slot that is being replaced is not among
    /// them.
    fn over_budget(&self) -> Vec<usize> {
        let budget = self.array().maintenance().read_errors;
        if budget == 0 {
            return Vec::new();
        }
        let (array, now_ns) = (self.array(), self.array().wall_ns());
        let members = array.members();
        let is_over = |slot: &usize| {
            array.read_errors().recent(*slot, now_ns) > budget
                && members.is_live(*slot)
                && !members.is_filling(*slot)
                && !self.is_blocked(*slot)
        };
        (0..array.config().geometry.members()).filter(is_over).collect()
    }

    /// Whether a member exceeds the budget and can be replaced. Empty slots get spares first.
    pub(super) fn can_replace_over_budget(&self) -> bool {
        self.shared.has_spare() && self.shared.empty_slots().is_empty() && !self.over_budget().is_empty()
    }

    /// Begins to copy a member that exceeds the budget onto a spare; whether there was one to
    /// begin.
    pub(super) async fn replace_over_budget(&mut self) -> bool {
        self.warn_of_read_errors();
        if !self.can_replace_over_budget() {
            return false;
        }
        let Some(slot) = self.over_budget().first().copied() else { return false };
        let Some(spare) = self.shared.take_device(slot) else { return false };
        let (errors, name) = (self.recent_errors(slot), spare.attached.device.name().to_owned());
        self.event(format!(
            "slot {slot}: {errors} corrected read errors exceed its budget: {name} replaces it"
        ));
        self.start_filling(slot, spare).await;
        if !self.array().members().is_filling(slot) {
            self.block(slot); // else every spare is tried, one after the other
        }
        true
    }

    /// Reports members that exceed the budget and cannot be replaced: each once in an hour.
    pub(super) fn warn_of_read_errors(&self) {
        if self.can_replace_over_budget() {
            return;
        }
        let now_ns = self.array().wall_ns();
        for slot in self.over_budget() {
            let warned_ns = self.warned.borrow().get(&slot).copied();
            if warned_ns.is_some_and(|warned_ns| now_ns.saturating_sub(warned_ns) < WINDOW_NS) {
                continue;
            }
            self.warned.borrow_mut().insert(slot, now_ns);
            let errors = self.recent_errors(slot);
            let text = format!(
                "slot {slot}: {errors} corrected read errors exceed its budget, and no spare can replace it"
            );
            tracing::warn!(array = self.array().config().name, slot, errors, "{text}");
            self.log(|log| log.event(now_ns, JOB, text));
        }
    }

    fn recent_errors(&self, slot: usize) -> u32 {
        self.array().read_errors().recent(slot, self.array().wall_ns())
    }
}
