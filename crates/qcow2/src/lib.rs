//! Disk images in QEMU's format qcow2, as read-only devices.
//!
//! ```text
//!   L1 table (in memory) ─► L2 table (slices of 4 KiB, cached) ─► cluster: data │ zeroes │ compressed
//!                                                             └─► none: the backing device, or zeroes
//! ```
//!
//! An image is opened for reading only, so its tables do not change: each core looks a place up in
//! its own cache, without lock or message. Every byte of an image is hostile. Numbers are checked
//! against the file's length and a limit before memory is allocated for them.
//!
//! | module | purpose |
//! |---|---|
//! | [`header`] | the header and its extensions: bytes and rules, without I/O |
//! | [`entry`] | entries of L1 and L2 tables, without I/O |
//! | [`check`](mod@check) | refcounts, pointers and COPIED bits against each other |
//! | [`image`] | reading the metadata of an image, internal snapshots |
//! | [`map`] | where each byte of a disk is, for tools |
//! | [`device`] | the image as a [`block::Device`] |
//! | [`write`](mod@write) | a new image, from its first to its last byte |
//!
//! Source: QEMU `docs/interop/qcow2.rst`.

#![forbid(unsafe_code)]

mod bitmap;
mod cache;
pub mod check;
mod compress;
pub mod device;
pub mod entry;
mod error;
pub mod header;
pub mod image;
mod lookup;
pub mod map;
mod reader;
mod refcount;
mod snapshot;
pub mod write;

pub use bitmap::Bitmap;
pub use check::{Report, check};
pub use device::{DEFAULT_CACHE_BYTES, Others, Qcow2};
pub use error::{Error, Problem};
pub use header::Header;
pub use image::Image;
pub use lookup::Run;
pub use map::Map;
pub use snapshot::Snapshot;
