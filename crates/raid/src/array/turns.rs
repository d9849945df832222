//! The order in which the committing core changes metadata.

use reactor::Permits;

/// The turns of an array. The core that commits has them.
pub(crate) struct Turns {
    /// Held during a commit.
    pub commit: Permits,
    /// Held while the gates are closed: no member or core may join.
    pub quiet: Permits,
}

impl Default for Turns {
    fn default() -> Turns {
        Turns { commit: Permits::new(1), quiet: Permits::new(1) }
    }
}

/// One of a [`Permits`] of one, given back when dropped.
pub(crate) struct Turn<'a>(&'a Permits);

impl<'a> Turn<'a> {
    pub async fn take(permits: &'a Permits) -> Turn<'a> {
        permits.acquire(1).await;
        Turn(permits)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.release(1);
    }
}
