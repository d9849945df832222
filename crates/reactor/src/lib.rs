//! The executor of one core, and the threads that each run one.
//!
//! ```text
//!   turn:  messages and foreign wakes ─► ready tasks ─► every active source: flush, poll ─► timers
//!   idle:  a source without work for its polling window is armed and leaves the active list;
//!          with no active source and no ready task the core sleeps in io_uring_enter
//! ```
//!
//! A [`Source`] brings work: a leaf's queue, an export's virtqueue. The core polls an *active*
//! source every turn, without system calls for notification. It watches the event fd of an *armed*
//! source. So a busy core polls its busy sources, an idle core sleeps, and a thousand idle exports
//! cost a busy core nothing. How long a core polls a source without work adapts to its arrival rate
//! ([`PollWindow`]).
//!
//! Clock, randomness and the way to sleep are injected ([`Clock`], [`Park`]), so the simulator runs
//! the same code under virtual time. Only its own thread uses a core; other threads send it
//! messages ([`CoreRef`]) or wake its tasks.
//!
//! A core, and the channel of a device in memory:
//!
//! ```
//! use block::{Flags, IoResult, Limits, Op, Queue, Request, SharedLimits};
//! use reactor::QueueChannel;
//!
//! struct Ram(Vec<u8>, Vec<u32>);
//!
//! impl Queue for Ram {
//!     unsafe fn push(&mut self, slot: u32, req: &Request<'_>, offset: u64) -> IoResult {
//!         match req.op {
//!             Op::Read => req.data.copy_from(&self.0[offset as usize..]),
//!             _ => req.data.copy_to(&mut self.0[offset as usize..]),
//!         };
//!         Ok(self.1.push(slot))
//!     }
//!     fn reap(&mut self, done: &mut dyn FnMut(u32, IoResult)) -> usize {
//!         self.1.drain(..).map(|slot| done(slot, Ok(()))).count()
//!     }
//!     // A depth of 8, and nothing to do for `kick`, `event_fd`, `arm` and `disarm`.
//! #   fn depth(&self) -> u32 { 8 }
//! #   fn kick(&mut self) {}
//! #   fn event_fd(&self) -> Option<std::os::fd::RawFd> { None }
//! #   fn arm(&mut self) -> bool { false }
//! #   fn disarm(&mut self) {}
//! }
//!
//! reactor::run(async {
//!     let limits = SharedLimits::new(Limits::new(1 << 20));
//!     let channel = QueueChannel::open(Ram(vec![0; 1 << 20], Vec::new()), limits);
//!     let mut buffer = reactor::current().buffers().take(4096).await;
//!     buffer.as_mut_slice().fill(7);
//!     let (mut buffer, written) = buffer.transfer(&*channel, Op::Write, Flags::NONE, 8192).await;
//!     buffer.as_mut_slice().fill(0);
//!     let (buffer, read) = buffer.transfer(&*channel, Op::Read, Flags::NONE, 8192).await;
//!     assert_eq!((written, read, buffer.as_slice()), (Ok(()), Ok(()), &[7; 4096][..]));
//! });
//! ```

mod arena;
pub mod bridge;
mod buffer;
mod call;
mod clock;
mod completion_ring;
mod core;
mod cores;
mod doorbell;
pub mod fence;
mod park;
mod peer_event;
mod permits;
mod queue_channel;
mod remote;
mod ring;
mod route;
mod serving_slots;
mod shared_ring;
mod simulated;
mod slots;
mod source;
pub mod sync;
mod task;
mod threads;
mod timer;

pub use arena::{has_buffers, hold_buffers};
pub use buffer::{Buffer, BufferPool, MAX_BUFFER, shared_memory_for};
pub use call::{Call, CallRequest, Reply};
pub use clock::{Clock, MonotonicClock, VirtualClock};
pub use completion_ring::CompletionRing;
pub use core::{Core, CoreConfig, Stopwatch, current, run, run_simulated};
pub use cores::{Cores, bind_thread, unbind_thread};
pub use park::{Park, UringPark, VirtualPark};
pub use peer_event::PeerEvent;
pub use permits::{Acquire, Permits};
pub use queue_channel::QueueChannel;
pub use remote::{CoreRef, CoreStopped, NotSent};
pub use serving_slots::ServingSlots;
pub use shared_ring::SharedRing;
pub use simulated::{Simulation, run_simulated_cores};
pub use slots::die;
pub use source::{PollWindow, Source, SourceHandle};
pub use threads::spawn_thread;
pub use timer::Sleep;

use std::future::Future;
use std::task::Poll;

/// Lets other tasks and sources run before the caller continues.
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
