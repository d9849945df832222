//! The executor of one core, and the threads that run one each.
//!
//! ```text
//!   turn:  messages and foreign wakes ─► ready tasks ─► every active source: flush, poll ─► timers
//!   idle:  a source without work for its polling window is armed and leaves the active list;
//!          with no active source and no ready task the core sleeps in io_uring_enter
//! ```
//!
//! A [`Source`] is anything that brings work: a leaf's queue, an export's virtqueue. While it is
//! *active* it is polled every turn and makes no system call for notification; while it is *armed*
//! the core watches its event fd. So a busy core polls what is busy, an idle one sleeps, and a
//! thousand idle exports cost a busy core nothing. How long a source is polled without work adapts
//! to its arrival rate ([`PollWindow`]).
//!
//! Clock, randomness and the way to sleep are injected ([`Clock`], [`Park`]): the simulator runs
//! this very code under virtual time. A core is used by its own thread alone; other threads send it
//! messages ([`CoreRef`]) or wake its tasks.

mod arena;
pub mod bridge;
mod buffer;
mod clock;
mod core;
mod cores;
mod doorbell;
mod park;
mod peer_event;
mod permits;
mod queue_channel;
mod remote;
mod rng;
mod serving_slots;
mod simulated;
mod source;
pub mod sync;
mod task;
mod threads;
mod timer;

pub use arena::{hold_buffers, shared_memory_for};
pub use buffer::{Buffer, BufferPool, MAX_BUFFER};
pub use clock::{Clock, MonotonicClock, VirtualClock};
pub use core::{Core, CoreConfig, Stopwatch, current, run, run_simulated};
pub use cores::{Cores, bind_thread};
pub use park::{Park, UringPark, VirtualPark};
pub use peer_event::PeerEvent;
pub use permits::{Acquire, Permits};
pub use queue_channel::QueueChannel;
pub use remote::{CoreRef, CoreStopped, NotSent};
pub use serving_slots::ServingSlots;
pub use simulated::{Simulation, run_simulated_cores};
pub use source::{PollWindow, Source, SourceHandle};
pub use threads::spawn_thread;
pub use timer::Sleep;

use std::future::Future;
use std::task::Poll;

/// Lets other tasks and sources run before the caller goes on.
pub fn yield_now() -> impl Future<Output = ()> {
    let mut has_yielded = false;
    std::future::poll_fn(move |cx| {
        if std::mem::replace(&mut has_yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
}
