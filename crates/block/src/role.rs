//! The role of this host for a device that several hosts reach and one of them uses.

use std::fmt;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// The role of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostRole {
    /// Another host uses the device, or the storage does not answer. Requests are refused.
    Standby,
    /// This host uses the device.
    Active,
    /// Another host has shut this one out. Only opening the device again changes that.
    Fenced,
}

impl HostRole {
    const ALL: [HostRole; 3] = [HostRole::Standby, HostRole::Active, HostRole::Fenced];

    /// The name in messages.
    pub fn name(self) -> &'static str {
        match self {
            HostRole::Standby => "standby",
            HostRole::Active => "active",
            HostRole::Fenced => "fenced",
        }
    }
}

/// The role as the driver sets it and exports read it.
pub struct SharedRole {
    role: AtomicU8,
    changes: AtomicU64,
    listener: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl SharedRole {
    /// Shares `role`, which is the first one.
    pub fn new(role: HostRole) -> Arc<SharedRole> {
        let (changes, listener) = (AtomicU64::new(0), OnceLock::new());
        Arc::new(SharedRole { role: AtomicU8::new(role as u8), changes, listener })
    }

    /// The present role.
    #[inline]
    pub fn get(&self) -> HostRole {
        HostRole::ALL[usize::from(self.role.load(Ordering::Acquire))]
    }

    /// Whether this host uses the device.
    #[inline]
    pub fn is_active(&self) -> bool {
        self.get() == HostRole::Active
    }

    /// How often the role has changed.
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::Relaxed)
    }

    /// Sets the role, and calls the listener if it changed. A fenced host remains fenced.
    pub fn set(&self, role: HostRole) {
        let change = |now: u8| (now != role as u8 && now != HostRole::Fenced as u8).then_some(role as u8);
        if self.role.fetch_update(Ordering::AcqRel, Ordering::Acquire, change).is_ok() {
            self.changes.fetch_add(1, Ordering::Relaxed);
            if let Some(listener) = self.listener.get() {
                listener();
            }
        }
    }

    /// Calls `listener` after every change from now on. It may be called on any thread, also a
    /// core's, and does not wait. A second listener is ignored.
    pub fn on_change(&self, listener: impl Fn() + Send + Sync + 'static) {
        let _ = self.listener.set(Box::new(listener));
    }
}

impl fmt::Debug for SharedRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.get().name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_learns_of_changes_and_a_fenced_host_remains_fenced() {
        let role = SharedRole::new(HostRole::Standby);
        let calls = Arc::new(AtomicU64::new(0));
        let counted = calls.clone();
        role.set(HostRole::Active);
        role.on_change(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        let steps =
            [(HostRole::Active, 0), (HostRole::Standby, 1), (HostRole::Standby, 1), (HostRole::Fenced, 2)];
        for (next, count) in steps {
            role.set(next);
            assert_eq!((role.get(), calls.load(Ordering::Relaxed)), (next, count));
        }
        role.set(HostRole::Active);
        assert_eq!((role.get().name(), role.is_active(), role.changes()), ("fenced", false, 3));
    }
}
