//! `/dev/vhost-blk`: each step of control as one ioctl.
//!
//! Source of truth: `linux/vhost.h` and `kernel/include/uapi/linux/vhost_blk.h`.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// The device node of the module `vhost_blk`.
pub(in super::super) const PATH: &str = "/dev/vhost-blk";

/// A descriptor of none.
const UNBIND: i32 = -1;

/// Flags of [`DiskConfig`]: `VHOST_BLK_CONFIG_*`.
pub(in super::super) const READ_ONLY: u32 = 1;
pub(in super::super) const WRITE_THROUGH: u32 = 2;

/// Rights of [`DiskExtent`]: `VHOST_BLK_EXTENT_*`.
pub(in super::super) const MAY_READ: u32 = 1;
pub(in super::super) const MAY_WRITE: u32 = 2;

/// An event of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Event {
    Kick,
    Call,
    Err,
}

/// A region of guest memory: `struct vhost_memory_region`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct MemoryArea {
    pub(in super::super) guest_addr: u64,
    pub(in super::super) len: u64,
    /// First byte in this process.
    pub(in super::super) addr: u64,
    pub(in super::super) flags: u64,
}

/// The areas of a ring, as addresses of this process: `struct vhost_vring_addr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct RingAddresses {
    pub(in super::super) ring: u32,
    /// 1: writes to the used ring are logged.
    pub(in super::super) flags: u32,
    pub(in super::super) descriptors: u64,
    pub(in super::super) used: u64,
    pub(in super::super) available: u64,
    /// The guest address of the used ring.
    pub(in super::super) used_log: u64,
}

/// Properties of the disk: `struct vhost_blk_config`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct DiskConfig {
    pub(in super::super) flags: u32,
    pub(in super::super) max_discard_sectors: u32,
    pub(in super::super) max_write_zeroes_sectors: u32,
    pub(in super::super) serial: [u8; 20],
}

/// The one extent of a disk's map, as long as the disk of the guest: `struct vhost_blk_extent`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct DiskExtent {
    /// 0: where the guest has it.
    pub(in super::super) sector: u64,
    pub(in super::super) sectors: u64,
    pub(in super::super) disk_sector: u64,
    /// `VHOST_BLK_EXTENT_*`.
    pub(in super::super) rights: u32,
    pub(in super::super) reserved: u32,
}

/// Counters of a ring: `struct vhost_blk_stats`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in super::super) struct RingStats {
    pub(in super::super) ring: u32,
    pub(in super::super) in_flight: u32,
    pub(in super::super) kicks: u64,
    pub(in super::super) reads: u64,
    pub(in super::super) writes: u64,
    pub(in super::super) flushes: u64,
    pub(in super::super) discards: u64,
    pub(in super::super) write_zeroes: u64,
    pub(in super::super) others: u64,
    pub(in super::super) read_bytes: u64,
    pub(in super::super) written_bytes: u64,
    pub(in super::super) errors: u64,
    pub(in super::super) bounced: u64,
    pub(in super::super) fallbacks: u64,
    pub(in super::super) batches: [u64; 8],
}

