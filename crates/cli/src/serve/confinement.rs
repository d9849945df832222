//! What a server keeps of what it could do, derived from what it serves; and how much it insists on giving up the rest.

use super::ServePlan;
use crate::error::Error;
use drivers::virtio_blk::TransportKind;
use drivers::{io_uring, nbd, nvme_tcp, nvme_uring, virtio_blk};
use graph::kinds::device::DeviceConfig;
use graph::kinds::raid::RaidConfig;
use graph::spec::Value as SpecValue;
use graph::{Base, DevicePlan};
use sandbox::{Access, Capability, InForce, Mode, Profile, Sandbox, User};
use serde_json::{Value, json};
use serving::control;
use serving::export::ExportPlan;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

/// How a server is confined.
#[derive(clap::Args, Debug)]
pub struct SandboxArgs {
    /// Give up what serving does not need: whatever the kernel lets go of (auto), all of it or fail (required), nothing
    #[arg(long, value_name = "auto|required|off", default_value = "auto", value_parser = crate::args::value::<ModeWord>)]
    sandbox: ModeWord,
    /// A file or directory that may be opened for writing while serving, beside what is served, such as for members of arrays
    #[arg(long, value_name = "PATH", value_parser = clap::value_parser!(PathBuf))]
    sandbox_path: Vec<PathBuf>,
    /// Become this user once the devices are open [default: whoever started the program]
    #[arg(long, value_name = "NAME|UID[:GROUP]")]
    user: Option<String>,
}

/// What `--sandbox` takes.
#[derive(Clone, Copy, Debug)]
struct ModeWord(Mode);

impl SpecValue for ModeWord {
    fn expected() -> String {
        Mode::ALL.map(Mode::name).join(", ")
    }

    fn parse(text: &str) -> Option<Self> {
        Mode::ALL.into_iter().find(|mode| mode.name() == text).map(ModeWord)
    }
}

/// The sandbox for what is to be served.
///
/// # Errors
/// When the user does not exist, or cannot serve that.
pub fn plan(plan: &ServePlan, args: &SandboxArgs, control: Option<&Path>) -> Result<Sandbox, Error> {
    let profile = profile(plan, &args.sandbox_path, control);
    let user = args.user.as_deref().map(User::find).transpose().map_err(usage)?;
    let is_other = user.as_ref().is_some_and(|user| !user.is_root());
    if let (true, Some(capability)) = (is_other, needed_to_the_end(&plan.exports)) {
        let user = args.user.as_deref().unwrap_or_default();
        return Err(Error::Usage(format!(
            "--user {user}: one of the exports needs {capability}, which only root has"
        )));
    }
    Ok(Sandbox::new(args.sandbox.0, profile, user))
}

fn usage(error: sandbox::Error) -> Error {
    Error::Usage(error.to_string())
}

/// A capability that the kernel asks for when it is told of requests, or of the end.
fn needed_to_the_end(exports: &[(ExportPlan, Vec<usize>)]) -> Option<Capability> {
    let mut profile = Profile::default();
    exports.iter().for_each(|(export, _)| export.config.keep(&mut profile));
    profile.capabilities().first().copied()
}

fn profile(plan: &ServePlan, more: &[PathBuf], control: Option<&Path>) -> Profile {
    let mut profile = Profile::default();
    let devices = plan.stack.devices();
    devices.iter().for_each(|device| device.visit(&mut |base| keep_base(&mut profile, base)));
    plan.exports.iter().for_each(|(export, _)| export.config.keep(&mut profile));
    if devices.iter().any(DevicePlan::has_array) {
        match control {
            Some(path) => keep_control(&mut profile, path),
            None => keep_control(&mut profile, &control::directory().join("any")),
        }
    }
    more.iter().for_each(|path| profile.allow(path, Access::ReadWrite));
    profile
}

fn keep_base(profile: &mut Profile, base: &Base) {
    match base {
        Base::Leaf(config) => keep_leaf(profile, config),
        Base::Join(..) => {}
        Base::Array(config, members) => keep_array(profile, config, members),
    }
}

