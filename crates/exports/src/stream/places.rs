//! The cores that serve an export's connections, now and from some time on.

use crate::Error;
use reactor::CoreRef;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Which core is next. Shared by an export and those who receive its clients.
pub(crate) struct Places {
    cores: Vec<CoreRef>,
    /// Cores in turn, by their place among all of them.
    map: Mutex<Vec<usize>>,
}

impl Places {
    /// Connections go round the cores of `map`, or all of them if it is empty.
    ///
    /// # Errors
    /// When there is no such core.
    pub(crate) fn new(cores: &[CoreRef], map: &[usize]) -> Result<Arc<Places>, Error> {
        let places = Places { cores: cores.to_vec(), map: Mutex::default() };
        places.remap(map)?;
        Ok(Arc::new(places))
    }

    /// Every core on which there may be connections.
    pub(crate) fn cores(&self) -> &[CoreRef] {
        &self.cores
    }

    /// The place of the core whose turn it is.
    pub(crate) fn of_turn(&self, turn: usize) -> usize {
        let map = self.lock();
        map[turn % map.len()]
    }

    /// As in [`Places::new`], for connections that are made from now on.
    ///
    /// # Errors
    /// When there is no such core; then nothing has changed.
    pub(crate) fn remap(&self, map: &[usize]) -> Result<(), Error> {
        crate::check_cores(map, self.cores.len())?;
        let turns = if map.is_empty() { self.cores.len() } else { map.len() };
        *self.lock() = crate::queue_cores(map, turns as u16, self.cores.len());
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<usize>> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
