//! The restart log: entries that were set and are not in the image yet, where a kill of the process
//! does not reach them.
//!
//! ```text
//!   write ─► data in the file ─► entry in the log ─► entry in memory ─► answer
//!   flush ─► entries in the file ─► the log begins behind them
//!   kill  ─► the next process: log ─► entries ─► flush
//! ```
//!
//! A client of a server that is killed may stay, and does not repeat what was answered. The kernel
//! has the data then, and the log has the entries. The log is for a kill alone: after power loss
//! the file may lack data that an entry needs. So a log counts only until the machine starts
//! again, and only while the image has the log's session number. That number is in reserved
//! autoclear bits (32 to 63), so every other writer clears it.
//!
//! The file of the log has a header and a ring of records:
//!
//! | byte | bytes | purpose |
//! |---|---|---|
//! | 0 | 8 | `FREESTLG` |
//! | 8 | 4 | version: 1 |
//! | 12 | 4 | zero |
//! | 16 | 16 | identifier of the machine's start |
//! | 32 | 4 | session |
//! | 36 | 4 | records of the ring |
//! | 40 | 8 | number of the first record that counts |
//! | 48 | 4 | CRC-32C of the bytes before it |
//! | 4096 | 32 each | cluster of the disk, entry (two words), low half of the record's number, CRC-32C of these and the session |
//!
//! All numbers are little-endian. The fields up to the session have these places in every version.
//! So a log of a later version that counts is an error, and one of another use is none.
//!
//! The entries of one turn of the home are a *group*: one write adds them. The next group is
//! written when all entries of the last one are set, so a flush knows which records it makes
//! unnecessary.

use crate::entry::Entry;
use crate::header::Header;
use crate::mutant::{self, Mutant};
use block::{IoError, IoResult};
use reactor::yield_now;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fs::File;
use std::future::poll_fn;
use std::io;
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::task::{Poll, Waker};

const MAGIC: [u8; 8] = *b"FREESTLG";
/// The format.
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 52;
/// The place of the header's checksum.
const SUM: usize = 48;
/// First byte of the ring.
const RING: u64 = 4096;
const RECORD_BYTES: u64 = 32;
/// Longest log that is read.
const MOST_BYTES: u64 = 64 << 20;
/// Records of a log: 4 MiB.
pub const RESTART_RECORDS: u32 = 1 << 17;

/// A file for a restart log, and what distinguishes this use of it.
pub struct RestartLog {
    file: File,
    start_of_machine: [u8; 16],
    session: u32,
    records: u32,
}

impl RestartLog {
    /// A log in `file`, which no other process uses. `start_of_machine` differs after each start of
    /// the machine (`/proc/sys/kernel/random/boot_id`), and `session`, a random number, in each use
    /// of the log; 0 counts as 1. Has room for `records` entries, at least one.
    pub fn new(file: File, start_of_machine: [u8; 16], session: u32, records: u32) -> RestartLog {
        RestartLog { file, start_of_machine, session: session.max(1), records: records.max(1) }
    }

    /// Clusters of an image whose last write the log has, and the image may lack.
    ///
    /// # Errors
    /// When the file cannot be read, or has a later version.
    pub fn clusters_of(&self, header: &Header) -> io::Result<usize> {
        Ok(self.entries(header.session())?.len())
    }

    /// The last entry of each cluster that the session of an image, not 0, has left. No entry if
    /// the log is about another use.
    ///
    /// # Errors
    /// When the file cannot be read, or has a later version.
    pub(super) fn entries(&self, session: u32) -> io::Result<BTreeMap<u64, Entry>> {
        let mut entries = BTreeMap::new();
        let mut bytes = vec![0; self.file.metadata()?.len().min(MOST_BYTES) as usize];
        self.file.read_exact_at(&mut bytes, 0)?;
        let Some(Start { session, records, first }) = self.start(&bytes, session)? else {
            return Ok(entries);
        };
        for number in first..first.saturating_add(records.into()) {
            let at = place(number, records) as usize;
            let found = bytes.get(at..at + RECORD_BYTES as usize);
            let Some((cluster, entry)) = found.and_then(|record| parse(record, number, session)) else {
                break;
            };
            entries.insert(cluster, entry);
        }
        Ok(entries)
    }

