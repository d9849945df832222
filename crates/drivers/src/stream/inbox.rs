//! Receives replies: data straight into the caller's memory, everything else into a buffer that
//! holds many replies.
//!
//! ```text
//!   one recvmsg(2):  [ rest of the expected data, to the caller ][ the next bytes, to the buffer ]
//! ```

use block::{Data, Segment};
use socket2::Socket;
use std::io;
use std::os::fd::RawFd;
use tls::Came;

/// Size of the buffer: the replies to sixteen reads of 4 KiB. To copy them is cheaper than one
/// system call each.
const BUFFER_BYTES: usize = 68 << 10;
/// Shortest data that gets a system call of its own and must bypass the buffer.
const LARGE_BYTES: usize = 16 << 10;
/// Minimum free space after the start of a header.
const LEAST_ROOM: usize = 16;
/// Maximum segments of the caller's memory for one system call.
const MAX_PIECES: usize = 64;

/// Received bytes that have not been consumed.
pub(crate) struct Inbox {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// Bytes between long runs of data: the protocol's header.
    front_bytes: usize,
    /// Whether the last data was long, so the next may be, too.
    expects_large: bool,
}

/// The result of one receive call.
pub(crate) struct Received {
    /// Bytes that went straight into the caller's memory.
    pub(crate) direct: usize,
    /// Whether the socket is empty now.
    pub(crate) is_drained: bool,
}

impl Inbox {
    /// An empty inbox for a protocol with headers of `front_bytes`.
    pub(crate) fn new(front_bytes: usize) -> Inbox {
        let buffer = vec![0; BUFFER_BYTES].into();
        Inbox { buffer, start: 0, end: 0, front_bytes, expects_large: false }
    }

    /// Discards everything for a new connection.
    pub(crate) fn clear(&mut self) {
        (self.start, self.end, self.expects_large) = (0, 0, false);
    }

    /// The unconsumed bytes.
    #[inline]
    pub(crate) fn unread(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Marks the first `len` bytes as consumed.
    #[inline]
    pub(crate) fn consume(&mut self, len: usize) {
        assert!(len <= self.end - self.start, "{len} bytes of {}", self.end - self.start);
        self.start += len;
    }

    /// Sets the length of the next contiguous data.
    #[inline]
    pub(crate) fn expect(&mut self, len: usize) {
        self.expects_large = len >= LARGE_BYTES;
    }

    /// Receives once: first into `data`, then into the buffer. `Ok(None)`: no data is available.
    ///
    /// # Errors
    /// An error of `recvmsg(2)`; `UnexpectedEof` at the end of the stream.
    pub(crate) fn receive(&mut self, socket: RawFd, data: Data<'_>) -> io::Result<Option<Received>> {
        // The rest is the start of a header, or empty.
        self.buffer.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let mut pieces = [Segment { base: std::ptr::null_mut(), len: 0 }; MAX_PIECES + 1];
        let (mut count, mut direct_len) = (0, 0);
        for segment in data.iter().take(MAX_PIECES) {
            pieces[count] = segment;
            count += 1;
            direct_len += segment.len;
        }
        // An unusually long header must still fit completely.
        let most = self.front_bytes.max(self.end + LEAST_ROOM).min(self.buffer.len());
        let mut room = if self.expects_large { most } else { self.buffer.len() } - self.end;
        if direct_len < data.len() {
            room = 0;
        } else {
            pieces[count] = Segment { base: self.buffer[self.end..].as_mut_ptr(), len: room };
            count += 1;
        }
        // SAFETY: all zeroes is a valid message without anything.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = pieces.as_mut_ptr().cast();
        message.msg_iovlen = count;
        let received = loop {
            // SAFETY: the segments are the caller's memory, valid until its request ends, and ours.
            let received = unsafe { libc::recvmsg(socket, &raw mut message, libc::MSG_DONTWAIT) };
            if received > 0 {
                break received as usize;
            }
            if received == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let error = io::Error::last_os_error();
            match error.kind() {
                io::ErrorKind::Interrupted => {}
                io::ErrorKind::WouldBlock => return Ok(None),
                _ => return Err(error),
            }
        };
        let direct = received.min(direct_len);
        self.end += received - direct;
        Ok(Some(Received { direct, is_drained: received < direct_len + room }))
    }

    /// As [`Inbox::receive`], through TLS. All data is copied, so the buffer receives as much as it
    /// has room for.
    #[cold]
    pub(super) fn unseal(
        &mut self,
        tls: &mut tls::Wire,
        socket: &Socket,
        data: Data<'_>,
    ) -> io::Result<Option<Received>> {
        self.buffer.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let (data_len, mut direct) = (data.len(), 0);
        let room = data_len + self.buffer.len() - self.end;
        let came = tls.receive(socket, room, |bytes| {
            let (first, rest) = bytes.split_at(bytes.len().min(data_len - direct));
            direct += data.part(direct, first.len()).copy_from(first);
            self.buffer[self.end..][..rest.len()].copy_from_slice(rest);
            self.end += rest.len();
        })?;
        match came {
            Came::Bytes { is_drained, .. } => Ok(Some(Received { direct, is_drained })),
            Came::Nothing => Ok(None),
            Came::End => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    const FRONT: usize = 40;

    #[test]
    fn data_goes_to_its_place_and_the_rest_into_the_buffer() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let socket = ours.as_raw_fd();
        let mut inbox = Inbox::new(FRONT);
        assert!(inbox.receive(socket, Data::none()).unwrap().is_none());
        theirs.write_all(b"head").unwrap();
        let received = inbox.receive(socket, Data::none()).unwrap().unwrap();
        assert!((received.direct, received.is_drained) == (0, true) && inbox.unread() == b"head");
        inbox.consume(3);
        theirs.write_all(b"abcdeXYZ").unwrap();
        let mut memory = [0u8; 6];
        let segments = [
            Segment { base: memory.as_mut_ptr(), len: 2 },
            Segment { base: memory[3..].as_mut_ptr(), len: 3 },
        ];
        // SAFETY: list and memory live to the end of the test.
        let data = unsafe { Data::new(&segments) };
        assert_eq!(inbox.receive(socket, data).unwrap().unwrap().direct, 5);
        assert_eq!((&memory, inbox.unread()), (b"ab\0cde", &b"dXYZ"[..]));
        drop(theirs);
        inbox.consume(4);
        let error = inbox.receive(socket, Data::none()).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn behind_long_data_only_the_next_front_is_taken() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut inbox = Inbox::new(FRONT);
        inbox.expect(LARGE_BYTES);
        theirs.write_all(&[7; 1000]).unwrap();
        let mut memory = [0u8; 500];
        let segments = [Segment { base: memory.as_mut_ptr(), len: 500 }];
        // SAFETY: list and memory live to the end of the test.
        let data = unsafe { Data::new(&segments) };
        let received = inbox.receive(ours.as_raw_fd(), data).unwrap().unwrap();
        assert_eq!((received.direct, received.is_drained, inbox.unread().len()), (500, false, FRONT));
    }
}
