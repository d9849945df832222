//! Decides which of the devices found form an array, and whether the array may be started. A pure
//! decision without I/O.
//!
//! The newest table decides. A member that it trusts is used unless its table is older than the one
//! that was durable everywhere ([`Table::settled`]). The rule is sound because a failure is durable
//! on all other members before a write that skipped the failed member is acknowledged. One check
//! remains: whether the newest table is among the devices at all. The start is refused if the
//! missing members could have continued alone.

mod reshape;

use super::store::Found;
use super::superblock::{
    FIRST_GENERATION, Label, Member, MemberSet, MemberState, Reason, Relation, Superblock, Table,
};
use crate::{Consistency, Matrix, Uuid};
use std::collections::HashMap;

/// The array to assemble, and the checks to override.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AssembleOptions {
    /// The array; `None` if all devices belong to one array.
    pub array: Option<Uuid>,
    /// Start although the missing members could have continued without the present ones.
    pub run: bool,
    /// Start although data may be lost; [`Assembly::losses`] lists the losses.
    pub force: bool,
}

/// An array that may be started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assembly {
    /// The newest table. It still trusts the members in `missing`: see [`Assembly::opening_table`].
    pub table: Table,
    /// The members to use, by slot, including those that are being rebuilt. Their layouts match the
    /// table, also where a member has missed the start of a reshape.
    pub members: Vec<Option<Found>>,
    /// Slots of members that the table trusts, but that are absent or unusable.
    pub missing: Vec<usize>,
    /// Members of the array that have missed writes.
    pub returning: Vec<Returning>,
    /// Devices that are not used, with the reasons.
    pub rejected: Vec<Rejected>,
    /// Those of them whose newest table was never committed: it trusts a present member that does
    /// not have it. The start writes the array's table to them. Without that member they would look
    /// like another line.
    pub disowned: Vec<Found>,
    /// Spares for this array or for any.
    pub spares: Vec<Found>,
    /// Why the array is read-only, if it is.
    pub read_only: Option<String>,
    /// Possible losses of a forced start, as sentences.
    pub losses: Vec<String>,
    /// Parity must be resynced everywhere before it can be trusted, after a forced start.
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
    /// The member needs only the regions marked [`super::intent_bitmap::STALE`]; otherwise
    /// everything.
    pub is_partial: bool,
}

/// A device that is not used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejected {
    /// The device.
    pub name: String,
    /// The reason: a sentence without the name.
    pub why: String,
}

/// Why an array is not started.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No device is a member.
    #[error("no member among the devices")]
    Nothing,
    /// The devices belong to several arrays.
    #[error(
        "{first} is of array {first_array}, {second} is of array {second_array}: name the array to start"
    )]
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
    /// Two devices claim to be the same member.
    #[error(
        "member {member}: claimed by {first} and {second}: one is a copy of the other, or both are one device"
    )]
    Duplicate {
        /// The member.
        member: Uuid,
        /// A device.
        first: String,
        /// The other.
        second: String,
    },
    /// Two sets of members continued without each other.
    #[error(
        "split brain: {first} and {second} continued without each other after epoch {epoch}; --force uses {first}"
    )]
    SplitBrain {
        /// The newer side: devices, generation.
        first: String,
        /// The other side.
        second: String,
        /// The last common epoch.
        epoch: u64,
    },
    /// The creation of the array was interrupted.
    #[error("array {array}: its creation was interrupted; create it again")]
    Creating {
        /// The array: name and UUID.
        array: String,
    },
    /// Only devices that an interrupted change was adding are present.
    #[error(
        "array {array}: the change that adds {devices} was interrupted, and no member of the array is present"
    )]
    Adding {
        /// The array: name and UUID.
        array: String,
        /// The devices.
        devices: String,
    },
    /// More members are missing than the array can reconstruct.
    #[error(
        "array {array}: group {group} needs {needed} of its {members} members and has {present}: {missing}"
    )]
    TooFew {
        /// The array.
        array: String,
        /// The group.
        group: usize,
        /// Members that the group needs.
        needed: usize,
        /// Members of the complete group.
        members: usize,
        /// Usable members.
        present: usize,
        /// The unusable members and the reasons, as text.
        missing: String,
    },
    /// The missing members may hold newer data than the present ones.
    #[error(
        "array {array}: {missing} could have continued without the others and hold newer data; --run starts without them"
    )]
    MayBeOld {
        /// The array.
        array: String,
        /// The missing members, as text.
        missing: String,
    },
    /// An unclean stop and a missing member, without a log.
    #[error(
        "array {array}: stopped uncleanly, without a log and without {missing}: blocks of dirty regions may be wrong; \
         --force accepts wrong blocks there"
    )]
    DirtyDegraded {
        /// The array.
        array: String,
        /// The missing members, as text.
        missing: String,
    },
}

/// A device with a superblock of a member.
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

/// Candidates with one history, the newest first.
type Line = Vec<Candidate>;

/// The line to assemble.
struct Choice {
    line: Line,
    /// Members of all other lines.
    others: Vec<Candidate>,
    /// Those of them whose newest table was never committed.
    disowned: Vec<Found>,
    /// Losses that the choice causes.
    losses: Vec<String>,
}

