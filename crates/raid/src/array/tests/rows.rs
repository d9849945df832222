//! Strips of one stripe with unreadable blocks in different rows: redundancy counts in each row.

use super::scarred::{BLOCK, Bad, Scarred};
use super::*;
use crate::array::{Before, Filled, Wanted};
use std::ops::Range;
use std::rc::Rc;

const STRIP: u64 = 16 << 10;
/// Blocks of a strip.
const BLOCKS: u64 = STRIP / BLOCK;
const SHAPES: [(usize, usize); 4] = [(3, 1), (4, 2), (4, 3), (1, 2)];

/// An array whose stripe 0 holds 1, 2, 3… in its data strips.
struct Rig {
    shape: ArrayConfig,
    array: Arc<Array>,
    faults: Faults,
    bad: Vec<Bad>,
    channel: Rc<dyn Channel>,
}

impl Rig {
    async fn new((data, parity): (usize, usize)) -> Rig {
        let shape = config(Level::NPlusM, 1, data, parity);
        let (faults, bad) = Scarred::disks(data + parity);
        let array = restart(&shape, &faults, &[], true).await;
        let channel = array.open_channel().unwrap();
        let rig = Rig { shape, array, faults, bad, channel };
        for strip in 0..data as u64 {
            rig.write(strip, strip as u8 + 1).await.unwrap();
        }
        rig
    }

    fn slot(&self, strip: usize) -> usize {
        self.shape.geometry.member(0, strip)
    }

    /// Where a block of a strip of stripe 0 begins on its member.
    fn place(&self, block: u64) -> u64 {
        Layout::new(MEMBER_BYTES, &self.shape).unwrap().data_offset + block * BLOCK
    }

    /// A block of a strip cannot be read.
    fn spoil(&self, strip: usize, block: u64) {
        self.bad[self.slot(strip)].lock().unwrap().insert(self.place(block));
    }

    /// In every third row so many strips have an unreadable block, others in each row.
    fn spoil_rows(&self, strips: Range<usize>, count: usize) {
        for row in 0..BLOCKS / 3 {
            for i in 0..count {
                self.spoil(strips.start + (row as usize + i) % strips.len(), row * 3);
            }
        }
    }

    fn unreadable(&self) -> usize {
        self.bad.iter().map(|bad| bad.lock().unwrap().len()).sum()
    }

    async fn write(&self, strip: u64, byte: u8) -> IoResult {
        write(&*self.channel, strip * STRIP, byte, STRIP as usize).await
    }

    /// A data strip is as expected, read at once, or else block by block without some blocks.
    async fn check(&self, strip: u64, byte: u8, lost: &[u64]) {
        let bytes = read(&*self.channel, strip * STRIP, STRIP as usize).await;
        match lost {
            [] => assert_eq!(bytes.as_deref(), Ok(&[byte; STRIP as usize][..]), "strip {strip}"),
            _ => assert_eq!(bytes, Err(IoError::Medium)),
        }
        for block in 0..if lost.is_empty() { 0 } else { BLOCKS } {
            let bytes = read(&*self.channel, strip * STRIP + block * BLOCK, BLOCK as usize).await;
            match lost.contains(&block) {
                true => assert_eq!(bytes, Err(IoError::Medium), "strip {strip} block {block}"),
                false => assert_eq!(bytes, Ok(vec![byte; BLOCK as usize]), "strip {strip} block {block}"),
            }
        }
    }

    /// Every data strip is as it was written first.
    async fn check_all(&self) {
        for strip in 0..self.shape.geometry.data as u64 {
            self.check(strip, strip as u8 + 1, &[]).await;
        }
    }

    async fn fill(&self, slot: usize) -> Filled {
        let device = Arc::new(MemDevice::new(&Options::new(MEMBER_BYTES)).unwrap());
        let layout = Layout::new(MEMBER_BYTES, &self.shape).unwrap();
        self.array.start_filling(slot, Uuid::random().unwrap(), Attached { device, layout }).await.unwrap();
        let wanted = vec![Wanted { slot, before: Before::Anything }];
        self.array.fill_step(0, wanted).await.unwrap()[0].1.unwrap()
    }
}

