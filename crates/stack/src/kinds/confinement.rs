//! Needs of each kind of device in a sandbox: paths, ports, capabilities, locked memory.

use super::device::DeviceConfig;
use super::qcow2;
use super::raid::RaidConfig;
use crate::spec::{Role, Spec};
use crate::{Base, DevicePlan};
use drivers::virtio_blk::TransportKind;
use drivers::{io_uring, nbd, nvme_tcp, nvme_uring, rbd, virtio_blk, virtio_blk_uring};
use sandbox::{Access, Capability, Profile};
use std::net::IpAddr;
use std::path::{Path, PathBuf};

impl DeviceConfig {
    /// Adds what the device needs while it is opened and used.
    pub fn keep(&self, profile: &mut Profile) {
        match self {
            DeviceConfig::IoUring(options) => keep_file(profile, options),
            DeviceConfig::NvmeUring(nvme_uring::Options { path, .. }) => {
                profile.allow(path, Access::ReadWrite);
                // The kernel asks for it with each command, but for those that it knows to be
                // harmless.
                profile.keep(Capability::CAP_SYS_ADMIN);
            }
            DeviceConfig::Nbd(nbd::Options { address, .. }) => keep_server(profile, address),
            DeviceConfig::NvmeTcp(nvme_tcp::Options { address, .. }) => {
                keep_server(profile, address);
                keep_host_name(profile);
            }
            DeviceConfig::Qcow2(options) => keep_image(profile, options),
            DeviceConfig::Rbd(options) => keep_rbd(profile, options),
            DeviceConfig::VirtioBlk(options) => keep_virtio_blk(profile, options),
            DeviceConfig::VirtioBlkUring(options) => keep_virtio_blk_uring(profile, options),
            DeviceConfig::Mem(_) | DeviceConfig::Null(_) => {}
        }
    }

    /// Adds the directory of a member that is a file, for new members in the same directory.
    pub fn keep_beside(&self, profile: &mut Profile) {
        if let DeviceConfig::IoUring(options) = self
            && let Some(directory) = directory_of(&options.path)
        {
            profile.allow(directory, Access::ReadWrite);
        }
    }
}

fn keep_file(profile: &mut Profile, options: &io_uring::Options) {
    let io_uring::Options { path, read_only, fixed_buffers, .. } = options;
    profile.allow(path, if *read_only { Access::Read } else { Access::ReadWrite });
    if *fixed_buffers {
        profile.lock_memory();
    }
}

fn keep_image(profile: &mut Profile, options: &qcow2::Options) {
    for file in [Some(&options.file), options.data.as_ref()].into_iter().flatten() {
        profile.allow(file, if options.is_writable() { Access::Resize } else { Access::Read });
    }
    if options.is_writable() {
        options.restart_logs.keep(&options.file, profile);
    }
    if options.follow {
        profile.allow(options.directory(), Access::Read);
    }
}

fn keep_virtio_blk_uring(profile: &mut Profile, options: &virtio_blk_uring::Options) {
    let virtio_blk_uring::Options { path, read_only, fixed_buffers, .. } = options;
    profile.allow(path, if *read_only { Access::Read } else { Access::ReadWrite });
    if *fixed_buffers {
        profile.lock_memory();
    }
}

fn keep_virtio_blk(profile: &mut Profile, options: &virtio_blk::Options) {
    let virtio_blk::Options { transport, path, .. } = options;
    match transport {
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
    }
}

/// Where Ceph's clients have their configuration and keyrings.
const CEPH: &str = "/etc/ceph";

/// Keeps Ceph's configuration and keyrings, and every TCP port: monitors name the ports of OSDs.
fn keep_rbd(profile: &mut Profile, options: &rbd::Options) {
    keep_settings(profile, CEPH);
    let conf = options.conf.clone().or_else(|| std::env::var_os("CEPH_CONF").map(PathBuf::from));
    if let Some(conf) = conf {
        profile.allow(conf, Access::Read);
    }
    if let Some(file) = &options.lock_file {
        profile.allow_file(file);
    }
    profile.connect_anywhere();
    profile.resolve_names();
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
    keep_settings(profile, CEPH);
}

/// Adds the files that are read when `text` is parsed as a member: a path, or a specification with
/// keys in files. A text that is neither needs nothing.
pub fn keep_read(text: &str, profile: &mut Profile) {
    if let Ok(spec) = Spec::parse(Role::Device, super::device::KINDS, text) {
        spec.read_paths().for_each(|path| profile.allow(path, Access::Read));
    }
}

/// Keeps what tells an NVMe host who it is.
fn keep_host_name(profile: &mut Profile) {
    keep_settings(profile, "/etc/nvme");
    profile.allow("/proc/sys/kernel/random", Access::Read);
}

/// Keeps a directory that a host need not have. A need of a missing one could not be satisfied.
fn keep_settings(profile: &mut Profile, directory: &str) {
    if Path::new(directory).exists() {
        profile.allow(directory, Access::Read);
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

/// The directory of a member, which need not exist. `None` for the root directory, which contains
/// every path.
fn directory_of(member: &Path) -> Option<PathBuf> {
    let parent = |path: &Path| path.parent().map(Path::to_owned);
    let directory = match member.canonicalize() {
        Ok(path) => parent(&path),
        Err(_) => std::path::absolute(member).ok().as_deref().and_then(parent),
    };
    directory.filter(|directory| directory.parent().is_some())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_that_is_missing_may_come_back() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().canonicalize().unwrap();
        assert_eq!(directory_of(&folder.join("missing")), Some(folder.clone()));
        std::os::unix::fs::symlink("/dev/null", folder.join("link")).unwrap();
        assert_eq!(directory_of(&folder.join("link")), Some("/dev".into()));
        assert_eq!(directory_of(Path::new("/missing")), None);
    }
}
