//! The suite that every device must pass, driver or layer.
//!
//! ```text
//!   Suite::new(device).on_grow(…).run()
//!     refusals      what a device must refuse, and how
//!     operations    what each operation does to the data
//!     concurrency   many requests, one queue; two cores, one device
//!     model         random operations against a copy in memory
//!     growth        a device that grew
//! ```
//!
//! A check that fails panics with the name of the device and of the check, what came and what
//! should have.
//! The suite overwrites the device.
//!
//! [`slow`] is a device for tests of what stands above a device: a test decides when and how its
//! requests end.

#![forbid(unsafe_code)]

mod buffers;
mod client;
mod concurrency;
mod growth;
mod model;
mod operations;
mod refusals;
pub mod slow;

pub use buffers::{BufferSource, Layout, PoolBuffers, RequestBuffer, Transfer};

use block::Device;
use client::Client;
use reactor::{CoreConfig, CoreRef, Cores};
use std::any::Any;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::task::Poll;
use std::time::Duration;

/// How long one check may take before it counts as hung.
const DEADLINE: Duration = Duration::from_secs(120);
/// Least capacity that the suite needs of a device that can be written.
pub const MIN_CAPACITY: u64 = 16 << 20;

/// A device under test.
pub struct Suite {
    subject: Subject,
    grow: Option<Box<dyn FnMut() + Send>>,
}

/// The device under test and its properties, shared by all checks.
#[derive(Clone)]
pub(crate) struct Subject {
    device: Arc<dyn Device>,
    buffers: Arc<dyn BufferSource>,
    keeps_data: bool,
    refuses: bool,
    seed: u64,
}

impl Suite {
    /// The suite over `device`.
    pub fn new(device: Arc<dyn Device>) -> Suite {
        let buffers = Arc::new(PoolBuffers);
        let subject = Subject { device, buffers, keeps_data: true, refuses: true, seed: 1 };
        Suite { subject, grow: None }
    }

    /// The device forgets what is written: only check what can be checked without reading it back.
    #[must_use]
    pub fn without_data(mut self) -> Suite {
        self.subject.keeps_data = false;
        self
    }

    /// The device panics at what others refuse (the checker layer): leave that out.
    #[must_use]
    pub fn without_refusals(mut self) -> Suite {
        self.subject.refuses = false;
        self
    }

    /// Takes memory for requests from `buffers`, e.g. because it must be registered with the
    /// device.
    #[must_use]
    pub fn buffers(mut self, buffers: Arc<dyn BufferSource>) -> Suite {
        self.subject.buffers = buffers;
        self
    }

    /// `grow` makes the backing store larger by at least one block; the suite then refreshes the
    /// device.
    #[must_use]
    pub fn on_grow(mut self, grow: impl FnMut() + Send + 'static) -> Suite {
        self.grow = Some(Box::new(grow));
        self
    }

    /// Seed of the random checks; the same seed makes the same requests.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Suite {
        self.subject.seed = seed;
        self
    }

    /// Runs every check that fits the device.
    ///
    /// # Panics
    /// When a check fails or hangs, or the device is too small to be tested.
    pub fn run(self) {
        let Suite { subject, grow } = self;
        let limits = subject.device.limits();
        check_limits(&limits);
        let cores = Cores::start(&[CoreConfig::default(), CoreConfig::default()]).expect("cores start");
        let (first, second) = (cores.get(0), cores.get(1));
        if subject.refuses {
            refusals::run(&first, &subject);
        }
        if limits.read_only {
            return refusals::run_read_only(&first, &subject);
        }
        let least = MIN_CAPACITY;
        assert!(limits.capacity >= least, "{}: the suite needs {least} bytes", subject.device.name());
        operations::run(&first, &subject);
        concurrency::run(&first, &second, &subject);
        model::run(&first, &subject);
        if let Some(grow) = grow {
            growth::run(&first, &subject, grow);
        }
    }
}

fn check_limits(limits: &block::Limits) {
    let block_size = u64::from(limits.block_size);
    assert!(limits.block_size.is_power_of_two() && block_size >= 512, "block size {block_size}");
    assert!(
        limits.capacity > 0 && limits.capacity.is_multiple_of(block_size),
        "capacity {}",
        limits.capacity
    );
    assert!(limits.memory_alignment.is_power_of_two(), "memory alignment {}", limits.memory_alignment);
    assert!(limits.physical_block_size >= limits.block_size, "physical block {}", limits.physical_block_size);
    assert!(limits.max_transfer >= limits.block_size, "max transfer {}", limits.max_transfer);
    assert!(limits.max_transfer.is_multiple_of(limits.block_size), "max transfer {}", limits.max_transfer);
    assert!(limits.max_segments > 0, "no segments");
}

/// Runs one check as a task of `core` and waits for its end.
pub(crate) fn check<F, R>(
    core: &CoreRef,
    subject: &Subject,
    name: &'static str,
    body: impl FnOnce(Client) -> F + Send + 'static,
) -> R
where
    F: Future<Output = R> + 'static,
    R: Send + 'static,
{
    let (sender, receiver) = mpsc::sync_channel(1);
    let subject = subject.clone();
    let device = subject.device.name().to_owned();
    let start = move |core: &reactor::Core| {
        let future = caught(async move { body(Client::new(&subject)).await });
        core.spawn(async move { drop(sender.send(future.await)) });
    };
    core.run(start).unwrap_or_else(|_| panic!("{device}: {name}: the core has ended"));
    match receiver.recv_timeout(DEADLINE) {
        Ok(Ok(result)) => result,
        Ok(Err(failure)) => panic!("{device}: {name}: {}", text_of(&*failure)),
        Err(_) => panic!("{device}: {name}: hung for {DEADLINE:?}"),
    }
}

/// Returns the panic of a check as a value, so that the core continues and other tasks can finish
/// their requests.
pub(crate) fn caught<F: Future>(future: F) -> impl Future<Output = std::thread::Result<F::Output>> {
    let mut future = Box::pin(future);
    std::future::poll_fn(move |cx| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
        Ok(Poll::Ready(result)) => Poll::Ready(Ok(result)),
        Ok(Poll::Pending) => Poll::Pending,
        Err(failure) => Poll::Ready(Err(failure)),
    })
}

fn text_of(failure: &(dyn Any + Send)) -> &str {
    let text = failure.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| failure.downcast_ref::<&str>().copied()).unwrap_or("failed, see above")
}