#[test]
fn a_large_read_computes_blocks_that_are_unreadable_in_different_rows() {
    for shape in SHAPES {
        reactor::run(async move {
            let rig = Rig::new(shape).await;
            rig.spoil_rows(0..shape.0 + shape.1, shape.1);
            rig.check_all().await;
        });
    }
}

#[test]
fn a_degraded_read_computes_blocks_that_are_unreadable_in_different_rows() {
    for shape in [(4, 2), (4, 3), (1, 2)] {
        reactor::run(async move {
            let rig = Rig::new(shape).await;
            rig.array.fail(rig.slot(0)).await.unwrap();
            rig.spoil_rows(1..shape.0 + shape.1, shape.1 - 1);
            rig.check_all().await;
        });
    }
}

#[test]
fn a_scrub_mends_blocks_that_are_unreadable_in_different_rows() {
    for (shape, is_repairing) in SHAPES.into_iter().flat_map(|shape| [(shape, false), (shape, true)]) {
        reactor::run(async move {
            let rig = Rig::new(shape).await;
            let strips = shape.0 + shape.1;
            rig.spoil_rows(0..strips, shape.1);
            let found = rig.array.scrub_stripe(0, is_repairing).await.unwrap();
            assert_eq!((found.unreadable as usize, found.rows, found.named), (strips, 0, 0), "{shape:?}");
            assert_eq!(rig.unreadable(), 0);
            rig.check_all().await;
        });
    }
}

#[test]
fn a_scrub_computes_a_strip_that_becomes_unreadable_meanwhile_from_those_that_it_has_mended() {
    reactor::run_simulated(1, |_| async {
        let rig = Rc::new(Rig::new((3, 3)).await);
        (2..5).for_each(|strip| rig.spoil(strip, 0));
        rig.spoil(0, 1); // so that the first row is mended by itself
        rig.faults[rig.slot(3)].add(Rule::new(Action::Delay(1_000_000)).on(&[Op::Write]));
        let other = rig.clone();
        reactor::current().spawn(async move {
            while other.unreadable() > 3 {
                reactor::current().sleep(1_000).await;
            }
            other.spoil(1, 0);
        });
        rig.array.scrub_stripe(0, false).await.unwrap();
        assert_eq!(rig.unreadable(), 0);
        rig.check_all().await;
    });
}

#[test]
fn a_scrub_mends_all_but_the_blocks_that_are_lost() {
    reactor::run(async {
        let rig = Rig::new((3, 1)).await;
        rig.spoil_rows(0..4, 1);
        rig.spoil(0, 1);
        rig.spoil(1, 1);
        assert_eq!(rig.array.scrub_stripe(0, true).await, Err(IoError::Medium));
        assert_eq!(rig.unreadable(), 2);
        rig.check(0, 1, &[1]).await;
        rig.check(2, 3, &[]).await;
    });
}

#[test]
fn a_scrub_names_a_wrong_strip_in_a_row_without_unreadable_blocks() {
    reactor::run(async {
        let rig = Rig::new((4, 2)).await;
        // Rows of 4 KiB are compared: the last one has no unreadable block.
        (0..3).for_each(|strip| rig.spoil(strip, strip as u64));
        let member = rig.faults[rig.slot(1)].open_channel().unwrap();
        write(&*member, rig.place(BLOCKS - 8), 0xa5, BLOCK as usize).await.unwrap();
        let found = rig.array.scrub_stripe(0, true).await.unwrap();
        assert_eq!((found.unreadable, found.rows, found.named), (3, 1, 0b10));
        rig.check_all().await;
    });
}

#[test]
fn a_rebuild_reconstructs_all_rows_that_have_enough_blocks() {
    for shape in [(3, 1), (4, 2), (4, 3)] {
        reactor::run(async move {
            let rig = Rig::new(shape).await;
            rig.array.fail(rig.slot(0)).await.unwrap();
            rig.spoil_rows(1..shape.0 + shape.1, shape.1 - 1);
            if shape.1 > 1 {
                assert_eq!(rig.fill(rig.slot(0)).await, Filled::Written);
                return rig.check_all().await;
            }
            // One more than parity covers in this row.
            rig.spoil(1, 7);
            assert_eq!(rig.fill(rig.slot(0)).await, Filled::Bad);
            rig.check(0, 1, &[7]).await;
            rig.check(1, 2, &[7]).await;
            rig.check(2, 3, &[]).await;
        });
    }
}

