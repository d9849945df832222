//! Hostile disk images in the format qcow2: edited metadata, compressed data and lengths.
//!
//! An input takes an image that was built here (`base`), edits it, checks it and reads it: the
//! disk, its internal snapshots, its block status and its map.
//!
//! Nothing may panic, and every step ends. An image that was not edited is clean and has the data
//! that its builder wrote.

mod base;

use crate::input::Input;
use base::Base;
use block::{Device, Flags, IoResult, Op, StatusReport};
use drivers::mem::{MemDevice, Options};
use qcow2::{Image, Map, Others, Qcow2};
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

/// The core that reads every image.
fn core() -> CoreRef {
    static CORES: OnceLock<Cores> = OnceLock::new();
    CORES.get_or_init(|| Cores::start(&[CoreConfig::default()]).expect("a core")).get(0)
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
    let done = core().block_on(move |core| async move { use_image(&core, image, &base, is_intact).await });
    done.expect("the core runs");
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

async fn use_image(core: &Core, bytes: Vec<u8>, base: &Base, is_intact: bool) {
    let device = disk(bytes.len().next_multiple_of(512) as u64);
    let channel = device.open_channel().expect("a channel");
    for (number, part) in bytes.chunks(PART as usize).enumerate() {
        let mut buffer = core.buffers().take(part.len().next_multiple_of(512)).await;
        buffer.as_mut_slice().fill(0);
        buffer.as_mut_slice()[..part.len()].copy_from_slice(part);
        let at = number as u64 * PART;
        buffer.transfer(&*channel, Op::Write, Flags::NONE, at).await.1.expect("a write to memory");
    }
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