/// Decides which array the devices `found` form.
///
/// # Errors
/// Names the reason, with the devices, why no array can be started.
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
            let why = format!("device belongs to array {}", describe(candidate.table()));
            rejected.push(Rejected { name: candidate.found.name.clone(), why });
        }
        is_ours
    });
    refuse_duplicates(&candidates)?;
    let (candidates, newcomers) = drop_newcomers(candidates)?;
    let Choice { line, others, disowned, mut losses } = choose_line(candidates, options.force)?;
    let table = line[0].table().clone();
    rejected.extend(others.into_iter().map(|other| Rejected {
        why: format!(
            "superblock is of another line at generation {}: the array continued without it to generation {}",
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
        disowned,
        spares: ours(spares, array),
        losses: Vec::new(),
        needs_sync: false,
        is_forced: options.force,
    };
    line.into_iter().for_each(|candidate| assembly.place(candidate));
    newcomers.into_iter().for_each(|candidate| assembly.leave_out(candidate));
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

/// Separates the devices that an interrupted change was adding: their tables say so, and no later
/// finished table includes them. Returns the other candidates and these. Refuses an array whose
/// creation was interrupted: no candidate remains.
///
/// New members get their superblocks first. They become members with a table that is written to all
/// of them and to all existing members. A member that has this table vouches for those that do not
/// have it yet.
fn drop_newcomers(candidates: Vec<Candidate>) -> Result<(Vec<Candidate>, Vec<Candidate>), Refusal> {
    let (newcomers, mut kept): (Vec<Candidate>, Vec<Candidate>) =
        candidates.into_iter().partition(|candidate| candidate.table().is_creating);
    if let (Some(newcomer), true) = (newcomers.first(), kept.is_empty()) {
        let array = describe(newcomer.table());
        if newcomer.generation() == FIRST_GENERATION {
            return Err(Refusal::Creating { array });
        }
        return Err(Refusal::Adding { array, devices: names(&newcomers) });
    }
    let (known, dropped): (Vec<Candidate>, Vec<Candidate>) = newcomers.into_iter().partition(|newcomer| {
        kept.iter().any(|other| {
            let is_it = |member: &Member| member.uuid == newcomer.superblock.member;
            newcomer.table().relation_to(other.table()) == Relation::Ancestor
                && other.table().members.iter().any(is_it)
        })
    });
    kept.extend(known);
    Ok((kept, dropped))
}

/// Sorts the candidates into lines and chooses the line to assemble. Tables from before two lines
/// diverged belong to both.
///
/// Two cases are no split brain, and nothing that a client relies on is dropped:
///
/// * A table that trusts a present member that does not know it was never committed: its line ends
///   with the table before it.
/// * A line that served no client since it diverged from another remaining line has no data that
///   the other lacks. Interrupted starts leave such lines.
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
        losses.push(format!("all writes of {second_side} after the split are lost"));
    }
    let chosen = chosen.clone();
    let is_committed =
        |candidate: &&Candidate| committed.iter().any(|other| std::ptr::eq(*other, *candidate));
    let is_disowned = |candidate: &&Candidate| !is_committed(candidate) && !is_of(candidate, &chosen);
    let disowned = candidates.iter().filter(is_disowned).map(|candidate| candidate.found.clone()).collect();
    let (line, others) = candidates.into_iter().partition(|candidate| is_of(candidate, &chosen));
    Ok(Choice { line, others, disowned, losses })
}

/// The newest candidate of each line; the candidates are sorted, newest first.
fn heads_of<'a>(candidates: &[&'a Candidate]) -> Vec<&'a Candidate> {
    let mut heads: Vec<&Candidate> = Vec::new();
    for candidate in candidates {
        if heads.iter().all(|head| !is_of(candidate, head)) {
            heads.push(candidate);
        }
    }
    heads
}

/// Whether a candidate belongs to the line of `head`.
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

/// Whether the line at `place` served no client since it diverged from one of the others.
fn is_covered(place: usize, heads: &[&Candidate]) -> bool {
    let own = heads[place].table();
    let others = heads.iter().enumerate().filter(|(other, _)| *other != place);
    others.into_iter().any(|(_, other)| own.served_epoch <= common_epoch(own, other.table()))
}

/// The members of one line that do not also belong to another.
fn side(head: &Candidate, other: &Candidate, candidates: &[Candidate]) -> String {
    let is_own = |candidate: &&Candidate| is_of(candidate, head) && !is_of(candidate, other);
    format!("{} (generation {})", names(candidates.iter().filter(is_own)), head.generation())
}

fn names<'a>(candidates: impl IntoIterator<Item = &'a Candidate>) -> String {
    let names: Vec<&str> = candidates.into_iter().map(|candidate| candidate.found.name.as_str()).collect();
    names.join(", ")
}

/// The newest epoch that both tables know, or 0.
fn common_epoch(a: &Table, b: &Table) -> u64 {
    a.history.iter().filter(|epoch| b.history.contains(epoch)).map(|epoch| epoch.epoch).max().unwrap_or(0)
}

