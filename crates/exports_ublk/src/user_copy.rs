//! Data that the server copies itself, by reads and writes of `/dev/ublkcN` (`UBLK_F_USER_COPY`).
//!
//! A disk whose device uses the kernel's buffers has no other way for a request whose bytes the
//! device must look at. Each copy is a system call, which never waits.

use super::uapi::data_offset;
use block::{IoError, IoResult};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Fills `buffer` with the data of a write.
pub(super) fn fetch(file: &File, queue: u16, tag: u16, buffer: &mut [u8]) -> IoResult {
    judge(file.read_exact_at(buffer, data_offset(queue, tag)))
}

/// Gives `buffer` to a read as its data.
pub(super) fn deliver(file: &File, queue: u16, tag: u16, buffer: &[u8]) -> IoResult {
    judge(file.write_all_at(buffer, data_offset(queue, tag)))
}

fn judge(copied: io::Result<()>) -> IoResult {
    copied.map_err(|error| {
        tracing::error!(%error, "the data of a ublk request cannot be copied");
        error.raw_os_error().map_or(IoError::Medium, IoError::from_errno)
    })
}
