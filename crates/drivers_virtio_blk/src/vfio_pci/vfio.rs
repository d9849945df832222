//! VFIO: a PCI function, its group, and the container with its IOMMU's address space.
//!
//! ```text
//!   /sys/bus/pci/devices/0000:00:01.0 ─► iommu_group ─► /dev/vfio/N ─► device
//!                                                           └► /dev/vfio/vfio (container): memory
//! ```
//!
//! Source: Linux, include/uapi/linux/vfio.h and Documentation/driver-api/vfio.rst.

use super::super::failure::{Failure, Tried};
use super::super::regions::Region;
use super::capability::CONFIG_SPACE;
use drivers::shared_memory::page_size;
use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use vfio_bindings::bindings::vfio::*;
use vmm_sys_util::ioctl::{ioctl, ioctl_with_mut_ref, ioctl_with_ptr, ioctl_with_ref, ioctl_with_val};
use vmm_sys_util::ioctl_io_nr;

ioctl_io_nr!(GET_API_VERSION, VFIO_TYPE.into(), VFIO_BASE);
ioctl_io_nr!(CHECK_EXTENSION, VFIO_TYPE.into(), VFIO_BASE + 1);
ioctl_io_nr!(SET_IOMMU, VFIO_TYPE.into(), VFIO_BASE + 2);
ioctl_io_nr!(GROUP_GET_STATUS, VFIO_TYPE.into(), VFIO_BASE + 3);
ioctl_io_nr!(GROUP_SET_CONTAINER, VFIO_TYPE.into(), VFIO_BASE + 4);
ioctl_io_nr!(GROUP_GET_DEVICE_FD, VFIO_TYPE.into(), VFIO_BASE + 6);
ioctl_io_nr!(DEVICE_GET_REGION_INFO, VFIO_TYPE.into(), VFIO_BASE + 8);
ioctl_io_nr!(DEVICE_GET_IRQ_INFO, VFIO_TYPE.into(), VFIO_BASE + 9);
ioctl_io_nr!(DEVICE_SET_IRQS, VFIO_TYPE.into(), VFIO_BASE + 10);
// IOMMU operations reuse the numbers of device operations.
ioctl_io_nr!(IOMMU_GET_INFO, VFIO_TYPE.into(), VFIO_BASE + 12);
ioctl_io_nr!(IOMMU_MAP_DMA, VFIO_TYPE.into(), VFIO_BASE + 13);
ioctl_io_nr!(IOMMU_UNMAP_DMA, VFIO_TYPE.into(), VFIO_BASE + 14);

/// Largest description of an IOMMU in bytes: its ranges are few.
const MAX_INFO: usize = 1 << 16;
/// Interrupt addresses of a PC. No memory lies there, even if an older kernel reports no ranges.
const INTERRUPTS: RangeInclusive<u64> = 0xfee0_0000..=0xfeef_ffff;
/// Last address that every IOMMU of a PC translates.
const LAST_ADDRESS: u64 = (1 << 39) - 1;
/// Largest number of mappings if the kernel does not report it: its default.
const MAX_MAPPINGS: u64 = 65535;

/// Location of a function's region in its file.
#[derive(Clone, Copy, Debug)]
pub struct RegionInfo {
    /// Length in bytes.
    pub len: u64,
    /// First byte in the file.
    pub offset: u64,
    /// Whether all of it can be mapped.
    pub can_map: bool,
}

/// Capabilities of an IOMMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IommuInfo {
    /// Alignment of mappings in bytes.
    pub page: u64,
    /// Addresses that can be mapped.
    pub addresses: Vec<RangeInclusive<u64>>,
    /// Largest number of mappings.
    pub max_mappings: u64,
}

/// A PCI function that this process owns. Closing it resets the function and removes all its
/// memory.
#[derive(Debug)]
pub struct Vfio {
    // Fields are closed in this order.
    device: File,
    _group: File,
    container: File,
    config: u64,
}

