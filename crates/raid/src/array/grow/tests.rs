//! Arrays on memory devices that grow. The simulator tests power loss during growth (`sim --grow`).

use super::*;
use crate::array::{Array, Start};
use crate::config::Consistency;
use crate::metadata::{AssembleOptions, Store, Target, assemble, read_superblock, testing};
use crate::{Geometry, Level, Matrix, Zones};
use block::{Channel, Device, Flags, Op};
use drivers::mem::{MemDevice, Options};
use layers::fault::{Action, Fault, Rule};
use std::sync::Arc;

const MIB: u64 = 1 << 20;
const STRIP: u64 = 16 << 10;

struct Bench {
    disks: Vec<Arc<MemDevice>>,
    faults: Vec<Arc<Fault>>,
    config: ArrayConfig,
}

impl Bench {
    /// Members of 4 MiB that are completely used and can grow to 80 MiB.
    fn new(level: Level, groups: usize, data: usize, parity: usize, region_bytes: u64) -> Bench {
        let (matrix, consistency) = match (data, parity) {
            (_, 0) => (Matrix::Copies, Consistency::None),
            (1, _) => (Matrix::Copies, Consistency::Bitmap),
            _ => (Matrix::Powers, Consistency::Ppl),
        };
        let geometry = Geometry {
            groups,
            data,
            parity,
            strip_bytes: STRIP as u32,
            group_stripes: 1,
            zones: Zones::NONE,
        };
        let mut config = ArrayConfig {
            level,
            geometry,
            matrix,
            consistency,
            region_bytes,
            lanes: 2,
            lane_bytes: 256 << 10,
            ..testing::config(2, 1)
        };
        config.geometry.group_stripes = Layout::most_group_stripes(4 * MIB, &config);
        let disk = |_| {
            let options = Options { max_size: 80 * MIB, ..Options::new(4 * MIB) };
            Arc::new(MemDevice::new(&options).unwrap())
        };
        let disks: Vec<Arc<MemDevice>> = (0..geometry.members()).map(disk).collect();
        let faults = disks.iter().map(|disk| Arc::new(Fault::new(disk.clone()))).collect();
        Bench { disks, faults, config }
    }

    async fn create(&self) -> Arc<Array> {
        let target = |(slot, disk): (usize, &Arc<MemDevice>)| {
            let layout = Layout::new(4 * MIB, &self.config).unwrap();
            Target { slot, channel: disk.open_channel().unwrap(), layout }
        };
        let targets: Vec<Target> = self.disks.iter().enumerate().map(target).collect();
        let results = Store::new(targets.len()).commit(&targets, &testing::table(&self.config)).await;
        assert!(results.iter().all(|(_, result)| result.is_ok()));
        self.start().await
    }

    async fn start(&self) -> Arc<Array> {
        let mut found = Vec::new();
        for (slot, disk) in self.disks.iter().enumerate() {
            let (channel, capacity) = (disk.open_channel().unwrap(), disk.limits().capacity);
            found.push(read_superblock(&format!("m{slot}"), &*channel, capacity).await.unwrap());
        }
        let assembly = assemble(found, &AssembleOptions::default()).unwrap();
        let device = |found: &crate::metadata::Found| {
            let slot: usize = found.name[1..].parse().unwrap();
            Some(self.faults[slot].clone() as Arc<dyn Device>)
        };
        Array::start(Start::new(assembly, 1, true, device)).await.unwrap()
    }

    fn resize(&self, bytes: u64) {
        self.disks.iter().for_each(|disk| disk.resize(bytes).unwrap());
    }
}

async fn write(channel: &dyn Channel, offset: u64, byte: u8) {
    let mut buffer = reactor::current().buffers().take(64 << 10).await;
    buffer.as_mut_slice().fill(byte);
    buffer.transfer(channel, Op::Write, Flags::NONE, offset).await.1.unwrap();
}

async fn is_all(channel: &dyn Channel, offset: u64, byte: u8) -> bool {
    let buffer = reactor::current().buffers().take(64 << 10).await;
    let (buffer, result) = buffer.transfer(channel, Op::Read, Flags::NONE, offset).await;
    result.unwrap();
    buffer.as_slice().iter().all(|b| *b == byte)
}

async fn mismatches(array: &Array) -> u64 {
    let mut found = 0;
    for stripe in 0..array.config().geometry.stripes() {
        found += u64::from(array.scrub_stripe(stripe, false).await.unwrap().mismatches != 0);
    }
    found
}

