//! Another backing file, over which the disk has the same bytes as before.
//!
//! ```text
//!   old and new backing file are compared ─► clusters that differ are written ─► header: new name
//! ```
//!
//! The image gets the old content of each cluster, or subcluster, that it does not have and that
//! differs. A crash before the write of the header leaves the old name, under which these clusters
//! read the same.

use super::backing::Backing;
use super::disk::Disk;
use super::{Offline, add};
use crate::below::Others;
use crate::device::DEFAULT_CACHE_BYTES;
use crate::entry::Place;
use crate::error::{Error, Problem};
use crate::image::Image;
use crate::live::LiveImage;
use crate::map::Map;
use block::Device;
use std::ops::Range;
use std::sync::Arc;

/// Bytes that are compared at a time: a whole number of clusters of every size.
const PART: u64 = 2 << 20;

/// Lets the image on `device` have another backing file, or none. `old` and `new` are the disks of
/// the backing files, as far as there are any. Runs cores, and must not be called on one.
///
/// # Errors
/// When the image has errors, a property that does not allow this, or no room for the name; the
/// devices'. The image then has its old backing file, and the disk has its bytes in any case.
pub fn rebase(
    device: &Arc<dyn Device>,
    old: Option<Arc<dyn Device>>,
    new: Option<(Backing, Arc<dyn Device>)>,
) -> Result<(), Error> {
    let failed = |problem| Error::new(device.name(), problem);
    let (backing, new) = new.unzip();
    let run = prepare(device.clone(), old.clone(), new, backing.clone());
    let ranges = reactor::run(run).map_err(failed)?;
    if !ranges.is_empty() {
        write(device, old, ranges)?;
    }
    let device_to_end = device.clone();
    let finish = async move { Offline::open(&device_to_end).await?.set_backing(backing.as_ref()).await };
    reactor::run(finish).map_err(failed)
}

/// Checks everything. Returns the parts of the disk that the image must get.
async fn prepare(
    device: Arc<dyn Device>,
    old: Option<Arc<dyn Device>>,
    new: Option<Arc<dyn Device>>,
    backing: Option<Backing>,
) -> Result<Vec<Range<u64>>, Problem> {
    let image = Offline::open(&device).await?;
    image.check_overlay("rebased")?;
    image.check_backing(backing.as_ref()).await?;
    match (&image.header.backing_file, &old) {
        (Some(name), None) => return Err(Problem::Refused(format!("the backing file {name:?} is not open"))),
        (None, Some(other)) => {
            return Err(Problem::Refused(format!("no backing file is named: {} is unused", other.name())));
        }
        _ => {}
    }
    Offline::open_clean(&device).await?;
    different(device, old, new).await
}

/// The parts of the disk that the image does not have, and that differ in the two backing files.
async fn different(
    device: Arc<dyn Device>,
    old: Option<Arc<dyn Device>>,
    new: Option<Arc<dyn Device>>,
) -> Result<Vec<Range<u64>>, Problem> {
    let open = |disk: Option<Arc<dyn Device>>| disk.map(|disk| Disk::open(&*disk)).transpose();
    let (old, new) = (open(old)?, open(new)?);
    let image = Image::open(device).await.map_err(|error| error.problem)?;
    let unit = image.geometry().unit();
    let map = Map::open(&image).map_err(|error| error.problem)?;
    let (mut ranges, mut at) = (Vec::new(), 0);
    while at < map.size() {
        let run = map.run(at, map.size() - at).await;
        let run = run.map_err(|error| Problem::Io { part: "the map of the disk", offset: at, error })?;
        let end = at + run.len;
        if run.place != Place::Unallocated {
            at = end;
        }
        while at < end {
            let zeroes = zeroes(&old, at, end - at).await.min(zeroes(&new, at, end - at).await);
            if zeroes == end - at || zeroes >= unit {
                at += if zeroes == end - at { zeroes } else { zeroes - zeroes % unit };
                continue;
            }
            let len = (end - at).min(PART);
            let (before, after) = (read(&old, at, len).await?, read(&new, at, len).await?);
            let units = before.chunks(unit as usize).zip(after.chunks(unit as usize));
            for ((before, after), start) in units.zip((at..).step_by(unit as usize)) {
                if before != after {
                    add(&mut ranges, start..start + before.len() as u64);
                }
            }
            at += len;
        }
    }
    Ok(ranges)
}

async fn zeroes(disk: &Option<Disk>, offset: u64, len: u64) -> u64 {
    match disk {
        Some(disk) => disk.zeroes(offset, len).await,
        None => len,
    }
}

async fn read(disk: &Option<Disk>, offset: u64, len: u64) -> Result<Vec<u8>, Problem> {
    let Some(disk) = disk else { return Ok(vec![0; len as usize]) };
    let bytes = disk.read(offset, len).await;
    bytes.map_err(|error| Problem::Io { part: "a backing file", offset, error })
}

/// Writes whole clusters, or subclusters, of the disk `old` to the image, and makes them durable.
fn write(
    device: &Arc<dyn Device>,
    old: Option<Arc<dyn Device>>,
    ranges: Vec<Range<u64>>,
) -> Result<(), Error> {
    let opened = device.clone();
    let image = reactor::run(async move { Image::open(opened).await })?;
    let unit = image.geometry().unit();
    let others = Others { backing: old.clone(), data_file: None };
    let live = Arc::new(LiveImage::open(image, others, DEFAULT_CACHE_BYTES, None)?);
    let used = live.clone();
    let written = reactor::run(async move {
        let disk = Disk::open(&*used)?;
        let old = old.map(|old| Disk::open(&*old)).transpose()?;
        for Range { start, end } in ranges {
            for at in (start..end).step_by(PART as usize) {
                let bytes = read(&old, at, (end - at).min(PART)).await?;
                write_units(&disk, at, &bytes, unit as usize).await?;
            }
        }
        disk.flush().await.map_err(|error| failed(0, error))
    });
    written.map_err(|problem| Error::new(device.name(), problem))
}

/// Writes bytes, and units without data as zeroes.
async fn write_units(disk: &Disk, offset: u64, bytes: &[u8], unit: usize) -> Result<(), Problem> {
    let is_zero = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
    let units: Vec<&[u8]> = bytes.chunks(unit).collect();
    let mut done = 0;
    for run in units.chunk_by(|a, b| is_zero(a) == is_zero(b)) {
        let len = run.iter().map(|unit| unit.len()).sum::<usize>();
        let at = offset + done as u64;
        let written = match is_zero(run[0]) {
            true => disk.write_zeroes(at..at + len as u64).await,
            false => disk.write(at, &bytes[done..done + len]).await,
        };
        written.map_err(|error| failed(at, error))?;
        done += len;
    }
    Ok(())
}

fn failed(offset: u64, error: block::IoError) -> Problem {
    Problem::Write { part: "the disk", offset, error }
}
