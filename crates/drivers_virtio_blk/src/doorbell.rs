//! Notification of a device, by the means of its transport.

use super::vfio_pci::DoorbellRegister;
use reactor::PeerEvent;
use vmm_sys_util::eventfd::EventFd;

/// Notifies a device of available requests in a virtqueue.
pub enum Doorbell {
    /// An event that only the kernel reads.
    Event(EventFd),
    /// An event that another process shares.
    Shared(Box<PeerEvent>),
    /// A register of the device.
    Register(DoorbellRegister),
}

impl Doorbell {
    /// Notifies the device.
    #[inline]
    pub fn ring(&mut self) {
        match self {
            // Fails only when the counter is full; the device is then notified already.
            Doorbell::Event(event) => drop(event.write(1)),
            Doorbell::Shared(event) => event.signal(),
            Doorbell::Register(register) => register.ring(),
        }
    }
}
