//! The channel to the VMM: notifies it that the configuration space has changed.
//!
//! The `vhost` crate receives the socket of SET_BACKEND_REQ_FD. But it cannot send this message
//! over it, and does not expose the socket. So the control thread inspects each message before the
//! crate reads it, and keeps a duplicate of that one socket.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// VHOST_USER_SET_BACKEND_REQ_FD of the vhost-user specification.
const SET_BACKEND_REQ_FD: u32 = 21;
/// VHOST_USER_BACKEND_CONFIG_CHANGE_MSG of the vhost-user specification.
const CONFIG_CHANGE_MSG: u32 = 2;
/// Message flags: version 1, no reply requested.
const VERSION: u32 = 1;
/// Request, flags and payload size: 4 bytes each.
const HEADER: usize = 12;

/// A socket on which the VMM receives messages of the export.
pub(super) struct BackendChannel {
    socket: UnixStream,
}

impl BackendChannel {
    /// Returns the channel that the next message on `main` brings, if it brings one. The message
    /// stays in the socket.
    pub(super) fn peek(main: &UnixStream) -> Option<BackendChannel> {
        let (header, _) = peek(main, false)?;
        if u32::from_ne_bytes(header[..4].try_into().expect("four bytes")) != SET_BACKEND_REQ_FD {
            return None;
        }
        let (_, fd) = peek(main, true)?;
        Some(BackendChannel { socket: UnixStream::from(fd?) })
    }

    /// Sends the configuration change message without blocking. The VMM reacts by reading the
    /// configuration space through the control thread, which may be the caller.
    pub(super) fn notify_config_change(&self) -> io::Result<()> {
        let mut message = [0u8; HEADER];
        message[..4].copy_from_slice(&CONFIG_CHANGE_MSG.to_ne_bytes());
        message[4..8].copy_from_slice(&VERSION.to_ne_bytes());
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: `message` is live and of the length that is given.
        let sent = unsafe { libc::send(self.socket.as_raw_fd(), message.as_ptr().cast(), HEADER, flags) };
        match sent {
            n if n == HEADER as isize => Ok(()),
            n if n < 0 => Err(io::Error::last_os_error()),
            _ => Err(io::Error::new(io::ErrorKind::WouldBlock, "the VMM does not read its channel")),
        }
    }
}

