//! An image as a read-only device.
//!
//! ```text
//!   request ─► runs of the disk ─┬─ data        ─► the same window to the file, or the data file
//!                                ├─ zeroes      ─► the window is filled
//!                                ├─ unallocated ─► the same window to the backing device, or zeroes
//!                                └─ compressed  ─► a cluster in this core's cache is copied
//! ```
//!
//! A request inside one run of data costs no future of its own: the child's is returned.

use crate::cache::{Budget, Cache};
use crate::compress::decompress;
use crate::entry::{Compressed, Place, SUBCLUSTERS};
use crate::error::{Error, Problem};
use crate::header::Compression;
use crate::image::Image;
use crate::lookup::{Lookup, Run, Tables};
use crate::reader::Reader;
use block::{
    Channel, Device, DeviceError, IoError, IoFuture, IoResult, KernelBacking, Limits, MAX_JOINED,
    MemoryRegion, Op, Request, Status, StatusReport, join_all,
};
use std::rc::Rc;
use std::sync::Arc;

/// Bytes of L2 tables that all cores cache together, if the user does not choose: enough for
/// 256 GiB with clusters of 64 KiB.
pub const DEFAULT_CACHE_BYTES: u64 = 32 << 20;
/// Limit of decompressed clusters that a core keeps: so many, and so many bytes.
const CLUSTERS: usize = 64;
const CLUSTER_BYTES: u64 = 4 << 20;

/// Runs that one answer of block status looks at, so that the core serves others.
const STATUS_RUNS: usize = 1024;

/// Devices that an image needs in addition to its own file.
#[derive(Clone, Default)]
pub struct Others {
    /// Serves clusters that the image does not have.
    pub backing: Option<Arc<dyn Device>>,
    /// The external data file.
    pub data_file: Option<Arc<dyn Device>>,
}

/// A qcow2 image as a read-only device.
pub struct Qcow2 {
    name: String,
    shared: Arc<Shared>,
}

struct Shared {
    limits: Limits,
    tables: Tables,
    compression: Compression,
    image: Arc<dyn Device>,
    others: Others,
}

impl Qcow2 {
    /// The disk of `image`. All cores together cache `cache_bytes` of its tables.
    ///
    /// # Errors
    /// When `others` lacks a device that the image names, or has one that it does not name, or the
    /// devices have larger blocks than the image has clusters.
    pub fn new(image: Image, others: Others, cache_bytes: u64) -> Result<Qcow2, Error> {
        let fail = |text: String| Error::new(&image.name, Problem::Refused(text));
        check_others(&image, &others).map_err(fail)?;
        let limits = limits(&image, &others).map_err(fail)?;
        let name = format!("qcow2({})", image.name);
        let tables = Tables::new(&image, cache_bytes);
        let Image { device, header, .. } = image;
        let compression = header.compression;
        Ok(Qcow2 { name, shared: Arc::new(Shared { limits, tables, compression, image: device, others }) })
    }
}

/// A device that is missing would read as zeroes, and one too many would be ignored.
fn check_others(image: &Image, others: &Others) -> Result<(), String> {
    let header = &image.header;
    match (&header.backing_file, &others.backing) {
        (Some(name), None) => return Err(format!("the backing file {name:?} is not open")),
        (None, Some(device)) => {
            return Err(format!("no backing file is named: {} is unused", device.name()));
        }
        _ => {}
    }
    match (header.has_data_file(), &others.data_file) {
        (true, None) => {
            let name = header.data_file.as_deref().unwrap_or_default();
            Err(format!("the data file {name:?} is not open"))
        }
        (false, Some(device)) => Err(format!("no external data file is named: {} is unused", device.name())),
        _ => Ok(()),
    }
}

