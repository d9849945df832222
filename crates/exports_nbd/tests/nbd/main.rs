//! The NBD server, as its clients find it: good ones, bad ones, and those that vanish.

mod allocations;
mod bitmaps;
mod blocks;
mod client;
mod commands;
mod conformance;
mod ending;
mod hostile;
mod memory;
mod places;
mod portal;
mod reload;
mod server;
mod tls;