impl Vfio {
    /// Opens the function with this directory in sysfs.
    ///
    /// # Errors
    /// When the function does not exist, is not bound to vfio-pci, has no IOMMU, or is in use.
    pub fn open(sysfs: &Path) -> Result<Vfio, Failure> {
        let sysfs = sysfs.canonicalize().map_err(|source| {
            let what = format!("no PCI function {}", sysfs.display());
            Tried { what, source }
        })?;
        let link = |name: &str| {
            let target = sysfs.join(name).read_link().ok()?;
            Some(target.file_name()?.to_string_lossy().into_owned())
        };
        let group = link("iommu_group").ok_or("the function has no IOMMU (no iommu_group in sysfs)")?;
        let driver = link("driver").unwrap_or_else(|| "no driver".into());
        if driver != "vfio-pci" {
            return Err(format!("the function is bound to {driver}, not to vfio-pci").into());
        }
        let container = open("/dev/vfio/vfio")?;
        // SAFETY: numbers only.
        let (version, has_type1) = unsafe {
            let iommu = VFIO_TYPE1v2_IOMMU.into();
            (ioctl(&container, GET_API_VERSION()), ioctl_with_val(&container, CHECK_EXTENSION(), iommu))
        };
        if version != VFIO_API_VERSION as i32 || has_type1 != 1 {
            return Err(format!("VFIO has version {version}, type 1 IOMMU: {has_type1}").into());
        }
        let group = open(&format!("/dev/vfio/{group}"))?;
        join(&group, &container)?;
        let name = sysfs.file_name().map(|name| CString::new(name.as_bytes())).transpose()?;
        let name = name.ok_or("the path is not a PCI function")?;
        // SAFETY: a C string that lives through the call.
        let fd = check(unsafe { ioctl_with_ptr(&group, GROUP_GET_DEVICE_FD(), name.as_ptr()) })?;
        // SAFETY: a new descriptor, which has no other owner.
        let device = unsafe { File::from_raw_fd(fd) };
        let mut vfio = Vfio { device, _group: group, container, config: 0 };
        vfio.config = vfio.region(VFIO_PCI_CONFIG_REGION_INDEX)?.offset;
        Ok(vfio)
    }

    /// The function's file, which contains its regions.
    pub fn device(&self) -> &File {
        &self.device
    }

    /// Location of region `index`.
    ///
    /// # Errors
    /// When the function has no such region.
    pub fn region(&self, index: u32) -> io::Result<RegionInfo> {
        let mut info =
            vfio_region_info { argsz: size_of::<vfio_region_info>() as u32, index, ..Default::default() };
        // SAFETY: the structure says how long it is.
        check(unsafe { ioctl_with_mut_ref(&self.device, DEVICE_GET_REGION_INFO(), &mut info) })?;
        // A longer description says whether all or only parts can be mapped; older kernels exclude
        // interrupt tables. Access without a mapping is slower.
        let has_parts = info.flags & VFIO_REGION_INFO_FLAG_CAPS != 0 && !self.is_whole(index, info.argsz)?;
        let can_map = info.flags & VFIO_REGION_INFO_FLAG_MMAP != 0 && !has_parts;
        Ok(RegionInfo { len: info.size, offset: info.offset, can_map })
    }

    /// Whether region `index`, whose description has `len` bytes, can be mapped as a whole.
    fn is_whole(&self, index: u32, len: u32) -> io::Result<bool> {
        let fixed = size_of::<vfio_region_info>();
        let mut info = vec![0u8; (len as usize).clamp(fixed, MAX_INFO)];
        let len = info.len() as u32;
        info[..4].copy_from_slice(&len.to_le_bytes());
        info[8..12].copy_from_slice(&index.to_le_bytes());
        // SAFETY: the buffer says how long it is.
        check(unsafe { ioctl_with_ptr(&self.device, DEVICE_GET_REGION_INFO(), info.as_mut_ptr()) })?;
        Ok(!capabilities(&info, 12).any(|(id, _)| u32::from(id) == VFIO_REGION_INFO_CAP_SPARSE_MMAP))
    }

