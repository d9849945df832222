//! A user of the array on one core, which reports every request to the oracle.

use crate::oracle::{SECTOR, ZEROES};
use crate::world::World;
use block::{Channel, Flags, IoError, IoResult, Op, Request};
use std::collections::BTreeSet;
use std::ops::Range;
use std::pin::Pin;
use std::rc::Rc;
use std::task::Context;

/// A user of the array on one core.
#[derive(Clone)]
pub struct Client {
    world: Rc<World>,
    channel: Rc<dyn Channel>,
    /// Whether an acknowledged write may still be lost.
    has_volatile_cache: bool,
}

impl Client {
    /// A user of `channel`.
    pub fn new(world: &Rc<World>, channel: Rc<dyn Channel>, has_volatile_cache: bool) -> Client {
        Client { world: world.clone(), channel, has_volatile_cache }
    }

    /// Whether there is power.
    pub fn is_on(&self) -> bool {
        self.world.machine.is_on()
    }

    /// Sectors of the array.
    pub fn sectors(&self) -> u64 {
        self.world.sectors()
    }

    /// Judges a failed request that changes data while power is on: only an array that has lost too
    /// much may fail it.
    /// Fails the run for an error that nothing excuses. `may_be_refused`: as it was when the
    /// request began; it may have taken longer than the sync that changed this.
    fn judge(&self, what: &str, lba: u64, count: u64, may_be_refused: bool, result: IoResult) {
        if let Err(error) = result
            && !self.world.is_any_beyond()
            && !(error == IoError::Medium && (may_be_refused || self.world.may_refuse(lba, count)))
        {
            self.world.fail(format!("{what} of sectors {lba}+{count} failed: {error}"));
        }
    }

    /// Reads and checks. After an error it reads block by block to find the unreadable ones.
    pub async fn read(&self, lba: u64, count: u64) {
        if !self.try_read(lba, count).await && self.is_on() && !self.world.has_failed() {
            let unit = u64::from(self.world.shape.block_size) / SECTOR as u64;
            for at in (lba..lba + count).step_by(unit as usize).filter(|_| count > unit) {
                self.try_read(at, unit).await;
            }
        }
    }

    /// Returns whether the sectors could be read.
    async fn try_read(&self, lba: u64, count: u64) -> bool {
        let core = reactor::current();
        let mut buffer = core.buffers().take(count as usize * SECTOR).await;
        buffer.as_mut_slice().fill(0xa5);
        let ticket = self.world.oracle.borrow_mut().begin_read();
        self.world.count(|stats| stats.operations += 1);
        let offset = lba * SECTOR as u64;
        let (buffer, result) = buffer.transfer(&*self.channel, Op::Read, Flags::NONE, offset).await;
        if !self.is_on() {
            return false;
        }
        let mut oracle = self.world.oracle.borrow_mut();
        let judged = match result {
            Ok(()) => oracle.end_read(lba, ticket, buffer.as_slice()),
            Err(error) => {
                let may_fail = |lba: u64, was_cut_off: bool| {
                    let group = self.world.group_of(lba);
                    let is_excused =
                        was_cut_off && self.world.is_impaired(group) || self.world.may_be_lost(lba);
                    self.world.is_any_beyond() || error == IoError::Medium && is_excused
                };
                let unit = u64::from(self.world.shape.block_size) / SECTOR as u64;
                self.world.count(|stats| stats.unreadable += u64::from(count == unit));
                oracle.end_failed_read(lba, count, ticket, error, count == unit, may_fail)
            }
        };
        if let Err(violation) = judged {
            self.world.fail(violation.0);
        }
        result.is_ok()
    }

