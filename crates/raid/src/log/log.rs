//! The log of one core, from the append of an entry to its ticket.
//!
//! ```text
//!   append ─► the lane's turn ─► memory ─► room ─► built, once ─┬─► writer of (lane, member 1) ─┐
//!                (FIFO)                                         └─► writer of (lane, member 2) ─┴─► ticket
//! ```
//!
//! A *writer* is a task for each lane and member in use. It has one write in flight; the copies
//! that arrive meanwhile form its next write. So many random small writes cost one sequential
//! write.
//!
//! An appender that waits holds no resource that another appender needs. It takes the memory for
//! all copies at once, from a pool of the log. The memory returns when the copies are written,
//! which depends on members alone.

use super::checksum::{Checksum, Key};
use super::writer::{LaneLog, Memory, Pending, Shared, Staged};
use crate::ArrayConfig;
use crate::config::MAX_GROUP_MEMBERS;
use crate::log::Nonce;
use crate::log::entry::{HEADER_BYTES, Header, Write, entry_bytes, max_entry_bytes};
use crate::log::size;
use crate::mutant::{self, Mutant};
use arrayvec::ArrayVec;
use block::{Channel, IoError};
use std::cell::RefCell;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

/// The content of a log entry for the write of one rectangle of a stripe.
#[derive(Clone, Copy)]
pub struct Entry<'a> {
    /// The stripe.
    pub stripe: u64,
    /// First byte in each strip; a multiple of the block size.
    pub offset: u32,
    /// Bytes of each strip; a multiple of the block size, at most [`max_len`].
    pub len: u32,
    /// Modified data strips, bit `i` for strip `i`.
    pub modified: u64,
    /// [`Checksum`] of the new data of each modified strip, ascending. Required for a full stripe
    /// without redo; otherwise it may be empty.
    pub checksums: &'a [u32],
    /// The live parity members of the stripe; not empty.
    pub targets: &'a [Target],
    /// The bytes that the entry keeps.
    pub payload: &'a dyn Payload,
}

/// A parity member that gets a copy of an entry.
#[derive(Clone)]
pub struct Target {
    /// The parity that the member holds in this stripe.
    pub parity: usize,
    /// The member's slot.
    pub slot: usize,
    /// The channel that writes to the member.
    pub channel: Rc<dyn Channel>,
    /// Start of the log on the member, in bytes.
    pub log_offset: u64,
}

/// The bytes that an entry keeps. They do not change while the entry is appended, which asks for
/// them twice: a list of them for all strips would make every write's future larger.
pub trait Payload {
    /// `Σ c·D` of a target's parity over the *unmodified* data strips, `len` bytes; empty for a
    /// full stripe.
    fn partial(&self, parity: usize) -> &[u8];

    /// New data of the modified strips, ascending by strip, `len` bytes each; may be empty.
    fn redo(&self) -> Redo<'_>;
}

/// New data of strips; see [`Payload::redo`].
pub type Redo<'a> = ArrayVec<&'a [u8], MAX_GROUP_MEMBERS>;

/// Why an entry is not durable. No state remains: the entry counts as retired.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AppendError {
    /// Members failed (slot and error each). They must be marked failed before the operation starts
    /// again without them. Until [`Log::reset`] every append to them fails.
    #[error("log: writes to members failed: {0:?}")]
    Members(Vec<(usize, IoError)>),
    /// The entry is larger than [`max_len`] allows.
    #[error("log entry of {0} bytes: larger than a lane allows")]
    TooLarge(u64),
    /// The lane is full, and its oldest ticket was dropped without being retired: the array has
    /// failed in this lane.
    #[error("log lane {0}: full of entries of abandoned operations")]
    Stuck(u16),
}

/// An entry that is durable and not yet retired.
///
/// Dropping it without [`Log::retire`] keeps the entry for recovery. This is correct when some
/// writes of the operation failed. Appends fail with [`AppendError::Stuck`] once the lane is full.
#[must_use = "an entry that is not retired fills its lane"]
pub struct Ticket {
    /// `None` once retired.
    lane: Option<Rc<LaneLog>>,
    sequence: u64,
}

impl Ticket {
    /// The entry's number in its lane.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(lane) = self.lane.take() {
            lane.book.borrow_mut().abandon(self.sequence);
            lane.poke();
        }
    }
}

/// The log of one core, for the lanes that this core owns.
pub struct Log {
    shared: Rc<Shared>,
    /// By lane; made when a lane is first used.
    lanes: RefCell<Vec<Option<Rc<LaneLog>>>>,
}

impl Log {
    /// An empty log. The core that will use it calls this.
    pub fn new(config: Arc<ArrayConfig>, nonce: Nonce, epoch: u64) -> Log {
        let lanes = RefCell::new((0..config.lanes).map(|_| None).collect());
        Log { shared: Shared::new(config, nonce, epoch), lanes }
    }

