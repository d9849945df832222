//! Tests that begin reshapes on small disks, with a power loss at any sector.

use super::*;
use crate::Matrix;
use crate::metadata::group::tests::{
    OPTIONS, assembled, candidates, disk, small, stopped_sound as stopped, targets,
};
use crate::metadata::testing::{Disk, Power};
use crate::metadata::{BadRange, Label, Member};
use block::IoError;
use reactor::run_simulated;

const LEVEL_5: Goal = Goal { level: Some(Level::Raid5), members: None };
const LEVEL_6: Goal = Goal { level: Some(Level::Raid6), members: None };
const LEVEL_7: Goal = Goal { level: Some(Level::Raid7), members: None };
const N_PLUS_M: Goal = Goal { level: Some(Level::NPlusM), members: None };
const SAME_LEVEL: Goal = Goal { level: None, members: None };

/// Devices with old content are overwritten.
const FORCE: AddOptions = AddOptions { force: true, ..OPTIONS };

async fn begin(disks: &[Disk], new: &[Disk], goal: Goal) -> Result<Table, RestripeError> {
    let assembly = assembled(disks).await;
    let own = targets(&assembly, disks);
    begin_of(&assembly, &own, &candidates(new, disks.len()), goal, &FORCE).await
}

/// The array with the usual name of its level, and with a region for each row.
fn named(config: ArrayConfig) -> ArrayConfig {
    let level = match config.geometry.parity {
        1 => Level::Raid5,
        2 => Level::Raid6,
        3 => Level::Raid7,
        _ => Level::NPlusM,
    };
    ArrayConfig { level, region_bytes: 4096, ..config }
}

/// Checks the disks of an array that is ready for a reshape, or unchanged.
async fn judge(disks: &[Disk], old: &ArrayConfig, expected: Option<&Table>) -> Table {
    let assembly = assembled(disks).await;
    assert!(assembly.missing.is_empty() && assembly.returning.is_empty(), "{assembly:?}");
    expected.into_iter().for_each(|table| assert_eq!(&assembly.table, table));
    let (own, table) = (targets(&assembly, disks), assembly.table);
    assert_eq!(own.len(), table.config.geometry.members());
    let shift = table.reshape.map_or(0, |reshape| reshape.shift);
    for members in [&own[..], &own[own.len() - 1..]] {
        let regions = IntentBitmap::load(&table.config, table.initial_region, members).await.unwrap();
        assert!(regions.has(0, WRITTEN));
        assert!(table.reshape.is_none() || regions.count(WRITTEN) == table.config.regions());
        assert!(BadBlocks::load(table.config.uuid, members, false).await.unwrap().is_empty());
    }
    for target in &own {
        let Layout { data_offset, data_bytes, log_bytes, .. } = target.layout;
        assert_eq!(target.layout.check(&table.config), Ok(()));
        assert!(
            log_bytes >= 2 * u64::from(table.config.lanes) * u64::from(table.config.lane_bytes) || shift == 0
        );
        if target.slot < old.geometry.members() {
            assert_eq!(data_bytes, (old.geometry.group_stripes << 12) + shift);
            disks[target.slot].edit(|bytes| {
                let data = &bytes[(data_offset + shift) as usize..][..12288];
                assert!(data[..8192].iter().all(|byte| *byte == 0x11));
                assert!(data[8192..].iter().all(|byte| *byte == 0));
            });
        }
    }
    table
}

