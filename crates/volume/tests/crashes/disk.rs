//! A disk with a volatile cache that loses power. Up to byte 4 Mi, where the pool's tables lie, it
//! keeps sectors of 512 bytes. Beyond, where volumes lie, it keeps cells of 64 KiB with one value
//! each.

use base::Rng;
use block::{
    Channel, Device, DeviceError, IoError, IoFuture, IoResult, KernelBacking, Limits, MemoryRegion, Op,
    Request, StatusReport,
};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard};

/// Bytes before the first cell.
pub const TABLES: u64 = 4 << 20;
/// Bytes of a cell.
pub const CELL: u64 = 64 << 10;
const SECTOR: usize = 512;
/// Value of the cells before the pool was created: bytes of a former owner.
pub const FOREIGN: u8 = 0xee;

/// Content of a disk.
#[derive(Clone)]
struct Content {
    sectors: HashMap<u64, [u8; SECTOR]>,
    cells: Vec<u8>,
}

impl Content {
    fn apply(&mut self, write: &Write) {
        match write {
            Write::Sector(at, bytes) => drop(self.sectors.insert(*at, **bytes)),
            Write::Cell(at, value) => self.cells[*at] = *value,
        }
    }
}

/// The smallest write, which is atomic.
enum Write {
    Sector(u64, Box<[u8; SECTOR]>),
    Cell(usize, u8),
}

struct Inner {
    durable: Content,
    /// `durable` with all writes in the cache.
    seen: Content,
    cache: Vec<Write>,
    /// Smallest writes until the power fails; `None`: never.
    power: Option<u64>,
}

#[derive(Clone)]
pub struct Disk {
    limits: Limits,
    inner: Arc<Mutex<Inner>>,
}

impl Disk {
    pub fn new(capacity: u64) -> Disk {
        let limits = Limits { volatile_cache: true, max_write_zeroes: 1 << 30, ..Limits::new(capacity) };
        let cells = vec![FOREIGN; ((capacity - TABLES) / CELL) as usize];
        let durable = Content { sectors: HashMap::new(), cells };
        let seen = durable.clone();
        Disk { limits, inner: Arc::new(Mutex::new(Inner { durable, seen, cache: Vec::new(), power: None })) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no test panics inside")
    }

    /// Makes the power fail after `writes` smallest writes.
    pub fn fail_after(&self, writes: u64) {
        self.lock().power = Some(writes);
    }

    pub fn is_off(&self) -> bool {
        self.lock().power == Some(0)
    }

    /// Turns the power off and on again: all, none or any part of the cache has arrived.
    pub fn restart(&self, rng: &mut Rng) {
        let mut inner = self.lock();
        let mode = rng.below(4);
        for write in std::mem::take(&mut inner.cache) {
            if mode == 0 || (mode > 1 && rng.below(2) == 0) {
                inner.durable.apply(&write);
            }
        }
        inner.seen = inner.durable.clone();
        inner.power = None;
    }
}

impl Inner {
    fn write(&mut self, write: Write) -> IoResult {
        match &mut self.power {
            Some(0) => return Err(IoError::DeviceGone),
            Some(left) => *left -= 1,
            None => {}
        }
        self.seen.apply(&write);
        self.cache.push(write);
        Ok(())
    }

    fn write_range(&mut self, offset: u64, bytes: &[u8]) -> IoResult {
        if offset < TABLES {
            for (i, sector) in bytes.chunks_exact(SECTOR).enumerate() {
                self.write(Write::Sector(
                    offset / 512 + i as u64,
                    Box::new(sector.try_into().expect("a sector")),
                ))?;
            }
            return Ok(());
        }
        assert!(
            offset.is_multiple_of(CELL) && (bytes.len() as u64).is_multiple_of(CELL),
            "{offset} {}",
            bytes.len()
        );
        for (i, cell) in bytes.chunks_exact(CELL as usize).enumerate() {
            assert!(cell.iter().all(|byte| *byte == cell[0]), "a cell has one value");
            self.write(Write::Cell(((offset - TABLES) / CELL) as usize + i, cell[0]))?;
        }
        Ok(())
    }

    fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        if offset < TABLES {
            let sectors = (offset / 512..).take(len / SECTOR);
            let none = [FOREIGN; SECTOR];
            return sectors.flat_map(|at| *self.seen.sectors.get(&at).unwrap_or(&none)).collect();
        }
        let first = ((offset - TABLES) / CELL) as usize;
        let cells = &self.seen.cells[first..first + len / CELL as usize];
        cells.iter().flat_map(|value| vec![*value; CELL as usize]).collect()
    }
}

impl Device for Disk {
    fn name(&self) -> &str {
        "disk"
    }

    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        Ok(Rc::new(self.clone()))
    }

    fn refresh(&self) -> Result<Limits, DeviceError> {
        Ok(self.limits())
    }

    fn map_region(&self, _region: &MemoryRegion) -> Result<(), DeviceError> {
        Ok(())
    }

    fn unmap_region(&self, _region: &MemoryRegion) {}

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        Err(DeviceError::not_in_kernel(self.name()))
    }
}

impl Channel for Disk {
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        let mut inner = self.lock();
        let len = req.len as usize;
        let result = match req.op {
            _ if inner.power == Some(0) => Err(IoError::DeviceGone),
            Op::Flush => {
                let Inner { durable, seen, cache, .. } = &mut *inner;
                durable.clone_from(seen);
                cache.clear();
                Ok(())
            }
            Op::Write => {
                let mut bytes = vec![0; len];
                req.data.copy_to(&mut bytes);
                inner.write_range(offset, &bytes)
            }
            Op::WriteZeroes => inner.write_range(offset, &vec![0; len]),
            Op::Read => {
                req.data.copy_from(&inner.read(offset, len));
                Ok(())
            }
            Op::Discard => Ok(()),
        };
        IoFuture::ready(result)
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, _: u64, len: u64) -> IoFuture<'a> {
        report.answer_data(len)
    }
}