    /// Makes `entry` durable on all its targets. While the lane is full, appends wait in order.
    ///
    /// # Errors
    /// See [`AppendError`].
    ///
    /// # Panics
    /// If the entry contradicts itself: no targets, parts of other lengths than `len`, several
    /// strips but not all modified without redo, a full stripe with neither redo nor checksums.
    pub async fn append(&self, entry: &Entry<'_>) -> Result<Ticket, AppendError> {
        let config = &self.shared.config;
        let bytes = entry_bytes(entry.check(config));
        if bytes > max_entry_bytes(config) {
            return Err(AppendError::TooLarge(bytes));
        }
        let lane = self.lane(config.lane_of(entry.stripe));
        lane.turn.acquire(1).await;
        let turn = Turn(&lane);
        let memory = Memory::take(&self.shared, bytes as usize, entry.targets.len()).await;
        for _ in entry.targets {
            let buffer = self.shared.buffers.take(bytes as usize).await;
            lane.buffers.borrow_mut().push(buffer);
        }
        room(&lane, entry.targets, bytes).await?;
        let pending = stage(&lane, entry, bytes, memory);
        drop(turn);
        let sequence = pending.await.map_err(AppendError::Members)?;
        Ok(Ticket { lane: Some(lane), sequence })
    }

    /// Ends an operation whose data and parity are durable on every live member, or which wrote
    /// nothing.
    pub fn retire(&self, mut ticket: Ticket) {
        if let Some(lane) = ticket.lane.take() {
            lane.book.borrow_mut().retire(ticket.sequence);
            lane.poke();
        }
    }

    /// Sets the epoch that later entries carry.
    pub fn set_epoch(&self, epoch: u64) {
        self.shared.epoch.set(epoch);
    }

    /// Starts an empty log under a nonce that is durable in the superblock. Earlier failures of
    /// members are forgotten.
    ///
    /// # Panics
    /// If an append runs or a ticket exists.
    pub async fn reset(&self, nonce: Nonce, epoch: u64) {
        assert_eq!(self.outstanding(), 0, "operations are under way");
        let lanes: Vec<Rc<LaneLog>> = self.lanes.borrow_mut().iter_mut().filter_map(Option::take).collect();
        for lane in lanes {
            lane.close().await;
        }
        self.shared.set_nonce(nonce);
        self.shared.epoch.set(epoch);
    }

    /// Number of entries whose tickets were dropped without being retired. While it is not 0, the
    /// nonce must not change: only recovery can make their stripes consistent.
    pub fn abandoned(&self) -> usize {
        self.lanes.borrow().iter().flatten().map(|lane| lane.book.borrow().abandoned()).sum()
    }

    /// Number of entries that can still be retired.
    pub fn outstanding(&self) -> usize {
        self.lanes.borrow().iter().flatten().map(|lane| lane.book.borrow().outstanding()).sum()
    }

    /// The key of checksums until [`Log::reset`].
    pub fn key(&self) -> Rc<Key> {
        self.shared.key()
    }

    fn lane(&self, number: u16) -> Rc<LaneLog> {
        let mut lanes = self.lanes.borrow_mut();
        lanes[usize::from(number)].get_or_insert_with(|| LaneLog::new(self.shared.clone(), number)).clone()
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        self.lanes.borrow().iter().flatten().for_each(|lane| lane.stop());
    }
}

/// The right to place entries in a lane, in order of the requests, and to use the lane's list of
/// buffers.
struct Turn<'a>(&'a LaneLog);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.buffers.borrow_mut().clear();
        self.0.turn.release(1);
    }
}

impl Entry<'_> {
    /// Asserts that the entry is consistent; returns the bytes of its payload.
    fn check(&self, config: &ArrayConfig) -> u64 {
        let len = self.len as usize;
        let strips = self.modified.count_ones() as usize;
        let is_full = strips == config.geometry.data;
        let redo = self.redo();
        assert!(strips > 0 && !self.targets.is_empty(), "an entry without strips or targets");
        assert!(redo.is_empty() || redo.len() == strips, "redo is for all modified strips");
        assert!(
            self.checksums.is_empty() || self.checksums.len() == strips,
            "checksums are of all modified strips"
        );
        assert!(redo.iter().all(|data| data.len() == len), "redo of {len} bytes a strip");
        let partial = if is_full { 0 } else { len };
        assert!(
            self.targets.iter().all(|target| self.payload.partial(target.parity).len() == partial),
            "{partial} bytes a partial"
        );
        let can_be_replayed =
            strips == 1 && !is_full || !redo.is_empty() || is_full && !self.checksums.is_empty();
        assert!(can_be_replayed || mutant::is(Mutant::NoRedo), "new data or checksums are needed");
        (partial + redo.len() * len) as u64
    }

    fn redo(&self) -> Redo<'_> {
        let mut redo = self.payload.redo();
        if mutant::is(Mutant::NoRedo) {
            redo.clear();
        }
        redo
    }

    fn write(&self, parity: usize, has_redo: bool) -> Write {
        Write {
            stripe: self.stripe,
            offset: self.offset,
            len: self.len,
            modified: self.modified,
            targets: self.targets.iter().fold(0, |mask, target| mask | 1 << target.parity),
            parity: parity as u16,
            has_redo,
            checksums: self.checksums.iter().copied().collect(),
        }
    }
}