    /// Writes. If `change_ns` is not 0, the memory changes that many nanoseconds later.
    pub async fn write(&self, lba: u64, count: u64, is_fua: bool, change_ns: u64) {
        let core = reactor::current();
        let mut buffer = core.buffers().take(count as usize * SECTOR).await;
        let mut writes = Vec::with_capacity(2);
        let mut second = Vec::new();
        {
            let mut oracle = self.world.oracle.borrow_mut();
            let version = oracle.new_version();
            oracle.fill(lba, version, buffer.as_mut_slice());
            writes.push(oracle.begin_write(lba, count, version));
            if change_ns > 0 {
                let version = oracle.new_version();
                second = vec![0; count as usize * SECTOR];
                oracle.fill(lba, version, &mut second);
                writes.push(oracle.begin_write(lba, count, version));
            }
        }
        self.world.count(|stats| stats.operations += 1);
        let may_be_refused = self.world.may_refuse(lba, count);
        self.world.note_write(lba, count);
        let flags = if is_fua { Flags::FUA } else { Flags::NONE };
        let offset = lba * SECTOR as u64;
        let result = if change_ns == 0 {
            buffer.transfer(&*self.channel, Op::Write, flags, offset).await.1
        } else {
            let mut alarm = Box::pin(core.sleep(change_ns));
            let mut has_changed = false;
            let change = |cx: &mut Context<'_>, memory: block::Data<'_>| {
                if !has_changed && Pin::new(&mut alarm).as_mut().poll(cx).is_ready() {
                    memory.copy_from(&second);
                    has_changed = true;
                }
            };
            buffer.transfer_changing(&*self.channel, Op::Write, flags, offset, change).await.1
        };
        if !self.is_on() {
            return; // the answer was lost
        }
        self.world.note_written(lba, count);
        let is_durable = is_fua || !self.has_volatile_cache;
        let mut oracle = self.world.oracle.borrow_mut();
        for ticket in writes {
            oracle.end_write(lba, count, ticket, result.is_ok(), is_durable);
        }
        self.judge("a write", lba, count, may_be_refused, result);
    }

    /// Rewrites each block that a read has found lost.
    pub async fn rewrite_lost(&self) {
        let unit = u64::from(self.world.shape.block_size) / SECTOR as u64;
        for lba in (0..self.sectors()).step_by(unit as usize) {
            let is_lost = self.world.oracle.borrow().is_lost(lba);
            if is_lost && self.is_on() && !self.world.has_failed() {
                self.write(lba, unit, true, 0).await;
            }
        }
    }

    /// Zeroes or discards.
    pub async fn clear(&self, lba: u64, count: u64, is_discard: bool) {
        let len = count * SECTOR as u64;
        let req = if is_discard { Request::discard(len) } else { Request::write_zeroes(len, Flags::NONE) };
        let ticket = match is_discard {
            true => self.world.oracle.borrow_mut().begin_discard(lba, count),
            false => self.world.oracle.borrow_mut().begin_write(lba, count, ZEROES),
        };
        self.world.count(|stats| stats.operations += 1);
        let may_be_refused = self.world.may_refuse(lba, count);
        self.world.note_write(lba, count);
        let result = self.channel.submit(&req, lba * SECTOR as u64).await;
        if !self.is_on() {
            return;
        }
        self.world.note_written(lba, count);
        let is_durable = !self.has_volatile_cache;
        match is_discard {
            true => self.world.oracle.borrow_mut().end_discard(lba, count, ticket, is_durable),
            false => {
                self.world.oracle.borrow_mut().end_write(lba, count, ticket, result.is_ok(), is_durable);
            }
        }
        if result != Err(IoError::Unsupported) {
            self.judge(req.op.name(), lba, count, may_be_refused, result);
        }
    }

    /// Flushes.
    pub async fn flush(&self) {
        let ticket = self.world.oracle.borrow_mut().begin_flush();
        self.world.count(|stats| stats.operations += 1);
        let result = self.channel.submit(&Request::flush(), 0).await;
        if !self.is_on() {
            return;
        }
        if result.is_ok() {
            self.world.oracle.borrow_mut().end_flush(ticket);
        }
        self.judge("a flush", 0, 0, false, result);
    }

    /// Reads everything except some sectors, in the ranges between them.
    pub async fn verify_without(&self, sectors: &BTreeSet<u64>) {
        let mut lba = 0;
        for end in sectors.iter().copied().chain([self.world.sectors()]) {
            self.verify_range(lba..end, 256).await;
            lba = end + 1;
        }
    }

    /// Reads everything in requests of at most `most` sectors.
    pub async fn verify(&self, most: u64) {
        self.verify_range(0..self.world.sectors(), most).await;
    }

    async fn verify_range(&self, sectors: Range<u64>, most: u64) {
        let mut lba = sectors.start;
        while lba < sectors.end && self.is_on() && !self.world.has_failed() {
            let count = most.min(sectors.end - lba);
            self.read(lba, count).await;
            lba += count;
        }
    }
}
