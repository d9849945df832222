//! The kinds of access that volumes support.
//!
//! One node writes, or several read. Several nodes may write to a block volume whose export has
//! reservations: programs of the nodes agree by them, and take a failed node's access away.

use crate::fault::{Fault, Result};
use crate::proto::VolumeCapability;
use crate::proto::volume_capability::AccessType;
use crate::proto::volume_capability::access_mode::Mode;
use serde::{Deserialize, Serialize};

/// File systems that nodes can make.
pub const FILE_SYSTEMS: [&str; 2] = ["ext4", "xfs"];

/// A kind of access, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    /// The nodes and their rights.
    pub mode: Mode,
    /// The file system and its mount options; nothing for a block volume.
    pub mount: Option<Mount>,
}

/// A file system on a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    /// One of [`FILE_SYSTEMS`].
    pub fs_type: String,
    /// Mount options, as for `mount -o`.
    pub flags: Vec<String>,
}

impl Access {
    /// Whether one node at most has access.
    pub fn is_single_node(&self) -> bool {
        matches!(
            self.mode,
            Mode::SingleNodeWriter
                | Mode::SingleNodeReaderOnly
                | Mode::SingleNodeSingleWriter
                | Mode::SingleNodeMultiWriter
        )
    }

    /// Whether several nodes write, which needs reservations.
    pub fn is_shared(&self) -> bool {
        self.mode == Mode::MultiNodeMultiWriter
    }

    /// Whether no node writes.
    pub fn is_read_only(&self) -> bool {
        matches!(self.mode, Mode::SingleNodeReaderOnly | Mode::MultiNodeReaderOnly)
    }

    /// Whether a block device is wanted, without a file system.
    pub fn is_block(&self) -> bool {
        self.mount.is_none()
    }
}

/// Checks a capability.
///
/// # Errors
/// `INVALID_ARGUMENT` when it is incomplete or not supported.
pub fn access(capability: Option<&VolumeCapability>) -> Result<Access> {
    let capability = capability.ok_or_else(|| Fault::invalid("volume_capability is missing"))?;
    let mode = capability.access_mode.as_ref().map_or(Mode::Unknown, |mode| mode.mode());
    let mount = match &capability.access_type {
        Some(AccessType::Block(_)) => None,
        Some(AccessType::Mount(mount)) => {
            let fs_type = match mount.fs_type.as_str() {
                "" => FILE_SYSTEMS[0],
                name => name,
            };
            if !FILE_SYSTEMS.contains(&fs_type) {
                let known = FILE_SYSTEMS.join(", ");
                return Err(Fault::invalid(format!("file system {fs_type:?} is none of {known}")));
            }
            Some(Mount { fs_type: fs_type.to_owned(), flags: mount.mount_flags.clone() })
        }
        None => return Err(Fault::invalid("volume_capability has no access_type: want block or mount")),
    };
    let writers = matches!(mode, Mode::MultiNodeMultiWriter | Mode::MultiNodeSingleWriter);
    if mode == Mode::Unknown {
        Err(Fault::invalid("volume_capability has no access_mode"))
    } else if writers && mount.is_some() {
        Err(Fault::invalid(format!(
            "access mode {} needs a block volume: a file system on several nodes would be damaged",
            mode.as_str_name()
        )))
    } else {
        Ok(Access { mode, mount })
    }
}

/// Refuses the access that direct volumes of Kata do not support: one pod has such a volume, and
/// its guest mounts ext4.
///
/// # Errors
/// `INVALID_ARGUMENT` that names the value.
pub fn check_is_direct(access: &Access) -> Result<()> {
    let wrong = |text: String| Err(Fault::invalid(format!("node-backend=kata: {text}")));
    match &access.mount {
        None => wrong("a block volume cannot be a direct volume of Kata: want a file system".into()),
        Some(mount) if mount.fs_type != FILE_SYSTEMS[0] => {
            wrong(format!("file system {}: Kata mounts {} only", mount.fs_type, FILE_SYSTEMS[0]))
        }
        Some(_) if access.mode != Mode::SingleNodeSingleWriter => wrong(format!(
            "access mode {}: want {} (ReadWriteOncePod)",
            access.mode.as_str_name(),
            Mode::SingleNodeSingleWriter.as_str_name()
        )),
        Some(_) => Ok(()),
    }
}

