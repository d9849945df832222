//! The table on the pool's device: four copies in two sets, so that the current table stands twice.
//!
//! ```text
//!   set 0   64 KiB, 3 MiB   tables with an even sequence number
//!   set 1   2 MiB, 1 MiB    tables with an odd one
//! ```
//!
//! A commit writes the set that does not hold the newest table, one copy after the other.
//! Each copy is durable before the next one is written. So a crash tears one copy at most, and both
//! copies of a set hold an acknowledged table. A reader may therefore conclude the following, with
//! `g` the highest sequence number of an intact copy:
//!
//! - If a copy of the other set is intact, it is older. So `g + 1` was never written to both of its
//!   copies: `g` is the latest acknowledged table, or one that was being written.
//! - If neither is intact, both may have held `g + 1`. No crash leaves that: two copies are
//!   damaged, and the pool is refused.
//!   A table with sequence number 1 is an exception: only the table without volumes that follows it
//!   at the creation may be missing.
//! - An intact table in the set to which its sequence number does not belong counts as damaged: no
//!   commit writes it there.
//! - Two different tables with the sequence number `g` cannot be ranked. The pool is refused.
//!
//! The next opening rewrites a damaged or torn copy from the other copy of its set. Pools of the
//! former format have one copy in each set; their first commit converts them.

pub use crate::table::RESERVED;

use crate::mutant::{self, Mutant};
use crate::table::{ALIGNMENT, COPIES, DecodeError, MAX_BYTES, Table};
use base::Uuid;
use block::{Channel, Flags, IoError, IoResult, Limits, Op, Request};
use reactor::{BufferPool, MAX_BUFFER};

/// Offsets of the copies, by set. The bytes before the first copy stay unchanged, so that the
/// device is not mistaken for another kind.
pub const SETS: [[u64; 2]; 2] = [[64 << 10, 3 << 20], [2 << 20, 1 << 20]];
/// Longest transfer, which every device accepts.
const PART: usize = 128 << 10;

const _: () = assert!(SETS[0][0] + (MAX_BYTES as u64) < SETS[1][1] && MAX_BYTES < 1 << 20);

/// Why no table could be chosen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// The device cannot be read.
    #[error("the pool's table cannot be read: {0}")]
    Io(IoError),
    /// The device holds no usable table.
    #[error(transparent)]
    Decode(DecodeError),
    /// So many copies are damaged that the newest table may be lost.
    #[error(
        "copies of the pool's table are damaged, and the newest may be among them: {} (see `freestone pool check`)",
        describe(.0)
    )]
    Damaged(Vec<Copy>),
}

/// A copy of the table as it was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copy {
    /// Offset on the device in bytes.
    pub offset: u64,
    /// Content found at this place.
    pub state: State,
}

/// Content at the place of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// A whole table.
    Whole(Table),
    /// Bytes that are no usable table.
    Bad(DecodeError),
    /// A whole table with this sequence number, which belongs to the other set. No commit writes it
    /// here, so it counts as damaged.
    Misplaced(u64),
    /// The copy cannot be read.
    Unreadable(IoError),
}

impl Copy {
    /// The table, if the copy is whole.
    pub fn table(&self) -> Option<&Table> {
        match &self.state {
            State::Whole(table) => Some(table),
            _ => None,
        }
    }
}

impl std::fmt::Display for Copy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "at {}: ", self.offset)?;
        match &self.state {
            State::Whole(table) => {
                let (sequence, volumes) = (table.sequence, table.volumes.len());
                write!(f, "sequence {sequence}, {volumes} volumes")
            }
            State::Bad(error) => write!(f, "{error}"),
            State::Misplaced(sequence) => write!(f, "sequence {sequence}, which belongs to the other set"),
            State::Unreadable(error) => write!(f, "{error}"),
        }
    }
}

fn describe(copies: &[Copy]) -> String {
    copies.iter().map(Copy::to_string).collect::<Vec<_>>().join("; ")
}

/// The table that was chosen, and the copies to rewrite before it is safe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The newest table.
    pub table: Table,
    /// Every copy, those of set 0 first.
    pub copies: Vec<Copy>,
    /// Offset and table of each copy to rewrite.
    damaged: Vec<(u64, Table)>,
}

impl Found {
    /// Whether every copy is whole.
    pub fn is_whole(&self) -> bool {
        self.damaged.is_empty()
    }

