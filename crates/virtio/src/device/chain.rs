//! A descriptor chain, and the translation of its guest addresses.

use super::RingError;
use crate::memory::GuestMemory;
use crate::ring::MAX_SEGMENTS;
use block::Segment;
use std::sync::Arc;

/// A request that a driver made available: segments of memory, first those the device reads, then
/// those it writes.
///
/// A chain is made once and reused: [`super::VirtQueue::pop`] fills it and
/// [`super::VirtQueue::push_used`] empties it. Neither allocates once the list is long enough.
#[derive(Debug, Default)]
pub struct Chain {
    pub(super) id: u16,
    /// Slots of a packed ring that the chain took.
    pub(super) slots: u16,
    /// First and last entry in the in-flight region (packed).
    pub(super) entries: (u16, u16),
    /// The memory snapshot and queue of the chain while it is in flight, else 0.
    pub(super) tag: u64,
    readable: usize,
    segments: Vec<Segment>,
}

// SAFETY: the pointers lead to guest memory, which the queue keeps mapped for all threads until it
// gets the chain back; the chain itself has no tie to a thread.
unsafe impl Send for Chain {}

impl Chain {
    /// A chain with room for a common request; it grows for longer ones.
    pub fn new() -> Chain {
        Chain { segments: Vec::with_capacity(16), ..Chain::default() }
    }

    /// The driver's identifier of the chain: its head descriptor (split) or buffer ID (packed).
    pub fn id(&self) -> u16 {
        self.id
    }

    /// Whether the chain was popped and not returned.
    pub fn is_in_flight(&self) -> bool {
        self.tag != 0
    }

    /// Segments that the device reads.
    #[inline]
    pub fn readable(&self) -> &[Segment] {
        &self.segments[..self.readable]
    }

    /// Segments that the device writes.
    #[inline]
    pub fn writable(&self) -> &[Segment] {
        &self.segments[self.readable..]
    }

    /// A chain that no queue made, for tests of its content.
    #[cfg(test)]
    pub(crate) fn of(readable: &[Segment], writable: &[Segment]) -> Chain {
        Chain { readable: readable.len(), segments: [readable, writable].concat(), ..Chain::default() }
    }

    #[inline]
    pub(super) fn clear(&mut self) {
        self.segments.clear();
        self.readable = 0;
    }
}

/// Translates guest addresses to addresses of this process and caches the last regions used.
#[derive(Debug)]
pub(super) struct Translator {
    memory: Arc<GuestMemory>,
    windows: [Window; WINDOWS],
    /// The window that the next miss replaces.
    oldest: usize,
}

/// Number of cached regions: rings, tables and data of one guest rarely lie in more.
const WINDOWS: usize = 4;

/// A cached region.
#[derive(Clone, Copy, Debug)]
struct Window {
    start: u64,
    len: u64,
    host: *mut u8,
}

impl Window {
    const NONE: Window = Window { start: 0, len: 0, host: std::ptr::null_mut() };

    #[inline]
    fn part(&self, addr: u64, len: u64) -> Option<*mut u8> {
        let offset = addr.wrapping_sub(self.start);
        (offset < self.len && len <= self.len - offset).then(|| self.host.wrapping_add(offset as usize))
    }
}

// SAFETY: the windows' `host` points into a mapping that `memory` keeps, valid in every thread.
unsafe impl Send for Translator {}

impl Translator {
    pub(super) fn new(memory: Arc<GuestMemory>) -> Self {
        Translator { memory, windows: [Window::NONE; WINDOWS], oldest: 0 }
    }

    pub(super) fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Appends a buffer to the chain.
    #[inline]
    pub(super) fn append(
        &mut self,
        chain: &mut Chain,
        addr: u64,
        len: u32,
        is_writable: bool,
    ) -> Result<(), RingError> {
        if !is_writable {
            if chain.readable != chain.segments.len() {
                return Err(RingError::ReadableAfterWritable);
            }
            chain.readable += 1;
        }
        let len = u64::from(len);
        match self.at_hand(addr, len) {
            Some(base) if len > 0 && chain.segments.len() < MAX_SEGMENTS => {
                chain.segments.push(Segment { base, len: len as usize });
                Ok(())
            }
            _ => self.append_slowly(chain, addr, len, is_writable),
        }
    }

    #[inline]
    fn at_hand(&self, addr: u64, len: u64) -> Option<*mut u8> {
        self.windows.iter().find_map(|window| window.part(addr, len))
    }

    /// The slow path: other regions, buffers over several adjacent regions, errors.
    #[cold]
    #[inline(never)]
    fn append_slowly(
        &mut self,
        chain: &mut Chain,
        mut addr: u64,
        mut len: u64,
        is_writable: bool,
    ) -> Result<(), RingError> {
        if len == 0 {
            return Err(RingError::EmptyBuffer { addr });
        }
        let outside = RingError::OutsideMemory { addr, len };
        let before = chain.segments.len();
        while len > 0 {
            if chain.segments.len() >= MAX_SEGMENTS {
                return Err(RingError::TooManySegments);
            }
            let region = self.memory.region_at(addr).ok_or(outside)?;
            let window = Window { start: region.guest_addr(), len: region.len(), host: region.host_addr() };
            if !self.windows.iter().any(|known| known.start == window.start && known.len > 0) {
                self.windows[self.oldest] = window;
                self.oldest = (self.oldest + 1) % WINDOWS;
            }
            let offset = addr - window.start;
            let part = len.min(window.len - offset);
            chain
                .segments
                .push(Segment { base: window.host.wrapping_add(offset as usize), len: part as usize });
            len -= part;
            if len > 0 {
                addr = addr.checked_add(part).ok_or(outside)?;
            }
        }
        if !is_writable {
            chain.readable += chain.segments.len() - before - 1;
        }
        Ok(())
    }

    /// Returns the address of an indirect table of `len` bytes and its number of descriptors. A
    /// table that spans two regions is refused: no driver allocates one.
    #[inline]
    pub(super) fn table(&mut self, addr: u64, len: u32) -> Result<(*const u8, u16), RingError> {
        if len == 0 || !len.is_multiple_of(16) || len as usize > 16 * MAX_SEGMENTS {
            return Err(RingError::BadIndirectLength { len });
        }
        let count = (len / 16) as u16;
        let len = u64::from(len);
        if let Some(host) = self.at_hand(addr, len) {
            return Ok((host, count));
        }
        let host = self.memory.translate(addr, len).ok_or(RingError::OutsideMemory { addr, len })?;
        Ok((host, count))
    }
}
