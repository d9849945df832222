//! The copies of the table of an open pool: compared with the table in memory, and rewritten.

use super::{Pool, PoolError, on};
use crate::store::{self, Found};
use block::Channel;
use std::sync::atomic::Ordering;

impl Pool {
    /// Reads every copy of the table and compares it with the table in use. Changes of the pool
    /// wait meanwhile.
    ///
    /// # Errors
    /// When the device fails. A damaged copy is not an error.
    pub fn check(&self) -> Result<Found, PoolError> {
        let (_alone, table) = self.change();
        let copies =
            on(&self.device, &self.core, async |channel: &dyn Channel| store::inspect(channel).await)?;
        Ok(store::compare(copies, table))
    }

    /// Rewrites damaged copies from the table in use. Returns their offsets on the device in bytes.
    ///
    /// # Errors
    /// When the device fails: the copies before the failed one are written.
    pub fn repair(&self) -> Result<Vec<u64>, PoolError> {
        let (_alone, table) = self.change();
        self.take_back()?;
        let damaged = on(&self.device, &self.core, async move |channel: &dyn Channel| {
            let found = store::compare(store::inspect(channel).await?, table);
            found.mend(channel).await?;
            Ok(found.damaged())
        })?;
        self.rewritten.fetch_add(damaged.len() as u64, Ordering::Relaxed);
        Ok(damaged)
    }

    /// Offsets in bytes of damaged copies of the table that the opening rewrote.
    pub fn rewritten_at_opening(&self) -> &[u64] {
        &self.rewritten_at_opening
    }

    /// Number of damaged copies rewritten at the opening and since.
    pub fn rewritten(&self) -> u64 {
        self.rewritten.load(Ordering::Relaxed)
    }
}
