//! The cores that serve an export's new connections.

use crate::Error;
use reactor::CoreRef;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Assigns connections to cores in turn. Shared by an export and its acceptors.
pub struct Places {
    cores: Vec<CoreRef>,
    /// Cores in turn, as indices into all of them.
    map: Mutex<Vec<usize>>,
}

impl Places {
    /// Distributes connections over the cores of `map`, or over all of them if it is empty.
    ///
    /// # Errors
    /// When `map` names a core that does not exist.
    pub fn new(cores: &[CoreRef], map: &[usize]) -> Result<Arc<Places>, Error> {
        let places = Places { cores: cores.to_vec(), map: Mutex::default() };
        places.remap(map)?;
        Ok(Arc::new(places))
    }

    /// Every core that may have connections.
    pub fn cores(&self) -> &[CoreRef] {
        &self.cores
    }

    /// The index of the core of this turn.
    pub fn of_turn(&self, turn: usize) -> usize {
        let map = self.lock();
        map[turn % map.len()]
    }

    /// As [`Places::new`], for new connections.
    ///
    /// # Errors
    /// When `map` names a core that does not exist; then nothing changes.
    pub fn remap(&self, map: &[usize]) -> Result<(), Error> {
        crate::check_cores(map, self.cores.len())?;
        let turns = if map.is_empty() { self.cores.len() } else { map.len() };
        *self.lock() = crate::queue_cores(map, turns as u16, self.cores.len());
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<usize>> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
