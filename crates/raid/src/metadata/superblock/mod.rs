//! The superblock: what a member knows about itself and its array.
//!
//! A [`Superblock`] has two parts. The [`Table`] is the same on all members: the array's configuration and which of
//! its members can be trusted. The rest is the member's own: who it is and where things lie on it. [`codec`] turns it
//! into bytes and back.
//!
//! Two numbers order tables. The *generation* grows with each commit. The *epoch* grows when membership changes and
//! with every start; it has a random id, and a table knows the ids of its ancestors ([`Table::history`]), so that two
//! tables can be told to be one line or two (split brain).

mod codec;
mod reshape;

pub use codec::{DecodeError, HEAD_BYTES, MAGIC, VERSION};
pub use reshape::Reshape;

use super::layout::Layout;
use super::maintenance::Maintenance;
use crate::{ArrayConfig, Uuid};
use serde::Serialize;
use std::cmp::Ordering;
use std::ops::Range;

/// Ancestors that a table remembers.
pub const HISTORY: usize = 32;
/// The generation of an array's first table.
pub const FIRST_GENERATION: u64 = 1;
/// Longest name of a host in bytes.
pub const MAX_OWNER_BYTES: usize = 64;

/// What stands in a superblock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Label {
    /// The device is a member of an array.
    Member(Box<Superblock>),
    /// The device waits to become one.
    Spare(Spare),
}

/// The superblock of a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// The member's identity.
    pub member: Uuid,
    /// The member's number in the array.
    pub slot: u16,
    /// Where things lie on this member.
    pub layout: Layout,
    /// Features that an older program may ignore only while it does not write (see `docs/on-disk-formats.md`) and
    /// that this one does not know. When not 0 the array may be read only.
    pub unknown_ro_compat: u64,
    /// What all members agree on.
    pub table: Table,
}

/// The superblock of a spare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spare {
    /// The spare's identity; the member that it becomes keeps it.
    pub member: Uuid,
    /// The array it is for; `None` for any.
    pub array: Option<Uuid>,
    /// That array's name, or empty.
    pub array_name: String,
    /// Bytes of the device when it became a spare.
    pub member_bytes: u64,
    /// When it became one, in nanoseconds since 1970.
    pub created_ns: u64,
    /// The host that said so.
    pub owner: String,
}

/// What all members of an array agree on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// The array.
    pub config: ArrayConfig,
    /// Grows by one with each commit.
    pub generation: u64,
    /// The last generation that was durable on every member which took writes then: an older member has lost writes.
    pub settled: u64,
    /// Grows by one when other members are live than before, and with every start.
    pub epoch: u64,
    /// The newest epoch in which anybody may have been served. A start begins an epoch, and nobody is served until it
    /// has come to its end: before, nothing depends on its tables.
    pub served_epoch: u64,
    /// The epochs before and including this one, oldest first, with their random ids; at most [`HISTORY`].
    pub history: Vec<EpochId>,
    /// What makes entries of this assembly's log valid; new at every assembly.
    pub nonce: [u8; 16],
    /// Nothing was in flight when the array was stopped.
    pub is_clean: bool,
    /// The array, or this device's part of it, is being made: it counts only where a finished table trusts it.
    pub is_creating: bool,
    /// Writes go through the log: always with `ppl`, with `bitmap` while a member is missing.
    pub is_logging: bool,
    /// What a region that the region map has never had a page for reads as ([`super::region_map`]).
    pub initial_region: u8,
    /// The members by slot.
    pub members: Vec<Member>,
    /// Bytes of members' data that resync has passed; `None` when none is under way.
    pub resync_cursor: Option<u64>,
    /// Bytes of members' data that scrub has passed; `None` when none is under way.
    pub scrub_cursor: Option<u64>,
    /// Whether the scrub that is under way writes wrong strips again.
    pub scrub_repairs: bool,
    /// Whether the schedule has started the scrub that is under way.
    pub scrub_is_scheduled: bool,
    /// When a scheduled scrub was cancelled last, in seconds since 1970; 0 for never.
    pub scrub_cancelled_s: u32,
    /// When the last scrub ended, in nanoseconds since 1970; 0 for never.
    pub scrubbed_ns: u64,
    /// Choices of an operator about the upkeep.
    pub maintenance: Maintenance,
    /// The change of shape that is under way.
    pub reshape: Option<Reshape>,
    /// The host that serves the array, or did last.
    pub owner: String,
    /// When the array was made, in nanoseconds since 1970.
    pub created_ns: u64,
    /// When this table was committed, in nanoseconds since 1970.
    pub updated_ns: u64,
}

/// An epoch and what makes it unlike another line's epoch of the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct EpochId {
    /// The epoch.
    pub epoch: u64,
    /// Random.
    pub id: u64,
}

/// A member as the table knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Member {
    /// Its identity; [`Uuid::default`] when the slot has none.
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
    /// It holds everything.
    Live,
    /// It holds what lies below the cursor.
    Rebuilding {
        /// Bytes of the member's data that are rebuilt.
        cursor: u64,
    },
    /// It is out: it has missed writes, or is not there.
    Missing {
        /// The generation of the table that took it out. 0 when the slot never had a member, or one that did not yet
        /// hold everything.
        since: u64,
    },
}

