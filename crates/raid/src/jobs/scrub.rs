//! Scrubs and syncs: parity is compared with data, stripe by stripe.

use super::State;
use super::keeper::{Keeper, LOOK_NS};
use super::pump::Pump;
use super::status::{JOB, Kind, Meter, SCRUB_FINISHED, SCRUB_STARTED, ScrubReport};
use crate::array::ScrubResult;
use crate::metadata::intent_bitmap::{NEED_SYNC, WRITTEN};
use block::IoError;
use std::collections::BTreeSet;

/// A scrub that is under way.
pub(super) struct Scrub {
    /// Every step of the walk below is done.
    cursor: u64,
    report: ScrubReport,
    /// The schedule has started it: it runs while the schedule allows that.
    is_scheduled: bool,
}

/// A step of the walk, and what came out there.
type Compared = (u64, Result<ScrubResult, IoError>);

/// The end of a stripe or of a checkpoint.
enum Ended {
    Stripe(Compared),
    Checkpoint,
}

impl Keeper {
    /// Resumes a scrub that a stop or a crash has interrupted, as the check or the repair that it
    /// was.
    pub(super) fn resume_scrub(&mut self) {
        let table = self.array().table();
        let Some(cursor) = table.scrub_cursor else { return };
        let geometry = &self.array().config().geometry;
        let cursor = cursor / u64::from(geometry.strip_bytes) * geometry.groups as u64;
        let report = ScrubReport { is_repairing: table.scrub_repairs, ..ScrubReport::default() };
        let (cursor, is_scheduled) = (cursor.min(geometry.stripes()), table.scrub_is_scheduled);
        self.scrub = Some(Scrub { cursor, report, is_scheduled });
    }

    /// Continues a scrub, if one is wanted or due; whether there was anything to do.
    pub(super) async fn scrub_on(&mut self) -> bool {
        let take = |state: &mut State| (std::mem::take(&mut state.is_cancelled), state.scrub.take());
        let (mut is_cancelled, wanted) = self.shared.look(take);
        if let Some(is_repairing) = wanted {
            self.begin_scrub(is_repairing, false).await;
        } else if self.scrub.is_none() && !is_cancelled && self.array().is_scrub_due() {
            self.begin_scrub(false, true).await;
            self.event_of(SCRUB_STARTED, "a scheduled scrub has started".into());
        }
        let Some(mut scrub) = self.scrub.take() else { return false };
        // Without a schedule nothing would continue it.
        is_cancelled |= scrub.is_scheduled && self.array().maintenance().scrub_period_s == 0;
        if !is_cancelled {
            if scrub.is_scheduled && !self.array().allows_scheduled_scrub() {
                self.scrub = Some(scrub);
                return false;
            }
            self.run_scrub(&mut scrub).await;
        }
        self.end_scrub(scrub, is_cancelled || self.is_cancelled()).await;
        true
    }

    /// Begins a scrub, and makes that durable, so that a crash does not forget it.
    async fn begin_scrub(&mut self, is_repairing: bool, is_scheduled: bool) {
        let noted = self.array().note(move |table| {
            table.scrub_cursor = Some(0);
            (table.scrub_repairs, table.scrub_is_scheduled) = (is_repairing, is_scheduled);
        });
        let _ = noted.await; // it runs all the same
        let report = ScrubReport { is_repairing, ..ScrubReport::default() };
        self.scrub = Some(Scrub { cursor: 0, report, is_scheduled });
    }

