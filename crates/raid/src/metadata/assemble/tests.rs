//! Tests of assembly: single cases, and random histories of an array against a model of the
//! acknowledged writes.

use super::*;
use crate::ArrayConfig;
use crate::metadata::store::Copy;
use crate::metadata::testing::{config, member_uuid, superblock, table};
use proptest::prelude::*;

pub(super) fn device(slot: usize, table: &Table) -> Found {
    let mut superblock = superblock(&table.config, slot);
    superblock.member = table.members[slot].uuid;
    superblock.table = table.clone();
    Found {
        name: format!("disk{slot}"),
        capacity: superblock.layout.member_bytes,
        newest: 0,
        copies: std::array::from_fn(|_| Copy::Valid(table.generation)),
        label: Label::Member(Box::new(superblock)),
    }
}

fn devices(table: &Table) -> Vec<Found> {
    (0..table.members.len()).map(|slot| device(slot, table)).collect()
}

pub(super) fn edit(found: &mut Found, edit: impl FnOnce(&mut Superblock)) {
    let Label::Member(superblock) = &mut found.label else { panic!() };
    edit(superblock);
}

fn mirror(copies: usize) -> ArrayConfig {
    ArrayConfig { matrix: Matrix::Copies, consistency: Consistency::Bitmap, ..config(1, copies - 1) }
}

/// The table after `slots` of `table` failed.
pub(super) fn without(table: &Table, slots: &[usize], id: u64) -> Table {
    let mut table = table.next(0);
    table.begin_epoch(id);
    slots.iter().for_each(|slot| table.take_out(*slot, Reason::WriteError));
    table
}

fn refusal(found: Vec<Found>) -> String {
    assemble(found, &AssembleOptions::default()).unwrap_err().to_string()
}

pub(super) const DEFAULT: AssembleOptions = AssembleOptions { array: None, run: false, force: false };
pub(super) const RUN: AssembleOptions = AssembleOptions { run: true, ..DEFAULT };
pub(super) const FORCE: AssembleOptions = AssembleOptions { force: true, ..DEFAULT };

#[test]
fn a_whole_array_is_assembled_in_any_order() {
    let table = table(&config(3, 2));
    let mut found = devices(&table);
    found.reverse();
    let assembly = assemble(found, &DEFAULT).unwrap();
    assert_eq!(assembly.table, table);
    assert!(assembly.members.iter().enumerate().all(|(i, m)| m.as_ref().unwrap().name == format!("disk{i}")));
    assert_eq!(assembly.opening_table(9, 9).epoch, table.epoch + 1);
}

#[test]
fn a_missing_member_is_out_in_the_first_table() {
    let table = table(&config(3, 2));
    let mut found = devices(&table);
    found.remove(1);
    let assembly = assemble(found, &DEFAULT).unwrap();
    assert_eq!(assembly.missing, [1]);
    let opening = assembly.opening_table(9, 9);
    assert_eq!((opening.epoch, opening.generation, opening.settled), (2, 2, 1));
    assert_eq!(opening.members[1].state, MemberState::Missing { since: 2 });
    assert_eq!(opening.members[1].reason, Reason::Absent);
    assert_eq!(table.relation_to(&opening), Relation::Ancestor);
}

#[test]
fn a_member_that_was_declared_out_is_not_used_and_can_come_back() {
    let before = table(&config(3, 2));
    let after = without(&before, &[2], 5).next(0).next(0);
    let mut found = devices(&after);
    found[2] = device(2, &before);
    let assembly = assemble(found, &DEFAULT).unwrap();
    assert!(assembly.members[2].is_none() && assembly.missing.is_empty());
    let [returning] = &assembly.returning[..] else { panic!() };
    assert!((returning.slot, returning.is_partial) == (2, true));
}

#[test]
fn a_member_older_than_when_it_left_needs_everything() {
    let (old, config) = (table(&config(3, 2)), config(3, 2));
    let before = (0..5).fold(table(&config), |table, _| table.next(0));
    let after = without(&before, &[2], 5);
    let mut found = devices(&after);
    found[2] = device(2, &old);
    assert!(!assemble(found, &DEFAULT).unwrap().returning[0].is_partial);
}

