//! The data plane in the kernel: `/dev/vhost-blk` serves a client's rings from a block device.
//!
//! ```text
//!   guest's kick ─► eventfd ─► vhost worker ─► bio ─► block device
//!                     ▲ ring, memory, log: ioctls of the session, when something changes
//! ```
//!
//! A [`KernelPlane`] is one instance of the device. It holds the disk exclusively, so the driver of
//! this process gives up its claim before ([`KernelBacking::lend`]). An instance that was killed
//! holds the disk until all its results are published; until then [`KernelPlane::attach`] reports
//! that the disk is busy.
//!
//! Guest addresses reach the kernel through the mappings of this process. The kernel checks them
//! against the memory table. It does not check the dirty log and the ring areas against mappings;
//! that is done here and by [`virtio::device::VirtQueue`].

#[cfg(test)]
pub(super) mod fake;
mod vhost;

pub(super) use vhost::{Opener, PATH, opener};

use crate::virtio_blk::signal::Call as Interrupt;
use block::{KernelBacking, KernelExtent, Op};
use exports::{Error, QueueStats};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use vhost::{
    Call, DiskConfig, DiskExtent, Event, MAX_AREAS, MAY_READ, MAY_WRITE, MemoryArea, READ_ONLY,
    RingAddresses, RingStats, Vhost, WRITE_THROUGH,
};
use virtio::blk::SECTOR_BYTES;
use virtio::dirty_log::DirtyLog;
use virtio::memory::GuestMemory;

/// `VHOST_VRING_F_LOG`.
const LOGGED: u32 = 1;

/// One instance of `/dev/vhost-blk`, for one client.
pub(super) struct KernelPlane {
    /// Taken only by `drop`.
    vhost: Option<Box<dyn Vhost>>,
    disk: Arc<dyn KernelBacking>,
    is_attached: bool,
    /// The state of the instance. Memory and log stay mapped while the kernel has their addresses.
    memory: Option<Arc<GuestMemory>>,
    log: Option<Arc<DirtyLog>>,
    features: Option<u64>,
    config: Option<DiskConfig>,
    /// `None` while the guest sees the whole disk.
    map: Option<DiskExtent>,
    /// The counters of each ring that are in the export's already.
    counted: Vec<RingStats>,
}

/// The state of the session that all its rings share.
pub(super) struct Shared<'a> {
    /// Feature bits without those of vhost-user.
    pub(super) features: u64,
    pub(super) memory: &'a Arc<GuestMemory>,
    pub(super) log: Option<&'a Arc<DirtyLog>>,
    pub(super) disk: Properties,
}

/// Properties of the disk that the kernel needs.
#[derive(Clone, Copy)]
pub(super) struct Properties {
    /// Bytes.
    pub(super) capacity: u64,
    pub(super) is_read_only: bool,
    pub(super) is_write_through: bool,
    pub(super) max_discard_sectors: u32,
    pub(super) max_write_zeroes_sectors: u32,
    pub(super) id: [u8; 20],
}

/// A ring to start.
pub(super) struct RingSetup<'a> {
    pub(super) size: u16,
    pub(super) base: u16,
    /// Addresses in this process.
    pub(super) descriptors: u64,
    pub(super) available: u64,
    pub(super) used: u64,
    /// The guest address of the used ring, when writes to it are logged.
    pub(super) used_log: Option<u64>,
    pub(super) kick: &'a OwnedFd,
    pub(super) call: Option<&'a Arc<OwnedFd>>,
    pub(super) err: Option<&'a Arc<OwnedFd>>,
}

impl KernelPlane {
    /// Opens an instance that can serve `num_queues` rings.
    ///
    /// # Errors
    /// Without the module, and when it serves fewer rings.
    pub(super) fn open(
        opener: &Opener,
        disk: Arc<dyn KernelBacking>,
        num_queues: u16,
    ) -> Result<KernelPlane, Error> {
        let vhost = opener().map_err(|source| {
            let hint = match source.kind() {
                io::ErrorKind::NotFound => " (the module vhost_blk is not loaded)",
                io::ErrorKind::PermissionDenied => " (its owner is root unless a rule of udev changes that)",
                _ => "",
            };
            Error::client(format!("cannot open {PATH}{hint}"), source)
        })?;
        vhost.call(Call::SetOwner).map_err(|error| refused("SET_OWNER", error))?;
        if let Err(error) = vhost.stats(u32::from(num_queues) - 1) {
            return Err(match error.raw_os_error() {
                Some(libc::ENOBUFS) => Error::Config(format!(
                    "{PATH} serves fewer rings than the export's {num_queues} queues (parameter queues of the module)"
                )),
                _ => refused("GET_STATS", error),
            });
        }
        let counted = vec![RingStats::default(); num_queues.into()];
        Ok(KernelPlane {
            vhost: Some(vhost),
            disk,
            is_attached: false,
            memory: None,
            log: None,
            features: None,
            config: None,
            map: None,
            counted,
        })
    }

