//! Which of the devices that were found make up an array, and whether it may be started. A pure decision.
//!
//! The newest table decides. A member that it trusts is taken unless the member is older than what was durable
//! everywhere ([`Table::settled`]). That is sound because a member is declared out, durably on all others, before any
//! write that skipped it is acknowledged. What remains is to see that the newest table is here at all: a set of
//! members that is missing and could have gone on alone is asked for.

mod reshape;

use super::store::Found;
use super::superblock::{
    FIRST_GENERATION, Label, Member, MemberSet, MemberState, Reason, Relation, Superblock, Table,
};
use crate::{Consistency, Matrix, Uuid};
use std::collections::HashMap;

/// What to assemble, and how much to believe.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AssembleOptions {
    /// The array; `None` when all devices are of one.
    pub array: Option<Uuid>,
    /// Start although members are missing that could have gone on without these.
    pub run: bool,
    /// Start although data may be lost; [`Assembly::losses`] says what.
    pub force: bool,
}

/// An array that may be started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assembly {
    /// The newest table. Members in `missing` are still trusted by it: see [`Assembly::opening_table`].
    pub table: Table,
    /// The members by slot: those to be used. What the table calls rebuilding is here too. Their layouts are those that go
    /// with the table, also where a member has not heard of a change of shape yet.
    pub members: Vec<Option<Found>>,
    /// Slots of members that the table trusts and that are not here, or cannot be used.
    pub missing: Vec<usize>,
    /// Members of the array that have missed writes.
    pub returning: Vec<Returning>,
    /// Devices that are left out, and why.
    pub rejected: Vec<Rejected>,
    /// Spares for this array or for any.
    pub spares: Vec<Found>,
    /// Why the array must not be written, if so.
    pub read_only: Option<String>,
    /// What may be lost because the start was forced: sentences.
    pub losses: Vec<String>,
    /// Parity must be made again everywhere before it can be trusted: a forced start.
    pub needs_sync: bool,
    /// The start was forced.
    pub is_forced: bool,
}

/// A member that has missed writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Returning {
    /// Its slot.
    pub slot: usize,
    /// The member.
    pub found: Found,
    /// It needs only the regions marked [`super::region_map::STALE`]; otherwise everything.
    pub is_partial: bool,
}

/// A device that is left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejected {
    /// The device.
    pub name: String,
    /// Why: a sentence without the name.
    pub why: String,
}

/// Why an array is not started.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No device is a member.
    #[error("no member among the devices")]
    Nothing,
    /// The devices are of several arrays.
    #[error("{first} is of array {first_array}, {second} is of array {second_array}: say which one is meant")]
    Foreign {
        /// A device.
        first: String,
        /// Its array: name and UUID.
        first_array: String,
        /// A device of another array.
        second: String,
        /// Its array.
        second_array: String,
    },
    /// Two devices say that they are the same member.
    #[error(
        "{first} and {second} are both member {member}: one is a copy of the other, or both are one device"
    )]
    Duplicate {
        /// The member.
        member: Uuid,
        /// A device.
        first: String,
        /// The other.
        second: String,
    },
    /// Two sets of members went on without each other.
    #[error(
        "split brain: {first} and {second} went on without each other after epoch {epoch}; --force takes {first}"
    )]
    SplitBrain {
        /// The newer side: devices, generation.
        first: String,
        /// The other side.
        second: String,
        /// Epochs up to here are common.
        epoch: u64,
    },
    /// The array was never finished.
    #[error("array {array}: it was being created and never finished; create it again")]
    Creating {
        /// The array: name and UUID.
        array: String,
    },
    /// Only devices that were to become members are here.
    #[error(
        "array {array}: {devices} were being added to it and never became members; none of its own members is here"
    )]
    Adding {
        /// The array: name and UUID.
        array: String,
        /// The devices.
        devices: String,
    },
    /// More members are missing than parity can replace.
    #[error(
        "array {array}: group {group} needs {needed} of its {members} members and has {present}: {missing}"
    )]
    TooFew {
        /// The array.
        array: String,
        /// The group.
        group: usize,
        /// Members that it needs.
        needed: usize,
        /// Members that it has when whole.
        members: usize,
        /// Members that can be used.
        present: usize,
        /// What is missing and why: text.
        missing: String,
    },
    /// The missing members may hold newer data than those that are here.
    #[error(
        "array {array}: {missing} could have gone on without the others and hold newer data; --run starts without them"
    )]
    MayBeOld {
        /// The array.
        array: String,
        /// What is missing: text.
        missing: String,
    },
    /// A crash and a missing member together, and no log.
    #[error(
        "array {array} was not stopped cleanly, keeps no log and lacks {missing}: blocks of regions that were being \
         written cannot be told right from wrong; --force accepts wrong blocks there"
    )]
    DirtyDegraded {
        /// The array.
        array: String,
        /// What is missing: text.
        missing: String,
    },
}