#[test]
fn a_degraded_write_keeps_data_that_is_unreadable_in_different_rows() {
    for shape in [(4, 2), (4, 3)] {
        reactor::run(async move {
            let rig = Rig::new(shape).await;
            rig.array.fail(rig.slot(0)).await.unwrap();
            rig.spoil_rows(1..shape.0 + shape.1, shape.1 - 1);
            rig.write(3, 9).await.unwrap();
            for (strip, byte) in [(0, 1), (1, 2), (2, 3), (3, 9)] {
                rig.check(strip, byte, &[]).await;
            }
        });
    }
}

#[test]
fn a_member_that_fails_as_a_write_is_logged_leaves_unreadable_blocks_of_different_rows_readable() {
    reactor::run(async {
        let rig = Rig::new((4, 2)).await;
        rig.spoil(3, 3);
        rig.spoil(1, 9);
        let log = Layout::new(MEMBER_BYTES, &rig.shape).unwrap();
        let log = log.log_offset..log.log_offset + log.log_bytes;
        let rule = Rule::new(Action::Error(IoError::Medium)).on(&[Op::Write]).within(log);
        rig.faults[rig.slot(4)].add(rule.once());
        rig.write(3, 9).await.unwrap();
        assert!(rig.array.slots()[rig.slot(4)].state == SlotState::Out);
        for (strip, byte) in [(0, 1), (1, 2), (2, 3), (3, 9)] {
            rig.check(strip, byte, &[]).await;
        }
    });
}

/// A write fails on a parity member's log, but has an entry on the others. A block that its parity
/// is made of becomes unreadable before the write is tried again.
#[test]
fn a_write_whose_entry_is_in_the_log_does_not_depend_on_what_it_has_read() {
    reactor::run(async {
        let rig = Rig::new((3, 3)).await;
        rig.array.fail(rig.slot(2)).await.unwrap();
        rig.spoil(3, 3);
        let layout = Layout::new(MEMBER_BYTES, &rig.shape).unwrap();
        let log = layout.log_offset..layout.log_offset + layout.log_bytes;
        let refused = Rule::new(Action::Error(IoError::Medium)).on(&[Op::Write]).within(log);
        rig.faults[rig.slot(4)].add(refused.once());
        let commit = Rule::new(Action::Delay(20_000_000)).on(&[Op::Write]).within(0..layout.map_offset);
        let committing = &rig.faults[rig.slot(0)];
        committing.add(commit.once());
        let spoil = async {
            while committing.rules()[0].2 == 0 {
                reactor::current().sleep(50_000).await;
            }
            assert!(rig.array.slots()[rig.slot(4)].state != SlotState::Live);
            rig.spoil(1, 3);
            Ok(())
        };
        let both = [block::IoFuture::new(rig.write(2, 9)), block::IoFuture::new(spoil)];
        block::join_all(both.into_iter()).await.unwrap();
        for (strip, byte) in [(0, 1), (1, 2), (2, 9)] {
            rig.check(strip, byte, &[]).await;
        }
    });
}

#[test]
fn a_write_keeps_data_where_parity_and_others_are_unreadable_in_different_rows() {
    reactor::run(async {
        let rig = Rig::new((3, 1)).await;
        rig.spoil(3, 9);
        rig.spoil(0, 20);
        rig.write(2, 9).await.unwrap();
        for (strip, byte) in [(0, 1), (1, 2), (2, 9)] {
            rig.check(strip, byte, &[]).await;
        }
        // Blocks 3 of strips 0 and 1 are lost, and nothing else.
        rig.spoil(0, 3);
        rig.spoil(1, 3);
        rig.spoil(3, 9);
        rig.write(2, 8).await.unwrap();
        for (strip, byte, lost) in [(0, 1, &[3][..]), (1, 2, &[3]), (2, 8, &[])] {
            rig.check(strip, byte, lost).await;
        }
    });
}
