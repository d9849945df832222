//! Copies a caller's data before a write: later changes by the caller do not affect the write.
//! Stable memory ([`block::Data::stable`]) is not copied: parity, log and members read it in place.
//!
//! A full stripe that is logged is read only once. A block of every strip is copied and summed, and
//! parity is computed from the copies while they are in the nearest cache.

use super::request::Source;
use super::scratch::{NewData, Scratch};
use super::stripe_owner::StripeOwner;
use crate::config::{Consistency, MAX_GROUP_MEMBERS, MAX_PARITY};
use crate::log::checksum::Checksum;
use crate::mutant::{self, Mutant};
use crate::stripe::rect::Rect;
use crate::{Geometry, Matrix};
use arrayvec::ArrayVec;
use block::{Data, Segment};
use std::sync::atomic::Ordering;

/// Bytes of each strip that are processed at a time. A block of all strips fits in the nearest
/// caches. A block is also long enough for a fast read of a wide stripe that is in no cache.
const BLOCK_BYTES: usize = 4096;

impl StripeOwner {
    /// Takes the caller's data, in place or as a copy; for a full stripe it also computes parity
    /// and checksums.
    pub async fn snapshot(&self, scratch: &mut Scratch, rect: &Rect, source: Source<'_>) {
        let config = &self.shared.config;
        for strip in rect.first..rect.first + rect.count {
            let new = match self.in_place(rect, strip, source) {
                Some(segment) => NewData::InPlace(segment),
                None => NewData::Copy(self.buffer(rect.len).await),
            };
            scratch.new[strip] = Some(new);
        }
        let is_encoded = rect.count == config.geometry.data && config.matrix != Matrix::Copies;
        match source {
            Source::Data(data) if is_encoded && config.geometry.parity > 0 => {
                for parity in &mut scratch.parity {
                    if parity.is_none() {
                        *parity = Some(self.buffer(rect.len).await);
                    }
                }
                self.encode(scratch, rect, data);
            }
            _ => copy(scratch, rect, source, &config.geometry),
        }
    }

    /// The caller's memory of one strip of a rectangle, if it is one segment that any member can
    /// use, and is stable or need not be.
    pub fn in_place(&self, rect: &Rect, strip: usize, source: Source<'_>) -> Option<Segment> {
        let Source::Data(data) = source else { return None };
        let config = &self.shared.config;
        let may_change = || config.is_mirror() && self.shared.common.is_in_place.load(Ordering::Relaxed);
        if !data.is_stable() && !may_change() && !mutant::is(Mutant::NoSnapshot) {
            return None;
        }
        let part = data.part(rect.at_strip(&config.geometry, strip) as usize, rect.len as usize);
        part.as_single().filter(|segment| segment.base.addr() & (config.block_size as usize - 1) == 0)
    }

    /// Computes the checksums of a full stripe's data, unless they were computed with its parity.
    pub fn sum(&self, scratch: &mut Scratch) {
        let Scratch { new, encoded, checksums, .. } = scratch;
        if *encoded == 0 || checksums.is_empty() {
            checksums.clear();
            let key = self.log.key();
            checksums.extend(new.iter().flatten().map(|new| Checksum::of(&key, new.as_slice())));
        }
    }

    /// Copies a full stripe, computes its parity, and the checksums if the log needs them.
    fn encode(&self, scratch: &mut Scratch, rect: &Rect, data: Data<'_>) {
        let config = &self.shared.config;
        let geometry = &config.geometry;
        let key = self.log.key();
        let is_summed = config.consistency == Consistency::Ppl;
        let mut strips = ArrayVec::<Strip<'_>, MAX_GROUP_MEMBERS>::new();
        for (strip, new) in scratch.new.iter_mut().enumerate() {
            let source = data.part(rect.at_strip(geometry, strip) as usize, rect.len as usize);
            let bytes = match new.as_mut().expect("the caller has set it") {
                NewData::Copy(buffer) => Bytes::Copied { source, target: buffer.as_mut_slice() },
                in_place => Bytes::InPlace(in_place.as_slice()),
            };
            let checksum = is_summed.then(|| Checksum::new(&key));
            strips.push(Strip { bytes, checksum });
        }
        let mut parities: ArrayVec<&mut [u8], MAX_PARITY> =
            scratch.parity.iter_mut().flatten().map(|parity| parity.as_mut_slice()).collect();
        let len = rect.len as usize;
        // Without checksums, blocks save nothing, and long copies are the fastest.
        let block = match is_summed {
            true => BLOCK_BYTES,
            false => len,
        };
        for start in (0..len).step_by(block) {
            let end = len.min(start + block);
            strips.iter_mut().for_each(|strip| strip.take(start, end));
            let sources: ArrayVec<&[u8], MAX_GROUP_MEMBERS> =
                strips.iter().map(|strip| &strip.taken()[start..end]).collect();
            let mut targets: ArrayVec<&mut [u8], MAX_PARITY> =
                parities.iter_mut().map(|parity| &mut parity[start..end]).collect();
            self.shared.code.encode(&sources, &mut targets);
        }
        scratch.encoded = (1 << geometry.parity) - 1;
        scratch.checksums.clear();
        scratch.checksums.extend(strips.into_iter().filter_map(|strip| Some(strip.checksum?.finish())));
    }
}

/// A strip of a full stripe while its parity is computed.
struct Strip<'a> {
    bytes: Bytes<'a>,
    checksum: Option<Checksum<'a>>,
}

/// The bytes of a strip.
enum Bytes<'a> {
    InPlace(&'a [u8]),
    Copied {
        /// The rest of the caller's data.
        source: Data<'a>,
        target: &'a mut [u8],
    },
}

impl Strip<'_> {
    /// Copies the next bytes, unless they are in place, and sums them.
    fn take(&mut self, start: usize, end: usize) {
        let (rest, target) = match &mut self.bytes {
            Bytes::InPlace(bytes) => {
                if let Some(checksum) = &mut self.checksum {
                    checksum.add(&bytes[start..end]);
                }
                return;
            }
            Bytes::Copied { source, target } => (source, &mut target[start..end]),
        };
        let source = rest.part(0, end - start);
        *rest = rest.part(end - start, rest.len() - (end - start));
        match (&mut self.checksum, source.as_single()) {
            (None, _) => {
                source.copy_to(target);
            }
            // SAFETY: the window is valid until the request has completed, and is no memory of this
            // core. The caller may race with the copy, which then contains any mix of its bytes, as
            // the device model allows.
            (Some(checksum), Some(segment)) => unsafe { checksum.copy(segment.base, target) },
            (Some(checksum), None) => {
                source.copy_to(target);
                checksum.add(target);
            }
        }
    }

    /// The whole strip, of which the bytes that were taken are valid.
    fn taken(&self) -> &[u8] {
        match &self.bytes {
            Bytes::InPlace(bytes) => bytes,
            Bytes::Copied { target, .. } => target,
        }
    }
}

/// Copies the data of a write into the buffers of strips that are not in place.
fn copy(scratch: &mut Scratch, rect: &Rect, source: Source<'_>, geometry: &Geometry) {
    for strip in rect.first..rect.first + rect.count {
        let new = scratch.new[strip].as_mut().expect("the caller has set it");
        let Some(target) = new.as_mut_slice() else { continue };
        match source {
            Source::Data(data) => {
                data.part(rect.at_strip(geometry, strip) as usize, rect.len as usize).copy_to(target);
            }
            Source::Zeroes => target.fill(0),
            Source::Lost => {}
        }
    }
}