/// Why a member is not live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u8)]
pub enum Reason {
    /// It is live, or its slot is empty.
    None = 0,
    /// It was not found at assembly.
    Absent = 1,
    /// A read failed and could not be repaired.
    ReadError = 2,
    /// A write failed.
    WriteError = 3,
    /// It did not answer in time.
    TimedOut = 4,
    /// The device went away.
    Gone = 5,
    /// Somebody failed it.
    Failed = 6,
    /// Somebody removed it.
    Removed = 7,
    /// It missed writes and came back.
    Stale = 8,
    /// It takes the place of another.
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

    /// The reason in words that end "it is out because …".
    pub const fn text(self) -> &'static str {
        match self {
            Reason::None => "the slot is empty",
            Reason::Absent => "it was not found",
            Reason::ReadError => "a read failed",
            Reason::WriteError => "a write failed",
            Reason::TimedOut => "it did not answer in time",
            Reason::Gone => "the device went away",
            Reason::Failed => "somebody failed it",
            Reason::Removed => "somebody removed it",
            Reason::Stale => "it has missed writes",
            Reason::Replacing => "it takes the place of another",
        }
    }
}

impl Member {
    /// A live member.
    pub const fn live(uuid: Uuid) -> Member {
        Member { uuid, state: MemberState::Live, reason: Reason::None }
    }

    /// Whether it holds everything.
    pub fn is_live(&self) -> bool {
        self.state == MemberState::Live
    }

    /// Whether it takes writes: it is live or being rebuilt.
    pub fn is_in(&self) -> bool {
        !matches!(self.state, MemberState::Missing { .. })
    }
}

impl Table {
    /// The table to commit after this one, which is durable on every member it trusts. As yet the same.
    #[must_use]
    pub fn next(&self, updated_ns: u64) -> Table {
        Table { settled: self.generation, ..self.retry(updated_ns) }
    }

    /// The table to commit after this one, which could not be made durable everywhere. As yet the same.
    #[must_use]
    pub fn retry(&self, updated_ns: u64) -> Table {
        Table { generation: self.generation + 1, updated_ns, ..self.clone() }
    }

    /// Starts a new epoch of an array that serves: to be called once for each commit that changes which members are
    /// live. `id` is random.
    pub fn begin_epoch(&mut self, id: u64) {
        self.begin_unserved_epoch(id);
        self.served_epoch = self.epoch;
    }

    /// Starts a new epoch of an array on its way up: for the first commit of every start, and for members that fail
    /// until it serves. `id` is random.
    pub fn begin_unserved_epoch(&mut self, id: u64) {
        self.epoch += 1;
        if self.history.len() == HISTORY {
            self.history.remove(0);
        }
        self.history.push(EpochId { epoch: self.epoch, id });
    }

    /// Takes a member out. The caller begins an epoch.
    pub fn take_out(&mut self, slot: usize, reason: Reason) {
        let member = &mut self.members[slot];
        let since = if member.is_live() { self.generation } else { 0 };
        if member.is_in() {
            (member.state, member.reason) = (MemberState::Missing { since }, reason);
        }
    }

    /// Every set of members of which some must hold everything, or data is lost: each group, and while the array changes
    /// its shape also the members that it had before.
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

    /// Whether every set of members ([`Table::sets`]) has as many as it needs.
    pub fn is_alive(&self) -> bool {
        let live = |set: &MemberSet| set.slots.clone().filter(|slot| self.members[*slot].is_live()).count();
        self.sets().all(|set| live(&set) >= set.needed)
    }

    /// Whether strips lie on members the same way by both tables. Growth by rows and by groups changes nothing about it.
    pub fn has_shape_of(&self, other: &Table) -> bool {
        let shape = |table: &Table| (table.config.geometry.data, table.config.geometry.parity, table.reshape);
        shape(self) == shape(other)
    }

    /// Bytes that the array holds: while it changes its shape, as many as before.
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

    /// Whether the other table knows this one's epoch for one of its ancestors.
    pub fn is_remembered_by(&self, other: &Table) -> bool {
        self.history.last().is_some_and(|epoch| other.history.contains(epoch))
    }

    /// How the table stands to another one of the same array.
    pub fn relation_to(&self, other: &Table) -> Relation {
        if self.epoch > other.epoch {
            return other.relation_to(self).reversed();
        }
        let own = self.history.last().map(|epoch| epoch.id);
        let theirs = other.history.iter().find(|epoch| epoch.epoch == self.epoch).map(|epoch| epoch.id);
        match self.generation.cmp(&other.generation) {
            // What the other one has forgotten is older than its history: a member that was away for long.
            _ if theirs.is_some_and(|id| Some(id) != own) => Relation::Diverged,
            Ordering::Less => Relation::Ancestor,
            // Within an epoch nobody goes on alone, so a later commit of the epoch is part of what followed.
            _ if self.epoch < other.epoch => Relation::Diverged,
            Ordering::Equal => Relation::Same,
            Ordering::Greater => Relation::Descendant,
        }
    }
}

/// Members of which some must hold everything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberSet {
    /// The group that they are.
    pub group: usize,
    /// Their slots.
    pub slots: Range<usize>,
    /// How many of them must hold everything.
    pub needed: usize,
}

/// How two tables stand to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relation {
    /// The same table.
    Same,
    /// The other one was made from this one.
    Ancestor,
    /// This one was made from the other one.
    Descendant,
    /// Each was made without the other: two sides went on alone.
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
    /// The array's identity.
    pub fn array(&self) -> Uuid {
        self.table.config.uuid
    }
}
