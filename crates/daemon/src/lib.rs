//! `freestoned`: devices, arrays, volumes and exports under one daemon, which remembers them.
//!
//! ```text
//!   HTTP ─► rest (roles, requests) ─► engine (one change at a time) ─► state (durable)
//!                                       │
//!                                       ├─► serving: arrays and exports ─► cores: the data path
//!                                       └─► volume: pools
//! ```
//!
//! Nothing here is on the data path. A request is checked, carried out, made durable and only then
//! acknowledged; a failed request changes nothing. At its start, and while objects are missing, the
//! daemon opens the objects of its state ([`engine::upkeep`]).

#![forbid(unsafe_code)]

pub mod api_error;
pub mod config;
pub mod confinement;
pub mod engine;
pub mod events;
mod host_secrets;
mod labels;
pub mod metrics;
pub mod rest;
pub mod state;
pub mod workers;