/// Returns the header of the next message. `take_fd`: also a duplicate of its first descriptor.
fn peek(main: &UnixStream, take_fd: bool) -> Option<([u8; HEADER], Option<OwnedFd>)> {
    #[repr(C, align(8))]
    struct Control([u8; 24]); // CMSG_SPACE of one descriptor

    let mut header = [0u8; HEADER];
    let mut control = Control([0; 24]);
    let mut iov = libc::iovec { iov_base: header.as_mut_ptr().cast(), iov_len: HEADER };
    // SAFETY: plain data, valid when zeroed.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut iov;
    message.msg_iovlen = 1;
    if take_fd {
        message.msg_control = (&raw mut control).cast();
        // Without the padding at its end: a second descriptor would fit there and leak.
        // SAFETY: a computation on its argument alone.
        message.msg_controllen = unsafe { libc::CMSG_LEN(size_of::<i32>() as u32) } as usize;
    }
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: `message` points to live buffers of the lengths that it carries; control messages are
    // read as the kernel wrote them, and a descriptor among them is new and ours.
    unsafe {
        if libc::recvmsg(main.as_raw_fd(), &raw mut message, flags) != HEADER as isize {
            return None;
        }
        let first = if take_fd { libc::CMSG_FIRSTHDR(&raw const message) } else { std::ptr::null_mut() };
        let is_fd = !first.is_null()
            && (*first).cmsg_level == libc::SOL_SOCKET
            && (*first).cmsg_type == libc::SCM_RIGHTS
            && (*first).cmsg_len == libc::CMSG_LEN(size_of::<i32>() as u32) as usize;
        let fd = is_fd.then(|| OwnedFd::from_raw_fd(libc::CMSG_DATA(first).cast::<i32>().read_unaligned()));
        Some((header, fd))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    fn send_with_fd(socket: &UnixStream, request: u32, fd: &UnixStream) {
        send_with_fds(socket, request, &[fd]);
    }

    fn send_with_fds(socket: &UnixStream, request: u32, fds: &[&UnixStream]) {
        let mut message = [0u8; HEADER];
        message[..4].copy_from_slice(&request.to_ne_bytes());
        message[4..8].copy_from_slice(&VERSION.to_ne_bytes());
        let mut iov = libc::iovec { iov_base: message.as_mut_ptr().cast(), iov_len: HEADER };
        let mut control = [0u64; 3];
        assert!(fds.len() <= 2);
        // SAFETY: buffers are live; a control message of two descriptors fits 24 bytes.
        unsafe {
            let mut hdr: libc::msghdr = std::mem::zeroed();
            hdr.msg_iov = &raw mut iov;
            hdr.msg_iovlen = 1;
            hdr.msg_control = control.as_mut_ptr().cast();
            hdr.msg_controllen = 24;
            let cmsg = libc::CMSG_FIRSTHDR(&raw const hdr);
            (*cmsg).cmsg_level = libc::SOL_SOCKET;
            (*cmsg).cmsg_type = libc::SCM_RIGHTS;
            (*cmsg).cmsg_len = libc::CMSG_LEN(size_of::<i32>() as u32 * fds.len() as u32) as usize;
            for (i, fd) in fds.iter().enumerate() {
                libc::CMSG_DATA(cmsg).cast::<i32>().add(i).write_unaligned(fd.as_raw_fd());
            }
            assert_eq!(libc::sendmsg(socket.as_raw_fd(), &raw const hdr, 0), HEADER as isize);
        }
    }

    #[test]
    fn the_channel_is_taken_from_the_message_that_brings_it_and_the_message_stays() {
        let (vmm, mut ours) = UnixStream::pair().unwrap();
        let (mut back, forth) = UnixStream::pair().unwrap();
        send_with_fd(&vmm, SET_BACKEND_REQ_FD, &forth);
        drop(forth);
        let channel = BackendChannel::peek(&ours).expect("the message brings a socket");
        let mut header = [0; HEADER];
        ours.read_exact(&mut header).unwrap();
        assert_eq!(header[0], SET_BACKEND_REQ_FD as u8);
        channel.notify_config_change().unwrap();
        let mut message = [0; HEADER];
        back.read_exact(&mut message).unwrap();
        assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn further_descriptors_of_the_message_do_not_stay_open() {
        let (vmm, ours) = UnixStream::pair().unwrap();
        let (_back, forth) = UnixStream::pair().unwrap();
        let (mut end, other) = UnixStream::pair().unwrap();
        end.set_nonblocking(true).unwrap();
        send_with_fds(&vmm, SET_BACKEND_REQ_FD, &[&forth, &other]);
        assert!(BackendChannel::peek(&ours).is_some());
        drop((vmm, ours, other));
        assert_eq!(end.read(&mut [0]).unwrap(), 0, "the other end is still open");
    }

    #[test]
    fn other_messages_are_left_alone() {
        let (mut vmm, ours) = UnixStream::pair().unwrap();
        assert!(BackendChannel::peek(&ours).is_none());
        vmm.write_all(&[1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        assert!(BackendChannel::peek(&ours).is_none());
        let (other, _end) = UnixStream::pair().unwrap();
        let (vmm, ours) = UnixStream::pair().unwrap();
        send_with_fd(&vmm, 5, &other);
        assert!(BackendChannel::peek(&ours).is_none());
    }

    #[test]
    fn a_vmm_that_does_not_read_its_channel_does_not_block_us() {
        let (_back, socket) = UnixStream::pair().unwrap();
        let channel = BackendChannel { socket };
        let failed = (0..1_000_000).find_map(|_| channel.notify_config_change().err());
        assert_eq!(failed.expect("the socket becomes full").kind(), io::ErrorKind::WouldBlock);
    }
}
