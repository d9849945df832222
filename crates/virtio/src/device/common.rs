//! State common to split and packed queues: memory and its lifetime, dirty log, negotiated
//! features.

use super::chain::Translator;
use super::{Chain, QueueLog, RingError};
use crate::memory::GuestMemory;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Tags of pairs of queue and memory snapshot, never reused; 0 means none.
static NEXT_TAG: AtomicU64 = AtomicU64::new(1);

/// The shared state of a queue.
///
/// It keeps the windows that [`Chain`] exposes sound: the memory of a chain stays mapped until the
/// chain is returned, even when the guest's memory changes meanwhile. A queue that is dropped with
/// chains in flight leaves their memory mapped forever.
#[derive(Debug)]
pub(super) struct Common {
    pub translator: Translator,
    pub log: Option<QueueLog>,
    pub event_idx: bool,
    pub indirect: bool,
    /// The next `publish` interrupts the driver, whatever the driver requested.
    pub must_interrupt: bool,
    tag: u64,
    in_flight: u16,
    /// Memory that chains in flight still use, with their tag and number.
    retired: Vec<(u64, Arc<GuestMemory>, u16)>,
}

impl Common {
    pub fn new(memory: Arc<GuestMemory>, log: Option<QueueLog>, event_idx: bool, indirect: bool) -> Self {
        Common {
            translator: Translator::new(memory),
            log,
            event_idx,
            indirect,
            must_interrupt: false,
            tag: NEXT_TAG.fetch_add(1, Ordering::Relaxed),
            in_flight: 0,
            retired: Vec::new(),
        }
    }

    pub fn memory(&self) -> &GuestMemory {
        self.translator.memory()
    }

    pub fn in_flight(&self) -> u16 {
        self.in_flight + self.retired.iter().map(|&(_, _, count)| count).sum::<u16>()
    }

    /// Checks that another chain may be popped from a ring of `size` entries while `unpublished`
    /// returned chains are not visible to the driver yet. Chains of retired memory are counted only
    /// if any exist.
    #[inline]
    pub fn check_room(&self, size: u16, unpublished: u16) -> Result<(), RingError> {
        let limit = size - unpublished;
        if self.in_flight < limit && (self.retired.is_empty() || self.in_flight() < limit) {
            return Ok(());
        }
        Err(RingError::TooManyInFlight { size })
    }

    /// Marks the chain as in flight.
    #[inline]
    pub fn hand_out(&mut self, chain: &mut Chain) {
        chain.tag = self.tag;
        self.in_flight += 1;
    }

    /// Marks the chain as returned and logs the memory that the device may have written.
    #[inline]
    pub fn take_back(&mut self, chain: &mut Chain) {
        if self.log.is_some() {
            self.log_writable(chain);
        }
        match chain.tag == self.tag {
            true => self.in_flight -= 1,
            false => self.take_back_retired(chain),
        }
        chain.tag = 0;
        chain.clear(); // its memory belongs to the driver from here on
    }

    #[cold]
    fn take_back_retired(&mut self, chain: &Chain) {
        let position = self.retired.iter().position(|&(tag, ..)| tag == chain.tag);
        let position = position.expect("a chain goes back to the queue it was popped from, once");
        self.retired[position].2 -= 1;
        if self.retired[position].2 == 0 {
            self.retired.swap_remove(position);
        }
    }

    #[cold]
    fn log_writable(&self, chain: &Chain) {
        let Some(QueueLog { log, .. }) = &self.log else { return };
        let retired = self.retired.iter().find(|&&(tag, ..)| tag == chain.tag);
        let memory = retired.map_or(self.memory(), |(_, memory, _)| memory);
        for segment in chain.writable() {
            if let Some(addr) = memory.guest_addr_of(segment.base) {
                log.mark(addr, segment.len as u64);
            }
        }
    }

    /// Logs a write of `len` bytes at `offset` in the used ring of a split queue.
    #[inline]
    pub fn log_used(&self, offset: usize, len: usize) {
        if let Some(QueueLog { log, used_addr: Some(addr) }) = &self.log {
            log.mark(addr.wrapping_add(offset as u64), len as u64);
        }
    }

    /// Logs a write to a packed ring.
    #[inline]
    pub fn log_ring(&self, at: *const u8, len: usize) {
        if let Some(QueueLog { log, used_addr: Some(_) }) = &self.log
            && let Some(addr) = self.memory().guest_addr_of(at)
        {
            log.mark(addr, len as u64);
        }
    }

    /// Pops later chains from `memory`.
    pub fn set_memory(&mut self, memory: Arc<GuestMemory>) {
        let old = std::mem::replace(&mut self.translator, Translator::new(memory));
        if self.in_flight > 0 {
            self.retired.push((self.tag, old.memory().clone(), self.in_flight));
        }
        self.in_flight = 0;
        self.tag = NEXT_TAG.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Common {
    fn drop(&mut self) {
        if self.in_flight > 0 {
            std::mem::forget(self.translator.memory().clone());
        }
        self.retired.drain(..).for_each(std::mem::forget);
    }
}

/// The address of one of a ring's areas in this process.
pub(super) fn area(
    memory: &GuestMemory,
    area: &'static str,
    addr: u64,
    len: usize,
    alignment: usize,
) -> Result<*mut u8, RingError> {
    let host = memory.translate_user(addr, len as u64).filter(|host| host.addr().is_multiple_of(alignment));
    host.ok_or(RingError::BadArea { area, addr })
}
