//! The doorbell that ends a core's sleep: an eventfd, or a stand-in for it in models of loom.

#[cfg(not(loom))]
pub(crate) use self::eventfd::Doorbell;
#[cfg(loom)]
pub(crate) use self::modelled::Doorbell;

#[cfg(not(loom))]
mod eventfd {
    use std::io;
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

    /// An eventfd that a sleeping thread watches.
    pub(crate) struct Doorbell(OwnedFd);

    impl Doorbell {
        /// A doorbell with its own eventfd, which does not block.
        pub(crate) fn open() -> io::Result<Doorbell> {
            // SAFETY: no pointer is passed.
            let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            // SAFETY: a new descriptor without another owner.
            Ok(Doorbell(unsafe { OwnedFd::from_raw_fd(fd) }))
        }

        pub(crate) fn new(event: OwnedFd) -> Doorbell {
            Doorbell(event)
        }

        pub(crate) fn fd(&self) -> RawFd {
            self.0.as_raw_fd()
        }

        /// Makes the event readable. The write fails only if the counter is full, and then the
        /// event is readable already.
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
    use std::io;
    use std::os::fd::{OwnedFd, RawFd};
    use std::sync::Arc;

    /// Remembers a ring until a thread waits, as an eventfd does, and orders nothing beyond that.
    #[derive(Clone)]
    pub(crate) struct Doorbell(Arc<Notify>);

    impl Doorbell {
        pub(crate) fn open() -> io::Result<Doorbell> {
            Ok(Doorbell(Arc::new(Notify::new())))
        }

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
