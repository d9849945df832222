//! The content of a disk: reads and block status, wherever its bytes are.
//!
//! ```text
//!   request ─► runs of the disk ─┬─ data        ─► the same window to the file, or the data file
//!                                ├─ zeroes      ─► the window is filled
//!                                ├─ unallocated ─► the same window to the backing device, or zeroes
//!                                └─ compressed  ─► a cluster in this core's cache is copied
//! ```

use crate::below::Others;
use crate::cache::{Budget, Cache};
use crate::compress::decompress;
use crate::entry::{Compressed, Geometry, Place};
use crate::header::Compression;
use crate::lookup::Run;
use crate::reader::Reader;
use block::{
    Channel, Device, DeviceError, IoError, IoResult, Limits, MAX_JOINED, Request, Status, StatusReport,
    join_all,
};
use std::rc::Rc;

/// Limit of decompressed clusters that a core keeps: so many, and so many bytes.
const CLUSTERS: usize = 64;
const CLUSTER_BYTES: u64 = 4 << 20;

/// Runs that one answer of block status looks at, so that the core serves others.
const STATUS_RUNS: usize = 1024;

/// Where the bytes of a disk are.
pub(crate) trait Places {
    fn geometry(&self) -> &Geometry;

    /// Bytes of the device with the data.
    fn data_end(&self) -> u64;

    /// Whether bytes without a place are those of the backing device, if there is one.
    fn has_backing(&self) -> bool;

    /// The run at `offset`, at most `len` bytes, if it needs no I/O. The range is on the disk.
    fn try_run(&self, offset: u64, len: u64) -> Option<Result<Run, IoError>>;

    /// The run at `offset`, at most `len` bytes. The range is on the disk.
    ///
    /// # Errors
    /// [`IoError::Corrupt`] when a table is invalid or not in the file, or the device's error.
    async fn run(&self, offset: u64, len: u64) -> Result<Run, IoError>;
}

/// A device below, on one core.
pub(crate) struct Child {
    pub(crate) channel: Rc<dyn Channel>,
    /// Bytes of the device when it was opened.
    capacity: u64,
    /// Bytes of a block.
    block_size: u32,
}

impl Child {
    /// Opens the channel of `device` on the calling core.
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn open(device: &dyn Device) -> Result<Child, DeviceError> {
        let Limits { capacity, block_size, .. } = device.limits();
        Ok(Child { channel: device.open_channel()?, capacity, block_size })
    }
}

/// The content of a disk, on one core.
pub(crate) struct Content<P> {
    pub(crate) places: P,
    limits: Limits,
    compression: Compression,
    reader: Reader,
    /// The device with the data: the image's own or the external data file.
    pub(crate) data: Child,
    backing: Option<Child>,
    clusters: Cache,
}

/// The part of a request that a child serves.
#[derive(Clone, Copy)]
struct Part<'a> {
    child: &'a Child,
    at: u64,
    req: Request<'a>,
}

impl<P: Places> Content<P> {
    /// Opens what is below a disk of these limits, on the calling core. `places` makes the places
    /// from a reader of the image.
    ///
    /// # Errors
    /// When a channel is refused.
    pub(crate) fn open(
        limits: Limits,
        compression: Compression,
        image: &dyn Device,
        others: &Others,
        places: impl FnOnce(&Reader) -> P,
    ) -> Result<Content<P>, DeviceError> {
        let file = Child::open(image)?;
        let reader = Reader::new(image, file.channel.clone());
        let places = places(&reader);
        let data = others.data_file.as_deref().map(Child::open).transpose()?.unwrap_or(file);
        let backing = others.backing.as_deref().map(Child::open).transpose()?;
        let most = CLUSTERS.min((CLUSTER_BYTES >> places.geometry().cluster_bits) as usize);
        let clusters = Cache::new(Budget::new(CLUSTER_BYTES), most);
        Ok(Content { places, limits, compression, reader, data, backing, clusters })
    }