    fn vhost(&self) -> &dyn Vhost {
        &**self.vhost.as_ref().expect("taken only by drop")
    }

    fn call(&self, name: &'static str, call: Call<'_>) -> Result<(), Error> {
        self.vhost().call(call).map_err(|error| refused(name, error))
    }

    fn set_event(
        &self,
        name: &'static str,
        ring: u32,
        event: Event,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), Error> {
        self.call(name, Call::SetEvent { ring, event, fd })
    }

    /// Takes the disk. Returns `false` while another holder has it, such as the instance of a
    /// predecessor that was killed: it still completes requests.
    ///
    /// # Errors
    /// When another export of this process uses the disk so, or the kernel cannot serve it.
    pub(super) fn attach(&mut self) -> Result<bool, Error> {
        if self.is_attached {
            return Ok(true);
        }
        self.disk.lend()?;
        let attached = self.vhost().call(Call::SetDisk(self.disk.fd()));
        if attached.is_err()
            && let Err(error) = self.disk.take_back()
        {
            tracing::debug!(%error, "the disk that the kernel did not take is held by another program");
        }
        match attached {
            Ok(()) => self.is_attached = true,
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
            Err(error) => return Err(refused("SET_DISK", error)),
        }
        Ok(self.is_attached)
    }

    /// Tells the kernel what has changed of the session's shared state. No ring runs whose memory
    /// or log changes.
    ///
    /// # Errors
    /// When the kernel cannot serve such a client.
    pub(super) fn apply(&mut self, shared: &Shared<'_>) -> Result<(), Error> {
        if let Some(log) = shared.log {
            check_log(log, shared.memory)?;
        }
        if !self.memory.as_ref().is_some_and(|memory| Arc::ptr_eq(memory, shared.memory)) {
            let areas = areas(shared.memory)?;
            self.call("SET_MEM_TABLE", Call::SetMemory(&areas))?;
            self.memory = Some(shared.memory.clone());
        }
        if let Some(log) = shared.log
            && !self.log.as_ref().is_some_and(|old| Arc::ptr_eq(old, log))
        {
            // The old log stays mapped until the kernel has the new one.
            self.call("SET_LOG_BASE", Call::SetLogBase(log.addr().addr() as u64))?;
            self.log = Some(log.clone());
        }
        let logs = if shared.log.is_some() { virtio::VHOST_F_LOG_ALL } else { 0 };
        let features = shared.features & !virtio::VHOST_F_LOG_ALL | logs;
        if self.features != Some(features) {
            self.call("SET_FEATURES", Call::SetFeatures(features))?;
            self.features = Some(features);
        }
        self.configure(shared.disk)
    }

    /// Sets the properties of the attached disk, also while rings run.
    ///
    /// # Errors
    /// When the kernel refuses them.
    pub(super) fn configure(&mut self, disk: Properties) -> Result<(), Error> {
        let Properties { max_discard_sectors, max_write_zeroes_sectors, id: serial, .. } = disk;
        let read_only = if disk.is_read_only { READ_ONLY } else { 0 };
        let write_through = if disk.is_write_through { WRITE_THROUGH } else { 0 };
        let flags = read_only | write_through;
        let config = DiskConfig { flags, max_discard_sectors, max_write_zeroes_sectors, serial };
        if self.config != Some(config) {
            self.call("SET_CONFIG", Call::SetConfig(config))?;
            self.config = Some(config);
        }
        self.map(disk)
    }

    /// Has the guest see only the device's part of the disk.
    fn map(&mut self, disk: Properties) -> Result<(), Error> {
        let extent = self.disk.extent();
        if extent == KernelExtent::WHOLE {
            return Ok(());
        }
        let map = DiskExtent {
            sector: 0,
            sectors: disk.capacity / SECTOR_BYTES,
            disk_sector: extent.start / SECTOR_BYTES,
            rights: if disk.is_read_only { MAY_READ } else { MAY_READ | MAY_WRITE },
            reserved: 0,
        };
        if self.map != Some(map) {
            self.call("SET_MAP", Call::SetMap(map))?;
            self.map = Some(map);
        }
        Ok(())
    }

