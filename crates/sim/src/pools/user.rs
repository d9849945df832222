//! A user of a volume: it reports every request to the oracle.

use super::world::{Content, World};
use crate::oracle::{SECTOR, ZEROES};
use base::Rng;
use block::{Channel, Device, Flags, IoError, IoResult, Op, Request};
use std::rc::Rc;

/// Most sectors of a request.
const MOST_SECTORS: u64 = 64;

/// See the module.
pub struct User {
    world: Rc<World>,
    id: u32,
    content: Content,
    channel: Rc<dyn Channel>,
}

impl User {
    /// A user on the current core; `None` when the device is gone.
    pub fn open(world: &Rc<World>, id: u32, device: &dyn Device) -> Option<User> {
        match device.open_channel() {
            Ok(channel) => Some(User { world: world.clone(), id, content: world.content(id), channel }),
            Err(error) => {
                if world.machine.is_on() {
                    world.fail(format!("volume {id}: {error}"));
                }
                None
            }
        }
    }

    /// Makes requests.
    pub async fn work(self, requests: u64, seed: u64) {
        let mut rng = Rng::new(seed);
        for _ in 0..requests {
            if !self.world.goes_on() {
                return;
            }
            let block = u64::from(self.world.shape.block_size) / SECTOR as u64;
            let blocks = self.content.size.get() / SECTOR as u64 / block;
            let at = rng.below(blocks);
            let count = (1 + rng.log_uniform(MOST_SECTORS / block - 1)).min(blocks - at);
            let (lba, count) = (at * block, count * block);
            self.world.count(|stats| stats.operations += 1);
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
        let sectors = self.content.size.get() / SECTOR as u64;
        for lba in (0..sectors).step_by(2 * MOST_SECTORS as usize) {
            if self.world.goes_on() {
                self.read(lba, (2 * MOST_SECTORS).min(sectors - lba)).await;
            }
        }
    }

    async fn read(&self, lba: u64, count: u64) {
        let mut buffer = reactor::current().buffers().take(count as usize * SECTOR).await;
        buffer.as_mut_slice().fill(0xa5);
        let ticket = self.content.oracle.borrow_mut().begin_read();
        let at = lba * SECTOR as u64;
        let (buffer, result) = buffer.transfer(&*self.channel, Op::Read, Flags::NONE, at).await;
        if !self.world.machine.is_on() {
            return;
        }
        let judged = match result {
            Ok(()) => self.content.oracle.borrow_mut().end_read(lba, ticket, buffer.as_slice()),
            Err(error) => return self.world.fail(format!("volume {}: a read failed: {error}", self.id)),
        };
        if let Err(violation) = judged {
            self.world.fail(format!("volume {}: {}", self.id, violation.0));
        }
    }

    async fn write(&self, lba: u64, count: u64, is_fua: bool) {
        let mut buffer = reactor::current().buffers().take(count as usize * SECTOR).await;
        let ticket = {
            let mut oracle = self.content.oracle.borrow_mut();
            let version = oracle.new_version();
            oracle.fill(lba, version, buffer.as_mut_slice());
            oracle.begin_write(lba, count, version)
        };
        let flags = if is_fua { Flags::FUA } else { Flags::NONE };
        let at = lba * SECTOR as u64;
        let result = buffer.transfer(&*self.channel, Op::Write, flags, at).await.1;
        if !self.world.machine.is_on() {
            return; // the answer is lost with the power
        }
        // A write that failed is not in the cache: what the disk took of it is on the medium.
        let is_durable = is_fua || !self.world.shape.has_volatile_cache || result.is_err();
        self.content.oracle.borrow_mut().end_write(lba, count, ticket, result.is_ok(), is_durable);
        self.judge("a write", result);
    }

    async fn clear(&self, lba: u64, count: u64, is_discard: bool) {
        let len = count * SECTOR as u64;
        let req = if is_discard { Request::discard(len) } else { Request::write_zeroes(len, Flags::NONE) };
        let ticket = match is_discard {
            true => self.content.oracle.borrow_mut().begin_discard(lba, count),
            false => self.content.oracle.borrow_mut().begin_write(lba, count, ZEROES),
        };
        let result = self.channel.submit(&req, lba * SECTOR as u64).await;
        if !self.world.machine.is_on() {
            return;
        }
        let is_durable = !self.world.shape.has_volatile_cache || result.is_err();
        let mut oracle = self.content.oracle.borrow_mut();
        match is_discard {
            true => oracle.end_discard(lba, count, ticket, is_durable),
            false => oracle.end_write(lba, count, ticket, result.is_ok(), is_durable),
        }
        drop(oracle);
        self.judge(req.op.name(), result);
    }

    async fn flush(&self) {
        let ticket = self.content.oracle.borrow_mut().begin_flush();
        let result = self.channel.submit(&Request::flush(), 0).await;
        if !self.world.machine.is_on() {
            return;
        }
        if result.is_ok() {
            self.content.oracle.borrow_mut().end_flush(ticket);
        }
        self.judge("a flush", result);
    }

    /// A request that changes data fails only where a disk was made to fail a write.
    fn judge(&self, what: &str, result: IoResult) {
        if let Err(error) = result
            && !(error == IoError::Medium && self.world.excuses_error())
        {
            self.world.fail(format!("volume {}: {what} failed: {error}", self.id));
        }
    }
}