#[test]
fn a_member_that_the_table_trusts_but_lost_its_writes_is_named() {
    let old = table(&config(3, 2));
    let new = old.next(0).next(0).next(0);
    let mut found = devices(&new);
    found[0] = device(0, &old);
    let assembly = assemble(found, &DEFAULT).unwrap();
    assert_eq!(assembly.missing, [0]);
    let [Rejected { name, why }] = &assembly.rejected[..] else { panic!() };
    assert_eq!(name, "disk0");
    assert!(why.contains("stale: generation 1, while generation 3"), "{why}");
}

#[test]
fn a_commit_that_reached_one_member_only_leaves_the_others_trusted() {
    let old = table(&config(3, 2));
    let new = old.next(0);
    let mut found = devices(&old);
    found[4] = device(4, &new);
    let assembly = assemble(found, &DEFAULT).unwrap();
    assert!(assembly.missing.is_empty() && assembly.table.generation == 2);
    // The same holds after the next commit was interrupted.
    let newer = assembly.opening_table(7, 0);
    let mut found = devices(&old);
    found[4] = device(4, &newer);
    assert!(assemble(found, &DEFAULT).unwrap().missing.is_empty());
}

#[test]
fn the_next_table_takes_no_member_for_stale_that_lacks_the_newest_one() {
    let old = table(&config(3, 2));
    let mut found = devices(&old);
    found[4] = device(4, &old.next(0));
    let next = assemble(found.clone(), &DEFAULT).unwrap().next_table(0);
    assert_eq!((next.generation, next.settled), (3, 1));
    // The power fails when one member has the table.
    found[0] = device(0, &next);
    assert!(assemble(found, &DEFAULT).unwrap().missing.is_empty());
}

#[test]
fn too_many_missing_members_are_named_with_their_reasons() {
    let table = without(&table(&config(3, 2)), &[0], 5);
    let mut found = devices(&table);
    found.truncate(3);
    let text = refusal(found);
    assert!(text.contains("group 0 needs 3 of its 5 members and has 2"), "{text}");
    assert!(
        text.contains("slot 0 (64646464-") && text.contains("failed at generation 2: a write failed"),
        "{text}"
    );
    assert!(text.contains("slot 4") && text.contains("is missing"), "{text}");
}

#[test]
fn force_takes_the_newest_stale_members_and_says_what_may_be_lost() {
    let first = table(&config(3, 1));
    let second = without(&first, &[0], 5);
    let third = without(&second, &[1], 6);
    let found = vec![device(0, &first), device(1, &second), device(2, &third), device(3, &third)];
    assert!(refusal(found.clone()).contains("has 2"));
    let assembly = assemble(found, &FORCE).unwrap();
    assert!(assembly.members[1].is_some() && assembly.members[0].is_none() && assembly.needs_sync);
    assert!(
        assembly.losses[0].starts_with("disk1 (slot 1) is trusted again at generation 2"),
        "{:?}",
        assembly.losses
    );
}

#[test]
fn members_of_another_array_are_named() {
    let (ours, mut theirs) = (table(&config(3, 2)), table(&config(3, 2)));
    (theirs.config.uuid, theirs.config.name) = (Uuid([8; 16]), "db".into());
    let mut found = devices(&ours);
    found[1] = device(1, &theirs);
    let text = refusal(found.clone());
    assert!(
        text.starts_with("disk0 is of array vm (01010101-") && text.contains("disk1 is of array db"),
        "{text}"
    );
    let assembly = assemble(found, &AssembleOptions { array: Some(ours.config.uuid), ..DEFAULT }).unwrap();
    assert_eq!((assembly.rejected[0].name.as_str(), &assembly.missing[..]), ("disk1", &[1][..]));
}

#[test]
fn a_copy_of_a_member_is_refused_even_with_force() {
    let table = table(&config(3, 2));
    let mut found = devices(&table);
    found.push(Found { name: "copy".into(), ..device(1, &table) });
    let Err(Refusal::Duplicate { first, second, .. }) = assemble(found, &FORCE) else { panic!() };
    assert_eq!((first.as_str(), second.as_str()), ("disk1", "copy"));
}

#[test]
fn a_member_whose_slot_is_another_s_now_is_named() {
    let table = table(&config(3, 2));
    let mut found = devices(&table);
    edit(&mut found[3], |superblock| superblock.member = Uuid([99; 16]));
    let assembly = assemble(found, &DEFAULT).unwrap();
    assert_eq!(assembly.rejected[0].why, "slot 3 now belongs to another member");
}

