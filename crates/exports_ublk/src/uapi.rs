//! The interface of the kernel's ublk driver: commands, structures, numbers.
//!
//! ```text
//!   /dev/ublk-control  ◄─ uring_cmd, 32 bytes of ControlCommand in a large entry (add, start, stop, …)
//!   /dev/ublkcN        ◄─ uring_cmd, 16 bytes of IoCommand (fetch a request, commit its result)
//!                      ─► mmap: one Descriptor for each tag of each queue
//! ```
//!
//! Source of truth: `include/uapi/linux/ublk_cmd.h` of Linux 6.12; later additions name their
//! kernel.

/// Maximum requests of one queue in flight (`UBLK_MAX_QUEUE_DEPTH`).
pub const MAX_QUEUE_DEPTH: u16 = 4096;
/// Device numbers are below this (the driver's `UBLK_MAX_UBLKS`).
pub const MAX_DEVICES: u32 = 1 << 20;
/// The device number that requests any free one.
pub const ANY_DEVICE: u32 = u32::MAX;
/// Bytes of a sector, the driver's unit.
pub const SECTOR_BYTES: u64 = 512;
/// Result of a fetch: a request (`UBLK_IO_RES_OK`).
pub const RESULT_OK: i32 = 0;
/// Result of a fetch: a write whose data must be requested (`UBLK_IO_RES_NEED_GET_DATA`).
pub const RESULT_NEED_GET_DATA: i32 = 1;
/// Result of a fetch: the device is being stopped (`UBLK_IO_RES_ABORT`).
pub const RESULT_ABORT: i32 = -libc::ENODEV;

const READ: u32 = 2;
const READ_WRITE: u32 = 3;

/// `_IOC` with the type letter of ublk.
const fn encode(direction: u32, number: u32, bytes: u32) -> u32 {
    direction << 30 | bytes << 16 | (b'u' as u32) << 8 | number
}

/// Control commands (`UBLK_U_CMD_*`).
pub mod control {
    use super::{READ, READ_WRITE, encode};

    const BYTES: u32 = super::ControlCommand::BYTES as u32;
    pub const GET_DEV_INFO: u32 = encode(READ, 0x02, BYTES);
    pub const ADD_DEV: u32 = encode(READ_WRITE, 0x04, BYTES);
    pub const DEL_DEV: u32 = encode(READ_WRITE, 0x05, BYTES);
    pub const START_DEV: u32 = encode(READ_WRITE, 0x06, BYTES);
    pub const STOP_DEV: u32 = encode(READ_WRITE, 0x07, BYTES);
    pub const SET_PARAMS: u32 = encode(READ_WRITE, 0x08, BYTES);
    pub const GET_PARAMS: u32 = encode(READ, 0x09, BYTES);
    pub const START_USER_RECOVERY: u32 = encode(READ_WRITE, 0x10, BYTES);
    pub const END_USER_RECOVERY: u32 = encode(READ_WRITE, 0x11, BYTES);
    pub const GET_FEATURES: u32 = encode(READ, 0x13, BYTES);
    /// Linux 6.16.
    pub const UPDATE_SIZE: u32 = encode(READ_WRITE, 0x15, BYTES);
    /// Linux 6.16.
    pub const QUIESCE_DEV: u32 = encode(READ_WRITE, 0x16, BYTES);
}

/// Commands of a queue (`UBLK_U_IO_*`).
pub mod io {
    use super::{READ_WRITE, encode};

    const BYTES: u32 = super::IoCommand::BYTES as u32;
    pub const FETCH_REQ: u32 = encode(READ_WRITE, 0x20, BYTES);
    pub const COMMIT_AND_FETCH_REQ: u32 = encode(READ_WRITE, 0x21, BYTES);
    pub const NEED_GET_DATA: u32 = encode(READ_WRITE, 0x22, BYTES);
}

