//! How a core tells the other side of a ring something. None of it waits for the other side.

use reactor::PeerEvent;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

/// Interrupts a driver.
pub(crate) trait Interrupt {
    /// Tells the driver that something was used. Does not block.
    fn raise(&mut self);
}

/// How a driver wants to be interrupted, as the control side hands it to a core.
pub(crate) enum Call {
    /// By an eventfd of its VMM's, which shares counter and flags with us.
    Event(Arc<OwnedFd>),
    /// By a call of the kernel.
    Kernel(Box<dyn Interrupt + Send>),
}

impl Call {
    /// Prepares to interrupt the driver from the calling core.
    ///
    /// # Errors
    /// When the kernel refuses what an eventfd needs ([`PeerEvent::new`]).
    pub(crate) fn open(self) -> io::Result<Box<dyn Interrupt>> {
        Ok(match self {
            Call::Event(event) => Box::new(PeerEvent::new(event.as_fd())?),
            Call::Kernel(interrupt) => interrupt,
        })
    }
}

impl Interrupt for PeerEvent {
    fn raise(&mut self) {
        self.signal();
    }
}

/// What is signalled when a ring is served no more.
pub(crate) enum ErrorEvent {
    /// A non-blocking eventfd that this process shares with no other.
    Own(Arc<OwnedFd>),
    /// An eventfd of the VMM's.
    Peer(Arc<OwnedFd>),
}

impl ErrorEvent {
    /// Signals it. Does not block.
    ///
    /// # Errors
    /// When the kernel refuses what a peer's eventfd needs.
    pub(crate) fn signal(&self) -> io::Result<()> {
        match self {
            ErrorEvent::Own(event) => {
                let one = 1u64;
                // SAFETY: writes 8 bytes of a live variable. It fails only when the counter is full: then the
                // event is readable already.
                unsafe { libc::write(event.as_raw_fd(), (&raw const one).cast(), size_of::<u64>()) };
            }
            ErrorEvent::Peer(event) => PeerEvent::new(event.as_fd())?.signal(),
        }
        Ok(())
    }
}
