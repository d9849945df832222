//! The life cycle of a disk: created or taken over, started, stopped, deleted.

use super::config::{Config, DataPath, Recovery};
use super::control::{Control, DeviceInfo, Features, is_alive};
use super::takeover::{Found, Step, Wanted, next_step};
use super::uapi::{self, DevInfo, DeviceState, feature};
use super::{identity, open_node, params, try_open, users};
use block::Device;
use exports::Error;
use std::fs::File;
use std::io;
use std::time::{Duration, Instant};

/// Timeout for the kernel to notice that a server died, and to release its resources.
const TAKEOVER_PATIENCE: Duration = Duration::from_secs(30);
/// Poll interval.
const STEP: Duration = Duration::from_millis(20);

/// A device without a server, which this process is about to serve.
#[derive(Clone)]
pub(super) struct Claim {
    pub(super) device: DeviceInfo,
    /// Whether the device existed before: it has users, so an error must not delete it.
    pub(super) is_recovered: bool,
    pub(super) features: Features,
}

impl Claim {
    /// Creates the device that `config` describes, or finds it.
    pub(super) fn make(control: &mut Control, target: &dyn Device, config: &Config) -> Result<Claim, Error> {
        let features = control.features()?;
        require(features, feature::NEED_GET_DATA | feature::CMD_IOCTL_ENCODE)?;
        require(features, config.recovery.flags())?;
        let limits = target.limits();
        let max_io = params::max_io(&limits, config)?;
        let can_register = features.has(feature::AUTO_BUF_REG | feature::USER_COPY);
        let is_registered = config.zero_copy && can_register && target.takes_registered();
        let wanted = Wanted {
            begin: config.begin,
            params: params::of(&limits, config, max_io, is_registered),
            mark: identity::mark(target.name()),
            name: target.name().to_owned(),
        };
        if let Some(id) = config.id
            && let Some(device) = take_over(control, id, &wanted)?
        {
            return Ok(Claim { device, is_recovered: true, features });
        }
        let mut info = DevInfo {
            nr_hw_queues: config.num_queues,
            queue_depth: config.queue_size,
            max_io_buf_bytes: max_io,
            dev_id: config.id.unwrap_or(uapi::ANY_DEVICE),
            ublksrv_pid: -1,
            flags: feature::CMD_IOCTL_ENCODE
                | data_path(is_registered)
                | config.recovery.flags()
                | quiesce(config.recovery, features),
            ublksrv_flags: wanted.mark,
            ..DevInfo::default()
        };
        control.add(&mut info)?;
        if config.recovery != Recovery::of_flags(info.flags) {
            let id = info.dev_id;
            tracing::warn!(id, "unprivileged disk: no recovery, it ends with its server");
        }
        let claim =
            Claim { device: DeviceInfo { info, params: wanted.params }, is_recovered: false, features };
        if let Err(error) = control.set_params(claim.id(), &claim.device.params) {
            claim.give_up(control);
            return Err(error);
        }
        Ok(claim)
    }

    pub(super) fn id(&self) -> u32 {
        self.device.id()
    }

    /// How the disk's data reach `target`.
    pub(super) fn data_path(&self, target: &dyn Device, config: &Config) -> DataPath {
        if self.device.info.flags & feature::AUTO_BUF_REG == 0 {
            return DataPath::Copy;
        }
        let is_aligned = target.limits().memory_alignment <= params::memory_alignment(&self.device.params);
        match config.zero_copy && is_aligned && target.takes_registered() {
            true => DataPath::Registered,
            false => DataPath::UserCopy,
        }
    }

    /// Whether a server may leave the disk to the next one: its users only notice a pause.
    pub(super) fn can_be_left(&self) -> bool {
        self.device.info.flags & feature::QUIESCE != 0
    }

    /// Opens the device for its queues. No other server can open it until the file is closed.
    pub(super) fn open(&self, control: &mut Control) -> Result<File, Error> {
        if self.is_recovered {
            start_recovery(control, self.id())?;
        }
        open_node(self.id())
    }

    /// Starts the disk: every queue has fetched.
    pub(super) fn start(&self, control: &mut Control) -> Result<(), Error> {
        if self.is_recovered { control.end_recovery(self.id()) } else { control.start(self.id()) }
    }

    /// Cancels the commands of queues whose device could not be started. Their file is still open.
    pub(super) fn cancel(&self, control: &mut Control) {
        if !self.is_recovered {
            complain(control.stop(self.id()));
        }
    }