    /// Makes durable how far a scrub is that has stopped: it is over, cancelled, or runs on later.
    async fn end_scrub(&mut self, mut scrub: Scrub, is_cancelled: bool) {
        let array = self.array().clone();
        let geometry = &array.config().geometry;
        let is_over = scrub.cursor == geometry.stripes();
        if is_over {
            self.check_logs().await;
        }
        let is_scheduled = scrub.is_scheduled;
        scrub.report.is_complete = is_over;
        self.log(|log| log.scrub = Some(scrub.report.clone()));
        let (cursor, now_ns) = (geometry.step_offset(scrub.cursor), array.wall_ns());
        let noted = array.note(move |table| {
            if is_over {
                table.scrubbed_ns = now_ns;
            } else if is_cancelled
                && (is_scheduled || table.next_scrub_ns(now_ns).is_some_and(|due_ns| due_ns <= now_ns))
            {
                table.scrub_cancelled_s = u32::try_from(now_ns / 1_000_000_000).unwrap_or(u32::MAX);
            }
            let is_left = !is_over && !is_cancelled;
            table.scrub_cursor = is_left.then_some(cursor);
            table.scrub_repairs &= is_left;
            table.scrub_is_scheduled &= is_left;
        });
        let _ = noted.await; // a scrub begins again at worst
        if is_over {
            let ScrubReport { stripes, mismatched_rows, mismatched_stripes, .. } = scrub.report;
            self.log(|log| log.totals.jobs += 1);
            let (what, name) = match is_scheduled {
                true => (SCRUB_FINISHED, "a scheduled scrub"),
                false => (JOB, "a scrub"),
            };
            self.event_of(
                what,
                format!(
                    "{name} of {stripes} stripes has found {mismatched_rows} rows in {mismatched_stripes} that did \
                     not fit"
                ),
            );
        } else if is_cancelled {
            self.event(format!("the scrub was cancelled at {cursor} bytes of each member"));
        } else {
            self.scrub = Some(scrub);
        }
    }

    fn is_cancelled(&self) -> bool {
        self.shared.look(|state| state.is_cancelled)
    }

    async fn run_scrub(&self, scrub: &mut Scrub) {
        let array = self.array().clone();
        let geometry = array.config().geometry;
        let is_repairing = scrub.report.is_repairing;
        let kind = if is_repairing { Kind::Repair } else { Kind::Check };
        let (mut next, mut done) = (scrub.cursor, BTreeSet::new());
        let (mut looked_ns, mut is_wanted) = (self.core.now_ns(), true);
        let (mut noted_ns, mut noted_bytes, mut is_noting) = (looked_ns, geometry.step_offset(next), false);
        let mut meter = Meter::new(looked_ns, geometry.step_offset(next));
        let mut pump: Pump<'_, Ended> = Pump::new();
        loop {
            let now_ns = self.core.now_ns();
            if now_ns - looked_ns >= LOOK_NS {
                looked_ns = now_ns;
                is_wanted = !self.is_urgent() && (!scrub.is_scheduled || array.allows_scheduled_scrub());
            }
            is_wanted &= !self.must_stop() && self.shared.look(|s| !s.is_cancelled && s.scrub.is_none());
            let mut timer = None;
            while is_wanted && pump.len() < self.window() && next < geometry.stripes() {
                let (step, stripe) = (next, geometry.stripe_at_step(next));
                next += 1;
                if array.region_bits(stripe) & (WRITTEN | NEED_SYNC) != WRITTEN {
                    scrub.report.skipped += 1;
                    done.insert(step);
                    if done.len() as u64 > MOST_SKIPPED {
                        break; // others may want the core
                    }
                    continue;
                }
                if let Err(sleep) = self.begin_stripe(true) {
                    (next, timer) = (step, Some(sleep));
                    break;
                }
                let array = array.clone();
                pump.push(
                    async move { Ended::Stripe((step, array.scrub_stripe(stripe, is_repairing).await)) },
                );
            }
            while done.remove(&scrub.cursor) {
                scrub.cursor += 1;
            }
            let done_bytes = geometry.step_offset(scrub.cursor);
            self.show(kind, None, done_bytes, meter.rate(now_ns, done_bytes));
            let is_due = done_bytes != noted_bytes && now_ns - noted_ns >= self.options().checkpoint_ns;
            if is_wanted && !is_noting && is_due {
                (is_noting, noted_ns, noted_bytes) = (true, now_ns, done_bytes);
                let array = array.clone();
                pump.push(async move {
                    let _ = array.note(move |table| table.scrub_cursor = Some(done_bytes)).await;
                    Ended::Checkpoint
                });
            }
            if pump.len() == 0 && (!is_wanted || next == geometry.stripes()) {
                return;
            }
            match pump.next(timer).await {
                Some(Ended::Stripe((step, result))) => {
                    done.insert(step);
                    self.judge(&mut scrub.report, geometry.stripe_at_step(step), result);
                    self.log(|log| log.scrub = Some(scrub.report.clone()));
                }
                Some(Ended::Checkpoint) => is_noting = false,
                None => {}
            }
            reactor::yield_now().await;
        }
    }

