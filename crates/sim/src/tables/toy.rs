//! The toy format: a table in memory that takes time, and fails to save now and then.

use block::{DeviceError, IoError, IoResult};
use mapping::{ENTRIES, Format, Leaf, View};
use std::ops::Range;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The entries on the disk.
pub type Disk = Arc<Mutex<Vec<u64>>>;

/// Locks the disk.
pub fn lock(disk: &Disk) -> MutexGuard<'_, Vec<u64>> {
    disk.lock().unwrap_or_else(PoisonError::into_inner)
}

/// See the module.
pub struct Toy {
    disk: Disk,
}

impl Toy {
    pub fn new(disk: &Disk) -> Toy {
        Toy { disk: disk.clone() }
    }
}

/// Lets up to `most_ns` pass.
pub async fn pause(most_ns: u64) {
    let core = reactor::current();
    let ns = core.random_u64() % (most_ns + 1);
    core.sleep(ns).await;
}

impl Format for Toy {
    type Local = ();

    fn open(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    async fn load(view: &Rc<View<Toy>>, leaf: u64, entries: &Leaf) -> IoResult {
        pause(20_000).await;
        let first = leaf as usize * ENTRIES;
        for slot in 0..ENTRIES {
            if let Some(entry) = lock(&view.format().disk).get(first + slot) {
                entries.set(slot, *entry);
            }
        }
        pause(20_000).await;
        Ok(())
    }

    async fn save(view: &Rc<View<Toy>>, leaf: u64, entries: &Leaf, slots: Range<usize>) -> IoResult {
        pause(20_000).await;
        // It may fail after a part of it was written.
        let fails_at = match reactor::current().random_u64() % 16 {
            0 => slots.start + (reactor::current().random_u64() % slots.len() as u64) as usize,
            _ => slots.end,
        };
        let first = leaf as usize * ENTRIES;
        let half = slots.start + slots.len() / 2;
        for slot in slots.clone() {
            if slot == fails_at {
                return Err(IoError::Medium);
            }
            if slot == half {
                pause(10_000).await;
            }
            if let Some(entry) = lock(&view.format().disk).get_mut(first + slot) {
                *entry = entries.get(slot);
            }
        }
        pause(10_000).await;
        Ok(())
    }
}