/// Checks the capabilities of a call, of which there must be one.
///
/// # Errors
/// As [`access`].
pub fn all(capabilities: &[VolumeCapability]) -> Result<Vec<Access>> {
    if capabilities.is_empty() {
        return Err(Fault::invalid("volume_capabilities are missing"));
    }
    capabilities.iter().map(|capability| access(Some(capability))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::volume_capability::{AccessMode, BlockVolume, MountVolume};

    fn capability(mode: Mode, access: AccessType) -> VolumeCapability {
        let access_mode = Some(AccessMode { mode: mode as i32 });
        VolumeCapability { access_mode, access_type: Some(access) }
    }

    fn mount(fs_type: &str) -> AccessType {
        AccessType::Mount(MountVolume { fs_type: fs_type.into(), ..MountVolume::default() })
    }

    #[test]
    fn several_nodes_write_to_block_volumes_only() {
        let block = capability(Mode::MultiNodeMultiWriter, AccessType::Block(BlockVolume {}));
        let several = access(Some(&block)).unwrap();
        assert!(several.is_shared() && !several.is_single_node());
        let fault = access(Some(&capability(Mode::MultiNodeMultiWriter, mount("ext4")))).unwrap_err();
        assert!(fault.message.contains("MULTI_NODE_MULTI_WRITER"), "{fault}");
        let readers = access(Some(&capability(Mode::MultiNodeReaderOnly, mount("xfs")))).unwrap();
        assert!(readers.is_read_only() && !readers.is_single_node() && !readers.is_shared());
    }

    #[test]
    fn incomplete_or_unknown_capabilities_are_refused_by_name() {
        assert!(access(None).unwrap_err().message.contains("volume_capability"));
        assert!(all(&[]).unwrap_err().message.contains("volume_capabilities"));
        let fault = access(Some(&capability(Mode::SingleNodeWriter, mount("ntfs")))).unwrap_err();
        assert!(fault.message.contains("\"ntfs\""), "{fault}");
        assert!(access(Some(&capability(Mode::Unknown, mount("")))).is_err());
        let none = VolumeCapability { access_type: None, access_mode: Some(AccessMode { mode: 1 }) };
        assert!(access(Some(&none)).is_err());
        let later =
            VolumeCapability { access_type: Some(mount("")), access_mode: Some(AccessMode { mode: 99 }) };
        assert!(access(Some(&later)).is_err());
    }

    #[test]
    fn a_direct_volume_has_one_pod_and_ext4() {
        let check = |mode, kind| check_is_direct(&access(Some(&capability(mode, kind))).unwrap());
        assert_eq!(check(Mode::SingleNodeSingleWriter, mount("")), Ok(()));
        let block = AccessType::Block(BlockVolume {});
        for (mode, kind, named) in [
            (Mode::SingleNodeWriter, mount(""), "SINGLE_NODE_WRITER"),
            (Mode::SingleNodeMultiWriter, mount(""), "SINGLE_NODE_MULTI_WRITER"),
            (Mode::SingleNodeReaderOnly, mount(""), "SINGLE_NODE_READER_ONLY"),
            (Mode::MultiNodeReaderOnly, mount(""), "MULTI_NODE_READER_ONLY"),
            (Mode::SingleNodeSingleWriter, mount("xfs"), "xfs"),
            (Mode::SingleNodeSingleWriter, block, "block volume"),
        ] {
            let fault = check(mode, kind).unwrap_err();
            assert_eq!(fault.code, tonic::Code::InvalidArgument);
            assert!(fault.message.contains(named), "{fault}");
        }
    }

    #[test]
    fn the_default_file_system_is_ext4() {
        let access = access(Some(&capability(Mode::SingleNodeWriter, mount("")))).unwrap();
        assert_eq!(access.mount.unwrap().fs_type, "ext4");
    }
}