    fn judge(&self, report: &mut ScrubReport, stripe: u64, result: Result<ScrubResult, IoError>) {
        let Ok(result) = result else {
            report.failed += 1;
            return;
        };
        report.unreadable += u64::from(result.unreadable);
        if result.is_incomplete {
            report.skipped += 1;
            return;
        }
        report.stripes += 1;
        report.mismatched_rows += u64::from(result.rows);
        report.mismatched_stripes += u64::from(result.rows > 0);
        let geometry = &self.array().config().geometry;
        for strip in (0..geometry.group_members()).filter(|strip| result.named >> strip & 1 == 1) {
            let slot = geometry.member(stripe, strip);
            match report.wrong_strips.iter_mut().find(|(other, _)| *other == slot) {
                Some((_, count)) => *count += 1,
                None => report.wrong_strips.push((slot, 1)),
            }
            tracing::warn!(array = self.array().config().name, stripe, slot, "a strip is wrong");
        }
    }

    /// Makes parity fit in the regions that need it. The write-intent bitmap records its progress.
    pub(super) async fn resync(&mut self) {
        let array = self.array().clone();
        let config = array.config().clone();
        let needs = |region: u64| {
            array.region_bits(config.geometry.stripe_at_step(first_step(&config, region))) & NEED_SYNC != 0
        };
        let started_ns = self.core.now_ns();
        let (mut settled_ns, mut is_whole) = (started_ns, true);
        for region in (0..config.regions()).filter(|region| needs(*region)) {
            match self.sync_region(region).await {
                Some(true) => array.clear_region(region, NEED_SYNC),
                Some(false) => is_whole = false,
                None => {
                    let _ = array.settle_regions().await; // done again at worst
                    return;
                }
            }
            if self.core.now_ns() - settled_ns >= self.options().checkpoint_ns {
                settled_ns = self.core.now_ns();
                let _ = array.settle_regions().await;
            }
        }
        let _ = array.settle_regions().await;
        self.is_sync_blocked = !is_whole;
        self.log(|log| log.totals.jobs += 1);
        self.event(match is_whole {
            true => "parity fits everywhere".into(),
            false => "some regions cannot be synced: members are missing, or blocks cannot be read".into(),
        });
    }

    /// Makes parity fit in a region; whether it does now, or `None` when the job must stop.
    async fn sync_region(&self, region: u64) -> Option<bool> {
        let array = self.array().clone();
        let config = array.config().clone();
        let (mut next, end) = (first_step(&config, region), first_step(&config, region + 1));
        let geometry = &config.geometry;
        let mut meter = Meter::new(self.core.now_ns(), geometry.step_offset(next));
        let (mut is_synced, mut is_stopped, mut looked_ns) = (true, false, 0);
        let mut pump: Pump<'_, Compared> = Pump::new();
        loop {
            let now_ns = self.core.now_ns();
            is_stopped |= self.must_stop();
            if now_ns - looked_ns >= LOOK_NS {
                looked_ns = now_ns;
                is_stopped |= self.is_urgent();
            }
            let mut timer = None;
            while !is_stopped && pump.len() < self.window() && next < end {
                if let Err(sleep) = self.begin_stripe(true) {
                    timer = Some(sleep);
                    break;
                }
                let (step, stripe, array) = (next, geometry.stripe_at_step(next), array.clone());
                next += 1;
                pump.push(async move { (step, array.scrub_stripe(stripe, true).await) });
            }
            let done_bytes = geometry.step_offset(next);
            self.show(Kind::Resync, None, done_bytes, meter.rate(now_ns, done_bytes));
            match pump.next(timer).await {
                Some((_, result)) => {
                    is_synced &= result.is_ok_and(|result| !result.is_incomplete);
                    self.log(|log| log.totals.synced += 1);
                }
                None if is_stopped && pump.len() == 0 => return None,
                None if next == end && pump.len() == 0 => return Some(is_synced),
                None => {}
            }
            reactor::yield_now().await;
        }
    }
}

/// Stripes that are passed over without a look at anything else.
const MOST_SKIPPED: u64 = 4096;

/// The first step of the walk that lies in a region; the number of stripes for the one after the
/// last.
fn first_step(config: &crate::ArrayConfig, region: u64) -> u64 {
    let geometry = &config.geometry;
    let row = region * config.region_bytes / u64::from(geometry.strip_bytes);
    (row * geometry.groups as u64).min(geometry.stripes())
}
