//! Opens a file or block device with clear error messages, and guards it against a second writer.

use super::Options;
use super::image_lock::{self, Conflict};
use block::DeviceError;
use std::fs::{File, FileType, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};

/// Opens the file that `options` name.
///
/// # Errors
/// The reason and, if there is one, the option that helps.
pub(super) fn open(options: &Options) -> Result<File, DeviceError> {
    let refuse = |message: String| DeviceError::new(options.device_name(), message);
    let path = options.path.display();
    let kind = std::fs::metadata(&options.path)
        .map_err(|e| refuse(format!("cannot open {path}")).because(e))?
        .file_type();
    check_kind(kind)
        .map_err(|what| refuse(format!("{path} is {what}, not a regular file or block device")))?;
    let is_exclusive = kind.is_block_device() && !options.read_only && !options.share;
    let mut flags = libc::O_CLOEXEC;
    flags |= if options.direct { libc::O_DIRECT } else { 0 };
    // Without O_CREAT, O_EXCL claims a block device: other programs cannot claim or mount it.
    flags |= if is_exclusive { libc::O_EXCL } else { 0 };
    let file = OpenOptions::new()
        .read(true)
        .write(!options.read_only)
        .custom_flags(flags)
        .open(&options.path)
        .map_err(|e| refuse(reason(options, is_exclusive, &e)).because(e))?;
    if kind.is_file() && !options.read_only && !options.share {
        image_lock::lock(&file).map_err(|conflict| {
            let (what, error) = match conflict {
                Conflict::Writer(error) => ("is open for writing elsewhere", error),
                Conflict::Reader(error) => ("is read by a program that allows no writer", error),
            };
            refuse(format!("{path} {what} (share=on opens it anyway)")).because(error)
        })?;
    }
    Ok(file)
}

/// Returns a description of this file type if it is not supported.
pub(super) fn check_kind(kind: FileType) -> Result<(), &'static str> {
    match kind {
        k if k.is_file() || k.is_block_device() => Ok(()),
        k if k.is_dir() => Err("a directory"),
        k if k.is_char_device() => Err("a character device"),
        k if k.is_fifo() => Err("a pipe"),
        k if k.is_socket() => Err("a socket"),
        _ => Err("a special file"),
    }
}

fn reason(options: &Options, is_exclusive: bool, error: &io::Error) -> String {
    let path = options.path.display();
    match error.raw_os_error() {
        Some(libc::EBUSY) if is_exclusive => {
            format!("{path} is in use: mounted, or claimed by another program (share=on opens it anyway)")
        }
        Some(libc::EINVAL) if options.direct => {
            format!("the file system of {path} does not support direct I/O (use direct=off)")
        }
        Some(libc::EROFS | libc::EACCES | libc::EPERM) if !options.read_only => {
            format!("cannot open {path} for writing (readonly=on only reads)")
        }
        _ => format!("cannot open {path}"),
    }
}
