//! An image whose metadata was read: header, L1 table, snapshots.

use crate::bitmap::{self, Bitmap};
use crate::bits::{self, Loaded};
use crate::entry::Geometry;
use crate::error::{Error, Problem, invalid};
use crate::header::{Header, be64};
use crate::reader::Reader;
use crate::snapshot::{self, Snapshot, Table};
use block::{Device, DirtyBitmap};
use std::sync::Arc;

/// Bytes at the start of a file that say how long the first cluster is.
const START: u64 = 512;

/// An open image. Its metadata was checked, but for the entries of its tables.
pub struct Image {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) name: String,
    /// The header.
    pub header: Header,
    /// The internal snapshots.
    pub snapshots: Vec<Snapshot>,
    /// Length of their table in bytes.
    pub(crate) snapshot_bytes: u64,
    /// Whether the L1 table is a snapshot's.
    pub(crate) is_snapshot: bool,
    /// The L1 table that is read: the active one, or that of a snapshot.
    pub(crate) l1: Box<[u64]>,
    /// Bitmaps of the disk that were loaded.
    pub(crate) loaded: Vec<Arc<Loaded>>,
    /// Size of the disk in bytes.
    pub size: u64,
}

impl Image {
    /// Reads the metadata of the image on `device`, on the calling core.
    ///
    /// # Errors
    /// When the device has no valid image, or the image has a feature that is not supported.
    pub async fn open(device: Arc<dyn Device>) -> Result<Image, Error> {
        let name = device.name().to_owned();
        let read = async {
            let reader = open_reader(&*device)?;
            let header = read_header(&reader).await?;
            if header.refcount_table_clusters == 0 {
                return Err(invalid("no refcount table"));
            }
            let Table { snapshots, bytes, .. } = snapshot::read(&reader, &header).await?;
            check_inside(&reader, "snapshot table", header.snapshots_offset, bytes)?;
            let l1 = read_l1(&reader, header.l1_offset, header.l1_entries).await?;
            Ok((header, snapshots, bytes, l1))
        };
        match read.await {
            Ok((header, snapshots, snapshot_bytes, l1)) => {
                let size = header.size;
                let (is_snapshot, loaded) = (false, Vec::new());
                Ok(Image { device, name, header, snapshots, snapshot_bytes, is_snapshot, l1, loaded, size })
            }
            Err(problem) => Err(Error::new(&name, problem)),
        }
    }

    /// Reads the header of the image on `device` only, on the calling core.
    ///
    /// # Errors
    /// As [`Image::open`].
    pub async fn open_header(device: &dyn Device) -> Result<Header, Error> {
        let read = async { read_header(&open_reader(device)?).await };
        read.await.map_err(|problem| Error::new(device.name(), problem))
    }

    /// The same image as it was when an internal snapshot was made. `wanted` is an identifier or,
    /// if no snapshot has it, a name.
    ///
    /// # Errors
    /// When there is no such snapshot, or its L1 table is invalid.
    pub async fn at_snapshot(self, wanted: &str) -> Result<Image, Error> {
        let read = async {
            let found = snapshot::find(&self.snapshots, wanted)?;
            let size = found.check(&self.header)?;
            Ok((read_l1(&open_reader(&*self.device)?, found.l1_offset, found.l1_entries).await?, size))
        };
        match read.await {
            Ok((l1, size)) => Ok(Image { l1, size, is_snapshot: true, loaded: Vec::new(), ..self }),
            Err(problem) => Err(Error::new(&self.name, problem)),
        }
    }

    /// The dirty bitmaps that are consistent with the image, read on the calling core.
    ///
    /// # Errors
    /// When their directory is invalid or cannot be read.
    pub async fn bitmaps(&self) -> Result<Vec<Bitmap>, Error> {
        let Some(bitmaps) = self.header.bitmaps else { return Ok(Vec::new()) };
        let read = async { bitmap::read(&open_reader(&*self.device)?, &self.header, bitmaps).await };
        read.await.map_err(|problem| Error::new(&self.name, problem))
    }

    /// Reads the dirty bitmaps on the calling core, so that a disk that is only read has them.
    /// Those that are in use, as after a crash, are left out. A snapshot has none.
    ///
    /// # Errors
    /// When a bitmap is invalid or cannot be read, or they need too much memory: the disk has none.
    pub async fn load_bitmaps(&mut self) -> Result<(), Error> {
        if self.is_snapshot {
            return Ok(());
        }
        let read = async { bits::load(&open_reader(&*self.device)?, &self.header).await };
        self.loaded = read.await.map_err(|problem| Error::new(&self.name, problem))?.loaded;
        Ok(())
    }

    /// The dirty bitmaps that [`Image::load_bitmaps`] has read.
    pub fn loaded_bitmaps(&self) -> impl Iterator<Item = Arc<dyn DirtyBitmap>> {
        self.loaded.iter().map(|bitmap| bitmap.clone() as _)
    }

    /// The properties that decide what entries mean.
    pub fn geometry(&self) -> Geometry {
        Geometry::of(&self.header)
    }

    /// The name of the image's device.
    pub fn name(&self) -> &str {
        &self.name
    }
}

pub(crate) fn open_reader(device: &dyn Device) -> Result<Reader, Problem> {
    Reader::open(device).map_err(|error| Problem::Refused(error.to_string()))
}

pub(crate) async fn read_header(reader: &Reader) -> Result<Header, Problem> {
    let failed = |error| Problem::Io { part: "the header", offset: 0, error };
    let start = reader.read(0, START.min(reader.capacity())).await.map_err(failed)?;
    let len = Header::first_cluster_len(&start)? as u64;
    let cluster = reader.read(0, len.min(reader.capacity())).await.map_err(failed)?;
    Header::parse(&cluster)
}

fn check_inside(reader: &Reader, what: &str, offset: u64, bytes: u64) -> Result<(), Problem> {
    let end = reader.capacity();
    match offset.checked_add(bytes) {
        _ if bytes == 0 => Ok(()),
        Some(last) if last <= end => Ok(()),
        _ => Err(invalid(format!("{what} at byte {offset}, {bytes} bytes: the file ends at byte {end}"))),
    }
}

async fn read_l1(reader: &Reader, offset: u64, entries: u32) -> Result<Box<[u64]>, Problem> {
    let bytes = u64::from(entries) * 8;
    check_inside(reader, "L1 table", offset, bytes)?;
    let table = reader.read(offset, bytes).await;
    let table = table.map_err(|error| Problem::Io { part: "the L1 table", offset, error })?;
    Ok(table.chunks_exact(8).map(|entry| be64(entry, 0)).collect())
}
