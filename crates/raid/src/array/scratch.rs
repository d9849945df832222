//! Lists of one stripe operation: the strips that it reads, computes and writes.

use super::batch::Batch;
use super::members::MemberRole;
use crate::config::{MAX_GROUP_MEMBERS, MAX_PARITY};
use crate::log::Target;
use crate::parity::Decoder;
use crate::stripe::plan::ones;
use arrayvec::ArrayVec;
use block::Segment;
use reactor::Buffer;
use std::ops::Range;

/// Lists of one stripe operation, kept for reuse.
#[derive(Default)]
pub(crate) struct Scratch {
    pub batch: Batch,
    /// New data, by data strip.
    pub new: Vec<Option<NewData>>,
    /// Old data, by data strip.
    pub old: Vec<Option<Buffer>>,
    /// Parity, by parity: old, partial, new.
    pub parity: Vec<Option<Buffer>>,
    /// Parities that are those of `new`, a full stripe; bit `j` for parity `j`.
    pub encoded: u64,
    /// Checksums of `new`, a full stripe, or nothing.
    pub checksums: Checksums,
    /// The members that get a copy of the log's entry.
    pub targets: ArrayVec<Target, MAX_PARITY>,
    /// The role of each of them.
    pub roles: ArrayVec<MemberRole, MAX_PARITY>,
    /// The log may have an entry of this write, on some members at least.
    pub is_logged: bool,
    /// Parities that hold the partial parity of the write's rows, bit `j` for parity `j`.
    pub partial: u64,
    /// Bytes of the strips that contradict each other and keep doing so: parity takes the change of
    /// data alone.
    pub kept: Vec<Range<usize>>,
    /// Data that this write does not replace could be computed in two ways.
    pub is_ambiguous: bool,
}

impl Scratch {
    /// The place of a strip as it was read or computed: old data, or parity.
    pub fn strip(&self, strip: usize) -> &Option<Buffer> {
        let data = self.old.len();
        if strip < data { &self.old[strip] } else { &self.parity[strip - data] }
    }

    /// See [`Scratch::strip`].
    pub fn strip_mut(&mut self, strip: usize) -> &mut Option<Buffer> {
        let data = self.old.len();
        if strip < data { &mut self.old[strip] } else { &mut self.parity[strip - data] }
    }

    /// The bytes of a strip that were read or computed.
    pub fn bytes(&self, strip: usize) -> &[u8] {
        self.strip(strip).as_ref().expect("read or computed").as_slice()
    }

    /// Some bytes of the strips in `mask`, all of which were read or computed, by strip.
    pub fn present(&self, mask: u64, bytes: Range<usize>) -> ArrayVec<Option<&[u8]>, MAX_GROUP_MEMBERS> {
        let strips = 0..self.old.len() + self.parity.len();
        strips.map(|strip| (mask >> strip & 1 == 1).then(|| &self.bytes(strip)[bytes.clone()])).collect()
    }
}

/// Checksums of data strips, in order.
pub(crate) type Checksums = ArrayVec<u32, MAX_GROUP_MEMBERS>;

/// New data of one strip.
pub(crate) enum NewData {
    /// A copy, which the caller cannot change.
    Copy(Buffer),
    /// The caller's memory, which is valid until the write has ended. It is stable, or the array is
    /// a mirror, which passes it on and looks at none of it.
    InPlace(Segment),
}

impl NewData {
    /// The bytes as one segment.
    pub fn segment(&self) -> Segment {
        match self {
            NewData::Copy(buffer) => buffer.segment(),
            NewData::InPlace(segment) => *segment,
        }
    }

    /// The bytes, for parity and log: an array without them never calls this.
    pub fn as_slice(&self) -> &[u8] {
        match self {
            NewData::Copy(buffer) => buffer.as_slice(),
            // SAFETY: for parity and log the memory has the mark of `Data::stable`, so no code
            // writes to it before the write has ended. The scratch that holds this is recycled
            // before that.
            NewData::InPlace(segment) => unsafe { std::slice::from_raw_parts(segment.base, segment.len) },
        }
    }

    /// The bytes of a copy, writable.
    pub fn as_mut_slice(&mut self) -> Option<&mut [u8]> {
        match self {
            NewData::Copy(buffer) => Some(buffer.as_mut_slice()),
            NewData::InPlace(_) => None,
        }
    }

    /// The buffer of a copy.
    pub fn into_copy(self) -> Option<Buffer> {
        match self {
            NewData::Copy(buffer) => Some(buffer),
            NewData::InPlace(_) => None,
        }
    }
}

/// Runs a decoder on what is in the scratch. The places of the lost strips have buffers.
pub(super) fn decode(decoder: &Decoder, scratch: &mut Scratch, lost: u64) {
    let mut outputs = ArrayVec::<Buffer, MAX_GROUP_MEMBERS>::new();
    for strip in ones(lost) {
        outputs.push(scratch.strip_mut(strip).take().expect("the caller has set it"));
    }
    {
        let sources: ArrayVec<&[u8], MAX_GROUP_MEMBERS> =
            decoder.sources().iter().map(|strip| scratch.bytes(*strip)).collect();
        let mut targets: ArrayVec<&mut [u8], MAX_GROUP_MEMBERS> =
            outputs.iter_mut().map(|buffer| buffer.as_mut_slice()).collect();
        decoder.decode(&sources, &mut targets);
    }
    for (strip, buffer) in ones(lost).zip(outputs) {
        *scratch.strip_mut(strip) = Some(buffer);
    }
}

/// Strips with their numbers.
pub(super) type StripList<'a> = ArrayVec<(usize, &'a [u8]), MAX_GROUP_MEMBERS>;

/// The data strips of a mask that have buffers.
pub(super) fn strips_of(buffers: &[Option<Buffer>], mask: u64) -> StripList<'_> {
    let mut list = StripList::new();
    add_strips(&mut list, buffers, mask);
    list
}

/// Adds the data strips of a mask that have buffers.
pub(super) fn add_strips<'a>(list: &mut StripList<'a>, buffers: &'a [Option<Buffer>], mask: u64) {
    add_masked(list, buffers, mask, Buffer::as_slice);
}

/// The strips of a mask that have new data.
pub(super) fn new_strips(new: &[Option<NewData>], mask: u64) -> StripList<'_> {
    let mut list = StripList::new();
    add_new_strips(&mut list, new, mask);
    list
}

/// Adds the strips of a mask that have new data.
pub(super) fn add_new_strips<'a>(list: &mut StripList<'a>, new: &'a [Option<NewData>], mask: u64) {
    add_masked(list, new, mask, NewData::as_slice);
}

/// Adds the strips of a mask that have content.
fn add_masked<'a, T>(
    list: &mut StripList<'a>,
    strips: &'a [Option<T>],
    mask: u64,
    bytes: fn(&'a T) -> &'a [u8],
) {
    for strip in ones(mask).take_while(|strip| *strip < strips.len()) {
        if let Some(content) = &strips[strip] {
            list.push((strip, bytes(content)));
        }
    }
}

/// The parities of a mask that have buffers, with their numbers.
pub(super) fn parities_of(
    buffers: &mut [Option<Buffer>],
    mask: u64,
) -> ArrayVec<(usize, &mut [u8]), MAX_PARITY> {
    let mut parities = ArrayVec::new();
    for (j, buffer) in buffers.iter_mut().enumerate() {
        if let Some(buffer) = buffer
            && mask >> j & 1 == 1
        {
            parities.push((j, buffer.as_mut_slice()));
        }
    }
    parities
}
