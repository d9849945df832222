//! Tests that add groups to arrays of small disks, with a power loss at any sector.

use super::*;
use crate::metadata::store::{Store, read_superblock};
use crate::metadata::testing::{Disk, Power, config, table};
use crate::metadata::{
    AssembleOptions, BadRange, Found, Identities, Member, assemble, intent_bitmap::WRITTEN,
};
use crate::{Consistency, Matrix};
use block::{IoError, Limits};
use reactor::run_simulated;

pub(in crate::metadata) const OPTIONS: AddOptions =
    AddOptions { force: false, now_ns: 9, identities: Identities::Core };

pub(in crate::metadata) fn candidates(disks: &[Disk], first: usize) -> Vec<Candidate> {
    let candidate = |(i, disk): (usize, &Disk)| Candidate {
        name: format!("disk{}", first + i),
        channel: disk.channel(),
        limits: Limits::new(disk.capacity()),
    };
    disks.iter().enumerate().map(candidate).collect()
}

pub(in crate::metadata) async fn found(disks: &[Disk]) -> Vec<Found> {
    let mut all = Vec::new();
    for (i, disk) in disks.iter().enumerate() {
        all.extend(read_superblock(&format!("disk{i}"), &*disk.channel(), disk.capacity()).await);
    }
    all
}

pub(in crate::metadata) async fn assembled(disks: &[Disk]) -> Assembly {
    assemble(found(disks).await, &AssembleOptions::default()).unwrap()
}

/// The members of an assembly, on these disks.
pub(in crate::metadata) fn targets(assembly: &Assembly, disks: &[Disk]) -> Vec<Target> {
    let target = |(slot, found): (usize, &Option<Found>)| {
        let found = found.as_ref()?;
        let crate::metadata::Label::Member(superblock) = &found.label else { return None };
        let disk: usize = found.name[4..].parse().unwrap();
        Some(Target { slot, channel: disks[disk].channel(), layout: superblock.layout })
    };
    assembly.members.iter().enumerate().filter_map(target).collect()
}

/// A small disk with old content, alone or with others on one power line.
pub(in crate::metadata) fn disk(power: &Power) -> Disk {
    disk_of(160 << 10, power)
}

fn disk_of(bytes: usize, power: &Power) -> Disk {
    let disk = Disk::new(bytes, power);
    disk.edit(|bytes| bytes.fill(0xab));
    disk
}

/// A cleanly stopped array of one group, with a written region and a bad block.
async fn stopped(config: &ArrayConfig, power: &Power) -> Vec<Disk> {
    let disks = stopped_sound(config, power).await;
    let own = targets(&assembled(&disks).await, &disks);
    let range = BadRange { stripe: 1, strips: 1, offset: 0, len: 512 };
    BadBlocks::new(config.uuid, 9).add(range, &own).await.unwrap();
    disks
}

/// As [`stopped`], without a bad block.
pub(in crate::metadata) async fn stopped_sound(config: &ArrayConfig, power: &Power) -> Vec<Disk> {
    let disks: Vec<Disk> = (0..config.geometry.members()).map(|_| disk(power)).collect();
    let devices = candidates(&disks, 0);
    let layouts: Vec<Layout> = devices.iter().map(|device| fit(device, config, "").unwrap()).collect();
    Newcomers::new(0, &devices, layouts.clone()).clear().await.unwrap();
    zero(&devices, &layouts).await.unwrap();
    let target = |(slot, (device, layout)): (usize, (&Candidate, &Layout))| Target {
        slot,
        channel: device.channel.clone(),
        layout: *layout,
    };
    let targets: Vec<Target> = devices.iter().zip(&layouts).enumerate().map(target).collect();
    let store = Store::new(targets.len());
    let mut table = table(config);
    for _ in 0..3 {
        assert!(store.commit(&targets, &table).await.iter().all(|(_, result)| result.is_ok()));
        table = Table { is_clean: true, ..table.next(0) };
    }
    IntentBitmap::new(config, 0).set(0, WRITTEN, &targets).await.unwrap();
    for (disk, layout) in disks.iter().zip(&layouts) {
        disk.edit(|bytes| bytes[layout.data_offset as usize..][..8192].fill(0x11));
    }
    disks
}

async fn add(disks: &[Disk], new: &[Disk], force: bool) -> Result<Table, AddError> {
    let assembly = assembled(disks).await;
    let own = targets(&assembly, disks);
    add_of(&assembly, &own, &candidates(new, disks.len()), &AddOptions { force, ..OPTIONS }).await
}

