//! Paths and ports, restricted with Landlock.

use crate::Error;
use crate::access::{Access, rights};
use crate::profile::Profile;
use landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, LandlockStatus, NetPort, RestrictionStatus, Ruleset,
    RulesetAttr, RulesetCreatedAttr, RulesetStatus, Scope, path_beneath_rules,
};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

/// The newest interface that the rules use. An older kernel does not refuse accesses that it does
/// not know.
const NEWEST: ABI = ABI::V6;

/// Restricts the calling thread and its children to the profile's paths and ports. Returns the
/// version of Landlock's interface in force.
///
/// # Errors
/// The kernel lacks Landlock, or refuses.
pub(crate) fn restrict(profile: &Profile) -> Result<i32, Error> {
    let mut rules = Ruleset::default()
        .handle_access(AccessFs::from_all(NEWEST))?
        .scope(scopes(profile, std::env::var_os("NOTIFY_SOCKET").as_deref()))?;
    if profile.listen.is_some() {
        rules = rules.handle_access(AccessNet::BindTcp)?;
    }
    if profile.connect.is_some() {
        rules = rules.handle_access(AccessNet::ConnectTcp)?;
    }
    let mut rules =
        rules.create()?.add_rules(path_beneath_rules(&profile.background, rights(Access::Read)))?;
    for (path, access) in &profile.paths {
        let is_empty = !path.is_dir() && (rights(*access) & AccessFs::from_file(NEWEST)).is_empty();
        // The kernel refuses a rule without rights, such as to make sockets in a file.
        if !is_empty {
            rules = rules.add_rules(path_beneath_rules([path], rights(*access)))?;
        }
    }
    for port in profile.listen.iter().flatten() {
        rules = rules.add_rule(NetPort::new(*port, AccessNet::BindTcp))?;
    }
    for port in profile.connect.iter().flatten() {
        rules = rules.add_rule(NetPort::new(*port, AccessNet::ConnectTcp))?;
    }
    version(&rules.restrict_self()?).ok_or(Error::NoLandlock)
}

/// Returns the restrictions beyond paths and ports: signals to other processes, and abstract
/// sockets. Abstract sockets stay open if the profile connects to one, or the service manager
/// listens on one.
fn scopes(profile: &Profile, notify: Option<&OsStr>) -> BitFlags<Scope> {
    let notifies = notify.is_some_and(|socket| socket.as_bytes().starts_with(b"@"));
    if notifies || profile.has_abstract_peers() { Scope::Signal.into() } else { Scope::from_all(NEWEST) }
}

fn version(status: &RestrictionStatus) -> Option<i32> {
    match (&status.ruleset, &status.landlock) {
        (RulesetStatus::NotEnforced, _)
        | (_, LandlockStatus::NotEnabled | LandlockStatus::NotImplemented) => None,
        (_, LandlockStatus::Available { effective_abi, kernel_abi }) => {
            Some(kernel_abi.unwrap_or(*effective_abi as i32))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File, OpenOptions};
    use std::io::{ErrorKind, Result};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixListener;

    /// Runs on a thread of its own, which stays restricted. Returns `None` without Landlock.
    fn confined<T: Send>(profile: &Profile, look: impl FnOnce(i32) -> T + Send) -> Option<T> {
        std::thread::scope(|scope| scope.spawn(|| restrict(profile).ok().map(look)).join().unwrap())
    }

    fn kind<T>(result: Result<T>) -> Option<ErrorKind> {
        result.err().map(|error| error.kind())
    }

    #[test]
    fn paths_are_closed_but_for_those_that_are_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        for name in ["closed", "read", "written", "resized"] {
            fs::write(path(name), b"x").unwrap();
        }
        let mut profile = Profile::default();
        profile.allow(path("read"), Access::Read);
        profile.allow(path("written"), Access::ReadWrite);
        profile.allow(path("resized"), Access::Resize);
        profile.allow(path("never"), Access::ReadWrite);
        profile.allow(path("read"), Access::Sockets); // means nothing for a file
        confined(&profile, |version| {
            const FIRST_WITH_TRUNCATION: i32 = 3;
            let write = |name| OpenOptions::new().read(true).write(true).open(path(name));
            assert_eq!(kind(write("resized").and_then(|file| file.set_len(9))), None);
            let refused = (version >= FIRST_WITH_TRUNCATION).then_some(ErrorKind::PermissionDenied);
            assert_eq!(kind(write("written").and_then(|file| file.set_len(9))), refused);
            assert_eq!(kind(File::open(path("closed"))), Some(ErrorKind::PermissionDenied));
            assert_eq!(kind(File::open(path("read"))), None);
            assert_eq!(kind(write("read")), Some(ErrorKind::PermissionDenied));
            assert_eq!(kind(write("written")), None);
            assert_eq!(kind(File::create_new(path("new"))), Some(ErrorKind::PermissionDenied));
            assert_eq!(kind(fs::remove_file(path("written"))), Some(ErrorKind::PermissionDenied));
            let threads = std::thread::spawn({
                let path = path("closed");
                move || kind(File::open(path))
            });
            assert_eq!(threads.join().unwrap(), Some(ErrorKind::PermissionDenied));
        });
        assert_eq!(kind(File::open(path("closed"))), None, "other threads are as they were");
    }

    #[test]
    fn sockets_are_made_and_removed_where_they_may_be() {
        let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut profile = Profile::default();
        profile.allow_socket(&here.path().join("s"));
        confined(&profile, |_| {
            let socket = UnixListener::bind(here.path().join("s")).unwrap();
            drop(socket);
            fs::remove_file(here.path().join("s")).unwrap();
            assert_eq!(kind(UnixListener::bind(there.path().join("s"))), Some(ErrorKind::PermissionDenied));
            assert_eq!(kind(File::create_new(here.path().join("f"))), Some(ErrorKind::PermissionDenied));
        });
    }

    #[test]
    fn ports_are_closed_but_for_those_that_are_kept() {
        const FIRST_WITH_PORTS: i32 = 4;
        let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let [open, closed] = listeners.each_ref().map(|listener| listener.local_addr().unwrap());
        let mut profile = Profile::default();
        profile.connect(open.port());
        confined(&profile, |version| {
            if version < FIRST_WITH_PORTS {
                return;
            }
            assert_eq!(kind(TcpStream::connect(open)), None);
            assert_eq!(kind(TcpStream::connect(closed)), Some(ErrorKind::PermissionDenied));
            assert_eq!(kind(TcpListener::bind("127.0.0.1:0")), Some(ErrorKind::PermissionDenied));
        });
        profile.connect_anywhere();
        confined(&profile, |_| assert_eq!(kind(TcpStream::connect(closed)), None));
    }

    #[test]
    fn sockets_without_a_file_are_reached_where_there_is_a_need() {
        let mut profile = Profile::default();
        assert_eq!(scopes(&profile, None), Scope::from_all(NEWEST));
        assert_eq!(scopes(&profile, Some(OsStr::new("/run/systemd/notify"))), Scope::from_all(NEWEST));
        assert_eq!(scopes(&profile, Some(OsStr::new("@notify"))), BitFlags::from(Scope::Signal));
        profile.connect_to("/run/s");
        assert_eq!(scopes(&profile, None), Scope::from_all(NEWEST));
        profile.connect_to("\0name");
        assert_eq!(scopes(&profile, None), BitFlags::from(Scope::Signal));
    }
}
