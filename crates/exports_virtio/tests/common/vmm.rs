//! vhost-user messages by hand: whatever a VMM may send, in any order and any state of repair.

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

/// Message numbers of the specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Request {
    GetFeatures = 1,
    SetFeatures = 2,
    SetOwner = 3,
    ResetOwner = 4,
    SetMemTable = 5,
    SetLogBase = 6,
    SetVringNum = 8,
    SetVringAddr = 9,
    SetVringBase = 10,
    GetVringBase = 11,
    SetVringKick = 12,
    SetVringCall = 13,
    SetVringErr = 14,
    GetProtocolFeatures = 15,
    SetProtocolFeatures = 16,
    GetQueueNum = 17,
    SetVringEnable = 18,
    SetBackendReqFd = 21,
    GetConfig = 24,
    SetConfig = 25,
    GetInflightFd = 31,
    SetInflightFd = 32,
    GetMaxMemSlots = 36,
    AddMemReg = 37,
    RemMemReg = 38,
}

/// A connection to the export.
pub struct Vmm {
    pub socket: UnixStream,
}

impl Vmm {
    pub fn connect(path: &Path) -> Vmm {
        let socket = UnixStream::connect(path).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Vmm { socket }
    }

    /// Sends a message that has no answer of its own.
    pub fn send(&self, request: Request, body: &[u64], fds: &[RawFd]) {
        self.send_bytes(request, 1, &to_bytes(body), fds);
    }

    pub fn send_bytes(&self, request: Request, flags: u32, body: &[u8], fds: &[RawFd]) {
        let mut message = Vec::new();
        for word in [request as u32, flags, body.len() as u32] {
            message.extend_from_slice(&word.to_ne_bytes());
        }
        message.extend_from_slice(body);
        let sent = self.socket.send_with_fds(&[&message[..]], fds).unwrap();
        assert_eq!(sent, message.len());
    }

    /// Sends a message and asks for the acknowledgement of REPLY_ACK; whether it was accepted.
    pub fn send_acked(&self, request: Request, body: &[u64], fds: &[RawFd]) -> bool {
        self.send_bytes(request, 1 | 8, &to_bytes(body), fds);
        self.receive(request).0 == 0u64.to_ne_bytes()
    }

    /// Sends a message and waits for its answer.
    pub fn ask(&self, request: Request, body: &[u64]) -> Vec<u8> {
        self.send(request, body, &[]);
        self.receive(request).0
    }

    pub fn ask_u64(&self, request: Request) -> u64 {
        u64::from_ne_bytes(self.ask(request, &[]).try_into().unwrap())
    }

    pub fn ask_bytes(&self, request: Request, body: &[u8]) -> Vec<u8> {
        self.send_bytes(request, 1, body, &[]);
        self.receive(request).0
    }

    pub fn receive(&self, request: Request) -> (Vec<u8>, Option<OwnedFd>) {
        let mut header = [0u8; 12];
        let mut fds = [-1];
        let mut iov = [libc::iovec { iov_base: header.as_mut_ptr().cast(), iov_len: 12 }];
        // SAFETY: `header` takes any bytes.
        let (got, count) = unsafe { self.socket.recv_with_fds(&mut iov, &mut fds) }.unwrap();
        assert_eq!(got, 12, "the export disconnected instead of answering {request:?}");
        assert_eq!(u32::from_ne_bytes(header[..4].try_into().unwrap()), request as u32);
        let len = u32::from_ne_bytes(header[8..].try_into().unwrap());
        let mut body = vec![0; len as usize];
        (&self.socket).read_exact(&mut body).unwrap();
        // SAFETY: the descriptor has just been made for us.
        (body, (count == 1).then(|| unsafe { OwnedFd::from_raw_fd(fds[0]) }))
    }

    /// Sends bytes that may not be a message; the export may have disconnected already.
    pub fn send_raw(&self, bytes: &[u8]) {
        let _ = (&self.socket).write_all(bytes);
    }

    /// Whether the export disconnects (it may send data before).
    pub fn is_hung_up(&self) -> bool {
        let mut rest = Vec::new();
        match (&self.socket).read_to_end(&mut rest) {
            Ok(_) => true,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

fn to_bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

pub fn eventfd() -> OwnedFd {
    // SAFETY: a fresh descriptor.
    unsafe { OwnedFd::from_raw_fd(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)) }
}

/// Whether the eventfd was signalled since the last look.
pub fn is_signalled(fd: &OwnedFd) -> bool {
    let mut count = 0u64;
    // SAFETY: reads 8 bytes into a live variable.
    unsafe { libc::read(fd.as_raw_fd(), (&raw mut count).cast(), 8) == 8 }
}

/// Waits for a signal, `timeout` at most; whether it came.
pub fn wait_signal(fd: &OwnedFd, timeout: Duration) -> bool {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one live entry.
    unsafe { libc::poll(&raw mut poll, 1, timeout.as_millis() as i32) };
    is_signalled(fd)
}