    /// Parses the header. `None` if the log does not count.
    fn start(&self, bytes: &[u8], session: u32) -> io::Result<Option<Start>> {
        let Some(header) = bytes.get(..HEADER_BYTES) else { return Ok(None) };
        let [version, found, records] = [8, 32, 36].map(|at| u32::from_le_bytes(word(header, at)));
        let is_start = header[16..32] == self.start_of_machine || mutant::is(Mutant::LogOfEarlierStart);
        let is_session = found == session && session > 0 || mutant::is(Mutant::LogOfOtherSession);
        if header[..8] != MAGIC || !is_start || !is_session {
            return Ok(None);
        }
        if version > VERSION {
            let text = format!("the restart log has version {version}; supported is version {VERSION}");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        let is_whole = word(header, SUM) == crc32c::crc32c(&header[..SUM]).to_le_bytes();
        let start = Start { session: found, records, first: u64::from_le_bytes(word(header, 40)) };
        Ok((version == VERSION && is_whole && records > 0).then_some(start))
    }

    /// Begins an empty log of an image that was last written in the session `last`.
    ///
    /// # Errors
    /// When the file cannot be written, or has no room.
    pub(super) fn begin(mut self, last: u32) -> io::Result<Log> {
        if self.session == last {
            self.session = last.wrapping_add(1).max(1);
        }
        // Records that are written later need no room.
        let (len, whole) = (self.file.metadata()?.len(), RING + u64::from(self.records) * RECORD_BYTES);
        if len < whole {
            self.file.write_all_at(&vec![0; (whole - len) as usize], len)?;
        }
        let [first, written, end, group_start, set] = [const { Cell::new(0) }; 5];
        let log = Log { log: self, first, written, end, group_start, set, group: RefCell::default() };
        log.write_header(0)?;
        Ok(log)
    }
}

/// The fields of a header that say which records count.
struct Start {
    session: u32,
    records: u32,
    first: u64,
}

/// A log in use.
pub(super) struct Log {
    log: RestartLog,
    /// Number of the first record that counts, of the first that is not in the file yet, and of the
    /// next one.
    first: Cell<u64>,
    written: Cell<u64>,
    end: Cell<u64>,
    /// Number of the first record of the last group in the file.
    group_start: Cell<u64>,
    /// So many entries that the file has were set.
    set: Cell<u64>,
    /// The records that are not in the file.
    group: RefCell<Option<Rc<Group>>>,
}

/// Records that one write adds to the log.
#[derive(Default)]
struct Group {
    records: RefCell<Vec<[u8; RECORD_BYTES as usize]>>,
    /// The result of the write, once it has one.
    result: Cell<Option<IoResult>>,
    waiting: RefCell<Vec<Waker>>,
}

impl Group {
    fn end(&self, result: IoResult) {
        self.result.set(Some(result));
        self.waiting.take().into_iter().for_each(Waker::wake);
    }

    async fn ended(&self) -> IoResult {
        poll_fn(|cx| match self.result.get() {
            Some(result) => Poll::Ready(result),
            None => {
                self.waiting.borrow_mut().push(cx.waker().clone());
                Poll::Pending
            }
        })
        .await
    }
}

impl Log {
    /// This use of the log.
    pub(super) fn session(&self) -> u32 {
        self.log.session
    }

    fn write_header(&self, first: u64) -> io::Result<()> {
        let RestartLog { file, start_of_machine, session, records } = &self.log;
        let mut header = [0; HEADER_BYTES];
        header[..8].copy_from_slice(&MAGIC);
        header[8..12].copy_from_slice(&VERSION.to_le_bytes());
        header[16..32].copy_from_slice(start_of_machine);
        header[32..36].copy_from_slice(&session.to_le_bytes());
        header[36..40].copy_from_slice(&records.to_le_bytes());
        header[40..SUM].copy_from_slice(&first.to_le_bytes());
        let sum = crc32c::crc32c(&header[..SUM]);
        header[SUM..].copy_from_slice(&sum.to_le_bytes());
        file.write_all_at(&header, 0)
    }

    /// Whether there is no room.
    pub(super) fn is_full(&self) -> bool {
        self.end.get() - self.first.get() >= u64::from(self.log.records)
            && !mutant::is(Mutant::FullLogIgnored)
    }

    /// Adds the entry of a cluster. There is room. The caller then sets the entry and calls
    /// [`Log::note_set`], both at once.
    ///
    /// # Errors
    /// [`IoError::Medium`] when the file cannot be written: nothing is added.
    pub(super) async fn note(&self, cluster: u64, entry: Entry) -> IoResult {
        if mutant::is(Mutant::EntryNotLogged) {
            return Ok(());
        }
        let (group, is_first) = self.add(&[(cluster, entry)]);
        if !is_first {
            return if mutant::is(Mutant::GroupNotAwaited) { Ok(()) } else { group.ended().await };
        }
        loop {
            yield_now().await;
            if self.set.get() == self.written.get() || mutant::is(Mutant::GroupNotAwaited) {
                break;
            }
        }
        self.write_group(&group)
    }

