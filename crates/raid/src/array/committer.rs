//! The core of an array that commits its superblocks, one change at a time.
//!
//! Two kinds of change:
//!
//! * *A member fails.* Stripe operations continue; those that skip the member wait for the commit
//!   before they are acknowledged.
//! * *A member or core joins*: a member to be filled, one that is full, a core that shall own
//!   stripes. The gates of all owners are closed first. The commit carries a new nonce, which makes
//!   every older entry of the log void, and each owner's log starts over.
//!
//! Only a commit that changes which members are live begins an epoch. If power cuts such a commit
//! off, the members that got it look as if they had continued without the others. A commit that
//! leaves no member out must not look like that.

use super::marks::{clear_marks, watch_committer};
use super::members::{Attached, MemberRole, SlotState};
use super::registry;
use super::remote::LocalFuture;
use super::shared::{Shapes, Shared};
use super::stripe_owner::StripeOwner;
use super::turns::{Turn, Turns};
use crate::Uuid;
use crate::config::Consistency;
use crate::metadata::intent_bitmap::STALE;
use crate::metadata::{Member, MemberFailures, MemberState, Reason, Table, Target, Targets};
use crate::mutant::{self, Mutant};
use block::{Device, IoError, IoResult};
use reactor::{CoreRef, Permits};
use std::cell::Cell;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// One operation of the committing core; see the module.
pub(crate) struct MetadataCommitter {
    shared: Arc<Shared>,
    owner: Weak<StripeOwner>,
    turns: Rc<Turns>,
}

/// The effect of a commit on the log.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// It continues.
    SameLog,
    /// It starts over: a member or core joins.
    NewLog,
}

