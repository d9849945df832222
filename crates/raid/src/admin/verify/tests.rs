//! Checks of damaged arrays in memory.

use super::*;
use crate::metadata::Shape;
use crate::{Geometry, Level, Uuid};
use block::Device;
use drivers::mem::{MemDevice, Options};
use layers::fault::{Action, Fault, Rule};
use std::sync::Arc;

const STRIP: usize = 8192;
const DATA_AT: u64 = 4096;

#[derive(Default)]
struct Heard(Vec<Difference>, u64);

impl Observer for Heard {
    fn progress(&mut self, done: u64, all: u64) {
        assert!(self.1 < done && done <= all);
        self.1 = done;
    }

    fn difference(&mut self, difference: &Difference) {
        self.0.push(difference.clone());
    }
}

struct Array {
    config: ArrayConfig,
    members: Vec<Option<(Rc<dyn Channel>, u64)>>,
}

impl Array {
    /// An array of random data with matching parity.
    async fn new(level: Level, members: usize) -> Array {
        let shape = Shape { strip_bytes: Some(STRIP as u32), ..Shape::new("test", level) };
        let mut config = shape.config(Uuid::from_random([7; 16]), members, 1 << 30, 512).unwrap();
        config.geometry = Geometry { group_stripes: 300, ..config.geometry };
        let size = DATA_AT + 300 * STRIP as u64;
        let open = |_| {
            let device = MemDevice::new(&Options::new(size)).unwrap();
            Some((Fault::new(Arc::new(device)).open_channel().unwrap(), DATA_AT))
        };
        let array = Array { config, members: (0..members).map(open).collect() };
        for stripe in [0, 1, 2, 127, 128, 299] {
            array.fill(stripe).await;
        }
        array
    }

    /// An array in which the member of a strip cannot read the strip's first sector; also returns
    /// the member's slot.
    async fn with_unreadable(level: Level, members: usize, stripe: u64, strip: usize) -> (Array, usize) {
        let mut array = Array::new(level, members).await;
        let slot = array.spoil(stripe, strip, 0).await;
        (array, slot)
    }

    /// The member of a strip cannot read the sector at this offset in the strip.
    async fn spoil(&mut self, stripe: u64, strip: usize, offset: u64) -> usize {
        let geometry = self.config.geometry;
        let slot = geometry.member(stripe, strip);
        let device = Arc::new(MemDevice::new(&Options::new(DATA_AT + 300 * STRIP as u64)).unwrap());
        let fault = Arc::new(Fault::new(device));
        self.members[slot] = Some((fault.open_channel().unwrap(), DATA_AT));
        for stripe in 0..300 {
            self.fill(stripe).await;
        }
        let at = DATA_AT + geometry.member_offset(stripe) + offset;
        fault.add(Rule::new(Action::Error(IoError::Medium)).on(&[Op::Read]).within(at..at + 512));
        slot
    }

    async fn fill(&self, stripe: u64) {
        let geometry = self.config.geometry;
        let data: Vec<Vec<u8>> = (0..geometry.data)
            .map(|i| (0..STRIP).map(|b| (b * 7 + i * 31 + stripe as usize) as u8).collect())
            .collect();
        let mut parity = vec![vec![0; STRIP]; geometry.parity];
        let inputs: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
        let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(Vec::as_mut_slice).collect();
        self.config.code().encode(&inputs, &mut outputs);
        for (strip, bytes) in data.iter().chain(&parity).enumerate() {
            self.put(stripe, strip, 0, bytes).await;
        }
    }

    async fn put(&self, stripe: u64, strip: usize, offset: u64, bytes: &[u8]) {
        let slot = self.config.geometry.member(stripe, strip);
        let (channel, data) = self.members[slot].as_ref().unwrap();
        let mut buffer = reactor::current().buffers().take(bytes.len()).await;
        buffer.as_mut_slice().copy_from_slice(bytes);
        let at = data + self.config.geometry.member_offset(stripe) + offset;
        buffer.transfer(&**channel, Op::Write, Flags::NONE, at).await.1.unwrap();
    }

    async fn verify(&self, repair: bool) -> (Findings, Vec<Difference>) {
        self.verify_where(repair, &|_| Expectation::InSync).await
    }