/// A device that says it is a member.
#[derive(Clone)]
struct Candidate {
    found: Found,
    superblock: Box<Superblock>,
}

impl Candidate {
    fn table(&self) -> &Table {
        &self.superblock.table
    }

    fn generation(&self) -> u64 {
        self.superblock.table.generation
    }
}

/// Candidates that went one way, the newest first.
type Line = Vec<Candidate>;

/// The line to go on with.
struct Choice {
    line: Line,
    /// Members of all other lines.
    others: Vec<Candidate>,
    /// What is lost by the choice.
    losses: Vec<String>,
}

/// Decides what the devices `found` make up.
///
/// # Errors
/// Says why nothing can be started, with the devices' names.
pub fn assemble(found: Vec<Found>, options: &AssembleOptions) -> Result<Assembly, Refusal> {
    let (mut candidates, spares) = split(found);
    let array = match options.array {
        Some(array) => array,
        None => only_array(&candidates)?,
    };
    let mut rejected = Vec::new();
    candidates.retain(|candidate| {
        let is_ours = candidate.superblock.array() == array;
        if !is_ours {
            let why = format!("it is of array {}", describe(candidate.table()));
            rejected.push(Rejected { name: candidate.found.name.clone(), why });
        }
        is_ours
    });
    refuse_duplicates(&candidates)?;
    let candidates = drop_newcomers(candidates, &mut rejected)?;
    let Choice { line, others, mut losses } = choose_line(candidates, options.force)?;
    let table = line[0].table().clone();
    rejected.extend(others.into_iter().map(|other| Rejected {
        why: format!(
            "it is of another line, generation {}: the others went on without it (the array is at {})",
            other.generation(),
            table.generation
        ),
        name: other.found.name,
    }));
    let mut assembly = Assembly {
        members: vec![None; table.members.len()],
        read_only: read_only(&line),
        table,
        missing: Vec::new(),
        returning: Vec::new(),
        rejected,
        spares: ours(spares, array),
        losses: Vec::new(),
        needs_sync: false,
        is_forced: options.force,
    };
    line.into_iter().for_each(|candidate| assembly.place(candidate));
    assembly.losses.append(&mut losses);
    assembly.needs_sync = !assembly.losses.is_empty();
    if options.force {
        assembly.promote();
    }
    assembly.missing = (0..assembly.members.len())
        .filter(|slot| assembly.members[*slot].is_none() && assembly.table.members[*slot].is_in())
        .collect();
    assembly.refuse_too_few()?;
    assembly.refuse_old(options)?;
    assembly.refuse_dirty(options)?;
    Ok(assembly)
}

fn split(found: Vec<Found>) -> (Vec<Candidate>, Vec<Found>) {
    let (mut candidates, mut spares) = (Vec::new(), Vec::new());
    for found in found {
        match &found.label {
            Label::Member(superblock) => {
                candidates.push(Candidate { superblock: superblock.clone(), found });
            }
            Label::Spare(_) => spares.push(found),
        }
    }
    (candidates, spares)
}

fn ours(spares: Vec<Found>, array: Uuid) -> Vec<Found> {
    let is_ours = |found: &Found| match &found.label {
        Label::Spare(spare) => spare.array.is_none_or(|other| other == array),
        Label::Member(_) => false,
    };
    spares.into_iter().filter(is_ours).collect()
}

fn describe(table: &Table) -> String {
    format!("{} ({})", table.config.name, table.config.uuid)
}

fn only_array(candidates: &[Candidate]) -> Result<Uuid, Refusal> {
    let first = candidates.first().ok_or(Refusal::Nothing)?;
    match candidates.iter().find(|other| other.superblock.array() != first.superblock.array()) {
        None => Ok(first.superblock.array()),
        Some(second) => Err(Refusal::Foreign {
            first: first.found.name.clone(),
            first_array: describe(first.table()),
            second: second.found.name.clone(),
            second_array: describe(second.table()),
        }),
    }
}

fn refuse_duplicates(candidates: &[Candidate]) -> Result<(), Refusal> {
    let mut seen: HashMap<Uuid, &str> = HashMap::new();
    for Candidate { found, superblock } in candidates {
        if let Some(first) = seen.insert(superblock.member, &found.name) {
            let (first, second) = (first.to_owned(), found.name.clone());
            return Err(Refusal::Duplicate { member: superblock.member, first, second });
        }
    }
    Ok(())
}