fn read_only(line: &[Candidate]) -> Option<String> {
    let unknown = line.iter().fold(0, |unknown, candidate| unknown | candidate.superblock.unknown_ro_compat);
    (unknown != 0).then(|| format!("features {unknown:#x}: unknown to this version"))
}

impl Assembly {
    /// Puts a candidate of the chosen line into its slot, or rejects it.
    fn place(&mut self, candidate: Candidate) {
        let Candidate { found, superblock } = candidate;
        let slot = usize::from(superblock.slot);
        let generation = superblock.table.generation;
        let reject = |found: Found, why: String| Rejected { name: found.name, why };
        let member = self.table.members.get(slot).filter(|member| member.uuid == superblock.member);
        // A copy that was introduced holds everything only where a table has had it as live.
        let is_member = member.is_some_and(|member| match member.state {
            MemberState::Live => true,
            MemberState::Rebuilding { .. } => false,
            MemberState::Missing { since } => since > 0,
        });
        if let Some(spare) = superblock.introduced().filter(|_| !is_member) {
            return self.spares.push(Found { label: Label::Spare(spare), ..found });
        }
        let Some(member) = member else {
            let why = format!("slot {slot} now belongs to another member");
            return self.rejected.push(reject(found, why));
        };
        if found.capacity < superblock.layout.member_bytes {
            let (is, was) = (found.capacity, superblock.layout.member_bytes);
            let why = format!("capacity {is} bytes: smaller than the {was} bytes of slot {slot}");
            return self.rejected.push(reject(found, why));
        }
        match member.state {
            MemberState::Missing { since } => {
                // Writes that the member took on its own are not in the write-intent bitmap, so its
                // table must be one that the array knows from before the member left.
                let is_known = superblock.table.is_remembered_by(&self.table);
                // Regions refer to one geometry, so a reshape invalidates them.
                let is_one_shape = self.table.reshape.is_none() && superblock.table.has_shape_of(&self.table);
                let is_partial = is_known && is_one_shape && generation + 1 == since;
                self.returning.push(Returning { slot, found, is_partial });
            }
            _ if generation < self.table.settled => {
                let why = format!(
                    "superblock is stale: generation {generation}, while generation {} was durable on slot {slot}: \
                     the device lost writes, or is an old copy",
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

    /// Rejects a device that no table has as a member. The copy of a member becomes a spare of the
    /// array instead.
    fn leave_out(&mut self, Candidate { found, superblock }: Candidate) {
        match superblock.introduced() {
            Some(spare) => self.spares.push(Found { label: Label::Spare(spare), ..found }),
            None => self
                .rejected
                .push(Rejected { name: found.name, why: "its addition to the array was interrupted".into() }),
        }
    }

    /// Number of members of a set that are present and complete.
    fn usable(&self, set: &MemberSet) -> usize {
        let is_usable = |slot: &usize| self.members[*slot].is_some() && self.table.members[*slot].is_live();
        set.slots.clone().filter(is_usable).count()
    }

    fn is_usable(&self, set: &MemberSet) -> bool {
        self.usable(set) >= set.needed
    }

    /// Forced: trusts returning members that have missed writes, the newest first, until every
    /// group has enough. Members with another geometry are excluded, because a reshape has moved
    /// their strips.
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
                    "{} (slot {slot}) is trusted again at generation {}: writes up to generation {} may be lost or \
                     mixed with older data",
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
                format!("{name} failed at generation {since}: {}", member.reason.text())
            }
        }
    }

    fn name(&self, slot: usize) -> String {
        format!("slot {slot} ({})", self.table.members[slot].uuid)
    }

    fn names(&self, slots: &[usize]) -> String {
        slots.iter().map(|slot| self.name(*slot)).collect::<Vec<_>>().join(", ")
    }

    /// Refuses the start if missing members that are trusted could have continued alone and marked
    /// the present ones failed. A member that was being rebuilt may have become live since.
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

    /// Refuses a degraded start after an unclean stop without a log: parity of some rows may not
    /// match, so the blocks of the missing member cannot be reconstructed there. Mirrors are
    /// exempt: each leg holds the old or the new block, and both are correct.
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
        self.losses.push(format!("blocks of {missing} in dirty regions may be wrong"));
        Ok(())
    }

    /// The table for the next commit, without other changes. Some members may lack the newest
    /// table, and some may have a newer one that was never committed.
    pub fn next_table(&self, updated_ns: u64) -> Table {
        let generations = || self.members.iter().flatten().map(generation);
        let newest = generations().max().unwrap_or(0).max(self.table.generation);
        let settled = generations().min().unwrap_or(self.table.settled);
        Table { generation: newest + 1, settled, ..self.table.retry(updated_ns) }
    }

    /// The table for the first commit, in which missing members are failed. `epoch_id` is random.
    /// The engine replays the log, and then commits a new nonce and clears `is_clean`.
    ///
    /// Every start begins an epoch. A table whose commit a power loss interrupted may be on absent
    /// members. If these continue alone, their tables must be recognizable as another line.
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
