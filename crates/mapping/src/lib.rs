//! Tables that say where each part of a disk lies: read by every core at every request, and changed
//! rarely.
//!
//! ```text
//!   core 0                       core 1 (owner of leaf 7)          core 2
//!   directory: leaf 7 ─┐         directory: leaf 7 ─┐              directory: leaf 7 ─┐
//!   View::entry ──────►└────────► 512 atomic entries ◄─────────────┘
//!        │ the entry must change
//!        └─ View::lock ─ message ─► loads, locks, sets, saves, evicts
//! ```
//!
//! A table has entries of 64 bits, whose meaning is that of its format ([`Format`]). 512 of them
//! are a [`Leaf`]. Each leaf has one owner, a core, which alone changes its entries. The owners are
//! fixed when the table is opened. Any core can have a [`View`] with a directory of the leaves that
//! it has used. So it reads an entry without a lock and without a message. Rules:
//!
//! * A request runs between [`View::begin`] or [`View::begin_change`] and the drop of the
//!   [`Running`] that these return.
//! * An entry changes under the lock of its slot ([`View::lock`]), or while no task has that lock,
//!   in one go at the owner ([`View::unlocked`]). Data that a change copies is read after the lock
//!   was taken. The new entry is set after the new data was written.
//! * Whatever an entry pointed to is used for something else only after three steps. The entry has
//!   changed; the change is saved ([`View::flush`]) and durable; a grace period has passed
//!   ([`View::grace`]).
//! * A hold ([`View::hold`]) keeps changes from beginning, on all cores. A grace period after it
//!   waits for those that had begun. An entry whose data requests change in place becomes shared
//!   only then.
//! * A task that has locked a slot does not wait for a grace period: requests that have begun may
//!   wait for that lock.
//!
//! The table keeps a number of leaves in memory. An owner evicts a leaf that no core has read for
//! some time: it saves the leaf, and every core forgets it. Then it may be loaded again.

#![forbid(unsafe_code)]

mod directory;
mod leaf;
pub mod mutant;
mod owner;
mod view;

pub use leaf::{ENTRIES, Leaf};
pub use reactor::fence::Running;
pub use view::{Config, Format, Held, MAX_ENTRIES, Slot, Table, Unlocked, View};
