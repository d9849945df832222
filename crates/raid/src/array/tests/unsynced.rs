//! Stripes that need a sync and have unreadable blocks. Blocks that can be read are right there,
//! and parity may contradict them.

use super::scarred::{BLOCK, Bad, Scarred};
use super::*;
use crate::array::{Before, Deadlines, Filled, Soft, Wanted};
use crate::metadata::Table;
use crate::metadata::intent_bitmap::WRITTEN;
use std::ops::Range;
use std::rc::Rc;

const STRIP: u64 = 16 << 10;
/// Blocks of a strip.
const BLOCKS: u64 = 32;
/// The block that cannot be read, in strip 1.
const BAD: u64 = 5;

/// An array that needs a sync. The strips of stripe 0 hold 1, 2, 3…, and so do its parities, which
/// fit nothing.
struct Unsynced {
    shape: ArrayConfig,
    array: Arc<Array>,
    faults: Faults,
    bad: Vec<Bad>,
    channel: Rc<dyn Channel>,
}

impl Unsynced {
    async fn new((data, parity): (usize, usize), consistency: Consistency, bits: u8) -> Unsynced {
        let shape = ArrayConfig { consistency, ..config(Level::NPlusM, 1, data, parity) };
        let (faults, bad) = Scarred::disks(data + parity);
        write_superblocks(&faults, &Table { initial_region: WRITTEN | bits, ..testing::table(&shape) }).await;
        let array = restart(&shape, &faults, &[], false).await;
        assert_eq!(array.region_bits(0), WRITTEN | bits);
        let channel = array.open_channel().unwrap();
        let rig = Unsynced { shape, array, faults, bad, channel };
        for strip in 0..data + parity {
            let member = rig.faults[rig.slot(strip)].open_channel().unwrap();
            write(&*member, rig.place(), strip as u8 + 1, STRIP as usize).await.unwrap();
        }
        rig
    }

    fn slot(&self, strip: usize) -> usize {
        self.shape.geometry.member(0, strip)
    }

    /// Where a strip of stripe 0 begins on its member.
    fn place(&self) -> u64 {
        Layout::new(MEMBER_BYTES, &self.shape).unwrap().data_offset
    }

    /// A block of strip 1 cannot be read.
    fn spoil(&self) {
        self.spoil_strip(1);
    }

    fn spoil_strip(&self, strip: usize) {
        self.bad[self.slot(strip)].lock().unwrap().insert(self.place() + BAD * BLOCK);
    }

    /// The block can be read again.
    fn mend(&self) {
        self.bad[self.slot(1)].lock().unwrap().clear();
    }

    /// Blocks of a data strip of stripe 0 as a client reads them, each by its first byte.
    async fn blocks(&self, strip: u64, blocks: Range<u64>) -> Result<Vec<u8>, IoError> {
        let len = (blocks.end - blocks.start) * BLOCK;
        let bytes = read(&*self.channel, strip * STRIP + blocks.start * BLOCK, len as usize).await?;
        Ok(firsts(&bytes))
    }

    /// The readable blocks of strip 1 are as its member has held them from the beginning.
    async fn check_kept(&self) {
        self.mend();
        let member = self.faults[self.slot(1)].open_channel().unwrap();
        let blocks = firsts(&read(&*member, self.place(), STRIP as usize).await.unwrap());
        assert_eq!(without_bad(&blocks), [2; BLOCKS as usize - 1], "{blocks:?}");
    }

    /// Fills the strip of stripe 0 of a slot without a member on a new device.
    async fn fill(&self, slot: usize) {
        let device = Arc::new(MemDevice::new(&Options::new(MEMBER_BYTES)).unwrap());
        let layout = Layout::new(MEMBER_BYTES, &self.shape).unwrap();
        self.array.start_filling(slot, Uuid::random().unwrap(), Attached { device, layout }).await.unwrap();
        self.array.fill_stripe(slot, 0).await.unwrap();
    }
}

fn firsts(bytes: &[u8]) -> Vec<u8> {
    let blocks = bytes.chunks(BLOCK as usize);
    blocks.inspect(|block| assert!(block.iter().all(|byte| *byte == block[0]))).map(|b| b[0]).collect()
}