#[test]
fn a_member_that_shrank_is_named() {
    let table = table(&config(3, 2));
    let mut found = devices(&table);
    found[3].capacity -= 4096;
    let assembly = assemble(found, &DEFAULT).unwrap();
    assert!(
        assembly.rejected[0].why.contains("capacity 1044480 bytes: smaller than the 1048576 bytes"),
        "{:?}",
        assembly.rejected
    );
}

#[test]
fn a_table_that_was_never_committed_is_replaced_while_a_member_proves_that() {
    let common = table(&mirror(3));
    // Power cut off the commit of this table: member 0, which it trusts, does not have it.
    let void = without(&common, &[1], 5);
    let line = without(&common, &[2], 6);
    let found = |table: &Table, third: &Table| vec![device(0, table), device(1, table), device(2, third)];
    let assembly = assemble(found(&line, &void), &DEFAULT).unwrap();
    assert_eq!(assembly.disowned, [device(2, &void)]);
    // A spare takes the place of member 0, which proves it.
    let mut later = assembly.opening_table(7, 0);
    later.members[0].uuid = crate::Uuid([9; 16]);
    assert!(refusal(found(&later, &void)).contains("split brain"));
    // With the table of the start, member 2 has only missed writes, and all of it is copied.
    let assembly = assemble(found(&later, &assembly.opening_table(7, 0)), &DEFAULT).unwrap();
    assert!(assembly.disowned.is_empty() && assembly.rejected.is_empty(), "{assembly:?}");
    assert_eq!((assembly.returning[0].slot, assembly.returning[0].is_partial), (2, false));
}

#[test]
fn two_sides_that_continued_alone_are_split_brain() {
    let whole = table(&mirror(2));
    let left = without(&whole, &[1], 5).next(0);
    let right = without(&whole, &[0], 6);
    let text = refusal(vec![device(0, &left), device(1, &right)]);
    let expected = "split brain: disk0 (generation 3) and disk1 (generation 2) continued without each other after epoch 1";
    assert!(text.starts_with(expected), "{text}");
    let assembly = assemble(vec![device(0, &left), device(1, &right)], &FORCE).unwrap();
    assert!(assembly.members[0].is_some() && assembly.members[1].is_none());
    assert!(assembly.losses[0].contains("all writes of disk1 (generation 2)"), "{:?}", assembly.losses);
    assert_eq!(assembly.rejected[0].name, "disk1");
}

#[test]
fn a_side_that_never_committed_is_no_side() {
    let whole = table(&mirror(3));
    // Member 0 has the table without member 2, member 1 does not. Then the power failed, and
    // members 1 and 2 continued without 0.
    let never = without(&whole, &[2], 5);
    let continued = without(&whole, &[0], 6).next(0);
    let found = vec![device(0, &never), device(1, &continued), device(2, &continued)];
    let assembly = assemble(found, &DEFAULT).unwrap();
    assert!(assembly.table.epoch == 2 && assembly.members[0].is_none());
    assert_eq!(assembly.rejected[0].name, "disk0");
}

/// The first table of a start with the members in `here`.
fn start(found: Vec<Found>, here: &[usize], id: u64) -> Table {
    let found = found.into_iter().enumerate().filter(|(slot, _)| here.contains(slot)).map(|(_, found)| found);
    assemble(found.collect(), &RUN).unwrap().opening_table(id, 0)
}

#[test]
fn tables_from_before_two_interrupted_starts_belong_to_both() {
    for config in [mirror(3), config(3, 2)] {
        let whole = table(&config);
        let all: Vec<usize> = (0..config.geometry.members()).collect();
        // The power fails when the first member has the table of a start. In a second start without
        // that member, it fails when the second member has the table.
        let mut found = devices(&whole);
        found[0] = device(0, &start(devices(&whole), &all, 5));
        found[1] = device(1, &start(devices(&whole), &all[1..], 6));
        let assembly = assemble(found, &DEFAULT).unwrap();
        assert!(assembly.members[1..].iter().all(Option::is_some) && assembly.missing.is_empty());
        assert!(assembly.members[0].is_none() && assembly.rejected[0].name == "disk0");
    }
}

