//! The sandbox of the daemon: rights that its configuration and state need, and rights for objects
//! that are added later.
//!
//! A process can give up more rights later, and regain none. So the daemon keeps `/dev`, its own
//! directories and those that `--sandbox-path` names, for devices and exports that are added while
//! it runs. A path elsewhere is refused by name before it is tried. Paths of devices and exports in
//! the state or the configuration file are kept in any directory.

use crate::api_error::{ApiError, Kind};
use crate::state::{ExportRecord, State};
use api::NewPortal;
use hosting::control;
use hosting::export::{self, ExportPlan};
use hosting::export::{PortalPlan, portal};
use sandbox::{Access, Mode, Permits, Profile, Sandbox, is_shared};
use stack::kinds::confinement as devices;
use stack::kinds::device::DeviceConfig;
use stack::kinds::device::disks::Tables;
use stack::kinds::member::member;
use stack::kinds::restart_log::RestartLogs;
use std::fs::File;
use std::path::{Path, PathBuf};

/// Where the kernel says how much processor time each thread has had.
const OWN_THREADS: &str = "/proc/self/task";
/// Where keys and certificates lie unless an option says otherwise.
const SETTINGS: &str = "/etc/freestone";

/// How the daemon is confined.
#[derive(Clone, Debug)]
pub struct Confinement {
    /// Whether it gives anything up.
    pub mode: Mode,
    /// Rights that it keeps in addition to the needs of its state.
    pub profile: Profile,
}

impl Confinement {
    /// A daemon that keeps what may be added later.
    pub fn new(mode: Mode) -> Confinement {
        let mut profile = Profile::default();
        devices::keep_later(&mut profile);
        export::keep_later(&mut profile);
        control::keep_any(&mut profile);
        profile.allow(SETTINGS, Access::Read);
        profile.allow(OWN_THREADS, Access::Read);
        Confinement { mode, profile }
    }

    /// Keeps a directory, or file, for devices, sockets, keys, journals and reservations.
    /// A path that does not exist stays closed: the kernel knows files, not names.
    pub fn keep_path(&mut self, path: &Path) {
        if self.mode != Mode::Off && !path.exists() {
            tracing::warn!(path = %path.display(), "sandbox path does not exist: it stays closed until the next start");
        }
        for access in [Access::ReadWrite, Access::Sockets, Access::Files] {
            self.profile.allow(path, access);
        }
    }
}

/// Adds the needs of a device, or member of an array: a path or a specification.
pub fn keep_device(text: &str, profile: &mut Profile) {
    keep_parsed(text, profile);
}

/// Adds the needs of a device, and returns it. A text that cannot be parsed is refused when it is
/// to be opened.
fn keep_parsed(text: &str, profile: &mut Profile) -> Option<Box<dyn DeviceConfig>> {
    devices::keep_read(text, profile);
    let config = member(text, true, false).ok()?;
    config.keep(profile);
    Some(config)
}

/// Adds the needs of an array's members, and the directories of those that are files, for new
/// members.
pub fn keep_members<'a>(members: impl IntoIterator<Item = &'a String>, profile: &mut Profile) {
    for text in members {
        if let Some(config) = keep_parsed(text, profile) {
            config.keep_beside(profile);
        }
    }
}

/// Adds the needs of an export.
pub fn keep_export(record: &ExportRecord, profile: &mut Profile) {
    let text = record.text();
    export::keep_settings(&text, profile);
    if let Ok(plan) = ExportPlan::parse(&text) {
        plan.config.keep(profile);
    }
}

/// A daemon in its sandbox.
pub(crate) struct Confined {
    sandbox: Sandbox,
    /// The kernel forgets a rule about a directory of `/proc` that no process has open.
    _own_threads: Option<File>,
    tables: Tables,
}

impl Confined {
    /// Gives up paths and capabilities, except those for the daemon's directories, the directories
    /// in `scan`, and the objects in `state`. The process has one thread.
    ///
    /// # Errors
    /// When the kernel refuses, or cannot do it and it is required.
    pub fn enter(
        confinement: Confinement,
        runtime_dir: &Path,
        state_dir: &Path,
        scan: &[PathBuf],
        state: &State,
    ) -> Result<Confined, sandbox::Error> {
        let Confinement { mode, mut profile } = confinement;
        profile.make_directory(runtime_dir);
        profile.allow(runtime_dir, Access::Sockets);
        RestartLogs::default().keep_all(&mut profile);
        profile.allow(state_dir, Access::Files);
        scan.iter().for_each(|directory| profile.allow(directory, Access::ReadWrite));
        keep_state(state, &mut profile);
        let own_threads = File::open(OWN_THREADS).ok();
        let tables = Tables::open();
        let mut sandbox = Sandbox::new(mode, profile, None);
        sandbox.confine()?;
        Ok(Confined { sandbox, _own_threads: own_threads, tables })
    }

    /// Gives up system calls, on all threads. Before anything foreign is read: members, tables,
    /// requests.
    ///
    /// # Errors
    /// When the kernel refuses and it is required.
    pub fn seal(&mut self) -> Result<(), sandbox::Error> {
        self.sandbox.seal()?;
        hosting::sandbox_log::announce(&self.sandbox);
        Ok(())
    }

    /// Names of the capabilities that are left.
    pub fn capabilities(&self) -> &[String] {
        &self.sandbox.in_force().capabilities
    }

    /// The kernel's tables of mounts and swap space, which were opened before.
    pub fn tables(&self) -> &Tables {
        &self.tables
    }

    /// The paths that members of arrays can be opened at.
    pub fn permits(&self) -> Permits {
        self.sandbox.permits()
    }

    /// Checks that what is to be added can be opened.
    ///
    /// # Errors
    /// With the path that is closed, and the option that opens it.
    pub fn check(&self, needs: &Profile) -> Result<(), ApiError> {
        let Some(closed) = self.sandbox.closes(needs) else { return Ok(()) };
        // A directory of its own is opened whole, so that a file may be replaced there.
        let own = closed.parent().filter(|parent| !closed.is_dir() && !is_shared(parent)).unwrap_or(closed);
        let (closed, own) = (closed.display(), own.display());
        let detail = format!(
            "{closed}: Permission denied: it lies outside the sandbox of freestoned; --sandbox-path {own}, or \
             sandbox_paths in the file of --config, opens it at the next start"
        );
        Err(ApiError::new(Kind::Unopened, detail))
    }
}

/// Adds the needs of a portal. One that cannot be parsed is refused when it is to be opened.
pub fn keep_portal(new: &NewPortal, profile: &mut Profile) {
    portal::keep_settings(new, profile);
    if let Ok(plan) = PortalPlan::parse(new) {
        plan.keep(profile);
    }
}

fn keep_state(state: &State, profile: &mut Profile) {
    state.devices.iter().for_each(|device| keep_device(&device.spec, profile));
    state.arrays.iter().for_each(|array| keep_members(&array.devices, profile));
    state.portals.iter().for_each(|portal| keep_portal(&portal.description(), profile));
    state.exports.iter().for_each(|export| keep_export(export, profile));
}
