//! The oracle that judges every read of a disk.
//!
//! The unit is the *sector* of 512 bytes, for which each write is a separate register write: writes
//! may be torn between sectors but never inside one. A sector's content names its LBA and the write
//! (its *version*) that it came from. So the oracle can distinguish old, foreign and damaged data.
//!
//! For each sector the oracle keeps the versions that a read may return. An acknowledged write
//! replaces those that had ended before it began; concurrent writes leave both. A power failure
//! leaves every version that was not durably replaced. The next read then fixes the version.

use base::mix;
use block::IoError;

/// Bytes of a sector.
pub const SECTOR: usize = 512;
/// The content of a disk that was never written: zeroes.
pub const ZEROES: u32 = 0;
/// Any content is allowed: the sector was given up.
pub const ANYTHING: u32 = u32::MAX;

/// A time in the future.
const NEVER: u64 = u64::MAX;

#[derive(Clone, Copy, Debug)]
struct Write {
    version: u32,
    began: u64,
    /// Time at which the write was acknowledged, failed, or was cut off by a power failure.
    ended: u64,
    /// Time at which a newer write, begun after this one ended, was acknowledged.
    replaced: u64,
    /// That newer write is durable: a crash cannot restore this version.
    is_gone: bool,
    /// The write has ended and is not known to be durable.
    is_cached: bool,
    /// The write was acknowledged, so it has happened. A failed one or a discard may or may not
    /// have happened.
    has_happened: bool,
}

impl Write {
    fn settled(version: u32) -> Write {
        Write {
            version,
            began: 0,
            ended: 0,
            replaced: NEVER,
            is_gone: false,
            is_cached: false,
            has_happened: false,
        }
    }
}

#[derive(Clone, Debug)]
struct Sector {
    first: Write,
    /// Writes that began after `first` and have not replaced it for certain.
    more: Vec<Write>,
    /// A write was in flight at a power failure. Until the sector is rewritten or read, parts of
    /// its stripe may be unreadable.
    cut_off: Until,
    /// The sector was unreadable, which was allowed.
    lost: Until,
    /// Time of the last acknowledged write that makes the sector readable.
    written: u64,
    /// Time at which the last write or discard began.
    begun: u64,
}

/// A state that lasts until a time. A request that began before may still have observed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Until(u64);

impl Until {
    const NOT_SO: Until = Until(0);
    const OPEN: Until = Until(NEVER);

    /// Ends the state now, if it has not ended.
    fn end(&mut self, now: u64) {
        self.0 = if self.0 == NEVER { now } else { self.0 };
    }

    fn is_open(self) -> bool {
        self.0 == NEVER
    }

    /// Whether the state still applied when a request began.
    fn was_so_at(self, began: u64) -> bool {
        self.0 > began
    }
}

/// Identifies a request in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(u64);

/// A result that a disk must not return.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation(pub String);

/// The possible contents of every sector of a device.
#[derive(Clone, Debug)]
pub struct Oracle {
    seed: u64,
    now: u64,
    sectors: Vec<Sector>,
    reads: Vec<u64>,
    next_version: u32,
}

impl Oracle {
    /// An oracle for a device of `capacity` bytes that reads as zeroes.
    pub fn new(seed: u64, capacity: u64) -> Oracle {
        let sector = Sector {
            first: Write::settled(ZEROES),
            more: Vec::new(),
            cut_off: Until::NOT_SO,
            lost: Until::NOT_SO,
            written: 0,
            begun: 0,
        };
        let sectors = vec![sector; capacity as usize / SECTOR];
        Oracle { seed, now: 1, sectors, reads: Vec::new(), next_version: 1 }
    }

    /// Sectors of the device.
    pub fn sectors(&self) -> u64 {
        self.sectors.len() as u64
    }

    /// Returns an unused version.
    pub fn new_version(&mut self) -> u32 {
        self.next_version += 1;
        self.next_version - 1
    }

    /// Fills `bytes` with the data of `version` for sectors starting at `lba`.
    pub fn fill(&self, lba: u64, version: u32, bytes: &mut [u8]) {
        for (lba, sector) in (lba..).zip(bytes.chunks_exact_mut(SECTOR)) {
            sector.copy_from_slice(&content(self.seed, lba, version));
        }
    }

