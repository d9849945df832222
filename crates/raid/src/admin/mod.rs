//! Administration of arrays apart from their use: opening, checks, changes of membership, reports.
//!
//! ```text
//!   open     from devices to an array that may be started
//!   check    metadata of an array that is not in use; with verify also parity of written stripes
//!   edit     membership in the superblocks of an array that is not in use
//!   group    new members for an array that is not in use: complete groups, or for a reshape
//!   report   an array and its members in a form for people and programs
//! ```
//!
//! All of this runs on a core and off the data path; callers without a core use [`reactor::run`].

pub mod check;
pub mod edit;
pub mod group;
mod join;
pub mod open;
pub mod report;
pub mod verify;
