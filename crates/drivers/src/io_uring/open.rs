//! Opens a file or block device with clear error messages, and guards it against a second writer.

use super::Options;
use super::claim::{claim, is_same_disk};
use super::image_lock::{Conflict, ImageFile};
use block::DeviceError;
use std::fs::{File, FileType, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};

/// Opens the file that `options` name. The second file is the claim of a block device
/// that is open for direct I/O.
///
/// # Errors
/// The reason and, if there is one, the option that helps.
pub(super) fn open(options: &Options) -> Result<(ImageFile, Option<File>), DeviceError> {
    let refuse = |message: String| DeviceError::new(options.device_name(), message);
    let path = options.path.display();
    let kind = std::fs::metadata(&options.path)
        .map_err(|e| refuse(format!("cannot open {path}")).because(e))?
        .file_type();
    check_kind(kind)
        .map_err(|what| refuse(format!("{path} is {what}, not a regular file or block device")))?;
    let is_exclusive = kind.is_block_device() && !options.read_only && !options.share;
    let refused = |e: io::Error| refuse(reason(options, is_exclusive, &e)).because(e);
    // Zeroing through the page cache needs the claim in the file itself: without it the kernel
    // refuses to drop pages that are not written yet.
    let has_own_claim = is_exclusive && !options.direct;
    let claim =
        (is_exclusive && options.direct).then(|| claim(&options.path)).transpose().map_err(refused)?;
    let flags = libc::O_CLOEXEC
        | if options.direct { libc::O_DIRECT } else { 0 }
        | if has_own_claim { libc::O_EXCL } else { 0 };
    let file = OpenOptions::new()
        .read(true)
        .write(!options.read_only)
        .custom_flags(flags)
        .open(&options.path)
        .map_err(refused)?;
    if let Some(claim) = &claim
        && !is_same_disk(claim, &file).map_err(refused)?
    {
        return Err(refuse(format!("{path} has named two disks in turn while it was opened")));
    }
    let is_content_locked = options.read_only && options.refuse_writers;
    if !kind.is_file() || !is_content_locked && (options.read_only || options.share) {
        return Ok((ImageFile::unlocked(file), claim));
    }
    if is_content_locked {
        let file = ImageFile::lock_content(file).map_err(|conflict| {
            let (Conflict::Writer(error) | Conflict::Reader(error)) = conflict;
            refuse(format!("{path} is open for writing elsewhere")).because(error)
        })?;
        return Ok((file, claim));
    }
    let file = ImageFile::lock(file).map_err(|conflict| {
        let (what, error) = match conflict {
            Conflict::Writer(error) => ("is open for writing elsewhere", error),
            Conflict::Reader(error) => ("is read by a program that allows no writer", error),
        };
        refuse(format!("{path} {what}{}", help(options))).because(error)
    })?;
    Ok((file, claim))
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

/// The option that opens a file in use anyway, where there is one.
fn help(options: &Options) -> &'static str {
    if options.refuse_writers { "" } else { " (share=on opens it anyway)" }
}

fn reason(options: &Options, is_exclusive: bool, error: &io::Error) -> String {
    let path = options.path.display();
    match error.raw_os_error() {
        Some(libc::EBUSY) if is_exclusive => {
            format!("{path} is in use: mounted, or claimed by another program{}", help(options))
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
