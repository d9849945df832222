//! `/dev/ublk-control`: creates, starts, stops, deletes and lists ublk devices.
//!
//! Each command is one entry of a small io_uring, and the caller waits for its completion. Some
//! take long: starting a device reads its partition table through the server that starts it. So
//! none of this may run on a core.
//!
//! Without `CAP_SYS_ADMIN` a process has only unprivileged devices (`UBLK_F_UNPRIVILEGED_DEV`). A
//! process that may read and write the node `/dev/ublkcN` may control such a device. Commands to it
//! carry the node's path in front of their other data.

use super::uapi::{self, ControlCommand, DevInfo, DeviceState, Params, control, feature};
use super::{node, wait_for_node};
use exports::Error;
use io_uring::opcode::UringCmd80;
use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, squeue};
use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io;
use std::mem::forget;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

const PATH: &str = "/dev/ublk-control";
/// The kernel's list of devices (`ublkcN`).
const SYSFS_CLASS: &str = "/sys/class/ublk-char";
/// Timeout for deleting a device: its server, if it has one, and its users must close it.
const DELETE_PATIENCE: Duration = Duration::from_secs(20);
/// The same timeout for a server that ends: a mounted file system does not block its end.
const LEAVE_PATIENCE: Duration = Duration::from_secs(2);
/// Pause before the next try after the kernel lacked a resource.
const RETRY: Duration = Duration::from_millis(1);
/// A ring for one command at a time.
const ENTRIES: u32 = 4;
/// Space for the path of any node.
const PATH_BYTES: usize = 32;

/// The features of the kernel's driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features(pub(super) u64);

impl Features {
    /// The bits as the kernel reports them.
    pub fn bits(self) -> u64 {
        self.0
    }

    /// Names of the bits that are set; unknown bits by number.
    pub fn names(self) -> Vec<String> {
        let name = |bit: usize| {
            feature::NAMES.get(bit).map_or_else(|| format!("BIT_{bit}"), |name| (*name).to_owned())
        };
        (0..64).filter(|bit| self.0 >> bit & 1 != 0).map(name).collect()
    }

    pub(super) fn has(self, bits: u64) -> bool {
        self.0 & bits == bits
    }
}

/// A ublk device of this machine, of any server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    pub(super) info: DevInfo,
    pub(super) params: Params,
}

impl DeviceInfo {
    /// The number: `/dev/ublkbN`.
    pub fn id(&self) -> u32 {
        self.info.dev_id
    }

    /// `live`, `quiesced` (the server died and requests wait), `fail-io` (the server died and
    /// requests fail) or `dead` (no disk).
    pub fn state(&self) -> &'static str {
        self.info.device_state().name()
    }

    /// The current or last server process.
    pub fn pid(&self) -> Option<i32> {
        Some(self.info.ublksrv_pid).filter(|pid| *pid > 0)
    }

    /// Number of queues.
    pub fn queues(&self) -> u16 {
        self.info.nr_hw_queues
    }

    /// Maximum requests in flight in each queue.
    pub fn queue_size(&self) -> u16 {
        self.info.queue_depth
    }

    /// Longest read or write in bytes.
    pub fn max_io(&self) -> u32 {
        self.info.max_io_buf_bytes
    }

    /// Size in bytes.
    pub fn capacity(&self) -> u64 {
        self.params.capacity()
    }

    /// Logical block size in bytes.
    pub fn block_size(&self) -> u64 {
        1u64.checked_shl(self.params.basic.logical_bs_shift.into()).unwrap_or(0)
    }

    /// Whether the disk refuses writes.
    pub fn is_read_only(&self) -> bool {
        self.params.basic.attrs & uapi::attribute::READ_ONLY != 0
    }

    /// The user and the group that created it.
    pub fn owner(&self) -> (u32, u32) {
        (self.info.owner_uid, self.info.owner_gid)
    }

    /// Whether an unprivileged user created it, and may control it.
    pub fn is_unprivileged(&self) -> bool {
        self.info.flags & feature::UNPRIVILEGED_DEV != 0
    }

    /// Whether Freestone created it.
    pub fn is_ours(&self) -> bool {
        super::identity::is_ours(self.info.ublksrv_flags)
    }

    /// How requests are handled when the server dies: `reissue`, `plain`, `fail` or `off`.
    pub fn recovery(&self) -> &'static str {
        super::Recovery::of_flags(self.info.flags).name()
    }

    /// The features that it was created with.
    pub fn flags(&self) -> Features {
        Features(self.info.flags)
    }
}

/// The open control device.
pub struct Control {
    file: File,
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
    /// Identifier of the last command, to ignore completions of earlier ones that timed out.
    sequence: u64,
    /// Unprivileged devices, whose commands carry a path.
    unprivileged: BTreeSet<u32>,
}

