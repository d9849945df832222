//! A TLS session and the buffers between it and a socket that does not block.
//!
//! ```text
//!   recv(2) ─► ciphertext ─► Session ─► a record in the clear ─► the caller, as far as it has room
//!   send(2) ◄─ unsent ◄───── Session ◄─ a record's worth of pieces ◄─ the caller
//! ```
//!
//! Received bytes are handed over before the socket is read again. A silent socket never hides
//! bytes that have arrived, provided that the caller receives until [`Came::Nothing`].

use crate::send_queue::SendQueue;
use socket2::{SockRef, Socket};
use std::io::{self, Read};
use std::os::fd::AsFd;
use tls::{Plain, RECORD, Session};

/// Most ciphertext bytes received at once: four records and their framing.
const RECEIVED: usize = 66 << 10;
/// Maximum bytes that are sealed before the socket takes them: the memory that a peer that does not
/// read can hold.
const MAX_SEALED: usize = 128 << 10;

/// Result of [`TlsBuffers::receive`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Came {
    /// Bytes; `is_drained` is set when neither the session nor the socket has more.
    Bytes { len: usize, is_drained: bool },
    /// Nothing now; more may follow when the socket is readable.
    Nothing,
    /// The peer sent a close notification.
    End,
}

/// TLS over a socket.
pub(crate) struct TlsBuffers {
    session: Session,
    ciphertext: Box<[u8]>,
    plain: Box<[u8]>,
    /// Start of the bytes of `plain` that are not handed over yet; they end at `end`.
    start: usize,
    end: usize,
    /// Set unless the last receive showed that nothing more is available.
    has_more: bool,
    staged: Vec<u8>,
    /// Bytes of a [`SendQueue`] in records that the socket has not taken completely.
    sealed: usize,
    /// Error that arrived with bytes which were handed over first.
    failed: Option<io::Error>,
}

impl TlsBuffers {
    /// Takes a session whose handshake is over.
    pub(crate) fn new(session: Session) -> TlsBuffers {
        TlsBuffers {
            session,
            ciphertext: vec![0; RECEIVED].into(),
            plain: vec![0; RECORD].into(),
            start: 0,
            end: 0,
            has_more: true,
            staged: Vec::with_capacity(RECORD),
            sealed: 0,
            failed: None,
        }
    }

    /// Receives at most `room` bytes, which `put` takes in order.
    ///
    /// # Errors
    /// Errors of recv(2), and [`tls::SessionError`]. Bytes before the error are handed over
    /// first.
    pub(crate) fn receive(
        &mut self,
        socket: impl AsFd,
        room: usize,
        put: impl FnMut(&[u8]),
    ) -> io::Result<Came> {
        let came = self.take(socket, room, put);
        self.has_more = !matches!(came, Ok(Came::Nothing | Came::Bytes { is_drained: true, .. }));
        came
    }

    /// Returns whether [`TlsBuffers::receive`] may bring bytes although the socket has none.
    pub(crate) fn has_more(&self) -> bool {
        self.has_more
    }

    fn take(&mut self, socket: impl AsFd, room: usize, mut put: impl FnMut(&[u8])) -> io::Result<Came> {
        let socket = SockRef::from(&socket);
        let (mut len, mut is_drained) = (0, false);
        let end = loop {
            let ready = (self.end - self.start).min(room - len);
            if ready > 0 {
                put(&self.plain[self.start..self.start + ready]);
                self.start += ready;
                len += ready;
            }
            if len == room {
                return Ok(Came::Bytes { len, is_drained: false });
            }
            if let Some(error) = self.failed.take() {
                break Err(error);
            }
            match self.session.read(&mut self.plain) {
                Ok(Plain::Bytes(len)) => (self.start, self.end) = (0, len),
                Ok(Plain::End) => break Ok(Came::End),
                Ok(Plain::Nothing) if is_drained => break Ok(Came::Nothing),
                Ok(Plain::Nothing) => match self.fetch(&socket) {
                    Ok(is_all) => is_drained = is_all,
                    Err(error) => break Err(error),
                },
                Err(error) => break Err(error.into()),
            }
        };
        if len == 0 {
            return end;
        }
        is_drained &= end.is_ok();
        self.failed = end.err();
        Ok(Came::Bytes { len, is_drained })
    }

