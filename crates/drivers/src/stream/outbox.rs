//! The bytes that wait to be sent to a server: own headers and the callers' memory, in order.
//!
//! Headers are adjacent in a ring, so that a run of requests without data is one segment.

use ::stream::SendQueue;
use block::Segment;
use std::collections::VecDeque;

/// Bytes to be sent to the server, with headers of at most `H` bytes.
pub struct Outbox<const H: usize> {
    headers: Box<[[u8; H]]>,
    next: usize,
    /// The ends of headers that have not been sent completely.
    ends: VecDeque<u64>,
    segments: VecDeque<Segment>,
    queued: u64,
    sent: u64,
}

impl<const H: usize> Outbox<H> {
    /// An outbox for at most `requests` unsent headers.
    pub fn new(requests: u32) -> Outbox<H> {
        Outbox {
            headers: vec![[0; H]; requests as usize + 1].into(),
            next: 0,
            ends: VecDeque::with_capacity(requests as usize + 1),
            segments: VecDeque::with_capacity(2 * requests as usize),
            queued: 0,
            sent: 0,
        }
    }

    /// Whether there is room for `headers` more headers.
    #[inline]
    pub fn has_room(&self, headers: usize) -> bool {
        self.ends.len() + headers <= self.headers.len()
    }

    /// Adds a header, which `encode` writes; `encode` returns the header's length.
    #[inline]
    pub fn push_header(&mut self, encode: impl FnOnce(&mut [u8; H]) -> usize) {
        let header = &mut self.headers[self.next];
        let len = encode(header);
        let base = header.as_mut_ptr();
        self.next = (self.next + 1) % self.headers.len();
        self.push(Segment { base, len });
        self.ends.push_back(self.queued);
    }

    /// Adds memory, which must stay valid until [`Outbox::sent`] has passed it.
    #[inline]
    pub fn push(&mut self, segment: Segment) {
        if segment.len == 0 {
            return;
        }
        self.queued += segment.len as u64;
        if let Some(last) = self.segments.back_mut()
            && last.base.wrapping_add(last.len) == segment.base
        {
            last.len += segment.len;
            return;
        }
        self.segments.push_back(segment);
    }

    /// Whether something waits to be sent.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Total bytes added: the position where the last addition ends.
    #[inline]
    pub fn queued(&self) -> u64 {
        self.queued
    }

    /// Total bytes that the socket has taken.
    #[inline]
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// Discards everything for a new connection.
    pub fn clear(&mut self) {
        self.segments.clear();
        self.ends.clear();
        self.sent = self.queued;
    }
}

// SAFETY: the segments are headers of ours that are not reused before they were sent, and memory
// that is valid until then.
unsafe impl<const H: usize> SendQueue for Outbox<H> {
    fn segments(&mut self) -> &[Segment] {
        self.segments.make_contiguous()
    }

    fn advance(&mut self, mut len: usize) {
        self.sent += len as u64;
        while self.ends.front().is_some_and(|end| *end <= self.sent) {
            self.ends.pop_front();
        }
        while len > 0 {
            let segment = self.segments.front_mut().expect("the socket took no more than these segments");
            if len < segment.len {
                segment.base = segment.base.wrapping_add(len);
                segment.len -= len;
                return;
            }
            len -= segment.len;
            self.segments.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ::stream::Wire;
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    const HEADER: usize = 32;

    #[test]
    fn everything_arrives_in_order_through_a_socket_that_is_full_at_times() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut wire = Wire::new(Arc::new(ours.into()), None);
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
            wire.send(&mut outbox).unwrap();
            assert!(!outbox.is_empty(), "the socket took all at once");
            let (mut theirs, mut got) = (theirs.try_clone().unwrap(), vec![0; expected.len()]);
            let reader = std::thread::spawn(move || {
                theirs.read_exact(&mut got).unwrap();
                got
            });
            while !outbox.is_empty() {
                wire.send(&mut outbox).unwrap();
                std::thread::yield_now();
            }
            assert_eq!((outbox.sent(), wire.sent()), (outbox.queued(), outbox.queued()));
            assert!(reader.join().unwrap() == expected);
        }
    }

    #[test]
    fn headers_side_by_side_are_one_segment() {
        let mut outbox = Outbox::<HEADER>::new(8);
        for _ in 0..8 {
            outbox.push_header(|_| HEADER);
        }
        outbox.push(Segment { base: std::ptr::null_mut(), len: 0 });
        assert_eq!(outbox.segments.len(), 1);
        assert!(outbox.has_room(1) && !outbox.has_room(2));
        assert_eq!(outbox.queued(), 8 * HEADER as u64);
    }
}
