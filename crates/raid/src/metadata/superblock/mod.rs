//! The superblock: a member's metadata about itself and its array.
//!
//! A [`Superblock`] has two parts. The [`Table`] is the same on all members: the array's
//! configuration and the states of its members. The rest belongs to the member: its identity and
//! its layout. `codec` encodes and decodes it.
//!
//! Two numbers order tables. The *generation* grows with each commit. The *epoch* grows when
//! membership changes and with every start. Each epoch has a random id, and a table contains the
//! ids of its ancestors ([`Table::history`]). So two tables show whether they belong to one line or
//! to two (split brain).

mod codec;
mod reshape;
mod schedule;

pub use codec::{DecodeError, HEAD_BYTES, MAGIC, VERSION};
pub use reshape::Reshape;

use super::layout::Layout;
use super::maintenance::Maintenance;
use crate::{ArrayConfig, Uuid};
use serde::Serialize;
use std::cmp::Ordering;
use std::ops::Range;

/// Most epochs in a table's history.
pub const HISTORY: usize = 32;
/// The generation of an array's first table.
pub const FIRST_GENERATION: u64 = 1;
/// Longest name of a host in bytes.
pub const MAX_OWNER_BYTES: usize = 64;

/// The content of a superblock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Label {
    /// The device is a member of an array.
    Member(Box<Superblock>),
    /// The device is a spare.
    Spare(Spare),
}

/// The superblock of a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// The member's identity.
    pub member: Uuid,
    /// The member's slot in the array.
    pub slot: u16,
    /// The member's layout.
    pub layout: Layout,
    /// Features that this version does not know, and that an older program may ignore while it does
    /// not write (see `docs/on-disk-formats.md`). If not 0, the array is read-only.
    pub unknown_ro_compat: u64,
    /// The part that is the same on all members.
    pub table: Table,
}

/// The superblock of a spare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spare {
    /// The spare's identity; the member that it becomes keeps it.
    pub member: Uuid,
    /// The array of the spare; `None` for any.
    pub array: Option<Uuid>,
    /// The name of that array, or empty.
    pub array_name: String,
    /// Bytes of the device when it became a spare.
    pub member_bytes: u64,
    /// When the device became a spare, in nanoseconds since 1970.
    pub created_ns: u64,
    /// The host that made it a spare.
    pub owner: String,
}

/// The metadata that is the same on all members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// The configuration of the array.
    pub config: ArrayConfig,
    /// Grows by one with each commit.
    pub generation: u64,
    /// The last generation that was durable on every member that took writes then: a member with an
    /// older one has lost writes.
    pub settled: u64,
    /// Grows by one when the set of live members changes, and with every start.
    pub epoch: u64,
    /// The newest epoch that may have served clients. A start begins an epoch, and the array serves
    /// no client before the start is complete. Until then no acknowledged write depends on its
    /// tables.
    pub served_epoch: u64,
    /// The epochs before and including this one, oldest first, with their random ids; at most
    /// [`HISTORY`].
    pub history: Vec<EpochId>,
    /// Makes entries of this assembly's log valid; new at every assembly.
    pub nonce: [u8; 16],
    /// The array was stopped without requests in flight.
    pub is_clean: bool,
    /// The array, or this device's part of it, is being created. It counts only if a finished table
    /// trusts it.
    pub is_creating: bool,
    /// Writes use the log: always with `ppl`, with `bitmap` while a member is missing.
    pub is_logging: bool,
    /// The bits of a region whose page was never written ([`super::intent_bitmap`]).
    pub initial_region: u8,
    /// The members by slot.
    pub members: Vec<Member>,
    /// Bytes of members' data that the resync has completed; `None` without a resync.
    pub resync_cursor: Option<u64>,
    /// Bytes of members' data that the scrub has completed; `None` without a scrub.
    pub scrub_cursor: Option<u64>,
    /// Whether the running scrub rewrites wrong strips.
    pub scrub_repairs: bool,
    /// Whether the schedule has started the running scrub.
    pub scrub_is_scheduled: bool,
    /// When a scheduled scrub was last cancelled, in seconds since 1970; 0 for never.
    pub scrub_cancelled_s: u32,
    /// When the last scrub ended, in nanoseconds since 1970; 0 for never.
    pub scrubbed_ns: u64,
    /// An operator's settings for the upkeep.
    pub maintenance: Maintenance,
    /// The reshape in progress.
    pub reshape: Option<Reshape>,
    /// The host that serves the array, or was the last to serve it.
    pub owner: String,
    /// When the array was created, in nanoseconds since 1970.
    pub created_ns: u64,
    /// When this table was committed, in nanoseconds since 1970.
    pub updated_ns: u64,
}

/// An epoch, with an id that distinguishes it from another line's epoch of the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct EpochId {
    /// The epoch.
    pub epoch: u64,
    /// The random id.
    pub id: u64,
}

