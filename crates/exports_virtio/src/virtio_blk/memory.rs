//! A guest's memory, and its registration with the device.

use block::Device;
use exports::Error;
use std::sync::Arc;
use virtio::memory::{GuestMemory, Region};

/// The current memory of a guest, registered with the device.
pub(crate) struct SharedMemory {
    device: Arc<dyn Device>,
    memory: Arc<GuestMemory>,
}

impl SharedMemory {
    /// Creates an empty memory.
    pub(crate) fn new(device: Arc<dyn Device>) -> SharedMemory {
        SharedMemory { device, memory: Arc::default() }
    }

    pub(crate) fn get(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Replaces the memory and updates the device's registrations. No ring may run.
    ///
    /// # Errors
    /// When the device cannot register a region. Then no region is registered, and the memory is
    /// empty.
    pub(crate) fn replace(&mut self, memory: GuestMemory) -> Result<(), Error> {
        let old = std::mem::take(&mut self.memory);
        let is_in = |memory: &GuestMemory, region: &Arc<Region>| {
            memory.regions().any(|other| Arc::ptr_eq(other, region))
        };
        for region in old.regions().filter(|region| !is_in(&memory, region)) {
            self.device.unmap_region(&region.as_block_region());
        }
        let mut mapped: Vec<&Arc<Region>> = old.regions().filter(|region| is_in(&memory, region)).collect();
        for region in memory.regions().filter(|region| !is_in(&old, region)) {
            if let Err(error) = self.device.map_region(&region.as_block_region()) {
                mapped.iter().for_each(|region| self.device.unmap_region(&region.as_block_region()));
                return Err(error.into());
            }
            mapped.push(region);
        }
        self.memory = Arc::new(memory);
        Ok(())
    }
}