#[test]
fn a_change_begins_for_every_kind_of_goal() {
    run_simulated(1, |_| async {
        for (from, added, goal, level, to, rows) in [
            ((2, 1), 1, SAME_LEVEL, Level::Raid5, (3, 1), 2),
            ((2, 1), 2, SAME_LEVEL, Level::Raid5, (4, 1), 2),
            ((2, 1), 1, LEVEL_6, Level::Raid6, (2, 2), 2),
            ((2, 1), 2, LEVEL_6, Level::Raid6, (3, 2), 2),
            ((3, 2), 1, LEVEL_7, Level::Raid7, (3, 3), 2),
            ((2, 2), 0, LEVEL_5, Level::Raid5, (3, 1), 2),
            ((3, 2), 2, N_PLUS_M, Level::NPlusM, (5, 2), 3),
            ((3, 1), 1, Goal { members: Some(5), ..SAME_LEVEL }, Level::Raid5, (4, 1), 3),
        ] {
            let config = named(small(from.0, from.1));
            let power = Power::default();
            let mut disks = stopped(&config, &power).await;
            // Of the same size as the others, whose reserves must suffice.
            let new: Vec<Disk> = (0..added).map(|_| disk(&power)).collect();
            let table = begin(&disks, &new, goal).await.unwrap();
            disks.extend(new);
            let is = &table.config;
            assert_eq!((is.level, is.geometry.data, is.geometry.parity), (level, to.0, to.1));
            assert_eq!((is.geometry.group_stripes, is.lanes), (3 + rows, 1), "{from:?} {to:?}");
            let reshape = table.reshape.unwrap();
            assert_eq!((reshape.shift, reshape.cursor), (rows << 12, 0));
            assert_eq!((reshape.old_level, reshape.old_geometry), (config.level, config.geometry));
            judge(&disks, &config, Some(&table)).await;
            let text = begin(&disks, &[], LEVEL_5).await.unwrap_err().to_string();
            assert_eq!(text, "array vm: a reshape is in progress");
        }
    });
}

#[test]
fn power_may_go_at_any_sector_and_leaves_the_array_as_it_was_or_all_of_it_changing() {
    run_simulated(2, |_| async {
        for (from, added, goal) in [((2, 1), 1, SAME_LEVEL), ((2, 1), 1, LEVEL_6), ((2, 2), 0, LEVEL_5)] {
            let config = named(small(from.0, from.1));
            let members = config.geometry.members() + added;
            let sectors = {
                let power = Power::default();
                let disks = stopped(&config, &power).await;
                let new: Vec<Disk> = (0..added).map(|_| disk(&power)).collect();
                power.fail_after(1 << 20);
                begin(&disks, &new, goal).await.unwrap();
                (1 << 20) - power.left()
            };
            let (mut unchanged, mut changing) = (0, 0);
            // Most writes clear the new devices, and do not touch the array.
            let last = (sectors - (8 * members + 2 * 8 * (members + added)) as u64).max(1);
            for cut in (1..last).step_by(61).chain(last..sectors) {
                let power = Power::default();
                let mut disks = stopped(&config, &power).await;
                let before = assembled(&disks).await.table;
                let old = disks.len();
                let new: Vec<Disk> = (0..added).map(|_| disk(&power)).collect();
                new.iter().chain(&disks).for_each(|disk| disk.be_slow(1000));
                power.fail_after(cut);
                let result = begin(&disks, &new, goal).await;
                power.restore();
                disks.extend(new);
                let found = judge(&disks, &config, result.as_ref().ok()).await;
                if found.reshape.is_some() {
                    changing += 1;
                    continue;
                }
                assert!(result.is_err() && found == before, "{cut}");
                unchanged += 1;
                // The second try uses the same devices.
                let new = disks.split_off(old);
                let table = begin(&disks, &new, goal).await.unwrap();
                disks.extend(new);
                judge(&disks, &config, Some(&table)).await;
            }
            assert!(unchanged > 30 && changing > 20, "{unchanged} {changing}");
        }
    });
}

#[test]
fn a_member_that_fails_at_last_is_out_when_both_shapes_can_do_without_it() {
    run_simulated(3, |_| async {
        let config = named(small(2, 1));
        for failing in [&[1][..], &[3], &[1, 3]] {
            let power = Power::default();
            let disks = stopped(&config, &power).await;
            let new = [disk(&power)];
            let assembly = assembled(&disks).await;
            let own = targets(&assembly, &disks);
            let Plan { config, reshape, members } = plan(&assembly, &own, 1, LEVEL_6).unwrap();
            let mut table = Table { config, reshape: Some(reshape), ..assembly.table.retry(0) };
            table.members.push(Member::live(OPTIONS.identities.uuid()));
            let layout = fit(&candidates(&new, 3)[0], &table.config, "").unwrap();
            let target = Target { slot: 3, channel: new[0].channel(), layout };
            let all = members.into_iter().chain([target]).collect();
            failing.iter().for_each(|slot| {
                [&disks[..], &new].concat()[*slot].fail(Some(IoError::Medium));
            });
            let store = store_of(&assembly, 4);
            let table = newcomers::finish(&store, all, table, &OPTIONS).await.unwrap();
            let out: Vec<usize> = (0..4).filter(|slot| !table.members[*slot].is_in()).collect();
            assert_eq!(out, failing);
        }
    });
}

