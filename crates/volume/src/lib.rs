//! Volumes: named devices that are carved out of one, the pool.
//!
//! ```text
//!   pool    │ table, four copies            │ unit │ unit │ unit │ unit │ unit │ unit │ …
//!                                              └ v1 ───────┘ └ v2 ┘        └ v1, grown ┘
//! ```
//!
//! A volume is made of whole units of the pool, in as few extents as there are holes for; what it is made of never
//! moves. A request that stays inside one extent goes to the pool's device as it is and costs no future of its own.
//!
//! | module | what it does |
//! |---|---|
//! | [`table`] | which volumes there are and where: bytes and rules, without I/O |
//! | [`extents`] | finding room |
//! | [`store`] | the table on the device: four copies, of which two are current |
//! | [`pool`] | making, growing, renaming and removing volumes |
//! | [`device`] | a volume as a [`block::Device`] |

#![forbid(unsafe_code)]

pub mod device;
pub mod extents;
pub mod mutant;
pub mod name;
pub mod pool;
pub mod store;
pub mod table;

pub use device::Volume;
pub use name::{Name, NameError, Uuid};
pub use pool::{Info, Pool, PoolError, Reservation};