/// Drops devices that were to become members and did not: their tables say so, and no finished table that came after
/// knows them. Of an array that was never finished nothing is left.
///
/// New members are given their superblocks first, and become members with a table that all of them and all that were
/// there before are to have: whichever member has it speaks for those that do not have it yet.
fn drop_newcomers(
    candidates: Vec<Candidate>,
    rejected: &mut Vec<Rejected>,
) -> Result<Vec<Candidate>, Refusal> {
    let (newcomers, mut kept): (Vec<Candidate>, Vec<Candidate>) =
        candidates.into_iter().partition(|candidate| candidate.table().is_creating);
    if let (Some(newcomer), true) = (newcomers.first(), kept.is_empty()) {
        let array = describe(newcomer.table());
        if newcomer.generation() == FIRST_GENERATION {
            return Err(Refusal::Creating { array });
        }
        return Err(Refusal::Adding { array, devices: names(&newcomers) });
    }
    let finished = kept.len();
    for newcomer in newcomers {
        let knows = |other: &Candidate| {
            let is_it = |member: &Member| member.uuid == newcomer.superblock.member;
            newcomer.table().relation_to(other.table()) == Relation::Ancestor
                && other.table().members.iter().any(is_it)
        };
        match kept[..finished].iter().any(knows) {
            true => kept.push(newcomer),
            false => rejected.push(Rejected {
                name: newcomer.found.name,
                why: "it was being added to the array and never became a member".into(),
            }),
        }
    }
    Ok(kept)
}

/// Sorts the candidates into lines and picks the one to go on with. What was before two lines parted is of both.
///
/// Nothing is dropped that anybody depends on:
/// * A table that trusts a member that is here and knows nothing of it was never committed: its line ends before it.
/// * A line that served nobody since it parted from another that stays holds nothing that the other lacks: starts that
///   were cut short.
fn choose_line(mut candidates: Vec<Candidate>, force: bool) -> Result<Choice, Refusal> {
    candidates.sort_by_key(|candidate| std::cmp::Reverse(candidate.generation()));
    let newest = candidates.first().ok_or(Refusal::Nothing)?;
    let mut committed: Vec<&Candidate> = candidates.iter().collect();
    let mut heads = loop {
        let heads = heads_of(&committed);
        let Some(head) = heads.iter().find(|head| !is_committed(head, &candidates)) else { break heads };
        committed.retain(|candidate| !std::ptr::eq(*candidate, *head));
    };
    while let Some(place) = (0..heads.len()).rev().find(|place| is_covered(*place, &heads)) {
        heads.remove(place);
    }
    let chosen = heads.first().copied().unwrap_or(newest);
    let mut losses = Vec::new();
    if let [first, second, ..] = heads[..] {
        let second_side = side(second, first, &candidates);
        if !force {
            return Err(Refusal::SplitBrain {
                first: side(first, second, &candidates),
                second: second_side,
                epoch: common_epoch(first.table(), second.table()),
            });
        }
        losses.push(format!("everything that {second_side} wrote after they parted is lost"));
    }
    let chosen = chosen.clone();
    let (line, others) = candidates.into_iter().partition(|candidate| is_of(candidate, &chosen));
    Ok(Choice { line, others, losses })
}

/// The newest of each line among candidates, of which newer ones come first.
fn heads_of<'a>(candidates: &[&'a Candidate]) -> Vec<&'a Candidate> {
    let mut heads: Vec<&Candidate> = Vec::new();
    for candidate in candidates {
        if heads.iter().all(|head| !is_of(candidate, head)) {
            heads.push(candidate);
        }
    }
    heads
}

/// Whether a candidate is of the line of `head`.
fn is_of(candidate: &Candidate, head: &Candidate) -> bool {
    candidate.table().relation_to(head.table()) != Relation::Diverged
}

/// Whether the table may have been durable on every member that it trusts.
fn is_committed(head: &Candidate, candidates: &[Candidate]) -> bool {
    let trusts = |other: &Candidate| {
        let members = &head.table().members;
        members.iter().any(|member| member.is_live() && member.uuid == other.superblock.member)
    };
    !candidates.iter().any(|other| !is_of(other, head) && trusts(other))
}