#[test]
fn unsuitable_goals_and_devices_are_refused_before_anything_is_written() {
    run_simulated(4, |_| async {
        let power = Power::default();
        let disks = stopped(&named(small(3, 1)), &power).await;
        let new: Vec<Disk> = (0..3).map(|_| disk(&power)).collect();
        let writes = || disks.iter().chain(&new).map(Disk::writes).sum::<u64>();
        let before = writes();
        let refusal = async |change: &dyn Fn(&mut Assembly), new: &[Disk], goal: Goal| {
            let mut assembly = assembled(&disks).await;
            let own = targets(&assembly, &disks);
            change(&mut assembly);
            let begun = begin_of(&assembly, &own, &candidates(new, 4), goal, &OPTIONS).await;
            begun.unwrap_err().to_string()
        };
        let wanted = |members| Goal { members: Some(members), ..SAME_LEVEL };
        let level = |level| Goal { level: Some(level), members: None };
        for (devices, goal, text) in [
            (0, SAME_LEVEL, "array vm: the array already has 3 data and 1 parity strips"),
            (0, LEVEL_5, "array vm: the array already has 3 data and 1 parity strips"),
            (1, wanted(6), "array vm: 6 members requested: the array has 4, and 1 devices were given"),
            (
                0,
                LEVEL_6,
                "array vm: 2 of 4 members for parity leave 2 for data, the array has 3: 1 more devices are needed",
            ),
            (
                1,
                LEVEL_7,
                "array vm: 3 of 5 members for parity leave 2 for data, the array has 3: 1 more devices are needed",
            ),
            (
                1,
                level(Level::Raid10),
                "array vm: a reshape to level 10 is unsupported: supported are 5, 6, 7.3 and n+m",
            ),
            (
                1,
                level(Level::Raid60),
                "array vm: a reshape to level 60 is unsupported: supported are 5, 6, 7.3 and n+m",
            ),
        ] {
            assert_eq!(refusal(&|_| (), &new[..devices], goal).await, text);
        }
        for (change, part) in [
            (
                &(|assembly: &mut Assembly| assembly.members[1] = None) as &dyn Fn(&mut Assembly),
                "slots [1] are not live",
            ),
            (&|assembly| assembly.table.is_clean = false, "not stopped cleanly"),
            (&|assembly| assembly.table.config.geometry.groups = 2, "2 groups: only an array of one"),
            (
                &|assembly| {
                    let config = &mut assembly.table.config;
                    (config.geometry.data, config.geometry.parity, config.level) = (1, 3, Level::Raid1);
                },
                "array vm: level 1: only an array with parity",
            ),
            (
                &|assembly| assembly.table.config.lane_bytes = 32 << 10,
                "slot 0 has a log of 32768 bytes: two lanes of 32768 bytes are needed",
            ),
        ] {
            let text = refusal(change, &new[..1], SAME_LEVEL).await;
            assert!(text.contains(part), "{text} lacks {part}");
        }
        let tiny = [Disk::new(64 << 10, &power)];
        let text = refusal(&|_| (), &tiny, SAME_LEVEL).await;
        assert!(text.starts_with("disk4: too small for a member: 65536 bytes"), "{text}");
        new[2].edit(|bytes| bytes[1080..1082].copy_from_slice(b"\x53\xef"));
        let text = refusal(&|_| (), &new[2..], SAME_LEVEL).await;
        assert!(text.starts_with("disk4 holds ext2/3/4 at byte 1080"), "{text}");
        assert_eq!(writes(), before);
    });
}

