//! The front end of a vhost-user connection: sends messages and receives replies.
//!
//! ```text
//!   header │ request u32 │ flags u32: version 1, reply, need reply │ size u32 │   payload   (+ descriptors)
//! ```
//!
//! Numbers and names come from the `vhost` crate. Its own front end is not used. It waits forever
//! for a silent server, and sends only 16 of the 32 bits that `SET_VRING_BASE` needs for a packed
//! ring. It also cannot send the malformed messages that tests of a server need.
//!
//! Source: QEMU, docs/interop/vhost-user.rst.

use std::fs::File;
use std::io::{self, Read};
use std::net::Shutdown;
use std::os::fd::RawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};
use vhost::vhost_user::VhostUserProtocolFeatures as Protocol;
pub use vhost::vhost_user::message::FrontendReq;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

/// Bytes of a message header.
pub(crate) const HEADER_BYTES: usize = 12;
/// Length of the longest payload accepted, and of any message of the protocol.
pub(crate) const MAX_PAYLOAD: usize = 4096;
/// Version 1, in every message.
pub(crate) const FLAG_VERSION: u32 = 1;
/// The message is a reply.
pub(crate) const FLAG_REPLY: u32 = 4;
/// The sender requests an acknowledgement.
pub(crate) const FLAG_NEED_REPLY: u32 = 8;

/// Why an exchange with the server failed. Except after a refusal, the connection is shut down,
/// because its state is unknown.
#[derive(Debug, thiserror::Error)]
pub enum FrontendError {
    /// The socket failed, or the server did not answer in time.
    #[error("{request:?}: the connection failed")]
    Connection {
        /// Request sent.
        request: FrontendReq,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The protocol does not allow this answer.
    #[error("{request:?}: the server answered with {what}")]
    BadReply {
        /// Request sent.
        request: FrontendReq,
        /// Reason why the answer is invalid.
        what: String,
    },
    /// The server refused the request.
    #[error("{request:?}: the server refused (error {code})")]
    Refused {
        /// Request sent.
        request: FrontendReq,
        /// The server's error code, not 0.
        code: u64,
    },
}

/// Payload of a reply and the descriptor received with it.
#[derive(Debug)]
pub struct Reply {
    /// Bytes after the header.
    pub payload: Vec<u8>,
    /// The descriptor, if one came.
    pub file: Option<File>,
}

impl Reply {
    /// The number at byte `offset` of the payload; 0 if the payload is too short.
    pub fn u64_at(&self, offset: usize) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|i| self.payload.get(offset + i).copied().unwrap_or(0)))
    }
}

/// A connection to a vhost-user server.
#[derive(Debug)]
pub struct Frontend {
    stream: UnixStream,
    timeout: Duration,
    /// End of all exchanges, during an attempt to reconnect.
    ends_at: Option<Instant>,
    reply_ack: bool,
}

impl Frontend {
    /// Connects to the socket at `path`. Each answer must arrive within `timeout`.
    ///
    /// # Errors
    /// When no server listens on the socket.
    pub fn connect(path: &Path, timeout: Duration) -> io::Result<Frontend> {
        Frontend::new(UnixStream::connect(path)?, timeout)
    }

    /// Uses a connected stream.
    ///
    /// # Errors
    /// When the timeout cannot be set.
    pub fn new(stream: UnixStream, timeout: Duration) -> io::Result<Frontend> {
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        Ok(Frontend { stream, timeout, ends_at: None, reply_ack: false })
    }

    /// Sets a time at which all exchanges end; `None`: each answer has its own timeout.
    pub(super) fn set_end(&mut self, ends_at: Option<Instant>) {
        self.ends_at = ends_at;
    }

    /// Requests acknowledgements for all further messages, if `REPLY_ACK` was negotiated.
    pub fn set_protocol(&mut self, features: Protocol) {
        self.reply_ack = features.contains(Protocol::REPLY_ACK);
    }

