//! Members that have missed the start of a reshape.
//!
//! A reshape begins with a commit, and a power loss may interrupt it. Some members then have the
//! new table, and others have the previous one with the old layout. No data has moved yet, so all
//! of them are valid.

use super::super::layout::Layout;
use super::super::store::Found;
use super::super::superblock::{Label, Superblock, Table};

/// The layout under `table` of a member with this `superblock`, or the reason why the member cannot
/// be used.
pub(super) fn laid_out(table: &Table, superblock: &Superblock) -> Result<Layout, String> {
    let (layout, own) = (superblock.layout, &superblock.table);
    let Some(reshape) = table.reshape.filter(|_| own.reshape.is_none()) else {
        return match own.reshape.is_some() || own.has_shape_of(table) {
            true => Ok(layout),
            false => Err("superblock is older than a finished reshape of the array".into()),
        };
    };
    let (before, geometry) = (&reshape.old_geometry, &own.config.geometry);
    if reshape.cursor > 0 || (before.data, before.parity) != (geometry.data, geometry.parity) {
        return Err("superblock is older than the reshape of the array".into());
    }
    let shifted = layout.shifted(reshape.shift).filter(|layout| layout.check(&table.config).is_ok());
    shifted.ok_or_else(|| format!("data offset cannot be {} bytes lower", reshape.shift))
}