    /// The time of the last event.
    pub fn now(&self) -> u64 {
        self.now
    }

    /// Whether a write or a discard of a sector began after a time.
    pub fn is_written_since(&self, lba: u64, time: u64) -> bool {
        self.sectors[lba as usize].begun > time
    }

    fn tick(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    /// Records the start of a write of `count` sectors with `version`.
    pub fn begin_write(&mut self, lba: u64, count: u64, version: u32) -> Ticket {
        let began = self.tick();
        for sector in &mut self.sectors[lba as usize..(lba + count) as usize] {
            let write = Write { began, ended: NEVER, ..Write::settled(version) };
            sector.more.push(write);
            sector.begun = began;
        }
        Ticket(began)
    }

    /// Records the end of a write. A failed one may or may not have happened.
    pub fn end_write(&mut self, lba: u64, count: u64, ticket: Ticket, is_ok: bool, is_durable: bool) {
        let now = self.tick();
        let oldest_read = self.reads.iter().copied().min().unwrap_or(NEVER);
        for sector in &mut self.sectors[lba as usize..(lba + count) as usize] {
            let all = std::iter::once(&mut sector.first).chain(&mut sector.more);
            for write in all.filter(|write| write.began == ticket.0) {
                write.ended = now;
                write.is_cached = !is_durable;
                write.has_happened = is_ok;
            }
            if is_ok {
                sector.replace_before(ticket.0, now, is_durable);
                sector.cut_off.end(now);
                sector.lost.end(now);
                sector.written = now;
                sector.prune(oldest_read);
            }
        }
    }

    /// Records the start of a discard of `count` sectors.
    pub fn begin_discard(&mut self, lba: u64, count: u64) -> Ticket {
        self.begin_write(lba, count, ZEROES)
    }

    /// Records the end of a discard, successful or not: a sector holds zeroes or its former data. A
    /// bad block may stay bad.
    pub fn end_discard(&mut self, lba: u64, count: u64, ticket: Ticket, is_durable: bool) {
        self.end_write(lba, count, ticket, false, is_durable);
    }

    /// Records the start of a flush.
    pub fn begin_flush(&mut self) -> Ticket {
        Ticket(self.tick())
    }

    /// Records the acknowledgement of a flush: writes that ended before it began are durable.
    pub fn end_flush(&mut self, ticket: Ticket) {
        let now = self.tick();
        let oldest_read = self.reads.iter().copied().min().unwrap_or(NEVER);
        for sector in self.sectors.iter_mut().filter(|sector| !sector.more.is_empty()) {
            let is_flushed = |write: &Write| write.is_cached && write.ended < ticket.0;
            let flushed: Vec<(u64, bool)> = sector
                .all()
                .filter(|write| is_flushed(write))
                .map(|write| (write.began, write.has_happened))
                .collect();
            for (began, has_happened) in flushed {
                let all = std::iter::once(&mut sector.first).chain(&mut sector.more);
                all.filter(|write| write.began == began).for_each(|write| write.is_cached = false);
                if has_happened {
                    sector.replace_before(began, now, true);
                }
            }
            sector.prune(oldest_read);
        }
    }

    /// Records a power failure: writes in flight or in a cache may or may not have survived.
    pub fn crash(&mut self) {
        let now = self.tick();
        self.reads.clear();
        for sector in self.sectors.iter_mut().filter(|sector| !sector.more.is_empty()) {
            let is_cut_off = sector.all().any(|write| write.ended == NEVER);
            if is_cut_off {
                sector.cut_off = Until::OPEN;
            }
            sector.prune(NEVER);
            for write in std::iter::once(&mut sector.first).chain(&mut sector.more) {
                write.ended = write.ended.min(now);
                write.replaced = NEVER;
                write.is_cached = false;
            }
        }
    }

    /// Records the end of all processes: writes in flight may or may not have happened.
    pub fn kill(&mut self) {
        let now = self.tick();
        self.reads.clear();
        for sector in self.sectors.iter_mut().filter(|sector| !sector.more.is_empty()) {
            let all = std::iter::once(&mut sector.first).chain(&mut sector.more);
            all.filter(|write| write.ended == NEVER).for_each(|write| {
                write.ended = now;
                write.is_cached = true;
            });
            sector.prune(NEVER);
        }
    }

    /// Records the start of a read.
    pub fn begin_read(&mut self) -> Ticket {
        let began = self.tick();
        self.reads.push(began);
        Ticket(began)
    }

    /// Checks a read that ended with `bytes`.
    ///
    /// # Errors
    /// The first sector that the device must not return.
    pub fn end_read(&mut self, lba: u64, ticket: Ticket, bytes: &[u8]) -> Result<(), Violation> {
        self.reads.retain(|began| *began != ticket.0);
        self.tick();
        for (i, sector) in bytes.chunks_exact(SECTOR).enumerate() {
            self.check(lba + i as u64, ticket.0, sector)?;
        }
        Ok(())
    }

    /// Checks the content of the whole device at one moment after `ticket`, the start of a read. It
    /// has each write that was acknowledged before that moment, and none that began after it.
    ///
    /// # Errors
    /// The first sector that cannot be so, or a moment that cannot be.
    pub fn check_moment(&self, ticket: Ticket, bytes: &[u8]) -> Result<(), Violation> {
        let (mut first, mut last) = (ticket.0, NEVER);
        for (lba, bytes) in (0..).zip(bytes.chunks_exact(SECTOR)) {
            let seen = recognise(self.seed, lba, bytes);
            let is_seen = |write: &&Write| {
                let is_version = matches!(seen, Seen::Version(version) if version == write.version);
                write.replaced > ticket.0 && (is_version || write.version == ANYTHING)
            };
            let writes: Vec<&Write> = self.sectors[lba as usize].all().filter(is_seen).collect();
            let Some(began) = writes.iter().map(|write| write.began).min() else {
                return Err(self.explain(lba, ticket.0, &seen));
            };
            first = first.max(began);
            last = last.min(writes.iter().map(|write| write.replaced).max().unwrap_or(NEVER));
        }
        match first < last {
            true => Ok(()),
            false => Err(Violation(format!(
                "the write that began at {first} without an earlier one, acknowledged at {last}"
            ))),
        }
    }

    /// Records the end of a read that [`Oracle::check_moment`] judges, or of one that failed.
    pub fn forget_read(&mut self, ticket: Ticket) {
        self.reads.retain(|began| *began != ticket.0);
    }

    /// Checks a failed read. `may_fail` says for a sector, and for whether a write to it was cut
    /// off, if failure is allowed. A block that a concurrent write has repaired may have failed
    /// before that write. `is_block`: the read was of one logical block, which stays lost until it
    /// is written.
    ///
    /// # Errors
    /// When no sector of the range may be unreadable.
    pub fn end_failed_read(
        &mut self,
        lba: u64,
        count: u64,
        ticket: Ticket,
        error: IoError,
        is_block: bool,
        may_fail: impl Fn(u64, bool) -> bool,
    ) -> Result<(), Violation> {
        self.reads.retain(|began| *began != ticket.0);
        let range = lba..lba + count;
        let is_lost = range.clone().any(|lba| {
            let sector = &self.sectors[lba as usize];
            sector.lost.was_so_at(ticket.0) || may_fail(lba, sector.cut_off.was_so_at(ticket.0))
        });
        if !is_lost {
            return Err(Violation(format!("sectors {lba}+{count}: unreadable ({error}), and must not be")));
        }
        if is_block {
            for sector in &mut self.sectors[lba as usize..(lba + count) as usize] {
                let is_mended = sector.written > ticket.0;
                sector.lost = if is_mended { Until(sector.written) } else { Until::OPEN };
            }
        }
        Ok(())
    }

    /// Whether the content of the sector is ambiguous and must be read after a crash.
    pub fn is_open(&self, lba: u64) -> bool {
        !self.sectors[lba as usize].more.is_empty()
    }

    /// Whether the last read of the sector failed, and it has not been written since.
    pub fn is_lost(&self, lba: u64) -> bool {
        self.sectors[lba as usize].lost.is_open()
    }

    /// Allows sectors to be unreadable until they are written.
    pub fn excuse(&mut self, range: std::ops::Range<u64>) {
        self.sectors[range.start as usize..range.end as usize].iter_mut().for_each(|s| s.lost = Until::OPEN);
    }

    /// Allows any content from now on, for example because the sector was damaged on purpose.
    pub fn give_up(&mut self, lba: u64, count: u64) {
        for sector in &mut self.sectors[lba as usize..(lba + count) as usize] {
            sector.first = Write::settled(ANYTHING);
            sector.lost = Until::OPEN;
        }
    }

    fn check(&mut self, lba: u64, began: u64, bytes: &[u8]) -> Result<(), Violation> {
        let (seen, now) = (recognise(self.seed, lba, bytes), self.now);
        let sector = &mut self.sectors[lba as usize];
        let version = if let Seen::Version(version) = seen { version } else { ANYTHING };
        let is_allowed = sector
            .all()
            .any(|write| write.replaced > began && (write.version == ANYTHING || write.version == version));
        if !is_allowed {
            return Err(self.explain(lba, began, &seen));
        }
        sector.lost.end(now);
        let is_over = |write: &Write| write.ended < began && !write.is_cached && write.version != ANYTHING;
        let is_settled = sector.all().all(is_over);
        if is_settled && (sector.cut_off.is_open() || !sector.more.is_empty()) {
            // A read that began before this one ended may still return another version.
            let oldest_read = self.reads.iter().copied().min().unwrap_or(NEVER);
            for write in std::iter::once(&mut sector.first).chain(&mut sector.more) {
                if write.version != version {
                    write.replaced = write.replaced.min(now);
                    write.is_gone = true;
                }
            }
            sector.prune(oldest_read);
            sector.cut_off.end(now);
        }
        Ok(())
    }

    fn explain(&self, lba: u64, began: u64, seen: &Seen) -> Violation {
        let sector = &self.sectors[lba as usize];
        let may: Vec<String> = sector
            .all()
            .filter(|write| write.replaced > began)
            .map(|write| {
                let state = if write.ended == NEVER { " (in flight)" } else { "" };
                format!("{}{state}", version_name(write.version))
            })
            .collect();
        let what = match seen {
            Seen::Version(version) if sector.all().any(|write| write.version == *version) => {
                format!("{}, which was replaced", version_name(*version))
            }
            Seen::Version(version) => format!("{}, which is stale", version_name(*version)),
            Seen::Foreign(other, version) => {
                format!("{} of sector {other}", version_name(*version))
            }
            Seen::Garbage(word) => format!("garbage that begins with {word:#018x}"),
        };
        Violation(format!("sector {lba}: holds {what}; may be {}", may.join(" or ")))
    }
}

impl Sector {
    fn all(&self) -> impl Iterator<Item = &Write> {
        std::iter::once(&self.first).chain(&self.more)
    }