    /// The function's configuration space.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn config_space(&self) -> io::Result<[u8; CONFIG_SPACE]> {
        let mut space = [0; CONFIG_SPACE];
        self.device.read_exact_at(&mut space, self.config)?;
        Ok(space)
    }

    /// Sets and clears bits of the function's command register.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn change_command(&self, set: u16, clear: u16) -> io::Result<()> {
        const COMMAND: u64 = 4;
        let mut bytes = [0; 2];
        self.device.read_exact_at(&mut bytes, self.config + COMMAND)?;
        let command = u16::from_le_bytes(bytes) & !clear | set;
        self.device.write_all_at(&command.to_le_bytes(), self.config + COMMAND)
    }

    /// Number of interrupts of kind `index` that can signal eventfds.
    pub fn interrupts(&self, index: u32) -> u32 {
        let mut info =
            vfio_irq_info { argsz: size_of::<vfio_irq_info>() as u32, index, ..Default::default() };
        // SAFETY: the structure says how long it is.
        let result = unsafe { ioctl_with_mut_ref(&self.device, DEVICE_GET_IRQ_INFO(), &mut info) };
        if result == 0 && info.flags & VFIO_IRQ_INFO_EVENTFD != 0 { info.count } else { 0 }
    }

    /// Connects the first interrupts of kind `index` to eventfds.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn set_interrupts(&self, index: u32, events: &[RawFd]) -> io::Result<()> {
        let words = [
            20 + 4 * events.len() as u32,
            VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER,
            index,
            0,
            events.len() as u32,
        ];
        let words: Vec<u32> = words.into_iter().chain(events.iter().map(|fd| *fd as u32)).collect();
        // SAFETY: the words say how many they are.
        check(unsafe { ioctl_with_ptr(&self.device, DEVICE_SET_IRQS(), words.as_ptr()) }).map(drop)
    }

    /// Capabilities of the IOMMU.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn iommu(&self) -> io::Result<IommuInfo> {
        let mut info = vec![0u8; size_of::<vfio_iommu_type1_info>()];
        loop {
            let len = info.len() as u32;
            info[..4].copy_from_slice(&len.to_le_bytes());
            // SAFETY: the buffer says how long it is.
            check(unsafe { ioctl_with_ptr(&self.container, IOMMU_GET_INFO(), info.as_mut_ptr()) })?;
            let needed = u32_at(&info, 0).unwrap_or(0) as usize;
            if needed <= info.len() || needed > MAX_INFO {
                return Ok(iommu_info(&info));
            }
            info = vec![0; needed];
        }
    }

    /// Maps memory into the function's address space, for reading and writing.
    ///
    /// # Errors
    /// When the range is not this process's memory, or must not be pinned (`RLIMIT_MEMLOCK`).
    pub fn map(&self, region: Region) -> io::Result<()> {
        let map = vfio_iommu_type1_dma_map {
            argsz: size_of::<vfio_iommu_type1_dma_map>() as u32,
            flags: VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE,
            vaddr: region.memory.addr as u64,
            iova: region.guest_addr,
            size: region.memory.len as u64,
        };
        // SAFETY: the structure says how long it is. The function writes to the memory only for
        // requests.
        check(unsafe { ioctl_with_ref(&self.container, IOMMU_MAP_DMA(), &map) }).map(drop)
    }

    /// Removes memory from the function's address space.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn unmap(&self, region: Region) -> io::Result<()> {
        let mut unmap = vfio_iommu_type1_dma_unmap {
            argsz: size_of::<vfio_iommu_type1_dma_unmap>() as u32,
            iova: region.guest_addr,
            size: region.memory.len as u64,
            ..Default::default()
        };
        // SAFETY: the structure says how long it is.
        check(unsafe { ioctl_with_mut_ref(&self.container, IOMMU_UNMAP_DMA(), &mut unmap) }).map(drop)
    }
}

/// Adds a group to a container and sets the container's IOMMU.
fn join(group: &File, container: &File) -> Result<(), Failure> {
    let mut status = vfio_group_status { argsz: size_of::<vfio_group_status>() as u32, flags: 0 };
    // SAFETY: the structure says how long it is.
    check(unsafe { ioctl_with_mut_ref(group, GROUP_GET_STATUS(), &mut status) })?;
    if status.flags & VFIO_GROUP_FLAGS_VIABLE == 0 {
        return Err("the function's IOMMU group contains functions bound to other drivers".into());
    }
    let fd: RawFd = container.as_raw_fd();
    // SAFETY: the number lives through the call.
    check(unsafe { ioctl_with_ref(group, GROUP_SET_CONTAINER(), &fd) })?;
    // SAFETY: numbers only.
    check(unsafe { ioctl_with_val(container, SET_IOMMU(), VFIO_TYPE1v2_IOMMU.into()) })?;
    Ok(())
}

fn open(path: &str) -> Result<File, Failure> {
    let file = OpenOptions::new().read(true).write(true).open(path);
    file.map_err(|source| Tried { what: format!("cannot open {path}"), source }.into())
}

