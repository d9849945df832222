//! Helpers of this module's tests.

use super::io::Target;
use super::layout::Layout;
use super::maintenance::Maintenance;
use super::superblock::{EpochId, Member, Reshape, Superblock, Table};
use crate::{ArrayConfig, Consistency, Geometry, Level, Matrix, Uuid, Zones};
use block::{Channel, IoError, IoFuture, IoResult, Limits, Op, Request, StatusReport};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// A small array of one group.
pub(crate) fn config(data: usize, parity: usize) -> ArrayConfig {
    ArrayConfig {
        uuid: Uuid([1; 16]),
        name: "vm".into(),
        level: Level::NPlusM,
        geometry: Geometry {
            groups: 1,
            data,
            parity,
            strip_bytes: 4096,
            group_stripes: 16,
            zones: Zones::NONE,
        },
        matrix: match parity {
            0 => Matrix::Copies,
            1..=3 => Matrix::Powers,
            _ => Matrix::Cauchy,
        },
        consistency: if parity == 0 { Consistency::None } else { Consistency::Ppl },
        block_size: 512,
        region_bytes: 16 << 10,
        lanes: 2,
        // A block of every strip fits in half a lane.
        lane_bytes: if data > 12 { 64 << 10 } else { 16 << 10 },
    }
}

/// The configuration for a reshape of an array of `old` to this number of data and parity strips,
/// and the reshape at its start.
pub(crate) fn reshaping(old: &ArrayConfig, (data, parity): (usize, usize)) -> (ArrayConfig, Reshape) {
    let strip = u64::from(old.geometry.strip_bytes);
    let rows = Reshape::unit_strips(old.geometry.data, data) / data as u64;
    let reshape = Reshape {
        old_level: old.level,
        old_matrix: old.matrix,
        old_geometry: old.geometry,
        cursor: 0,
        shift: rows * strip,
    };
    let mut new = config(data, parity);
    new.geometry.group_stripes = old.geometry.group_stripes + rows;
    new.lanes = old.lanes / 2;
    (new, reshape)
}

/// The identity of a slot's member.
pub(crate) fn member_uuid(slot: usize) -> Uuid {
    Uuid([(slot as u8).wrapping_add(100); 16])
}

/// The first table of an array.
pub(crate) fn table(config: &ArrayConfig) -> Table {
    Table {
        config: config.clone(),
        generation: 1,
        settled: 0,
        epoch: 1,
        served_epoch: 1,
        history: vec![EpochId { epoch: 1, id: 4711 }],
        nonce: [7; 16],
        is_clean: false,
        is_creating: false,
        is_logging: config.consistency == Consistency::Ppl,
        initial_region: 0,
        members: (0..config.geometry.members()).map(|slot| Member::live(member_uuid(slot))).collect(),
        resync_cursor: None,
        scrub_cursor: None,
        scrub_repairs: false,
        scrub_is_scheduled: false,
        scrub_cancelled_s: 0,
        maintenance: Maintenance::default(),
        scrubbed_ns: 0,
        reshape: None,
        owner: "host".into(),
        created_ns: 1,
        updated_ns: 1,
    }
}

/// A member's superblock of the first table.
pub(crate) fn superblock(config: &ArrayConfig, slot: usize) -> Superblock {
    Superblock {
        member: member_uuid(slot),
        slot: slot as u16,
        layout: Layout::new(1 << 20, config).unwrap(),
        unknown_ro_compat: 0,
        table: table(config),
    }
}

/// A disk that can lose power in the middle of a write, fail requests, and delay them.
#[derive(Clone)]
pub(crate) struct Disk(Rc<DiskState>);

struct DiskState {
    bytes: RefCell<Vec<u8>>,
    /// The error of every request.
    fails: Cell<Option<IoError>>,
    /// Where writes fail.
    fails_at: Cell<Option<u64>>,
    /// Longest time of a request in nanoseconds.
    slow_ns: Cell<u64>,
    writes: Cell<u64>,
    is_backward: Cell<bool>,
    power: Power,
    takes_zeroes: Cell<bool>,
}

/// The power of several disks: it may fail after a number of further sectors has been written.
#[derive(Clone, Default)]
pub(crate) struct Power(Rc<Cell<Option<u64>>>);

impl Power {
    /// Lets the power fail after `sectors` more sectors.
    pub(crate) fn fail_after(&self, sectors: u64) {
        self.0.set(Some(sectors));
    }

    pub(crate) fn restore(&self) {
        self.0.set(None);
    }

    pub(crate) fn left(&self) -> u64 {
        self.0.get().unwrap_or(u64::MAX)
    }

    pub(crate) fn is_off(&self) -> bool {
        self.0.get() == Some(0)
    }