    /// The socket, for the listening thread and for tests that write raw bytes.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Sends a message that has no reply of its own. Returns when the server has acknowledged it,
    /// if that was negotiated.
    ///
    /// # Errors
    /// When the connection or the server fails.
    pub fn send(&mut self, request: FrontendReq, payload: &[u8], fds: &[RawFd]) -> Result<(), FrontendError> {
        let flags = FLAG_VERSION | if self.reply_ack { FLAG_NEED_REPLY } else { 0 };
        self.write(request, flags, payload, fds)?;
        if self.reply_ack {
            let code = self.read_reply(request)?.u64_at(0);
            if code != 0 {
                return Err(FrontendError::Refused { request, code });
            }
        }
        Ok(())
    }

    /// Sends a message and returns its reply.
    ///
    /// # Errors
    /// When the connection or the server fails.
    pub fn call(
        &mut self,
        request: FrontendReq,
        payload: &[u8],
        fds: &[RawFd],
    ) -> Result<Reply, FrontendError> {
        self.write(request, FLAG_VERSION, payload, fds)?;
        self.read_reply(request)
    }

    /// Closes the connection in both directions, which wakes all waiting threads.
    pub fn shutdown(&self) {
        // Fails only if the server closed it before.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    fn write(
        &mut self,
        request: FrontendReq,
        flags: u32,
        payload: &[u8],
        fds: &[RawFd],
    ) -> Result<(), FrontendError> {
        let bytes = message(request.into(), flags, payload);
        write_all(&self.stream, &bytes, fds).map_err(|source| {
            self.shutdown();
            FrontendError::Connection { request, source }
        })
    }

    fn read_reply(&mut self, request: FrontendReq) -> Result<Reply, FrontendError> {
        let until = Instant::now() + self.timeout;
        let result = read_message(&self.stream, self.ends_at.map_or(until, |end| end.min(until)));
        let bad = |what| Err(FrontendError::BadReply { request, what });
        let result = match result {
            Err(source) => Err(FrontendError::Connection { request, source }),
            Ok((code, ..)) if code != u32::from(request) => bad(format!("a reply to request {code}")),
            Ok((_, flags, _)) if flags & FLAG_REPLY == 0 => bad("a message that is not a reply".into()),
            Ok((_, _, reply)) => Ok(reply),
        };
        if result.is_err() {
            self.shutdown();
        }
        result
    }
}

/// Encodes a message in one buffer.
pub(crate) fn message(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER_BYTES + payload.len());
    for field in [request, flags, payload.len() as u32] {
        bytes.extend_from_slice(&field.to_le_bytes());
    }
    bytes.extend_from_slice(payload);
    bytes
}

/// Writes `bytes`, with the descriptors attached to the first of them.
pub(crate) fn write_all(stream: &UnixStream, bytes: &[u8], fds: &[RawFd]) -> io::Result<()> {
    let mut sent = 0;
    while sent < bytes.len() {
        let fds = if sent == 0 { fds } else { &[] };
        match stream.send_with_fds(&[&bytes[sent..]], fds) {
            Ok(n) => sent += n,
            Err(e) if e.errno() == libc::EINTR => {}
            Err(e) => return Err(io::Error::from_raw_os_error(e.errno())),
        }
    }
    Ok(())
}

/// Reads one message until the time `until`: its request number, flags and content.
pub(crate) fn read_message(stream: &UnixStream, until: Instant) -> io::Result<(u32, u32, Reply)> {
    let mut header = [0; HEADER_BYTES];
    let (n, file) = loop {
        limit_reads(stream, until)?;
        match stream.recv_with_fd(&mut header) {
            Err(e) if e.errno() == libc::EINTR => {}
            Err(e) => return Err(io::Error::from_raw_os_error(e.errno())),
            Ok(received) => break received,
        }
    };
    if n == 0 {
        return Err(closed());
    }
    read_exactly(stream, &mut header[n..], until)?;
    let field = |i: usize| u32::from_le_bytes(std::array::from_fn(|byte| header[i * 4 + byte]));
    let (request, flags, len) = (field(0), field(1), field(2) as usize);
    if len > MAX_PAYLOAD {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a payload of {len} bytes")));
    }
    let mut payload = vec![0; len];
    read_exactly(stream, &mut payload, until)?;
    Ok((request, flags, Reply { payload, file }))
}