/// A step of control.
#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Call<'a> {
    SetOwner,
    SetFeatures(u64),
    SetMemory(&'a [MemoryArea]),
    /// The address of the dirty log in this process.
    SetLogBase(u64),
    SetSize {
        ring: u32,
        size: u32,
    },
    SetBase {
        ring: u32,
        base: u32,
    },
    SetAddresses(RingAddresses),
    SetEvent {
        ring: u32,
        event: Event,
        fd: Option<BorrowedFd<'a>>,
    },
    SetConfig(DiskConfig),
    SetDisk(BorrowedFd<'a>),
    SetMap(DiskExtent),
    Start {
        ring: u32,
    },
    Stop {
        ring: u32,
    },
}

/// An instance of the device, which serves the rings of one client.
pub(in super::super) trait Vhost: Send {
    /// Carries out a step.
    fn call(&self, call: Call<'_>) -> io::Result<()>;
    /// The position of a ring that is stopped.
    fn base(&self, ring: u32) -> io::Result<u32>;
    /// The counters of a ring since the instance was opened.
    fn stats(&self, ring: u32) -> io::Result<RingStats>;
}

/// Makes an instance.
pub(in super::super) type Opener = Box<dyn Fn() -> io::Result<Box<dyn Vhost>> + Send>;

/// Opens instances of `/dev/vhost-blk`.
pub(in super::super) fn opener() -> Opener {
    Box::new(|| {
        let file = OpenOptions::new().read(true).write(true).open(PATH)?;
        Ok(Box::new(Instance(file)))
    })
}

struct Instance(File);

const VHOST_VIRTIO: u64 = 0xaf;
const NONE: u64 = 0;
const WRITE: u64 = 1;
const READ: u64 = 2;

/// The number of an ioctl: `_IOC(direction, VHOST_VIRTIO, number, size)`.
const fn code(direction: u64, number: u64, size: usize) -> u64 {
    direction << 30 | (size as u64) << 16 | VHOST_VIRTIO << 8 | number
}

const SET_FEATURES: u64 = code(WRITE, 0x00, size_of::<u64>());
const SET_OWNER: u64 = code(NONE, 0x01, 0);
const SET_MEM_TABLE: u64 = code(WRITE, 0x03, size_of::<u64>());
const SET_LOG_BASE: u64 = code(WRITE, 0x04, size_of::<u64>());
const SET_VRING_NUM: u64 = code(WRITE, 0x10, size_of::<State>());
const SET_VRING_ADDR: u64 = code(WRITE, 0x11, size_of::<RingAddresses>());
const SET_VRING_BASE: u64 = code(WRITE, 0x12, size_of::<State>());
const GET_VRING_BASE: u64 = code(READ | WRITE, 0x12, size_of::<State>());
const SET_VRING_KICK: u64 = code(WRITE, 0x20, size_of::<FileOf>());
const SET_VRING_CALL: u64 = code(WRITE, 0x21, size_of::<FileOf>());
const SET_VRING_ERR: u64 = code(WRITE, 0x22, size_of::<FileOf>());
const SET_DISK: u64 = code(WRITE, 0xf0, size_of::<i32>());
const START_VRING: u64 = code(WRITE, 0xf1, size_of::<State>());
const STOP_VRING: u64 = code(WRITE, 0xf2, size_of::<State>());
const SET_CONFIG: u64 = code(WRITE, 0xf3, size_of::<DiskConfig>());
const SET_MAP: u64 = code(WRITE, 0xf7, size_of::<Map>());
const GET_STATS: u64 = code(READ | WRITE, 0xf4, size_of::<RingStats>());

/// `struct vhost_vring_state`.
#[repr(C)]
#[derive(Clone, Copy)]
struct State {
    ring: u32,
    value: u32,
}

/// `struct vhost_vring_file`.
#[repr(C)]
#[derive(Clone, Copy)]
struct FileOf {
    ring: u32,
    fd: i32,
}

/// `struct vhost_blk_map`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Map {
    capacity: u64,
    extents: u64,
    count: u32,
    flags: u32,
}

impl Instance {
    /// `argument` is the structure whose size the code names; the kernel may write to it.
    fn ioctl<T>(&self, code: u64, argument: &mut T) -> io::Result<()> {
        // SAFETY: the code says how much the kernel reads and writes: at most the size of `T`,
        // which is plain data. SET_MEM_TABLE reads as many regions more as its header says,
        // and SET_MAP the extent whose address it has.
        match unsafe { libc::ioctl(self.0.as_raw_fd(), code as _, std::ptr::from_mut(argument)) } {
            n if n < 0 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    }
}

impl Vhost for Instance {
    fn call(&self, call: Call<'_>) -> io::Result<()> {
        let with_state = |code, ring, value| self.ioctl(code, &mut State { ring, value });
        match call {
            Call::SetOwner => self.ioctl(SET_OWNER, &mut ()),
            Call::SetFeatures(mut features) => self.ioctl(SET_FEATURES, &mut features),
            Call::SetMemory(areas) => self.ioctl(SET_MEM_TABLE, &mut MemoryTable::new(areas)),
            Call::SetLogBase(mut addr) => self.ioctl(SET_LOG_BASE, &mut addr),
            Call::SetSize { ring, size } => with_state(SET_VRING_NUM, ring, size),
            Call::SetBase { ring, base } => with_state(SET_VRING_BASE, ring, base),
            Call::SetAddresses(mut addresses) => self.ioctl(SET_VRING_ADDR, &mut addresses),
            Call::SetEvent { ring, event, fd } => {
                let code = match event {
                    Event::Kick => SET_VRING_KICK,
                    Event::Call => SET_VRING_CALL,
                    Event::Err => SET_VRING_ERR,
                };
                let fd = fd.map_or(UNBIND, |fd| fd.as_raw_fd());
                self.ioctl(code, &mut FileOf { ring, fd })
            }
            Call::SetConfig(mut config) => self.ioctl(SET_CONFIG, &mut config),
            Call::SetDisk(disk) => self.ioctl(SET_DISK, &mut disk.as_raw_fd()),
            Call::SetMap(extent) => {
                let extents = (&raw const extent).addr() as u64;
                let mut map = Map { capacity: extent.sectors, extents, count: 1, flags: 0 };
                self.ioctl(SET_MAP, &mut map)
            }
            Call::Start { ring } => with_state(START_VRING, ring, 0),
            Call::Stop { ring } => with_state(STOP_VRING, ring, 0),
        }
    }

    fn base(&self, ring: u32) -> io::Result<u32> {
        let mut state = State { ring, value: 0 };
        self.ioctl(GET_VRING_BASE, &mut state)?;
        Ok(state.value)
    }

    fn stats(&self, ring: u32) -> io::Result<RingStats> {
        let mut stats = RingStats { ring, ..RingStats::default() };
        self.ioctl(GET_STATS, &mut stats)?;
        Ok(stats)
    }
}

/// Most regions that vhost takes, unless its parameter `max_mem_regions` says otherwise.
pub(in super::super) const MAX_AREAS: usize = 64;

/// `struct vhost_memory`.
#[repr(C)]
struct MemoryTable {
    count: u32,
    padding: u32,
    areas: [MemoryArea; MAX_AREAS],
}

impl MemoryTable {
    /// The caller gives at most [`MAX_AREAS`].
    fn new(given: &[MemoryArea]) -> MemoryTable {
        let mut areas = [MemoryArea { guest_addr: 0, len: 0, addr: 0, flags: 0 }; MAX_AREAS];
        areas[..given.len()].copy_from_slice(given);
        MemoryTable { count: given.len() as u32, padding: 0, areas }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ioctls_have_the_numbers_of_the_kernel() {
        let numbers = [
            (SET_FEATURES, 0x4008_af00),
            (SET_OWNER, 0xaf01),
            (SET_MEM_TABLE, 0x4008_af03),
            (SET_LOG_BASE, 0x4008_af04),
            (SET_VRING_NUM, 0x4008_af10),
            (SET_VRING_ADDR, 0x4028_af11),
            (SET_VRING_BASE, 0x4008_af12),
            (GET_VRING_BASE, 0xc008_af12),
            (SET_VRING_KICK, 0x4008_af20),
            (SET_VRING_CALL, 0x4008_af21),
            (SET_VRING_ERR, 0x4008_af22),
            (SET_DISK, 0x4004_aff0),
            (START_VRING, 0x4008_aff1),
            (STOP_VRING, 0x4008_aff2),
            (SET_CONFIG, 0x4020_aff3),
            (GET_STATS, 0xc0a8_aff4),
            (SET_MAP, 0x4018_aff7),
        ];
        numbers.into_iter().for_each(|(ours, kernels)| assert_eq!(ours, kernels, "{ours:#x}"));
    }

    #[test]
    fn the_memory_table_has_the_kernels_layout() {
        assert_eq!(std::mem::offset_of!(MemoryTable, areas), 8);
        assert_eq!(size_of::<MemoryArea>(), 32);
        assert_eq!(size_of::<DiskExtent>(), 32);
        let area = MemoryArea { guest_addr: 1, len: 2, addr: 3, flags: 0 };
        let table = MemoryTable::new(&[area]);
        assert_eq!((table.count, table.padding, table.areas[0], table.areas[1].len), (1, 0, area, 0));
    }
}
