//! The progress of an incoming device, shared by all cores.
//!
//! ```text
//!   step:     0 ───────────── cursor ──── cursor + WINDOW ─────────────
//!             all done         a bit each   none done
//! ```
//!
//! Claims, each with a model (`cfg(loom)`, at the end of the file):
//!
//! * A step that is not done never looks done. The bits cover twice the window. So the bits of
//!   steps that the cursor passes, which are cleared after it has moved, are different from those
//!   of steps that enter the window.
//! * A step that is done looks done to each thread that knows it, however the cursor moves.
//! * A thread that sees a step as done sees the data that was written before.

use reactor::sync::{AtomicU64, is_broken};
use std::sync::atomic::Ordering;

/// Steps beyond the cursor that may be done.
pub const WINDOW: u64 = if cfg!(loom) { 32 } else { 1024 };

const BITS: u64 = 2 * WINDOW;

#[derive(Default)]
pub(super) struct Progress {
    cursor: AtomicU64,
    bits: [AtomicU64; (BITS / 64) as usize],
}

impl Progress {
    /// Resets the progress: exactly the steps below `cursor` are done. Called before other threads
    /// can see the device.
    pub fn reset(&self, cursor: u64) {
        self.bits.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        self.cursor.store(cursor, Ordering::Relaxed);
    }

    /// Steps below this one are done.
    pub fn cursor(&self) -> u64 {
        self.cursor.load(Ordering::Acquire)
    }

    /// Whether a step is done.
    #[inline]
    pub fn is_done(&self, step: u64) -> bool {
        let cursor = self.cursor();
        if step < cursor || step >= cursor + WINDOW {
            return step < cursor;
        }
        let (word, bit) = self.bit(step);
        // The cursor moves before bits behind it are cleared.
        word.load(Ordering::Acquire) & bit != 0
            || (!is_broken("the cursor is looked at again") && step < self.cursor())
    }

    /// Marks a step inside the window as done. Called by the stripe's owner, which holds its rows.
    pub fn set_done(&self, step: u64) {
        let cursor = self.cursor();
        assert!((cursor..cursor + WINDOW).contains(&step), "step {step} with the cursor at {cursor}");
        let order = match is_broken("a bit is set with release") {
            false => Ordering::AcqRel,
            true => Ordering::Relaxed,
        };
        let (word, bit) = self.bit(step);
        word.fetch_or(bit, order);
    }

    /// Moves the cursor; every step below it is done. Called by one task at a time.
    pub fn advance(&self, cursor: u64) {
        let old = self.cursor();
        assert!(old <= cursor && cursor - old <= WINDOW, "the cursor goes from {old} to {cursor}");
        let is_late = is_broken("the cursor moves first");
        if !is_late {
            self.cursor.store(cursor, Ordering::Release);
        }
        for step in old..cursor {
            let (word, bit) = self.bit(step);
            word.fetch_and(!bit, Ordering::AcqRel);
        }
        if is_late {
            self.cursor.store(cursor, Ordering::Release);
        }
    }

    fn bit(&self, step: u64) -> (&AtomicU64, u64) {
        let bits = if is_broken("there are bits for twice the window") { WINDOW } else { BITS };
        let place = step % bits;
        (&self.bits[(place / 64) as usize], 1 << (place % 64))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn bits_of_passed_steps_say_nothing_about_later_ones() {
        let progress = Progress::default();
        progress.reset(0);
        for round in 0..5 {
            let from = round * WINDOW;
            (from..from + WINDOW).step_by(2).for_each(|step| progress.set_done(step));
            for step in from..from + WINDOW {
                assert_eq!(progress.is_done(step), step % 2 == 0, "{step}");
                assert!(!progress.is_done(step + WINDOW), "{step}");
            }
            (from + 1..from + WINDOW).step_by(2).for_each(|step| progress.set_done(step));
            progress.advance(from + WINDOW);
            assert!(progress.is_done(from + WINDOW - 1) && !progress.is_done(from + WINDOW));
        }
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;
    use reactor::sync::{model, must_fail};

    fn filled_to(cursor: u64, done: &[u64]) -> Arc<Progress> {
        let progress = Arc::new(Progress::default());
        progress.reset(cursor);
        done.iter().for_each(|step| progress.set_done(*step));
        progress
    }

    fn nothing_looks_done_that_is_not() {
        let progress = filled_to(0, &[0, 1]);
        let reader = {
            let progress = progress.clone();
            thread::spawn(move || {
                for step in [2, WINDOW, WINDOW + 1] {
                    assert!(!progress.is_done(step), "step {step}");
                }
            })
        };
        progress.advance(1);
        progress.advance(2);
        reader.join().unwrap();
    }

    fn a_done_step_looks_done() {
        let progress = filled_to(0, &[0, 1]);
        let reader = {
            let progress = progress.clone();
            thread::spawn(move || assert!(progress.is_done(0) && progress.is_done(1)))
        };
        progress.advance(1);
        progress.set_done(WINDOW);
        progress.advance(2);
        reader.join().unwrap();
    }

    fn a_thread_that_sees_a_done_step_sees_its_data() {
        let progress = filled_to(0, &[]);
        let data = Arc::new(UnsafeCell::new(0));
        let reader = {
            let (progress, data) = (progress.clone(), data.clone());
            thread::spawn(move || {
                if progress.is_done(0) {
                    // SAFETY: loom checks that no write runs at the same time.
                    assert_eq!(data.with(|data| unsafe { *data }), 7);
                }
            })
        };
        // SAFETY: as above.
        data.with_mut(|data| unsafe { *data = 7 });
        progress.set_done(0);
        progress.advance(1);
        reader.join().unwrap();
    }

    #[test]
    fn a_step_that_is_not_done_never_looks_done() {
        model(nothing_looks_done_that_is_not);
        must_fail("there are bits for twice the window", nothing_looks_done_that_is_not);
    }

    #[test]
    fn a_step_that_is_done_always_looks_done() {
        model(a_done_step_looks_done);
        must_fail("the cursor is looked at again", a_done_step_looks_done);
        must_fail("the cursor moves first", a_done_step_looks_done);
    }

    #[test]
    fn a_step_that_looks_done_has_its_data() {
        model(a_thread_that_sees_a_done_step_sees_its_data);
        must_fail("a bit is set with release", a_thread_that_sees_a_done_step_sees_its_data);
    }
}