    /// Offsets of the copies to rewrite, in bytes.
    pub fn damaged(&self) -> Vec<u64> {
        self.damaged.iter().map(|(offset, _)| *offset).collect()
    }

    /// Rewrites damaged copies; durable when it returns.
    ///
    /// # Errors
    /// When the device fails.
    pub async fn mend(&self, channel: &dyn Channel) -> IoResult {
        for (offset, table) in &self.damaged {
            write_copy(channel, *offset, &table.encode().map_err(|_| IoError::Invalid)?).await?;
        }
        Ok(())
    }
}

/// Reads every copy. There is none behind the end of a small device.
///
/// # Errors
/// When the device fails. An unreadable copy is not an error.
pub async fn inspect(channel: &dyn Channel) -> Result<Vec<Copy>, IoError> {
    let mut copies = Vec::new();
    for (place, offset) in SETS.into_iter().flatten().enumerate() {
        let state = match read_copy(channel, offset).await {
            Ok(Ok(table)) if table.sequence % 2 != place as u64 / 2 => State::Misplaced(table.sequence),
            Ok(Ok(table)) => State::Whole(table),
            Ok(Err(error)) => State::Bad(error),
            Err(IoError::OutOfRange) => State::Bad(DecodeError::None),
            Err(error @ (IoError::Medium | IoError::Corrupt)) => State::Unreadable(error),
            Err(error) => return Err(error),
        };
        copies.push(Copy { offset, state });
    }
    Ok(copies)
}

/// Reads all copies and chooses the current table.
///
/// # Errors
/// When the device has no table, the newest may be lost, or a later version, which may have
/// written more since, used the pool.
pub async fn read(channel: &dyn Channel) -> Result<Found, ReadError> {
    choose(inspect(channel).await.map_err(ReadError::Io)?)
}

/// Chooses the current table; see the module documentation.
///
/// # Errors
/// As [`read`], without those of the device.
pub fn choose(mut copies: Vec<Copy>) -> Result<Found, ReadError> {
    let later = copies.iter().filter_map(|copy| match &copy.state {
        State::Bad(error @ DecodeError::Version(_)) => Some(error.clone()),
        _ => None,
    });
    let later: Vec<DecodeError> = later.collect();
    // An acknowledged table stands twice. A single one is a damaged copy, or belongs to a change
    // that was not acknowledged.
    let is_later = later.len() > 1 || copies.iter().all(|copy| copy.table().is_none());
    if let Some(error) = later.into_iter().next().filter(|_| is_later) {
        return Err(ReadError::Decode(error));
    }
    let whole = || copies.iter().filter_map(Copy::table);
    let newest = whole().max_by_key(|table| table.sequence).cloned();
    let is_rival = |copy: &Table, newest: &Table| copy.sequence == newest.sequence && copy != newest;
    // No commit writes two tables with one number, so the acknowledged one is unknown.
    if newest.as_ref().is_some_and(|newest| whole().any(|copy| is_rival(copy, newest))) {
        return Err(ReadError::Damaged(copies));
    }
    let Some(table) = newest else {
        // A single invalid copy is left by an interrupted creation.
        let is_blank = |copy: &&Copy| copy.state == State::Bad(DecodeError::None);
        return match copies.iter().filter(|copy| !is_blank(copy)).collect::<Vec<_>>()[..] {
            [] => Err(ReadError::Decode(DecodeError::None)),
            [Copy { state: State::Bad(error), .. }] => Err(ReadError::Decode(error.clone())),
            _ => Err(ReadError::Damaged(copies)),
        };
    };
    disown(&mut copies, table.pool);
    let set = (table.sequence % 2) as usize;
    let (own, other) = (2 * set, 2 * (1 - set));
    let other_whole: Vec<&Table> = copies[other..other + 2].iter().filter_map(Copy::table).collect();
    let is_former = table.copies < COPIES;
    // The former format has one copy in each set: a damaged copy may have been the newest.
    let is_proved = if is_former { copies[other].table().is_some() } else { !other_whole.is_empty() };
    if !is_proved && table.sequence > 1 && !mutant::is(Mutant::TrustLoneSet) {
        return Err(ReadError::Damaged(copies));
    }
    let mut damaged = Vec::new();
    if !is_former {
        let stale = |copy: &&Copy, table: &Table| copy.table().is_none_or(|t| t.sequence != table.sequence);
        let rewrite = |copy: &Copy, table: &Table| (copy.offset, table.clone());
        damaged.extend(
            copies[own..own + 2].iter().filter(|copy| stale(copy, &table)).map(|c| rewrite(c, &table)),
        );
        // Either of two older tables will do: both are older.
        let twin = other_whole.first().map(|older| (*older).clone());
        let twin = twin.unwrap_or_else(|| Table { sequence: table.sequence + 1, ..table.clone() });
        let broken = copies[other..other + 2].iter().filter(|copy| copy.table().is_none());
        damaged.extend(broken.map(|copy| rewrite(copy, &twin)));
        // The twin counts, so that the next change is 3: a single 1 never stands for an
        // acknowledged change.
        if !is_proved {
            return Ok(Found { table: twin, copies, damaged });
        }
    }
    Ok(Found { table, copies, damaged })
}