    /// As [`Log::note`], for the entries of several clusters, without waiting. Returns whether they
    /// were added: not if there is no room, entries before them are not set yet, or the file cannot
    /// be written.
    pub(super) fn note_at_once(&self, entries: &[(u64, Entry)]) -> bool {
        if entries.is_empty() || mutant::is(Mutant::EntryNotLogged) {
            return true;
        }
        // The broken variant is one of groups.
        let is_waiting = self.group.borrow().is_some()
            || self.set.get() < self.written.get()
            || mutant::is(Mutant::GroupNotAwaited);
        let end = self.end.get() + entries.len() as u64;
        let has_room = end - self.first.get() <= u64::from(self.log.records);
        if is_waiting || !has_room && !mutant::is(Mutant::FullLogIgnored) {
            return false;
        }
        let (group, _) = self.add(entries);
        match mutant::is(Mutant::BatchNotLogged) {
            true => self.end_group(&group, Ok(())).is_ok(),
            false => self.write_group(&group).is_ok(),
        }
    }

    /// Adds records to the group that is not in the file, and returns it. Also whether they are its
    /// first ones.
    fn add(&self, entries: &[(u64, Entry)]) -> (Rc<Group>, bool) {
        let known = self.group.borrow().clone();
        let is_first = known.is_none();
        let group = known.unwrap_or_else(|| self.group.borrow_mut().insert(Rc::default()).clone());
        let numbers = self.end.get()..;
        let records = numbers.zip(entries).map(|(number, (cluster, entry))| {
            let mut record = [0; RECORD_BYTES as usize];
            for (at, value) in [(0, *cluster), (8, entry.word), (16, entry.bitmap)] {
                record[at..at + 8].copy_from_slice(&value.to_le_bytes());
            }
            record[24..28].copy_from_slice(&(number as u32).to_le_bytes());
            let sum = sum_of(&record, self.log.session);
            record[28..].copy_from_slice(&sum.to_le_bytes());
            record
        });
        group.records.borrow_mut().extend(records);
        self.end.set(self.end.get() + entries.len() as u64);
        (group, is_first)
    }

    /// Writes the group that is not in the file.
    fn write_group(&self, group: &Group) -> IoResult {
        let written = self.write(&group.records.borrow()).map_err(|error| {
            tracing::error!(%error, "the restart log of an image cannot be written");
            // A part of the group may be there, whose clusters get another use.
            let first = place(self.written.get(), self.log.records);
            let _ = self.log.file.write_all_at(&[0; RECORD_BYTES as usize], first);
            IoError::Medium
        });
        self.end_group(group, written)
    }

    fn end_group(&self, group: &Group, written: IoResult) -> IoResult {
        self.group.take();
        match written {
            Ok(()) => self.group_start.set(self.written.replace(self.end.get())),
            Err(_) => self.end.set(self.written.get()),
        }
        group.end(written);
        written
    }

    /// Writes all records that are not in the file.
    fn write(&self, records: &[[u8; RECORD_BYTES as usize]]) -> io::Result<()> {
        let mut number = self.written.get();
        let mut rest = records;
        while !rest.is_empty() {
            let ring = u64::from(self.log.records);
            let (part, behind) = rest.split_at(rest.len().min((ring - number % ring) as usize));
            self.log.file.write_all_at(part.as_flattened(), place(number, self.log.records))?;
            number += part.len() as u64;
            rest = behind;
        }
        Ok(())
    }

    /// Notes that an entry was set, which [`Log::note`] has added.
    pub(super) fn note_set(&self) {
        self.set.set(self.set.get() + 1);
    }

    /// Gives back the room of a log that is no longer needed.
    pub(super) fn close(&self) {
        if let Err(error) = self.log.file.set_len(0) {
            tracing::warn!(%error, "the restart log of an image keeps its length");
        }
    }

    /// Whether half of the ring has records that count.
    pub(super) fn is_half_full(&self) -> bool {
        self.end.get() - self.first.get() > u64::from(self.log.records) / 2
    }

    /// A number of a record, before which all entries are set.
    pub(super) fn set_end(&self) -> u64 {
        // Those of the last group may not all be set.
        let is_set = self.set.get() == self.written.get() || mutant::is(Mutant::LogForgetsGroup);
        if is_set { self.written.get() } else { self.group_start.get() }
    }