fn keep_leaf(profile: &mut Profile, config: &DeviceConfig) {
    match config {
        DeviceConfig::IoUring(io_uring::Options { path, read_only, fixed_buffers, .. }) => {
            profile.allow(path, if *read_only { Access::Read } else { Access::ReadWrite });
            if *fixed_buffers {
                profile.lock_memory();
            }
        }
        DeviceConfig::NvmeUring(nvme_uring::Options { path, .. }) => {
            profile.allow(path, Access::ReadWrite);
            // The kernel asks for it with each command, but for those that it knows to be harmless.
            profile.keep(Capability::CAP_SYS_ADMIN);
        }
        DeviceConfig::Nbd(nbd::Options { address, .. }) => keep_server(profile, address),
        DeviceConfig::NvmeTcp(nvme_tcp::Options { address, .. }) => {
            keep_server(profile, address);
            keep_host_name(profile);
        }
        DeviceConfig::VirtioBlk(virtio_blk::Options { transport, path, .. }) => match transport {
            TransportKind::VhostUser => profile.connect_to(path),
            TransportKind::VhostVdpa => {
                profile.allow(path, Access::ReadWrite);
                profile.lock_memory();
            }
            TransportKind::VfioPci => {
                profile.allow("/dev/vfio/vfio", Access::ReadWrite);
                let group = path.join("iommu_group").read_link().ok();
                if let Some(number) = group.as_deref().and_then(Path::file_name) {
                    profile.allow(Path::new("/dev/vfio").join(number), Access::ReadWrite);
                }
                profile.lock_memory();
            }
        },
        DeviceConfig::Mem(_) | DeviceConfig::Null(_) => {}
    }
}

/// Keeps what it takes to connect, now or again.
fn keep_server(profile: &mut Profile, address: &nbd::Address) {
    match address {
        nbd::Address::Tcp { host, port } => {
            profile.connect(*port);
            if host.parse::<IpAddr>().is_err() {
                profile.resolve_names();
            }
        }
        nbd::Address::Unix(path) => profile.connect_to(path),
    }
}

/// Keeps what tells an NVMe host who it is.
fn keep_host_name(profile: &mut Profile) {
    for path in ["/etc/nvme", "/proc/sys/kernel/random"] {
        profile.allow(path, Access::Read);
    }
}

/// An array gets new members while it runs: drives, files beside the members that it has, exports of NBD servers.
fn keep_array(profile: &mut Profile, config: &RaidConfig, members: &[DevicePlan]) {
    let access = if config.read_only { Access::Read } else { Access::ReadWrite };
    if let Some(directory) = &config.scan {
        profile.allow(directory, access);
    }
    if config.read_only {
        return;
    }
    profile.allow("/dev", access);
    profile.connect_anywhere();
    profile.resolve_names();
    keep_host_name(profile);
    for member in members {
        member.visit(&mut |base| {
            if let Base::Leaf(DeviceConfig::IoUring(options)) = base {
                directory_of(&options.path)
                    .into_iter()
                    .for_each(|directory| profile.allow(directory, access));
            }
        });
    }
}

/// Where a member lies, or where it would if it were there. Not the root, beneath which everything does.
fn directory_of(member: &Path) -> Option<PathBuf> {
    let parent = |path: &Path| path.parent().map(Path::to_owned);
    let directory = match member.canonicalize() {
        Ok(path) => parent(&path),
        Err(_) => std::path::absolute(member).ok().as_deref().and_then(parent),
    };
    directory.filter(|directory| directory.parent().is_some())
}

fn keep_control(profile: &mut Profile, socket: &Path) {
    if let Some(directory) = socket.parent().filter(|directory| !directory.as_os_str().is_empty()) {
        profile.make_directory(directory);
    }
    profile.allow_socket(socket);
}

/// Says in the log what is in force.
pub fn announce(sandbox: &Sandbox) {
    match (sandbox.mode(), sandbox.in_force()) {
        (Mode::Off, _) => tracing::info!("sandbox: off"),
        (_, in_force) if in_force.is_complete() => tracing::info!("sandbox: {in_force}"),
        (_, in_force) => tracing::warn!("sandbox: {in_force}"),
    }
}