/// A member as the table knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Member {
    /// Its identity; [`Uuid::default`] for an empty slot.
    pub uuid: Uuid,
    /// Whether it can be trusted.
    pub state: MemberState,
    /// Why it is not live.
    pub reason: Reason,
}

/// Whether a member can be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemberState {
    /// All data of the member is valid.
    Live,
    /// The data below the cursor is valid.
    Rebuilding {
        /// Bytes of the member's data that are rebuilt.
        cursor: u64,
    },
    /// The member has failed: it has missed writes, or is absent.
    Missing {
        /// The generation of the table that marked it failed. 0 if the slot never had a member, or
        /// only one whose rebuild did not end.
        since: u64,
    },
}

/// Why a member is not live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u8)]
pub enum Reason {
    /// The member is live, or the slot is empty.
    None = 0,
    /// The member was not found at assembly.
    Absent = 1,
    /// A read failed and could not be repaired.
    ReadError = 2,
    /// A write failed.
    WriteError = 3,
    /// The member did not answer in time.
    TimedOut = 4,
    /// The device disappeared.
    Gone = 5,
    /// An operator marked it as failed.
    Failed = 6,
    /// An operator removed it.
    Removed = 7,
    /// The member returned after it had missed writes.
    Stale = 8,
    /// The member replaces another.
    Replacing = 9,
}

impl Reason {
    const ALL: [Reason; 10] = [
        Reason::None,
        Reason::Absent,
        Reason::ReadError,
        Reason::WriteError,
        Reason::TimedOut,
        Reason::Gone,
        Reason::Failed,
        Reason::Removed,
        Reason::Stale,
        Reason::Replacing,
    ];

    /// The reason in words that follow "the member failed: …".
    pub const fn text(self) -> &'static str {
        match self {
            Reason::None => "the slot is empty",
            Reason::Absent => "the member was not found",
            Reason::ReadError => "a read failed",
            Reason::WriteError => "a write failed",
            Reason::TimedOut => "the member did not answer in time",
            Reason::Gone => "the device disappeared",
            Reason::Failed => "an operator marked it as failed",
            Reason::Removed => "an operator removed it",
            Reason::Stale => "the member missed writes",
            Reason::Replacing => "the member replaces another",
        }
    }
}

impl Member {
    /// A live member.
    pub const fn live(uuid: Uuid) -> Member {
        Member { uuid, state: MemberState::Live, reason: Reason::None }
    }

    /// Whether all of its data is valid.
    pub fn is_live(&self) -> bool {
        self.state == MemberState::Live
    }

    /// Whether the member takes writes: it is live or being rebuilt.
    pub fn is_in(&self) -> bool {
        !matches!(self.state, MemberState::Missing { .. })
    }
}

impl Table {
    /// The table for the commit after this one, which is durable on every member that it trusts.
    /// Without other changes.
    #[must_use]
    pub fn next(&self, updated_ns: u64) -> Table {
        Table { settled: self.generation, ..self.retry(updated_ns) }
    }

    /// The table for the commit after this one, which could not be made durable everywhere. Without
    /// other changes.
    #[must_use]
    pub fn retry(&self, updated_ns: u64) -> Table {
        Table { generation: self.generation + 1, updated_ns, ..self.clone() }
    }

    /// Begins an epoch of an array that serves. Called once for each commit that changes which
    /// members are live. `id` is random.
    pub fn begin_epoch(&mut self, id: u64) {
        self.begin_unserved_epoch(id);
        self.served_epoch = self.epoch;
    }

    /// Begins an epoch of an array that does not serve yet: for the first commit of every start,
    /// and for members that fail before it serves. `id` is random.
    pub fn begin_unserved_epoch(&mut self, id: u64) {
        self.epoch += 1;
        if self.history.len() == HISTORY {
            self.history.remove(0);
        }
        self.history.push(EpochId { epoch: self.epoch, id });
    }

    /// The table that introduces the complete copy of a live member. It is being created: the copy
    /// becomes the member with a later table that names it.
    #[must_use]
    pub fn introducing(&self, slot: usize, uuid: Uuid) -> Table {
        let mut table = Table { is_creating: true, ..self.clone() };
        table.members[slot] = Member { reason: Reason::Replacing, ..Member::live(uuid) };
        table
    }

    /// Marks a member as failed. The caller begins an epoch.
    pub fn take_out(&mut self, slot: usize, reason: Reason) {
        let member = &mut self.members[slot];
        let since = if member.is_live() { self.generation } else { 0 };
        if member.is_in() {
            (member.state, member.reason) = (MemberState::Missing { since }, reason);
        }
    }

