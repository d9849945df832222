//! Memory for buffers, cut from mapped memory regions.

use crate::Result;
use std::ptr::NonNull;

/// Devices may bound the number of regions, so each is at least so long, and longer than the one
/// before.
const SMALLEST_REGION: usize = 2 << 20;

/// Regions stop growing here. Pages that no request touches cost nothing.
const LARGEST_REGION: usize = 256 << 20;

/// Free parts of mapped regions, by size. Regions stay mapped until the device is closed.
pub(super) struct Pool {
    alignment: usize,
    region_alignment: usize,
    /// Free parts of `alignment << index` bytes.
    free: Vec<Vec<NonNull<u8>>>,
    /// The unused rest of the newest region.
    rest: Option<(NonNull<u8>, usize)>,
    next_region: usize,
    regions: Vec<(usize, usize)>,
}

// SAFETY: free memory has no user on any thread.
unsafe impl Send for Pool {}

impl Pool {
    pub fn new(alignment: usize, region_alignment: usize) -> Pool {
        Pool {
            alignment: alignment.next_power_of_two(),
            region_alignment,
            free: Vec::new(),
            rest: None,
            next_region: SMALLEST_REGION,
            regions: Vec::new(),
        }
    }

    /// Whether all of that memory lies in one mapped region.
    pub fn holds(&self, start: usize, len: usize) -> bool {
        self.regions
            .iter()
            .any(|(from, all)| start >= *from && start - from <= *all && len <= all - (start - from))
    }

    /// A piece of at least `len` bytes, and its length. `map` maps a region of so many bytes and
    /// returns its address.
    pub fn take(
        &mut self,
        len: usize,
        map: impl FnOnce(usize) -> Result<usize>,
    ) -> Result<(NonNull<u8>, usize)> {
        let capacity = len.next_power_of_two().max(self.alignment);
        let class = (capacity / self.alignment).trailing_zeros() as usize;
        if let Some(piece) = self.free.get_mut(class).and_then(Vec::pop) {
            return Ok((piece, capacity));
        }
        let (start, left) = match self.rest {
            Some((start, left)) if left >= capacity => (start, left),
            _ => self.map_region(capacity, map)?,
        };
        // SAFETY: `capacity` bytes are left of the region.
        self.rest = Some((unsafe { start.add(capacity) }, left - capacity));
        Ok((start, capacity))
    }

    fn map_region(
        &mut self,
        at_least: usize,
        map: impl FnOnce(usize) -> Result<usize>,
    ) -> Result<(NonNull<u8>, usize)> {
        let len = self.next_region.max(at_least).next_multiple_of(self.region_alignment);
        let address = map(len)?;
        self.keep_rest();
        self.regions.push((address, len));
        self.next_region = (self.next_region * 2).min(LARGEST_REGION);
        let start = NonNull::new(std::ptr::with_exposed_provenance_mut(address));
        Ok((start.expect("memory was allocated"), len))
    }

    /// Divides the rest of a region into free parts, the longest first, so that none is lost.
    fn keep_rest(&mut self) {
        let Some((mut start, mut left)) = self.rest.take() else { return };
        while left >= self.alignment {
            let piece = self.alignment << (left / self.alignment).ilog2();
            self.give_back(start, piece);
            // SAFETY: the rest has `left` bytes, of which this takes `piece`.
            start = unsafe { start.add(piece) };
            left -= piece;
        }
    }

    /// Takes a piece back.
    pub fn give_back(&mut self, start: NonNull<u8>, capacity: usize) {
        let class = (capacity / self.alignment).trailing_zeros() as usize;
        if self.free.len() <= class {
            self.free.resize_with(class + 1, Vec::new);
        }
        self.free[class].push(start);
    }
}
