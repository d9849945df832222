//! Receives requests: many per system call, with the data of long ones straight into its buffers.
//!
//! ```text
//!   one recvmsg(2):  [ rest of the expected data, to its request ][ next bytes, to the buffer ]
//! ```

use super::Wire;
use block::{Data, Segment};
use std::io;
use std::os::fd::BorrowedFd;
use tls::Came;

/// Size of the buffer: sixteen requests that write 4 KiB each. To copy them is cheaper than one
/// system call each.
const BUFFER_BYTES: usize = 66 << 10;
/// Shortest data that is received without a copy. Only the longest possible header may follow it in
/// the same call.
const LARGE_BYTES: usize = 16 << 10;
/// Largest request header of any protocol that uses this inbox.
const HEADER_BYTES: usize = 128;
/// Maximum number of segments of a request's memory: that of the longest request.
const MAX_SEGMENTS: usize = 64;

/// Received bytes that have not been consumed.
pub(crate) struct Inbox {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

/// The result of one receive call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Received {
    /// No data is available now.
    Nothing,
    /// Bytes received; `direct` of them went straight into the request's buffer.
    Bytes { direct: usize, is_drained: bool },
    /// The peer closed its sending side.
    End,
}

impl Inbox {
    /// Creates an inbox with bytes received during the handshake.
    ///
    /// # Panics
    /// When `early` is longer than the buffer.
    pub(crate) fn new(early: &[u8]) -> Inbox {
        let mut buffer = vec![0; BUFFER_BYTES].into_boxed_slice();
        buffer[..early.len()].copy_from_slice(early);
        Inbox { buffer, start: 0, end: early.len() }
    }

    /// The unconsumed bytes.
    #[inline]
    pub(crate) fn unread(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Marks the first `len` bytes of the buffer as consumed.
    #[inline]
    pub(crate) fn consume(&mut self, len: usize) {
        assert!(len <= self.end - self.start, "{len} bytes of {}", self.end - self.start);
        self.start += len;
    }

    /// Receives once: first into `due`, then into the buffer.
    ///
    /// # Errors
    /// An error of `recvmsg(2)` or TLS.
    pub(crate) fn receive(&mut self, wire: &Wire, due: Data<'_>) -> io::Result<Received> {
        // The rest is the start of a header, or empty.
        self.buffer.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        if let Some((mut tls, socket)) = wire.tls() {
            return self.unseal(&mut tls, socket, due);
        }
        let mut segments = [Segment { base: std::ptr::null_mut(), len: 0 }; MAX_SEGMENTS + 1];
        let mut count = 0;
        for (to, segment) in segments.iter_mut().zip(due.iter().take(MAX_SEGMENTS)) {
            *to = segment;
            count += 1;
        }
        let due_len: usize = segments[..count].iter().map(|segment| segment.len).sum();
        let is_large = due.len() >= LARGE_BYTES;
        let room = if is_large { HEADER_BYTES } else { self.buffer.len() - self.end };
        segments[count] = Segment { base: self.buffer[self.end..].as_mut_ptr(), len: room };
        // SAFETY: all zeroes is a valid message without anything.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        // A `Segment` is laid out as an iovec.
        message.msg_iov = segments.as_mut_ptr().cast();
        message.msg_iovlen = count + 1;
        loop {
            // SAFETY: the segments are memory that the caller lends for this call, and ours.
            let received = unsafe { libc::recvmsg(wire.fd(), &raw mut message, libc::MSG_DONTWAIT) };
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
    fn unseal(&mut self, tls: &mut tls::Wire, socket: BorrowedFd<'_>, due: Data<'_>) -> io::Result<Received> {
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

    #[test]
    fn data_goes_to_its_place_and_the_rest_into_the_buffer() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let wire = Wire::new(Arc::new(ours.into()), None);
        let mut inbox = Inbox::new(b"ear");
        assert_eq!(inbox.receive(&wire, Data::none()).unwrap(), Received::Nothing);
        theirs.write_all(b"ly").unwrap();
        let received = inbox.receive(&wire, Data::none()).unwrap();
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
        assert_eq!(inbox.receive(&wire, data).unwrap(), Received::Bytes { direct: 5, is_drained: true });
        assert_eq!((&memory, inbox.unread()), (b"ab\0cde", &b"yXYZ"[..]));
        drop(theirs);
        assert_eq!(inbox.receive(&wire, Data::none()).unwrap(), Received::End);
    }

    #[test]
    fn behind_long_data_only_the_next_header_is_taken() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let wire = Wire::new(Arc::new(ours.into()), None);
        let mut inbox = Inbox::new(&[]);
        let mut memory = vec![0u8; LARGE_BYTES];
        let segments = [Segment { base: memory.as_mut_ptr(), len: LARGE_BYTES }];
        // SAFETY: list and memory live to the end of the test.
        let data = unsafe { Data::new(&segments) };
        theirs.write_all(&vec![7; LARGE_BYTES + 1000]).unwrap();
        let received = inbox.receive(&wire, data).unwrap();
        assert_eq!(received, Received::Bytes { direct: LARGE_BYTES, is_drained: false });
        assert_eq!(inbox.unread(), [7; HEADER_BYTES]);
    }
}