/// Features of a driver or device (`UBLK_F_*`).
pub mod feature {
    pub const NEED_GET_DATA: u64 = 1 << 2;
    pub const USER_RECOVERY: u64 = 1 << 3;
    pub const USER_RECOVERY_REISSUE: u64 = 1 << 4;
    pub const UNPRIVILEGED_DEV: u64 = 1 << 5;
    pub const CMD_IOCTL_ENCODE: u64 = 1 << 6;
    pub const USER_COPY: u64 = 1 << 7;
    /// Linux 6.14.
    pub const USER_RECOVERY_FAIL_IO: u64 = 1 << 9;
    /// Linux 6.16.
    pub const UPDATE_SIZE: u64 = 1 << 10;
    /// Linux 6.16.
    pub const AUTO_BUF_REG: u64 = 1 << 11;
    /// Linux 6.16.
    pub const QUIESCE: u64 = 1 << 12;

    /// Names of the bits, from bit 0.
    pub const NAMES: [&str; 21] = [
        "SUPPORT_ZERO_COPY",
        "URING_CMD_COMP_IN_TASK",
        "NEED_GET_DATA",
        "USER_RECOVERY",
        "USER_RECOVERY_REISSUE",
        "UNPRIVILEGED_DEV",
        "CMD_IOCTL_ENCODE",
        "USER_COPY",
        "ZONED",
        "USER_RECOVERY_FAIL_IO",
        "UPDATE_SIZE",
        "AUTO_BUF_REG",
        "QUIESCE",
        "PER_IO_DAEMON",
        "BUF_REG_OFF_DAEMON",
        "BATCH_IO",
        "INTEGRITY",
        "SAFE_STOP_DEV",
        "NO_AUTO_PART_SCAN",
        "SHMEM_ZC",
        "IO_DESC_SIZE",
    ];
}

/// Attributes of a disk (`UBLK_ATTR_*`).
pub mod attribute {
    pub const READ_ONLY: u32 = 1 << 0;
    pub const ROTATIONAL: u32 = 1 << 1;
    pub const VOLATILE_CACHE: u32 = 1 << 2;
    pub const FUA: u32 = 1 << 3;
}

/// The valid parts of [`Params`] (`UBLK_PARAM_TYPE_*`).
pub mod param {
    pub const BASIC: u32 = 1 << 0;
    pub const DISCARD: u32 = 1 << 1;
    /// Linux 6.15.
    pub const DMA_ALIGN: u32 = 1 << 4;
}

/// Operations and flags of a request (`UBLK_IO_OP_*`, `UBLK_IO_F_*`).
pub mod op {
    pub const READ: u8 = 0;
    pub const WRITE: u8 = 1;
    pub const FLUSH: u8 = 2;
    pub const DISCARD: u8 = 3;
    pub const WRITE_ZEROES: u8 = 5;
    pub const F_FUA: u32 = 1 << 13;
    pub const F_NOUNMAP: u32 = 1 << 15;
    /// The driver could not register the request's buffer (Linux 6.16).
    pub const F_NEED_REG_BUF: u32 = 1 << 17;
}

/// `struct ublksrv_ctrl_cmd`: a control command.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ControlCommand {
    pub dev_id: u32,
    pub queue_id: u16,
    /// Bytes at `addr`.
    pub len: u16,
    pub addr: u64,
    pub data: u64,
    pub dev_path_len: u16,
    pub pad: u16,
    pub reserved: u32,
}

impl ControlCommand {
    pub const BYTES: usize = 32;

    /// A command to device `dev_id` that does not concern a queue.
    pub fn new(dev_id: u32) -> ControlCommand {
        ControlCommand { dev_id, queue_id: u16::MAX, ..ControlCommand::default() }
    }

    /// The command in a large submission entry: 32 bytes; the rest of the 80 is unused.
    pub fn to_bytes(self) -> [u8; 80] {
        let mut bytes = [0; 80];
        bytes[0..4].copy_from_slice(&self.dev_id.to_ne_bytes());
        bytes[4..6].copy_from_slice(&self.queue_id.to_ne_bytes());
        bytes[6..8].copy_from_slice(&self.len.to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.addr.to_ne_bytes());
        bytes[16..24].copy_from_slice(&self.data.to_ne_bytes());
        bytes[24..26].copy_from_slice(&self.dev_path_len.to_ne_bytes());
        bytes
    }
}