#[test]
fn a_start_that_was_cut_short_is_no_side() {
    let whole = table(&mirror(3));
    // Member 1 alone has the table of a start. Member 2 continued alone, was copied to a new member
    // 0, and is absent.
    let cut_short = start(devices(&whole), &[0, 1, 2], 5);
    let mut continued = start(devices(&whole), &[2], 6).next(0);
    continued.served_epoch = continued.epoch;
    continued.members[0] = crate::metadata::Member::live(member_uuid(50));
    let continued = without(&continued, &[2], 7);
    let found = |other: &Table| vec![device(0, &continued), device(1, other)];
    let assembly = assemble(found(&cut_short), &DEFAULT).unwrap();
    assert!(assembly.members[0].is_some() && assembly.rejected[0].name == "disk1");
    // The same holds for several interrupted starts in sequence.
    let again = start(vec![device(0, &whole), device(1, &cut_short)], &[0, 1], 8);
    assert_eq!((again.epoch, again.served_epoch), (3, 1));
    assert!(assemble(found(&again), &DEFAULT).is_ok());
    // A complete start may have served clients.
    let mut served = cut_short.next(0);
    served.served_epoch = served.epoch;
    let text = refusal(found(&served));
    assert!(text.starts_with("split brain: disk0 (generation 4) and disk1 (generation 3)"), "{text}");
}

#[test]
fn of_lines_that_hold_nothing_of_their_own_none_hides_one_that_does() {
    let whole = table(&mirror(3));
    // Two interrupted starts diverge from the served line after the third member continued alone.
    let mut alone = start(devices(&whole), &[2], 5);
    alone.served_epoch = alone.epoch;
    let served = without(&whole, &[2], 6);
    let found = [served.clone(), served.clone(), served].map(|table| device(0, &table));
    let first = start(vec![found[0].clone(), device(1, &whole)], &[0], 7);
    let second = start(vec![device(0, &whole), device(1, &without(&whole, &[2], 6))], &[1], 8);
    let text = refusal(vec![device(0, &first), device(1, &second), device(2, &alone)]);
    assert!(text.starts_with("split brain"), "{text}");
}

#[test]
fn half_a_mirror_may_hold_old_data_and_is_started_when_told_to() {
    let whole = table(&mirror(2));
    let text = refusal(vec![device(0, &whole)]);
    assert!(text.contains("slot 1 (65656565-") && text.contains("could have continued without"), "{text}");
    assert_eq!(assemble(vec![device(0, &whole)], &RUN).unwrap().missing, [1]);
    // A member that is known as failed is not required.
    let degraded = without(&whole, &[1], 5);
    assert!(assemble(vec![device(0, &degraded)], &DEFAULT).is_ok());
}

#[test]
fn a_dirty_array_without_a_log_is_not_started_degraded() {
    let mut table = table(&ArrayConfig { consistency: Consistency::Bitmap, ..config(3, 2) });
    let mut found = devices(&table);
    found.remove(0);
    let text = refusal(found.clone());
    assert!(text.contains("without a log and without slot 0"), "{text}");
    let assembly = assemble(found, &FORCE).unwrap();
    assert!(assembly.losses[0].contains("in dirty regions"), "{:?}", assembly.losses);
    table.is_clean = true;
    assert!(assemble(devices(&table)[1..].to_vec(), &DEFAULT).is_ok());
    (table.is_clean, table.is_logging) = (false, true);
    assert!(assemble(devices(&table)[1..].to_vec(), &DEFAULT).is_ok());
}

#[test]
fn spares_are_found_for_their_array() {
    let table = table(&config(3, 2));
    let mut found = devices(&table);
    for (name, array) in [("any", None), ("ours", Some(table.config.uuid)), ("other", Some(Uuid([77; 16])))] {
        let label = Label::Spare(crate::metadata::Spare {
            member: member_uuid(50),
            array,
            array_name: String::new(),
            member_bytes: 1 << 20,
            created_ns: 0,
            owner: String::new(),
        });
        found.push(Found { name: name.into(), label, ..device(0, &table) });
    }
    let assembly = assemble(found, &DEFAULT).unwrap();
    let names: Vec<_> = assembly.spares.iter().map(|spare| spare.name.as_str()).collect();
    assert_eq!(names, ["any", "ours"]);
}

#[test]
fn unknown_features_for_writers_make_the_array_read_only() {
    let table = table(&config(3, 2));
    let mut found = devices(&table);
    edit(&mut found[1], |superblock| superblock.unknown_ro_compat = 16);
    let assembly = assemble(found, &DEFAULT).unwrap();
    assert!(assembly.read_only.unwrap().contains("0x10"));
}