/// Compares copies with the table in use, which is the authority whatever the copies hold.
pub fn compare(mut copies: Vec<Copy>, table: Table) -> Found {
    disown(&mut copies, table.pool);
    let set = (table.sequence % 2) as usize;
    // The former format does not use the second place of a set.
    let places = if table.copies < COPIES { 1 } else { 2 };
    let [own, other] = [set, 1 - set].map(|set| 2 * set..2 * set + places);
    let is_older = |found: &Table| found.sequence < table.sequence;
    let twin = copies[other.clone()].iter().filter_map(Copy::table).filter(|found| is_older(found));
    let twin = twin.max_by_key(|found| found.sequence).cloned();
    let twin = twin.unwrap_or_else(|| Table { sequence: table.sequence.saturating_sub(1), ..table.clone() });
    let stale = copies[own].iter().filter(|copy| copy.table() != Some(&table));
    let mut damaged: Vec<(u64, Table)> = stale.map(|copy| (copy.offset, table.clone())).collect();
    let broken = copies[other].iter().filter(|copy| !copy.table().is_some_and(is_older));
    damaged.extend(broken.map(|copy| (copy.offset, twin.clone())));
    Found { table, copies, damaged }
}

/// Marks copies of another pool as empty.
fn disown(copies: &mut [Copy], pool: Uuid) {
    for copy in copies {
        if copy.table().is_some_and(|table| table.pool != pool) {
            copy.state = State::Bad(DecodeError::None);
        }
    }
}

/// Returns a whole table, or why the place holds none.
async fn read_copy(channel: &dyn Channel, at: u64) -> Result<Result<Table, DecodeError>, IoError> {
    let first = read_bytes(channel, at, ALIGNMENT as usize).await?;
    let len = match Table::length(&first) {
        Ok(len) => len.next_multiple_of(ALIGNMENT as usize),
        Err(error) => return Ok(Err(error)),
    };
    Ok(Table::decode(&read_bytes(channel, at, len).await?))
}

async fn read_bytes(channel: &dyn Channel, offset: u64, len: usize) -> Result<Vec<u8>, IoError> {
    let pool = BufferPool::new(MAX_BUFFER);
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        let buffer = pool.take(PART.min(len - bytes.len())).await;
        let at = offset + bytes.len() as u64;
        let (buffer, result) = buffer.transfer(channel, Op::Read, Flags::NONE, at).await;
        result?;
        bytes.extend_from_slice(buffer.as_slice());
    }
    Ok(bytes)
}

/// Writes a table over the older one of its set; durable when it returns.
///
/// # Errors
/// When the device fails. A copy of the new table may still be whole: see [`take_back`].
pub async fn write(channel: &dyn Channel, bytes: &[u8], sequence: u64) -> IoResult {
    let [first, second] = SETS[sequence as usize % 2];
    // The former format does not use the second place. During its write, the first place holds the
    // previous table.
    for offset in [second, first] {
        if mutant::is(Mutant::OneCopy) && offset == second {
            continue;
        }
        if mutant::is(Mutant::BothSets) {
            write_padded(channel, SETS[(sequence as usize + 1) % 2][usize::from(offset == second)], bytes)
                .await?;
        }
        if mutant::is(Mutant::CommitNotFlushed) || mutant::is(Mutant::CopiesAtOnce) && offset == second {
            write_padded(channel, offset, bytes).await?;
            continue;
        }
        write_copy(channel, offset, bytes).await?;
    }
    Ok(())
}