/// `struct ublksrv_ctrl_dev_info`: a device's parameters and state.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DevInfo {
    pub nr_hw_queues: u16,
    pub queue_depth: u16,
    /// See [`DeviceState`].
    pub state: u16,
    pub pad0: u16,
    /// Longest read or write in bytes.
    pub max_io_buf_bytes: u32,
    pub dev_id: u32,
    /// The server process, or -1.
    pub ublksrv_pid: i32,
    pub pad1: u32,
    /// Bits of [`feature`].
    pub flags: u64,
    /// For the server's use: the driver only stores it.
    pub ublksrv_flags: u64,
    pub owner_uid: u32,
    pub owner_gid: u32,
    pub reserved1: u64,
    pub reserved2: u64,
}

/// The state of a device (`UBLK_S_DEV_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceState {
    /// No disk: not started, or stopped.
    Dead,
    /// Started, with a server.
    Live,
    /// The server died; requests wait for its successor.
    Quiesced,
    /// The server died; requests fail until there is a successor (Linux 6.14).
    FailIo,
    /// A state of a later kernel.
    Unknown(u16),
}

impl DeviceState {
    /// The state's name in the driver's documentation.
    pub fn name(self) -> &'static str {
        match self {
            DeviceState::Dead => "dead",
            DeviceState::Live => "live",
            DeviceState::Quiesced => "quiesced",
            DeviceState::FailIo => "fail-io",
            DeviceState::Unknown(_) => "unknown",
        }
    }
}

impl DevInfo {
    pub fn device_state(&self) -> DeviceState {
        match self.state {
            0 => DeviceState::Dead,
            1 => DeviceState::Live,
            2 => DeviceState::Quiesced,
            3 => DeviceState::FailIo,
            other => DeviceState::Unknown(other),
        }
    }
}

/// `struct ublk_param_basic`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BasicParams {
    /// Bits of [`attribute`].
    pub attrs: u32,
    pub logical_bs_shift: u8,
    pub physical_bs_shift: u8,
    pub io_opt_shift: u8,
    pub io_min_shift: u8,
    pub max_sectors: u32,
    pub chunk_sectors: u32,
    pub dev_sectors: u64,
    pub virt_boundary_mask: u64,
}

/// `struct ublk_param_discard`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiscardParams {
    /// Offset of the first aligned discard, in bytes.
    pub discard_alignment: u32,
    pub discard_granularity: u32,
    pub max_discard_sectors: u32,
    pub max_write_zeroes_sectors: u32,
    pub max_discard_segments: u16,
    pub reserved0: u16,
}

/// `struct ublk_params`, as far as it is used here; the driver reads the length from `len`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Params {
    /// Bytes of this structure.
    pub len: u32,
    /// Bits of [`param`].
    pub types: u32,
    pub basic: BasicParams,
    pub discard: DiscardParams,
    /// `struct ublk_param_devt`, filled in by the driver.
    pub devt: [u32; 4],
    /// `struct ublk_param_zoned`, unused.
    pub zoned: [u32; 8],
    /// `struct ublk_param_dma_align` (Linux 6.15): the alignment of memory, less one.
    pub dma_alignment: u32,
    pub pad: [u32; 2],
}

impl Params {
    pub const BYTES: usize = size_of::<Params>();

    /// Size of the disk in bytes.
    pub fn capacity(&self) -> u64 {
        self.basic.dev_sectors.saturating_mul(SECTOR_BYTES)
    }
}

/// The offset in `/dev/ublkcN` of the data of a request (`UBLK_F_USER_COPY`).
pub fn data_offset(queue: u16, tag: u16) -> u64 {
    0x8000_0000 + (u64::from(queue) << 41 | u64::from(tag) << 25)
}

