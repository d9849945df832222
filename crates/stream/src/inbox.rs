//! Receives requests or replies: many per system call, with long data straight into its memory.
//!
//! ```text
//!   one recvmsg(2):  [ rest of the expected data, to its request ][ next bytes, to the buffer ]
//! ```

use crate::Wire;
use crate::tls_buffers::{Came, TlsBuffers};
use block::{Data, Segment};
use std::io;
use std::os::fd::{OwnedFd, RawFd};

/// Size of the buffer: sixteen requests or replies with 4 KiB of data each, and their headers. To
/// copy them is cheaper than one system call each.
pub const BUFFER_BYTES: usize = 66 << 10;
/// Shortest data that is received without a copy. Only the next header may follow it in the same
/// call.
const LARGE_BYTES: usize = 16 << 10;
/// Minimum room after the start of a header.
const LEAST_ROOM: usize = 16;
/// Maximum segments of a request's memory for one system call.
const MAX_SEGMENTS: usize = 64;

/// Received bytes that have not been consumed.
pub struct Inbox {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// Bytes to receive between long runs of data.
    header_bytes: usize,
    /// Whether the last data was long, so the next may be, too.
    expects_large: bool,
}

/// The result of one receive call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// No data is available now.
    Nothing,
    /// Bytes.
    Bytes {
        /// Bytes that went straight into the request's memory.
        direct: usize,
        /// Whether these were all that the socket has.
        is_drained: bool,
    },
    /// The peer closed its sending side.
    End,
}

impl Inbox {
    /// An inbox for a protocol with headers of at most `header_bytes`; `early` was received during
    /// the handshake.
    ///
    /// # Panics
    /// When `early` is longer than the buffer.
    pub fn new(header_bytes: usize, early: &[u8]) -> Inbox {
        let mut buffer = vec![0; BUFFER_BYTES].into_boxed_slice();
        buffer[..early.len()].copy_from_slice(early);
        Inbox { buffer, start: 0, end: early.len(), header_bytes, expects_large: false }
    }

    /// Discards everything for a new connection.
    pub fn clear(&mut self) {
        (self.start, self.end, self.expects_large) = (0, 0, false);
    }

