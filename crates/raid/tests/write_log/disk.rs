//! Disks in memory that log all operations in order.

use block::{
    Channel, Device, DeviceError, Flags, IoError, IoFuture, IoResult, KernelBacking, Limits, MemoryRegion,
    Op, Request, StatusReport,
};
use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard};

/// Bytes of a sector, which a write never tears.
pub const SECTOR: usize = 512;
/// Bytes that become unreadable together.
pub const BLOCK: usize = 4096;

/// The effect of a write on a disk.
#[derive(Clone)]
pub struct Change {
    /// The disk.
    pub disk: usize,
    /// Offset on the disk, in bytes.
    pub offset: usize,
    /// Length in bytes.
    pub len: usize,
    /// The new content; `None` for zeroes.
    bytes: Option<Vec<u8>>,
}

impl Change {
    /// Applies some sectors of the change.
    pub fn apply(&self, disk: &mut [u8], sectors: Range<usize>) {
        let part = sectors.start * SECTOR..sectors.end * SECTOR;
        let place = &mut disk[self.offset + part.start..self.offset + part.end];
        match &self.bytes {
            Some(bytes) => place.copy_from_slice(&bytes[part]),
            None => place.fill(0),
        }
    }

    /// Number of sectors.
    pub fn sectors(&self) -> usize {
        self.len / SECTOR
    }

    /// Whether two changes have a byte in common.
    pub fn overlaps(&self, other: &Change) -> bool {
        self.disk == other.disk
            && self.offset < other.offset + other.len
            && other.offset < self.offset + self.len
    }
}

/// An event of the log. Changes and flushes have numbers.
pub enum Event {
    /// A disk has received a write.
    Write { number: usize, change: Change, is_fua: bool },
    /// A disk has received a flush.
    Flush { number: usize, disk: usize },
    /// A disk has completed a write or a flush.
    Done { number: usize },
    /// An observation of the array's user or operator.
    Note(Note),
}

/// The observations of the array's user and its operator.
#[derive(Clone, Debug)]
pub enum Note {
    /// The array was made.
    Created,
    /// A write to sectors of the array begins; the tag names its content.
    Begin { write: u64, tag: u64, sectors: Range<u64> },
    /// The array has acknowledged the write.
    Acknowledged { write: u64 },
    /// Number of members that may be lost from now on.
    Redundancy(usize),
    /// Whether a crash may lose blocks from now on: a member is lost while regions are marked as
    /// dirty.
    Exposed(bool),
}

/// The log of all disks.
#[derive(Clone, Default)]
pub struct Log(Arc<Mutex<(Vec<Event>, usize)>>);

impl Log {
    fn lock(&self) -> MutexGuard<'_, (Vec<Event>, usize)> {
        self.0.lock().expect("no test panics with the log locked")
    }

    /// Adds an observation of the user or the operator.
    pub fn note(&self, note: Note) {
        self.lock().0.push(Event::Note(note));
    }

    /// Takes all events; the log is empty afterwards.
    pub fn take(&self) -> Vec<Event> {
        std::mem::take(&mut self.lock().0)
    }

    /// Adds the begin of a write or a flush; returns its number.
    fn begin(&self, event: impl FnOnce(usize) -> Event) -> usize {
        let (events, next) = &mut *self.lock();
        *next += 1;
        events.push(event(*next));
        *next
    }

    fn end(&self, number: usize) {
        self.lock().0.push(Event::Done { number });
    }
}

/// A disk with a volatile cache: a write without flush or FUA may be lost.
pub struct Disk {
    name: String,
    index: usize,
    log: Option<Log>,
    bytes: Arc<Mutex<Vec<u8>>>,
    /// Blocks of [`BLOCK`] bytes that cannot be read until they are written.
    unreadable: Arc<Mutex<BTreeSet<usize>>>,
}

impl Disk {
    /// An empty disk of `bytes` bytes that adds its events to a log.
    pub fn logged(index: usize, bytes: usize, log: &Log) -> Disk {
        Disk { log: Some(log.clone()), ..Disk::holding(index, vec![0; bytes]) }
    }

    /// A disk with this content.
    pub fn holding(index: usize, bytes: Vec<u8>) -> Disk {
        let (bytes, unreadable) = (Arc::new(Mutex::new(bytes)), Arc::default());
        Disk { name: format!("disk{index}"), index, log: None, bytes, unreadable }
    }