/// `struct ublk_auto_buf_reg` of a command's `addr` (Linux 6.16): the place in the table of the
/// command's ring where the driver registers the tag's next request. Where it cannot, it sends the
/// request with [`op::F_NEED_REG_BUF`] (`UBLK_AUTO_BUF_REG_FALLBACK`).
pub fn buffer_registration(index: u16) -> u64 {
    const FALLBACK: u64 = 1;
    u64::from(index) | FALLBACK << 16
}

/// `struct ublksrv_io_cmd`: a command of a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoCommand {
    pub q_id: u16,
    pub tag: u16,
    /// The result of the completed request: bytes, or a negative errno.
    pub result: i32,
    /// Memory of the request: data of a read, or the buffer for that of a write.
    pub addr: u64,
}

impl IoCommand {
    pub const BYTES: usize = 16;

    /// The command in a submission entry.
    #[inline]
    pub fn to_bytes(self) -> [u8; IoCommand::BYTES] {
        let mut bytes = [0; IoCommand::BYTES];
        bytes[0..2].copy_from_slice(&self.q_id.to_ne_bytes());
        bytes[2..4].copy_from_slice(&self.tag.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.result.to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.addr.to_ne_bytes());
        bytes
    }
}

/// `struct ublksrv_io_desc`: a request, as the driver describes it in the queue's shared memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Descriptor {
    /// The operation in the lowest byte, flags above.
    pub op_flags: u32,
    pub nr_sectors: u32,
    pub start_sector: u64,
    pub addr: u64,
}

impl Descriptor {
    /// The operation: one of [`op`].
    #[inline]
    pub fn op(&self) -> u8 {
        (self.op_flags & 0xff) as u8
    }

    /// Length of the request in bytes.
    #[inline]
    pub fn len(&self) -> u64 {
        u64::from(self.nr_sectors) * SECTOR_BYTES
    }

    /// Byte offset of the request; `None` if it overflows.
    #[inline]
    pub fn offset(&self) -> Option<u64> {
        self.start_sector.checked_mul(SECTOR_BYTES)
    }

    /// Whether `flag`, a bit of [`op`], is set.
    #[inline]
    pub fn has(&self, flag: u32) -> bool {
        self.op_flags & flag != 0
    }
}

