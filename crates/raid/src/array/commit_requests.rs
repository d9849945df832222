//! Requests to the core that commits metadata, and which core that is.

use super::committer::MetadataCommitter;
use super::marks::clear_marks;
use super::members::{MemberRole, SlotState};
use super::registry;
use super::remote::LocalFuture;
use super::shared::Shared;
use super::stripe_owner::StripeOwner;
use crate::Consistency;
use crate::metadata::Reason;
use block::{Device, IoError, IoResult};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;

impl Shared {
    /// Fails a member that does not do what it should. Returns when every live member knows.
    ///
    /// # Errors
    /// When the array cannot continue without it.
    pub fn member_failed(
        &self,
        slot: usize,
        role: MemberRole,
        error: IoError,
    ) -> Pin<Box<dyn Future<Output = IoResult> + '_>> {
        // Boxed: the futures of requests, which are moved and kept, need no room for what seldom
        // happens.
        Box::pin(self.take_out(slot, role, reason_of(error)))
    }

    /// Takes a member out; see [`Shared::member_failed`].
    pub async fn take_out(&self, slot: usize, role: MemberRole, reason: Reason) -> IoResult {
        if self.config.geometry.parity == 0 {
            return Err(IoError::DeviceGone);
        }
        if role == MemberRole::Current {
            if self.members.state(slot) == SlotState::Out {
                return Ok(());
            }
            self.members.announce_failure(slot);
            self.check_redundancy(slot);
        }
        self.common.check_frozen()?;
        self.on_committer(move |committer| {
            Box::pin(async move { committer.take_out(slot, role, reason).await })
        })
        .await
    }

    /// Fails a member that does not answer, unless its group needs it, or the slot has another
    /// device than `device` by now. Returns when every live member knows.
    ///
    /// # Errors
    /// [`IoError::Invalid`] when the group needs it; the error of the commit.
    pub async fn take_out_late(&self, slot: usize, role: MemberRole, device: Arc<dyn Device>) -> IoResult {
        self.on_committer(move |committer| {
            Box::pin(async move { committer.take_out_late(slot, role, device).await })
        })
        .await
    }

    /// Runs work on the array's committing core. On a core that has opened a channel.
    pub async fn on_committer<W>(&self, work: W) -> IoResult
    where
        W: FnOnce(MetadataCommitter) -> LocalFuture<IoResult> + Send + 'static,
    {
        self.ensure_committer();
        let Some(committer) = self.common.committer() else { return Err(IoError::DeviceGone) };
        let work = move |owner: Rc<StripeOwner>| -> LocalFuture<IoResult> {
            match MetadataCommitter::of(&owner) {
                Some(committer) => work(committer),
                None => Box::pin(std::future::ready(Err(IoError::DeviceGone))),
            }
        };
        let answer = registry::run(&committer, self.common.lead, work).await;
        answer.ok().flatten().unwrap_or(Err(IoError::DeviceGone))
    }

    /// Makes this core, which has opened a channel, the committing one if there is none or it has
    /// ended.
    pub fn ensure_committer(&self) {
        let Some(owner) = registry::find(self.common.lead) else { return };
        let is_successor = self.common.committer().is_some();
        if !self.common.claim_committer(&owner.core.remote()) {
            return;
        }
        owner.turns.replace(Some(Rc::default()));
        // The core that has ended may have had marks to take away.
        let has_marks = self.config.consistency == Consistency::Bitmap && self.config.geometry.data > 1;
        if is_successor && has_marks && !self.common.is_read_only && self.common.is_logging() {
            owner.core.spawn(clear_marks(Rc::downgrade(&owner)));
        }
    }

    /// Returns when cores that have ended own nothing any more, and keep no gate closed.
    pub async fn take_over(&self) -> IoResult {
        self.on_committer(|committer| Box::pin(async move { committer.take_over().await })).await
    }
}

fn reason_of(error: IoError) -> Reason {
    match error {
        IoError::DeviceGone => Reason::Gone,
        IoError::TimedOut => Reason::TimedOut,
        _ => Reason::WriteError,
    }
}
