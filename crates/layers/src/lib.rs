//! Devices over devices.
//!
//! | module | what it does |
//! |---|---|
//! | [`linear`] | a partition of a device; several devices one after the other |
//! | [`stats`] | counts requests, bytes and errors, and measures latency |
//! | [`qos`] | limits requests and bytes a second, of a device or of a group |
//! | [`relocate`] | counts, and lets a copy take a device's place while it is in use |
//! | [`fault`] | errors, delays and torn writes by rule |
//! | [`checker`] | panics when whoever is above breaks the contract of a device |
//!
//! A layer is a [`block::Device`] that makes a [`block::Channel`] over its child's on every core. It forwards
//! each method itself, so that a forgotten one does not compile. Layers never depend on drivers or exports.

#![forbid(unsafe_code)]

pub mod checker;
pub mod fault;
pub mod linear;
pub mod qos;
pub mod relocate;
pub mod stats;