const _: () = {
    assert!(size_of::<ControlCommand>() == ControlCommand::BYTES);
    assert!(size_of::<DevInfo>() == 64);
    assert!(size_of::<BasicParams>() == 32);
    assert!(size_of::<DiscardParams>() == 20);
    assert!(size_of::<Params>() == 120);
    assert!(size_of::<Descriptor>() == 24);
};

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn commands_have_the_numbers_of_the_kernels_header() {
        let numbers = [
            (control::GET_DEV_INFO, 0x8020_7502),
            (control::ADD_DEV, 0xc020_7504),
            (control::DEL_DEV, 0xc020_7505),
            (control::START_DEV, 0xc020_7506),
            (control::STOP_DEV, 0xc020_7507),
            (control::SET_PARAMS, 0xc020_7508),
            (control::GET_PARAMS, 0x8020_7509),
            (control::START_USER_RECOVERY, 0xc020_7510),
            (control::END_USER_RECOVERY, 0xc020_7511),
            (control::QUIESCE_DEV, 0xc020_7516),
            (control::GET_FEATURES, 0x8020_7513),
            (control::UPDATE_SIZE, 0xc020_7515),
            (io::FETCH_REQ, 0xc010_7520),
            (io::COMMIT_AND_FETCH_REQ, 0xc010_7521),
            (io::NEED_GET_DATA, 0xc010_7522),
        ];
        for (ours, theirs) in numbers {
            assert_eq!(ours, theirs, "{ours:#x}");
        }
    }

    #[test]
    fn structures_lie_as_the_kernel_reads_them() {
        assert_eq!(offset_of!(DevInfo, max_io_buf_bytes), 8);
        assert_eq!(offset_of!(DevInfo, dev_id), 12);
        assert_eq!(offset_of!(DevInfo, ublksrv_pid), 16);
        assert_eq!(offset_of!(DevInfo, flags), 24);
        assert_eq!(offset_of!(DevInfo, ublksrv_flags), 32);
        assert_eq!(offset_of!(DevInfo, owner_uid), 40);
        assert_eq!(offset_of!(Params, basic), 8);
        assert_eq!(offset_of!(BasicParams, max_sectors), 8);
        assert_eq!(offset_of!(BasicParams, dev_sectors), 16);
        assert_eq!(offset_of!(Params, discard), 40);
        assert_eq!(offset_of!(DiscardParams, max_discard_sectors), 8);
        assert_eq!(offset_of!(DiscardParams, max_discard_segments), 16);
        assert_eq!(offset_of!(Params, devt), 60);
        assert_eq!(offset_of!(Params, dma_alignment), 108);
        assert_eq!(offset_of!(Descriptor, start_sector), 8);
    }

    #[test]
    fn commands_are_packed_as_the_kernel_unpacks_them() {
        let command = ControlCommand {
            dev_id: 0x0403_0201,
            queue_id: 0x0605,
            len: 0x0807,
            addr: 0x1817_1615_1413_1211,
            data: 0x2827_2625_2423_2221,
            ..ControlCommand::default()
        };
        let bytes = command.to_bytes();
        assert_eq!(bytes[..8], [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(bytes[8..16], [0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18]);
        assert_eq!(bytes[16..24], [0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x27, 0x28]);
        assert!(bytes[24..].iter().all(|byte| *byte == 0));
        let command = IoCommand { q_id: 1, tag: 2, result: -5, addr: 0x0102 };
        assert_eq!(command.to_bytes(), [1, 0, 2, 0, 0xfb, 0xff, 0xff, 0xff, 2, 1, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn a_descriptor_is_taken_apart() {
        let descriptor = Descriptor {
            op_flags: u32::from(op::WRITE) | op::F_FUA,
            nr_sectors: 8,
            start_sector: 3,
            ..Descriptor::default()
        };
        assert_eq!((descriptor.op(), descriptor.len(), descriptor.offset()), (op::WRITE, 4096, Some(1536)));
        assert!(descriptor.has(op::F_FUA) && !descriptor.has(op::F_NOUNMAP));
        assert_eq!(Descriptor { start_sector: u64::MAX / 511, ..descriptor }.offset(), None);
    }

    #[test]
    fn the_place_of_data_and_buffers_is_encoded_as_the_kernel_decodes_it() {
        assert_eq!(data_offset(0, 0), 0x8000_0000);
        assert_eq!(data_offset(3, 5), 0x8000_0000 + (3 << 41) + (5 << 25));
        assert_eq!(buffer_registration(0x0201), 0x0001_0201);
    }

    #[test]
    fn every_feature_has_the_name_of_its_bit() {
        for (bit, name) in [
            (feature::NEED_GET_DATA, "NEED_GET_DATA"),
            (feature::USER_RECOVERY, "USER_RECOVERY"),
            (feature::QUIESCE, "QUIESCE"),
            (feature::USER_RECOVERY_REISSUE, "USER_RECOVERY_REISSUE"),
            (feature::CMD_IOCTL_ENCODE, "CMD_IOCTL_ENCODE"),
            (feature::USER_RECOVERY_FAIL_IO, "USER_RECOVERY_FAIL_IO"),
            (feature::UPDATE_SIZE, "UPDATE_SIZE"),
            (feature::USER_COPY, "USER_COPY"),
            (feature::AUTO_BUF_REG, "AUTO_BUF_REG"),
            (1 << 20, "IO_DESC_SIZE"),
        ] {
            assert_eq!(feature::NAMES[bit.trailing_zeros() as usize], name);
        }
    }
}
