//! Clients that write all the time, and what their disk must hold afterwards.

use super::Daemon;
use block::{Device, Flags, Op};
use reactor::{CoreConfig, Cores};
use stack::kinds::member::member;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub const BLOCK: u64 = 4096;
/// Blocks that are read with one request.
const AT_ONCE: u64 = 64;

/// A client of an export.
pub struct Client {
    pub device: Arc<dyn Device>,
    cores: Cores,
}

impl Client {
    /// Of the NBD export `e1`.
    pub fn new(daemon: &Daemon) -> Client {
        Client::of(daemon, "e1")
    }

    /// Of an NBD export.
    pub fn of(daemon: &Daemon, export: &str) -> Client {
        let path = format!("/v1/exports/{export}");
        let socket = daemon.get(&path)["options"]["socket"].as_str().unwrap().to_owned();
        Client::open(&format!("nbd:path={socket},export={export}"))
    }

    /// Of the device of this specification.
    pub fn open(spec: &str) -> Client {
        let device = member(spec, false, false).unwrap().open().unwrap();
        Client { device, cores: Cores::start(&[CoreConfig::default()]).unwrap() }
    }

    /// Writes blocks by `number`, each full of what `value` says of it, until that ends or the
    /// server does. Returns those that were acknowledged in the end, and one that may have been
    /// written.
    pub fn write(
        &self,
        mut next: impl FnMut() -> Option<(u64, u64)> + Send + 'static,
    ) -> Vec<(u64, u64, bool)> {
        let device = self.device.clone();
        let written = self.cores.get(0).block_on(move |core| async move {
            let Ok(channel) = device.open_channel() else { return Vec::new() };
            let mut log = Vec::new();
            while let Some((number, value)) = next() {
                let mut buffer = core.buffers().take(BLOCK as usize).await;
                let words = buffer.as_mut_slice().as_chunks_mut::<8>().0;
                words.iter_mut().for_each(|word| *word = value.to_le_bytes());
                let result = buffer.transfer(&*channel, Op::Write, Flags::NONE, number * BLOCK).await.1;
                log.push((number, value, result.is_ok()));
                if result.is_err() {
                    break;
                }
            }
            log
        });
        written.unwrap()
    }

    /// Values of the blocks; all bytes of a block are the same.
    pub fn read(&self, blocks: u64) -> Vec<u64> {
        let device = self.device.clone();
        let read = self.cores.get(0).block_on(move |core| async move {
            let channel = device.open_channel().unwrap();
            let mut values = Vec::new();
            for number in (0..blocks).step_by(AT_ONCE as usize) {
                let buffer = core.buffers().take((AT_ONCE * BLOCK) as usize).await;
                let (buffer, read) = buffer.transfer(&*channel, Op::Read, Flags::NONE, number * BLOCK).await;
                read.unwrap();
                for block in buffer.as_slice().chunks(BLOCK as usize) {
                    let words = block.as_chunks::<8>().0;
                    assert!(words.iter().all(|word| *word == words[0]), "one of 64 from {number} is torn");
                    values.push(u64::from_le_bytes(words[0]));
                }
            }
            values
        });
        read.unwrap()
    }
}

/// Expected content of a volume: by block the acknowledged value, and values written since.
pub struct Expected {
    pub blocks: Vec<u64>,
    pub maybe: Option<(u64, u64)>,
}

impl Expected {
    pub fn note(&mut self, log: &[(u64, u64, bool)]) {
        self.maybe = None;
        for (number, value, is_acknowledged) in log {
            match is_acknowledged {
                true => self.blocks[*number as usize] = *value,
                false => self.maybe = Some((*number, *value)),
            }
        }
    }

    #[track_caller]
    pub fn check(&mut self, found: &[u64]) {
        for (number, (found, expected)) in found.iter().zip(&mut self.blocks).enumerate() {
            let may_be = self.maybe == Some((number as u64, *found));
            assert!(found == expected || may_be, "block {number}: {found}, not {expected}");
            *expected = *found;
        }
    }
}

/// Blocks in a scattered order, with growing values, until `is_enough`.
pub fn load(
    blocks: u64,
    start: u64,
    is_enough: Arc<AtomicBool>,
) -> impl FnMut() -> Option<(u64, u64)> + Send {
    let mut value = start;
    move || {
        value += 1;
        let number = value.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
        (!is_enough.load(Ordering::SeqCst)).then_some((number % blocks, value))
    }
}

/// Kills the daemon with `kill -9` after `before`, while a client writes. Returns what it wrote, as
/// [`Client::write`].
pub fn killed_under_load(
    daemon: &mut Daemon,
    client: &Client,
    blocks: u64,
    start: u64,
    before: impl FnOnce(&Daemon),
) -> Vec<(u64, u64, bool)> {
    std::thread::scope(|scope| {
        let loading = scope.spawn(|| client.write(load(blocks, start, Arc::default())));
        before(daemon);
        daemon.end("-KILL");
        loading.join().unwrap()
    })
}

/// Writes while `work` runs, and as many blocks again after it.
pub fn under_load(client: &Client, blocks: u64, start: u64, work: impl FnOnce()) -> Vec<(u64, u64, bool)> {
    let is_enough = Arc::new(AtomicBool::new(false));
    let mut next = load(blocks, start, is_enough.clone());
    let mut left = 200;
    let next = move || {
        next().or_else(|| {
            left -= 1;
            let value: u64 = start + (1 << 32) + left;
            (left > 0).then_some((value % blocks, value))
        })
    };
    std::thread::scope(|scope| {
        let loading = scope.spawn(|| client.write(next));
        let enough = Enough(is_enough);
        work();
        drop(enough);
        loading.join().unwrap()
    })
}

/// Ends a load, also when a test fails.
struct Enough(Arc<AtomicBool>);

impl Drop for Enough {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[track_caller]
pub fn check_all_acknowledged(log: &[(u64, u64, bool)]) {
    assert!(log.len() > 100 && log.iter().all(|(.., is_ok)| *is_ok), "{} writes", log.len());
}

/// Ends the daemon, and starts it again.
pub fn restart(daemon: &mut Daemon, signal: &str) {
    daemon.restart(signal);
    wait_for_export(daemon);
}

/// Waits until the export `e1` is served.
pub fn wait_for_export(daemon: &Daemon) {
    daemon.wait_for("the export", || daemon.get("/v1/exports/e1")["state"] == "active");
}
