//! The sandbox of a server, derived from its devices and exports.

use super::ServePlan;
use crate::error::Error;
use hosting::control;
use hosting::export::ExportPlan;
use sandbox::{Access, Capability, InForce, Mode, Profile, Sandbox, User};
use serde_json::{Value, json};
use spec::Value as SpecValue;
use stack::DevicePlan;
use std::path::{Path, PathBuf};

/// How a server is confined.
#[derive(clap::Args, Debug)]
pub struct SandboxArgs {
    /// Drop unneeded privileges: as far as the kernel supports it (auto), all or fail (required),
    /// none (off)
    #[arg(long, value_name = "auto|required|off", default_value = "auto", value_parser = crate::parse::value::<ModeWord>)]
    sandbox: ModeWord,
    /// Further file or directory that may be opened for writing while serving, such as for members
    /// of arrays
    #[arg(long, value_name = "PATH", value_parser = clap::value_parser!(PathBuf))]
    sandbox_path: Vec<PathBuf>,
    /// Switch to this user after the devices are open [default: the user who started the program]
    #[arg(long, value_name = "NAME|UID[:GROUP]")]
    user: Option<String>,
}

/// The value of `--sandbox`.
#[derive(Clone, Copy, Debug)]
struct ModeWord(Mode);

impl SpecValue for ModeWord {
    fn expected() -> String {
        Mode::ALL.map(Mode::name).join(", ")
    }

    fn parse(text: &str) -> Option<Self> {
        Mode::parse(text).map(ModeWord)
    }
}

/// The sandbox for a plan.
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

/// The first capability that the exports need until they end, if any.
fn needed_to_the_end(exports: &[(ExportPlan, Vec<usize>)]) -> Option<Capability> {
    let mut profile = Profile::default();
    exports.iter().for_each(|(export, _)| export.config.keep(&mut profile));
    profile.capabilities().first().copied()
}

fn profile(plan: &ServePlan, more: &[PathBuf], control: Option<&Path>) -> Profile {
    let mut profile = Profile::default();
    let devices = plan.stack.devices();
    devices.iter().for_each(|device| device.keep(&mut profile));
    for (export, _) in &plan.exports {
        export.config.keep(&mut profile);
        hosting::export::keep_settings(&export.text, &mut profile);
    }
    if devices.iter().any(DevicePlan::has_array) {
        match control {
            Some(path) => control::keep(path, &mut profile),
            None => control::keep_any(&mut profile),
        }
    }
    more.iter().for_each(|path| profile.allow(path, Access::ReadWrite));
    profile
}

/// The parts in force, as JSON.
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
        assert_eq!(capabilities("--device virtio-blk-uring:path=/dev/vdac0 --export nbd:socket=s"), []);
        let bind = [Capability::CAP_NET_BIND_SERVICE];
        assert_eq!(capabilities("--device null --export nbd:listen=[::]:809"), bind);
    }

    #[test]
    fn only_served_devices_can_be_opened_again() {
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
    fn a_disk_of_the_kernel_is_served_by_root_alone() {
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
        assert_eq!(refusal, "user nobody-at-all: no such user");
    }
}
