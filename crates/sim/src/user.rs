//! A user of a disk: it reports every request to the oracle.

use crate::machine::Machine;
use crate::oracle::{Oracle, SECTOR, ZEROES};
use base::Rng;
use block::{Channel, Device, Flags, IoError, IoResult, Op, Request};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// Most sectors of a request.
const MOST_SECTORS: u64 = 64;

/// The run that a user is part of.
pub trait Host {
    fn machine(&self) -> &Machine;

    /// Whether nothing is wrong and there is power.
    fn goes_on(&self) -> bool;

    /// Something is wrong. The first text is kept.
    fn fail(&self, what: String);

    /// A request is made.
    fn count_operation(&self);

    /// Whether a request may fail with this error. One error is excused once.
    fn excuses(&self, error: IoError) -> bool;

    /// Whether a read may fail with this error.
    fn excuses_read(&self, _error: IoError) -> bool {
        false
    }
}

/// The disk of a user.
#[derive(Clone)]
pub struct Disk {
    /// Its name in messages.
    pub name: String,
    /// The data that reads may return.
    pub oracle: Rc<RefCell<Oracle>>,
    /// Bytes that users may address.
    pub size: Rc<Cell<u64>>,
    /// Bytes of a block.
    pub block_size: u32,
    /// Whether an acknowledged write may still be lost.
    pub has_volatile_cache: bool,
    /// Whether power loss changes nothing of what a failed write has left.
    pub keeps_failed_writes: bool,
}

/// See the module.
pub struct User {
    host: Rc<dyn Host>,
    disk: Disk,
    channel: Rc<dyn Channel>,
}

impl User {
    /// A user on the current core; `None` when the device is gone.
    pub fn open(host: Rc<dyn Host>, disk: Disk, device: &dyn Device) -> Option<User> {
        match device.open_channel() {
            Ok(channel) => Some(User { host, disk, channel }),
            Err(error) => {
                if host.machine().is_on() {
                    host.fail(format!("{}: {error}", disk.name));
                }
                None
            }
        }
    }

    /// Makes requests.
    pub async fn work(self, requests: u64, seed: u64) {
        let mut rng = Rng::new(seed);
        for _ in 0..requests {
            if !self.host.goes_on() {
                return;
            }
            let block = u64::from(self.disk.block_size) / SECTOR as u64;
            let blocks = self.disk.size.get() / SECTOR as u64 / block;
            let at = rng.below(blocks);
            let count = (1 + rng.log_uniform(MOST_SECTORS / block - 1)).min(blocks - at);
            let (lba, count) = (at * block, count * block);
            self.host.count_operation();
            match rng.below(16) {
                0..9 => self.write(lba, count, rng.one_in(4)).await,
                9 => self.clear(lba, count, false).await,
                10 => self.clear(lba, count, true).await,
                11..13 => self.flush().await,
                _ => self.read(lba, count).await,
            }
        }
    }

    /// Reads everything.
    pub async fn verify(self) {
        let sectors = self.disk.size.get() / SECTOR as u64;
        for lba in (0..sectors).step_by(2 * MOST_SECTORS as usize) {
            if self.host.goes_on() {
                self.read(lba, (2 * MOST_SECTORS).min(sectors - lba)).await;
            }
        }
    }

    /// Reads blocks at random places.
    pub async fn look(self, requests: u64, seed: u64) {
        let mut rng = Rng::new(seed);
        let block = u64::from(self.disk.block_size) / SECTOR as u64;
        let blocks = self.disk.size.get() / SECTOR as u64 / block;
        for _ in 0..requests {
            if self.host.goes_on() {
                self.read(rng.below(blocks) * block, block).await;
            }
        }
    }

    async fn read(&self, lba: u64, count: u64) {
        let mut buffer = reactor::current().buffers().take(count as usize * SECTOR).await;
        buffer.as_mut_slice().fill(0xa5);
        let ticket = self.disk.oracle.borrow_mut().begin_read();
        let at = lba * SECTOR as u64;
        let (buffer, result) = buffer.transfer(&*self.channel, Op::Read, Flags::NONE, at).await;
        if !self.host.machine().is_on() {
            return;
        }
        let judged = match result {
            Ok(()) => self.disk.oracle.borrow_mut().end_read(lba, ticket, buffer.as_slice()),
            Err(error) if self.host.excuses_read(error) => return,
            Err(error) => return self.host.fail(format!("{}: a read failed: {error}", self.disk.name)),
        };
        if let Err(violation) = judged {
            self.host.fail(format!("{}: {}", self.disk.name, violation.0));
        }
    }

    async fn write(&self, lba: u64, count: u64, is_fua: bool) {
        let mut buffer = reactor::current().buffers().take(count as usize * SECTOR).await;
        let ticket = {
            let mut oracle = self.disk.oracle.borrow_mut();
            let version = oracle.new_version();
            oracle.fill(lba, version, buffer.as_mut_slice());
            oracle.begin_write(lba, count, version)
        };
        let flags = if is_fua { Flags::FUA } else { Flags::NONE };
        let at = lba * SECTOR as u64;
        let result = buffer.transfer(&*self.channel, Op::Write, flags, at).await.1;
        if !self.host.machine().is_on() {
            return; // the answer is lost with the power
        }
        let is_durable = is_fua && result.is_ok() || self.is_durable(result);
        self.disk.oracle.borrow_mut().end_write(lba, count, ticket, result.is_ok(), is_durable);
        self.judge("a write", result);
    }

    async fn clear(&self, lba: u64, count: u64, is_discard: bool) {
        let len = count * SECTOR as u64;
        let req = if is_discard { Request::discard(len) } else { Request::write_zeroes(len, Flags::NONE) };
        let ticket = match is_discard {
            true => self.disk.oracle.borrow_mut().begin_discard(lba, count),
            false => self.disk.oracle.borrow_mut().begin_write(lba, count, ZEROES),
        };
        let result = self.channel.submit(&req, lba * SECTOR as u64).await;
        if !self.host.machine().is_on() {
            return;
        }
        let is_durable = self.is_durable(result);
        let mut oracle = self.disk.oracle.borrow_mut();
        match is_discard {
            true => oracle.end_discard(lba, count, ticket, is_durable),
            false => oracle.end_write(lba, count, ticket, result.is_ok(), is_durable),
        }
        drop(oracle);
        self.judge(req.op.name(), result);
    }

    async fn flush(&self) {
        let ticket = self.disk.oracle.borrow_mut().begin_flush();
        let result = self.channel.submit(&Request::flush(), 0).await;
        if !self.host.machine().is_on() {
            return;
        }
        if result.is_ok() {
            self.disk.oracle.borrow_mut().end_flush(ticket);
        }
        self.judge("a flush", result);
    }

    /// Whether power loss changes nothing of what a request without FUA has left.
    fn is_durable(&self, result: IoResult) -> bool {
        !self.disk.has_volatile_cache || result.is_err() && self.disk.keeps_failed_writes
    }

    /// A request that changes data fails only for a reason.
    fn judge(&self, what: &str, result: IoResult) {
        if let Err(error) = result
            && !self.host.excuses(error)
        {
            self.host.fail(format!("{}: {what} failed: {error}", self.disk.name));
        }
    }
}