#[test]
fn every_level_grows_under_its_users_and_stays_as_large() {
    reactor::run(async {
        for (level, groups, data, parity) in [
            (Level::Raid0, 1, 3, 0),
            (Level::Raid1, 1, 1, 1),
            (Level::Raid10, 2, 1, 1),
            (Level::Raid5, 1, 3, 1),
            (Level::Raid60, 2, 2, 2),
        ] {
            let bench = Bench::new(level, groups, data, parity, 64 << 10);
            let array = bench.create().await;
            let channel = array.open_channel().unwrap();
            let before = array.limits().capacity;
            let places = [0, MIB + 4096, before - (64 << 10)];
            for (i, at) in places.into_iter().enumerate() {
                write(&*channel, at, i as u8 + 1).await;
            }
            bench.resize(7 * MIB);
            let growth = array.grow(None).await.unwrap();
            let added = 3 * MIB / STRIP * STRIP * (groups * data) as u64;
            assert_eq!((growth.before, growth.after), (before, array.limits().capacity), "{level:?}");
            assert!(growth.after - before >= added, "{level:?} {growth:?}");
            assert_eq!(array.config().geometry.capacity(), growth.after);
            for (i, at) in places.into_iter().enumerate() {
                assert!(is_all(&*channel, at, i as u8 + 1).await, "{level:?} at {at}");
            }
            assert!(
                is_all(&*channel, before, 0).await && is_all(&*channel, growth.after - (64 << 10), 0).await
            );
            write(&*channel, growth.after - (64 << 10), 9).await;
            array.stop().await.unwrap();
            drop(channel);
            let array = bench.start().await;
            let channel = array.open_channel().unwrap();
            assert_eq!(array.limits().capacity, growth.after);
            assert!(
                is_all(&*channel, places[2], 3).await
                    && is_all(&*channel, growth.after - (64 << 10), 9).await
            );
            assert_eq!(if parity > 0 { mismatches(&array).await } else { 0 }, 0, "{level:?}");
        }
    });
}

#[test]
fn a_range_that_members_do_not_zero_is_synced_later_and_old_data_keeps_its_parity() {
    reactor::run(async {
        // The last region is shared by old and new stripes.
        let bench = Bench::new(Level::Raid5, 1, 3, 1, 3 << 18);
        bench.disks.iter().for_each(|disk| disk.resize(9 * MIB).unwrap());
        for disk in &bench.disks {
            write(&*disk.open_channel().unwrap(), 4 * MIB, 0xee).await;
        }
        bench.resize(4 * MIB);
        let array = bench.create().await;
        let channel = array.open_channel().unwrap();
        let before = array.limits().capacity;
        write(&*channel, before - (64 << 10), 7).await;
        bench.resize(9 * MIB);
        for fault in &bench.faults {
            fault.add(Rule::new(Action::Error(IoError::Unsupported)).on(&[Op::WriteZeroes]));
        }
        let growth = array.grow(None).await.unwrap();
        assert!(growth.after > before);
        assert!(array.count_regions(NEED_SYNC) > 0);
        let last = bench.config.geometry.stripes() - 1;
        assert_eq!(array.region_bits(last) & NEED_SYNC, 0);
        for stripe in 0..array.config().geometry.stripes() {
            if array.region_bits(stripe) & NEED_SYNC == 0 {
                assert_eq!(array.scrub_stripe(stripe, false).await.unwrap().mismatches, 0, "{stripe}");
            }
        }
        write(&*channel, growth.after - (64 << 10), 8).await;
        array.fail(1).await.unwrap();
        assert!(is_all(&*channel, before - (64 << 10), 7).await);
        assert!(is_all(&*channel, growth.after - (64 << 10), 8).await);
    });
}

#[test]
fn an_array_that_cannot_grow_says_which_member_lacks_how_much() {
    reactor::run(async {
        let bench = Bench::new(Level::Raid6, 1, 2, 2, 64 << 10);
        let array = bench.create().await;
        let channel = array.open_channel().unwrap();
        bench.disks[..3].iter().for_each(|disk| disk.resize(5 * MIB).unwrap());
        let error = array.grow(None).await.unwrap_err();
        let GrowError::NoRoom { usable, used, needed, .. } = &error else { panic!("{error}") };
        assert!(*usable == 4 * MIB && used <= usable && needed > usable, "{error}");
        let needed = *needed;
        bench.disks[3].resize(needed).unwrap();
        assert!(array.grow(None).await.unwrap().after > array.shared.config.geometry.capacity());
        bench.resize(8 * MIB);
        array.fail(2).await.unwrap();
        let error = array.grow(None).await.unwrap_err().to_string();
        assert!(error.contains("slots [2] are not live"), "{error}");
        drop(channel);
    });
}

#[test]
fn a_bitmap_without_room_is_refused_with_the_largest_size_that_works() {
    reactor::run(async {
        let bench = Bench::new(Level::Raid5, 1, 2, 1, STRIP);
        let array = bench.create().await;
        let channel = array.open_channel().unwrap();
        bench.resize(80 * MIB);
        let error = array.grow(None).await.unwrap_err();
        let GrowError::MapFull { most, wanted, .. } = error else { panic!("{error}") };
        assert_eq!(wanted, 80 * MIB);
        assert!(matches!(array.grow(Some(most + STRIP)).await, Err(GrowError::MapFull { .. })));
        let growth = array.grow(Some(most)).await.unwrap();
        assert_eq!(array.config().regions(), array.shared.common.regions.room());
        write(&*channel, growth.after - (64 << 10), 5).await;
        array.stop().await.unwrap();
        drop(channel);
        let array = bench.start().await;
        assert_eq!(array.limits().capacity, growth.after);
        assert!(is_all(&*array.open_channel().unwrap(), growth.after - (64 << 10), 5).await);
    });
}