    /// Restores the state before: a new device is deleted.
    pub(super) fn give_up(&self, control: &mut Control) {
        if !self.is_recovered {
            complain(control.remove(self.id()));
        }
    }
}

/// Stops a disk: its users write their cached data first, and requests in flight are completed. The
/// queues must be served until then, and end afterwards.
pub(super) fn stop(control: &mut Control, id: u32) {
    // Without a server (a core may have panicked) cached data cannot be written, and flushing would
    // block forever.
    if let Ok(Some(device)) = control.device(id)
        && device.info.device_state() == DeviceState::Live
    {
        users::flush(id);
    }
    complain(control.stop(id));
}

/// Makes the requests of a disk wait before it is left. Queues complete the requests that they have
/// by then.
pub(super) fn quiesce_for_successor(control: &mut Control, id: u32) {
    complain(control.quiesce(id, TAKEOVER_PATIENCE));
}

/// The flag for a disk whose server may leave it. Only for a recovery mode that fails no request
/// because of it.
fn quiesce(recovery: Recovery, features: Features) -> u64 {
    match recovery {
        Recovery::Reissue => features.bits() & feature::QUIESCE,
        Recovery::Plain | Recovery::Fail | Recovery::Off => 0,
    }
}

/// The flags of a new disk's way of data.
fn data_path(is_registered: bool) -> u64 {
    if is_registered { feature::AUTO_BUF_REG | feature::USER_COPY } else { feature::NEED_GET_DATA }
}

/// Logs an error that cannot be handled.
pub(super) fn complain(result: Result<(), Error>) {
    if let Err(error) = result {
        tracing::warn!(%error, "disk could not be stopped cleanly");
    }
}

/// Takes device `id` over. Returns `None` if it must be created.
fn take_over(control: &mut Control, id: u32, wanted: &Wanted) -> Result<Option<DeviceInfo>, Error> {
    let deadline = Instant::now() + TAKEOVER_PATIENCE;
    loop {
        let found = control.device(id)?.map(look_at);
        match (next_step(found.as_ref(), wanted), found) {
            (Step::Recover, Some(found)) => return Ok(Some(found.device)),
            (Step::Add | Step::Recover, _) => return Ok(None),
            (Step::Replace, _) => {
                tracing::info!(id, "deleting a device that its server left behind");
                control.remove(id)?;
                return Ok(None);
            }
            (Step::Wait(_), _) if Instant::now() < deadline => std::thread::sleep(STEP),
            (Step::Wait(reason) | Step::Refuse(reason), _) => {
                let what = format!("ublk: device {id} cannot be used");
                return Err(Error::Ublk { what, source: io::Error::other(reason) });
            }
        }
    }
}

fn look_at(device: DeviceInfo) -> Found {
    let is_server_alive = is_alive(device.info.ublksrv_pid);
    let is_dead = device.info.device_state() == DeviceState::Dead;
    // Only the first process can open it; the file is closed again at once.
    let is_held = is_dead && try_open(device.id()).is_err();
    Found { device, is_server_alive, is_held }
}

/// Starts a takeover. The kernel refuses while it still releases the resources of the dead server.
fn start_recovery(control: &mut Control, id: u32) -> Result<(), Error> {
    let deadline = Instant::now() + TAKEOVER_PATIENCE;
    loop {
        match control.start_recovery(id) {
            Ok(()) => return Ok(()),
            // A successor died before it had fetched and has started the takeover already; the
            // device waits.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) && Instant::now() < deadline => {
                std::thread::sleep(STEP);
            }
            Err(source) => {
                return Err(Error::Ublk { what: format!("ublk: device {id} cannot be taken over"), source });
            }
        }
    }
}

fn require(features: Features, bits: u64) -> Result<(), Error> {
    if features.has(bits) {
        return Ok(());
    }
    let missing = Features(bits & !features.bits()).names().join(" and ");
    Err(Error::Config(format!("the kernel's ublk driver does not support {missing}")))
}

/// The parameters of a disk, for the log.
pub(super) fn describe(claim: &Claim) -> String {
    let info = &claim.device.info;
    let verb = if claim.is_recovered { "taken over" } else { "created" };
    format!(
        "/dev/ublkb{}: {verb}, {} × {} requests, recovery {}",
        info.dev_id,
        info.nr_hw_queues,
        info.queue_depth,
        Recovery::of_flags(info.flags).name()
    )
}