    async fn verify_where(
        &self,
        repair: bool,
        expect: &dyn Fn(u64) -> Expectation,
    ) -> (Findings, Vec<Difference>) {
        let mut heard = Heard::default();
        let subject = Subject { config: &self.config, members: &self.members, expect };
        let findings = verify(&subject, repair, &mut heard).await;
        assert_eq!(heard.1, self.config.geometry.stripes());
        (findings, heard.0)
    }
}

#[test]
fn parity_that_fits_is_clean_at_every_level() {
    reactor::run(async {
        for (level, members) in [(Level::Raid1, 2), (Level::Raid5, 4), (Level::Raid60, 8), (Level::Raid7, 5)]
        {
            let array = Array::new(level, members).await;
            let (findings, heard) = array.verify(false).await;
            assert!(findings.is_clean() && heard.is_empty(), "{level:?} {findings:?}");
            assert_eq!(findings.stripes_checked, array.config.geometry.stripes());
        }
    });
}

#[test]
fn with_two_parities_the_wrong_strip_is_named_and_comes_back() {
    reactor::run(async {
        let array = Array::new(Level::Raid6, 6).await;
        array.put(127, 2, 4096, &[0xee; 512]).await;
        array.put(128, 5, 0, &[0xee; 8192]).await;
        let (findings, heard) = array.verify(false).await;
        let slot = |stripe, strip| Some(array.config.geometry.member(stripe, strip));
        let found =
            |stripe, offset, len, slot| Difference { stripe, offset, len, slot, outcome: Outcome::Found };
        assert_eq!(heard, [found(127, 4096, 4096, slot(127, 2)), found(128, 0, 8192, slot(128, 5))]);
        assert_eq!((findings.rows_different, findings.rows_wrong), (3, 3));
        assert!(!findings.is_clean());
        let (findings, _) = array.verify(true).await;
        assert_eq!((findings.rows_repaired, findings.is_clean()), (3, true));
        assert_eq!(array.verify(false).await.1, []);
    });
}

#[test]
fn with_one_parity_it_is_computed_from_data() {
    reactor::run(async {
        let array = Array::new(Level::Raid5, 3).await;
        array.put(2, 0, 0, &[0xee; 4096]).await;
        let (findings, heard) = array.verify(true).await;
        assert_eq!((heard.len(), heard[0].slot, heard[0].outcome), (1, None, Outcome::Repaired));
        assert!(findings.is_clean());
        assert_eq!(array.verify(false).await.1, []);
    });
}

#[test]
fn without_a_member_the_rest_is_compared_and_what_is_ambiguous_is_left_alone() {
    reactor::run(async {
        let mut array = Array::new(Level::Raid6, 5).await;
        let geometry = array.config.geometry;
        array.put(299, 1, 0, &[0xee; 4096]).await;
        array.members[geometry.member(299, 0)] = None;
        let (findings, heard) = array.verify(true).await;
        assert_eq!((heard.len(), heard[0].outcome), (1, Outcome::Unrepairable));
        assert_eq!((findings.rows_wrong, findings.rows_repaired), (1, 0));
        array.members[geometry.member(299, 1)] = None;
        let (findings, heard) = array.verify(true).await;
        assert!(findings.is_clean() && heard.is_empty());
        assert_eq!(findings.stripes_without_redundancy, geometry.stripes());
    });
}

#[test]
fn stripes_that_were_never_written_or_are_out_of_sync_are_no_faults() {
    reactor::run(async {
        let array = Array::new(Level::Raid6, 5).await;
        array.put(1, 1, 0, &[0xee; 4096]).await;
        array.put(128, 1, 0, &[0xee; 4096]).await;
        let expect = |stripe| match stripe {
            1 => Expectation::OutOfSync,
            128 => Expectation::Nothing,
            _ => Expectation::InSync,
        };
        let (findings, _) = array.verify_where(false, &expect).await;
        assert!(findings.is_clean(), "{findings:?}");
        assert_eq!((findings.rows_out_of_sync, findings.stripes_unwritten), (1, 1));
        let (findings, heard) = array.verify_where(true, &expect).await;
        assert_eq!((findings.rows_repaired, heard[0].slot), (1, None), "parity follows data");
    });
}

#[test]
fn a_strip_that_cannot_be_read_is_computed_and_written_anew() {
    reactor::run(async {
        let (array, slot) = Array::with_unreadable(Level::Raid5, 4, 128, 1).await;
        let (findings, heard) = array.verify(false).await;
        assert_eq!((findings.strips_unreadable, findings.rows_wrong), (1, 1));
        assert_eq!((heard.len(), heard[0].stripe, heard[0].slot), (1, 128, Some(slot)));
        let (findings, _) = array.verify(true).await;
        assert_eq!((findings.rows_repaired, findings.is_clean()), (1, true));
    });
}

