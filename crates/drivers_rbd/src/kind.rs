//! The kind `rbd` of devices.

use super::{Options, RbdDevice, create, grow};
use block::{Device, DeviceError};
use drivers::kind::{DeviceConfig, RemoteImage, WithRole};
#[cfg(feature = "sandbox")]
use sandbox::{Access, Profile};
use spec::{ID, Key, Kind, READ_ONLY, Spec, SpecError, Switch, key};
#[cfg(feature = "sandbox")]
use std::path::PathBuf;
use std::sync::Arc;

/// The key of the configuration file.
pub const CONF: Key = key("conf", "PATH", "Ceph's configuration file [/etc/ceph/ceph.conf]");
/// The key of the user.
pub const USER: Key = key("user", "NAME", "the Ceph user, without \"client.\" [admin]");
/// The key of the timeout.
pub const TIMEOUT: Key =
    key("timeout-ms", "N", "timeout of connecting to the monitors, rounded up to seconds [10000]");

/// The kind.
pub static KIND: Kind = Kind {
    name: "rbd",
    about: "an image of a Ceph cluster; needs the package librbd1",
    keys: &[
        key("pool", "NAME", "the pool"),
        key("image", "NAME", "the image"),
        key("namespace", "NAME", "the namespace of the image in its pool [the default one]"),
        key("snapshot", "NAME", "the snapshot to read instead of the image"),
        CONF,
        USER,
        key("exclusive", "on|off", "hold the image's exclusive lock [on, if the image has this feature]"),
        key("force", "on|off", "break the exclusive lock of another client and blocklist this client [off]"),
        key("lock-file", "PATH", "file that lets a successor of a killed process take the lock at once"),
        key(
            "standby",
            "on|off",
            "wait while another host has the lock and take over when it ends; for exports over nvme-tcp [off]",
        ),
        key("cache", "on|off", "cache writes in this process until a flush [off]"),
        READ_ONLY,
        key("queue-depth", "N", "requests in flight on each core [128]"),
        TIMEOUT,
        ID,
    ],
};

/// The device of a specification.
///
/// # Errors
/// When a value is invalid, or values contradict each other.
pub fn parse(spec: &Spec) -> Result<Box<dyn DeviceConfig>, SpecError> {
    let defaults = Options::new(spec.require::<String>("pool")?, spec.require::<String>("image")?);
    let options = Options {
        namespace: spec.get_or("namespace", defaults.namespace)?,
        snapshot: spec.get("snapshot")?,
        conf: spec.get("conf")?,
        user: spec.get_or("user", defaults.user)?,
        exclusive: spec.get("exclusive")?.map(|Switch(is_on)| is_on),
        force: spec.is_on("force")?,
        lock_file: spec.get("lock-file")?,
        standby: spec.is_on("standby")?,
        cache: spec.is_on("cache")?,
        read_only: spec.is_on("readonly")?,
        queue_depth: spec.get_or("queue-depth", defaults.queue_depth)?,
        timeout_ms: spec.get_or("timeout-ms", defaults.timeout_ms)?,
        ..defaults
    };
    options.check().map_err(|why| spec.refuse(why))?;
    Ok(Box::new(options))
}

impl DeviceConfig for Options {
    fn open(&self) -> Result<Arc<dyn Device>, DeviceError> {
        Ok(Arc::new(RbdDevice::open(self)?))
    }

    fn open_with_role(&self) -> Result<WithRole, DeviceError> {
        let device = RbdDevice::open(self)?;
        let role = device.role().cloned();
        Ok((Arc::new(device), role))
    }

    /// Keeps Ceph's configuration and keyrings, and every TCP port: monitors name the ports of
    /// OSDs.
    #[cfg(feature = "sandbox")]
    fn keep(&self, profile: &mut Profile) {
        keep_ceph(profile);
        let conf = self.conf.clone().or_else(|| std::env::var_os("CEPH_CONF").map(PathBuf::from));
        if let Some(conf) = conf {
            profile.allow(conf, Access::Read);
        }
        if let Some(file) = &self.lock_file {
            profile.allow_file(file);
        }
        profile.connect_anywhere();
        profile.resolve_names();
    }

    /// A device that is only read takes no lock.
    fn make_read_only(&mut self) {
        self.read_only = true;
        (self.exclusive, self.force, self.lock_file, self.standby) = (None, false, None, false);
    }

    fn is_standby(&self) -> bool {
        self.standby
    }

    fn image(&self) -> Option<&dyn RemoteImage> {
        Some(self)
    }
}

impl RemoteImage for Options {
    fn create(&self, size: u64) -> Result<(), DeviceError> {
        create(self, size)
    }

    fn grow(&self, size: u64) -> Result<(), DeviceError> {
        grow(self, size)
    }
}

/// Keeps the directory where Ceph's clients have their configuration and keyrings.
#[cfg(feature = "sandbox")]
pub fn keep_ceph(profile: &mut Profile) {
    drivers::kind::keep_settings(profile, "/etc/ceph");
}

#[cfg(test)]
mod tests {
    use super::*;
    use spec::Role;

    fn parsed(text: &str) -> Result<Box<dyn DeviceConfig>, SpecError> {
        parse(&Spec::parse(Role::Device, &[&KIND], text)?)
    }

    fn options(text: &str) -> Options {
        parsed(text).unwrap().options::<Options>().expect("options of an image").clone()
    }

    #[test]
    fn a_specification_has_all_options() {
        assert_eq!(options("rbd:pool=p,image=i"), Options::new("p", "i"));
        let all = "rbd:pool=p,image=i,namespace=n,conf=/etc/ceph/b.conf,user=vm,exclusive=on,force=on,lock-file=f,\
                   cache=on,queue-depth=8,timeout-ms=500,id=d";
        let expected = Options {
            namespace: "n".into(),
            conf: Some("/etc/ceph/b.conf".into()),
            user: "vm".into(),
            exclusive: Some(true),
            force: true,
            lock_file: Some("f".into()),
            cache: true,
            queue_depth: 8,
            timeout_ms: 500,
            ..Options::new("p", "i")
        };
        assert_eq!(options(all), expected);
        let snapshot = options("rbd:pool=p,image=i,snapshot=s,readonly=on");
        assert_eq!((snapshot.name().as_str(), snapshot.read_only), ("rbd:p/i@s", true));
        let mut read = options("rbd:pool=p,image=i,exclusive=on,force=on,lock-file=f");
        read.make_read_only();
        assert_eq!(
            (read.check(), read.read_only),
            (Ok(()), true),
            "a device that is only read takes no lock"
        );
        assert!(parsed("rbd:pool=p,image=i,standby=on").unwrap().is_standby());
    }

    #[test]
    fn an_invalid_specification_is_refused_by_its_value() {
        let refused = [
            ("rbd:pool=p", "image=NAME is missing"),
            ("rbd:pool=p,image=a/b", "image=a/b: at most 4096 bytes without / and @"),
            ("rbd:pool=p,image=i,cache=maybe", "cache=maybe: expected on or off"),
            ("rbd:pool=p,image=i,queue-depth=0", "queue-depth=0: 1 to 4096"),
            (
                "rbd:pool=p,image=i,force=on,exclusive=off",
                "force=on: a read-only image, or one with exclusive=off, has no lock",
            ),
            ("rbd:pool=p,image=i,snapshot=s,exclusive=on", "exclusive=on: a read-only image"),
        ];
        for (text, reason) in refused {
            let error = parsed(text).unwrap_err().to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
