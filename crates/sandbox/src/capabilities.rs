//! Capabilities: dropped, except those that the profile keeps or its paths need.
//!
//! Root may open files of other users only with `CAP_DAC_OVERRIDE`. A trial shows whether a server
//! needs it: access to each path of the profile is checked without any effective capability.

use crate::Error;
use crate::access::Access;
use crate::profile::{Profile, directory_of, is_abstract};
pub use caps::Capability;
use caps::{CapSet, CapsHashSet};
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};
use nix::unistd::{AccessFlags, faccessat, geteuid};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The sticky bit of a directory's mode: only a file's owner may remove it.
const STICKY: u32 = 0o1000;

/// Drops the capabilities that the profile does not need, for the calling thread and its children.
///
/// # Errors
/// When the kernel refuses.
pub(crate) fn keep(profile: &Profile) -> Result<(), Error> {
    let has = caps::read(None, CapSet::Permitted)?;
    if has.is_empty() {
        return Ok(());
    }
    let mut kept: CapsHashSet = profile.capabilities.iter().copied().collect();
    if profile.locks_memory && !raise_locked_memory() {
        kept.insert(Capability::CAP_IPC_LOCK);
    }
    // The order matters: effective capabilities must be permitted.
    caps::clear(None, CapSet::Effective)?;
    kept.extend(needed_by_paths(profile));
    kept.retain(|capability| has.contains(capability));
    caps::clear(None, CapSet::Inheritable)?; // and with it the ambient ones
    caps::set(None, CapSet::Permitted, &kept)?;
    caps::set(None, CapSet::Effective, &kept)?;
    Ok(())
}

/// Returns the names of the calling thread's permitted capabilities, sorted.
///
/// # Errors
/// The kernel does not report them.
pub fn permitted() -> Result<Vec<String>, Error> {
    let mut names: Vec<String> =
        caps::read(None, CapSet::Permitted)?.iter().map(|capability| capability.to_string()).collect();
    names.sort();
    Ok(names)
}

/// Removes the limit of locked memory, without `CAP_IPC_LOCK`. Returns whether there is no limit.
pub(crate) fn raise_locked_memory() -> bool {
    let raised = setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY);
    raised.is_ok() || getrlimit(Resource::RLIMIT_MEMLOCK).is_ok_and(|(now, _)| now == RLIM_INFINITY)
}

/// Returns the capabilities that the paths need. The caller has no effective capability.
fn needed_by_paths(profile: &Profile) -> Vec<Capability> {
    let is_closed = profile.paths.iter().any(|(path, access)| is_closed(path, flags(path, *access)))
        || profile.sockets.iter().any(|socket| is_closed(socket, AccessFlags::W_OK))
        // The owner of a socket that does not exist yet is unknown.
        || profile
            .peers
            .iter()
            .filter(|socket| !is_abstract(socket))
            .any(|socket| !socket.exists() || is_closed(socket, AccessFlags::W_OK));
    let is_of_others = profile.sockets.iter().any(|socket| is_kept_by_its_owner(socket));
    let needed =
        [is_closed.then_some(Capability::CAP_DAC_OVERRIDE), is_of_others.then_some(Capability::CAP_FOWNER)];
    needed.into_iter().flatten().collect()
}

fn flags(path: &Path, access: Access) -> AccessFlags {
    match access {
        Access::ReadWrite | Access::Resize if !path.is_dir() => AccessFlags::R_OK | AccessFlags::W_OK,
        Access::Sockets | Access::Files => AccessFlags::W_OK | AccessFlags::X_OK,
        Access::Read | Access::ReadWrite | Access::Resize => AccessFlags::R_OK,
    }
}

fn is_closed(path: &Path, flags: AccessFlags) -> bool {
    // Not `eaccess`: it checks the user that started the program, and root has access to
    // everything.
    faccessat(AT_FDCWD, path, flags, AtFlags::AT_EACCESS) == Err(Errno::EACCES)
}

/// Returns whether the file belongs to another user and only its owner may remove it.
fn is_kept_by_its_owner(path: &Path) -> bool {
    let (Ok(file), Ok(directory)) = (path.symlink_metadata(), directory_of(path).metadata()) else {
        return false;
    };
    let me = geteuid().as_raw();
    directory.mode() & STICKY != 0 && file.uid() != me && directory.uid() != me
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, chown};

    const NOBODY: u32 = 65534;

    /// Runs on a thread of its own, which loses the capabilities. Returns `None` without privileges
    /// to drop.
    fn left(profile: &Profile) -> Option<Vec<String>> {
        let keep = || {
            keep(profile).unwrap();
            permitted().unwrap()
        };
        let is_root = caps::read(None, CapSet::Permitted).unwrap().contains(&Capability::CAP_DAC_OVERRIDE);
        is_root.then(|| std::thread::scope(|scope| scope.spawn(keep).join().unwrap()))
    }

    #[test]
    fn only_what_is_needed_is_kept() {
        let mut profile = Profile::default();
        let Some(none) = left(&profile) else { return };
        assert!(none.is_empty(), "{none:?}");
        profile.keep(Capability::CAP_SYS_ADMIN);
        assert_eq!(left(&profile).unwrap(), ["CAP_SYS_ADMIN"]);
    }

    #[test]
    fn memory_can_be_locked_by_one_way_or_the_other() {
        let mut profile = Profile::default();
        profile.lock_memory();
        let Some(left) = left(&profile) else { return };
        let (limit, _) = getrlimit(Resource::RLIMIT_MEMLOCK).unwrap();
        assert_eq!(left, if limit == RLIM_INFINITY { vec![] } else { vec!["CAP_IPC_LOCK"] });
    }

    #[test]
    fn a_file_of_another_user_keeps_the_capability_to_open_it() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("image");
        fs::write(&file, b"").unwrap();
        let mut profile = Profile::default();
        profile.allow(&file, Access::ReadWrite);
        let Some(none) = left(&profile) else { return };
        assert!(none.is_empty(), "{none:?}");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        chown(&file, Some(NOBODY), Some(NOBODY)).unwrap();
        assert_eq!(left(&profile).unwrap(), ["CAP_DAC_OVERRIDE"]);
    }

    #[test]
    fn a_socket_of_another_user_can_be_connected_to() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let mut profile = Profile::default();
        profile.connect_to(&path);
        let Some(later) = left(&profile) else { return };
        let mut without_a_file = Profile::default();
        without_a_file.connect_to("\0name");
        assert!(left(&without_a_file).unwrap().is_empty());
        assert_eq!(later, ["CAP_DAC_OVERRIDE"], "it may become any user's");
        let _socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert!(left(&profile).unwrap().is_empty());
        chown(&path, Some(NOBODY), Some(NOBODY)).unwrap();
        assert_eq!(left(&profile).unwrap(), ["CAP_DAC_OVERRIDE"]);
    }

    #[test]
    fn a_socket_that_another_user_has_left_can_be_removed() {
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o1777)).unwrap();
        let socket = directory.path().join("s");
        drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        let mut profile = Profile::default();
        profile.allow_socket(&socket);
        let Some(none) = left(&profile) else { return };
        assert!(none.is_empty(), "{none:?}");
        for path in [&socket, directory.path()] {
            chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
        }
        assert_eq!(left(&profile).unwrap(), ["CAP_DAC_OVERRIDE", "CAP_FOWNER"]);
    }
}