#[test]
fn nothing_and_an_array_that_was_never_finished_are_refused() {
    assert_eq!(refusal(Vec::new()), "no member among the devices");
    let mut table = table(&config(3, 2));
    table.is_creating = true;
    assert!(refusal(devices(&table)).contains("its creation was interrupted"));
    let mut found = devices(&table);
    table.is_creating = false;
    found[0] = device(0, &table.next(0));
    assert!(assemble(found, &DEFAULT).is_ok(), "the second table reached one member");
}

/// Three tables: an array of two slots; the table written to the devices of slots 2 and 3 before
/// they are members; and the table that makes them members.
fn growing() -> [Table; 3] {
    let before = table(&config(1, 1)).next(0).next(0);
    let mut creating = before.retry(0);
    creating.settled = before.generation;
    creating.config.geometry.groups = 2;
    creating.members.extend([2, 3].map(|slot| Member::live(member_uuid(slot))));
    creating.is_creating = true;
    let mut after = creating.retry(0);
    after.is_creating = false;
    after.begin_epoch(9);
    [before, creating, after]
}

#[test]
fn devices_that_never_became_members_are_left_out_of_the_array_as_it_was() {
    let [before, creating, _] = growing();
    let found =
        |old: &Table| vec![device(2, &creating), device(0, old), device(1, old), device(3, &creating)];
    let started = assemble(found(&before), &DEFAULT).unwrap();
    assert_eq!((&started.table, started.members.len()), (&before, 2));
    let left_out: Vec<_> = started.rejected.iter().map(|rejected| rejected.name.as_str()).collect();
    assert_eq!(left_out, ["disk2", "disk3"]);
    assert!(
        started.rejected[0].why.ends_with("its addition to the array was interrupted"),
        "{:?}",
        started.rejected
    );
    // The array continued: with a table of the same generation, and later.
    let opened = started.opening_table(7, 0);
    assert_eq!(opened.generation, creating.generation);
    for later in [opened.clone(), opened.next(0), (0..9).fold(opened, |table, _| table.next(0))] {
        let again = assemble(found(&later), &DEFAULT).unwrap();
        assert_eq!((&again.table, again.rejected.len()), (&later, 2));
        assert!(again.members.iter().all(Option::is_some));
    }
    let text = refusal(vec![device(2, &creating), device(3, &creating)]);
    assert!(text.contains("the change that adds disk2, disk3 was interrupted"), "{text}");
}

#[test]
fn whichever_member_has_the_table_with_new_members_speaks_for_all() {
    let [before, creating, after] = growing();
    for has_it in 0..4 {
        let table = |slot: usize| match slot {
            slot if slot == has_it => &after,
            0 | 1 => &before,
            _ => &creating,
        };
        let assembly = assemble((0..4).map(|slot| device(slot, table(slot))).collect(), &DEFAULT).unwrap();
        assert_eq!(assembly.table, after);
        assert!(assembly.members.iter().all(Option::is_some) && assembly.rejected.is_empty());
        // The member with the last table is lost, and the others continue with the old array.
        let others = (0..4).filter(|slot| *slot != has_it);
        let others: Vec<_> = others.map(|slot| device(slot, table(slot))).collect();
        let gone_on = assemble(others.clone(), &RUN).unwrap();
        assert_eq!((&gone_on.table, gone_on.rejected.len()), (&before, if has_it < 2 { 2 } else { 1 }));
        // It returns to an array that does not know its table.
        let opened = gone_on.opening_table(8, 0);
        let mut found = vec![device(has_it, &after)];
        found.extend([0, 1].into_iter().filter(|slot| *slot != has_it).map(|slot| device(slot, &opened)));
        found.extend([2, 3].into_iter().filter(|slot| *slot != has_it).map(|slot| device(slot, &creating)));
        let back = assemble(found, &DEFAULT).unwrap();
        assert_eq!(back.table, opened, "{has_it}");
        assert!(back.missing.is_empty(), "{has_it}: {:?}", back.missing);
        assert_eq!(back.rejected.len(), if has_it < 2 { 3 } else { 2 }, "{:?}", back.rejected);
    }
}

#[test]
fn a_new_member_that_was_declared_out_at_once_comes_back_like_any_other() {
    let [before, creating, after] = growing();
    let mut without_3 = after.retry(0);
    without_3.begin_epoch(10);
    without_3.take_out(3, Reason::WriteError);
    let found = vec![device(0, &without_3), device(1, &before), device(2, &creating), device(3, &creating)];
    let assembly = assemble(found, &DEFAULT).unwrap();
    assert_eq!((&assembly.table, assembly.missing.len()), (&without_3, 0));
    let [returning] = &assembly.returning[..] else { panic!("{:?}", assembly.rejected) };
    assert!((returning.slot, returning.is_partial) == (3, false));
}

