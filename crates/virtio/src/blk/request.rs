//! A request as the device sees it: decodes the bytes of a descriptor chain.

use super::*;
use crate::device::Chain;
use block::{Data, IoError, Segment};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU8, Ordering};

/// Operation of a request.
#[derive(Debug)]
pub enum Command<'a> {
    /// Read from `sector` into `data`.
    Read {
        /// First sector.
        sector: u64,
        /// Destination.
        data: Data<'a>,
    },
    /// Write `data` at `sector`.
    Write {
        /// First sector.
        sector: u64,
        /// The data.
        data: Data<'a>,
    },
    /// Make completed writes durable.
    Flush,
    /// Copy the identity, up to [`ID_BYTES`], into this buffer.
    GetId(Data<'a>),
    /// Discard these ranges.
    Discard(Ranges<'a>),
    /// Make these ranges read as zeroes.
    WriteZeroes(Ranges<'a>),
    /// A request of an unknown type: answered with [`VIRTIO_BLK_S_UNSUPP`].
    Unknown(u32),
    /// A known request with invalid memory: answered with the status of this error.
    Malformed(IoError),
}

/// A request with its status byte.
#[derive(Debug)]
pub struct BlkRequest<'a> {
    /// Operation.
    pub command: Command<'a>,
    /// Status byte that the driver reads.
    pub status: Status<'a>,
    /// Bytes of the writable part without the status byte, which a read or GET_ID may fill.
    pub writable_len: u32,
}

/// The byte that reports the result to the driver. It is written once, before the chain is pushed
/// as used.
#[derive(Debug)]
pub struct Status<'a> {
    at: *mut u8,
    borrow: PhantomData<&'a Chain>,
}

impl Status<'_> {
    /// Writes a `VIRTIO_BLK_S_*`.
    #[inline]
    pub fn set(self, status: u8) {
        // SAFETY: `parse` found the byte in the chain, which keeps it mapped while it is borrowed.
        unsafe { AtomicU8::from_ptr(self.at) }.store(status, Ordering::Relaxed);
    }
}

/// The ranges of a discard or write zeroes. The iterator copies each from guest memory once.
#[derive(Debug)]
pub struct Ranges<'a> {
    left: Data<'a>,
}

impl Iterator for Ranges<'_> {
    type Item = Range;

    fn next(&mut self) -> Option<Range> {
        let mut bytes = [0; RANGE_BYTES];
        if self.left.copy_to(&mut bytes) < RANGE_BYTES {
            return None;
        }
        self.left = self.left.part(RANGE_BYTES, self.left.len() - RANGE_BYTES);
        Some(Range::from_bytes(bytes))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left.len() / RANGE_BYTES, Some(self.left.len() / RANGE_BYTES))
    }
}

impl ExactSizeIterator for Ranges<'_> {}

/// An error that the driver cannot be informed of: the driver is broken, and so is its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// The request has no byte for the status.
    #[error("a virtio-blk request without room for its status")]
    NoStatus,
}

/// Decodes the request of a chain.
///
/// # Errors
/// When the request has no room for a status. Every other error can be answered and is returned as
/// [`Command::Unknown`] or [`Command::Malformed`].
#[inline]
pub fn parse(chain: &Chain) -> Result<BlkRequest<'_>, ParseError> {
    let (status, writable) = split_status(chain.writable())?;
    let command = match split_header(chain.readable()) {
        Some((header, readable)) => command(header, readable, writable),
        None => Command::Malformed(IoError::Invalid),
    };
    let writable_len = u32::try_from(writable.len()).unwrap_or(u32::MAX);
    Ok(BlkRequest { command, status: Status { at: status, borrow: PhantomData }, writable_len })
}

/// The last writable byte and the segments before it.
#[inline]
fn split_status(writable: &[Segment]) -> Result<(*mut u8, Data<'_>), ParseError> {
    let (last, before) = writable.split_last().ok_or(ParseError::NoStatus)?;
    // A queue returns no empty segment.
    let status = last.base.wrapping_add(last.len - 1);
    let data = match last.len {
        1 => data(before),
        _ => {
            let all = data(writable);
            all.part(0, all.len() - 1)
        }
    };
    Ok((status, data))
}

/// The header and the bytes after it; `None` when the chain has too few bytes.
#[inline]
fn split_header(readable: &[Segment]) -> Option<(Header, Data<'_>)> {
    let mut bytes = [0; HEADER_BYTES];
    let rest = match readable.split_first() {
        Some((first, rest)) if first.len == HEADER_BYTES => {
            data(std::slice::from_ref(first)).copy_to(&mut bytes);
            data(rest)
        }
        _ => {
            let all = data(readable);
            if all.copy_to(&mut bytes) < HEADER_BYTES {
                return None;
            }
            all.part(HEADER_BYTES, all.len() - HEADER_BYTES)
        }
    };
    Some((Header::from_bytes(bytes), rest))
}

#[inline]
fn command<'a>(header: Header, readable: Data<'a>, writable: Data<'a>) -> Command<'a> {
    match header.kind {
        VIRTIO_BLK_T_IN => Command::Read { sector: header.sector, data: writable },
        VIRTIO_BLK_T_OUT => Command::Write { sector: header.sector, data: readable },
        VIRTIO_BLK_T_FLUSH => Command::Flush,
        VIRTIO_BLK_T_GET_ID => Command::GetId(writable),
        VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES if !is_range_list(readable.len()) => {
            Command::Malformed(IoError::Invalid)
        }
        VIRTIO_BLK_T_DISCARD => Command::Discard(Ranges { left: readable }),
        VIRTIO_BLK_T_WRITE_ZEROES => Command::WriteZeroes(Ranges { left: readable }),
        kind => Command::Unknown(kind),
    }
}

