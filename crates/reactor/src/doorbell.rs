//! What ends a sleep: an eventfd, or in a model of loom what stands for one.

#[cfg(not(loom))]
pub(crate) use self::eventfd::Doorbell;
#[cfg(loom)]
pub(crate) use self::modelled::Doorbell;

#[cfg(not(loom))]
mod eventfd {
    use std::os::fd::{AsRawFd, OwnedFd, RawFd};

    /// An eventfd that a sleeping thread watches.
    pub(crate) struct Doorbell(OwnedFd);

    impl Doorbell {
        pub(crate) fn new(event: OwnedFd) -> Doorbell {
            Doorbell(event)
        }

        pub(crate) fn fd(&self) -> RawFd {
            self.0.as_raw_fd()
        }

        /// Makes the event readable. That fails only when its counter is full, and then it is.
        pub(crate) fn ring(&self) {
            let one = 1u64;
            // SAFETY: writes 8 bytes from a live variable.
            unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
        }
    }
}

#[cfg(loom)]
mod modelled {
    use loom::sync::Notify;
    use std::os::fd::{OwnedFd, RawFd};
    use std::sync::Arc;

    /// Remembers that it was rung until somebody waits, as an eventfd does; orders nothing beyond
    /// that.
    #[derive(Clone)]
    pub(crate) struct Doorbell(Arc<Notify>);

    impl Doorbell {
        pub(crate) fn new(_: OwnedFd) -> Doorbell {
            Doorbell(Arc::new(Notify::new()))
        }

        pub(crate) fn fd(&self) -> RawFd {
            unreachable!("a model has no descriptors")
        }

        #[cfg(test)]
        pub(crate) fn of_model() -> Doorbell {
            Doorbell(Arc::new(Notify::new()))
        }

        pub(crate) fn ring(&self) {
            self.0.notify();
        }

        #[cfg(test)]
        pub(crate) fn wait(&self) {
            self.0.wait();
        }
    }
}
