//! The operations of `keyctl` that a look-up needs.
//!
//! Source: keyctl(2), and the manual pages of its operations.

#![allow(unsafe_code)]

use std::ffi::c_long;
use std::io;
use zeroize::Zeroizing;

/// The longest description, with the type, the owner and the permissions before it, in bytes: the
/// names of a host and of a subsystem have up to 223 each.
const MAX_DESCRIPTION: usize = 1024;

/// Returns the serial number of a keyring that a constant such as `KEY_SPEC_USER_KEYRING` names.
pub(super) fn special(constant: i32) -> io::Result<i32> {
    // SAFETY: the operation takes numbers only.
    let serial =
        unsafe { libc::syscall(libc::SYS_keyctl, op(libc::KEYCTL_GET_KEYRING_ID), long(constant), 0) };
    Ok(checked(serial)? as i32)
}

/// Returns `TYPE;UID;GID;PERMISSIONS;DESCRIPTION`.
pub(super) fn describe(serial: i32) -> io::Result<String> {
    let (bytes, len) = into_buffer(libc::KEYCTL_DESCRIBE, serial, MAX_DESCRIPTION)?;
    // A zero byte ends the text. The kernel copies nothing of a text that is too long.
    let text = bytes.strip_suffix(&[0]).filter(|_| len <= MAX_DESCRIPTION);
    let text = text.and_then(|text| std::str::from_utf8(text).ok());
    text.map(str::to_owned).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Returns the content of a key, or of a keyring: at most `limit` bytes of it, and its length.
pub(super) fn read(serial: i32, limit: usize) -> io::Result<(Zeroizing<Vec<u8>>, usize)> {
    into_buffer(libc::KEYCTL_READ, serial, limit)
}

/// Links a keyring to that of the thread. The thread then possesses its keys.
pub(super) fn link(serial: i32) -> io::Result<()> {
    with_own(libc::KEYCTL_LINK, serial)
}

/// Removes such a link.
pub(super) fn unlink(serial: i32) -> io::Result<()> {
    with_own(libc::KEYCTL_UNLINK, serial)
}

fn with_own(operation: u32, serial: i32) -> io::Result<()> {
    let own = long(libc::KEY_SPEC_THREAD_KEYRING);
    // SAFETY: the operation takes numbers only.
    checked(unsafe { libc::syscall(libc::SYS_keyctl, op(operation), long(serial), own) }).map(drop)
}

fn into_buffer(operation: u32, serial: i32, limit: usize) -> io::Result<(Zeroizing<Vec<u8>>, usize)> {
    let mut bytes = Zeroizing::new(vec![0u8; limit]);
    // SAFETY: the kernel writes at most `limit` bytes, which the buffer has.
    let len =
        unsafe { libc::syscall(libc::SYS_keyctl, op(operation), long(serial), bytes.as_mut_ptr(), limit) };
    let len = checked(len)? as usize;
    bytes.truncate(len);
    Ok((bytes, len))
}

/// Returns the user as whom the thread acts.
pub(super) fn user() -> u32 {
    // SAFETY: the call takes nothing and cannot fail.
    unsafe { libc::geteuid() }
}

fn op(operation: u32) -> c_long {
    c_long::from(operation)
}

fn long(serial: i32) -> c_long {
    c_long::from(serial)
}

fn checked(result: c_long) -> io::Result<c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