#[test]
fn members_without_room_in_reserve_or_map_are_named() {
    run_simulated(5, |_| async {
        let power = Power::default();
        let disks = stopped(&named(small(3, 1)), &power).await;
        let assembly = assembled(&disks).await;
        let refusal = |change: &dyn Fn(&mut Layout)| {
            let mut own = targets(&assembly, &disks);
            change(&mut own[2].layout);
            let planned = plan(&assembly, &own, 1, SAME_LEVEL);
            planned.map(|plan| plan.reshape.shift).map_err(|error| error.to_string())
        };
        assert_eq!(refusal(&|_| ()), Ok(3 << 12));
        assert_eq!(refusal(&|layout| layout.reserve_offset += 4096), Ok(3 << 12));
        let text = refusal(&|layout| layout.reserve_offset += 8192).unwrap_err();
        assert_eq!(text, "array vm: slot 2 has 8192 bytes of reserve before its data: 12288 are needed");
        // Half of a large reserve, if the bitmap has room for the rows.
        assert_eq!(refusal(&|layout| layout.alignment = 8192), Ok(4 << 12));
        let wide = |room: u64| {
            move |layout: &mut Layout| {
                (layout.reserve_offset, layout.data_offset) =
                    (layout.reserve_offset, layout.reserve_offset + room);
            }
        };
        let mut own = targets(&assembly, &disks);
        own.iter_mut().for_each(|target| wide(10 << 12)(&mut target.layout));
        assert_eq!(plan(&assembly, &own, 1, SAME_LEVEL).unwrap().reshape.shift, 5 << 12);
        let mut packed = assembled(&disks).await;
        packed.table.config.geometry.group_stripes = crate::metadata::layout::REGIONS_PER_PAGE - 4;
        own.iter_mut().for_each(|target| target.layout.data_bytes = 4032 << 12);
        own.iter_mut().for_each(|target| target.layout.member_bytes = 8192 << 12);
        assert_eq!(plan(&packed, &own, 1, SAME_LEVEL).unwrap().reshape.shift, 3 << 12);
        packed.table.config.geometry.group_stripes += 2;
        let Err(error) = plan(&packed, &own, 1, SAME_LEVEL) else { panic!() };
        assert_eq!(error.to_string(), "array vm: slot 0: 4033 regions: at most 1048576");
    });
}

#[test]
fn an_array_with_lost_blocks_or_parity_out_of_sync_is_refused() {
    run_simulated(6, |_| async {
        for is_bad in [false, true] {
            let (config, power) = (named(small(2, 1)), Power::default());
            let disks = stopped(&config, &power).await;
            let assembly = assembled(&disks).await;
            let own = targets(&assembly, &disks);
            let expected = match is_bad {
                false => {
                    IntentBitmap::new(&config, 0).set(0, WRITTEN | NEED_SYNC, &own).await.unwrap();
                    "array vm: parity of 1 regions is not in sync: assemble the array, and wait for the sync"
                }
                true => {
                    let range = BadRange { stripe: 1, strips: 1, offset: 0, len: 512 };
                    BadBlocks::new(config.uuid, 9).add(range, &own).await.unwrap();
                    "array vm: 1 ranges of blocks are lost, the first in stripe 1: write them again before the \
                     reshape"
                }
            };
            let new = [disk(&power)];
            let text = begin(&disks, &new, SAME_LEVEL).await.unwrap_err().to_string();
            assert_eq!((text.as_str(), new[0].writes()), (expected, 0));
            assert_eq!(assembled(&disks).await.table, assembly.table);
        }
    });
}

#[test]
fn more_than_three_parities_are_computed_as_for_a_new_array() {
    run_simulated(7, |_| async {
        let power = Power::default();
        let disks = stopped(&named(small(2, 4)), &power).await;
        let assembly = assembled(&disks).await;
        let own = targets(&assembly, &disks);
        assert_eq!(plan(&assembly, &own, 1, SAME_LEVEL).unwrap().config.matrix, Matrix::Cauchy);
        let powers = plan(&assembly, &own, 0, LEVEL_6).unwrap();
        assert_eq!((powers.config.matrix, powers.reshape.old_matrix), (Matrix::Powers, Matrix::Cauchy));
        let Some(found) = &assembly.members[0] else { panic!() };
        assert!(matches!(&found.label, Label::Member(superblock) if superblock.table.reshape.is_none()));
    });
}
