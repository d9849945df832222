//! Copies a caller's data before a write: later changes by the caller do not affect the write.
//!
//! A full stripe that is logged is read only once. A block of every strip is copied and summed, and
//! parity is computed from the copies while they are in the nearest cache.

use super::stripe_owner::{Scratch, Source, StripeOwner};
use crate::config::{Consistency, MAX_GROUP_MEMBERS, MAX_PARITY};
use crate::log::checksum::Checksum;
use crate::stripe::rect::Rect;
use crate::{Geometry, Matrix};
use arrayvec::ArrayVec;
use block::Data;

/// Bytes of each strip that are processed at a time. A block of all strips fits in the nearest
/// caches. A block is also long enough for a fast read of a wide stripe that is in no cache.
const BLOCK_BYTES: usize = 4096;

/// Checksums of data strips, in order.
pub(crate) type Checksums = ArrayVec<u32, MAX_GROUP_MEMBERS>;

impl StripeOwner {
    /// Copies the caller's data; for a full stripe it also computes parity and checksums.
    pub async fn snapshot(&self, scratch: &mut Scratch, rect: &Rect, source: Source<'_>) {
        let config = &self.shared.config;
        for strip in rect.first..rect.first + rect.count {
            if scratch.new[strip].is_none() {
                scratch.new[strip] = Some(self.buffer(rect.len).await);
            }
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
        for (strip, target) in scratch.new.iter_mut().enumerate() {
            let source = data.part(rect.at_strip(geometry, strip) as usize, rect.len as usize);
            let target = target.as_mut().expect("the caller has set it").as_mut_slice();
            let checksum = is_summed.then(|| Checksum::new(&key));
            strips.push(Strip { source, target, checksum });
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
                strips.iter().map(|strip| &strip.target[start..end]).collect();
            let mut targets: ArrayVec<&mut [u8], MAX_PARITY> =
                parities.iter_mut().map(|parity| &mut parity[start..end]).collect();
            self.shared.code.encode(&sources, &mut targets);
        }
        scratch.encoded = (1 << geometry.parity) - 1;
        scratch.checksums.clear();
        scratch.checksums.extend(strips.into_iter().filter_map(|strip| Some(strip.checksum?.finish())));
    }
}

/// A strip during its copy.
struct Strip<'a> {
    /// The rest of the caller's data.
    source: Data<'a>,
    target: &'a mut [u8],
    checksum: Option<Checksum<'a>>,
}

impl Strip<'_> {
    /// Copies the next bytes.
    fn take(&mut self, start: usize, end: usize) {
        let source = self.source.part(0, end - start);
        self.source = self.source.part(end - start, self.source.len() - (end - start));
        let target = &mut self.target[start..end];
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
}

/// Copies the data of a write into existing buffers.
pub(super) fn copy(scratch: &mut Scratch, rect: &Rect, source: Source<'_>, geometry: &Geometry) {
    for strip in rect.first..rect.first + rect.count {
        let target = scratch.new[strip].as_mut().expect("the caller has set it").as_mut_slice();
        match source {
            Source::Data(data) => {
                data.part(rect.at_strip(geometry, strip) as usize, rect.len as usize).copy_to(target);
            }
            Source::Zeroes => target.fill(0),
            Source::Lost => {}
        }
    }
}