/// The data of a command to an unprivileged device.
#[repr(C)]
struct WithPath<T> {
    path: [u8; PATH_BYTES],
    value: T,
}

impl Control {
    /// Opens the control device.
    ///
    /// # Errors
    /// When the module `ublk_drv` is not loaded, or without permission.
    pub fn open() -> Result<Control, Error> {
        let file = OpenOptions::new().read(true).write(true).open(PATH).map_err(|source| {
            let hint = match source.raw_os_error() {
                Some(libc::ENOENT) => " (is the module ublk_drv loaded?)",
                Some(libc::EACCES | libc::EPERM) => " (needs root, or a udev rule that grants access)",
                _ => "",
            };
            Error::Ublk { what: format!("cannot open {PATH}{hint}"), source }
        })?;
        let ring = IoUring::builder()
            .dontfork()
            .build(ENTRIES)
            .map_err(|source| Error::System { action: "set an io_uring up", source })?;
        Ok(Control { file, ring, sequence: 0, unprivileged: BTreeSet::new() })
    }

    /// The features of the driver.
    ///
    /// # Errors
    /// Before Linux 6.5, and without permission.
    pub fn features(&mut self) -> Result<Features, Error> {
        let mut bits = 0u64;
        self.run_with(control::GET_FEATURES, uapi::ANY_DEVICE, &mut bits)
            .map_err(|source| Error::Ublk { what: "cannot read the driver's features".into(), source })?;
        Ok(Features(bits))
    }

    /// Every ublk device that this process may query, by number.
    ///
    /// # Errors
    /// When a query fails. A device that disappears meanwhile is skipped.
    pub fn devices(&mut self) -> Result<Vec<DeviceInfo>, Error> {
        let mut devices = Vec::new();
        for id in ids()? {
            match self.device(id) {
                Err(Error::Ublk { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => {}
                found => devices.extend(found?),
            }
        }
        Ok(devices)
    }

    /// The device with number `id`, if it exists.
    ///
    /// # Errors
    /// When the query fails.
    pub fn device(&mut self, id: u32) -> Result<Option<DeviceInfo>, Error> {
        let mut info = DevInfo::default();
        self.unprivileged.remove(&id);
        let mut asked = self.run_with(control::GET_DEV_INFO, id, &mut info);
        if asked.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EINVAL)) {
            // A query of an unprivileged device must name its node.
            self.unprivileged.insert(id);
            asked = self.run_with(control::GET_DEV_INFO, id, &mut info);
        }
        match asked {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => return Ok(None),
            Err(source) => return Err(refused(id, "cannot be queried", source)),
        }
        let mut params = Params { len: Params::BYTES as u32, ..Params::default() };
        match self.run_with(control::GET_PARAMS, id, &mut params) {
            Ok(()) => Ok(Some(DeviceInfo { info, params })),
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
            Err(source) => Err(refused(id, "cannot be queried for its parameters", source)),
        }
    }

    /// Stops and deletes a device of any server. Cached data of a live one is written to it first.
    ///
    /// # Errors
    /// When the device does not exist, or its server or its users do not close it within 20 s.
    pub fn delete(&mut self, id: u32) -> Result<(), Error> {
        let Some(device) = self.device(id)? else {
            return Err(refused(id, "cannot be deleted", io::Error::from_raw_os_error(libc::ENODEV)));
        };
        if device.info.device_state() == DeviceState::Live && is_alive(device.info.ublksrv_pid) {
            super::users::flush(id);
        }
        self.stop(id)?;
        self.remove(id)
    }