fn is_range_list(len: usize) -> bool {
    len > 0 && len.is_multiple_of(RANGE_BYTES) && len / RANGE_BYTES <= MAX_RANGES
}

#[inline]
fn data(segments: &[Segment]) -> Data<'_> {
    // SAFETY: the segments come from a chain in flight. Its queue keeps their memory mapped until
    // the chain is given back, which needs it mutably: not before the borrow has ended. Guest
    // memory is never a reference.
    unsafe { Data::new(segments) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Splits bytes into segments of these lengths; the last takes the rest.
    fn cut(bytes: &mut [u8], lens: &[usize]) -> Vec<Segment> {
        let mut segments = Vec::new();
        let mut rest = bytes;
        for &len in lens {
            let (part, after) = rest.split_at_mut(len.min(rest.len()));
            segments.push(Segment { base: part.as_mut_ptr(), len: part.len() });
            rest = after;
        }
        segments.push(Segment { base: rest.as_mut_ptr(), len: rest.len() });
        segments.retain(|s| s.len > 0);
        segments
    }

    fn header(kind: u32, sector: u64) -> Vec<u8> {
        Header { kind, ioprio: 5, sector }.to_bytes().to_vec()
    }

    #[test]
    fn a_request_is_understood_however_it_is_cut_into_buffers() {
        for kind in [VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT] {
            for (first, second) in (0..30).flat_map(|a| (0..30).map(move |b| (a, b))) {
                let payload: Vec<u8> = (0..24).collect();
                let mut readable = header(kind, 0x1234_5678_9abc);
                let mut writable = vec![0xee; 25];
                if kind == VIRTIO_BLK_T_OUT {
                    readable.extend(&payload);
                    writable.truncate(1);
                }
                let chain =
                    Chain::of(&cut(&mut readable, &[first, second]), &cut(&mut writable, &[first, second]));
                let request = parse(&chain).unwrap();
                match request.command {
                    Command::Read { sector, data } if kind == VIRTIO_BLK_T_IN => {
                        assert_eq!((sector, data.len(), request.writable_len), (0x1234_5678_9abc, 24, 24));
                        data.copy_from(&payload);
                    }
                    Command::Write { sector, data } if kind == VIRTIO_BLK_T_OUT => {
                        let mut got = [0; 24];
                        assert_eq!((sector, data.copy_to(&mut got)), (0x1234_5678_9abc, 24));
                        assert_eq!(got, payload[..]);
                        assert_eq!(data.len(), 24);
                    }
                    other => panic!("{other:?}"),
                }
                request.status.set(0x5a);
                let (status, data) = writable.split_last().unwrap();
                assert_eq!(*status, 0x5a);
                assert!(data.is_empty() || data == payload);
            }
        }
    }

    #[test]
    fn a_request_without_header_is_answered_and_one_without_status_is_not() {
        let (mut short, mut status) = (vec![0; 15], vec![0; 1]);
        let chain = Chain::of(&cut(&mut short, &[7]), &cut(&mut status, &[]));
        let request = parse(&chain).unwrap();
        assert!(matches!(request.command, Command::Malformed(IoError::Invalid)));
        request.status.set(1);
        assert_eq!(status, [1]);
        let chain = Chain::of(&[], &cut(&mut status, &[]));
        assert!(matches!(parse(&chain).unwrap().command, Command::Malformed(IoError::Invalid)));
        let mut whole = header(VIRTIO_BLK_T_OUT, 0);
        assert_eq!(parse(&Chain::of(&cut(&mut whole, &[]), &[])).unwrap_err(), ParseError::NoStatus);
        assert_eq!(parse(&Chain::new()).unwrap_err(), ParseError::NoStatus);
    }

    #[test]
    fn other_requests_are_told_apart_by_their_type() {
        let mut status = vec![0; 21];
        let mut of = |kind| {
            let mut readable = header(kind, 0);
            let chain = Chain::of(&cut(&mut readable, &[]), &cut(&mut status, &[20]));
            format!("{:?}", parse(&chain).unwrap().command)
        };
        assert_eq!(of(VIRTIO_BLK_T_FLUSH), "Flush");
        assert_eq!(of(VIRTIO_BLK_T_GET_ID), "GetId(Data { len: 20, segments: 1 })");
        assert_eq!(of(VIRTIO_BLK_T_SECURE_ERASE), "Unknown(14)");
        assert_eq!(of(2), "Unknown(2)");
        assert_eq!(of(0x8000_0000), "Unknown(2147483648)");
    }

    #[test]
    fn ranges_are_copied_out_one_by_one() {
        let ranges: Vec<Range> = (0..MAX_RANGES as u64)
            .map(|i| Range { sector: i << 33, num_sectors: !(i as u32), flags: i as u32 & 1 })
            .collect();
        for (count, is_fine) in [(0, false), (1, true), (3, true), (256, true), (257, false)] {
            for extra in [0, 1, 15] {
                let mut readable = header(VIRTIO_BLK_T_DISCARD, 0);
                ranges.iter().cycle().take(count).for_each(|range| readable.extend(range.to_bytes()));
                readable.extend(vec![0; extra]);
                let mut status = [0];
                let chain = Chain::of(&cut(&mut readable, &[10, 11, 12]), &cut(&mut status, &[]));
                match parse(&chain).unwrap().command {
                    Command::Discard(got) => {
                        assert!(is_fine && extra == 0);
                        assert_eq!(got.len(), count);
                        assert!(got.eq(ranges.iter().copied().take(count)));
                    }
                    Command::Malformed(IoError::Invalid) => assert!(!is_fine || extra > 0),
                    other => panic!("{other:?}"),
                }
            }
        }
    }
}