impl MetadataCommitter {
    /// The committer for an operation on this core; `None` if it is not the committing core.
    pub fn of(owner: &Rc<StripeOwner>) -> Option<MetadataCommitter> {
        let turns = owner.turns.borrow().clone()?;
        Some(MetadataCommitter { shared: owner.shared.clone(), owner: Rc::downgrade(owner), turns })
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(super) fn owner(&self) -> Option<Rc<StripeOwner>> {
        self.owner.upgrade()
    }

    /// While held, no member or core may join.
    pub(super) fn quiet(&self) -> &Permits {
        &self.turns.quiet
    }

    /// Takes a member out that is announced as failing. Returns when every live member knows.
    pub async fn take_out(&self, slot: usize, role: MemberRole, reason: Reason) -> IoResult {
        let _turn = Turn::take(&self.turns.commit).await;
        let members = &self.shared.members;
        let is_done = match role {
            // A member that is live here took the slot of the one that failed.
            MemberRole::Current => members.state(slot) != SlotState::Failing,
            MemberRole::Replacement => !members.is_filling(slot) && !members.is_leaving(slot),
        };
        if is_done {
            return Ok(());
        }
        let is_replacement = members.is_live(slot);
        match role == MemberRole::Replacement && !is_replacement {
            true => members.announce_leaving(slot),
            false => members.stop_filling(slot),
        }
        tracing::error!(array = self.shared.config.name, slot, "a member failed: {}", reason.text());
        if role == MemberRole::Replacement && is_replacement {
            return Ok(()); // no superblock knows of it
        }
        self.commit(|table| table.take_out(slot, reason), Kind::SameLog).await
    }

    /// Takes a member out that does not answer, unless its group needs it. Of several that do not
    /// answer each is announced before the next one is looked at.
    pub async fn take_out_late(&self, slot: usize, role: MemberRole, device: Arc<dyn Device>) -> IoResult {
        let attached = self.shared.members.attached(slot);
        if !attached[role as usize].as_ref().is_some_and(|own| Arc::ptr_eq(&own.device, &device)) {
            return Ok(()); // another device has its slot
        }
        if role == MemberRole::Current {
            if !self.shared.members.is_live(slot) {
                return Ok(());
            }
            if !self.shared.can_lose(slot) {
                return Err(IoError::Invalid);
            }
            self.shared.members.announce_failure(slot);
        }
        self.take_out(slot, role, Reason::TimedOut).await
    }

    /// Commits the table with a change, and with every member that is failing out. Members that
    /// fail meanwhile go out as well, and the table is written again.
    async fn commit(&self, change: impl Fn(&mut Table), kind: Kind) -> IoResult {
        let shared = &self.shared;
        let owner = self.owner.upgrade().ok_or(IoError::DeviceGone)?;
        let mut table = shared.common.table().next(shared.common.wall_ns());
        if shared.common.begin_commit() {
            // Some members may have a table of that generation.
            table = table.retry(shared.common.wall_ns());
        }
        loop {
            shared.common.check_frozen()?;
            change(&mut table);
            let slots = 0..shared.config.geometry.members();
            // A member that cannot be reached from here does not learn of the table: it has failed.
            for slot in slots.clone() {
                if shared.members.is_live(slot) && owner.channels.get(slot, MemberRole::Current).is_none() {
                    shared.members.announce_failure(slot);
                    shared.check_redundancy(slot);
                }
            }
            shared.common.check_frozen()?;
            let failing: Vec<usize> =
                slots.clone().filter(|slot| shared.members.state(*slot) == SlotState::Failing).collect();
            // No superblock knows of what was to replace them, and none may take it for them.
            failing.iter().for_each(|slot| shared.members.stop_filling(*slot));
            // A device that failed during a rebuild is not up to date from now on either.
            let leaving: Vec<usize> = slots.filter(|slot| shared.members.is_leaving(*slot)).collect();
            let is_alone = mutant::is(Mutant::CommitIgnoresOthers);
            for slot in failing.iter().chain(&leaving).filter(|_| !is_alone) {
                table.take_out(*slot, Reason::WriteError);
            }
            if !table.has_live_members_of(&shared.common.table()) {
                table.begin_epoch(owner.core.random_u64());
            }
            let is_ppl = shared.config.consistency == Consistency::Ppl;
            table.is_logging |= is_ppl || table.is_degraded();
            if kind == Kind::NewLog {
                table.nonce = shared.common.new_nonce();
                // Nothing is in flight. Older entries of the log are void, and cannot undo later
                // writes that are not logged.
                table.is_logging = is_ppl || table.is_degraded();
            }
            let begins_to_log = table.is_logging && !shared.common.is_logging();
            let leaves_marks = begins_to_log && shared.config.geometry.data > 1;
            if leaves_marks {
                self.have_others_watch(&owner);
            }
            // A read-only array does not persist this; the state is discarded on stop.
            let targets = if shared.common.is_read_only { Vec::new() } else { owner.targets() };
            let results = shared.common.store.commit(&targets, &table).await;
            let failures: Vec<(usize, IoError)> =
                results.into_iter().filter_map(|(slot, result)| Some((slot, result.err()?))).collect();
            if failures.is_empty() {
                shared.common.set_table(table);
                if leaves_marks {
                    owner.core.spawn(clear_marks(self.owner.clone()));
                }
                failing.into_iter().for_each(|slot| shared.members.set_state(slot, SlotState::Out));
                leaving.into_iter().for_each(|slot| shared.members.stop_filling(slot));
                return Ok(());
            }
            table = table.retry(shared.common.wall_ns());
            for (slot, error) in failures {
                tracing::error!(array = shared.config.name, slot, %error, "a superblock cannot be written");
                if shared.members.is_live(slot) {
                    shared.members.announce_failure(slot);
                    shared.check_redundancy(slot);
                } else {
                    shared.members.announce_leaving(slot);
                }
            }
        }
    }

    /// Lets the other cores notice soon if this one ends. One with a full inbox takes longer.
    fn have_others_watch(&self, owner: &StripeOwner) {
        let id = self.shared.id;
        for core in self.shared.common.owner_cores().iter().filter(|core| !core.is_same(&owner.here)) {
            let _ = core.try_run(Box::new(move |core| {
                if let Some(owner) = registry::find(id) {
                    core.spawn(watch_committer(Rc::downgrade(&owner)));
                }
            }));
        }
    }

    /// Commits a table with a change while no stripe operation runs, with a new log; then runs
    /// `apply`, before operations run again.
    pub(super) async fn while_quiesced(
        &self,
        prepare: impl AsyncFnOnce() -> IoResult,
        change: impl Fn(&mut Table),
        apply: impl AsyncFnOnce(),
        newcomer: Option<CoreRef>,
    ) -> IoResult {
        let quiet = Turn::take(&self.turns.quiet).await;
        self.while_quiet(&quiet, prepare, change, apply, newcomer).await
    }

    /// As [`MetadataCommitter::while_quiesced`], for a caller that holds `quiet`.
    async fn while_quiet(
        &self,
        _quiet: &Turn<'_>,
        prepare: impl AsyncFnOnce() -> IoResult,
        change: impl Fn(&mut Table),
        apply: impl AsyncFnOnce(),
        newcomer: Option<CoreRef>,
    ) -> IoResult {
        let cores = self.close_gates().await;
        let turn = Turn::take(&self.turns.commit).await;
        let mut result = prepare().await;
        if result.is_ok() {
            result = self.commit(change, Kind::NewLog).await;
        }
        drop(turn);
        let (nonce, epoch) = self.shared.common.log_identity();
        let is_ok = result.is_ok();
        if is_ok {
            // Before it owns anything: its log was made before the nonce that is in force now.
            let is_new = |core: &CoreRef| !cores.iter().any(|old| old.is_same(core));
            let reset = move |owner: Rc<StripeOwner>| -> LocalFuture<()> {
                Box::pin(async move { owner.reset_logs(nonce, epoch).await })
            };
            if let Some(core) = newcomer.filter(is_new) {
                self.each_owner(&[core], reset).await;
            }
            self.each_owner(&cores, reset).await;
            apply().await;
        }
        self.each_owner(&cores, |owner| Box::pin(async move { owner.open_gates() })).await;
        result
    }

    /// Lets another core own stripes.
    pub async fn join(&self, core: CoreRef) -> IoResult {
        let shared = self.shared.clone();
        let apply = async || {
            let mut cores = Vec::clone(&shared.common.owner_cores());
            cores.push(core.clone());
            shared.common.set_owner_cores(cores);
        };
        // Its log was made before the nonce that comes into force now.
        self.while_quiesced(async || Ok(()), |_| (), apply, Some(core.clone())).await
    }

    /// Commits in the place of cores that have ended: they own nothing any more, and gates that
    /// they have left closed are opened. Of many callers one does it: the others find it done.
    pub async fn take_over(&self) -> IoResult {
        let quiet = Turn::take(&self.turns.quiet).await;
        let cores = self.shared.common.owner_cores();
        if !cores.iter().any(CoreRef::is_stopped) && !self.is_any_gate_abandoned(&cores).await {
            return Ok(());
        }
        let owner = self.owner.upgrade().ok_or(IoError::DeviceGone)?;
        let shared = self.shared.clone();
        let here = owner.core.remote();
        let apply = async || {
            let mut cores = Vec::clone(&shared.common.owner_cores());
            cores.retain(|core| !core.is_stopped());
            if cores.is_empty() {
                cores.push(here.clone());
            }
            shared.common.set_owner_cores(cores);
        };
        self.while_quiet(&quiet, async || Ok(()), |_| (), apply, Some(here.clone())).await
    }

    async fn is_any_gate_abandoned(&self, cores: &[CoreRef]) -> bool {
        let is_any = Arc::new(AtomicBool::new(false));
        let found = is_any.clone();
        let look = move |owner: Rc<StripeOwner>| -> LocalFuture<()> {
            found.fetch_or(owner.gate.is_abandoned(), Ordering::SeqCst);
            Box::pin(std::future::ready(()))
        };
        self.each_owner(cores, look).await;
        is_any.load(Ordering::SeqCst)
    }

    /// Starts to fill a slot with a device. For an empty slot the superblocks say so when this
    /// returns. A copy of a live member is known in memory only, and forgotten in a crash.
    ///
    /// # Errors
    /// When the array or the device cannot take what it must know.
    pub async fn start_filling(&self, slot: usize, uuid: Uuid, incoming: Attached, cursor: u64) -> IoResult {
        let shared = &self.shared;
        // Known in `prepare`: until then the slot's member may fail.
        let is_empty = Cell::new(false);
        let cursor_bytes = shared.config.geometry.step_offset(cursor);
        let change = |table: &mut Table| {
            if is_empty.get() {
                let state = MemberState::Rebuilding { cursor: cursor_bytes };
                table.members[slot] = Member { uuid, state, reason: Reason::None };
            }
        };
        let prepare = async || {
            if incoming.layout.check(shared.configs.newest()).is_err() {
                return Err(IoError::NoSpace); // the array has grown since the caller looked
            }
            is_empty.set(shared.members.state(slot) == SlotState::Out);
            if is_empty.get() {
                // While no operation sets a bit: from here on the device is one of those that a bit
                // is durable on.
                let channel = incoming.device.open_channel().map_err(|_| IoError::DeviceGone)?;
                self.bring_up(&Target { slot, channel, layout: incoming.layout }).await?;
            }
            let (skipped, is_moving) = match shared.common.shapes() {
                Shapes::One => (0, false),
                Shapes::Two(router) => (router.walk().skipped(), router.is_moving()),
            };
            shared.members.start_filling(slot, uuid, incoming.clone(), cursor, skipped);
            if is_moving { Err(IoError::Invalid) } else { Ok(()) }
        };
        let result = self.while_quiesced(prepare, change, async || (), None).await;
        if result.is_err() || !shared.members.is_filling(slot) {
            shared.members.stop_filling(slot);
            return result.and(Err(IoError::DeviceGone));
        }
        Ok(())
    }

    /// The incoming device of a slot is full: it is the slot's own from now on. A copy of a live
    /// member has a superblock before any other one names it. When the copy cannot be written, the
    /// member stays.
    pub async fn finish_filling(&self, slot: usize, uuid: Uuid) -> IoResult {
        let members = &self.shared.members;
        let change = |table: &mut Table| table.members[slot] = Member::live(uuid);
        let prepare = async || {
            let [own, incoming] = members.attached(slot);
            let incoming = incoming.ok_or(IoError::DeviceGone)?;
            if own.is_some()
                && let Err(error) = self.introduce(slot, uuid, &incoming).await
            {
                members.stop_filling(slot); // no other superblock names it
                return Err(error);
            }
            members.finish_filling(slot);
            Ok(())
        };
        let apply = async || {
            self.shared.common.read_errors.reset(slot);
            // No member lacks data any more, and no operation that could mark a region runs now.
            if members.is_healthy() {
                let regions = &self.shared.common.regions;
                (0..regions.regions()).for_each(|region| regions.clear(region, STALE));
            }
        };
        self.while_quiesced(prepare, change, apply, None).await
    }

    /// Introduces the copy of a live member. The next commit makes it the slot's member.
    async fn introduce(&self, slot: usize, uuid: Uuid, copy: &Attached) -> IoResult {
        let store = &self.shared.common.store;
        let channel = copy.device.open_channel().map_err(|_| IoError::DeviceGone)?;
        let target = Target { slot, channel, layout: copy.layout };
        if !mutant::is(Mutant::CopyNotIntroduced) {
            store.introduce(&target, &self.shared.common.table().introducing(slot, uuid)).await?;
        }
        self.bring_up(&target).await?;
        store.exchange(slot);
        Ok(())
    }

    /// Writes write-intent bitmap and bad blocks to a device that is about to take part.
    async fn bring_up(&self, target: &Target) -> IoResult {
        self.shared.common.regions.write_to(target).await?;
        self.shared.common.bad.write_to(target).await
    }

    /// Remembers how far the rebuilds of some slots are, in steps.
    pub async fn checkpoint(&self, cursors: &[(usize, u64)]) -> IoResult {
        let _turn = Turn::take(&self.turns.commit).await;
        let geometry = &self.shared.config.geometry;
        let change = |table: &mut Table| {
            for (slot, step) in cursors {
                if let MemberState::Rebuilding { cursor } = &mut table.members[*slot].state {
                    *cursor = geometry.step_offset(*step);
                }
            }
        };
        self.commit(change, Kind::SameLog).await
    }

    /// Commits a change that concerns no member, e.g. a clean stop.
    pub async fn note(&self, change: impl Fn(&mut Table)) -> IoResult {
        let _turn = Turn::take(&self.turns.commit).await;
        self.commit(change, Kind::SameLog).await
    }

    /// Ends service: lets no operation in any more, waits for those under way, and commits that all
    /// is clean.
    pub async fn stop(&self) -> IoResult {
        let owner = self.owner.upgrade().ok_or(IoError::DeviceGone)?;
        let _quiet = Turn::take(&self.turns.quiet).await;
        let cores = self.close_gates().await;
        // Requests that were given up and are still in flight would be cut off with their core.
        self.each_owner(&cores, |owner| Box::pin(async move { owner.wait_for_all_late().await })).await;
        if self.shared.common.is_read_only {
            return Ok(());
        }
        self.shared.common.check_frozen()?;
        if self.shared.config.consistency == Consistency::Bitmap {
            let mut memory = Vec::new();
            for _ in 0..2 {
                self.shared.common.regions.sweep(&mut memory);
            }
        }
        while let Err(MemberFailures(failures)) = self.shared.common.regions.settle(&*owner).await {
            owner.members_failed(failures).await?;
        }
        self.note(|table| table.is_clean = true).await
    }

    /// Lets no operation in any more, and waits for those under way; the owners.
    async fn close_gates(&self) -> Arc<Vec<CoreRef>> {
        let (cores, here) = (self.shared.common.owner_cores(), reactor::current().remote());
        let close = move |owner: Rc<StripeOwner>| -> LocalFuture<()> {
            Box::pin(async move { owner.close_gates(here).await })
        };
        self.each_owner(&cores, close).await;
        cores
    }

    async fn each_owner<W>(&self, cores: &[CoreRef], work: W)
    where
        W: FnOnce(Rc<StripeOwner>) -> LocalFuture<()> + Clone + Send + 'static,
    {
        registry::run_each(cores, self.shared.id, work).await;
    }
}

#[cfg(test)]
mod tests;
