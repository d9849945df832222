//! The virtqueues of a session, as every server of it gets them.

use super::super::doorbell::Doorbell;
use super::super::parts::{QueueMailbox, Renewed};
use super::super::peer::as_fd;
use super::super::transport::NewQueue;
use reactor::PeerEvent;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use virtio::driver::{BlkQueue, BlkQueueConfig, RingLayout, SharedArea};
use virtio::ring::SplitRing;
use vmm_sys_util::eventfd::EventFd;

/// Both positions of a packed ring at the start: slot 0, wrap counter 1. A server that takes over
/// requests in flight reads its position from their memory.
const PACKED_START: u32 = 0x8000_8000;

/// A virtqueue in use.
pub struct RingSetup {
    /// Index of the virtqueue.
    pub index: u16,
    /// Layout and size.
    pub config: BlkQueueConfig,
    /// Signals requests.
    pub kick: EventFd,
    /// Signals completions. Its watchers know only this event, so every server gets it.
    pub call: EventFd,
    mailbox: Arc<QueueMailbox>,
    /// Memory of the rings that the present or next server serves.
    area: SharedArea,
    /// Memory for other rings.
    spare: SharedArea,
}

// SAFETY: the memory of all rings outlives the transport (`Session`), and it may be used on any
// thread.
unsafe impl Send for RingSetup {}

/// Empty rings that a returned server gets.
pub struct EmptyRing {
    queue: BlkQueue,
    kick: EventFd,
}

impl RingSetup {
    /// A new virtqueue with its doorbell.
    ///
    /// # Errors
    /// When the kernel refuses an event.
    pub fn new(new: &NewQueue<'_>) -> io::Result<(RingSetup, Doorbell)> {
        let kick = EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)?;
        let doorbell = doorbell(&kick)?;
        let area = new.queue.memory();
        let setup = RingSetup {
            index: new.index,
            config: *new.queue.config(),
            kick,
            call: new.call.try_clone()?,
            mailbox: new.mailbox.clone(),
            area,
            spare: new.spare.unwrap_or(area),
        };
        Ok((setup, doorbell))
    }

    /// Addresses of descriptors, driver area and device area in this process.
    pub fn areas(&self) -> [*mut u8; 3] {
        let layout = RingLayout::new(self.config.ring.size, self.config.ring.packed);
        [layout.descriptors, layout.driver, layout.device].map(|at| self.area.base.wrapping_add(at))
    }

    /// Start position for a server of empty rings.
    pub fn first_base(&self) -> u32 {
        if self.config.ring.packed { PACKED_START } else { 0 }
    }

    /// Start position for a server that continues the rings of its predecessor: the first request
    /// that was not completed.
    pub fn next_base(&self) -> u32 {
        if self.config.ring.packed {
            return PACKED_START;
        }
        let [descriptors, driver, device] = self.areas();
        // SAFETY: the areas of this ring; the memory outlives this value.
        let ring = unsafe { SplitRing::new(self.config.ring.size, descriptors, driver, device) };
        ring.used_idx().load(Ordering::Acquire).into()
    }

    /// Makes empty rings in the spare memory.
    ///
    /// # Errors
    /// When the kernel refuses an event.
    pub fn prepare_empty(&mut self) -> io::Result<EmptyRing> {
        // Rings that the queue has not taken yet: it still uses those before them.
        if self.mailbox.events().renewed.take().is_some() {
            std::mem::swap(&mut self.area, &mut self.spare);
        }
        let kick = EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)?;
        // SAFETY: the part belongs to this virtqueue, whose queue uses the other part.
        let queue = unsafe { BlkQueue::new(self.config, self.spare) };
        Ok(EmptyRing { queue, kick })
    }

    /// The virtqueue as the returned server gets it with the empty rings.
    ///
    /// # Errors
    /// When the kernel refuses a descriptor.
    pub fn with_empty(&self, empty: &EmptyRing) -> io::Result<RingSetup> {
        Ok(RingSetup {
            index: self.index,
            config: self.config,
            kick: empty.kick.try_clone()?,
            call: self.call.try_clone()?,
            mailbox: self.mailbox.clone(),
            area: self.spare,
            spare: self.area,
        })
    }

    /// A doorbell for the virtqueue.
    ///
    /// # Errors
    /// When the kernel refuses it.
    pub fn doorbell(&self) -> io::Result<Doorbell> {
        doorbell(&self.kick)
    }

    /// Reports to the queue that its device has returned, with other rings or without.
    pub fn report_return(&self, renewed: Option<Renewed>) {
        self.mailbox.tell(|events| {
            events.is_back = true;
            if renewed.is_some() {
                events.renewed = renewed;
            }
        });
    }
}

impl EmptyRing {
    /// The rings for their queue.
    pub fn into_renewed(self, doorbell: Doorbell) -> Renewed {
        Renewed { queue: self.queue, doorbell }
    }
}

fn doorbell(kick: &EventFd) -> io::Result<Doorbell> {
    Ok(Doorbell::Shared(Box::new(PeerEvent::new(as_fd(kick))?)))
}