pub(in crate::metadata) fn small(data: usize, parity: usize) -> ArrayConfig {
    let mut config = config(data, parity);
    config.geometry.group_stripes = 3;
    (config.matrix, config.consistency) = match (data, parity) {
        (_, 0) => (Matrix::Copies, Consistency::None),
        (1, _) => (Matrix::Copies, Consistency::Bitmap),
        _ => (config.matrix, config.consistency),
    };
    config.level = match (data, parity) {
        (_, 0) => Level::Raid0,
        (1, _) => Level::Raid1,
        _ => Level::Raid5,
    };
    config
}

/// Checks the disks of an array whose groups were added, or that is unchanged.
async fn judge(disks: &[Disk], old: usize, expected: Option<&Table>) -> Assembly {
    let assembly = assembled(disks).await;
    assert!(assembly.missing.is_empty() && assembly.returning.is_empty(), "{assembly:?}");
    assert!(assembly.members.iter().all(Option::is_some));
    expected.into_iter().for_each(|table| assert_eq!(&assembly.table, table));
    let own = targets(&assembly, disks);
    let table = &assembly.table;
    for members in [&own[..], &own[own.len() - 1..]] {
        let regions = IntentBitmap::load(&table.config, table.initial_region, members).await.unwrap();
        assert!(regions.has(0, WRITTEN) && regions.count(WRITTEN) == 1);
        assert_eq!(BadBlocks::load(table.config.uuid, members, false).await.unwrap().ranges().len(), 1);
    }
    for target in &own {
        let Layout { data_offset, data_bytes, .. } = target.layout;
        disks[target.slot].edit(|bytes| {
            let data = &bytes[data_offset as usize..][..data_bytes as usize];
            let (written, rest) = data.split_at(if target.slot < old { 8192 } else { 0 });
            assert!(written.iter().all(|byte| *byte == 0x11) && rest.iter().all(|byte| *byte == 0));
        });
    }
    assembly
}

#[test]
fn groups_are_added_to_every_kind_of_array_once_and_again() {
    run_simulated(1, |_| async {
        for (data, parity, level) in
            [(2, 1, Level::Raid50), (1, 1, Level::Raid10), (2, 0, Level::Raid0), (1, 2, Level::Raid10)]
        {
            let config = small(data, parity);
            let mut disks = stopped(&config, &Power::default()).await;
            let old = disks.len();
            for groups in [2, 4] {
                let count = (groups - disks.len() / old) * old;
                // Longer than the area that is cleared at their ends.
                let new: Vec<Disk> = (0..count).map(|_| disk_of(2 << 20, &Power::default())).collect();
                if groups == 2 {
                    new.iter().for_each(Disk::refuse_zeroes);
                }
                let table = add(&disks, &new, true).await.unwrap();
                disks.extend(new);
                assert_eq!((table.config.level, table.config.geometry.groups), (level, groups));
                assert_eq!(table.config.geometry.capacity(), groups as u64 * config.geometry.capacity());
                judge(&disks, old, Some(&table)).await;
            }
        }
    });
}

#[test]
fn power_may_go_at_any_sector_and_leaves_the_array_as_it_was_or_with_all_new_members() {
    run_simulated(2, |_| async {
        for (data, parity) in [(2, 1), (2, 0)] {
            let config = small(data, parity);
            let count = config.geometry.members();
            let sectors = {
                let power = Power::default();
                let disks = stopped(&config, &power).await;
                let new: Vec<Disk> = (0..count).map(|_| disk(&power)).collect();
                power.fail_after(1 << 20);
                add(&disks, &new, true).await.unwrap();
                (1 << 20) - power.left()
            };
            let (mut unchanged, mut larger) = (0, 0);
            // The superblocks are written last. Enough power losses come before them and leave the
            // old array.
            let last = sectors - 6 * 2 * 8 * count as u64;
            for cut in (1..last).step_by(61).chain(last..sectors) {
                let power = Power::default();
                let mut disks = stopped(&config, &power).await;
                let before = assembled(&disks).await.table;
                let new: Vec<Disk> = (0..count).map(|_| disk(&power)).collect();
                new.iter().for_each(|disk| disk.be_slow(1000));
                disks.iter().for_each(|disk| disk.be_slow(1000));
                power.fail_after(cut);
                let result = add(&disks, &new, true).await;
                power.restore();
                let old = disks.len();
                disks.extend(new);
                let found = judge(&disks, old, result.as_ref().ok()).await;
                match found.table.config.geometry.groups {
                    1 => {
                        assert!(result.is_err() && found.table == before, "{cut}");
                        unchanged += 1;
                        // The second try uses the same devices.
                        let new = disks.split_off(old);
                        let table = add(&disks, &new, true).await.unwrap();
                        disks.extend(new);
                        judge(&disks, old, Some(&table)).await;
                    }
                    _ => larger += 1,
                }
            }
            assert!(unchanged > 50 && larger > 20, "{unchanged} {larger}");
        }
    });
}

