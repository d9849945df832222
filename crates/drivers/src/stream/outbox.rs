//! Sends own headers and the callers' memory, in order, with few system calls.
//!
//! Headers are adjacent in a ring, so that a run of requests without data is one piece.

use block::Segment;
use socket2::Socket;
use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;

/// Maximum segments of one system call: the kernel's limit.
const MAX_PIECES: usize = 1024;
/// Maximum bytes that TLS seals before the socket takes them.
const MAX_SEALED: usize = 128 << 10;

/// Bytes to be sent to the server, with headers of at most `H` bytes.
pub(crate) struct Outbox<const H: usize> {
    headers: Box<[[u8; H]]>,
    next: usize,
    /// The ends of headers that have not been sent completely.
    ends: VecDeque<u64>,
    pieces: VecDeque<Segment>,
    queued: u64,
    sent: u64,
}

impl<const H: usize> Outbox<H> {
    /// An outbox for at most `requests` unsent headers.
    pub(crate) fn new(requests: u32) -> Outbox<H> {
        Outbox {
            headers: vec![[0; H]; requests as usize + 1].into(),
            next: 0,
            ends: VecDeque::with_capacity(requests as usize + 1),
            pieces: VecDeque::with_capacity(2 * requests as usize),
            queued: 0,
            sent: 0,
        }
    }

    /// Whether there is room for `headers` more headers.
    #[inline]
    pub(crate) fn has_room(&self, headers: usize) -> bool {
        self.ends.len() + headers <= self.headers.len()
    }

    /// Adds a header, which `encode` writes; `encode` returns the header's length.
    #[inline]
    pub(crate) fn push_header(&mut self, encode: impl FnOnce(&mut [u8; H]) -> usize) {
        let header = &mut self.headers[self.next];
        let len = encode(header);
        let base = header.as_mut_ptr();
        self.next = (self.next + 1) % self.headers.len();
        self.push(Segment { base, len });
        self.ends.push_back(self.queued);
    }

    /// Adds memory, which must stay valid until [`Outbox::sent`] has passed it.
    #[inline]
    pub(crate) fn push(&mut self, piece: Segment) {
        self.queued += piece.len as u64;
        if let Some(last) = self.pieces.back_mut()
            && last.base.wrapping_add(last.len) == piece.base
        {
            last.len += piece.len;
            return;
        }
        self.pieces.push_back(piece);
    }

    /// Whether something waits to be sent.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Total bytes added: the position where the last addition ends.
    #[inline]
    pub(crate) fn queued(&self) -> u64 {
        self.queued
    }

    /// Total bytes that the kernel has taken.
    #[inline]
    pub(crate) fn sent(&self) -> u64 {
        self.sent
    }

    /// Sends as much as the socket takes now.
    ///
    /// # Errors
    /// An error of `sendmsg(2)`, except that the socket is full.
    pub(crate) fn send(&mut self, socket: RawFd) -> io::Result<()> {
        while !self.pieces.is_empty() {
            let (front, _) = self.pieces.as_slices();
            let count = front.len().min(MAX_PIECES);
            // SAFETY: all zeroes is a valid message without anything.
            let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
            // A `Segment` is laid out as an iovec.
            message.msg_iov = front.as_ptr().cast_mut().cast();
            message.msg_iovlen = count;
            let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
            // SAFETY: the segments are headers of ours that were not reused, and memory that is
            // valid until it was sent.
            let sent = unsafe { libc::sendmsg(socket, &raw const message, flags) };
            if sent < 0 {
                let error = io::Error::last_os_error();
                match error.kind() {
                    io::ErrorKind::Interrupted => continue,
                    io::ErrorKind::WouldBlock => return Ok(()),
                    _ => return Err(error),
                }
            }
            if !self.advance(sent as usize, count) {
                return Ok(());
            }
        }
        Ok(())
    }

    /// As [`Outbox::send`], through TLS. Sealed data was copied, so it counts as sent.
    #[cold]
    pub(super) fn send_sealed(&mut self, tls: &mut tls::Wire, socket: &Socket) -> io::Result<()> {
        loop {
            tls.send(socket)?;
            if tls.unsent() > 0 || self.pieces.is_empty() {
                return Ok(());
            }
            self.seal(tls)?;
        }
    }

    /// Seals the next bytes.
    fn seal(&mut self, tls: &mut tls::Wire) -> io::Result<()> {
        let (mut sealed, mut count) = (0, 0);
        for piece in &self.pieces {
            let piece_len = piece.len.min(MAX_SEALED - sealed);
            if piece_len == 0 {
                break;
            }
            for at in (0..piece_len).step_by(tls::RECORD) {
                let (len, from) = (tls::RECORD.min(piece_len - at), piece.base.wrapping_add(at).cast_const());
                // SAFETY: a header of ours that was not reused, or memory that is valid until it
                // was sent; `to` is ours.
                tls.say(len, |to| unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), len) })?;
            }
            sealed += piece_len;
            count += 1;
        }
        tls.seal()?;
        self.advance(sealed, count);
        Ok(())
    }

    /// Removes `sent` bytes from the first `count` segments. Returns whether that was all of them.
    fn advance(&mut self, mut sent: usize, count: usize) -> bool {
        self.sent += sent as u64;
        while self.ends.front().is_some_and(|end| *end <= self.sent) {
            self.ends.pop_front();
        }
        for _ in 0..count {
            let piece = self.pieces.front_mut().expect("the kernel took no more than these pieces");
            if sent < piece.len {
                piece.base = piece.base.wrapping_add(sent);
                piece.len -= sent;
                return false;
            }
            sent -= piece.len;
            self.pieces.pop_front();
        }
        true
    }

    /// Discards everything for a new connection.
    pub(crate) fn clear(&mut self) {
        self.pieces.clear();
        self.ends.clear();
        self.sent = self.queued;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    const HEADER: usize = 32;

    #[test]
    fn everything_arrives_in_order_through_a_socket_that_is_full_at_times() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut outbox = Outbox::<HEADER>::new(4);
        let mut payload: Vec<u8> = (0..3_000_000u32).map(|i| (i / 7) as u8).collect();
        for round in 0..2u8 {
            let mut expected = Vec::new();
            for i in 0..4u8 {
                outbox.push_header(|to| {
                    to[..28].fill(round * 4 + i);
                    28
                });
                expected.extend([round * 4 + i; 28]);
            }
            outbox.push(Segment { base: payload.as_mut_ptr(), len: 1_000_000 });
            outbox.push(Segment { base: payload[1_000_000..].as_mut_ptr(), len: 2_000_000 });
            expected.extend(&payload);
            outbox.send(ours.as_raw_fd()).unwrap();
            assert!(!outbox.is_empty(), "the socket took all at once");
            let (mut theirs, mut got) = (theirs.try_clone().unwrap(), vec![0; expected.len()]);
            let reader = std::thread::spawn(move || {
                theirs.read_exact(&mut got).unwrap();
                got
            });
            while !outbox.is_empty() {
                outbox.send(ours.as_raw_fd()).unwrap();
                std::thread::yield_now();
            }
            assert_eq!(outbox.sent(), outbox.queued());
            assert!(reader.join().unwrap() == expected);
        }
    }

    #[test]
    fn headers_side_by_side_are_one_piece() {
        let mut outbox = Outbox::<HEADER>::new(8);
        for _ in 0..8 {
            outbox.push_header(|_| HEADER);
        }
        assert_eq!(outbox.pieces.len(), 1);
        assert!(outbox.has_room(1) && !outbox.has_room(2));
        assert_eq!(outbox.queued(), 8 * HEADER as u64);
    }
}
