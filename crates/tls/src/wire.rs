//! A session and the buffers between it and a socket that does not block.
//!
//! ```text
//!   recv(2) ─► ciphertext ─► Session ─► a record in the clear ─► the caller, as far as it has room
//!   send(2) ◄─ unsent ◄───── Session ◄─ a record's worth of pieces ◄─ the caller
//! ```
//!
//! Received bytes are handed over before the socket is read again. A silent socket never hides
//! bytes that have arrived, provided that the caller receives until [`Came::Nothing`].

use crate::{Came, Plain, RECORD, Session};
use socket2::{SockRef, Socket};
use std::io::{self, Read};
use std::os::fd::AsFd;

/// Most ciphertext bytes received at once: four records and their framing.
const RECEIVED: usize = 66 << 10;

/// TLS over a socket.
pub struct Wire {
    session: Session,
    ciphertext: Box<[u8]>,
    plain: Box<[u8]>,
    /// Start of the bytes of `plain` that are not handed over yet; they end at `end`.
    start: usize,
    end: usize,
    /// Set unless the last receive showed that nothing more is available.
    has_more: bool,
    staged: Vec<u8>,
    /// Error that arrived with bytes which were handed over first.
    failed: Option<io::Error>,
}

impl Wire {
    /// Takes a session whose handshake is over.
    pub fn new(session: Session) -> Wire {
        Wire {
            session,
            ciphertext: vec![0; RECEIVED].into(),
            plain: vec![0; RECORD].into(),
            start: 0,
            end: 0,
            has_more: true,
            staged: Vec::with_capacity(RECORD),
            failed: None,
        }
    }

    /// Receives at most `room` bytes, which `put` takes in order.
    ///
    /// # Errors
    /// Errors of recv(2), and [`crate::SessionError`]. Bytes before the error are handed over
    /// first.
    pub fn receive(&mut self, socket: impl AsFd, room: usize, put: impl FnMut(&[u8])) -> io::Result<Came> {
        let came = self.take(socket, room, put);
        self.has_more = !matches!(came, Ok(Came::Nothing | Came::Bytes { is_drained: true, .. }));
        came
    }

    /// Returns whether [`Wire::receive`] may bring bytes although the socket has none.
    pub fn has_more(&self) -> bool {
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
    /// with later bytes, or by [`Wire::seal`].
    ///
    /// # Errors
    /// The session has ended.
    ///
    /// # Panics
    /// When `len` exceeds [`RECORD`].
    pub fn say(&mut self, len: usize, fill: impl FnOnce(&mut [u8])) -> io::Result<()> {
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
    pub fn seal(&mut self) -> io::Result<()> {
        self.session.write(&self.staged)?;
        self.staged.clear();
        Ok(())
    }

    /// See [`Session::agreed`].
    pub fn agreed(&self) -> String {
        self.session.agreed()
    }

    /// Returns the number of bytes that are sealed and not sent.
    pub fn unsent(&self) -> usize {
        self.session.unsent().len()
    }

    /// Sends sealed bytes, as many as the socket takes; returns their number.
    ///
    /// # Errors
    /// Errors of send(2), except `EAGAIN`.
    pub fn send(&mut self, socket: impl AsFd) -> io::Result<usize> {
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

    /// Sends the close notification as far as the socket takes it: the connection ends in any case.
    pub fn close(&mut self, socket: impl AsFd) {
        self.session.close();
        let _ = self.send(socket);
    }
}