    /// The write that began at `began` is acknowledged: later reads cannot return versions that had
    /// ended before.
    fn replace_before(&mut self, began: u64, now: u64, is_durable: bool) {
        for write in std::iter::once(&mut self.first).chain(&mut self.more) {
            if write.ended < began {
                write.replaced = write.replaced.min(now);
                write.is_gone |= is_durable;
            }
        }
    }

    /// Removes versions that no read that began at `oldest_read` or later can return.
    fn prune(&mut self, oldest_read: u64) {
        let is_over = |write: &Write| write.is_gone && write.replaced < oldest_read;
        self.more.retain(|write| !is_over(write));
        if is_over(&self.first) && !self.more.is_empty() {
            self.first = self.more.remove(0);
        }
    }
}

enum Seen {
    Version(u32),
    Foreign(u64, u32),
    Garbage(u64),
}

fn version_name(version: u32) -> String {
    match version {
        ZEROES => "zeroes".into(),
        ANYTHING => "anything".into(),
        version => format!("write {version}"),
    }
}

/// The content of a sector written by `version`.
fn content(seed: u64, lba: u64, version: u32) -> [u8; SECTOR] {
    let mut bytes = [0; SECTOR];
    if version != ZEROES {
        let head = lba << 32 | u64::from(version);
        let key = mix(seed ^ mix(head)) | 1;
        let (mut word, mask) = (head, key.rotate_left(17));
        let mut sum = 0u64;
        for target in bytes.as_chunks_mut::<8>().0 {
            *target = word.to_le_bytes();
            sum = sum.wrapping_add(key);
            word = sum ^ mask;
        }
    }
    bytes
}

fn recognise(seed: u64, lba: u64, bytes: &[u8]) -> Seen {
    let head = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes"));
    let (found_lba, version) = if head == 0 { (lba, ZEROES) } else { (head >> 32, head as u32) };
    let is_whole = bytes == content(seed, found_lba, version);
    match is_whole {
        false => Seen::Garbage(head),
        true if found_lba == lba => Seen::Version(version),
        true => Seen::Foreign(found_lba, version),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LBA: u64 = 5;

    struct Bench(Oracle);

    impl Bench {
        fn new() -> Bench {
            Bench(Oracle::new(9, 8192))
        }

        fn write(&mut self, version: u32) -> Ticket {
            self.0.begin_write(LBA, 1, version)
        }

        fn acknowledge(&mut self, ticket: Ticket, is_durable: bool) {
            self.0.end_write(LBA, 1, ticket, true, is_durable);
        }

        fn read(&mut self, version: u32) -> Result<(), Violation> {
            let ticket = self.0.begin_read();
            self.end_read(ticket, version)
        }

        fn end_read(&mut self, ticket: Ticket, version: u32) -> Result<(), Violation> {
            let mut bytes = [0; SECTOR];
            self.0.fill(LBA, version, &mut bytes);
            self.0.end_read(LBA, ticket, &bytes)
        }
    }

    #[test]
    fn an_acknowledged_write_replaces_what_ended_before_it() {
        let mut bench = Bench::new();
        let ticket = bench.write(1);
        assert!(bench.read(ZEROES).is_ok() && bench.read(1).is_ok() && bench.read(ZEROES).is_ok());
        let early = bench.0.begin_read();
        bench.acknowledge(ticket, true);
        assert!(bench.end_read(early, ZEROES).is_ok(), "the read began before the acknowledgement");
        let error = bench.read(ZEROES).unwrap_err().0;
        assert_eq!(error, "sector 5: holds zeroes, which was replaced; may be write 1");
        assert_eq!(bench.read(1), Ok(()));
    }

    #[test]
    fn writes_that_overlap_leave_either_and_a_read_says_which() {
        let mut bench = Bench::new();
        let (first, second) = (bench.write(1), bench.write(2));
        bench.acknowledge(second, true);
        bench.acknowledge(first, true);
        assert!(bench.read(ZEROES).is_err());
        assert!(bench.read(2).is_ok());
        assert!(bench.read(1).is_err(), "no flip-flop");
    }

    #[test]
    fn after_power_loss_a_write_in_flight_is_there_or_not_and_stays_so() {
        for seen in [1, 2] {
            let mut bench = Bench::new();
            let ticket = bench.write(1);
            bench.acknowledge(ticket, true);
            bench.write(2);
            bench.0.crash();
            assert!(bench.read(ZEROES).is_err());
            assert!(bench.read(seen).is_ok());
            assert!(bench.read(3 - seen).is_err());
        }
    }

    #[test]
    fn only_a_flush_makes_a_cached_write_survive() {
        let mut bench = Bench::new();
        let ticket = bench.write(1);
        bench.acknowledge(ticket, false);
        assert!(bench.read(1).is_ok() && bench.read(ZEROES).is_err(), "the cache is coherent");
        let mut flushed = Bench(bench.0.clone());
        bench.0.crash();
        assert!(bench.read(ZEROES).is_ok());
        let flush = flushed.0.begin_flush();
        flushed.0.end_flush(flush);
        flushed.0.crash();
        assert!(flushed.read(ZEROES).is_err());
        assert!(flushed.read(1).is_ok());
    }

    #[test]
    fn a_kill_loses_nothing_that_was_acknowledged() {
        for seen in [1, 2] {
            let mut bench = Bench::new();
            let ticket = bench.write(1);
            bench.acknowledge(ticket, false);
            bench.write(2);
            bench.0.kill();
            let mut lost = Bench(bench.0.clone());
            assert!(bench.read(ZEROES).is_err() && bench.read(seen).is_ok());
            lost.0.crash();
            assert!(lost.read(ZEROES).is_ok(), "power loss is another matter");
        }
    }

    #[test]
    fn a_flush_covers_only_what_had_ended_when_it_began() {
        let mut bench = Bench::new();
        let ticket = bench.write(1);
        let flush = bench.0.begin_flush();
        bench.acknowledge(ticket, false);
        bench.0.end_flush(flush);
        bench.0.crash();
        assert!(bench.read(ZEROES).is_ok());
    }

    #[test]
    fn a_write_that_failed_may_have_happened() {
        for seen in [ZEROES, 1] {
            let mut bench = Bench::new();
            let ticket = bench.write(1);
            bench.0.end_write(LBA, 1, ticket, false, true);
            assert!(bench.read(seen).is_ok());
            assert!(bench.read(1 - seen).is_err());
        }
    }

    #[test]
    fn a_discard_leaves_zeroes_or_what_was_there_and_a_read_says_which() {
        for (seen, other) in [(ZEROES, 2), (2, ZEROES)] {
            let mut bench = Bench::new();
            for version in [1, 2] {
                let ticket = bench.write(version);
                bench.acknowledge(ticket, true);
            }
            let ticket = bench.0.begin_discard(LBA, 1);
            bench.0.end_discard(LBA, 1, ticket, false);
            let flush = bench.0.begin_flush();
            bench.0.end_flush(flush);
            assert!(bench.read(1).is_err(), "what was replaced before the discard");
            let read = bench.0.begin_read();
            assert!(bench.0.end_read(LBA, read, &[7; SECTOR]).is_err(), "foreign bytes");
            assert!(bench.read(seen).is_ok() && bench.read(other).is_err());
            let ticket = bench.write(3);
            bench.acknowledge(ticket, true);
            assert!(bench.read(seen).is_err() && bench.read(3).is_ok());
        }
    }

    #[test]
    fn garbage_and_foreign_data_are_named() {
        let mut bench = Bench::new();
        let ticket = bench.0.begin_read();
        let error = bench.0.end_read(LBA, ticket, &[7; SECTOR]).unwrap_err().0;
        assert_eq!(error, "sector 5: holds garbage that begins with 0x0707070707070707; may be zeroes");
        let mut bytes = [0; SECTOR];
        bench.0.fill(3, 8, &mut bytes);
        let ticket = bench.0.begin_read();
        let error = bench.0.end_read(LBA, ticket, &bytes).unwrap_err().0;
        assert_eq!(error, "sector 5: holds write 8 of sector 3; may be zeroes");
        bytes[SECTOR - 1] ^= 1;
        let ticket = bench.0.begin_read();
        assert!(bench.0.end_read(3, ticket, &bytes).unwrap_err().0.contains("garbage"));
    }

    #[test]
    fn only_what_may_be_unreadable_is() {
        let mut bench = Bench::new();
        bench.write(1);
        bench.0.crash();
        let fail = |bench: &mut Bench, lba| {
            let ticket = bench.0.begin_read();
            bench.0.end_failed_read(lba, 1, ticket, IoError::Medium, true, |_, was_cut_off| was_cut_off)
        };
        assert!(fail(&mut bench, 4).unwrap_err().0.contains("sectors 4+1: unreadable (medium error)"));
        assert_eq!(fail(&mut bench, LBA), Ok(()));
        assert_eq!(fail(&mut bench, LBA), Ok(()), "and stays so");
        let ticket = bench.write(2);
        bench.acknowledge(ticket, true);
        assert!(fail(&mut bench, LBA).is_err(), "until it is rewritten");
    }

    #[test]
    fn a_read_may_fail_on_a_bad_block_that_a_write_mends_meanwhile() {
        for is_known in [false, true] {
            let mut bench = Bench::new();
            bench.write(1);
            bench.0.crash();
            let fail = |bench: &mut Bench, ticket| {
                bench.0.end_failed_read(LBA, 1, ticket, IoError::Medium, true, |_, was_cut_off| was_cut_off)
            };
            if is_known {
                let ticket = bench.0.begin_read();
                assert_eq!(fail(&mut bench, ticket), Ok(()));
            }
            let write = bench.write(2);
            let early = bench.0.begin_read();
            bench.acknowledge(write, true);
            let late = bench.0.begin_read();
            assert_eq!(fail(&mut bench, early), Ok(()), "it began before the block was good");
            assert!(fail(&mut bench, late).is_err(), "it began after, and what the early one met is over");
            assert_eq!(bench.read(2), Ok(()));
        }
    }
}
