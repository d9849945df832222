//! Needs in a sandbox of arrays, of plans, and of devices that are made later. Each kind states its
//! own: [`DeviceConfig::keep`](super::device::DeviceConfig::keep).

use super::raid::RaidConfig;
use crate::{Base, DevicePlan};
use drivers_nvme_tcp::kind::keep_host_name;
use drivers_rbd::kind::keep_ceph;
use sandbox::{Access, Capability, Profile};
use spec::{Role, Spec};

/// Paths that the `openssl` library reads for a device that trusts the system's certificates.
const CERTIFICATES: [&str; 5] = [
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
    "/etc/pki/ca-trust/extracted",
    "/etc/pki/tls",
    "/usr/share/ca-certificates",
];

/// Adds what any device may need that is made later, but for paths outside `/dev`: those depend on
/// the device.
pub fn keep_later(profile: &mut Profile) {
    keep_newcomers(profile);
    CERTIFICATES.iter().for_each(|path| profile.allow(*path, Access::Read));
    profile.lock_memory();
    profile.read_keyrings();
    profile.keep(Capability::CAP_SYS_ADMIN); // nvme_uring
    // Devices may belong to others.
    profile.keep(Capability::CAP_DAC_OVERRIDE);
}

/// Keeps what drives and network devices need that are not known yet.
fn keep_newcomers(profile: &mut Profile) {
    profile.allow("/dev", Access::ReadWrite);
    profile.connect_anywhere();
    profile.resolve_names();
    keep_host_name(profile);
    keep_ceph(profile);
}

/// Adds the files that are read when `text` is parsed as a member: a path, or a specification with
/// keys in files. A text that is neither needs nothing.
pub fn keep_read(text: &str, profile: &mut Profile) {
    if let Ok(spec) = Spec::parse(Role::Device, super::device::KINDS, text) {
        spec.read_paths().for_each(|path| profile.allow(path, Access::Read));
    }
}

impl RaidConfig {
    /// Adds the needs of the array to those of its members. It gets new members while it runs:
    /// drives, files in the directories of its members, exports of NBD servers.
    pub fn keep(&self, members: &[DevicePlan], profile: &mut Profile) {
        let access = if self.read_only { Access::Read } else { Access::ReadWrite };
        if let Some(directory) = &self.scan {
            profile.allow(directory, access);
        }
        if self.read_only {
            return;
        }
        keep_newcomers(profile);
        for member in members {
            member.visit(&mut |base| {
                if let Base::Leaf(config) = base {
                    config.keep_beside(profile);
                }
            });
        }
    }
}

impl DevicePlan {
    /// Adds what the device needs, and what it stands on, down to the leaves. Layers need nothing.
    pub fn keep(&self, profile: &mut Profile) {
        self.visit(&mut |base| match base {
            Base::Leaf(config) => config.keep(profile),
            Base::Join(..) => {}
            Base::Array(config, members) => config.keep(members, profile),
        });
    }
}
