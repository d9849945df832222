//! The life of a disk: made or taken over, started, stopped, deleted.

use super::config::{Config, Recovery};
use super::control::{Control, DeviceInfo, Features, is_alive};
use super::takeover::{Found, Step, Wanted, next_step};
use super::uapi::{self, DevInfo, DeviceState, feature};
use super::{identity, open_node, params, try_open, users};
use crate::Error;
use block::Device;
use std::fs::File;
use std::io;
use std::time::{Duration, Instant};

/// How long to wait for the kernel to notice that a server died, and to let go of what it had.
const TAKEOVER_PATIENCE: Duration = Duration::from_secs(30);
/// Between two looks.
const STEP: Duration = Duration::from_millis(20);

/// A device that has no server yet: this process is about to be it.
#[derive(Clone)]
pub(super) struct Claim {
    pub(super) device: DeviceInfo,
    /// It was there: users wait for it, so it is never deleted because something fails.
    pub(super) is_recovered: bool,
    pub(super) features: Features,
}

impl Claim {
    /// Makes the device that `config` asks for, or finds it.
    pub(super) fn make(control: &mut Control, target: &dyn Device, config: &Config) -> Result<Claim, Error> {
        let features = control.features()?;
        require(features, feature::NEED_GET_DATA | feature::CMD_IOCTL_ENCODE)?;
        require(features, config.recovery.flags())?;
        let limits = target.limits();
        let max_io = params::max_io(&limits, config)?;
        let wanted = Wanted {
            begin: config.begin,
            params: params::of(&limits, config, max_io),
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
            flags: feature::NEED_GET_DATA
                | feature::CMD_IOCTL_ENCODE
                | config.recovery.flags()
                | quiesce(config.recovery, features),
            ublksrv_flags: wanted.mark,
            ..DevInfo::default()
        };
        control.add(&mut info)?;
        if config.recovery != Recovery::of_flags(info.flags) {
            let id = info.dev_id;
            tracing::warn!(
                id,
                "the disk of an ordinary user ends with its server: the kernel has no recovery for it"
            );
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

    /// Whether a server may leave the disk to the next one: its users notice a pause.
    pub(super) fn can_be_left(&self) -> bool {
        self.device.info.flags & feature::QUIESCE != 0
    }

    /// Opens the device for its queues. No other server can from now on, until the file is closed.
    pub(super) fn open(&self, control: &mut Control) -> Result<File, Error> {
        if self.is_recovered {
            start_recovery(control, self.id())?;
        }
        open_node(self.id())
    }

    /// Lets requests come: every queue has fetched.
    pub(super) fn start(&self, control: &mut Control) -> Result<(), Error> {
        if self.is_recovered { control.end_recovery(self.id()) } else { control.start(self.id()) }
    }

    /// What ends the commands of queues whose device could not be started. Their file is still open.
    pub(super) fn cancel(&self, control: &mut Control) {
        if !self.is_recovered {
            complain(control.stop(self.id()));
        }
    }

    /// Leaves things as they were before: nothing of a new device remains.
    pub(super) fn give_up(&self, control: &mut Control) {
        if !self.is_recovered {
            complain(control.remove(self.id()));
        }
    }
}

/// Ends a disk: its users write what they have first, and requests in flight are completed. The queues must still be
/// served, and end after it.
pub(super) fn stop(control: &mut Control, id: u32) {
    // Without a server (a core may have panicked) nobody could write anything, and asking would wait for ever.
    if let Ok(Some(device)) = control.device(id)
        && device.info.device_state() == DeviceState::Live
    {
        users::flush(id);
    }
    complain(control.stop(id));
}

/// Lets the requests of a disk that is about to be left wait. What its queues have by then, they complete.
pub(super) fn quiesce_for_successor(control: &mut Control, id: u32) {
    complain(control.quiesce(id, TAKEOVER_PATIENCE));
}

/// The bit for a disk whose server may leave it: no request fails because of that, so those in flight are kept.
fn quiesce(recovery: Recovery, features: Features) -> u64 {
    match recovery {
        Recovery::Reissue => features.bits() & feature::QUIESCE,
        Recovery::Plain | Recovery::Fail | Recovery::Off => 0,
    }
}

/// Logs what went wrong where nothing can be done about it.
pub(super) fn complain(result: Result<(), Error>) {
    if let Err(error) = result {
        tracing::warn!(%error, "a disk does not end as it should");
    }
}

/// Takes device `id` over; None: it is to be made.
fn take_over(control: &mut Control, id: u32, wanted: &Wanted) -> Result<Option<DeviceInfo>, Error> {
    let deadline = Instant::now() + TAKEOVER_PATIENCE;
    loop {
        let found = control.device(id)?.map(look_at);
        match (next_step(found.as_ref(), wanted), found) {
            (Step::Recover, Some(found)) => return Ok(Some(found.device)),
            (Step::Add | Step::Recover, _) => return Ok(None),
            (Step::Replace, _) => {
                tracing::info!(id, "a device that its server left behind is deleted");
                control.remove(id)?;
                return Ok(None);
            }
            (Step::Wait(_), _) if Instant::now() < deadline => std::thread::sleep(STEP),
            (Step::Wait(reason) | Step::Refuse(reason), _) => {
                let what = format!("ublk: device {id} cannot be had");
                return Err(Error::Ublk { what, source: io::Error::other(reason) });
            }
        }
    }
}

fn look_at(device: DeviceInfo) -> Found {
    let is_server_alive = is_alive(device.info.ublksrv_pid);
    let is_dead = device.info.device_state() == DeviceState::Dead;
    // Only the first to open it succeeds; closed again at once.
    let is_held = is_dead && try_open(device.id()).is_err();
    Found { device, is_server_alive, is_held }
}

/// Begins to take a device over. The kernel refuses while it still ends what the dead server had.
fn start_recovery(control: &mut Control, id: u32) -> Result<(), Error> {
    let deadline = Instant::now() + TAKEOVER_PATIENCE;
    loop {
        match control.start_recovery(id) {
            Ok(()) => return Ok(()),
            // A successor that died before it had fetched has begun already; the device waits as it is.
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
    Err(Error::Config(format!("this kernel's ublk driver has no {missing}")))
}

/// What a disk was made with, for the log.
pub(super) fn describe(claim: &Claim) -> String {
    let info = &claim.device.info;
    let verb = if claim.is_recovered { "taken over" } else { "made" };
    format!(
        "/dev/ublkb{}: {verb}, {} × {} requests, recovery {}",
        info.dev_id,
        info.nr_hw_queues,
        info.queue_depth,
        Recovery::of_flags(info.flags).name()
    )
}