fn limits(image: &Image, others: &Others) -> Result<Limits, String> {
    let mut limits = image.device.limits();
    for other in [&others.backing, &others.data_file].into_iter().flatten() {
        let other = other.limits();
        limits.block_size = limits.block_size.max(other.block_size);
        limits.physical_block_size = limits.physical_block_size.max(other.physical_block_size);
        limits.memory_alignment = limits.memory_alignment.max(other.memory_alignment);
        limits.max_transfer = limits.max_transfer.min(other.max_transfer);
        limits.max_segments = limits.max_segments.min(other.max_segments);
        limits.rotational |= other.rotational;
    }
    let block_size = u64::from(limits.block_size);
    let parts = if image.header.has_extended_l2() { SUBCLUSTERS } else { 1 };
    let unit = image.header.cluster_size() / parts;
    if unit < block_size {
        return Err(format!(
            "clusters or subclusters of {unit} bytes are smaller than the blocks of {block_size} bytes below"
        ));
    }
    limits.capacity = image.size & !(block_size - 1);
    if limits.capacity == 0 {
        return Err(format!("size {}: less than a block of {block_size} bytes", image.size));
    }
    limits.max_transfer &= !(limits.block_size - 1);
    (limits.max_discard, limits.max_write_zeroes) = (0, 0);
    (limits.read_only, limits.volatile_cache) = (true, false);
    Ok(limits)
}

impl Shared {
    /// Calls `each` with every device below.
    fn children(&self) -> impl Iterator<Item = &Arc<dyn Device>> {
        [Some(&self.image), self.others.data_file.as_ref(), self.others.backing.as_ref()]
            .into_iter()
            .flatten()
    }
}

impl Device for Qcow2 {
    fn name(&self) -> &str {
        &self.name
    }

    fn limits(&self) -> Limits {
        self.shared.limits.clone()
    }

    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        let shared = self.shared.clone();
        let open = |device: &Arc<dyn Device>| -> Result<Child, DeviceError> {
            let Limits { capacity, block_size, .. } = device.limits();
            Ok(Child { channel: device.open_channel()?, capacity, block_size })
        };
        let image = open(&shared.image)?;
        let reader = Reader::new(&*shared.image, image.channel.clone());
        let data = shared.others.data_file.as_ref().map(open).transpose()?.unwrap_or(image);
        let backing = shared.others.backing.as_ref().map(open).transpose()?;
        let lookup = Lookup::new(&shared.tables);
        let most = CLUSTERS.min((CLUSTER_BYTES >> shared.tables.geometry.cluster_bits) as usize);
        let clusters = Cache::new(Budget::new(CLUSTER_BYTES), most);
        Ok(Rc::new(Qcow2Channel { shared, reader, data, backing, lookup, clusters }))
    }

    /// The size of the disk is in the image, which does not change.
    fn refresh(&self) -> Result<Limits, DeviceError> {
        Ok(self.limits())
    }

    fn map_region(&self, region: &MemoryRegion) -> Result<(), DeviceError> {
        let mut mapped = Vec::new();
        for child in self.shared.children() {
            if let Err(error) = child.map_region(region) {
                mapped.iter().for_each(|child: &&Arc<dyn Device>| child.unmap_region(region));
                return Err(error);
            }
            mapped.push(child);
        }
        Ok(())
    }

    fn unmap_region(&self, region: &MemoryRegion) {
        self.shared.children().for_each(|child| child.unmap_region(region));
    }

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        Err(DeviceError::not_in_kernel(&self.name))
    }
}

struct Child {
    channel: Rc<dyn Channel>,
    /// Bytes of the device.
    capacity: u64,
    /// Bytes of a block.
    block_size: u32,
}

struct Qcow2Channel {
    shared: Arc<Shared>,
    reader: Reader,
    /// The device with the data: the image's own or the external data file.
    data: Child,
    backing: Option<Child>,
    lookup: Lookup,
    clusters: Cache,
}

/// The part of a request that a child serves.
#[derive(Clone, Copy)]
struct Part<'a> {
    child: &'a Child,
    at: u64,
    req: Request<'a>,
}

impl Qcow2Channel {
    /// Starts the part of a request in one run of data or unallocated clusters, or fills it with
    /// zeroes.
    fn part<'a>(&'a self, place: Place, offset: u64, req: Request<'a>) -> Result<Option<Part<'a>>, IoError> {
        let (child, at) = match (place, &self.backing) {
            (Place::Data(at), _) => {
                // The file may end inside its last cluster. One behind it is missing: it was cut.
                let end = self.data.capacity.next_multiple_of(self.shared.tables.geometry.cluster_size());
                if at.checked_add(req.len).is_none_or(|last| last > end) {
                    return Err(IoError::Corrupt);
                }
                (&self.data, at)
            }
            (Place::Unallocated, Some(backing)) => (backing, offset),
            _ => {
                req.data.fill(0);
                return Ok(None);
            }
        };
        let inside = child.capacity.saturating_sub(at).min(req.len);
        req.data.part(inside as usize, (req.len - inside) as usize).fill(0);
        Ok((inside > 0).then(|| Part { child, at, req: req.part(0, inside) }))
    }

