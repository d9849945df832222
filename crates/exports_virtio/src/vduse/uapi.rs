//! The interface between the kernel and a VDUSE server. Source: Linux, include/uapi/linux/vduse.h.
//!
//! Structures have the kernel's layout, with a field for every gap, so that no uninitialised byte
//! is passed.

/// The version of the interface that this server uses.
pub(super) const API_VERSION: u64 = 0;
/// Longest device name, including the zero at its end.
pub(super) const NAME_MAX: usize = 256;

const BASE: u64 = 0x81;
const WRITE: u64 = 1;
const READ: u64 = 2;

/// The number of an ioctl: `_IOC(direction, VDUSE_BASE, number, size)`.
const fn code(direction: u64, number: u64, size: usize) -> u64 {
    direction << 30 | (size as u64) << 16 | BASE << 8 | number
}

// Of /dev/vduse/control.
pub(super) const SET_API_VERSION: u64 = code(WRITE, 0x01, size_of::<u64>());
pub(super) const CREATE_DEV: u64 = code(WRITE, 0x02, size_of::<DevConfig>());
pub(super) const DESTROY_DEV: u64 = code(WRITE, 0x03, NAME_MAX);
// Of a device.
pub(super) const IOTLB_GET_FD: u64 = code(READ | WRITE, 0x10, size_of::<IotlbEntry>());
pub(super) const DEV_GET_FEATURES: u64 = code(READ, 0x11, size_of::<u64>());
pub(super) const DEV_SET_CONFIG: u64 = code(WRITE, 0x12, size_of::<ConfigData>());
pub(super) const DEV_INJECT_CONFIG_IRQ: u64 = code(0, 0x13, 0);
pub(super) const VQ_SETUP: u64 = code(WRITE, 0x14, size_of::<VqConfig>());
pub(super) const VQ_GET_INFO: u64 = code(READ | WRITE, 0x15, size_of::<VqInfo>());
pub(super) const VQ_SETUP_KICKFD: u64 = code(WRITE, 0x16, size_of::<VqEventfd>());
pub(super) const VQ_INJECT_IRQ: u64 = code(WRITE, 0x17, size_of::<u32>());

/// `struct vduse_dev_config`; the configuration space follows.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct DevConfig {
    pub(super) name: [u8; NAME_MAX],
    pub(super) vendor_id: u32,
    pub(super) device_id: u32,
    pub(super) features: u64,
    pub(super) vq_num: u32,
    pub(super) vq_align: u32,
    pub(super) reserved: [u32; 13],
    pub(super) config_size: u32,
}

/// `struct vduse_iotlb_entry`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct IotlbEntry {
    pub(super) offset: u64,
    pub(super) start: u64,
    pub(super) last: u64,
    pub(super) perm: u8,
    pub(super) gap: [u8; 7],
}

/// `struct vduse_config_data`; `length` bytes follow.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct ConfigData {
    pub(super) offset: u32,
    pub(super) length: u32,
}

/// `struct vduse_vq_config`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct VqConfig {
    pub(super) index: u32,
    pub(super) max_size: u16,
    pub(super) reserved: [u16; 13],
}

/// `struct vduse_vq_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct VqInfo {
    pub(super) index: u32,
    pub(super) num: u32,
    pub(super) desc_addr: u64,
    pub(super) driver_addr: u64,
    pub(super) device_addr: u64,
    pub(super) state: VqState,
    pub(super) ready: u8,
    pub(super) gap: [u8; 7],
}

/// The union of `struct vduse_vq_state_split` (the first number: the available index) and
/// `struct vduse_vq_state_packed` (available wrap counter and index, used wrap counter and index).
pub(super) type VqState = [u16; 4];

/// `struct vduse_vq_eventfd`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct VqEventfd {
    pub(super) index: u32,
    pub(super) fd: i32,
}

pub(super) const GET_VQ_STATE: u32 = 0;
pub(super) const SET_STATUS: u32 = 1;
pub(super) const UPDATE_IOTLB: u32 = 2;

pub(super) const RESULT_OK: u32 = 0;
pub(super) const RESULT_FAILED: u32 = 1;

/// `struct vduse_dev_request` and, with `kind` and `request_id` swapped for `request_id` and
/// `result`, `struct vduse_dev_response`: six words and a union of 128 bytes.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug)]
pub(super) struct Message {
    pub(super) words: [u32; 6],
    pub(super) union: [u32; 32],
}

impl Message {
    /// Bytes of a message.
    pub(super) const BYTES: usize = 152;
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn structures_have_the_layout_of_the_kernels() {
        assert_eq!((size_of::<DevConfig>(), offset_of!(DevConfig, features)), (336, 264));
        assert_eq!(offset_of!(DevConfig, config_size), 332);
        assert_eq!((size_of::<IotlbEntry>(), size_of::<ConfigData>()), (32, 8));
        assert_eq!((size_of::<VqConfig>(), size_of::<VqEventfd>()), (32, 8));
        assert_eq!((size_of::<VqInfo>(), offset_of!(VqInfo, state), offset_of!(VqInfo, ready)), (48, 32, 40));
        assert_eq!((size_of::<Message>(), offset_of!(Message, union)), (Message::BYTES, 24));
    }

    #[test]
    fn ioctls_have_the_numbers_of_the_kernels() {
        assert_eq!(CREATE_DEV, 0x4150_8102);
        assert_eq!(DESTROY_DEV, 0x4100_8103);
        assert_eq!(IOTLB_GET_FD, 0xc020_8110);
        assert_eq!(DEV_GET_FEATURES, 0x8008_8111);
        assert_eq!(DEV_INJECT_CONFIG_IRQ, 0x8113);
        assert_eq!(VQ_INJECT_IRQ, 0x4004_8117);
    }
}
