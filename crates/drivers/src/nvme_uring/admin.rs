//! Admin commands through `ioctl(2)`: queries of a namespace before it is used. Source:
//! `include/uapi/linux/nvme_ioctl.h` of the kernel.

use nvme::command::{Command, cns, feature, log_page};
use nvme::{HealthLog, IDENTIFY_BYTES, IdentifyData, Status, health_log};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// `NVME_IOCTL_ID`: `_IO('N', 0x40)`.
const IOCTL_ID: libc::c_ulong = 0x4e40;
/// `NVME_IOCTL_ADMIN_CMD`: `_IOWR('N', 0x41, struct nvme_passthru_cmd)`.
const IOCTL_ADMIN_CMD: libc::c_ulong = 0xc048_4e41;

/// `struct nvme_passthru_cmd`, and `struct nvme_uring_cmd` except for the name of the last field.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct PassthroughCommand {
    opcode: u8,
    flags: u8,
    reserved: u16,
    nsid: u32,
    cdw2: u32,
    cdw3: u32,
    metadata: u64,
    addr: u64,
    metadata_len: u32,
    /// Bytes at `addr`; for a vectored command the number of `iovec`.
    data_len: u32,
    cdw10_to_15: [u32; 6],
    timeout_ms: u32,
    result: u32,
}

const _: () = assert!(size_of::<PassthroughCommand>() == 72);

impl PassthroughCommand {
    /// `command`, whose data is at `addr`.
    pub fn new(command: &Command, addr: u64, data_len: u32) -> PassthroughCommand {
        PassthroughCommand {
            opcode: command.opcode,
            nsid: command.nsid,
            addr,
            data_len,
            cdw10_to_15: command.cdw,
            ..PassthroughCommand::default()
        }
    }

    /// The command in a submission entry: 72 bytes; the rest of the 80 is unused.
    pub fn to_bytes(self) -> [u8; 80] {
        let mut bytes = [0; 80];
        // SAFETY: 72 bytes of plain numbers without padding, into 80.
        unsafe { bytes.as_mut_ptr().cast::<PassthroughCommand>().write_unaligned(self) };
        bytes
    }
}

/// The reason why an admin command failed.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// The kernel did not send it.
    #[error(transparent)]
    Kernel(#[from] io::Error),
    /// The controller refused it.
    #[error("the controller answers {0}")]
    Controller(Status),
}

/// The identifier of the namespace of `file`.
///
/// # Errors
/// `ENOTTY` when it is not an NVMe namespace.
pub(super) fn namespace_id(file: &File) -> io::Result<u32> {
    // SAFETY: no pointer is passed.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), IOCTL_ID) };
    u32::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// An identify structure of command set `csi`.
pub(super) fn identify(file: &File, nsid: u32, cns: u8, csi: u8) -> Result<Box<IdentifyData>, AdminError> {
    read(file, &Command::identify(nsid, cns, csi))
}

/// The identification descriptors of namespace `nsid`.
pub(super) fn descriptors(file: &File, nsid: u32) -> Result<Box<IdentifyData>, AdminError> {
    identify(file, nsid, cns::DESCRIPTORS, 0)
}

/// The log that lists the commands of command set `csi`.
pub(super) fn effects_log(file: &File, csi: u8) -> Result<Box<IdentifyData>, AdminError> {
    read(file, &Command::get_log_page(u32::MAX, log_page::COMMAND_EFFECTS, csi, IDENTIFY_BYTES as u32))
}

/// The health of the controller and all its namespaces. Also of a block node, whose driver takes
/// the same command. The kernel gives up after its own time: a shorter one resets the controller.
pub(crate) fn health_log(file: &File) -> Result<HealthLog, AdminError> {
    let command = Command::get_log_page(u32::MAX, log_page::SMART, 0, health_log::BYTES as u32);
    Ok(HealthLog::parse(&*read(file, &command)?))
}

/// Whether the volatile write cache is on.
pub(super) fn is_write_cache_on(file: &File) -> Result<bool, AdminError> {
    let command = Command::get_features(feature::VOLATILE_WRITE_CACHE);
    Ok(submit(file, PassthroughCommand::new(&command, 0, 0))? & 1 != 0)
}

/// The data that a command returns: `N` bytes, as it says itself.
fn read<const N: usize>(file: &File, command: &Command) -> Result<Box<[u8; N]>, AdminError> {
    let mut data = Box::new([0; N]);
    let addr = data.as_mut_ptr().expose_provenance() as u64;
    submit(file, PassthroughCommand::new(command, addr, N as u32))?;
    Ok(data)
}

/// Sends one command and waits for its completion. Returns dword 0 of the completion.
fn submit(file: &File, mut command: PassthroughCommand) -> Result<u32, AdminError> {
    // SAFETY: the command, and the bytes that it may name, live through the call.
    match unsafe { libc::ioctl(file.as_raw_fd(), IOCTL_ADMIN_CMD, &raw mut command) } {
        0 => Ok(command.result),
        status if status > 0 => Err(AdminError::Controller(Status::new(status as u16))),
        _ => Err(io::Error::last_os_error().into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_lies_where_the_kernel_reads_it() {
        let command = Command::write(0x0102_0304, 0x1112_1314_1516_1718, 8, true);
        let bytes = PassthroughCommand::new(&command, 0x2122_2324_2526_2728, 4096).to_bytes();
        assert_eq!(bytes[..8], [1, 0, 0, 0, 4, 3, 2, 1]);
        assert_eq!(bytes[24..32], 0x2122_2324_2526_2728u64.to_ne_bytes());
        assert_eq!(bytes[36..40], 4096u32.to_ne_bytes());
        assert_eq!(bytes[40..44], 0x1516_1718u32.to_ne_bytes());
        assert_eq!(bytes[44..48], 0x1112_1314u32.to_ne_bytes());
        assert_eq!(bytes[48..52], 0x4000_0007u32.to_ne_bytes());
        assert!(bytes[52..].iter().all(|b| *b == 0));
    }

    #[test]
    fn a_file_that_is_not_a_namespace_is_refused() {
        let null = File::open("/dev/null").unwrap();
        assert_eq!(namespace_id(&null).unwrap_err().raw_os_error(), Some(libc::ENOTTY));
        let error = is_write_cache_on(&null).unwrap_err();
        assert!(matches!(error, AdminError::Kernel(e) if e.raw_os_error() == Some(libc::ENOTTY)));
    }
}