    async fn serve<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoResult {
        let mut done = 0;
        while done < req.len {
            let mut parts = [None; MAX_JOINED];
            let mut count = 0;
            while count < MAX_JOINED && done < req.len {
                let at = offset + done;
                let run = self.lookup.run(&self.shared.tables, &self.reader, at, req.len - done).await?;
                match run.place {
                    Place::Compressed(data) => {
                        let cluster = self.decompressed(data).await?;
                        let within = at % self.shared.tables.geometry.cluster_size();
                        let window = req.data.part(done as usize, run.len as usize);
                        window.copy_from(&cluster[within as usize..]);
                    }
                    place => {
                        parts[count] = self.part(place, at, req.part(done, run.len))?;
                        count += usize::from(parts[count].is_some());
                    }
                }
                done += run.len;
            }
            join_all(parts.iter().flatten().map(|part| part.child.channel.submit(&part.req, part.at)))
                .await?;
        }
        Ok(())
    }

    async fn status(&self, report: &StatusReport, offset: u64, len: u64) -> IoResult {
        let mut done = 0;
        for _ in 0..STATUS_RUNS {
            if done == len {
                break;
            }
            let at = offset + done;
            let run = self.lookup.run(&self.shared.tables, &self.reader, at, len - done).await?;
            let status = match (run.place, &self.backing) {
                (Place::Data(_) | Place::Compressed(_), _) => Status::DATA,
                (Place::Zero(Some(_)), _) => Status::ZERO,
                (Place::Unallocated, Some(backing)) if at < backing.capacity => {
                    let covered = self.status_of_backing(backing, report, at, run.len).await?;
                    if covered == 0 {
                        break;
                    }
                    done += covered;
                    continue;
                }
                _ => Status::ZERO_HOLE,
            };
            if !report.push(run.len, status) {
                break;
            }
            done += run.len;
        }
        Ok(())
    }

    /// Appends the status of the first of `len` bytes of the backing device. Returns how many, and
    /// 0 when the report is full.
    async fn status_of_backing(
        &self,
        backing: &Child,
        report: &StatusReport,
        at: u64,
        len: u64,
    ) -> Result<u64, IoError> {
        let before = report.covered();
        // Extents of smaller blocks would not be multiples of this device's.
        if backing.block_size < self.shared.limits.block_size {
            report.push(len, Status::DATA);
        } else if report.len() < StatusReport::MAX_EXTENTS {
            let inside = len.min(backing.capacity - at);
            backing.channel.block_status(report, at, inside).await?;
        }
        Ok(report.covered() - before)
    }

    /// The content of a compressed cluster.
    async fn decompressed(&self, data: Compressed) -> Result<Rc<[u8]>, IoError> {
        if let Some(cluster) = self.clusters.get(data.offset) {
            return Ok(cluster);
        }
        let load = async {
            // The last sector may reach over the end of the file, but no compressed byte does.
            let inside = self.reader.capacity.saturating_sub(data.offset).min(data.len);
            let bytes = self.reader.read(data.offset.min(self.reader.capacity), inside).await?;
            let len = self.shared.tables.geometry.cluster_size() as usize;
            decompress(self.shared.compression, &bytes, len).await.map(Rc::from)
        };
        self.clusters.get_or_load(data.offset, load).await
    }
}

impl Channel for Qcow2Channel {
    #[inline]
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        if let Err(error) = self.shared.limits.check(req, offset) {
            return IoFuture::ready(Err(error));
        }
        // Nothing is ever written, so there is nothing to flush.
        if req.op == Op::Flush || req.len == 0 {
            return IoFuture::ready(Ok(()));
        }
        match self.lookup.try_run(&self.shared.tables, offset, req.len) {
            Some(Ok(Run { place: Place::Data(at), len }))
                if len == req.len && at.saturating_add(len) <= self.data.capacity =>
            {
                self.data.channel.submit(req, at)
            }
            Some(Err(error)) => IoFuture::ready(Err(error)),
            _ => IoFuture::new(self.serve(req, offset)),
        }
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        match self.shared.limits.check_range(offset, len) {
            Ok(()) => IoFuture::new(self.status(report, offset, len)),
            Err(error) => IoFuture::ready(Err(error)),
        }
    }
}