/// Fills `to`, until the time `until`: a server that sends one byte at a time gains none.
fn read_exactly(mut stream: &UnixStream, mut to: &mut [u8], until: Instant) -> io::Result<()> {
    while !to.is_empty() {
        limit_reads(stream, until)?;
        match stream.read(to) {
            Ok(0) => return Err(closed()),
            Ok(n) => to = &mut to[n..],
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Limits the next read to the time `until`.
fn limit_reads(stream: &UnixStream, until: Instant) -> io::Result<()> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    // The kernel counts microseconds, and 0 is no limit.
    stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))
}

fn closed() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the server closed the connection")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(30)
    }

    fn pair(timeout_ms: u64) -> (Frontend, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (Frontend::new(ours, Duration::from_millis(timeout_ms)).unwrap(), theirs)
    }

    #[test]
    fn a_server_that_does_not_answer_is_given_up() {
        let (mut frontend, server) = pair(20);
        let error = frontend.call(FrontendReq::GET_FEATURES, &[], &[]).unwrap_err();
        assert!(
            matches!(error, FrontendError::Connection { request: FrontendReq::GET_FEATURES, .. }),
            "{error}"
        );
        let (request, flags, _) = read_message(&server, soon()).unwrap();
        assert_eq!((request, flags), (1, FLAG_VERSION));
        assert!(read_message(&server, soon()).is_err(), "the connection is shut down");
    }

    #[test]
    fn a_reply_to_another_request_is_not_taken() {
        let (mut frontend, server) = pair(1000);
        write_all(&server, &message(2, FLAG_VERSION | FLAG_REPLY, &[0; 8]), &[]).unwrap();
        let error = frontend.call(FrontendReq::GET_FEATURES, &[], &[]).unwrap_err();
        assert!(error.to_string().contains("a reply to request 2"), "{error}");
    }

    #[test]
    fn a_refusal_names_its_number() {
        let (mut frontend, server) = pair(1000);
        frontend.set_protocol(Protocol::REPLY_ACK);
        write_all(&server, &message(37, FLAG_VERSION | FLAG_REPLY, &22u64.to_le_bytes()), &[]).unwrap();
        let error = frontend.send(FrontendReq::ADD_MEM_REG, &[0; 40], &[]).unwrap_err();
        assert!(matches!(error, FrontendError::Refused { code: 22, .. }), "{error}");
    }

    #[test]
    fn a_descriptor_comes_with_its_reply() {
        let (mut frontend, server) = pair(1000);
        let bytes = message(31, FLAG_VERSION | FLAG_REPLY, &[7; 24]);
        write_all(&server, &bytes, &[server.as_raw_fd()]).unwrap();
        let reply = frontend.call(FrontendReq::GET_INFLIGHT_FD, &[0; 24], &[]).unwrap();
        assert!(reply.file.is_some() && reply.payload == [7; 24]);
    }

    #[test]
    fn a_server_that_sends_one_byte_at_a_time_gains_no_time() {
        let (mut frontend, server) = pair(60_000);
        frontend.set_end(Some(Instant::now() + Duration::from_millis(300)));
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let drip = std::thread::spawn(move || {
            let bytes = message(1, FLAG_VERSION | FLAG_REPLY, &[0; MAX_PAYLOAD]);
            for byte in bytes.chunks(1) {
                if write_all(&server, byte, &[]).is_err() {
                    break;
                }
                let _ = stopped.recv_timeout(Duration::from_millis(50));
            }
        });
        let start = Instant::now();
        assert!(frontend.call(FrontendReq::GET_FEATURES, &[], &[]).is_err());
        // All bytes take more than three minutes.
        assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
        drop((frontend, stop));
        drip.join().unwrap();
    }

    #[test]
    fn an_endless_payload_is_refused_before_it_is_read() {
        let (mut frontend, server) = pair(1000);
        let mut bytes = message(1, FLAG_VERSION | FLAG_REPLY, &[0; 8]);
        bytes[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        write_all(&server, &bytes, &[]).unwrap();
        assert!(frontend.call(FrontendReq::GET_FEATURES, &[], &[]).is_err());
    }
}