    fn takes_a_sector(&self) -> bool {
        match self.0.get() {
            None => true,
            Some(0) => false,
            Some(left) => {
                self.0.set(Some(left - 1));
                left > 1
            }
        }
    }
}

impl Disk {
    pub(crate) fn new(bytes: usize, power: &Power) -> Disk {
        Disk(Rc::new(DiskState {
            bytes: RefCell::new(vec![0; bytes]),
            fails: Cell::new(None),
            fails_at: Cell::new(None),
            slow_ns: Cell::new(0),
            writes: Cell::new(0),
            is_backward: Cell::new(false),
            power: power.clone(),
            takes_zeroes: Cell::new(true),
        }))
    }

    pub(crate) fn channel(&self) -> Rc<dyn Channel> {
        Rc::new(self.clone())
    }

    pub(crate) fn capacity(&self) -> u64 {
        self.0.bytes.borrow().len() as u64
    }

    pub(crate) fn fail(&self, error: Option<IoError>) {
        self.0.fails.set(error);
    }

    /// Lets writes fail that begin at this offset.
    pub(crate) fn fail_at(&self, offset: Option<u64>) {
        self.0.fails_at.set(offset);
    }

    pub(crate) fn be_slow(&self, ns: u64) {
        self.0.slow_ns.set(ns);
    }

    /// Lets writes begin with their last sector.
    pub(crate) fn write_backwards(&self) {
        self.0.is_backward.set(true);
    }

    pub(crate) fn refuse_zeroes(&self) {
        self.0.takes_zeroes.set(false);
    }

    pub(crate) fn writes(&self) -> u64 {
        self.0.writes.get()
    }

    pub(crate) fn edit(&self, edit: impl FnOnce(&mut Vec<u8>)) {
        edit(&mut self.0.bytes.borrow_mut());
    }

    /// Executes the part of a request that takes no time; returns the data to write.
    fn begin(&self, req: &Request<'_>, offset: u64) -> Result<Option<Vec<u8>>, IoError> {
        let state = &*self.0;
        if let Some(error) = state.fails.get() {
            return Err(error);
        }
        if state.power.is_off() {
            return Err(IoError::DeviceGone);
        }
        Limits::new(self.capacity()).check(req, offset)?;
        let range = offset as usize..(offset + req.len) as usize;
        match req.op {
            Op::Read => {
                req.data.copy_from(&state.bytes.borrow()[range]);
                return Ok(None);
            }
            Op::Flush | Op::Discard => return Ok(None),
            Op::WriteZeroes if !state.takes_zeroes.get() => return Err(IoError::Unsupported),
            Op::Write | Op::WriteZeroes => {}
        }
        if state.fails_at.get() == Some(offset) {
            return Err(IoError::Medium);
        }
        state.writes.set(state.writes.get() + 1);
        let mut new = vec![0; req.len as usize];
        if req.op == Op::Write {
            req.data.copy_to(&mut new);
        }
        Ok(Some(new))
    }

    /// Writes sector by sector, so that the power may fail in the middle of several writes at once.
    async fn write(&self, new: &[u8], offset: u64) -> IoResult {
        let mut sectors: Vec<(usize, &[u8])> = new.chunks(512).enumerate().collect();
        if self.0.is_backward.get() {
            sectors.reverse();
        }
        for (i, sector) in sectors {
            self.wait(self.0.slow_ns.get() / 8).await;
            if !self.0.power.takes_a_sector() {
                return Err(IoError::DeviceGone);
            }
            let at = offset as usize + 512 * i;
            self.0.bytes.borrow_mut()[at..at + sector.len()].copy_from_slice(sector);
        }
        Ok(())
    }

    async fn wait(&self, most_ns: u64) {
        if most_ns > 0 {
            let core = reactor::current();
            core.sleep(core.random_u64() % most_ns).await;
        }
    }
}

impl Channel for Disk {
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        IoFuture::new(async move {
            self.wait(self.0.slow_ns.get()).await;
            match self.begin(req, offset)? {
                Some(new) => self.write(&new, offset).await,
                None => Ok(()),
            }
        })
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, _: u64, len: u64) -> IoFuture<'a> {
        report.answer_data(len)
    }
}

/// `count` disks of 1 MiB on one power line.
pub(crate) fn disks(count: usize) -> (Vec<Disk>, Power) {
    let power = Power::default();
    ((0..count).map(|_| Disk::new(1 << 20, &power)).collect(), power)
}

/// The disks as members by slot.
pub(crate) fn targets(config: &ArrayConfig, disks: &[Disk]) -> Vec<Target> {
    let target = |(slot, disk): (usize, &Disk)| Target {
        slot,
        channel: disk.channel(),
        layout: Layout::new(disk.capacity(), config).unwrap(),
    };
    disks.iter().enumerate().map(target).collect()
}