    /// Creates a device and updates `info` with the kernel's values. Without the privilege for any
    /// device it creates an unprivileged one.
    pub(super) fn add(&mut self, info: &mut DevInfo) -> Result<(), Error> {
        let id = info.dev_id;
        self.unprivileged.remove(&id); // of an earlier device with this number
        let mut added = self.run_with(control::ADD_DEV, id, info);
        if added.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EPERM)) {
            info.flags = unprivileged(info.flags);
            added = self.run_with(control::ADD_DEV, id, info);
        }
        added.map_err(|source| {
            let name = if id == uapi::ANY_DEVICE { "a device".into() } else { format!("device {id}") };
            Error::Ublk { what: format!("ublk: {name} cannot be created"), source }
        })?;
        if info.flags & feature::UNPRIVILEGED_DEV != 0 {
            self.unprivileged.insert(info.dev_id);
            wait_for_node(info.dev_id)?;
        }
        Ok(())
    }

    /// Sets the parameters of a new device.
    pub(super) fn set_params(&mut self, id: u32, params: &Params) -> Result<(), Error> {
        let mut params = *params;
        self.run_with(control::SET_PARAMS, id, &mut params)
            .map_err(|source| refused(id, "refuses its parameters", source))
    }

    /// Starts the disk. Returns when the kernel has read its partition table.
    pub(super) fn start(&mut self, id: u32) -> Result<(), Error> {
        self.with_pid(control::START_DEV, id).map_err(|source| refused(id, "cannot be started", source))
    }

    /// Stops the disk; requests in flight complete first.
    pub(super) fn stop(&mut self, id: u32) -> Result<(), Error> {
        self.run(control::STOP_DEV, ControlCommand::new(id))
            .map_err(|source| refused(id, "cannot be stopped", source))
    }

    /// Deletes a stopped device and waits until its number is free.
    pub(super) fn remove(&mut self, id: u32) -> Result<(), Error> {
        self.remove_within(id, DELETE_PATIENCE).map_err(|source| {
            let hint = if is_late(&source) { " (its server or a user still has it open)" } else { "" };
            refused(id, &format!("cannot be deleted{hint}"), source)
        })
    }

    /// As [`remove`](Self::remove), by the device's own server. A device that still has users is
    /// deleted with the last of them.
    pub(super) fn leave(&mut self, id: u32) -> Result<(), Error> {
        match self.remove_within(id, LEAVE_PATIENCE) {
            Err(source) if is_late(&source) => {
                tracing::warn!(
                    id,
                    "disk stopped while in use: its number is free once its users have closed it"
                );
                Ok(())
            }
            result => result.map_err(|source| refused(id, "cannot be deleted", source)),
        }
    }

    fn remove_within(&mut self, id: u32, timeout: Duration) -> io::Result<()> {
        let (command, path) = self.addressed(ControlCommand::new(id));
        let result = self.execute(control::DEL_DEV, command, Some(timeout));
        if result.as_ref().is_err_and(is_late) {
            forget(path); // the kernel may still read it
        }
        result
    }

    /// Starts to take over a device whose server died.
    pub(super) fn start_recovery(&mut self, id: u32) -> io::Result<()> {
        self.run(control::START_USER_RECOVERY, ControlCommand::new(id))
    }

    /// Completes the takeover: every queue has fetched.
    pub(super) fn end_recovery(&mut self, id: u32) -> Result<(), Error> {
        self.with_pid(control::END_USER_RECOVERY, id)
            .map_err(|source| refused(id, "cannot be taken over", source))
    }

    /// Changes the size of the disk.
    pub(super) fn update_size(&mut self, id: u32, capacity: u64) -> Result<(), Error> {
        let command = ControlCommand { data: capacity / uapi::SECTOR_BYTES, ..ControlCommand::new(id) };
        self.run(control::UPDATE_SIZE, command).map_err(|source| refused(id, "refuses its new size", source))
    }

    /// Makes requests to a live disk wait for its next server.
    pub(super) fn quiesce(&mut self, id: u32, timeout: Duration) -> Result<(), Error> {
        let command = ControlCommand { data: timeout.as_millis() as u64, ..ControlCommand::new(id) };
        self.run(control::QUIESCE_DEV, command).map_err(|source| refused(id, "cannot be quiesced", source))
    }

    fn with_pid(&mut self, op: u32, id: u32) -> io::Result<()> {
        let command = ControlCommand { data: std::process::id().into(), ..ControlCommand::new(id) };
        self.run(op, command)
    }

    /// Executes a command without data.
    fn run(&mut self, op: u32, command: ControlCommand) -> io::Result<()> {
        let (command, _path) = self.addressed(command);
        self.execute(op, command, None)
    }

    /// Executes a command with `value`, which the kernel reads or writes.
    fn run_with<T: Copy>(&mut self, op: u32, id: u32, value: &mut T) -> io::Result<()> {
        if !self.unprivileged.contains(&id) {
            return self.execute(op, with_memory(ControlCommand::new(id), value), None);
        }
        let mut both = WithPath { path: path_of(id), value: *value };
        let command = with_memory(ControlCommand::new(id), &mut both);
        let result = self.execute(op, ControlCommand { dev_path_len: PATH_BYTES as u16, ..command }, None);
        *value = both.value;
        result
    }

    /// Adds the node's path to a command if its device needs it. The path must live as long as the
    /// command.
    fn addressed(&self, command: ControlCommand) -> (ControlCommand, Option<Box<WithPath<()>>>) {
        if !self.unprivileged.contains(&command.dev_id) {
            return (command, None);
        }
        let mut path = Box::new(WithPath { path: path_of(command.dev_id), value: () });
        let command = with_memory(command, &mut *path);
        (ControlCommand { dev_path_len: PATH_BYTES as u16, ..command }, Some(path))
    }

    /// Submits a command and waits for its completion, at most for `timeout`. The memory that
    /// `command` names must live until completion, even after a timeout.
    fn execute(&mut self, op: u32, command: ControlCommand, timeout: Option<Duration>) -> io::Result<()> {
        self.sequence += 1;
        let entry = UringCmd80::new(Fd(self.file.as_raw_fd()), op).cmd(command.to_bytes());
        let entry = entry.build().user_data(self.sequence);
        // SAFETY: `with_memory` names a variable of the caller, which waits here until the command
        // has ended, or never frees it.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.map_err(|_| io::Error::other("too many earlier commands timed out"))?;
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            while let Some(completion) = self.ring.completion().next() {
                if completion.user_data() == self.sequence {
                    let result = completion.result();
                    return if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(()) };
                }
            }
            self.wait(deadline)?;
        }
    }

    fn wait(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        let time;
        let mut args = SubmitArgs::new();
        if let Some(deadline) = deadline {
            time = Timespec::from(deadline.saturating_duration_since(Instant::now()));
            args = args.timespec(&time);
        }
        match self.ring.submitter().submit_with_args(1, &args) {
            Ok(_) => Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::ETIME) => {
                Err(io::Error::from_raw_os_error(libc::ETIMEDOUT))
            }
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::ENOMEM) => {
                    std::thread::sleep(RETRY);
                    Ok(())
                }
                // Either nothing was submitted, or waiting failed: the kernel may still write to
                // the command's memory.
                _ => panic!("io_uring_enter: {error}"),
            },
        }
    }
}

