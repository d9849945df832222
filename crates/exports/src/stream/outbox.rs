//! The bytes that wait to be sent to a client: replies in order, with the memory of their data.

use super::Memory;
use crate::DataMemory;
use ::stream::{MAX_SEGMENTS, SendQueue, Wire};
use block::Segment;
use std::collections::VecDeque;
use std::io;

/// Longest header of a reply.
pub const MAX_FRONT: usize = 120;

/// A reply or a part of it: a header, and data that may follow it.
pub struct ReplyPart {
    front: [u8; MAX_FRONT],
    front_len: u8,
    /// The data, all of which is sent.
    pub data: Option<Memory>,
    /// Whether the request ends with this part.
    pub is_last: bool,
}

impl ReplyPart {
    /// A complete reply, or its last part; otherwise as [`ReplyPart::new`].
    #[inline]
    pub fn last(data: Option<Memory>, encode: impl FnOnce(&mut [u8; MAX_FRONT]) -> usize) -> ReplyPart {
        ReplyPart { is_last: true, ..ReplyPart::new(data, encode) }
    }

    /// A part after which the request continues. `encode` writes its header and returns the
    /// header's length.
    #[inline]
    pub fn new(data: Option<Memory>, encode: impl FnOnce(&mut [u8; MAX_FRONT]) -> usize) -> ReplyPart {
        let mut front = [0; MAX_FRONT];
        let len = encode(&mut front);
        assert!(len <= MAX_FRONT, "a front of {len} bytes");
        ReplyPart { front, front_len: len as u8, data, is_last: false }
    }

    fn len(&self) -> usize {
        usize::from(self.front_len) + self.data.as_ref().map_or(0, DataMemory::len)
    }
}

/// Replies that wait to be sent.
#[derive(Default)]
pub struct Outbox {
    replies: VecDeque<ReplyPart>,
    /// Bytes of the first reply that the socket has taken.
    sent_of_first: usize,
    /// The next segments, gathered for each system call.
    segments: Vec<Segment>,
}

impl Outbox {
    /// Adds a reply.
    #[inline]
    pub fn push(&mut self, reply: ReplyPart) {
        self.replies.push_back(reply);
    }

    /// Whether no reply waits.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.replies.is_empty()
    }

    /// As [`Wire::send`]; passes each completely sent reply to `done`.
    pub fn send(&mut self, wire: &mut Wire, done: impl FnMut(ReplyPart)) -> io::Result<()> {
        wire.send(&mut Sending { outbox: self, done })
    }

    /// Discards all replies of a broken connection.
    pub fn clear(&mut self, done: impl FnMut(ReplyPart)) {
        self.sent_of_first = 0;
        self.replies.drain(..).for_each(done);
    }
}

/// The queue of one [`Outbox::send`].
struct Sending<'o, F> {
    outbox: &'o mut Outbox,
    done: F,
}

// SAFETY: the segments are headers and data of replies that the outbox owns, and it stays unchanged
// between two calls.
unsafe impl<F: FnMut(ReplyPart)> SendQueue for Sending<'_, F> {
    fn segments(&mut self) -> &[Segment] {
        let Outbox { replies, sent_of_first, segments } = &mut *self.outbox;
        segments.clear();
        let mut skip = *sent_of_first;
        let mut add = |base: *mut u8, len: usize, segments: &mut Vec<Segment>| {
            let skipped = skip.min(len);
            skip -= skipped;
            if len > skipped {
                segments.push(Segment { base: base.wrapping_add(skipped), len: len - skipped });
            }
        };
        for reply in replies {
            if segments.len() >= MAX_SEGMENTS {
                break;
            }
            // Nothing writes to it.
            add(reply.front.as_ptr().cast_mut(), reply.front_len.into(), segments);
            for segment in reply.data.iter().flat_map(Memory::segments) {
                add(segment.base, segment.len, segments);
            }
        }
        segments
    }

    fn advance(&mut self, len: usize) {
        let Outbox { replies, sent_of_first, .. } = &mut *self.outbox;
        *sent_of_first += len;
        while let Some(first) = replies.front()
            && *sent_of_first >= first.len()
        {
            *sent_of_first -= first.len();
            (self.done)(replies.pop_front().expect("there is a first one"));
        }
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
        let mut wire = Wire::new(Arc::new(ours.into()), None);
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
            outbox.send(&mut wire, |_| gone += 1).unwrap();
            assert!(!outbox.is_empty(), "the socket took all at once");
            let reader = std::thread::spawn(move || {
                let mut got = vec![0; total];
                theirs.read_exact(&mut got).unwrap();
                got
            });
            while !outbox.is_empty() {
                outbox.send(&mut wire, |_| gone += 1).unwrap();
                std::thread::yield_now();
            }
            assert_eq!((gone, wire.sent()), (lens.len(), total as u64));
            assert!(reader.join().unwrap() == expected);
        });
    }

    #[test]
    fn more_replies_than_one_call_takes_go_in_several() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut wire = Wire::new(Arc::new(ours.into()), None);
        let mut outbox = Outbox::default();
        let count = 2 * MAX_SEGMENTS + 1;
        (0..count).for_each(|i| outbox.push(ReplyPart::new(None, front(i as u8, 1))));
        outbox.send(&mut wire, drop).unwrap();
        let mut got = vec![0; count];
        theirs.read_exact(&mut got).unwrap();
        assert!(outbox.is_empty() && got.iter().enumerate().all(|(i, byte)| *byte == i as u8));
        outbox.push(ReplyPart::new(None, front(1, MAX_FRONT)));
        let mut forgotten = 0;
        outbox.clear(|_| forgotten += 1);
        assert!(outbox.is_empty() && forgotten == 1);
    }
}
