//! Sends replies in order, with few system calls and without copying their data.

use super::{Memory, Wire};
use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;

/// Maximum segments of one system call: the kernel's limit.
const MAX_SEGMENTS: usize = 1024;
/// Maximum bytes that TLS seals before the socket takes them: the memory that a client that does
/// not read can hold.
const MAX_SEALED: usize = 128 << 10;
/// Longest header of a reply.
pub(crate) const MAX_FRONT: usize = 120;

/// A reply or a part of it: a header, and data that may follow it.
pub(crate) struct ReplyPart {
    front: [u8; MAX_FRONT],
    front_len: u8,
    /// The data, all of which is sent.
    pub(crate) data: Option<Memory>,
    /// Whether the request ends with this part.
    pub(crate) is_last: bool,
}

impl ReplyPart {
    /// A complete reply, or its last part; otherwise as [`ReplyPart::new`].
    #[inline]
    pub(crate) fn last(
        data: Option<Memory>,
        encode: impl FnOnce(&mut [u8; MAX_FRONT]) -> usize,
    ) -> ReplyPart {
        ReplyPart { is_last: true, ..ReplyPart::new(data, encode) }
    }

    /// A part after which the request continues. `encode` writes its header and returns the
    /// header's length.
    #[inline]
    pub(crate) fn new(data: Option<Memory>, encode: impl FnOnce(&mut [u8; MAX_FRONT]) -> usize) -> ReplyPart {
        let mut front = [0; MAX_FRONT];
        let len = encode(&mut front);
        assert!(len <= MAX_FRONT, "a front of {len} bytes");
        ReplyPart { front, front_len: len as u8, data, is_last: false }
    }

    fn len(&self) -> usize {
        usize::from(self.front_len) + self.data.as_ref().map_or(0, Memory::len)
    }
}

/// Replies that wait to be sent.
#[derive(Default)]
pub(crate) struct Outbox {
    replies: VecDeque<ReplyPart>,
    /// Bytes of the first reply that the kernel has taken.
    sent_of_first: usize,
    /// Bytes beyond those that TLS has sealed and the kernel has not taken completely.
    sealed: usize,
    /// Total bytes that the kernel has taken.
    sent: u64,
    segments: Vec<libc::iovec>,
}

impl Outbox {
    /// Adds a reply.
    #[inline]
    pub(crate) fn push(&mut self, reply: ReplyPart) {
        self.replies.push_back(reply);
    }

