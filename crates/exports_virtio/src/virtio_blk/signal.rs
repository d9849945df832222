//! Signals from a core to the other side of a ring. None of them blocks.

use reactor::PeerEvent;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// Interrupts a driver.
pub(crate) trait Interrupt {
    /// Signals used entries to the driver. Does not block.
    fn raise(&mut self);
}

/// An interrupt as the control side hands it to a core.
pub(crate) enum Call {
    /// An eventfd of the VMM, whose counter and flags it shares.
    Event(Arc<OwnedFd>),
    /// A system call.
    Kernel(Box<dyn Interrupt + Send>),
}

impl Call {
    /// Opens the interrupt on the calling core.
    ///
    /// # Errors
    /// When the kernel refuses to set up an eventfd ([`PeerEvent::new`]).
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

/// The event signalled when a ring stops.
pub(crate) enum ErrorEvent {
    /// A non-blocking eventfd that no other process shares.
    Own(Arc<OwnedFd>),
    /// An eventfd of the VMM.
    Peer(Arc<OwnedFd>),
    /// The connection that the ring belongs to, which ends with it.
    Connection(Arc<UnixStream>),
}

impl ErrorEvent {
    /// Signals the event. Does not block.
    ///
    /// # Errors
    /// When the kernel refuses to set up a peer's eventfd.
    pub(crate) fn signal(&self) -> io::Result<()> {
        match self {
            ErrorEvent::Own(event) => {
                let one = 1u64;
                // SAFETY: writes 8 bytes of a live variable. It fails only when the counter is
                // full: then the event is readable already.
                unsafe { libc::write(event.as_raw_fd(), (&raw const one).cast(), size_of::<u64>()) };
            }
            ErrorEvent::Peer(event) => PeerEvent::new(event.as_fd())?.signal(),
            ErrorEvent::Connection(connection) => connection.shutdown(Shutdown::Both)?,
        }
        Ok(())
    }
}