    /// Every set of members with its redundancy. Data is lost if fewer than `needed` members of a
    /// set are complete. The sets are the groups, and during a reshape also the members before it.
    pub fn sets(&self) -> impl Iterator<Item = MemberSet> + use<> {
        let geometry = self.config.geometry;
        let size = geometry.group_members();
        let set =
            move |group| MemberSet { group, slots: group * size..(group + 1) * size, needed: geometry.data };
        let before = self.reshape.as_ref().map(|reshape| MemberSet {
            group: 0,
            slots: 0..reshape.old_geometry.members(),
            needed: reshape.old_geometry.data,
        });
        (0..geometry.groups).map(set).chain(before)
    }

    /// Whether every set of members ([`Table::sets`]) has enough live members.
    pub fn is_alive(&self) -> bool {
        let live = |set: &MemberSet| set.slots.clone().filter(|slot| self.members[*slot].is_live()).count();
        self.sets().all(|set| live(&set) >= set.needed)
    }

    /// How many more members may fail, whichever they are, without loss of data: the least of all
    /// sets ([`Table::sets`]). Only live members count that `is_present` confirms.
    pub fn redundancy_left(&self, is_present: impl Fn(usize) -> bool) -> usize {
        let counts = |slot: &usize| self.members[*slot].is_live() && is_present(*slot);
        let left = |set: MemberSet| set.slots.filter(counts).count().saturating_sub(set.needed);
        self.sets().map(left).min().unwrap_or(0)
    }

    /// Whether both tables place strips on members in the same way. Growth by rows and by groups
    /// does not change that.
    pub fn has_shape_of(&self, other: &Table) -> bool {
        let shape = |table: &Table| (table.config.geometry.data, table.config.geometry.parity, table.reshape);
        shape(self) == shape(other)
    }

    /// Capacity of the array in bytes; during a reshape the old one.
    pub fn capacity(&self) -> u64 {
        let before = self.reshape.as_ref().map(|reshape| &reshape.old_geometry);
        before.unwrap_or(&self.config.geometry).capacity()
    }

    /// Whether some member is not live.
    pub fn is_degraded(&self) -> bool {
        self.members.iter().any(|member| !member.is_live())
    }

    /// Whether the same members are live as in another table.
    pub fn has_live_members_of(&self, other: &Table) -> bool {
        let live = |table: &Table| -> Vec<Option<Uuid>> {
            table.members.iter().map(|member| member.is_live().then_some(member.uuid)).collect()
        };
        live(self) == live(other)
    }

    /// Whether the other table has this one's epoch in its history.
    pub fn is_remembered_by(&self, other: &Table) -> bool {
        self.history.last().is_some_and(|epoch| other.history.contains(epoch))
    }

    /// The relation of the table to another one of the same array.
    pub fn relation_to(&self, other: &Table) -> Relation {
        if self.epoch > other.epoch {
            return other.relation_to(self).reversed();
        }
        let own = self.history.last().map(|epoch| epoch.id);
        let theirs = other.history.iter().find(|epoch| epoch.epoch == self.epoch).map(|epoch| epoch.id);
        match self.generation.cmp(&other.generation) {
            // An epoch that is missing in the other history is older than all of it: the member was
            // absent for long.
            _ if theirs.is_some_and(|id| Some(id) != own) => Relation::Diverged,
            Ordering::Less => Relation::Ancestor,
            // Within an epoch no member continues alone, so a later commit of the epoch is part of
            // the later line.
            _ if self.epoch < other.epoch => Relation::Diverged,
            Ordering::Equal => Relation::Same,
            Ordering::Greater => Relation::Descendant,
        }
    }
}

/// Members with common redundancy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberSet {
    /// Their group.
    pub group: usize,
    /// Their slots.
    pub slots: Range<usize>,
    /// Least number of complete members.
    pub needed: usize,
}

/// The relation of two tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relation {
    /// The same table.
    Same,
    /// The other one is a successor of this one.
    Ancestor,
    /// This one is a successor of the other one.
    Descendant,
    /// Neither is a successor of the other: two sides continued alone.
    Diverged,
}

impl Relation {
    fn reversed(self) -> Relation {
        match self {
            Relation::Ancestor => Relation::Descendant,
            Relation::Descendant => Relation::Ancestor,
            Relation::Same | Relation::Diverged => self,
        }
    }
}

impl Superblock {
    /// The array's UUID.
    pub fn array(&self) -> Uuid {
        self.table.config.uuid
    }

    /// The spare that an introduced copy of a member is while no table has it as a member
    /// ([`Table::introducing`]); `None` for every other superblock.
    pub fn introduced(&self) -> Option<Spare> {
        let Superblock { member, slot, layout, table, .. } = self;
        let is_copy = table.is_creating && table.members[usize::from(*slot)].reason == Reason::Replacing;
        is_copy.then(|| Spare {
            member: *member,
            array: Some(table.config.uuid),
            array_name: table.config.name.clone(),
            member_bytes: layout.member_bytes,
            created_ns: table.updated_ns,
            owner: table.owner.clone(),
        })
    }
}
