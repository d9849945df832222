//! Moves what an image has to its backing file.
//!
//! ```text
//!   backing file grows ─► data and zeroes are copied ─► flush ─► L1 entries become 0 ─► clusters are freed
//! ```
//!
//! Until the flush, the image has everything that changes in the backing file, and hides it. After
//! the flush, the backing file has everything that the image has. So the disk has the same bytes at
//! each moment, also if a crash leaves a part of the L1 entries.

use super::Offline;
use super::disk::Disk;
use super::repair::{Level, repair_image};
use super::resize::resize;
use crate::below::Others;
use crate::check::Check;
use crate::device::{DEFAULT_CACHE_BYTES, Qcow2};
use crate::entry::Place;
use crate::error::{Error, Problem};
use crate::image::Image;
use crate::live::LiveImage;
use crate::map::Map;
use block::Device;
use std::sync::Arc;

/// Most bytes that are copied at a time.
const PART: u64 = 2 << 20;

/// A backing file that is written.
#[derive(Clone)]
pub enum Target {
    /// The bytes of the disk.
    Raw(Arc<dyn Device>),
    /// A qcow2 image.
    Qcow2 {
        /// The file.
        file: Arc<dyn Device>,
        /// The disk of its own backing file, if it has one.
        backing: Option<Arc<dyn Device>>,
    },
}

/// Writes everything that the image on `device` has to its backing file, which grows if it is
/// smaller, and makes that durable. The image is then empty, unless `is_kept`. Runs cores, and must
/// not be called on one.
///
/// # Errors
/// When an image has errors, or a property that does not allow this; the devices'. The disk has its
/// bytes in any case.
pub fn commit(device: &Arc<dyn Device>, target: Target, is_kept: bool) -> Result<(), Error> {
    let failed = |problem| Error::new(device.name(), problem);
    let (prepared, checked) = (device.clone(), target.clone());
    let size = reactor::run(async move { prepare(&prepared, &checked).await })?;
    target.grow(size)?;
    let disk = target.open()?;
    let (source, used) = (device.clone(), disk.clone());
    reactor::run(async move { copy(source, used).await }).map_err(failed)?;
    // A disk of an image waits for a thread, and must not end on a core.
    drop(disk);
    if is_kept {
        return Ok(());
    }
    let device_to_end = device.clone();
    reactor::run(async move { empty(&device_to_end).await }).map_err(failed)
}

impl Target {
    fn device(&self) -> &Arc<dyn Device> {
        match self {
            Target::Raw(device) | Target::Qcow2 { file: device, .. } => device,
        }
    }

    /// Checks a backing file that is an image, and frees its leaks.
    async fn check(&self) -> Result<(), Problem> {
        match self {
            Target::Raw(device) if device.limits().read_only => {
                Err(Problem::Refused("the file is open for reading only".into()))
            }
            Target::Raw(_) => Ok(()),
            Target::Qcow2 { file, .. } => {
                Offline::open(file).await?.check_plain("committed to")?;
                Offline::open_clean(file).await.map(drop)
            }
        }
    }

    /// Lets the disk have at least `size` bytes. Runs cores, and must not be called on one.
    ///
    /// # Errors
    /// When an image has a property that does not allow this; the devices'.
    pub fn grow(&self, size: u64) -> Result<(), Error> {
        match self {
            Target::Raw(device) if device.limits().capacity < size => {
                let bytes = device.limits().capacity;
                let refused = |error| Problem::Refused(format!("{bytes} bytes, not {size}: {error}"));
                let grown = device.resize(size).map(drop);
                grown.map_err(|error| Error::new(device.name(), refused(error)))
            }
            Target::Raw(_) => Ok(()),
            Target::Qcow2 { file, backing } => {
                let opened = file.clone();
                let header = reactor::run(async move { Image::open_header(&*opened).await })?;
                match header.size < size {
                    true => resize(file, backing.clone(), size, false),
                    false => Ok(()),
                }
            }
        }
    }

    /// The disk.
    fn open(self) -> Result<Arc<dyn Device>, Error> {
        let (file, backing) = match self {
            Target::Raw(device) => return Ok(device),
            Target::Qcow2 { file, backing } => (file, backing),
        };
        let image = reactor::run(async move { Image::open(file).await })?;
        let others = Others { backing, data_file: None };
        Ok(Arc::new(LiveImage::open(image, others, DEFAULT_CACHE_BYTES, None)?))
    }
}

/// Checks both files. Returns the size of the disk in bytes.
async fn prepare(device: &Arc<dyn Device>, target: &Target) -> Result<u64, Error> {
    let failed = |problem| Error::new(device.name(), problem);
    let image = Offline::open(device).await.map_err(failed)?;
    image.check_overlay("committed").map_err(failed)?;
    let none = "cannot be committed: the image has no backing file";
    image.header.backing_file.as_ref().ok_or_else(|| failed(Problem::Refused(none.into())))?;
    target.check().await.map_err(|problem| Error::new(target.device().name(), problem))?;
    Offline::open_clean(device).await.map_err(failed)?;
    Ok(image.header.size)
}

/// Writes the data and zeroes of the image on `device` to the disk `target`.
async fn copy(device: Arc<dyn Device>, target: Arc<dyn Device>) -> Result<(), Problem> {
    let mut image = Image::open(device.clone()).await.map_err(|error| error.problem)?;
    let map = Map::open(&image).map_err(|error| error.problem)?;
    // No byte is read that only the backing file has.
    image.header.backing_file = None;
    let source = Qcow2::new(image, Others::default(), DEFAULT_CACHE_BYTES).map_err(|error| error.problem)?;
    let (source, target) = (Disk::open(&source)?, Disk::open(&*target)?);
    let failed = |offset| move |error| Problem::Write { part: "the backing file", offset, error };
    let mut at = 0;
    while at < map.size() {
        let run = map.run(at, map.size() - at).await;
        let run = run.map_err(|error| Problem::Io { part: "the map of the disk", offset: at, error })?;
        let end = at + run.len;
        match run.place {
            Place::Unallocated => {}
            Place::Zero(_) => target.write_zeroes(at..end).await.map_err(failed(at))?,
            Place::Data(_) | Place::Compressed(_) => {
                for at in (at..end).step_by(PART as usize) {
                    let bytes = source.read(at, (end - at).min(PART)).await;
                    let bytes = bytes.map_err(|error| Problem::Io { part: "the disk", offset: at, error })?;
                    target.write(at, &bytes).await.map_err(failed(at))?;
                }
            }
        }
        at = end;
    }
    target.flush().await.map_err(failed(0))
}

/// Lets the image have no cluster of its disk.
async fn empty(device: &Arc<dyn Device>) -> Result<(), Problem> {
    let mut image = Offline::open(device).await?;
    image.begin().await?;
    let (offset, entries) = (image.header.l1_offset, image.header.l1_entries);
    image.write("the L1 table", offset, &vec![0; entries as usize * 8]).await?;
    image.flush().await?;
    let found = repair_image(&mut image, Level::All).await?.1;
    image.cut_end(&found.report);
    discard_free(device, &found).await
}

/// Gives back the room of clusters that are not used.
async fn discard_free(device: &Arc<dyn Device>, found: &Check) -> Result<(), Problem> {
    let disk = Disk::open(&**device)?;
    let size = found.geometry.cluster_size();
    let mut free = 0;
    for (used, _) in found.counts.referenced(0..found.report.image_end_offset / size) {
        // Only a loss of room.
        let _ = disk.discard(free * size..used * size).await;
        free = used + 1;
    }
    Ok(())
}