fn without_bad(blocks: &[u8]) -> Vec<u8> {
    let (before, after) = blocks.split_at(BAD as usize);
    [before, &after[1..]].concat()
}

#[test]
fn a_write_beside_an_unreadable_block_takes_only_that_block_from_parity() {
    reactor::run(async {
        for shape in [(3, 1), (4, 2)] {
            let rig = Unsynced::new(shape, Consistency::Ppl, NEED_SYNC).await;
            rig.spoil();
            write(&*rig.channel, 0, 0xaa, 16 * BLOCK as usize).await.unwrap();
            rig.check_kept().await;
            rig.array.fail(rig.slot(0)).await.unwrap();
            // Parity must fit the other strips as their members hold them.
            let blocks = rig.blocks(0, 0..16).await.unwrap();
            assert_eq!(without_bad(&blocks), [0xaa; 15], "{shape:?}");
        }
    });
}

#[test]
fn a_read_of_a_stripe_that_needs_a_sync_computes_only_the_unreadable_block() {
    reactor::run(async {
        for shape in [(3, 1), (4, 2)] {
            let rig = Unsynced::new(shape, Consistency::Ppl, NEED_SYNC).await;
            rig.spoil();
            let blocks = rig.blocks(1, 0..BLOCKS).await.unwrap();
            assert_eq!(without_bad(&blocks), [2; BLOCKS as usize - 1], "{shape:?}");
            assert_ne!(blocks[BAD as usize], 2, "it comes from parity");
            assert_eq!(rig.blocks(1, 0..BLOCKS).await.unwrap(), blocks, "it was written again");
            rig.check_kept().await;
        }
    });
}

#[test]
fn a_degraded_read_of_a_stripe_that_needs_a_sync_uses_every_readable_block() {
    reactor::run(async {
        let rig = Unsynced::new((4, 2), Consistency::Ppl, NEED_SYNC).await;
        rig.array.fail(rig.slot(0)).await.unwrap();
        let before = rig.blocks(0, 0..BLOCKS).await.unwrap();
        rig.spoil();
        let blocks = rig.blocks(0, 0..BLOCKS).await.unwrap();
        assert_eq!(without_bad(&blocks), without_bad(&before));
    });
}

#[test]
fn a_late_read_of_a_stripe_that_needs_a_sync_waits_for_its_member() {
    reactor::run_simulated(1, |_| async {
        for bits in [NEED_SYNC, NEED_SYNC | OPEN] {
            let rig = Unsynced::new((3, 1), Consistency::Ppl, bits).await;
            rig.array.set_deadlines(Deadlines { soft: Soft::After(2_000_000), hard_ns: 1_000_000_000 });
            rig.faults[rig.slot(1)].add(Rule::new(Action::Delay(50_000_000)).on(&[Op::Read]));
            assert_eq!(rig.blocks(1, 0..BLOCKS).await.unwrap(), [2; BLOCKS as usize], "{bits}");
        }
    });
}

#[test]
fn a_sync_takes_only_the_unreadable_block_from_parity() {
    reactor::run(async {
        for shape in [(3, 1), (4, 2)] {
            let rig = Unsynced::new(shape, Consistency::Ppl, NEED_SYNC).await;
            rig.spoil();
            let found = rig.array.scrub_stripe(0, true).await.unwrap();
            assert_eq!(found.unreadable, 1);
            rig.check_kept().await;
            assert_eq!(rig.array.scrub_stripe(0, false).await.unwrap().rows, 0, "{shape:?}");
        }
    });
}

#[test]
fn a_sync_makes_all_of_a_parity_strip_fit_that_has_an_unreadable_block() {
    reactor::run(async {
        for shape in [(3, 1), (4, 2)] {
            let rig = Unsynced::new(shape, Consistency::Ppl, NEED_SYNC).await;
            rig.spoil_strip(shape.0);
            rig.array.scrub_stripe(0, true).await.unwrap();
            rig.check_kept().await;
            assert_eq!(rig.array.scrub_stripe(0, false).await.unwrap().rows, 0, "{shape:?}");
        }
    });
}

