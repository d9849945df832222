//! Hostile disk images in the format qcow2: edited metadata, compressed data and lengths.
//!
//! An input takes an image that was built here (`base`), edits it, checks it and reads it: the
//! disk, its internal snapshots, its block status and its map. Then it writes to the disk, zeroes
//! and discards parts of it, and closes the image. On another copy it runs commands that change an
//! image which nothing else has open ([`offline`]).
//!
//! Nothing may panic, and every step ends. An image that was not edited is clean and has the data
//! that its builder wrote, and then the data that was written to it.

mod base;
mod offline;

use crate::input::Input;
use base::Base;
use block::{Device, Flags, IoResult, Op, Request, StatusReport};
use drivers::mem::{MemDevice, Options};
use qcow2::{Image, LiveImage, Map, Others, Qcow2};
use reactor::{Core, CoreConfig, CoreRef, Cores};
use std::sync::{Arc, OnceLock};

const MAX_EDITS: usize = 64;
/// Bytes of a disk that are read.
const MOST_READ: u64 = 1 << 20;
/// Bytes of one read.
const PART: u64 = 64 << 10;
/// Snapshots of an image that are read.
const MOST_SNAPSHOTS: usize = 4;
/// Runs of a map that are looked at.
const MOST_RUNS: usize = 1000;
/// Bytes of a backing file or data file.
const OTHER_BYTES: u64 = 256 << 10;

/// Bytes behind the image for new clusters.
const ROOM: u64 = 2 << 20;
/// Requests to a disk that is written.
const WRITES: u64 = 8;
/// Longest of them in bytes.
const MOST_WRITTEN: u64 = 32 << 10;

/// The core that uses every image, and the one that writes metadata.
fn cores() -> [CoreRef; 2] {
    static CORES: OnceLock<Cores> = OnceLock::new();
    let cores =
        CORES.get_or_init(|| Cores::start(&[CoreConfig::default(), CoreConfig::default()]).expect("cores"));
    [cores.get(0), cores.get(1)]
}

/// Runs one input.
///
/// # Panics
/// When an image violates a requirement.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let base = Base::chosen(&mut input);
    let mut image = base.bytes.clone();
    let is_intact = input.is_empty();
    for _ in 0..MAX_EDITS {
        if input.is_empty() {
            break;
        }
        edit(&mut image, &base, &mut input);
    }
    let [core, home] = cores();
    let (read, expected) = (image.clone(), base.clone());
    let done = core.block_on(move |core| async move { use_image(&core, read, &expected, is_intact).await });
    done.expect("the core runs");
    let seed = bytes.iter().fold(1, |seed, byte| ::base::mix(seed ^ u64::from(*byte)));
    offline::run(&core, image.clone(), is_intact.then(|| base.clone()), seed);
    write(&core, &home, image, is_intact.then_some(base), seed);
}

/// Writes to the disk of an image, and closes it. `expected` is what was built.
fn write(core: &CoreRef, home: &CoreRef, bytes: Vec<u8>, expected: Option<Base>, seed: u64) {
    let is_intact = expected.is_some();
    let opened = core.block_on(move |core| async move {
        let device: Arc<dyn Device> = store(&core, &bytes, ROOM).await;
        (device.clone(), Image::open(device).await)
    });
    let (device, Ok(image)) = opened.expect("the core runs") else { return };
    let backing = image.header.backing_file.is_some().then(|| disk(OTHER_BYTES) as Arc<dyn Device>);
    let can_write = !image.header.has_data_file() && !image.header.has_extended_l2();
    let live =
        match LiveImage::open_on(home.clone(), image, Others { backing, data_file: None }, 1 << 13, None) {
            Ok(live) => Arc::new(live),
            Err(error) => return assert!(!(is_intact && can_write), "an intact disk is opened: {error}"),
        };
    let written = live.clone();
    let done = core.block_on(move |core| async move { change(&core, &written, expected, seed).await });
    done.expect("the core runs");
    drop(live);
    let checked = core.block_on(move |_| async move { qcow2::check(&*device).await });
    let report = checked.expect("the core runs");
    if is_intact {
        assert_eq!(
            report.expect("an image is checked").messages,
            [""; 0],
            "an image that was closed is clean"
        );
    }
}

/// Makes random requests that change a disk, and reads it.
async fn change(core: &Core, disk: &LiveImage, expected: Option<Base>, seed: u64) {
    let channel = disk.open_channel().expect("a channel");
    let blocks = disk.limits().capacity.min(MOST_READ) / 512;
    let mut rng = ::base::Rng::new(seed);
    let mut wanted: Option<Vec<u8>> =
        expected.map(|base| (0..blocks * 512).map(|at| base.byte(at)).collect());
    for _ in 0..WRITES {
        let at = rng.below(blocks) * 512;
        let len = 512 * (1 + rng.below((MOST_WRITTEN / 512).min(blocks - at / 512)));
        let byte = rng.draw() as u8;
        let result = match rng.below(4) {
            0 if disk.limits().max_write_zeroes > 0 => {
                let result = channel.submit(&Request::write_zeroes(len, Flags::NONE), at).await;
                fill(&mut wanted, at, len, 0);
                result
            }
            1 => channel.submit(&Request::flush(), 0).await,
            _ => {
                let mut buffer = core.buffers().take(len as usize).await;
                buffer.as_mut_slice().fill(byte);
                let flags = if byte & 1 == 0 { Flags::FUA } else { Flags::NONE };
                fill(&mut wanted, at, len, byte);
                buffer.transfer(&*channel, Op::Write, flags, at).await.1
            }
        };
        assert!(wanted.is_none() || result.is_ok(), "a request to an intact disk: {result:?}");
    }
    for at in (0..blocks * 512).step_by(PART as usize) {
        let buffer = core.buffers().take(PART.min(blocks * 512 - at) as usize).await;
        let (buffer, result) = buffer.transfer(&*channel, Op::Read, Flags::NONE, at).await;
        let Some(wanted) = &wanted else { continue };
        let wanted = &wanted[at as usize..][..buffer.as_slice().len()];
        assert!(result == Ok(()) && buffer.as_slice() == wanted, "a disk has the data that was written");
    }
    let _ = channel.submit(&Request::discard(blocks * 512), 0).await;
}

