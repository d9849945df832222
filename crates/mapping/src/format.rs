//! The part of a table that its format has: its bytes on the disk.

use crate::Leaf;
use block::{DeviceError, IoResult};
use std::future::Future;
use std::ops::Range;

/// A table on a disk. The owner of a leaf calls it, on the owner's core.
pub trait Format: Send + Sync + 'static {
    /// The state of one core, such as its channels.
    type Local: 'static;

    /// Opens the state of the calling core.
    ///
    /// # Errors
    /// If a device cannot be opened there.
    fn open(&self) -> Result<Self::Local, DeviceError>;

    /// Reads the entries of a leaf into `entries`, whose entries are 0.
    fn load(&self, local: &Self::Local, leaf: u64, entries: &Leaf) -> impl Future<Output = IoResult>;

    /// Makes the entries of `slots` durable. Entries may change meanwhile; each is written as it
    /// was at some moment of the call.
    fn save(
        &self,
        local: &Self::Local,
        leaf: u64,
        entries: &Leaf,
        slots: Range<usize>,
    ) -> impl Future<Output = IoResult>;
}