    /// The limits of the disk.
    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    fn backing(&self) -> Option<&Child> {
        self.backing.as_ref().filter(|_| self.places.has_backing())
    }

    /// The byte of the data's device for a request that is in this run of data as a whole.
    #[inline]
    pub(crate) fn in_place(&self, run: Run, req: &Request<'_>) -> Option<u64> {
        let Place::Data(at) = run.place else { return None };
        let is_inside = run.len == req.len && at.saturating_add(run.len) <= self.places.data_end();
        is_inside.then_some(at)
    }

    /// Whether the disk reads as zeroes from byte `at` on, which has this place, up to the end of
    /// its run.
    pub(crate) fn is_zero(&self, place: Place, at: u64) -> bool {
        match (place, self.backing()) {
            (Place::Zero(_), _) | (Place::Unallocated, None) => true,
            (Place::Unallocated, Some(backing)) => at >= backing.capacity,
            (Place::Data(_) | Place::Compressed(_), _) => false,
        }
    }

    /// Starts the part of a request in one run of data or unallocated clusters, or fills it with
    /// zeroes.
    fn part<'a>(&'a self, place: Place, offset: u64, req: Request<'a>) -> Result<Option<Part<'a>>, IoError> {
        let (child, at, end) = match (place, self.backing()) {
            (Place::Data(at), _) => {
                // The file may end inside its last cluster. One behind it is missing: it was cut.
                let end = self.places.data_end().next_multiple_of(self.places.geometry().cluster_size());
                if at.checked_add(req.len).is_none_or(|last| last > end) {
                    return Err(IoError::Corrupt);
                }
                (&self.data, at, self.places.data_end())
            }
            (Place::Unallocated, Some(backing)) => (backing, offset, backing.capacity),
            _ => {
                req.data.fill(0);
                return Ok(None);
            }
        };
        let inside = end.saturating_sub(at).min(req.len);
        req.data.part(inside as usize, (req.len - inside) as usize).fill(0);
        Ok((inside > 0).then(|| Part { child, at, req: req.part(0, inside) }))
    }

    /// Reads any range of the disk.
    pub(crate) async fn serve<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoResult {
        let mut done = 0;
        while done < req.len {
            let mut parts = [None; MAX_JOINED];
            let mut count = 0;
            while count < MAX_JOINED && done < req.len {
                let at = offset + done;
                let run = self.places.run(at, req.len - done).await?;
                match run.place {
                    Place::Compressed(data) => {
                        let cluster = self.decompressed(data).await?;
                        let within = at % self.places.geometry().cluster_size();
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

    /// Appends the status of the first of `len` bytes.
    pub(crate) async fn status(&self, report: &StatusReport, offset: u64, len: u64) -> IoResult {
        let mut done = 0;
        for _ in 0..STATUS_RUNS {
            if done == len {
                break;
            }
            let at = offset + done;
            let run = self.places.run(at, len - done).await?;
            let status = match (run.place, self.backing()) {
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
        if backing.block_size < self.limits.block_size {
            report.push(len, Status::DATA);
        } else if report.len() < StatusReport::MAX_EXTENTS {
            let inside = len.min(backing.capacity - at);
            backing.channel.block_status(report, at, inside).await?;
        }
        Ok(report.covered() - before)
    }

    /// The content of a compressed cluster.
    pub(crate) async fn decompressed(&self, data: Compressed) -> Result<Rc<[u8]>, IoError> {
        if let Some(cluster) = self.clusters.get(data.offset) {
            return Ok(cluster);
        }
        let load = async {
            // The last sector may reach over the end of the file, but no compressed byte does.
            let inside = self.reader.capacity().saturating_sub(data.offset).min(data.len);
            let bytes = self.reader.read(data.offset.min(self.reader.capacity()), inside).await?;
            let len = self.places.geometry().cluster_size() as usize;
            decompress(self.compression, &bytes, len).await.map(Rc::from)
        };
        self.clusters.get_or_load(data.offset, load).await
    }
}