#[test]
fn strips_that_cannot_be_read_in_different_rows_are_computed_and_written_anew() {
    reactor::run(async {
        let (mut array, _) = Array::with_unreadable(Level::Raid5, 4, 128, 1).await;
        array.spoil(128, 0, 4096).await;
        let (findings, _) = array.verify(false).await;
        assert_eq!((findings.strips_unreadable, findings.rows_wrong), (2, 2));
        let (findings, _) = array.verify(true).await;
        assert_eq!((findings.rows_repaired, findings.is_clean()), (2, true));
    });
}

#[test]
fn a_strip_that_cannot_be_read_in_a_row_that_differs_is_not_clean() {
    reactor::run(async {
        let (array, _) = Array::with_unreadable(Level::Raid6, 5, 128, 4).await;
        array.put(128, 0, 0, &[0xee; STRIP]).await;
        let (findings, _) = array.verify(true).await;
        assert_eq!(findings.strips_unreadable, 1);
        assert!(!findings.is_clean(), "the strip still cannot be read: {findings:?}");
    });
}

/// Bytes of the strip of which `Array::with_unreadable` spoils the first 512 bytes, behind those.
async fn readable(array: &Array, stripe: u64, strip: usize) -> Vec<u8> {
    let geometry = array.config.geometry;
    let (channel, data) = array.members[geometry.member(stripe, strip)].as_ref().unwrap();
    let buffer = reactor::current().buffers().take(STRIP - 512).await;
    let at = data + geometry.member_offset(stripe) + 512;
    let (buffer, result) = buffer.transfer(&**channel, Op::Read, Flags::NONE, at).await;
    result.unwrap();
    buffer.as_slice().to_vec()
}

#[test]
fn where_parity_is_out_of_sync_only_an_unreadable_block_of_data_is_computed() {
    reactor::run(async {
        for (level, members) in [(Level::Raid5, 4), (Level::Raid6, 5), (Level::Raid7, 6)] {
            let (array, slot) = Array::with_unreadable(level, members, 128, 1).await;
            let geometry = array.config.geometry;
            let before = readable(&array, 128, 1).await;
            for parity in geometry.data..geometry.group_members() {
                array.put(128, parity, 512, &[0xe0 + parity as u8; STRIP - 512]).await;
            }
            let expect = |_| Expectation::OutOfSync;
            let (findings, heard) = array.verify_where(true, &expect).await;
            assert!(readable(&array, 128, 1).await == before, "{level:?}");
            assert!(findings.is_clean(), "{level:?} {findings:?}");
            assert_eq!((heard[0].slot, heard[0].len), (Some(slot), 512), "{level:?} {heard:?}");
            // The rest of its stripe was made to fit the data.
            let (findings, heard) = array.verify(false).await;
            assert_eq!((heard.len(), findings.rows_different), (1, 0), "{level:?} {heard:?}");
        }
    });
}

#[test]
fn rot_in_other_rows_of_a_stripe_is_not_computed_into_a_strip_with_an_unreadable_block() {
    reactor::run(async {
        let (array, _) = Array::with_unreadable(Level::Raid5, 4, 128, 1).await;
        let before = readable(&array, 128, 1).await;
        array.put(128, 0, 4096, &[0xee; 4096]).await;
        let (findings, _) = array.verify(true).await;
        assert!(readable(&array, 128, 1).await == before, "{findings:?}");
    });
}

#[test]
fn where_parity_is_open_an_unreadable_block_of_data_is_not_computed() {
    reactor::run(async {
        for (level, members) in [(Level::Raid5, 4), (Level::Raid6, 5)] {
            let (array, _) = Array::with_unreadable(level, members, 128, 1).await;
            array.put(128, 3, 4096, &[0xee; 4096]).await;
            let (findings, heard) = array.verify_where(true, &|_| Expectation::Open).await;
            let outcomes: Vec<Outcome> = heard.iter().map(|difference| difference.outcome).collect();
            assert_eq!(outcomes, [Outcome::Unrepairable, Outcome::Repaired], "{level:?} {heard:?}");
            assert_eq!((findings.rows_wrong, findings.rows_unrepairable), (1, 1), "{level:?}");
        }
    });
}
