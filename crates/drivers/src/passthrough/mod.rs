//! The part that drivers of pass-through commands share: commands go through io_uring
//! (`IORING_OP_URING_CMD`) from a character device directly to its driver, bypassing the kernel's
//! block layer.
//!
//! ```text
//!   NvmeQueue, VirtioBlkUringQueue = CommandQueue<C: Commands>
//!     node      opens the character device, and names a file that is none
//!     queue     slots and ring, full rings, refused commands, events
//!     transfer  the range and the memory of a request, cut into commands
//!     commands  the driver's side: which commands a request needs, as submission entries
//! ```

mod commands;
pub(crate) mod node;
mod queue;
pub(crate) mod transfer;

pub use commands::{Commands, Next, Target};
pub use queue::{CommandQueue, MAX_ENTRIES};
