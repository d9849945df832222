//! Character devices that accept commands.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// The reason why a file is not opened as a character device.
pub(crate) enum NodeError {
    /// It is of this kind.
    Kind(&'static str),
    /// The kernel refuses it.
    Open(io::Error),
}

/// Opens the character device at `path`.
pub(crate) fn open(path: &Path, read_only: bool) -> Result<File, NodeError> {
    // Opening a pipe would block, and opening a device may have side effects: check the type
    // first.
    check(&std::fs::metadata(path).map_err(NodeError::Open)?).map_err(NodeError::Kind)?;
    OpenOptions::new()
        .read(true)
        .write(!read_only)
        .custom_flags(libc::O_CLOEXEC)
        .open(path)
        .map_err(NodeError::Open)
}

/// Returns the kind of a file that is not a character device.
pub(crate) fn check(metadata: &Metadata) -> Result<(), &'static str> {
    if metadata.file_type().is_char_device() { Ok(()) } else { Err(kind_of(metadata)) }
}

/// The kind of a file, for messages.
pub(crate) fn kind_of(metadata: &Metadata) -> &'static str {
    match metadata.file_type() {
        k if k.is_char_device() => "a character device",
        k if k.is_block_device() => "a block device",
        k if k.is_file() => "a regular file",
        k if k.is_dir() => "a directory",
        k if k.is_fifo() => "a pipe",
        k if k.is_socket() => "a socket",
        _ => "a special file",
    }
}
