//! An image as a read-only device.
//!
//! A request inside one run of data costs no future of its own: the child's is returned.

use crate::below::{Others, check_others, each_mapped, limits};
use crate::bits::Loaded;
use crate::content::{Content, Places};
use crate::entry::Geometry;
use crate::error::{Error, Problem};
use crate::header::Compression;
use crate::image::Image;
use crate::lookup::{Lookup, Run, Tables};
use crate::reader::Reader;
use block::{
    Channel, Device, DeviceError, DirtyBitmap, IoError, IoFuture, KernelBacking, Limits, MemoryRegion, Op,
    Request, StatusReport,
};
use std::rc::Rc;
use std::sync::Arc;

/// Bytes of L2 tables that all cores cache together, if the user does not choose: enough for
/// 256 GiB with clusters of 64 KiB.
pub const DEFAULT_CACHE_BYTES: u64 = 32 << 20;
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
    bitmaps: Vec<Arc<Loaded>>,
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
        let Image { device, header, loaded: bitmaps, .. } = image;
        let compression = header.compression;
        let shared = Shared { limits, tables, compression, image: device, others, bitmaps };
        Ok(Qcow2 { name, shared: Arc::new(shared) })
    }
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
        let Shared { limits, tables, compression, image, others, .. } = &*self.shared;
        let data_end = others.data_file.as_ref().unwrap_or(image).limits().capacity;
        let places = |reader: &Reader| Fixed {
            shared: self.shared.clone(),
            reader: reader.clone(),
            lookup: Lookup::new(tables),
            data_end,
        };
        Ok(Rc::new(Qcow2Channel(Content::open(limits.clone(), *compression, &**image, others, places)?)))
    }

    /// The size of the disk is in the image, which does not change.
    fn refresh(&self) -> Result<Limits, DeviceError> {
        Ok(self.limits())
    }

    fn map_region(&self, region: &MemoryRegion) -> Result<(), DeviceError> {
        each_mapped(self.shared.children(), region)
    }

    fn unmap_region(&self, region: &MemoryRegion) {
        self.shared.children().for_each(|child| child.unmap_region(region));
    }

    fn bitmaps(&self) -> Vec<Arc<dyn DirtyBitmap>> {
        self.shared.bitmaps.iter().map(|bitmap| bitmap.clone() as _).collect()
    }

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        Err(DeviceError::not_in_kernel(&self.name))
    }
}

/// Where the bytes of an image are whose tables do not change.
struct Fixed {
    shared: Arc<Shared>,
    reader: Reader,
    lookup: Lookup,
    /// Bytes of the device with the data.
    data_end: u64,
}

impl Places for Fixed {
    fn geometry(&self) -> &Geometry {
        &self.shared.tables.geometry
    }

    fn data_end(&self) -> u64 {
        self.data_end
    }

    fn has_backing(&self) -> bool {
        true
    }

    #[inline]
    fn try_run(&self, offset: u64, len: u64) -> Option<Result<Run, IoError>> {
        self.lookup.try_run(&self.shared.tables, offset, len)
    }

    async fn run(&self, offset: u64, len: u64) -> Result<Run, IoError> {
        self.lookup.run(&self.shared.tables, &self.reader, offset, len).await
    }
}

struct Qcow2Channel(Content<Fixed>);

impl Channel for Qcow2Channel {
    #[inline]
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        let content = &self.0;
        if let Err(error) = content.limits().check(req, offset) {
            return IoFuture::ready(Err(error));
        }
        // Nothing is ever written, so there is nothing to flush.
        if req.op == Op::Flush || req.len == 0 {
            return IoFuture::ready(Ok(()));
        }
        match content.places.try_run(offset, req.len) {
            Some(Ok(run)) => match content.in_place(run, req) {
                Some(at) => content.data.channel.submit(req, at),
                None => IoFuture::new(content.serve(req, offset)),
            },
            Some(Err(error)) => IoFuture::ready(Err(error)),
            None => IoFuture::new(content.serve(req, offset)),
        }
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        match self.0.limits().check_range(offset, len) {
            Ok(()) => IoFuture::new(self.0.status(report, offset, len)),
            Err(error) => IoFuture::ready(Err(error)),
        }
    }
}