    /// Forgets the records before the number `first`, whose entries are durable.
    ///
    /// # Errors
    /// When the file cannot be written: nothing is forgotten.
    pub(super) fn forget(&self, first: u64) -> io::Result<()> {
        if first > self.first.get() {
            self.write_header(first)?;
            self.first.set(first);
        }
        Ok(())
    }
}

/// The first byte of a record.
fn place(number: u64, records: u32) -> u64 {
    RING + number % u64::from(records) * RECORD_BYTES
}

/// The cluster and the entry of a record, if it is whole and has this number and session.
fn parse(record: &[u8], number: u64, session: u32) -> Option<(u64, Entry)> {
    let is_this = word(record, 24) == (number as u32).to_le_bytes();
    let is_whole = word(record, 28) == sum_of(record, session).to_le_bytes();
    let [cluster, word, bitmap] = [0, 8, 16].map(|at| u64::from_le_bytes(word(record, at)));
    (is_this && is_whole).then_some((cluster, Entry { word, bitmap }))
}

fn sum_of(record: &[u8], session: u32) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&session.to_le_bytes()), &record[..28])
}

fn word<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("bytes of a field")
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::{IoFuture, join_all};
    use std::ops::Range;

    fn log(file: &File, start: u8, session: u32) -> RestartLog {
        RestartLog::new(file.try_clone().unwrap(), [start; 16], session, 4)
    }

    fn entry(word: u64) -> Entry {
        Entry { word, bitmap: word + 1 }
    }

    /// Adds and sets entries of clusters, as a group.
    fn note(log: &Rc<Log>, entries: &[(u64, u64)]) -> IoResult {
        let (log, entries) = (log.clone(), entries.to_vec());
        reactor::run(async move {
            let noted = entries.into_iter().map(|(cluster, word)| {
                let log = log.clone();
                IoFuture::new(async move {
                    log.note(cluster, entry(word)).await?;
                    log.note_set();
                    Ok(())
                })
            });
            join_all(noted).await
        })
    }

    #[test]
    fn a_killed_process_leaves_the_last_entry_of_each_cluster() {
        let file = tempfile::tempfile().unwrap();
        assert!(log(&file, 1, 7).entries(7).unwrap().is_empty(), "an empty file");
        let first = Rc::new(log(&file, 1, 7).begin(0).unwrap());
        note(&first, &[(5, 10), (6, 20)]).unwrap();
        note(&first, &[(5, 30)]).unwrap();
        let found = log(&file, 1, 8).entries(7).unwrap();
        assert_eq!(found, BTreeMap::from([(5, entry(30)), (6, entry(20))]));
        for (start, session) in [(1, 8), (2, 7)] {
            assert!(log(&file, start, 9).entries(session).unwrap().is_empty(), "{start} {session}");
        }
        log(&file, 1, 8).begin(7).unwrap();
        assert!(log(&file, 1, 9).entries(8).unwrap().is_empty(), "records of another session");
        assert_eq!([7, 8].map(|last| log(&file, 1, 7).begin(last).unwrap().session()), [8, 7]);
    }

    #[test]
    fn a_log_is_laid_out_as_the_document_says() {
        let file = tempfile::tempfile().unwrap();
        let used = Rc::new(log(&file, 0xab, 7).begin(0).unwrap());
        note(&used, &[(5, 0x10)]).unwrap();
        let mut bytes = [0; RING as usize + RECORD_BYTES as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        let mut expected = b"FREESTLG\x01\0\0\0\0\0\0\0".to_vec();
        expected.extend([0xab; 16]);
        expected.extend([7, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        expected.extend(crc32c::crc32c(&expected).to_le_bytes());
        assert_eq!(bytes[..HEADER_BYTES], expected);
        assert!(bytes[HEADER_BYTES..RING as usize].iter().all(|byte| *byte == 0));
        let mut record = [5u64, 0x10, 0x11, 0].map(u64::to_le_bytes).concat();
        let sum = crc32c::crc32c_append(crc32c::crc32c(&[7, 0, 0, 0]), &record[..28]);
        record[28..].copy_from_slice(&sum.to_le_bytes());
        assert_eq!(bytes[RING as usize..], record);
    }

    #[test]
    fn a_log_of_a_later_version_is_refused_if_it_counts() {
        let file = tempfile::tempfile().unwrap();
        let used = Rc::new(log(&file, 1, 7).begin(0).unwrap());
        note(&used, &[(5, 10)]).unwrap();
        file.write_all_at(&[2], 8).unwrap();
        let error = log(&file, 1, 8).entries(7).unwrap_err().to_string();
        assert_eq!(error, "the restart log has version 2; supported is version 1");
        // After a start of the machine, or for an image that no longer names this use, it is void.
        for (start, session) in [(2, 7), (1, 9), (1, 0)] {
            assert!(log(&file, start, 8).entries(session).unwrap().is_empty(), "{start} {session}");
        }
    }

    #[test]
    fn a_full_log_has_room_again_after_a_flush() {
        let file = tempfile::tempfile().unwrap();
        let used = Rc::new(log(&file, 1, 7).begin(0).unwrap());
        for number in 0..4 {
            assert!(!used.is_full());
            note(&used, &[(number, number)]).unwrap();
        }
        assert!(used.is_full() && used.is_half_full());
        used.forget(3).unwrap();
        assert!(!used.is_full() && !used.is_half_full());
        // A group that goes over the end of the ring.
        used.forget(4).unwrap();
        note(&used, &[(8, 8)]).unwrap();
        used.forget(4).unwrap();
        note(&used, &[(9, 9), (10, 10), (11, 11)]).unwrap();
        let found: Vec<u64> = log(&file, 1, 8).entries(7).unwrap().into_keys().collect();
        assert_eq!(found, [8, 9, 10, 11]);
        used.forget(used.set_end()).unwrap();
        assert!(log(&file, 1, 8).entries(7).unwrap().is_empty());
        used.close();
        assert_eq!(file.metadata().unwrap().len(), 0);
    }

    #[test]
    fn entries_are_added_at_once_if_there_is_room_and_no_other_waits() {
        let file = tempfile::tempfile().unwrap();
        let used = Rc::new(log(&file, 1, 7).begin(0).unwrap());
        let entries = |clusters: Range<u64>| -> Vec<_> { clusters.map(|at| (at, entry(at))).collect() };
        assert!(used.note_at_once(&entries(0..2)));
        assert!(!used.note_at_once(&entries(2..3)), "those before it are not set");
        used.note_set();
        used.note_set();
        assert!(!used.note_at_once(&entries(2..5)), "the ring has room for two");
        assert_eq!((used.end.get(), used.written.get()), (2, 2));
        assert!(used.note_at_once(&entries(2..3)));
        used.note_set();
        let found: Vec<u64> = log(&file, 1, 8).entries(7).unwrap().into_keys().collect();
        assert_eq!(found, [0, 1, 2]);
        let waiting = used.clone();
        reactor::run(async move {
            let later = waiting.clone();
            reactor::current().spawn(async move { later.note(3, entry(3)).await.unwrap() });
            yield_now().await;
            waiting.forget(3).unwrap();
            assert!(!waiting.note_at_once(&entries(4..5)), "a group waits for its write");
        });
    }

    #[test]
    fn a_damaged_record_ends_the_log() {
        let file = tempfile::tempfile().unwrap();
        let used = Rc::new(log(&file, 1, 7).begin(0).unwrap());
        note(&used, &[(0, 0), (1, 1), (2, 2)]).unwrap();
        file.write_all_at(&[0xff], RING + RECORD_BYTES + 3).unwrap();
        let found: Vec<u64> = log(&file, 1, 8).entries(7).unwrap().into_keys().collect();
        assert_eq!(found, [0]);
        file.write_all_at(&[0xff], 41).unwrap();
        assert!(log(&file, 1, 8).entries(7).unwrap().is_empty(), "a damaged header");
    }

    #[test]
    fn a_flush_forgets_no_group_whose_entries_are_not_all_set() {
        let file = tempfile::tempfile().unwrap();
        let used = Rc::new(log(&file, 1, 7).begin(0).unwrap());
        note(&used, &[(1, 1)]).unwrap();
        let later = used.clone();
        reactor::run(async move { later.note(2, entry(2)).await.unwrap() });
        assert_eq!((used.end.get(), used.set_end()), (2, 1));
        used.note_set();
        assert_eq!(used.set_end(), 2);
    }

    #[test]
    fn a_group_that_cannot_be_written_is_not_added() {
        let path = tempfile::NamedTempFile::new().unwrap();
        let mut used = log(path.as_file(), 1, 7).begin(0).unwrap();
        used.log.file = File::open(path.path()).unwrap();
        let used = Rc::new(used);
        assert_eq!(note(&used, &[(1, 1), (2, 2)]), Err(IoError::Medium));
        assert_eq!((used.end.get(), used.set_end()), (0, 0));
    }
}
