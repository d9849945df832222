//! The io_uring of one queue of an export, on the core that serves it. The leaves of the export's
//! device can use it, too.
//!
//! ```text
//!   export ─ push ─► ring ◄─ run ─ leaf        one io_uring_enter for the entries of both
//!   export ◄ reap ─── │ ──── reap ─► leaf
//!                 table of buffers: the kernel's own, which the export's commands register
//! ```
//!
//! A buffer of a table is valid in its ring only. So an operation on such a buffer goes to the ring
//! that [`block::RegisteredBuffer`] names, whatever rings its device has itself. A ring belongs to
//! one queue because closing it is the only way to take the commands of a ublk disk back.
//!
//! Its completions wait for the core to enter the kernel (deferred task work), so a request never
//! interrupts the core. A flag in shared memory shows that some are waiting. Polling such a ring's
//! own descriptor does not wake the core. So the core watches an eventfd instead, which the kernel
//! signals only while the ring is armed.

use crate::slots::Slots;
use crate::source::SourceHandle;
use io_uring::{IoUring, cqueue, squeue};
use std::cell::{OnceCell, RefCell};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::rc::{Rc, Weak};
use std::sync::atomic::{Ordering, fence};

/// `IORING_ENTER_GETEVENTS`: also runs deferred task work.
const ENTER_GETEVENTS: u32 = 1;
/// The bit of `user_data` that tells an operation of a leaf from a command of the export.
const OPERATION: u64 = 1 << 63;
/// Completions reaped at once.
const REAP: usize = 32;

thread_local! {
    /// The rings of this core with a table of buffers, by number.
    static RINGS: RefCell<Vec<Weak<SharedRing>>> = RefCell::default();
}

/// A ring owned by the thread that created it.
pub struct SharedRing {
    ring: RefCell<Ring>,
    /// The operations of leaves.
    operations: Box<Slots<i32>>,
    /// The source that submits and reaps, which a leaf activates.
    source: OnceCell<Rc<SourceHandle>>,
}

struct Ring {
    uring: IoUring,
    /// Entries that wait for [`SharedRing::submit`].
    unsubmitted: u32,
}

impl SharedRing {
    /// Creates a ring for `commands` of the export and `operations` of its leaves at a time. It
    /// signals `event` while it is armed.
    ///
    /// # Errors
    /// When the kernel refuses the ring.
    pub fn new(commands: u32, operations: u32, event: &OwnedFd) -> io::Result<Rc<SharedRing>> {
        let uring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_submit_all()
            .dontfork()
            .build(commands + operations)?;
        uring.submitter().register_eventfd(event.as_raw_fd())?;
        let ring = SharedRing {
            ring: RefCell::new(Ring { uring, unsubmitted: 0 }),
            operations: Slots::new(operations),
            source: OnceCell::new(),
        };
        ring.disarm();
        Ok(Rc::new(ring))
    }

    /// Makes an empty table for `count` buffers, so that leaves can use the ring. `source` flushes
    /// and polls it. Returns the number of the ring.
    ///
    /// # Errors
    /// When the kernel refuses the table.
    ///
    /// # Panics
    /// At a second call.
    pub fn offer_buffers(self: &Rc<Self>, count: u16, source: Rc<SourceHandle>) -> io::Result<u32> {
        self.ring.borrow().uring.submitter().register_buffers_sparse(count.into())?;
        assert!(self.source.set(source).is_ok(), "a ring has one table");
        Ok(RINGS.with_borrow_mut(|rings| {
            let number = rings.iter().position(|ring| ring.strong_count() == 0).unwrap_or(rings.len());
            if number == rings.len() {
                rings.push(Weak::new());
            }
            rings[number] = Rc::downgrade(self);
            number as u32
        }))
    }

    /// The open ring with this number.
    ///
    /// # Panics
    /// If the calling core has none: a window onto a buffer has outlived its ring.
    pub fn of(number: u32) -> Rc<SharedRing> {
        let open = RINGS.with_borrow(|rings| rings.get(number as usize).and_then(Weak::upgrade));
        open.expect("a ring is open while its buffers are in use")
    }