/// Says how many system calls were refused so far, if any were. Which ones, the server has said when it happened.
pub fn announce_refused() {
    let calls = sandbox::refused_calls();
    if calls > 0 {
        tracing::warn!(calls, "the sandbox has refused system calls");
    }
}

/// What is in force, for programs.
pub fn json(sandbox: &Sandbox) -> Value {
    let InForce { landlock, seccomp, no_new_privs, capabilities, user } = sandbox.in_force();
    json!({
        "mode": sandbox.mode().name(),
        "landlock": landlock.as_ref().ok(),
        "seccomp": seccomp.is_ok(),
        "no_new_privs": no_new_privs,
        "capabilities": capabilities,
        "user": user,
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::plan;
    use super::*;

    fn kept(args: &str) -> Profile {
        profile(&plan(args).unwrap(), &[], None)
    }

    #[test]
    fn a_capability_is_kept_by_what_the_kernel_asks_for_it() {
        let capabilities = |args: &str| kept(args).capabilities().to_vec();
        assert_eq!(capabilities("--device null --export vhost-user-blk:socket=s"), []);
        assert_eq!(capabilities("--device null --export nbd:listen=[::]:10809"), []);
        let admin = [Capability::CAP_SYS_ADMIN];
        assert_eq!(capabilities("--device null --export ublk:id=0"), admin);
        assert_eq!(capabilities("--device nvme_uring:path=/dev/ng0n1 --export nbd:socket=s"), admin);
        let bind = [Capability::CAP_NET_BIND_SERVICE];
        assert_eq!(capabilities("--device null --export nbd:listen=[::]:809"), bind);
    }

    #[test]
    fn what_is_served_can_be_opened_again_and_nothing_beside_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        for name in ["a", "b"] {
            std::fs::write(path(name), b"").unwrap();
        }
        let closes = |args: String, name: &str| kept(&args).permits().closes(&path(name)).is_some();
        let image = |more: &str| {
            format!("--device io_uring:path={}{more} --export nbd:socket=s", path("a").display())
        };
        assert!(!closes(image(""), "a"));
        assert!(closes(image(",readonly"), "a"));
        assert!(closes(image(""), "b"));
        let array =
            |more| format!("--device raid:members={}{more} --export nbd:socket=s", path("a").display());
        assert!(!closes(array(""), "b"), "a new member lies beside an old one");
        assert!(closes(array(",readonly"), "b"), "an array that is only read gets none");
    }

    #[test]
    fn a_member_that_is_missing_may_come_back() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().canonicalize().unwrap();
        assert_eq!(directory_of(&folder.join("missing")), Some(folder.clone()));
        std::os::unix::fs::symlink("/dev/null", folder.join("link")).unwrap();
        assert_eq!(directory_of(&folder.join("link")), Some("/dev".into()));
        assert_eq!(directory_of(Path::new("/missing")), None);
    }

    #[test]
    fn a_disk_of_the_kernel_is_not_served_by_anybody_but_root() {
        let args = |user: &str| SandboxArgs {
            sandbox: ModeWord(Mode::Auto),
            sandbox_path: Vec::new(),
            user: Some(user.into()),
        };
        let disk = plan("--device null --export ublk:id=0").unwrap();
        let refusal = super::plan(&disk, &args("54321:1"), None).unwrap_err().to_string();
        assert!(refusal.contains("--user 54321:1: one of the exports needs CAP_SYS_ADMIN"), "{refusal}");
        assert!(super::plan(&disk, &args("root"), None).is_ok());
        let other = plan("--device null --export nbd:socket=s").unwrap();
        assert!(super::plan(&other, &args("54321:1"), None).is_ok());
        let refusal = super::plan(&other, &args("nobody-at-all"), None).unwrap_err().to_string();
        assert_eq!(refusal, "user nobody-at-all: there is no such user");
    }
}