/// Whether nobody was served by the line at `place` since it parted from one of the others.
fn is_covered(place: usize, heads: &[&Candidate]) -> bool {
    let own = heads[place].table();
    let others = heads.iter().enumerate().filter(|(other, _)| *other != place);
    others.into_iter().any(|(_, other)| own.served_epoch <= common_epoch(own, other.table()))
}

/// The members of one line that are not of another as well.
fn side(head: &Candidate, other: &Candidate, candidates: &[Candidate]) -> String {
    let is_own = |candidate: &&Candidate| is_of(candidate, head) && !is_of(candidate, other);
    format!("{} (generation {})", names(candidates.iter().filter(is_own)), head.generation())
}

fn names<'a>(candidates: impl IntoIterator<Item = &'a Candidate>) -> String {
    let names: Vec<&str> = candidates.into_iter().map(|candidate| candidate.found.name.as_str()).collect();
    names.join(", ")
}

/// The newest epoch that both tables know; 0 when there is none.
fn common_epoch(a: &Table, b: &Table) -> u64 {
    a.history.iter().filter(|epoch| b.history.contains(epoch)).map(|epoch| epoch.epoch).max().unwrap_or(0)
}

fn read_only(line: &[Candidate]) -> Option<String> {
    let unknown = line.iter().fold(0, |unknown, candidate| unknown | candidate.superblock.unknown_ro_compat);
    (unknown != 0).then(|| format!("features {unknown:#x} are not known to this program"))
}

impl Assembly {
    /// Puts a candidate of the chosen line into its slot, or says why not.
    fn place(&mut self, candidate: Candidate) {
        let Candidate { found, superblock } = candidate;
        let slot = usize::from(superblock.slot);
        let generation = superblock.table.generation;
        let reject = |found: Found, why: String| Rejected { name: found.name, why };
        let Some(member) = self.table.members.get(slot).filter(|member| member.uuid == superblock.member)
        else {
            let why = format!("slot {slot} belongs to another member now");
            return self.rejected.push(reject(found, why));
        };
        if found.capacity < superblock.layout.member_bytes {
            let (is, was) = (found.capacity, superblock.layout.member_bytes);
            let why = format!("it has {is} bytes and had {was} as slot {slot}: it has shrunk");
            return self.rejected.push(reject(found, why));
        }
        match member.state {
            MemberState::Missing { since } => {
                // What it wrote on its own, if it did, is not in the region map: its table must be known to be the
                // one before it left.
                let is_known = superblock.table.is_remembered_by(&self.table);
                // Regions are about one shape, which stays.
                let is_one_shape = self.table.reshape.is_none() && superblock.table.has_shape_of(&self.table);
                let is_partial = is_known && is_one_shape && generation + 1 == since;
                self.returning.push(Returning { slot, found, is_partial });
            }
            _ if generation < self.table.settled => {
                let why = format!(
                    "it is stale: generation {generation}, while generation {} was durable on it as slot {slot}: \
                     its writes were lost, or it is an old copy",
                    self.table.settled
                );
                self.rejected.push(reject(found, why));
            }
            _ => match reshape::laid_out(&self.table, &superblock) {
                Ok(layout) => self.members[slot] = Some(reshape::with_layout(found, layout)),
                Err(why) => self.rejected.push(reject(found, why)),
            },
        }
    }

    /// How many members of a set hold everything and are here.
    fn usable(&self, set: &MemberSet) -> usize {
        let is_usable = |slot: &usize| self.members[*slot].is_some() && self.table.members[*slot].is_live();
        set.slots.clone().filter(is_usable).count()
    }

    fn is_usable(&self, set: &MemberSet) -> bool {
        self.usable(set) >= set.needed
    }

    /// Forced: takes members back that have missed writes, the newest first, where a group needs them. Not one that has
    /// missed some of a change of shape: its strips are others by now.
    fn promote(&mut self) {
        self.returning.sort_by_key(|member| std::cmp::Reverse(generation(&member.found)));
        for set in self.table.sets() {
            while !self.is_usable(&set) {
                let has_shape = |found: &Found| match &found.label {
                    Label::Member(superblock) => superblock.table.has_shape_of(&self.table),
                    Label::Spare(_) => false,
                };
                let is_wanted =
                    |member: &Returning| set.slots.contains(&member.slot) && has_shape(&member.found);
                let Some(place) = self.returning.iter().position(is_wanted) else { break };
                let Returning { slot, found, .. } = self.returning.remove(place);
                self.losses.push(format!(
                    "{} (slot {slot}) is trusted again at generation {}: what was written up to generation {} may be \
                     lost or mixed with what was there before",
                    found.name,
                    generation(&found),
                    self.table.generation
                ));
                let member = &mut self.table.members[slot];
                (member.state, member.reason) = (MemberState::Live, Reason::None);
                self.members[slot] = Some(found);
                self.needs_sync = true;
            }
        }
    }

