//! Disk images in QEMU's format qcow2, as devices.
//!
//! ```text
//!   L1 table (in memory) ─► L2 table (slices of 4 KiB, cached) ─► cluster: data │ zeroes │ compressed
//!                                                             └─► none: the backing device, or zeroes
//! ```
//!
//! The tables of an image that is only read do not change: each core looks a place up in its own
//! cache ([`device`]). The tables of an image that is written are a table of [`mapping`], and one
//! core changes them ([`live`]). Either way a request to data takes no lock and sends no message.
//!
//! Every byte of an image is hostile. Numbers are checked against the file's length and a limit
//! before memory is allocated for them.
//!
//! | module | purpose |
//! |---|---|
//! | [`header`] | the header and its extensions: bytes and rules, without I/O |
//! | [`entry`] | entries of L1 and L2 tables, without I/O |
//! | [`check`](mod@check) | refcounts, pointers and COPIED bits against each other |
//! | [`image`] | reading the metadata of an image, internal snapshots |
//! | [`map`] | where each byte of a disk is, for tools |
//! | [`device`] | an image that is only read, as a [`block::Device`] |
//! | [`live`] | an image that is read and written, as a [`block::Device`] |
//! | [`offline`] | commands that change an image which nothing else has open |
//! | [`mutant`] | broken rules that the simulator must catch |
//! | [`write`](mod@write) | a new image, from its first to its last byte |
//!
//! Source: QEMU `docs/interop/qcow2.rst`.

#![forbid(unsafe_code)]

mod below;
mod bitmap;
mod bits;
mod cache;
pub mod check;
mod compress;
mod content;
pub mod device;
pub mod entry;
mod error;
pub mod header;
pub mod image;
pub mod live;
mod lookup;
pub mod map;
pub mod mutant;
pub mod offline;
mod reader;
mod refcount;
mod snapshot;
pub mod write;

pub use below::Others;
pub use bitmap::Bitmap;
pub use check::{Report, check};
pub use device::{DEFAULT_CACHE_BYTES, Qcow2};
pub use error::{Error, Problem};
pub use header::Header;
pub use image::Image;
pub use live::{
    Commit, CommitChannel, LiveImage, RESTART_RECORDS, RestartLog, Stream, StreamChannel, recover,
};
pub use lookup::Run;
pub use map::Map;
pub use offline::repair::{Level, Repaired, repair};
pub use snapshot::Snapshot;
