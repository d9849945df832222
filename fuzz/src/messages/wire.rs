//! Bytes and descriptors over a socket.

use std::io::Read;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Largest number of descriptors in one message that Linux accepts.
pub const MAX_FDS: usize = 32;
/// Request, flags and payload size.
pub const HEADER_BYTES: usize = 12;

/// Sends bytes with descriptors. Returns whether the peer accepted them before `deadline`.
pub fn send(socket: &UnixStream, bytes: &[u8], fds: &[RawFd], deadline: Duration) -> bool {
    let start = Instant::now();
    let (mut rest, mut fds) = (bytes, &fds[..fds.len().min(MAX_FDS)]);
    while !rest.is_empty() {
        match send_once(socket, rest, fds) {
            Ok(sent) => (rest, fds) = (&rest[sent..], &[]),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock && start.elapsed() < deadline => {
                drain(socket); // the export may wait for us to read
                std::thread::sleep(Duration::from_micros(50));
            }
            Err(_) => return false,
        }
    }
    true
}

fn send_once(socket: &UnixStream, bytes: &[u8], fds: &[RawFd]) -> std::io::Result<usize> {
    let mut control = [0u64; 2 + MAX_FDS / 2];
    let mut iov = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: a zeroed header is valid; what it then points to is live and of the lengths it
    // carries; the control message has room for `MAX_FDS` descriptors.
    let sent = unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut iov;
        message.msg_iovlen = 1;
        if !fds.is_empty() {
            let len = size_of_val(fds) as u32;
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(len) as usize;
            let first = libc::CMSG_FIRSTHDR(&raw const message);
            (*first).cmsg_level = libc::SOL_SOCKET;
            (*first).cmsg_type = libc::SCM_RIGHTS;
            (*first).cmsg_len = libc::CMSG_LEN(len) as usize;
            std::ptr::copy_nonoverlapping(fds.as_ptr(), libc::CMSG_DATA(first).cast::<RawFd>(), fds.len());
        }
        libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
    };
    if sent < 0 { Err(std::io::Error::last_os_error()) } else { Ok(sent as usize) }
}

/// Discards the received bytes; the system closes descriptors received with them.
pub fn drain(socket: &UnixStream) {
    let mut bytes = [0u8; 512];
    // SAFETY: the buffer is live and as long as said.
    while unsafe {
        libc::recv(socket.as_raw_fd(), bytes.as_mut_ptr().cast(), bytes.len(), libc::MSG_DONTWAIT)
    } > 0
    {}
}

/// The body of the next message; `None` when the export has disconnected or does not answer before
/// `deadline`.
pub fn receive(socket: &UnixStream, deadline: Duration) -> Option<(u32, Vec<u8>)> {
    socket.set_read_timeout(Some(deadline)).ok()?;
    let mut header = [0; HEADER_BYTES];
    (&mut &*socket).read_exact(&mut header).ok()?;
    let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| header[at + i]));
    let mut body = vec![0; word(8).min(0x1_0000) as usize];
    (&mut &*socket).read_exact(&mut body).ok()?;
    Some((word(0), body))
}
