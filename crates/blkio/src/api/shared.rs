//! The device as its queues and buffers keep it open.

use super::pool::Pool;
use crate::{Instance, Result};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The part of a device that its queues and buffers keep alive.
pub(super) struct Shared {
    instance: Mutex<Instance>,
    pool: Mutex<Pool>,
    /// Memory that was not mapped cannot be used.
    pub needs_regions: bool,
    /// Addresses and lengths of memory must be multiples of this many bytes.
    pub buf_alignment: usize,
}

impl Shared {
    pub fn new(instance: Instance, pool: Pool, needs_regions: bool, buf_alignment: usize) -> Shared {
        Shared { instance: Mutex::new(instance), pool: Mutex::new(pool), needs_regions, buf_alignment }
    }

    pub fn instance(&self) -> MutexGuard<'_, Instance> {
        self.instance.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn pool(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Maps a new memory region of `len` bytes and returns its address.
    pub fn map_region(&self, len: usize) -> Result<usize> {
        let mut instance = self.instance();
        let region = instance.alloc_region(len)?;
        if let Err(error) = instance.map_region(&region) {
            instance.free_region(&region)?;
            return Err(error);
        }
        Ok(region.addr)
    }
}
