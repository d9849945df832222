//! What a person does to an array beside using it: looking at members, checking them, changing their part.
//!
//! ```text
//!   open     from devices to an array that may be started
//!   check    metadata of an array that nobody uses, and with verify the parity of every written stripe
//!   edit     membership in the superblocks of an array that nobody uses
//!   group    new members for an array that nobody uses: groups of them, or for another shape
//!   report   an array and its members as people and programs read them
//! ```
//!
//! Everything here runs on a core and off the data path; callers that have no core use [`reactor::run`].

pub mod check;
pub mod edit;
pub mod group;
mod join;
pub mod open;
pub mod report;
pub mod verify;