    /// Whether no reply waits.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.replies.is_empty()
    }

    /// Total bytes that the kernel has taken.
    pub(crate) fn sent(&self) -> u64 {
        self.sent
    }

    /// Sends as much as the socket takes now, and passes each completely sent reply to `done`.
    ///
    /// # Errors
    /// An error of `sendmsg(2)`, except that the socket is full.
    pub(crate) fn send(&mut self, wire: &Wire, mut done: impl FnMut(ReplyPart)) -> io::Result<()> {
        if let Some((mut tls, socket)) = wire.tls() {
            return self.send_sealed(&mut tls, socket, done);
        }
        while !self.replies.is_empty() {
            let offered = self.gather();
            // SAFETY: all zeroes is a valid message without anything.
            let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
            message.msg_iov = self.segments.as_mut_ptr();
            message.msg_iovlen = self.segments.len();
            let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
            // SAFETY: the segments are fronts and data of replies that we own, and none is added
            // meanwhile.
            let sent = unsafe { libc::sendmsg(wire.fd(), &raw const message, flags) };
            if sent < 0 {
                let error = io::Error::last_os_error();
                match error.kind() {
                    io::ErrorKind::Interrupted => continue,
                    io::ErrorKind::WouldBlock => return Ok(()),
                    _ => return Err(error),
                }
            }
            self.sent += sent as u64;
            self.advance(sent as usize, &mut done);
            if (sent as usize) < offered {
                return Ok(());
            }
        }
        Ok(())
    }

    /// As [`Outbox::send`], through TLS. A reply is sent once the kernel has all of its sealed
    /// bytes.
    #[cold]
    fn send_sealed(
        &mut self,
        tls: &mut tls::Wire,
        socket: BorrowedFd<'_>,
        mut done: impl FnMut(ReplyPart),
    ) -> io::Result<()> {
        loop {
            self.sent += tls.send(socket)? as u64;
            if tls.unsent() > 0 {
                return Ok(());
            }
            let sealed = std::mem::take(&mut self.sealed);
            self.advance(sealed, &mut done);
            if self.replies.is_empty() {
                return Ok(());
            }
            self.seal(tls)?;
        }
    }

    /// Seals the next bytes.
    fn seal(&mut self, tls: &mut tls::Wire) -> io::Result<()> {
        self.gather();
        for segment in &self.segments {
            let segment_len = segment.iov_len.min(MAX_SEALED - self.sealed);
            for at in (0..segment_len).step_by(tls::RECORD) {
                let len = tls::RECORD.min(segment_len - at);
                let from = segment.iov_base.cast::<u8>().wrapping_add(at).cast_const();
                // SAFETY: the segment is part of a front or the data of a reply that we own, and
                // `to` is elsewhere.
                tls.say(len, |to| unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), len) })?;
            }
            self.sealed += segment_len;
        }
        tls.seal()
    }

    /// Lists the next segments. Returns their length in bytes.
    fn gather(&mut self) -> usize {
        self.segments.clear();
        let (mut skip, mut offered) = (self.sent_of_first, 0);
        let mut add = |base: *const u8, len: usize, segments: &mut Vec<libc::iovec>| {
            let skipped = skip.min(len);
            skip -= skipped;
            if len > skipped && segments.len() < MAX_SEGMENTS {
                segments.push(libc::iovec {
                    iov_base: base.wrapping_add(skipped) as *mut _,
                    iov_len: len - skipped,
                });
                offered += len - skipped;
            }
        };
        for reply in &self.replies {
            if self.segments.len() == MAX_SEGMENTS {
                break;
            }
            add(reply.front.as_ptr(), reply.front_len.into(), &mut self.segments);
            for segment in reply.data.iter().flat_map(Memory::segments) {
                add(segment.base, segment.len, &mut self.segments);
            }
        }
        offered
    }

    fn advance(&mut self, sent: usize, done: &mut impl FnMut(ReplyPart)) {
        self.sent_of_first += sent;
        while let Some(first) = self.replies.front()
            && self.sent_of_first >= first.len()
        {
            self.sent_of_first -= first.len();
            let reply = self.replies.pop_front().expect("there is a first one");
            done(reply);
        }
    }

    /// Discards all replies of a broken connection.
    pub(crate) fn clear(&mut self, done: impl FnMut(ReplyPart)) {
        (self.sent_of_first, self.sealed) = (0, 0);
        self.replies.drain(..).for_each(done);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Store;
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    fn front(byte: u8, len: usize) -> impl FnOnce(&mut [u8; MAX_FRONT]) -> usize {
        move |to| {
            to[..len].fill(byte);
            len
        }
    }

    #[test]
    fn everything_arrives_in_order_through_a_socket_that_is_full_at_times() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let wire = Wire::new(Arc::new(ours.into()), None);
        let lens = [0, 1, 5000, 3_000_000, 0, 700_000];
        let total: usize = lens.iter().map(|len| len + 20).sum();
        reactor::run(async move {
            let store = Store::new(&reactor::current());
            let (mut outbox, mut expected) = (Outbox::default(), Vec::<u8>::new());
            for (i, len) in lens.into_iter().enumerate() {
                let bytes: Vec<u8> = (0..len).map(|at| (at / 3 + i) as u8).collect();
                let mut memory = store.take(len);
                memory.fill(0, &bytes);
                outbox.push(ReplyPart::new(Some(memory), front(i as u8, 20)));
                expected.extend([i as u8; 20].iter().chain(&bytes));
            }
            let mut gone = 0;
            outbox.send(&wire, |_| gone += 1).unwrap();
            assert!(!outbox.is_empty(), "the socket took all at once");
            let reader = std::thread::spawn(move || {
                let mut got = vec![0; total];
                theirs.read_exact(&mut got).unwrap();
                got
            });
            while !outbox.is_empty() {
                outbox.send(&wire, |_| gone += 1).unwrap();
                std::thread::yield_now();
            }
            assert_eq!((gone, outbox.sent()), (lens.len(), total as u64));
            assert!(reader.join().unwrap() == expected);
        });
    }

    #[test]
    fn more_replies_than_one_call_takes_go_in_several() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let wire = Wire::new(Arc::new(ours.into()), None);
        let mut outbox = Outbox::default();
        let count = 2 * MAX_SEGMENTS + 1;
        (0..count).for_each(|i| outbox.push(ReplyPart::new(None, front(i as u8, 1))));
        outbox.send(&wire, drop).unwrap();
        let mut got = vec![0; count];
        theirs.read_exact(&mut got).unwrap();
        assert!(outbox.is_empty() && got.iter().enumerate().all(|(i, byte)| *byte == i as u8));
        outbox.push(ReplyPart::new(None, front(1, MAX_FRONT)));
        let mut forgotten = 0;
        outbox.clear(|_| forgotten += 1);
        assert!(outbox.is_empty() && forgotten == 1);
    }
}