fn fill(bytes: &mut Option<Vec<u8>>, at: u64, len: u64, byte: u8) {
    bytes.iter_mut().for_each(|bytes| bytes[at as usize..][..len as usize].fill(byte));
}

/// Changes a number of the metadata, or the length of the file.
fn edit(image: &mut Vec<u8>, base: &Base, input: &mut Input<'_>) {
    let (part, width) = (input.u8(), input.one_of(&[1, 4, 8]));
    if part == 255 {
        let len = 512 * (1 + usize::from(input.u16()) % (MOST_READ as usize / 512));
        return image.resize(len, 0);
    }
    let start = base.parts[usize::from(part) % base.parts.len()];
    let at = start + usize::from(input.u8()) * width;
    // Small numbers, clusters and single bits find more than random numbers.
    let value = match input.u8() % 4 {
        0 => u64::from(input.u8()),
        1 => u64::from(input.u8()) << base.cluster_bits | u64::from(input.u8() & 1) << 63,
        2 => 1 << (input.u8() % 64),
        _ => input.u64(),
    };
    if let Some(field) = image.get_mut(at..at + width) {
        field.copy_from_slice(&value.to_be_bytes()[8 - width..]);
    }
}

fn disk(size: u64) -> Arc<MemDevice> {
    Arc::new(MemDevice::new(&Options::new(size)).expect("a disk in memory"))
}

/// A disk in memory with these bytes, and `room` more.
async fn store(core: &Core, bytes: &[u8], room: u64) -> Arc<MemDevice> {
    let device = disk(bytes.len().next_multiple_of(512) as u64 + room);
    let channel = device.open_channel().expect("a channel");
    for (number, part) in bytes.chunks(PART as usize).enumerate() {
        let mut buffer = core.buffers().take(part.len().next_multiple_of(512)).await;
        buffer.as_mut_slice().fill(0);
        buffer.as_mut_slice()[..part.len()].copy_from_slice(part);
        let at = number as u64 * PART;
        buffer.transfer(&*channel, Op::Write, Flags::NONE, at).await.1.expect("a write to memory");
    }
    device
}

async fn use_image(core: &Core, bytes: Vec<u8>, base: &Base, is_intact: bool) {
    let device = store(core, &bytes, 0).await;
    let report = qcow2::check(&*device).await;
    if is_intact {
        let report = report.expect("an intact image is checked");
        assert_eq!(report.messages, [""; 0], "an intact image is clean");
    }
    let Ok(image) = Image::open(device.clone()).await else {
        assert!(!is_intact, "an intact image is opened");
        return;
    };
    let _ = image.bitmaps().await;
    let ids: Vec<String> = image.snapshots.iter().take(MOST_SNAPSHOTS).map(|s| s.id.clone()).collect();
    read(core, image, is_intact.then_some(base)).await;
    for id in ids {
        let image = Image::open(device.clone()).await.expect("the image was opened before");
        match image.at_snapshot(&id).await {
            Ok(image) => read(core, image, is_intact.then_some(base)).await,
            Err(error) => assert!(!is_intact, "{error}"),
        }
    }
}

/// Reads the map, the block status and the data of an image. `expected` is what was built.
async fn read(core: &Core, image: Image, expected: Option<&Base>) {
    if let Ok(map) = Map::open(&image) {
        let mut at = 0;
        for _ in 0..MOST_RUNS {
            let Ok(run) = map.run(at, map.size().saturating_sub(at)).await else { break };
            assert!(run.len > 0 && run.len <= map.size() - at, "a run of {} bytes at {at}", run.len);
            at += run.len;
        }
    }
    let backing = image.header.backing_file.is_some().then(|| disk(OTHER_BYTES) as Arc<dyn Device>);
    let data_file = image.header.has_data_file().then(|| disk(OTHER_BYTES) as Arc<dyn Device>);
    let Ok(disk) = Qcow2::new(image, Others { backing, data_file }, 1 << 16) else {
        assert!(expected.is_none(), "an intact disk is opened");
        return;
    };
    let channel = disk.open_channel().expect("a channel");
    let end = disk.limits().capacity.min(MOST_READ);
    let report = StatusReport::new();
    let status = channel.block_status(&report, 0, disk.limits().capacity).await;
    assert!(report.covered() <= disk.limits().capacity, "status {status:?}");
    for at in (0..end).step_by(PART as usize) {
        let buffer = core.buffers().take(PART.min(end - at) as usize).await;
        let (buffer, result): (_, IoResult) = buffer.transfer(&*channel, Op::Read, Flags::NONE, at).await;
        let Some(base) = expected else { continue };
        assert_eq!(result, Ok(()), "an intact disk is read");
        let wanted: Vec<u8> = (at..at + buffer.as_slice().len() as u64).map(|at| base.byte(at)).collect();
        assert!(buffer.as_slice() == wanted, "an intact disk has its data");
    }
}