    /// Starts a ring. The disk is attached, and [`KernelPlane::apply`] has succeeded.
    ///
    /// # Errors
    /// When the kernel refuses the ring; then it does not run.
    pub(super) fn start(&self, index: usize, setup: &RingSetup<'_>) -> Result<(), Error> {
        let ring = index as u32;
        let RingSetup { descriptors, available, used, used_log, .. } = *setup;
        if let (Some(log), Some(addr)) = (&self.log, used_log)
            && !addr.checked_add(used_bytes(setup.size)).is_some_and(|end| log.covers(end))
        {
            return Err(Error::protocol(format!("queue {index}: the dirty log has no bit for {addr:#x}")));
        }
        let addresses = RingAddresses {
            ring,
            flags: if used_log.is_some() { LOGGED } else { 0 },
            descriptors,
            used,
            available,
            used_log: used_log.unwrap_or(0),
        };
        self.call("SET_VRING_NUM", Call::SetSize { ring, size: setup.size.into() })?;
        self.call("SET_VRING_BASE", Call::SetBase { ring, base: setup.base.into() })?;
        self.call("SET_VRING_ADDR", Call::SetAddresses(addresses))?;
        self.set_event("SET_VRING_CALL", ring, Event::Call, setup.call.map(|fd| fd.as_fd()))?;
        self.set_event("SET_VRING_ERR", ring, Event::Err, setup.err.map(|fd| fd.as_fd()))?;
        self.set_event("SET_VRING_KICK", ring, Event::Kick, Some(setup.kick.as_fd()))?;
        self.call("START_VRING", Call::Start { ring })?;
        if setup.base != 0 {
            // A predecessor may have died before it could interrupt.
            raise(setup.call);
        }
        Ok(())
    }

    /// Stops a ring when its requests are complete. Returns its position.
    ///
    /// # Errors
    /// When the kernel refuses, which it never should.
    pub(super) fn stop(&self, index: usize) -> Result<u32, Error> {
        let ring = index as u32;
        self.call("STOP_VRING", Call::Stop { ring })?;
        self.vhost().base(ring).map_err(|error| refused("GET_VRING_BASE", error))
    }

    /// Replaces the interrupt of a running ring, and raises it once: an interrupt through the old
    /// one may be lost.
    ///
    /// # Errors
    /// When the kernel refuses it.
    pub(super) fn set_call(&self, index: usize, call: Option<&Arc<OwnedFd>>) -> Result<(), Error> {
        self.set_event("SET_VRING_CALL", index as u32, Event::Call, call.map(|fd| fd.as_fd()))?;
        raise(call);
        Ok(())
    }

    /// Adds to `stats` what a ring has counted since the last call.
    pub(super) fn count(&mut self, index: usize, stats: &QueueStats) {
        let Ok(now) = self.vhost().stats(index as u32) else { return };
        let before = std::mem::replace(&mut self.counted[index], now);
        stats.add_requests(Op::Read, now.reads - before.reads);
        stats.add_requests(Op::Write, now.writes - before.writes);
        stats.add_requests(Op::Flush, now.flushes - before.flushes);
        stats.add_requests(Op::Discard, now.discards - before.discards);
        stats.add_requests(Op::WriteZeroes, now.write_zeroes - before.write_zeroes);
        stats.add_bytes(now.read_bytes - before.read_bytes, now.written_bytes - before.written_bytes);
        stats.add_failures(now.errors - before.errors);
    }
}

impl Drop for KernelPlane {
    /// Stops every ring that runs, and claims the disk for its driver again.
    fn drop(&mut self) {
        drop(self.vhost.take());
        if self.is_attached
            && let Err(error) = self.disk.take_back()
        {
            tracing::error!(%error, "other programs may claim the disk while it is served");
        }
    }
}

fn refused(name: &str, error: io::Error) -> Error {
    Error::client(format!("{PATH} refuses {name}"), error)
}

fn raise(call: Option<&Arc<OwnedFd>>) {
    let Some(call) = call else { return };
    match Interrupt::Event(call.clone()).open() {
        Ok(mut interrupt) => interrupt.raise(),
        Err(error) => tracing::warn!(%error, "cannot raise a ring's call event"),
    }
}

/// Bytes of a used ring of `size` entries, with its event index.
fn used_bytes(size: u16) -> u64 {
    4 + 8 * u64::from(size) + 2
}

fn areas(memory: &GuestMemory) -> Result<Vec<MemoryArea>, Error> {
    let count = memory.regions().len();
    if count > MAX_AREAS {
        return Err(Error::protocol(format!(
            "{count} guest memory regions: the kernel's vhost takes {MAX_AREAS}"
        )));
    }
    let area = |region: &Arc<virtio::memory::Region>| MemoryArea {
        guest_addr: region.guest_addr(),
        len: region.len(),
        addr: region.host_addr().addr() as u64,
        flags: 0,
    };
    Ok(memory.regions().map(area).collect())
}

/// Checks that the kernel marks pages inside the log only: it trusts the log's size.
fn check_log(log: &DirtyLog, memory: &GuestMemory) -> Result<(), Error> {
    let end = memory.regions().map(|region| region.guest_addr() + region.len()).max().unwrap_or(0);
    if log.covers(end) {
        return Ok(());
    }
    Err(Error::protocol(format!("the dirty log does not cover guest memory up to {end:#x}")))
}
