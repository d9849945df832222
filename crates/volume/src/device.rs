//! A volume as a device.

use crate::Uuid;
use crate::extents::Extent;
use block::{
    Channel, Device, DeviceError, IoError, IoFuture, IoResult, Limits, MAX_JOINED, MemoryRegion, Op, Request,
    SharedLimits, join_all,
};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A volume that is open. Any number of exports may share it.
pub struct Volume {
    name: String,
    base: Arc<dyn Device>,
    shared: Arc<Shared>,
}

/// What all who have a volume open have in common.
pub(crate) struct Shared {
    /// Replaced when the volume grows; what was there stays as it was.
    map: Mutex<Arc<Map>>,
    limits: Arc<SharedLimits>,
}

/// Where the bytes of a volume lie.
struct Map {
    /// Pieces side by side on the device, in the order of the volume's bytes.
    pieces: Vec<Piece>,
}

#[derive(Clone, Copy)]
struct Piece {
    /// Where it begins in the volume, and ends.
    start: u64,
    end: u64,
    /// Where it begins on the device.
    place: u64,
}

impl Map {
    fn new(extents: &[Extent], unit: u64, data_offset: u64) -> Map {
        let mut pieces: Vec<Piece> = Vec::new();
        let mut start = 0;
        for extent in extents {
            let (place, len) = (data_offset + extent.start * unit, extent.len * unit);
            match pieces.last_mut() {
                // A volume that grew in place.
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

    /// The volume has grown to `size` bytes.
    pub(crate) fn grow(&self, extents: &[Extent], unit: u64, data_offset: u64, size: u64) {
        *self.lock() = Arc::new(Map::new(extents, unit, data_offset));
        // Only now: whoever sees the size finds the place of its last byte.
        self.limits.set_capacity(size);
    }

    fn lock(&self) -> MutexGuard<'_, Arc<Map>> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Volume {
    pub(crate) fn new(uuid: Uuid, base: Arc<dyn Device>, shared: Arc<Shared>) -> Volume {
        // By what it keeps: clients know disks by the names of their devices, also after a restart.
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

    /// A volume has the size that its pool has given it.
    fn refresh(&self) -> Result<Limits, DeviceError> {
        Ok(self.limits())
    }

    fn map_region(&self, region: &MemoryRegion) -> Result<(), DeviceError> {
        self.base.map_region(region)
    }

    fn unmap_region(&self, region: &MemoryRegion) {
        self.base.unmap_region(region);
    }
}

struct VolumeChannel {
    child: Rc<dyn Channel>,
    /// As it was when a request needed it last.
    map: RefCell<Arc<Map>>,
    shared: Arc<Shared>,
}

impl VolumeChannel {
    /// The piece that holds byte `offset`, which is below the volume's size.
    #[inline]
    fn locate(&self, offset: u64) -> Result<Piece, IoError> {
        if let Some(piece) = self.map.borrow().locate(offset) {
            return Ok(piece);
        }
        self.locate_anew(offset)
    }

    /// The volume has grown since.
    #[cold]
    fn locate_anew(&self, offset: u64) -> Result<Piece, IoError> {
        let map = self.shared.lock().clone();
        let piece = map.locate(offset).ok_or(IoError::OutOfRange);
        *self.map.borrow_mut() = map;
        piece
    }

    /// The parts of a request for each piece, in groups that run together.
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
}