/// A running array in a model: the tables on its members, and the acknowledged writes that each
/// member holds.
struct Model {
    tables: Vec<Table>,
    /// One bit for each write.
    data: Vec<u64>,
    writes: u32,
    running: Option<Running>,
    next_id: u64,
}

struct Running {
    table: Table,
    /// Slots whose devices are present.
    here: Vec<usize>,
}

/// The power fails when this number of members has a table.
type Cut = Option<usize>;

impl Model {
    fn new(config: &ArrayConfig) -> Model {
        let table = table(config);
        let count = table.members.len();
        let running = Some(Running { table: table.clone(), here: (0..count).collect() });
        Model { tables: vec![table; count], data: vec![0; count], writes: 0, running, next_id: 1 }
    }

    fn acknowledged(&self) -> u64 {
        (1 << self.writes) - 1
    }

    /// Commits a table to the members that it trusts, in this order, or loses power after some of
    /// them.
    fn commit(&mut self, table: Table, order: &[usize], power: Cut) {
        let Some(running) = &mut self.running else { return };
        let is_target = |slot: &&usize| running.here.contains(slot) && table.members[**slot].is_in();
        let targets: Vec<usize> = order.iter().filter(is_target).copied().collect();
        let reached = power.filter(|reached| *reached < targets.len());
        targets[..reached.unwrap_or(targets.len())]
            .iter()
            .for_each(|slot| self.tables[*slot] = table.clone());
        match reached {
            Some(_) => self.running = None,
            None => running.table = table,
        }
    }

    /// Writes: the write is durable on all live members before it is acknowledged.
    fn write(&mut self) {
        let Some(running) = &self.running else { return };
        for slot in (0..self.data.len()).filter(|slot| running.table.members[*slot].is_live()) {
            self.data[slot] |= 1 << self.writes;
        }
        self.writes += 1;
    }

    fn fail(&mut self, slot: usize, order: &[usize], power: Cut) {
        let Some(running) = &self.running else { return };
        self.next_id += 1;
        let mut table = running.table.next(0);
        table.begin_epoch(self.next_id);
        table.take_out(slot, Reason::WriteError);
        if running.table.members[slot].is_live() && table.is_alive() {
            self.commit(table, order, power);
        }
    }

    /// Rebuilds a failed member that is present. The first commit marks it as rebuilding, the
    /// second as live.
    fn re_add(&mut self, slot: usize, order: &[usize], power: [Cut; 2]) {
        for (power, state) in
            power.into_iter().zip([MemberState::Rebuilding { cursor: 0 }, MemberState::Live])
        {
            let Some(running) = &self.running else { return };
            let is_due = running.table.members[slot].is_in() == (state == MemberState::Live);
            if !is_due || running.table.members[slot].is_live() || !running.here.contains(&slot) {
                return;
            }
            self.next_id += 1;
            let mut table = running.table.next(0);
            table.begin_epoch(self.next_id);
            table.members[slot].state = state;
            if state == MemberState::Live {
                let is_live = |slot: &usize| running.table.members[*slot].is_live();
                self.data[slot] = self.data[(0..self.data.len()).find(is_live).expect("a live member")];
            }
            self.commit(table, order, power);
        }
    }

    /// Starts the array with the present devices. Both commits of the start may lose power.
    fn assemble(
        &mut self,
        here: Vec<usize>,
        options: &AssembleOptions,
        order: &[usize],
        power: [Cut; 2],
    ) -> Result<(), TestCaseError> {
        self.running = None;
        let found = here.iter().map(|slot| device(*slot, &self.tables[*slot])).collect();
        let Ok(assembly) = assemble(found, options) else { return Ok(()) };
        let held = match options.run {
            // The absent members may have continued without the present ones.
            true => here.iter().fold(0, |held, slot| held | self.data[*slot]),
            false => self.acknowledged(),
        };
        for (slot, member) in assembly.members.iter().enumerate() {
            if member.is_some() && assembly.table.members[slot].is_live() {
                prop_assert_eq!(self.data[slot] & held, held, "slot {} lacks writes", slot);
            }
        }
        self.next_id += 1;
        let opening = assembly.opening_table(self.next_id, 0);
        self.running = Some(Running { table: assembly.table.clone(), here });
        self.commit(opening.clone(), order, power[0]);
        let mut serving = opening.next(0);
        serving.served_epoch = serving.epoch;
        self.commit(serving, order, power[1]);
        Ok(())
    }