    /// Reads ciphertext from the socket; returns whether the socket has no more.
    fn fetch(&mut self, mut socket: &Socket) -> io::Result<bool> {
        loop {
            match socket.read(&mut self.ciphertext) {
                Ok(0) => {
                    self.session.feed_end();
                    return Ok(false);
                }
                Ok(len) => {
                    self.session.feed(&self.ciphertext[..len]);
                    return Ok(len < self.ciphertext.len());
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Queues `len` bytes that `fill` writes, at most [`RECORD`]. They go into a record together
    /// with later bytes, or by [`TlsBuffers::seal`].
    ///
    /// # Errors
    /// The session has ended.
    ///
    /// # Panics
    /// When `len` exceeds [`RECORD`].
    pub(crate) fn say(&mut self, len: usize, fill: impl FnOnce(&mut [u8])) -> io::Result<()> {
        assert!(len <= RECORD, "{len} bytes for a record");
        if self.staged.len() + len > RECORD {
            self.seal()?;
        }
        let at = self.staged.len();
        self.staged.resize(at + len, 0);
        fill(&mut self.staged[at..]);
        Ok(())
    }

    /// Makes a record of the queued bytes.
    ///
    /// # Errors
    /// The session has ended.
    pub(crate) fn seal(&mut self) -> io::Result<()> {
        self.session.write(&self.staged)?;
        self.staged.clear();
        Ok(())
    }

    /// As [`Session::agreed`].
    pub(crate) fn agreed(&self) -> String {
        self.session.agreed()
    }

    /// Returns the number of bytes that are sealed and not sent.
    pub(crate) fn unsent(&self) -> usize {
        self.session.unsent().len()
    }

    /// Sends sealed bytes, as many as the socket takes; returns their number.
    ///
    /// # Errors
    /// Errors of send(2), except `EAGAIN`.
    pub(crate) fn send(&mut self, socket: impl AsFd) -> io::Result<usize> {
        let socket = SockRef::from(&socket);
        let mut sent = 0;
        while self.unsent() > 0 {
            match socket.send_with_flags(self.session.unsent(), libc::MSG_NOSIGNAL) {
                Ok(len) => {
                    self.session.sent(len);
                    sent += len;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(sent)
    }

    /// As [`crate::Wire::send`]; adds the bytes that the socket takes to `total`.
    ///
    /// # Errors
    /// Errors of send(2), except `EAGAIN`; the session has ended.
    #[cold]
    pub(crate) fn send_queue(
        &mut self,
        socket: impl AsFd,
        queue: &mut impl SendQueue,
        total: &mut u64,
    ) -> io::Result<()> {
        loop {
            *total += self.send(&socket)? as u64;
            if self.unsent() > 0 {
                return Ok(());
            }
            queue.advance(std::mem::take(&mut self.sealed));
            if !self.seal_next(queue)? {
                return Ok(());
            }
        }
    }

    /// Seals the next bytes of `queue`, if it has any.
    fn seal_next(&mut self, queue: &mut impl SendQueue) -> io::Result<bool> {
        for segment in queue.segments() {
            let segment_len = segment.len.min(MAX_SEALED - self.sealed);
            for at in (0..segment_len).step_by(RECORD) {
                let (len, from) = (RECORD.min(segment_len - at), segment.base.wrapping_add(at).cast_const());
                // SAFETY: the segment can be read, by the contract of `SendQueue`; `to` is ours.
                self.say(len, |to| unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), len) })?;
            }
            self.sealed += segment_len;
        }
        if self.sealed > 0 {
            self.seal()?;
        }
        Ok(self.sealed > 0)
    }

    /// Sends the close notification as far as the socket takes it: the connection ends in any case.
    pub(crate) fn close(&mut self, socket: impl AsFd) {
        self.session.close();
        let _ = self.send(socket);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::Segment;
    use std::io::{ErrorKind, Write};
    use std::os::unix::net::UnixStream;
    use tempfile::TempDir;
    use tls::authority::write_all;
    use tls::{Client, Server};

    fn pair() -> [(TlsBuffers, UnixStream); 2] {
        let files = TempDir::new().unwrap();
        write_all(files.path());
        let mut client = Client::with_certificates(files.path()).unwrap().session("localhost").unwrap();
        let server = Server::with_certificates(files.path(), false).unwrap();
        let mut server = server.session().unwrap();
        while !(client.handshake().unwrap() & server.handshake().unwrap()) || !client.unsent().is_empty() {
            server.feed(client.unsent());
            client.sent(client.unsent().len());
            server.handshake().unwrap();
            client.feed(server.unsent());
            server.sent(server.unsent().len());
        }
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        theirs.set_nonblocking(true).unwrap();
        [(TlsBuffers::new(client), ours), (TlsBuffers::new(server), theirs)]
    }

    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|at| (at / 7 + at / 1000) as u8).collect()
    }

    fn say(wire: &mut TlsBuffers, bytes: &[u8]) {
        for part in bytes.chunks(RECORD) {
            wire.say(part.len(), |to| to.copy_from_slice(part)).unwrap();
        }
        wire.seal().unwrap();
    }

    #[test]
    fn everything_arrives_in_order_however_little_room_there_is() {
        let [(mut ours, out), (mut theirs, back)] = pair();
        let expected = bytes(3_000_000);
        say(&mut ours, &expected);
        let (mut got, mut rooms, mut full) = (Vec::new(), [1, 100, 5000, 70_000, 300_000].iter().cycle(), 0);
        while got.len() < expected.len() {
            ours.send(&out).unwrap();
            full += u32::from(ours.unsent() > 0);
            let room = *rooms.next().unwrap();
            if let Came::Bytes { len, .. } =
                theirs.receive(&back, room, |bytes| got.extend_from_slice(bytes)).unwrap()
            {
                assert!(len <= room);
            }
        }
        assert!(full > 1 && got == expected);
        assert_eq!(theirs.receive(&back, 10, |_| panic!("nothing")).unwrap(), Came::Nothing);
    }

    #[test]
    fn decrypted_bytes_that_wait_are_not_taken_for_nothing() {
        let [(mut ours, out), (mut theirs, back)] = pair();
        say(&mut ours, &bytes(1000));
        ours.send(&out).unwrap();
        let mut receive = |room| theirs.receive(&back, room, |_| {}).unwrap();
        assert_eq!(receive(999), Came::Bytes { len: 999, is_drained: false });
        assert_eq!(receive(999), Came::Bytes { len: 1, is_drained: true });
        assert_eq!(receive(999), Came::Nothing);
        assert!(!theirs.has_more());
        say(&mut ours, &bytes(1000));
        ours.send(&out).unwrap();
        theirs.receive(&back, 10, |_| {}).unwrap();
        assert!(theirs.has_more());
    }

    #[test]
    fn bytes_before_the_end_are_handed_over_first() {
        for says_goodbye in [true, false] {
            let [(mut ours, out), (mut theirs, back)] = pair();
            say(&mut ours, b"last words");
            ours.send(&out).unwrap();
            if says_goodbye {
                ours.close(&out);
            }
            drop(out);
            let mut got = Vec::new();
            let came = theirs.receive(&back, 100, |bytes| got.extend_from_slice(bytes)).unwrap();
            assert!(matches!(came, Came::Bytes { len: 10, .. }) && got == b"last words", "{came:?} {got:?}");
            let end = theirs.receive(&back, 100, |_| {});
            match says_goodbye {
                true => assert_eq!(end.unwrap(), Came::End),
                false => assert_eq!(end.unwrap_err().kind(), ErrorKind::ConnectionAborted),
            }
        }
    }

    #[test]
    fn bytes_that_are_no_tls_end_it() {
        let [(_, mut out), (mut theirs, back)] = pair();
        out.write_all(b"something in the clear").unwrap();
        let error = theirs.receive(&back, 100, |_| {}).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
    }

    struct Bytes {
        bytes: Vec<u8>,
        gone: usize,
        segments: [Segment; 2],
    }

    // SAFETY: the segments are parts of the bytes.
    unsafe impl SendQueue for Bytes {
        fn segments(&mut self) -> &[Segment] {
            let rest = &mut self.bytes[self.gone..];
            let (first, second) = rest.split_at_mut(rest.len() / 3);
            self.segments = [first, second].map(|part| Segment { base: part.as_mut_ptr(), len: part.len() });
            &self.segments
        }

        fn advance(&mut self, len: usize) {
            self.gone += len;
        }
    }

    #[test]
    fn bytes_of_a_queue_leave_it_when_the_socket_has_their_records() {
        let [(mut ours, out), (mut theirs, back)] = pair();
        let expected = bytes(3_000_000);
        let none = Segment { base: std::ptr::null_mut(), len: 0 };
        let mut queue = Bytes { bytes: expected.clone(), gone: 0, segments: [none; 2] };
        let (mut got, mut taken, mut full) = (Vec::new(), 0, 0);
        while got.len() < expected.len() {
            ours.send_queue(&out, &mut queue, &mut taken).unwrap();
            if ours.unsent() > 0 {
                full += 1;
                assert!(queue.gone < expected.len() && taken as usize > queue.gone);
            }
            theirs.receive(&back, 70_000, |bytes| got.extend_from_slice(bytes)).unwrap();
            assert!(got.len() <= queue.gone + MAX_SEALED);
        }
        ours.send_queue(&out, &mut queue, &mut taken).unwrap();
        assert!(full > 1 && got == expected && queue.gone == expected.len());
    }
}
