//! A volume as a device.

use crate::Uuid;
use crate::extents::Extent;
use block::{
    Channel, Device, DeviceError, IoError, IoFuture, IoResult, KernelBacking, Limits, MAX_JOINED,
    MemoryRegion, Op, Request, SharedLimits, StatusReport, join_all,
};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// An open volume. Any number of exports may share it.
pub struct Volume {
    name: String,
    base: Arc<dyn Device>,
    shared: Arc<Shared>,
}

/// State that all users of a volume share.
pub(crate) struct Shared {
    /// Replaced when the volume grows. The old ranges never move.
    map: Mutex<Arc<Map>>,
    limits: Arc<SharedLimits>,
}

/// Maps the bytes of a volume to its device.
struct Map {
    /// Contiguous ranges of the device, in the order of the volume's bytes.
    pieces: Vec<Piece>,
}

#[derive(Clone, Copy)]
struct Piece {
    /// First byte in the volume; `end` is exclusive.
    start: u64,
    end: u64,
    /// First byte on the device.
    place: u64,
}

impl Map {
    fn new(extents: &[Extent], unit: u64, data_offset: u64) -> Map {
        let mut pieces: Vec<Piece> = Vec::new();
        let mut start = 0;
        for extent in extents {
            let (place, len) = (data_offset + extent.start * unit, extent.len * unit);
            match pieces.last_mut() {
                // The volume grew in place.
                Some(last) if last.place + (last.end - last.start) == place => last.end += len,
                _ => pieces.push(Piece { start, end: start + len, place }),
            }
            start += len;
        }
        Map { pieces }
    }

    #[inline]
    fn locate(&self, offset: u64) -> Option<Piece> {
        let next = self.pieces.partition_point(|piece| piece.start <= offset);
        self.pieces[..next].last().filter(|piece| offset < piece.end).copied()
    }
}

impl Shared {
    pub(crate) fn new(extents: &[Extent], unit: u64, data_offset: u64, limits: Limits) -> Shared {
        let map = Mutex::new(Arc::new(Map::new(extents, unit, data_offset)));
        Shared { map, limits: SharedLimits::new(limits) }
    }

    /// Grows the volume to `size` bytes.
    pub(crate) fn grow(&self, extents: &[Extent], unit: u64, data_offset: u64, size: u64) {
        *self.lock() = Arc::new(Map::new(extents, unit, data_offset));
        // The map comes first: a user that sees the new size finds its last byte.
        self.limits.set_capacity(size);
    }

    fn lock(&self) -> MutexGuard<'_, Arc<Map>> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Volume {
    pub(crate) fn new(uuid: Uuid, base: Arc<dyn Device>, shared: Arc<Shared>) -> Volume {
        // The name stays the same when volumes are renamed: clients know disks by device name, also
        // after a restart.
        Volume { name: format!("volume:{uuid}"), base, shared }
    }
}

impl Device for Volume {
    fn name(&self) -> &str {
        &self.name
    }

    fn limits(&self) -> Limits {
        self.shared.limits.get()
    }

    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        let child = self.base.open_channel()?;
        let map = RefCell::new(self.shared.lock().clone());
        Ok(Rc::new(VolumeChannel { child, map, shared: self.shared.clone() }))
    }

    /// Returns the size that the pool has set.
    fn refresh(&self) -> Result<Limits, DeviceError> {
        Ok(self.limits())
    }

    fn map_region(&self, region: &MemoryRegion) -> Result<(), DeviceError> {
        self.base.map_region(region)
    }

    fn unmap_region(&self, region: &MemoryRegion) {
        self.base.unmap_region(region);
    }

    fn takes_registered(&self) -> bool {
        self.base.takes_registered()
    }

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        Err(DeviceError::not_in_kernel(self.name()))
    }
}

struct VolumeChannel {
    child: Rc<dyn Channel>,
    /// The map as of the last request that needed it.
    map: RefCell<Arc<Map>>,
    shared: Arc<Shared>,
}

impl VolumeChannel {
    /// Returns the range that holds byte `offset`, which is below the volume's size.
    #[inline]
    fn locate(&self, offset: u64) -> Result<Piece, IoError> {
        if let Some(piece) = self.map.borrow().locate(offset) {
            return Ok(piece);
        }
        self.locate_in_new_map(offset)
    }

    /// Locates an offset after the volume has grown.
    #[cold]
    fn locate_in_new_map(&self, offset: u64) -> Result<Piece, IoError> {
        let map = self.shared.lock().clone();
        let piece = map.locate(offset).ok_or(IoError::OutOfRange);
        *self.map.borrow_mut() = map;
        piece
    }

    /// Submits the parts of a request in groups that run concurrently.
    async fn split(&self, req: &Request<'_>, offset: u64) -> IoResult {
        let mut done = 0;
        while done < req.len {
            let mut parts = [None; MAX_JOINED];
            for part in &mut parts {
                if done == req.len {
                    break;
                }
                let at = offset + done;
                let piece = self.locate(at)?;
                let len = (req.len - done).min(piece.end - at);
                *part = Some((piece.place + (at - piece.start), req.part(done, len)));
                done += len;
            }
            join_all(parts.iter().flatten().map(|(at, req)| self.child.submit(req, *at))).await?;
        }
        Ok(())
    }
}

impl Channel for VolumeChannel {
    #[inline]
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        if req.op == Op::Flush {
            return self.child.submit(req, 0);
        }
        if let Err(error) = self.shared.limits.check(req, offset) {
            return IoFuture::ready(Err(error));
        }
        if req.len == 0 {
            return IoFuture::ready(Ok(()));
        }
        match self.locate(offset) {
            Ok(piece) if req.len <= piece.end - offset => {
                self.child.submit(req, piece.place + (offset - piece.start))
            }
            Ok(_) => IoFuture::new(self.split(req, offset)),
            Err(error) => IoFuture::ready(Err(error)),
        }
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        if let Err(error) = self.shared.limits.check_range(offset, len) {
            return IoFuture::ready(Err(error));
        }
        match self.locate(offset) {
            Ok(piece) => {
                let at = piece.place + (offset - piece.start);
                self.child.block_status(report, at, len.min(piece.end - offset))
            }
            Err(error) => IoFuture::ready(Err(error)),
        }
    }
}