    /// Executes an operation of a leaf, and returns the kernel's result. It waits while the ring
    /// has no room for it.
    ///
    /// # Safety
    /// All memory that the entry points at stays valid until the future has completed.
    pub async unsafe fn run(&self, entry: squeue::Entry) -> i32 {
        self.operations.permits.acquire(1).await;
        let slot = self.operations.take_permitted();
        // SAFETY: by contract.
        unsafe { self.push(&entry.user_data(OPERATION | u64::from(slot))) };
        self.source.get().expect("the ring has a table of buffers").activate();
        self.operations.result(slot).await
    }

    /// Registers `file` as fixed file 0.
    ///
    /// # Errors
    /// When the kernel refuses it.
    pub fn register(&self, file: RawFd) -> io::Result<()> {
        self.ring.borrow().uring.submitter().register_files(&[file])
    }

    /// Releases the file and the buffers immediately: closing the ring would release them some time
    /// later.
    pub fn unregister(&self) {
        let ring = self.ring.borrow();
        let _ = ring.uring.submitter().unregister_files(); // none is registered
        let _ = ring.uring.submitter().unregister_buffers(); // as above
    }

    /// Queues an entry for the next [`SharedRing::submit`]. The highest bit of its `user_data` is
    /// 0.
    ///
    /// # Safety
    /// All memory that the entry points at must stay valid until the kernel has completed it.
    ///
    /// # Panics
    /// If more commands are in flight than the ring was created for.
    #[inline]
    pub unsafe fn push(&self, entry: &squeue::Entry) {
        let ring = &mut *self.ring.borrow_mut();
        // SAFETY: by contract.
        let result = unsafe { ring.uring.submission().push(entry) };
        result.expect("the ring has room for all commands and operations");
        ring.unsubmitted += 1;
    }

    /// Whether an entry waits for [`SharedRing::submit`].
    #[inline]
    pub fn has_unsubmitted(&self) -> bool {
        self.ring.borrow().unsubmitted > 0
    }

    /// Submits queued entries and lets the kernel post deferred completions. Entries that cannot be
    /// submitted now stay for the next call.
    #[inline]
    pub fn submit(&self) {
        let ring = &mut *self.ring.borrow_mut();
        // SAFETY: no mask is passed; what the entries point at is valid by the contract of `push`.
        let result = unsafe {
            ring.uring.submitter().enter::<libc::sigset_t>(ring.unsubmitted, 0, ENTER_GETEVENTS, None)
        };
        match result {
            Ok(submitted) => ring.unsubmitted -= submitted as u32,
            Err(error) => check(&error),
        }
    }

    /// Reaps completions, after entering the kernel if some wait for that. Operations of leaves
    /// wake their tasks; `command` gets the `user_data` and the result of each command. Returns the
    /// number of both.
    #[inline]
    pub fn reap(&self, command: &mut dyn FnMut(u64, i32)) -> usize {
        if self.ring.borrow_mut().is_held_back() {
            self.submit();
        }
        let mut count = 0;
        loop {
            let mut room = [const { MaybeUninit::uninit() }; REAP];
            let completions: &[cqueue::Entry] = self.ring.borrow_mut().uring.completion().fill(&mut room);
            for completion in completions {
                match completion.user_data() {
                    data if data & OPERATION == 0 => command(data, completion.result()),
                    data => self.operations.complete(data as u32, completion.result()),
                }
            }
            count += completions.len();
            if completions.len() < REAP {
                return count;
            }
        }
    }

    /// Enables the event. Returns `false` when a completion may be waiting already.
    pub fn arm(&self) -> bool {
        let ring = &mut *self.ring.borrow_mut();
        ring.uring.completion().enable_eventfd();
        // The kernel adds work and then reads the flag; this side sets the flag and then looks for
        // work.
        fence(Ordering::SeqCst);
        !ring.is_held_back() && ring.uring.completion().is_empty()
    }