/// Waits until every target has room for an entry of `bytes`. Requests a marker only if it makes
/// room.
async fn room(lane: &Rc<LaneLog>, targets: &[Target], bytes: u64) -> Result<(), AppendError> {
    poll_fn(|cx| {
        let failed: Vec<_> =
            targets.iter().filter_map(|target| Some((target.slot, lane.failure(target.slot)?))).collect();
        if !failed.is_empty() {
            return Poll::Ready(Err(AppendError::Members(failed)));
        }
        let mut has_room = true;
        for target in targets {
            if lane.book.borrow().has_room(target.slot, bytes) {
                continue;
            }
            has_room = false;
            if lane.book.borrow().needs_marker(target.slot) {
                lane.stage_marker(target.slot, &target.channel, target.log_offset);
            } else if lane.book.borrow().is_stuck() && lane.is_idle(target.slot) {
                return Poll::Ready(Err(AppendError::Stuck(lane.number)));
            }
        }
        if has_room {
            return Poll::Ready(Ok(()));
        }
        lane.wait_for_change(cx.waker());
        Poll::Pending
    })
    .await
}

/// Gives the entry its sequence, builds its copies in the lane's buffers and passes them to the
/// writers.
fn stage(lane: &Rc<LaneLog>, entry: &Entry<'_>, bytes: u64, mut memory: Memory) -> Pending {
    let sequence = lane.book.borrow_mut().begin();
    let pending = Pending::new(lane.clone(), sequence, entry.targets.len());
    let key = lane.shared.key();
    let redo = entry.redo();
    let mut redo_checksum: Option<Checksum<'_>> = None;
    for (target, mut buffer) in entry.targets.iter().zip(lane.buffers.borrow_mut().drain(..)) {
        let placement = lane.book.borrow_mut().place(target.slot, bytes);
        let (head, payload) = buffer.as_mut_slice().split_at_mut(HEADER_BYTES);
        let of_target = entry.payload.partial(target.parity);
        let (partial, rest) = payload.split_at_mut(of_target.len());
        let (new, padding) = rest.split_at_mut(redo.len() * entry.len as usize);
        let mut checksum = match &redo_checksum {
            Some(same) => {
                redo.iter().zip(new.chunks_mut(entry.len as usize)).for_each(|(a, b)| b.copy_from_slice(a));
                same.clone()
            }
            None => redo_checksum.insert(copy_redo(&key, &redo, new)).clone(),
        };
        // SAFETY: both are slices of one length and do not overlap.
        unsafe { checksum.copy(of_target.as_ptr(), partial) };
        padding.fill(0);
        let write = Some(entry.write(target.parity, !redo.is_empty()));
        let payload_checksum = checksum.finish();
        let header = Header { payload_checksum, write, ..lane.header(target.slot, placement) };
        head.copy_from_slice(&header.encode(lane.shared.config.geometry.data));
        lane.stage(
            target.slot,
            Staged {
                buffer: Some(buffer),
                bytes,
                placement,
                flight: pending.flight(),
                channel: target.channel.clone(),
                log_offset: target.log_offset,
                _memory: Some(memory.split()),
            },
        );
    }
    pending
}

/// Copies new data into a payload. Returns its checksum, which does not include the partial parity
/// yet.
fn copy_redo<'k>(key: &'k Key, redo: &[&[u8]], mut target: &mut [u8]) -> Checksum<'k> {
    let mut checksum = Checksum::new(key);
    for new in redo {
        let (part, rest) = target.split_at_mut(new.len());
        // SAFETY: both are slices of one length and do not overlap.
        unsafe { checksum.copy(new.as_ptr(), part) };
        checksum.end();
        target = rest;
    }
    checksum
}

/// Most bytes of each strip that one entry can cover if it contains the new data of `redo_strips`
/// strips. Longer rectangles must be cut. A multiple of the block size; 0 if the lanes are too
/// small.
pub fn max_len(config: &ArrayConfig, redo_strips: usize) -> u32 {
    size::max_len(config.lane_bytes, config.geometry.strip_bytes, config.block_size, redo_strips)
}
