//! Moves what an image has to its backing file, or to one further below.
//!
//! ```text
//!   target grows ─► data and zeroes are copied ─► flush ─► L1 entries become 0 ─► clusters are freed
//! ```
//!
//! Until the flush, the image has everything that changes in the target, and hides it. After the
//! flush, the target has everything that the image has. So the disk has the same bytes at each
//! moment, also if a crash leaves a part of the L1 entries.
//!
//! A target further below gets what the image and those between have; of several, the nearest to
//! the image counts. The image then keeps everything: without it, older data of those between would
//! hide the target.

use super::disk::Disk;
use super::repair::{Level, repair_image};
use super::resize::resize;
use super::{Offline, SECTOR};
use crate::below::Others;
use crate::check::Check;
use crate::device::{DEFAULT_CACHE_BYTES, Qcow2};
use crate::entry::Place;
use crate::error::{Error, Problem};
use crate::image::Image;
use crate::live::LiveImage;
use crate::lookup::Run;
use crate::map::Map;
use block::Device;
use std::sync::Arc;

/// Most bytes that are copied at a time.
const PART: u64 = 2 << 20;
const SECOND_NS: u64 = 1_000_000_000;

/// How a commit is made.
#[derive(Default)]
pub struct Options {
    /// The files of the images between the image and the target, the nearest to the image first.
    /// Their own disks have other bytes after the commit.
    pub between: Vec<Arc<dyn Device>>,
    /// Whether the image keeps its content. It does in any case if there are images between.
    pub is_kept: bool,
    /// Most bytes of data that are copied in a second; 0: as many as possible.
    pub bytes_per_second: u64,
    /// Called with the bytes of the disk that are done, and with all.
    pub progress: Option<Box<dyn Fn(u64, u64)>>,
}

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

