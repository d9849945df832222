//! The register of a virtqueue that notifies the function.

use super::bar::Window;

/// The register that notifies a function of available requests in a virtqueue.
#[derive(Debug)]
pub struct DoorbellRegister {
    window: Window,
    at: u64,
    index: u16,
}

impl DoorbellRegister {
    pub(super) fn new(
        window: &Window,
        number: u16,
        step: u32,
        index: u16,
    ) -> Result<DoorbellRegister, String> {
        let at = u64::from(number) * u64::from(step);
        if at + 2 > window.len() || !at.is_multiple_of(2) {
            return Err(format!("doorbell {number} at {at:#x} does not fit {:#x} bytes", window.len()));
        }
        Ok(DoorbellRegister { window: window.clone(), at, index })
    }

    /// Notifies the function. Earlier writes are visible to it first.
    #[inline]
    pub fn ring(&self) {
        virtio::ring::barrier::write();
        if self.window.write_u16(self.at, self.index).is_err() {
            tracing::debug!(queue = self.index, "doorbell write of a PCI function failed");
        }
    }
}