    /// Disables the event: the ring is polled.
    pub fn disarm(&self) {
        self.ring.borrow_mut().uring.completion().disable_eventfd();
    }
}

impl Ring {
    #[inline]
    fn is_held_back(&mut self) -> bool {
        self.unsubmitted > 0 || self.uring.submission().taskrun()
    }
}

/// Interrupted, or a temporary lack of resources: the next turn tries again.
#[cold]
fn check(error: &io::Error) {
    let is_passing =
        matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::ENOMEM));
    // The ring is ours and every entry well-formed, so no request can cause any other error.
    assert!(is_passing, "io_uring_enter: {error}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Source, current};
    use io_uring::opcode;
    use io_uring::types::Fd;
    use std::cell::Cell;
    use std::os::fd::FromRawFd;

    /// An export's queue, as far as a ring needs one.
    struct Queue {
        event: OwnedFd,
        ring: OnceCell<Rc<SharedRing>>,
        commands: Cell<u64>,
    }

    impl Queue {
        fn ring(&self) -> &Rc<SharedRing> {
            self.ring.get().unwrap()
        }
    }

    impl Source for Queue {
        fn flush(&self) {
            if self.ring().has_unsubmitted() {
                self.ring().submit();
            }
        }
        fn poll(&self) -> usize {
            self.ring().reap(&mut |data, result| {
                assert_eq!(result, 0);
                self.commands.set(self.commands.get() + data);
            })
        }
        fn event_fd(&self) -> Option<RawFd> {
            Some(self.event.as_raw_fd())
        }
        fn arm(&self) -> bool {
            self.ring().arm()
        }
        fn disarm(&self) {
            self.ring.get().inspect(|ring| ring.disarm());
        }
    }

    fn queue(operations: u32) -> Rc<Queue> {
        // SAFETY: no pointer is passed, and the descriptor is new.
        let event = unsafe { OwnedFd::from_raw_fd(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)) };
        let queue = Rc::new(Queue { event, ring: OnceCell::new(), commands: Cell::new(0) });
        let ring = SharedRing::new(4, operations, &queue.event).unwrap();
        assert!(queue.ring.set(ring).is_ok());
        queue
    }

    #[test]
    fn operations_of_leaves_wait_for_room_and_their_results_are_told_from_commands() {
        crate::run(async {
            let queue = queue(2);
            let source: Rc<dyn Source> = queue.clone();
            let handle = Rc::new(current().register(&source));
            let number = queue.ring().offer_buffers(4, handle.clone()).unwrap();
            // SAFETY: the entry points at no memory.
            unsafe { queue.ring().push(&opcode::Nop::new().build().user_data(7)) };
            let done = Rc::new(Cell::new(0));
            for _ in 0..10 {
                let (ring, done) = (SharedRing::of(number), done.clone());
                current().spawn(async move {
                    let entry = opcode::Fsync::new(Fd(-1)).build();
                    // SAFETY: as above.
                    assert_eq!(unsafe { ring.run(entry) }.await, -libc::EBADF);
                    done.set(done.get() + 1);
                });
            }
            while done.get() < 10 || queue.commands.get() < 7 {
                crate::yield_now().await;
            }
            assert_eq!((queue.commands.get(), queue.ring().operations.in_flight()), (7, 0));
        });
    }

    #[test]
    fn a_ring_that_is_closed_gives_its_number_to_the_next_one() {
        crate::run(async {
            let offer = |queue: &Rc<Queue>| {
                let source: Rc<dyn Source> = queue.clone();
                queue.ring().offer_buffers(4, Rc::new(current().register(&source))).unwrap()
            };
            let (first, second) = (queue(1), queue(1));
            assert_eq!((offer(&first), offer(&second)), (0, 1));
            drop(first);
            assert_eq!(offer(&queue(1)), 0);
            assert!(Rc::ptr_eq(&SharedRing::of(1), second.ring()));
        });
    }
}