fn check(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Decodes a `vfio_iommu_type1_info` with its capabilities.
fn iommu_info(info: &[u8]) -> IommuInfo {
    let flags = u32_at(info, 4).unwrap_or(0);
    let pages = if flags & VFIO_IOMMU_INFO_PGSIZES != 0 { u64_at(info, 8).unwrap_or(0) } else { 0 };
    let smallest = if pages == 0 { 0 } else { 1 << pages.trailing_zeros() };
    let mut addresses = vec![0..=*INTERRUPTS.start() - 1, *INTERRUPTS.end() + 1..=LAST_ADDRESS];
    let mut max_mappings = MAX_MAPPINGS;
    let has_capabilities = flags & VFIO_IOMMU_INFO_CAPS != 0;
    for (id, at) in capabilities(info, 16).take_while(|_| has_capabilities) {
        match id.into() {
            VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE => {
                let count = u32_at(info, at + 8).unwrap_or(0) as usize;
                let range = |i| {
                    let (start, end) = (u64_at(info, at + 16 + i * 16)?, u64_at(info, at + 24 + i * 16)?);
                    (start <= end).then_some(start..=end)
                };
                addresses = (0..count).map_while(range).collect();
            }
            VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL => {
                max_mappings = u32_at(info, at + 8).map_or(MAX_MAPPINGS, u64::from);
            }
            _ => {}
        }
    }
    IommuInfo { page: smallest.max(page_size()), addresses, max_mappings }
}

/// The capabilities of a description: ID and offset of each. `first` is the position of the first
/// offset.
fn capabilities(info: &[u8], first: usize) -> impl Iterator<Item = (u16, usize)> {
    let mut at = u32_at(info, first).unwrap_or(0) as usize;
    std::iter::from_fn(move || {
        let id = u32_at(info, at).filter(|_| at != 0)? as u16;
        let found = at;
        let next = u32_at(info, at + 4)? as usize;
        // A link backwards could form a cycle.
        at = if next > at { next } else { 0 };
        Some((id, found))
    })
}

fn u32_at(info: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(info.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

fn u64_at(info: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(info.get(at..at.checked_add(8)?)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    fn with_ranges() -> Vec<u8> {
        words(&[
            // argsz, flags, page sizes 4 KiB and 2 MiB, first capability, padding
            72,
            3,
            0x20_1000,
            0,
            24,
            0,
            // mappings left
            3 | 1 << 16,
            36,
            1000,
            // two ranges
            1 | 1 << 16,
            0,
            2,
            0,
            0,
            0,
            0xfedf_ffff,
            0,
            0xfef0_0000,
            0,
            0xffff_ffff,
            0x7f,
        ])
    }

    #[test]
    fn the_description_of_an_iommu_is_decoded() {
        let info = iommu_info(&with_ranges());
        assert_eq!((info.page, info.max_mappings), (4096, 1000));
        assert_eq!(info.addresses, [0..=0xfedf_ffff, 0xfef0_0000..=(1 << 39) - 1]);
    }

    #[test]
    fn an_iommu_that_says_nothing_gets_what_every_pc_has() {
        let info = iommu_info(&words(&[24, 0, 0, 0, 0, 0]));
        assert_eq!((info.page, info.max_mappings), (page_size(), MAX_MAPPINGS));
        assert_eq!(info.addresses, [0..=0xfedf_ffff, 0xfef0_0000..=LAST_ADDRESS]);
    }

    #[test]
    fn a_description_that_is_cut_or_goes_round_is_harmless() {
        let whole = with_ranges();
        for len in 0..whole.len() {
            let _ = iommu_info(&whole[..len]);
        }
        let mut circle = whole.clone();
        circle[28..32].copy_from_slice(&24u32.to_le_bytes());
        assert_eq!(iommu_info(&circle).max_mappings, 1000);
        let mut far = whole;
        far[16..20].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(iommu_info(&far).max_mappings, MAX_MAPPINGS);
    }

    #[test]
    fn a_path_that_is_no_function_of_vfio_is_an_error_that_says_why() {
        assert!(
            Vfio::open(Path::new("/sys/no-such-function"))
                .unwrap_err()
                .to_string()
                .contains("no PCI function")
        );
        let dir = tempfile::tempdir().unwrap();
        assert!(Vfio::open(dir.path()).unwrap_err().to_string().contains("no IOMMU"));
        std::os::unix::fs::symlink("../../kernel/iommu_groups/7", dir.path().join("iommu_group")).unwrap();
        assert!(Vfio::open(dir.path()).unwrap_err().to_string().contains("bound to no driver"));
        std::os::unix::fs::symlink("../../bus/pci/drivers/nvme", dir.path().join("driver")).unwrap();
        assert!(Vfio::open(dir.path()).unwrap_err().to_string().contains("bound to nvme, not to vfio-pci"));
    }
}