    /// The content of the disk.
    pub fn content(&self) -> Vec<u8> {
        self.bytes.lock().expect("no test panics with a disk locked").clone()
    }

    /// Whether a block can be read.
    pub fn can_read(&self, block: usize) -> bool {
        !self.unreadable.lock().expect("no test panics with a disk locked").contains(&block)
    }

    /// The disk with a block that is unreadable until it is written.
    #[must_use]
    pub fn with_unreadable(self, block: usize) -> Disk {
        self.unreadable.lock().expect("nothing has run").insert(block);
        self
    }
}

impl Device for Disk {
    fn name(&self) -> &str {
        &self.name
    }
    fn limits(&self) -> Limits {
        let capacity = self.bytes.lock().expect("no test panics with a disk locked").len() as u64;
        Limits { volatile_cache: true, ..Limits::new(capacity) }
    }
    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        let (limits, log, bytes) = (self.limits(), self.log.clone(), self.bytes.clone());
        Ok(Rc::new(DiskChannel {
            index: self.index,
            limits,
            log,
            bytes,
            unreadable: self.unreadable.clone(),
        }))
    }
    fn refresh(&self) -> Result<Limits, DeviceError> {
        Ok(self.limits())
    }
    fn map_region(&self, _: &MemoryRegion) -> Result<(), DeviceError> {
        Ok(())
    }
    fn unmap_region(&self, _: &MemoryRegion) {}

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        Err(DeviceError::not_in_kernel(self.name()))
    }
}

struct DiskChannel {
    index: usize,
    limits: Limits,
    log: Option<Log>,
    bytes: Arc<Mutex<Vec<u8>>>,
    unreadable: Arc<Mutex<BTreeSet<usize>>>,
}

impl DiskChannel {
    /// Whether a range can be read.
    fn is_readable(&self, offset: u64, len: u64) -> bool {
        let blocks = offset as usize / BLOCK..(offset + len).div_ceil(BLOCK as u64) as usize;
        self.unreadable.lock().is_ok_and(|unreadable| unreadable.range(blocks).next().is_none())
    }

    /// Makes blocks readable that are written as a whole.
    fn heal(&self, change: &Change) {
        let blocks = change.offset.div_ceil(BLOCK)..(change.offset + change.len) / BLOCK;
        if let Ok(mut unreadable) = self.unreadable.lock() {
            unreadable.retain(|block| !blocks.contains(block));
        }
    }

    fn change(&self, req: &Request<'_>, offset: u64) -> Option<Change> {
        let (offset, len) = (offset as usize, req.len as usize);
        let bytes = match req.op {
            Op::Read | Op::Flush => return None,
            Op::WriteZeroes | Op::Discard => None,
            Op::Write => {
                let mut bytes = vec![0; len];
                req.data.copy_to(&mut bytes);
                Some(bytes)
            }
        };
        Some(Change { disk: self.index, offset, len, bytes })
    }

    async fn run(&self, req: &Request<'_>, offset: u64) -> IoResult {
        self.limits.check(req, offset)?;
        let change = self.change(req, offset);
        let number = match (&self.log, &change) {
            (Some(log), Some(change)) => {
                let (change, is_fua) = (change.clone(), req.flags.contains(Flags::FUA));
                Some(log.begin(|number| Event::Write { number, change, is_fua }))
            }
            (Some(log), None) if req.op == Op::Flush => {
                Some(log.begin(|number| Event::Flush { number, disk: self.index }))
            }
            _ => None,
        };
        if self.log.is_some() {
            let core = reactor::current();
            core.sleep(1_000 + core.random_u64() % 50_000).await;
        }
        let mut bytes = self.bytes.lock().map_err(|_| IoError::DeviceGone)?;
        match change {
            Some(change) => {
                change.apply(&mut bytes, 0..change.sectors());
                self.heal(&change);
            }
            None if req.op == Op::Read && !self.is_readable(offset, req.len) => return Err(IoError::Medium),
            None if req.op == Op::Read => {
                req.data.copy_from(&bytes[offset as usize..(offset + req.len) as usize]);
            }
            None => {}
        }
        if let (Some(log), Some(number)) = (&self.log, number) {
            log.end(number);
        }
        Ok(())
    }
}

impl Channel for DiskChannel {
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        IoFuture::new(self.run(req, offset))
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, _: u64, len: u64) -> IoFuture<'a> {
        report.answer_data(len)
    }
}