    /// Runs steps of a history: the action, its members, the order of commits, and the moment of
    /// the power loss.
    fn live(config: &ArrayConfig, options: &AssembleOptions, steps: Vec<Step>) -> Result<(), TestCaseError> {
        let mut model = Model::new(config);
        let count = config.geometry.members();
        for (kind, which, shuffle, power) in steps {
            let mut order: Vec<usize> = (0..count).collect();
            order.sort_by_key(|slot| shuffle.rotate_left(*slot as u32 * 13) % 97);
            let slot = which as usize % count;
            match kind {
                0 => model.write(),
                1 => model.fail(slot, &order, power[0]),
                2 => model.re_add(slot, &order, power),
                _ => {
                    let here = (0..count).filter(|slot| kind == 3 || which >> slot & 1 != 0).collect();
                    model.assemble(here, options, &order, power)?;
                }
            }
        }
        Ok(())
    }
}

/// A rebuild ends, and the power fails when one member knows it. Two starts follow, each without
/// another member, and only the members of the second start hold a write. By the tables of the
/// other two members the rebuild never ended, yet the replacement may have continued with the
/// member that they trust.
#[test]
fn a_member_that_was_being_rebuilt_counts_among_those_that_may_have_continued_alone() {
    let steps = vec![
        (4, 0b1011, 0, [None, None]),
        (3, 0, 0, [None, None]),
        (2, 1_001_489_286, 6_360_433_827_297_628_153, [None, Some(1)]),
        (4, 0b1101, 5_645_602_659_742_629_661, [Some(1), None]),
        (4, 0b0111, 0, [None, None]),
        (0, 0, 0, [None, None]),
        (4, 0b1010, 0, [None, None]),
    ];
    Model::live(&config(2, 2), &DEFAULT, steps).unwrap();
}

type Step = (u8, u32, u64, [Cut; 2]);

fn steps(kinds: u8) -> impl Strategy<Value = Vec<Step>> {
    let cut = || proptest::option::weighted(0.3, 0..4usize);
    let cuts = (cut(), cut()).prop_map(|(first, second)| [first, second]);
    proptest::collection::vec((0..kinds, any::<u32>(), any::<u64>(), cuts), 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// In any history, an array that is assembled without force holds every acknowledged write on
    /// every member that it trusts.
    #[test]
    fn an_assembled_array_holds_every_acknowledged_write(shape in 0..4usize, steps in steps(5)) {
        let config = [mirror(2), mirror(3), config(2, 1), config(2, 2)][shape].clone();
        Model::live(&config, &DEFAULT, steps)?;
    }

    /// An array that starts although missing members could have continued alone holds at least all
    /// writes of the present members. So no acknowledged write of one side is dropped silently.
    #[test]
    fn no_side_that_is_present_is_dropped_silently(shape in 0..3usize, steps in steps(8)) {
        let config = [mirror(2), mirror(3), config(2, 2)][shape].clone();
        Model::live(&config, &RUN, steps)?;
    }

    /// Four members that see no other fault than power losses in commits always return to the
    /// array.
    #[test]
    fn power_losses_alone_cost_no_member(
        cuts in proptest::collection::vec((0..5usize, any::<u64>(), 0..2usize), 1..20),
    ) {
        let mut model = Model::new(&config(2, 2));
        for (cut, shuffle, which) in cuts {
            let mut order: Vec<usize> = (0..4).collect();
            order.sort_by_key(|slot| shuffle.rotate_left(*slot as u32 * 13) % 97);
            let mut power = [None, None];
            power[which] = Some(cut);
            model.assemble((0..4).collect(), &DEFAULT, &order, power)?;
            prop_assert!(model.tables.iter().all(|table| table.members.iter().all(|member| member.is_live())));
            let found = (0..4).map(|slot| device(slot, &model.tables[slot])).collect();
            let assembly = assemble(found, &DEFAULT).unwrap();
            prop_assert!(assembly.missing.is_empty() && assembly.members.iter().all(Option::is_some));
        }
    }
}