/// The same device with another layout.
pub(super) fn with_layout(mut found: Found, layout: Layout) -> Found {
    if let Label::Member(superblock) = &mut found.label {
        superblock.layout = layout;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::tests::{DEFAULT, FORCE, RUN, device, edit, without};
    use super::super::{Assembly, assemble};
    use super::*;
    use crate::metadata::testing::{config, member_uuid, reshaping, table};
    use crate::metadata::{Member, MemberState, Reason};

    const SHIFT: u64 = 8192;

    /// Three tables: of three members, the one written to a fourth device before it is a member,
    /// and the one that makes it a member.
    fn changing() -> [Table; 3] {
        let before = table(&config(2, 1)).next(0).next(0);
        let (config, reshape) = reshaping(&before.config, (3, 1));
        assert_eq!(reshape.shift, SHIFT);
        let mut creating = Table { config, reshape: Some(reshape), is_creating: true, ..before.retry(0) };
        creating.settled = before.generation;
        creating.members.push(Member::live(member_uuid(3)));
        let mut after = creating.retry(0);
        after.is_creating = false;
        after.begin_epoch(9);
        [before, creating, after]
    }

    /// A device of the array of three, in the state that a reshape leaves when its commit reached
    /// it.
    fn member(slot: usize, of: &Table) -> Found {
        let [before, ..] = changing();
        let mut found = device(slot.min(2), &before);
        edit(&mut found, |superblock| {
            (superblock.slot, superblock.member) = (slot as u16, of.members[slot].uuid);
            superblock.table = of.clone();
            if of.config.geometry.data == 3 {
                superblock.layout = superblock.layout.shifted(SHIFT).unwrap();
            }
        });
        Found { name: format!("disk{slot}"), ..found }
    }

    fn layouts(assembly: &Assembly) -> Vec<Layout> {
        let layout = |found: &Found| match &found.label {
            Label::Member(superblock) => superblock.layout,
            Label::Spare(_) => panic!(),
        };
        assembly.members.iter().flatten().map(layout).collect()
    }

    fn is_old(layout: &Layout) -> bool {
        layout.data_bytes == 16 * 4096
    }

    #[test]
    fn before_any_member_knows_of_the_change_the_array_is_as_it_was() {
        let [before, creating, _] = changing();
        let olds = || (0..3).map(|slot| member(slot, &before));
        for newcomer in [None, Some(member(3, &creating))] {
            let found = olds().chain(newcomer.clone()).collect();
            let assembly = assemble(found, &DEFAULT).unwrap();
            assert_eq!((&assembly.table, assembly.missing.len()), (&before, 0));
            assert_eq!(assembly.rejected.len(), usize::from(newcomer.is_some()));
            assert!(assembly.members.len() == 3 && layouts(&assembly).iter().all(is_old));
        }
    }

    #[test]
    fn whichever_members_know_of_the_change_all_are_laid_out_for_it() {
        let [before, creating, after] = changing();
        for knows in 1..16u32 {
            let table = |slot: usize| match (knows >> slot & 1, slot) {
                (1, _) => &after,
                (_, 3) => &creating,
                _ => &before,
            };
            let found: Vec<Found> = (0..4).map(|slot| member(slot, table(slot))).collect();
            let assembly = assemble(found.clone(), &DEFAULT).unwrap();
            assert_eq!((&assembly.table, assembly.rejected.len()), (&after, 0));
            assert!(assembly.missing.is_empty() && assembly.members.iter().all(Option::is_some));
            for layout in layouts(&assembly) {
                assert!(!is_old(&layout));
                assert_eq!(layout.check(&after.config), Ok(()));
            }
            // Also when the first commit of the next start has reached some of them.
            let opening = assembly.opening_table(11, 0);
            for reached in 0..4 {
                let mut found = found.clone();
                found[reached] = member(reached, &opening);
                let assembly = assemble(found, &DEFAULT).unwrap();
                assert_eq!((&assembly.table, assembly.rejected.len()), (&opening, 0));
                assert!(layouts(&assembly).len() == 4 && !layouts(&assembly).iter().any(is_old));
            }
        }
    }

    #[test]
    fn those_that_never_heard_of_the_change_go_on_without_those_that_did() {
        let [before, creating, after] = changing();
        let rest = vec![member(0, &before), member(1, &before), member(3, &creating)];
        let gone_on = assemble(rest, &DEFAULT).unwrap();
        assert_eq!((&gone_on.table, &gone_on.missing[..]), (&before, &[2][..]));
        assert!(layouts(&gone_on).iter().all(is_old));
        let opened = gone_on.opening_table(8, 0);
        let back = vec![member(0, &opened), member(1, &opened), member(2, &after), member(3, &creating)];
        let back = assemble(back, &DEFAULT).unwrap();
        assert_eq!((&back.table, back.rejected.len()), (&opened, 2), "{:?}", back.rejected);
    }

    #[test]
    fn both_shapes_need_their_members() {
        let [before, _, after] = changing();
        // The new geometry needs three of four, the old one two of three.
        let found = |slots: &[usize]| slots.iter().map(|slot| member(*slot, &after)).collect::<Vec<_>>();
        for lost in 0..4 {
            let slots: Vec<usize> = (0..4).filter(|slot| *slot != lost).collect();
            assert_eq!(assemble(found(&slots), &DEFAULT).unwrap().missing, [lost]);
        }
        let text = assemble(found(&[0, 1]), &FORCE).unwrap_err().to_string();
        assert!(text.contains("needs 3 of its 4 members and has 2"), "{text}");
        // If the new geometry has two parities, the old one lacks members first.
        let (config, reshape) = reshaping(&before.config, (2, 2));
        let mut wide = Table { config, reshape: Some(reshape), ..after.clone() };
        assert!(wide.is_alive());
        wide.take_out(0, Reason::Failed);
        assert!(wide.is_alive());
        let mut both = wide.clone();
        both.take_out(3, Reason::Failed);
        assert!(both.is_alive());
        wide.take_out(1, Reason::Failed);
        assert!(!wide.is_alive());
        wide.reshape = None;
        assert!(wide.is_alive());
        // So the start is refused without these members, and requires `run` if they could have
        // continued alone.
        wide.reshape = Some(reshape);
        wide.members = after.members.clone();
        let found = |slots: &[usize]| slots.iter().map(|slot| member_of(*slot, &wide)).collect::<Vec<_>>();
        let text = assemble(found(&[2, 3]), &RUN).unwrap_err().to_string();
        assert!(text.contains("needs 2 of its 3 members and has 1"), "{text}");
        assert!(assemble(found(&[0, 2]), &RUN).is_ok());
        assert!(assemble(found(&[0, 2]), &DEFAULT).is_ok(), "one of the old members could not go on");
    }

    fn member_of(slot: usize, of: &Table) -> Found {
        let mut found = member(slot, of);
        let shift = of.reshape.map_or(0, |reshape| reshape.shift);
        let [before, ..] = changing();
        let Label::Member(old) = device(0, &before).label else { panic!() };
        edit(&mut found, |superblock| superblock.layout = old.layout.shifted(shift).unwrap());
        found
    }

    #[test]
    fn a_member_that_has_missed_some_of_the_change_gets_everything_and_is_not_forced() {
        let [before, _, after] = changing();
        let mut moved = after.next(0).next(0);
        moved.reshape.as_mut().unwrap().cursor = 6 * 4096;
        let gone = without(&moved, &[1], 12);
        let mut done = gone.next(0).next(0);
        done.reshape = None;
        // The member's knowledge: before the reshape; at its start; and at its current position.
        for (old, is_as_far) in [(&before, false), (&after, false), (&moved, true)] {
            for now in [&gone, &done] {
                let found = |slots: [usize; 3]| {
                    slots.map(|slot| member(slot, if slot == 1 { old } else { now })).to_vec()
                };
                let mut all = found([0, 1, 2]);
                all.push(member(3, now));
                let assembly = assemble(all, &DEFAULT).unwrap();
                assert_eq!(&assembly.table, now);
                let [returning] = &assembly.returning[..] else { panic!("{:?}", assembly.rejected) };
                assert!(returning.slot == 1 && !returning.is_partial);
                let forced = assemble(found([0, 1, 3]), &FORCE);
                match is_as_far && now.reshape.is_some() {
                    true => assert_eq!(forced.unwrap().losses.len(), 1),
                    false => {
                        let text = forced.unwrap_err().to_string();
                        assert!(text.contains("needs 3 of its 4 members and has 2"), "{text}");
                    }
                }
            }
        }
        assert_eq!(gone.members[1].state, MemberState::Missing { since: gone.generation });
    }

    #[test]
    fn a_table_that_trusts_a_member_of_the_shape_before_is_not_believed_once_anything_was_moved() {
        let [before, _, mut after] = changing();
        after.reshape.as_mut().unwrap().cursor = 6 * 4096;
        let mut done = after.clone();
        done.reshape = None;
        for table in [&after, &done] {
            let found = vec![member(0, &before), member(1, table), member(2, table), member(3, table)];
            let assembly = assemble(found, &DEFAULT).unwrap();
            assert_eq!(assembly.missing, [0]);
            assert!(assembly.rejected[0].why.starts_with("superblock is older than"));
        }
        let [_, _, after] = changing();
        for room in [0, 4096] {
            let mut narrow = layout_of(&before);
            narrow.reserve_offset = narrow.data_offset - room;
            let mut found = vec![with_layout(member(0, &before), narrow)];
            found.extend((1..4).map(|slot| member(slot, &after)));
            let assembly = assemble(found, &DEFAULT).unwrap();
            assert_eq!(assembly.missing, [0]);
            assert_eq!(assembly.rejected[0].why, "data offset cannot be 8192 bytes lower");
        }
    }

    fn layout_of(table: &Table) -> Layout {
        let Label::Member(superblock) = device(0, table).label else { panic!() };
        superblock.layout
    }
}