/// Writes everything that the image on `device` and those between have to `target`, which grows if
/// it is smaller than the disk, and makes that durable. The image is then empty, unless it keeps
/// its content. Runs cores, and must not be called on one.
///
/// # Errors
/// When an image has errors, or a property that does not allow this; the devices'. The disk has its
/// bytes in any case.
pub fn commit(device: &Arc<dyn Device>, target: Target, options: Options) -> Result<(), Error> {
    let failed = |problem| Error::new(device.name(), problem);
    let is_kept = options.is_kept || !options.between.is_empty();
    let (prepared, between, checked) = (device.clone(), options.between.clone(), target.clone());
    let size = reactor::run(async move { prepare(&prepared, &between, &checked).await })?;
    target.grow(size)?;
    let disk = target.open()?;
    let (source, used) = (device.clone(), disk.clone());
    reactor::run(async move { copy(source, used, options).await })?;
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

/// Checks all files. Returns the size of the disk in bytes.
async fn prepare(
    device: &Arc<dyn Device>,
    between: &[Arc<dyn Device>],
    target: &Target,
) -> Result<u64, Error> {
    let failed = |problem| Error::new(device.name(), problem);
    let image = Offline::open(device).await.map_err(failed)?;
    image.check_overlay("committed").map_err(failed)?;
    let none = "cannot be committed: the image has no backing file";
    image.header.backing_file.as_ref().ok_or_else(|| failed(Problem::Refused(none.into())))?;
    for other in between {
        Above::open(other).await?;
    }
    target.check().await.map_err(|problem| Error::new(target.device().name(), problem))?;
    Offline::open_clean(device).await.map_err(failed)?;
    Ok(image.header.size)
}

/// An image above the target, without the disk of its backing file.
struct Above {
    name: String,
    map: Map,
    disk: Disk,
}

/// The bytes that the images above a target have.
enum Found<'l> {
    /// Those of the target.
    None,
    Zeroes,
    /// Those of this image.
    Data(&'l Above),
}

impl Above {
    async fn open(device: &Arc<dyn Device>) -> Result<Above, Error> {
        let name = device.name().to_owned();
        let failed = |problem| Error::new(&name, problem);
        let mut image = Image::open(device.clone()).await?;
        if !image.size.is_multiple_of(SECTOR) {
            let text = format!("cannot be committed: size {}: want a multiple of {SECTOR} bytes", image.size);
            return Err(failed(Problem::Refused(text)));
        }
        let map = Map::open(&image)?;
        // No byte is read that only the backing file has.
        image.header.backing_file = None;
        let disk = Disk::open(&Qcow2::new(image, Others::default(), DEFAULT_CACHE_BYTES)?).map_err(failed)?;
        Ok(Above { name, map, disk })
    }

    /// Reads bytes, which the image has.
    async fn read(&self, at: u64, len: u64) -> Result<Vec<u8>, Error> {
        let bytes = self.disk.read(at, len).await;
        bytes.map_err(|error| Error::new(&self.name, Problem::Io { part: "the disk", offset: at, error }))
    }

    /// The place of the first of `len` bytes, and how many have it.
    async fn run(&self, at: u64, len: u64) -> Result<Run, Error> {
        let run = self.map.run(at, len).await;
        let part = "the map of the disk";
        run.map_err(|error| Error::new(&self.name, Problem::Io { part, offset: at, error }))
    }
}

/// The first of `len` bytes at byte `at` of the disk, as the first of these images has them that
/// has them. Also returns how many.
async fn find(images: &[Above], at: u64, mut len: u64) -> Result<(Found<'_>, u64), Error> {
    for image in images {
        let inside = image.map.size().saturating_sub(at);
        if inside == 0 {
            // The images above a shorter one have zeroes behind its end.
            return Ok((Found::Zeroes, len));
        }
        let run = image.run(at, len.min(inside)).await?;
        len = run.len;
        match run.place {
            Place::Unallocated => {}
            Place::Zero(_) => return Ok((Found::Zeroes, len)),
            Place::Data(_) | Place::Compressed(_) => return Ok((Found::Data(image), len)),
        }
    }
    Ok((Found::None, len))
}

/// Writes the data and zeroes of the image on `device`, and of those between, to the disk `target`.
async fn copy(device: Arc<dyn Device>, target: Arc<dyn Device>, options: Options) -> Result<(), Error> {
    let failed = |problem| Error::new(device.name(), problem);
    let target = Disk::open(&*target).map_err(failed)?;
    let mut images = Vec::new();
    for device in [&device].into_iter().chain(&options.between) {
        images.push(Above::open(device).await?);
    }
    let cannot = |offset| move |error| failed(Problem::Write { part: "the backing file", offset, error });
    let progress = |done, all| options.progress.iter().for_each(|progress| progress(done, all));
    let core = reactor::current();
    let (size, start_ns) = (images[0].map.size(), core.now_ns());
    let (mut at, mut copied) = (0, 0);
    while at < size {
        progress(at, size);
        let (found, mut len) = find(&images, at, size - at).await?;
        match found {
            Found::None => {}
            Found::Zeroes => target.write_zeroes(at..at + len).await.map_err(cannot(at))?,
            Found::Data(image) => {
                len = len.min(PART);
                let bytes = image.read(at, len).await?;
                target.write(at, &bytes).await.map_err(cannot(at))?;
                copied += len;
                let end_ns = start_ns.saturating_add(time_of(copied, options.bytes_per_second));
                core.sleep(end_ns.saturating_sub(core.now_ns())).await;
            }
        }
        at += len;
    }
    target.flush().await.map_err(cannot(0))?;
    progress(size, size);
    Ok(())
}

/// Nanoseconds in which so many bytes may be copied; none without a limit.
fn time_of(bytes: u64, per_second: u64) -> u64 {
    let ns = (u128::from(bytes) * u128::from(SECOND_NS)).checked_div(per_second.into()).unwrap_or(0);
    u64::try_from(ns).unwrap_or(u64::MAX)
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