    fn refuse_too_few(&self) -> Result<(), Refusal> {
        let Some(set) = self.table.sets().find(|set| !self.is_usable(set)) else { return Ok(()) };
        let present = self.usable(&set);
        let MemberSet { group, slots, needed } = set;
        let members = slots.len();
        let lost = slots.filter(|slot| self.members[*slot].is_none() || !self.table.members[*slot].is_live());
        Err(Refusal::TooFew {
            array: describe(&self.table),
            group,
            needed,
            members,
            present,
            missing: lost.map(|slot| self.excuse(slot)).collect::<Vec<_>>().join("; "),
        })
    }

    /// Why a slot's member is not used.
    fn excuse(&self, slot: usize) -> String {
        let member = &self.table.members[slot];
        let name = self.name(slot);
        match member.state {
            MemberState::Live => format!("{name} is missing"),
            MemberState::Rebuilding { cursor } => format!("{name} was being rebuilt (at byte {cursor})"),
            MemberState::Missing { since } => {
                format!("{name} is out since generation {since}: {}", member.reason.text())
            }
        }
    }

    fn name(&self, slot: usize) -> String {
        format!("slot {slot} ({})", self.table.members[slot].uuid)
    }

    fn names(&self, slots: &[usize]) -> String {
        slots.iter().map(|slot| self.name(*slot)).collect::<Vec<_>>().join(", ")
    }

    /// Members that are trusted and missing might have gone on alone, declaring these failed. One that was being rebuilt
    /// may have become live since.
    fn refuse_old(&self, options: &AssembleOptions) -> Result<(), Refusal> {
        let missing = |set: &MemberSet| {
            let slots = self.missing.iter().filter(|slot| set.slots.contains(slot));
            slots.filter(|slot| self.table.members[**slot].is_in()).count()
        };
        let could_go_on = self.table.sets().all(|set| missing(&set) >= set.needed);
        if could_go_on && !options.run && !options.force {
            let missing = self.names(&self.missing);
            return Err(Refusal::MayBeOld { array: describe(&self.table), missing });
        }
        Ok(())
    }

    /// Without a log, a crash leaves rows whose parity may not match: with a member missing, its blocks there cannot be
    /// computed. Mirrors hold either the old block or the new one, and both are right.
    fn refuse_dirty(&mut self, options: &AssembleOptions) -> Result<(), Refusal> {
        let table = &self.table;
        let keeps_no_log = table.config.consistency == Consistency::Bitmap && !table.is_logging;
        let lacking: Vec<usize> = (0..self.members.len())
            .filter(|slot| self.members[*slot].is_none() || !table.members[*slot].is_live())
            .collect();
        let is_mirror = table.config.matrix == Matrix::Copies;
        if table.is_clean || is_mirror || !keeps_no_log || lacking.is_empty() {
            return Ok(());
        }
        let missing = self.names(&lacking);
        if !options.force {
            return Err(Refusal::DirtyDegraded { array: describe(table), missing });
        }
        self.losses.push(format!("blocks of {missing} in regions that were being written may be wrong"));
        Ok(())
    }

    /// The table to commit after what was found, as yet the same. Some members may lack the newest table, and some may
    /// have a newer one that was never committed.
    pub fn next_table(&self, updated_ns: u64) -> Table {
        let generations = || self.members.iter().flatten().map(generation);
        let newest = generations().max().unwrap_or(0).max(self.table.generation);
        let settled = generations().min().unwrap_or(self.table.settled);
        Table { generation: newest + 1, settled, ..self.table.retry(updated_ns) }
    }

    /// The table to commit first: members that are missing are out. `epoch_id` is random. The engine sets a new nonce
    /// and takes `is_clean` away once the log has been replayed, in a commit of its own.
    ///
    /// Every start begins an epoch: a table that was half committed when power went may be on members that are not here,
    /// and who goes on without them has to be known for another line.
    pub fn opening_table(&self, epoch_id: u64, updated_ns: u64) -> Table {
        let mut table = self.next_table(updated_ns);
        table.begin_unserved_epoch(epoch_id);
        for slot in &self.missing {
            table.take_out(*slot, Reason::Absent);
        }
        table
    }
}

fn generation(found: &Found) -> u64 {
    match &found.label {
        Label::Member(superblock) => superblock.table.generation,
        Label::Spare(_) => 0,
    }
}

#[cfg(test)]
mod tests;
