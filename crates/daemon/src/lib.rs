//! `freestoned`: devices, arrays, volumes and exports under one daemon, which remembers them.
//!
//! ```text
//!   HTTP ─► rest (who may, what was meant) ─► engine (one change at a time) ─► state (durable, then acknowledged)
//!                                               │
//!                                               ├─► serving: arrays that are kept, exports     ─► cores: the data path
//!                                               └─► volume: pools
//! ```
//!
//! Nothing here is on the data path. What is asked for is checked, done, made durable and only then
//! acknowledged; what cannot be done leaves everything as it was. At its start, and as long as
//! something is missing, the daemon brings about what its state says ([`engine::upkeep`]).

#![forbid(unsafe_code)]

pub mod config;
pub mod confinement;
pub mod engine;
pub mod events;
pub mod fault;
pub mod metrics;
pub mod rest;
pub mod state;
pub mod workers;