/// Restores an older table after a failed [`write()`]. `current` is the sequence number of the
/// current table. A place that cannot be written is skipped if its content is known and not newer.
///
/// # Errors
/// When the device fails: a copy newer than `current` may remain.
pub async fn take_back(channel: &dyn Channel, bytes: &[u8], sequence: u64, current: u64) -> IoResult {
    let mut last = Ok(());
    let mut older = 0;
    let [first, second] = SETS[sequence as usize % 2];
    // The damaged place is written while the other one is whole: the set keeps a whole copy.
    let is_first_whole = read_copy(channel, first).await?.is_ok();
    for offset in if is_first_whole { [second, first] } else { [first, second] } {
        // The other place stays damaged. This write could damage the last copy of the set.
        if last.is_err() && read_copy(channel, offset).await?.is_ok_and(|table| table.sequence <= current) {
            older += 1;
            continue;
        }
        let written = write_padded(channel, offset, bytes).await;
        // Without the flush the newer copy may still be the durable one.
        channel.submit(&Request::flush(), 0).await?;
        let Err(error) = written else {
            older += 1;
            continue;
        };
        match read_copy(channel, offset).await? {
            Ok(table) if table.sequence > current => return Err(error),
            Ok(_) => older += 1,
            Err(_) => last = Err(error),
        }
    }
    if older > 0 { Ok(()) } else { last }
}

async fn write_copy(channel: &dyn Channel, offset: u64, bytes: &[u8]) -> IoResult {
    write_padded(channel, offset, bytes).await?;
    channel.submit(&Request::flush(), 0).await
}

async fn write_padded(channel: &dyn Channel, offset: u64, bytes: &[u8]) -> IoResult {
    let mut bytes = bytes.to_vec();
    bytes.resize(bytes.len().next_multiple_of(ALIGNMENT as usize), 0);
    write_bytes(channel, offset, &bytes).await
}

async fn write_bytes(channel: &dyn Channel, offset: u64, bytes: &[u8]) -> IoResult {
    let pool = BufferPool::new(MAX_BUFFER);
    for (number, part) in bytes.chunks(PART).enumerate() {
        let mut buffer = pool.take(part.len()).await;
        buffer.as_mut_slice().copy_from_slice(part);
        let at = offset + (number * PART) as u64;
        buffer.transfer(channel, Op::Write, Flags::NONE, at).await.1?;
    }
    Ok(())
}

/// Former content at the places where the first tables of a new pool are written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Former(Vec<(u64, Vec<u8>)>);

impl Former {
    /// Reads the first `len` bytes at the place of every copy. Unreadable places are skipped.
    ///
    /// # Errors
    /// When the device fails in another way.
    pub async fn read(channel: &dyn Channel, len: usize) -> Result<Former, IoError> {
        let mut places = Vec::new();
        for offset in SETS.into_iter().flatten() {
            match read_bytes(channel, offset, len.next_multiple_of(ALIGNMENT as usize)).await {
                Ok(bytes) => places.push((offset, bytes)),
                Err(IoError::Medium | IoError::Corrupt) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Former(places))
    }

    /// Writes the former content back; durable when it returns.
    ///
    /// # Errors
    /// When the device fails. Every place is tried.
    pub async fn restore(&self, channel: &dyn Channel) -> IoResult {
        let mut result = Ok(());
        for (offset, bytes) in &self.0 {
            result = result.and(write_bytes(channel, *offset, bytes).await);
        }
        result.and(channel.submit(&Request::flush(), 0).await)
    }
}

/// Zeroes a range; durable after the next flush.
///
/// # Errors
/// When the device fails.
pub async fn zero(channel: &dyn Channel, limits: &Limits, offset: u64, len: u64) -> IoResult {
    let most = limits.max_write_zeroes.min(1 << 30) & !(ALIGNMENT - 1);
    let mut done = 0;
    while done < len {
        let part = if most > 0 { (len - done).min(most) } else { (len - done).min(PART as u64) };
        match most {
            0 => write_bytes(channel, offset + done, &vec![0; part as usize]).await?,
            _ => channel.submit(&Request::write_zeroes(part, Flags::NONE), offset + done).await?,
        }
        done += part;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
