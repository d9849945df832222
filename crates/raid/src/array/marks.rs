//! Tasks that take away marks of the write-intent bitmap.

use super::stripe_owner::StripeOwner;
use crate::metadata::MemberFailures;
use std::rc::Weak;

/// How long a region without writes keeps its mark, at least.
const SWEEP_NS: u64 = 1_000_000_000;
/// How long after a member has gone it is first looked again whether unlogged writes have ended.
const FIRST_LOOK_NS: u64 = 100_000;
/// … and how often at least from then on: until their marks are gone, power loss leaves their
/// regions without redundancy.
const LOOK_AGAIN_NS: u64 = 10_000_000;

/// Takes marks away from regions without writes, for as long as the array lives. Every core looks,
/// and the committing one works: when that core has ended, another one continues although no
/// request asks for a commit.
pub(super) async fn keep_regions(owner: Weak<StripeOwner>) {
    let mut memory = Vec::new();
    loop {
        let Some(core) = owner.upgrade().map(|owner| owner.core.clone()) else { return };
        core.sleep(SWEEP_NS).await;
        let Some(owner) = owner.upgrade() else { return };
        let shared = &owner.shared;
        shared.ensure_committer();
        if owner.turns.borrow().is_none() || shared.common.is_frozen() {
            continue;
        }
        if shared.common.regions.sweep(&mut memory) > 0
            && let Err(MemberFailures(failures)) = shared.common.regions.settle(&*owner).await
        {
            let _ = owner.members_failed(failures).await; // the next write finds out as well
        }
    }
}

/// Takes the place of the committing core within [`LOOK_AGAIN_NS`] of its end. Runs for
/// [`SWEEP_NS`] on each other core that owns stripes, from the moment in which the array begins to
/// log. The committing core has marks to take away then, and perhaps no write needs it.
pub(super) async fn watch_committer(owner: Weak<StripeOwner>) {
    for _ in 0..SWEEP_NS / LOOK_AGAIN_NS {
        let Some(core) = owner.upgrade().map(|owner| owner.core.clone()) else { return };
        core.sleep(LOOK_AGAIN_NS).await;
        let Some(owner) = owner.upgrade() else { return };
        owner.shared.ensure_committer();
    }
}

/// Takes away the marks of writes that were in flight when the array began to log, as soon as they
/// have ended. Parity fits there then, and a later crash leaves nothing open.
pub(super) async fn clear_marks(owner: Weak<StripeOwner>) {
    // Where a write may still be in flight that is not logged; its mark may be yet to come.
    let mut left: Option<Vec<u64>> = None;
    let mut wait_ns = FIRST_LOOK_NS;
    loop {
        let Some(owner) = owner.upgrade() else { return };
        let shared = &owner.shared;
        if !shared.common.is_logging() || shared.common.is_frozen() {
            return;
        }
        let is_busy = |region: &u64| !shared.common.regions.sweep_idle(*region);
        let busy = match left.take() {
            None => (0..shared.common.regions.regions()).filter(is_busy).collect(),
            Some(before) => before.into_iter().filter(is_busy).collect::<Vec<_>>(),
        };
        // Marks that a sync has cleared before are written with it.
        while let Err(MemberFailures(failures)) = shared.common.regions.settle(&*owner).await {
            if owner.members_failed(failures).await.is_err() {
                return;
            }
        }
        if busy.is_empty() {
            return;
        }
        left = Some(busy);
        let core = owner.core.clone();
        drop(owner);
        core.sleep(wait_ns).await;
        wait_ns = (2 * wait_ns).min(LOOK_AGAIN_NS);
    }
}
