//! Random operations, several at once, against a copy of the data in memory.

use crate::client::{Client, fill};
use crate::{Layout, Subject, check};
use base::Rng;
use block::{Flags, IoError, Op, Status};
use reactor::CoreRef;

/// Tasks that work at the same time, each in an area of its own.
const TASKS: usize = 16;
const AREA: u64 = 512 << 10;
const STEPS: usize = 250;

pub(crate) fn run(core: &CoreRef, subject: &Subject) {
    check(core, subject, "random operations", |client| async move {
        client
            .all_at_once(TASKS, |task, client| async move {
                Area::new(task, client).run().await;
            })
            .await;
    });
}

struct Area {
    client: Client,
    rng: Rng,
    task: usize,
    start: u64,
    model: Vec<u8>,
    /// By block: whether the model knows what the device holds (not after a discard).
    is_known: Vec<bool>,
}

impl Area {
    fn new(task: usize, client: Client) -> Area {
        let rng = Rng::new(client.seed.wrapping_mul(1000) + task as u64);
        let blocks = (AREA / client.block_size()) as usize;
        let start = task as u64 * AREA;
        Area { client, rng, task, start, model: vec![0; AREA as usize], is_known: vec![false; blocks] }
    }

    async fn run(mut self) {
        for step in 0..STEPS {
            self.step(step).await;
        }
        let len = self.client.transfer_len(64 << 10) as u64;
        for from in (0..AREA / len).map(|i| i * len) {
            self.read(STEPS, from, len).await;
        }
    }

    async fn step(&mut self, step: usize) {
        let block = self.client.block_size();
        let most = if self.rng.one_in(10) { 256 << 10 } else { 16 * block };
        let most = (self.client.transfer_len(most as usize) as u64).min(AREA) / block;
        let blocks = 1 + self.rng.below(most);
        let from = self.rng.below(AREA / block - blocks + 1);
        let (from, len) = (from * block, blocks * block);
        match self.rng.below(13) {
            0..4 => self.read(step, from, len).await,
            4..9 => self.write(step, from, len).await,
            9 => self.zero(step, from, len).await,
            10 => self.discard(step, from, len).await,
            11 => self.status(step, from, len).await,
            _ => self.client.flush().await,
        }
    }

    fn layout(&mut self, len: usize) -> Layout {
        if self.rng.one_in(2) {
            return Layout::whole(len);
        }
        let unit = if self.rng.one_in(2) { 512 } else { 1 + self.rng.below(3000) as usize };
        let skip = if self.rng.one_in(2) { 0 } else { self.rng.below(1024) as usize };
        let mut lens = Vec::new();
        let mut left = len;
        while left > 0 {
            let part = ((1 + self.rng.below(8) as usize) * unit).min(left);
            lens.push(part);
            left -= part;
        }
        Layout { skip, lens }
    }

    fn where_it_is(&self, step: usize, from: u64, len: u64) -> String {
        format!("in step {step} of task {}, seed {}, range {from}+{len}", self.task, self.client.seed)
    }

    fn note(&mut self, from: u64, len: u64, is_known: bool) {
        let block = self.client.block_size();
        self.is_known[(from / block) as usize..((from + len) / block) as usize].fill(is_known);
    }

    async fn read(&mut self, step: usize, from: u64, len: u64) {
        let layout = self.layout(len as usize);
        let at = self.where_it_is(step, from, len);
        let (bytes, result) = self.client.read_as(self.start + from, &layout).await;
        assert_eq!(result, Ok(()), "read {at}");
        let block = self.client.block_size() as usize;
        for (i, got) in bytes.chunks(block).enumerate() {
            let here = from as usize + i * block;
            if self.is_known[here / block] {
                let expected = &self.model[here..here + block];
                self.client.compare(self.start + here as u64, got, expected, &at);
            }
        }
    }

    async fn write(&mut self, step: usize, from: u64, len: u64) {
        let layout = self.layout(len as usize);
        let flags = if self.rng.one_in(4) { Flags::FUA } else { Flags::NONE };
        let salt = self.rng.draw();
        let range = from as usize..(from + len) as usize;
        fill(&mut self.model[range.clone()], salt);
        let at = self.where_it_is(step, from, len);
        let result = self.client.write_as(self.start + from, &self.model[range], flags, &layout).await;
        assert_eq!(result, Ok(()), "write {at}");
        self.note(from, len, true);
    }

    async fn zero(&mut self, step: usize, from: u64, len: u64) {
        let kinds = [Flags::NONE, Flags::FUA, Flags::NO_UNMAP, Flags::NO_FALLBACK];
        let flags = kinds[self.rng.below(4) as usize];
        match self.client.command(Op::WriteZeroes, flags, self.start + from, len).await {
            Ok(()) => {
                self.model[from as usize..(from + len) as usize].fill(0);
                self.note(from, len, true);
            }
            Err(IoError::Unsupported) => {}
            Err(error) => panic!("write zeroes {flags:?} {}: {error}", self.where_it_is(step, from, len)),
        }
    }

    /// A range that counts as zeroes must not hold anything else.
    async fn status(&mut self, step: usize, from: u64, len: u64) {
        let block = self.client.block_size() as usize;
        let mut here = from as usize;
        for extent in self.client.status(self.start + from, len).await {
            let range = here..here + extent.len as usize;
            here = range.end;
            let is_zero = extent.status.contains(Status::ZERO) && self.client.keeps_data;
            for at in range.step_by(block).filter(|at| is_zero && self.is_known[at / block]) {
                let has_data = self.model[at..at + block].iter().any(|byte| *byte != 0);
                assert!(
                    !has_data,
                    "data at {at} counts as {:?} {}",
                    extent.status,
                    self.where_it_is(step, from, len)
                );
            }
        }
    }

    async fn discard(&mut self, step: usize, from: u64, len: u64) {
        match self.client.command(Op::Discard, Flags::NONE, self.start + from, len).await {
            Ok(()) => self.note(from, len, false),
            Err(IoError::Unsupported) => {}
            Err(error) => panic!("discard {}: {error}", self.where_it_is(step, from, len)),
        }
    }
}