fn is_late(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ETIMEDOUT)
}

/// The path of device `id`'s node, as commands carry it.
fn path_of(id: u32) -> [u8; PATH_BYTES] {
    let mut path = [0; PATH_BYTES];
    let name = node(id);
    let name = name.as_os_str().as_encoded_bytes();
    path[..name.len()].copy_from_slice(name);
    path
}

/// A command with `value` as its data.
fn with_memory<T>(command: ControlCommand, value: &mut T) -> ControlCommand {
    let addr = std::ptr::from_mut(value).expose_provenance() as u64;
    ControlCommand { addr, len: size_of::<T>() as u16, ..command }
}

fn refused(id: u32, what: &str, source: io::Error) -> Error {
    Error::Ublk { what: format!("ublk: device {id} {what}"), source }
}

/// Numbers of all devices.
fn ids() -> Result<Vec<u32>, Error> {
    let failed = |source| Error::Ublk { what: format!("cannot read {SYSFS_CLASS}"), source };
    let mut ids = Vec::new();
    for entry in std::fs::read_dir(SYSFS_CLASS).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let id: Option<u32> =
            name.to_str().and_then(|name| name.strip_prefix("ublkc")).and_then(|id| id.parse().ok());
        ids.extend(id);
    }
    ids.sort_unstable();
    Ok(ids)
}

/// Whether a process with this number exists.
pub(super) fn is_alive(pid: i32) -> bool {
    // SAFETY: signal 0 only asks.
    pid > 0 && unsafe { libc::kill(pid, 0) == 0 || *libc::__errno_location() == libc::EPERM }
}

/// The flags of an unprivileged device, whose data only the kernel may copy.
fn unprivileged(flags: u64) -> u64 {
    flags & !(feature::AUTO_BUF_REG | feature::USER_COPY) | feature::NEED_GET_DATA | feature::UNPRIVILEGED_DEV
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_are_named_and_unknown_ones_counted() {
        assert_eq!(Features(1 << 2 | 1 << 7 | 1 << 40).names(), ["NEED_GET_DATA", "USER_COPY", "BIT_40"]);
        assert!(Features(0b110).has(0b10) && !Features(0b100).has(0b110));
    }

    #[test]
    fn a_process_is_alive_until_it_is_gone() {
        assert!(is_alive(std::process::id() as i32));
        assert!(!is_alive(-1) && !is_alive(0) && !is_alive(i32::MAX));
    }

    #[test]
    fn a_device_is_described_in_the_units_of_the_command_line() {
        let mut params = Params::default();
        params.basic.dev_sectors = 2048;
        params.basic.logical_bs_shift = 12;
        params.basic.attrs = uapi::attribute::READ_ONLY;
        let info = DevInfo { dev_id: 7, state: 2, ublksrv_pid: -1, flags: 0b11000, ..DevInfo::default() };
        let device = DeviceInfo { info, params };
        assert_eq!((device.id(), device.state(), device.pid()), (7, "quiesced", None));
        assert_eq!((device.capacity(), device.block_size(), device.is_read_only()), (1 << 20, 4096, true));
        assert_eq!((device.recovery(), device.is_ours()), ("reissue", false));
    }
}