    /// The unconsumed bytes.
    #[inline]
    pub fn unread(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Marks the first `len` bytes of the buffer as consumed.
    #[inline]
    pub fn consume(&mut self, len: usize) {
        assert!(len <= self.end - self.start, "{len} bytes of {}", self.end - self.start);
        self.start += len;
    }

    /// Announces contiguous data of `len` bytes. After long data the inbox receives only a header,
    /// because data that is as long may follow.
    #[inline]
    pub fn expect(&mut self, len: usize) {
        self.expects_large = len >= LARGE_BYTES;
    }

    /// Receives once: first into `due`, then into the buffer.
    ///
    /// # Errors
    /// An error of `recvmsg(2)` or TLS.
    pub fn receive(&mut self, wire: &mut Wire, due: Data<'_>) -> io::Result<Received> {
        // The rest is the start of a header, or empty.
        self.buffer.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        match wire.tls() {
            None => self.receive_plain(wire.fd(), due),
            Some((tls, socket)) => self.unseal(tls, socket, due),
        }
    }

    fn receive_plain(&mut self, socket: RawFd, due: Data<'_>) -> io::Result<Received> {
        let mut segments = [Segment { base: std::ptr::null_mut(), len: 0 }; MAX_SEGMENTS + 1];
        let (mut count, mut due_len) = (0, 0);
        for segment in due.iter().take(MAX_SEGMENTS) {
            segments[count] = segment;
            count += 1;
            due_len += segment.len;
        }
        let mut room = self.buffer.len() - self.end;
        if self.expects_large || due.len() >= LARGE_BYTES {
            // An unusually long header must still fit completely.
            room = room.min(self.header_bytes.max(self.end + LEAST_ROOM) - self.end);
        }
        if due_len < due.len() {
            // The next bytes belong to segments that this call leaves out.
            room = 0;
        } else {
            segments[count] = Segment { base: self.buffer[self.end..].as_mut_ptr(), len: room };
            count += 1;
        }
        // SAFETY: all zeroes is a valid message without anything.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        // A `Segment` is laid out as an iovec.
        message.msg_iov = segments.as_mut_ptr().cast();
        message.msg_iovlen = count;
        loop {
            // SAFETY: the segments are memory that the caller lends for this call, and ours.
            let received = unsafe { libc::recvmsg(socket, &raw mut message, libc::MSG_DONTWAIT) };
            if received > 0 {
                let received = received as usize;
                let direct = received.min(due_len);
                self.end += received - direct;
                return Ok(Received::Bytes { direct, is_drained: received < due_len + room });
            }
            if received == 0 {
                return Ok(Received::End);
            }
            let error = io::Error::last_os_error();
            match error.kind() {
                io::ErrorKind::Interrupted => {}
                io::ErrorKind::WouldBlock => return Ok(Received::Nothing),
                _ => return Err(error),
            }
        }
    }

    /// As [`Inbox::receive`], through TLS. All data is copied, so the buffer receives as much as it
    /// has room for.
    #[cold]
    fn unseal(&mut self, tls: &mut TlsBuffers, socket: &OwnedFd, due: Data<'_>) -> io::Result<Received> {
        let (due_len, mut direct) = (due.len(), 0);
        let room = due_len + self.buffer.len() - self.end;
        let came = tls.receive(socket, room, |bytes| {
            let (first, rest) = bytes.split_at(bytes.len().min(due_len - direct));
            direct += due.part(direct, first.len()).copy_from(first);
            self.buffer[self.end..][..rest.len()].copy_from_slice(rest);
            self.end += rest.len();
        })?;
        Ok(match came {
            Came::Bytes { is_drained, .. } => Received::Bytes { direct, is_drained },
            Came::Nothing => Received::Nothing,
            Came::End => Received::End,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    const HEADER: usize = 40;

    fn pair() -> (Wire, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (Wire::new(Arc::new(ours.into()), None), theirs)
    }

    fn segment(memory: &mut [u8]) -> Segment {
        Segment { base: memory.as_mut_ptr(), len: memory.len() }
    }

    #[test]
    fn data_goes_to_its_place_and_the_rest_into_the_buffer() {
        let (mut wire, mut theirs) = pair();
        let mut inbox = Inbox::new(HEADER, b"ear");
        assert_eq!(inbox.receive(&mut wire, Data::none()).unwrap(), Received::Nothing);
        theirs.write_all(b"ly").unwrap();
        let received = inbox.receive(&mut wire, Data::none()).unwrap();
        assert_eq!(received, Received::Bytes { direct: 0, is_drained: true });
        assert_eq!(inbox.unread(), b"early");
        inbox.consume(4);
        theirs.write_all(b"abcdeXYZ").unwrap();
        let mut memory = [0u8; 6];
        let segments = [
            Segment { base: memory.as_mut_ptr(), len: 2 },
            Segment { base: memory[3..].as_mut_ptr(), len: 3 },
        ];
        // SAFETY: list and memory live to the end of the test.
        let data = unsafe { Data::new(&segments) };
        assert_eq!(inbox.receive(&mut wire, data).unwrap(), Received::Bytes { direct: 5, is_drained: true });
        assert_eq!((&memory, inbox.unread()), (b"ab\0cde", &b"yXYZ"[..]));
        drop(theirs);
        assert_eq!(inbox.receive(&mut wire, Data::none()).unwrap(), Received::End);
    }

    #[test]
    fn behind_long_data_only_the_next_header_is_taken() {
        let (mut wire, mut theirs) = pair();
        let mut inbox = Inbox::new(HEADER, &[]);
        let mut memory = vec![0u8; LARGE_BYTES];
        let segments = [segment(&mut memory)];
        // SAFETY: list and memory live to the end of the test.
        let data = unsafe { Data::new(&segments) };
        theirs.write_all(&vec![7; LARGE_BYTES + 1000]).unwrap();
        let received = inbox.receive(&mut wire, data).unwrap();
        assert_eq!(received, Received::Bytes { direct: LARGE_BYTES, is_drained: false });
        assert_eq!(inbox.unread(), [7; HEADER]);
    }

    #[test]
    fn behind_the_end_of_announced_long_data_only_the_next_header_is_taken() {
        let (mut wire, mut theirs) = pair();
        let mut inbox = Inbox::new(HEADER, &[]);
        inbox.expect(LARGE_BYTES);
        theirs.write_all(&[7; 1000]).unwrap();
        let mut memory = [0u8; 500];
        let segments = [segment(&mut memory)];
        // SAFETY: list and memory live to the end of the test.
        let data = unsafe { Data::new(&segments) };
        let received = inbox.receive(&mut wire, data).unwrap();
        assert_eq!(received, Received::Bytes { direct: 500, is_drained: false });
        assert_eq!(inbox.unread().len(), HEADER);
        // A header that is longer than the protocol's is received in parts.
        inbox.receive(&mut wire, Data::none()).unwrap();
        assert_eq!(inbox.unread().len(), HEADER + LEAST_ROOM);
    }

    #[test]
    fn data_in_more_segments_than_one_call_takes_is_not_mixed_with_what_follows() {
        let (mut wire, mut theirs) = pair();
        let mut inbox = Inbox::new(HEADER, &[]);
        let mut memory = [0u8; MAX_SEGMENTS + 2];
        let segments: Vec<Segment> = memory.chunks_mut(1).map(segment).collect();
        // SAFETY: list and memory live to the end of the test.
        let data = unsafe { Data::new(&segments) };
        theirs.write_all(&[7; MAX_SEGMENTS + 2]).unwrap();
        theirs.write_all(b"next").unwrap();
        let received = inbox.receive(&mut wire, data).unwrap();
        assert_eq!(received, Received::Bytes { direct: MAX_SEGMENTS, is_drained: false });
        assert!(inbox.unread().is_empty());
        let received = inbox.receive(&mut wire, data.part(MAX_SEGMENTS, 2)).unwrap();
        assert_eq!(received, Received::Bytes { direct: 2, is_drained: true });
        assert_eq!((memory, inbox.unread()), ([7; MAX_SEGMENTS + 2], &b"next"[..]));
    }
}