#[test]
fn a_member_that_is_re_added_gets_the_parity_that_a_sync_made_without_it() {
    reactor::run(async {
        for shape in [(3, 1), (4, 2)] {
            let rig = Unsynced::new(shape, Consistency::Ppl, NEED_SYNC).await;
            let slot = rig.slot(shape.0);
            rig.array.fail(slot).await.unwrap();
            rig.array.scrub_stripe(0, true).await.unwrap();
            rig.array.clear_region(0, NEED_SYNC);
            let (device, uuid) = (rig.faults[slot].clone(), rig.array.table().members[slot].uuid);
            let layout = Layout::new(MEMBER_BYTES, &rig.shape).unwrap();
            rig.array.start_filling(slot, uuid, Attached { device, layout }).await.unwrap();
            let wanted = vec![Wanted { slot, before: Before::Member }];
            let filled = rig.array.fill_step(0, wanted).await.unwrap();
            assert_eq!(filled, [(slot, Ok(Filled::Written))], "{shape:?}");
            assert_eq!(rig.array.scrub_stripe(0, false).await.unwrap().rows, 0, "{shape:?}");
        }
    });
}

#[test]
fn a_sync_where_parity_is_open_gives_up_only_the_unreadable_block() {
    reactor::run(async {
        let rig = Unsynced::new((4, 2), Consistency::Bitmap, NEED_SYNC | OPEN).await;
        rig.spoil();
        rig.array.scrub_stripe(0, true).await.unwrap();
        assert_eq!(rig.blocks(1, BAD..BAD + 1).await, Err(IoError::Medium));
        rig.check_kept().await;
        assert_eq!(rig.array.scrub_stripe(0, false).await.unwrap().rows, 0);
    });
}

#[test]
fn a_sync_where_parity_is_open_gives_up_a_block_that_becomes_unreadable_while_parity_is_mended() {
    reactor::run_simulated(1, |_| async {
        let rig = Unsynced::new((4, 2), Consistency::Bitmap, NEED_SYNC | OPEN).await;
        rig.spoil_strip(4);
        rig.faults[rig.slot(4)].add(Rule::new(Action::Delay(1_000_000)).on(&[Op::Read]));
        let (bad, at) = (rig.bad[rig.slot(1)].clone(), rig.place() + BAD * BLOCK);
        reactor::current().spawn(async move {
            reactor::current().sleep(500_000).await; // all data has been read by then
            bad.lock().unwrap().insert(at);
        });
        rig.array.scrub_stripe(0, true).await.unwrap();
        assert_eq!(rig.blocks(1, BAD..BAD + 1).await, Err(IoError::Medium));
        rig.check_kept().await;
        assert_eq!(rig.array.scrub_stripe(0, false).await.unwrap().rows, 0);
    });
}

#[test]
fn a_rebuild_of_a_stripe_that_needs_a_sync_uses_every_readable_block() {
    reactor::run(async {
        let rig = Unsynced::new((4, 2), Consistency::Ppl, NEED_SYNC).await;
        rig.array.fail(rig.slot(0)).await.unwrap();
        let before = rig.blocks(0, 0..BLOCKS).await.unwrap();
        rig.spoil();
        rig.fill(rig.slot(0)).await;
        let blocks = rig.blocks(0, 0..BLOCKS).await.unwrap();
        assert_eq!(without_bad(&blocks), without_bad(&before));
        rig.check_kept().await;
    });
}

#[test]
fn a_rebuild_where_parity_is_open_gives_up_no_readable_block() {
    reactor::run(async {
        let rig = Unsynced::new((3, 1), Consistency::Bitmap, NEED_SYNC | OPEN).await;
        rig.array.fail(rig.slot(0)).await.unwrap();
        rig.spoil();
        rig.fill(rig.slot(0)).await;
        assert_eq!(rig.blocks(1, 0..BAD).await, Ok(vec![2; BAD as usize]));
        assert_eq!(rig.blocks(1, BAD..BAD + 1).await, Err(IoError::Medium));
        assert_eq!(rig.blocks(1, BAD + 1..BLOCKS).await, Ok(vec![2; (BLOCKS - BAD) as usize - 1]));
        rig.check_kept().await;
    });
}