#[test]
fn a_new_member_that_fails_at_last_is_out_when_its_group_can_do_without_it() {
    run_simulated(3, |_| async {
        for (data, parity) in [(2, 1), (2, 0)] {
            let config = small(data, parity);
            let power = Power::default();
            let disks = stopped(&config, &power).await;
            let new: Vec<Disk> = disks.iter().map(|_| disk(&power)).collect();
            let assembly = assembled(&disks).await;
            let own = targets(&assembly, &disks);
            let table = Table { config: plan(&assembly, new.len()).unwrap(), ..assembly.table.retry(0) };
            let mut table = table;
            table.members.extend(new.iter().map(|_| Member::live(OPTIONS.identities.uuid())));
            let layout = fit(&candidates(&new, 0)[0], &table.config, "").unwrap();
            let target =
                |(i, disk): (usize, &Disk)| Target { slot: own.len() + i, channel: disk.channel(), layout };
            let all = own.iter().cloned().chain(new.iter().enumerate().map(target)).collect();
            new[1].fail(Some(IoError::Medium));
            let result = finish(&Store::new(2 * own.len()), all, table, &OPTIONS).await;
            match parity {
                0 => {
                    let text = result.unwrap_err().to_string();
                    assert!(text.contains("metadata I/O failed on members [(3, Medium)]"), "{text}");
                }
                _ => {
                    let table = result.unwrap();
                    let out = |slot: usize| !table.members[slot].is_in();
                    assert!((0..6).all(|slot| out(slot) == (slot == 4)), "{table:?}");
                }
            }
        }
    });
}

#[test]
fn unsuitable_devices_and_arrays_are_refused_before_anything_is_written() {
    run_simulated(4, |_| async {
        let power = Power::default();
        let disks = stopped(&small(2, 1), &power).await;
        let new: Vec<Disk> = disks.iter().map(|_| disk(&power)).collect();
        let writes = || disks.iter().chain(&new).map(Disk::writes).sum::<u64>();
        let before = writes();
        let refusal = async |change: &dyn Fn(&mut Assembly), new: &[Disk]| {
            let mut assembly = assembled(&disks).await;
            let own = targets(&assembly, &disks);
            change(&mut assembly);
            add_of(&assembly, &own, &candidates(new, 3), &OPTIONS).await.unwrap_err().to_string()
        };
        assert_eq!(refusal(&|_| (), &new[1..]).await, "array vm: 2 devices: groups of 3 are needed");
        assert_eq!(refusal(&|_| (), &[]).await, "array vm: 0 devices: groups of 3 are needed");
        let text = refusal(&|assembly| assembly.members[1] = None, &new).await;
        assert!(text.contains("slots [1] are not live"), "{text}");
        let text = refusal(&|assembly| assembly.table.is_clean = false, &new).await;
        assert!(text.contains("not stopped cleanly"), "{text}");
        let text = refusal(
            &|assembly| {
                let geometry = &mut assembly.table.config.geometry;
                for _ in 0..4 {
                    *geometry = geometry.with_groups_added(1).unwrap();
                }
                assembly.table.members.extend_from_within(..);
                assembly.table.members.extend_from_within(..);
                assembly.members.truncate(3);
            },
            &new,
        )
        .await;
        assert!(text.contains("groups were added too often"), "{text}");
        let small = [Disk::new(64 << 10, &power), Disk::new(64 << 10, &power), Disk::new(64 << 10, &power)];
        let text = refusal(&|_| (), &small).await;
        assert!(text.starts_with("disk3: too small for a member: 65536 bytes"), "{text}");
        new[2].edit(|bytes| bytes[1080..1082].copy_from_slice(b"\x53\xef"));
        let text = refusal(&|_| (), &new).await;
        assert!(text.starts_with("disk5 holds ext2/3/4 at byte 1080"), "{text}");
        assert_eq!(writes(), before);
    });
}
