//! What a server keeps: paths, ports, capabilities, kinds of sockets. Pure data, made from what is
//! to be served.

use crate::Capability;
use crate::paths::rights;
use landlock::{AccessFs, BitFlags};
use std::collections::BTreeSet;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Ports below this one are for those who have `CAP_NET_BIND_SERVICE`.
const FIRST_UNPRIVILEGED: u16 = 1024;
/// What the system's resolver reads. Not all of `/etc`, where there are secrets that root may read.
const NAMES: [&str; 10] = [
    "/etc/gai.conf",
    "/etc/host.conf",
    "/etc/hosts",
    "/etc/ld.so.cache",
    "/etc/nsswitch.conf",
    "/etc/resolv.conf",
    "/etc/services",
    "/run/NetworkManager",
    "/run/resolvconf",
    "/run/systemd/resolve",
];
/// Name servers take long answers over TCP.
const DNS_PORT: u16 = 53;
/// What every server may read: what devices can do, and libraries, which the resolver loads when it
/// is first used and backtraces take names from.
const ALWAYS: [&str; 5] = ["/sys", "/usr/lib", "/usr/lib64", "/lib", "/lib64"];

/// What may be done with a path, and with all beneath it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Access {
    /// Open for reading; list.
    Read,
    /// Open for reading and writing what is there; list.
    ReadWrite,
    /// Make sockets, and remove files.
    Sockets,
    /// Make, read, write and remove regular files; make directories.
    Files,
}

/// What a server keeps.
#[derive(Clone, Debug)]
pub struct Profile {
    pub(crate) paths: BTreeSet<(PathBuf, Access)>,
    /// Whatever is served, may be read: nothing is kept for it.
    pub(crate) background: Vec<PathBuf>,
    /// Sockets to be made: those that a predecessor has left are to be removed.
    pub(crate) sockets: Vec<PathBuf>,
    /// Sockets of others, to be connected to.
    pub(crate) peers: Vec<PathBuf>,
    /// Directories to be made before others can no longer be.
    pub(crate) directories: Vec<PathBuf>,
    /// `None`: any.
    pub(crate) listen: Option<BTreeSet<u16>>,
    /// `None`: any.
    pub(crate) connect: Option<BTreeSet<u16>>,
    /// Whether there is a network at all.
    pub(crate) has_network: bool,
    pub(crate) locks_memory: bool,
    pub(crate) changes_groups: bool,
    pub(crate) capabilities: Vec<Capability>,
}

impl Default for Profile {
    fn default() -> Self {
        // Backtraces take their names and lines from the program itself.
        let background = ALWAYS.map(PathBuf::from).into_iter().chain(std::env::current_exe());
        Profile {
            paths: BTreeSet::new(),
            background: background.collect(),
            sockets: Vec::new(),
            peers: Vec::new(),
            directories: Vec::new(),
            listen: Some(BTreeSet::new()),
            connect: Some(BTreeSet::new()),
            has_network: false,
            locks_memory: false,
            changes_groups: false,
            capabilities: Vec::new(),
        }
    }
}

impl Profile {
    /// Keeps access to a path and to all beneath it. One that is not there when the sandbox is
    /// entered stays closed.
    pub fn allow(&mut self, path: impl Into<PathBuf>, access: Access) {
        self.paths.insert((path.into(), access));
    }

    /// Lets a Unix socket be made, in place of what a predecessor has left, and removed.
    pub fn allow_socket(&mut self, path: &Path) {
        self.allow(directory_of(path), Access::Sockets);
        self.sockets.push(path.into());
    }

    /// Lets somebody's Unix socket be connected to, now or when it is there. One that begins with a
    /// zero byte is a name without a file.
    pub fn connect_to(&mut self, path: impl Into<PathBuf>) {
        self.peers.push(path.into());
    }

    /// Lets a regular file be made, written and removed. Its directory is made as
    /// [`Profile::make_directory`] says.
    pub fn allow_file(&mut self, path: &Path) {
        self.make_directory(directory_of(path));
        self.allow(directory_of(path), Access::Files);
    }

    /// Has a directory made, if it is not there, before the sandbox is entered; it is given to the
    /// user who is become.
    /// Whoever needs it says so if that fails.
    pub fn make_directory(&mut self, path: impl Into<PathBuf>) {
        self.directories.push(path.into());
    }

    /// Lets a TCP port be listened on.
    pub fn listen(&mut self, port: u16) {
        self.has_network = true;
        if let Some(ports) = &mut self.listen {
            ports.insert(port);
        }
        if (1..FIRST_UNPRIVILEGED).contains(&port) {
            self.keep(Capability::CAP_NET_BIND_SERVICE);
        }
    }

    /// Lets any TCP port be listened on; those below 1024 need the capability still.
    pub fn listen_anywhere(&mut self) {
        self.has_network = true;
        self.listen = None;
        self.keep(Capability::CAP_NET_BIND_SERVICE);
    }

    /// Lets a TCP port be connected to, of any host.
    pub fn connect(&mut self, port: u16) {
        self.has_network = true;
        if let Some(ports) = &mut self.connect {
            ports.insert(port);
        }
    }

    /// Lets any TCP port of any host be connected to, and any Unix socket that has no file.
    pub fn connect_anywhere(&mut self) {
        self.has_network = true;
        self.connect = None;
    }

    /// Lets names of hosts be looked up.
    pub fn resolve_names(&mut self) {
        NAMES.iter().for_each(|path| self.allow(*path, Access::Read));
        self.connect(DNS_PORT);
    }

    /// Lets as much memory as is asked for be locked, such as what is registered with the kernel.
    pub fn lock_memory(&mut self) {
        self.locks_memory = true;
    }

    /// Lets files be given to other groups.
    pub fn change_groups(&mut self) {
        self.changes_groups = true;
        self.keep(Capability::CAP_CHOWN);
    }

    /// Whether Unix sockets without a file are connected to.
    pub(crate) fn has_abstract_peers(&self) -> bool {
        self.connect.is_none() || self.peers.iter().any(|peer| is_abstract(peer))
    }

    /// Keeps a capability, if the process has it.
    pub fn keep(&mut self, capability: Capability) {
        if !self.capabilities.contains(&capability) {
            self.capabilities.push(capability);
        }
    }

    /// Capabilities that are kept whatever the paths need.
    pub fn capabilities(&self) -> &[Capability] {
        &self.capabilities
    }

    /// Where the paths lead now. Those that do not exist are left out: the kernel keeps them
    /// closed.
    pub(crate) fn open_paths(&self) -> OpenPaths {
        let background = self.background.iter().map(|path| (path, Access::Read));
        let paths = self.paths.iter().map(|(path, access)| (path, *access)).chain(background);
        let existing = paths.filter(|(path, _)| path.exists());
        OpenPaths(existing.map(|(path, access)| (resolve(path), rights(access))).collect())
    }

    /// The paths that can be opened, as they are now.
    pub fn permits(&self) -> Permits {
        let roots = self.paths.iter().filter(|(_, access)| *access == Access::ReadWrite);
        Permits(Some(roots.filter_map(|(path, _)| path.canonicalize().ok()).collect()))
    }
}

/// The paths that are open in a sandbox, each with what can be done beneath it. For messages: the
/// kernel decides.
#[derive(Debug)]
pub(crate) struct OpenPaths(Vec<(PathBuf, BitFlags<AccessFs>)>);

impl OpenPaths {
    /// The first path that `needs` names and that is not open for it. Ports are not compared.
    ///
    /// A path that does not exist is judged by the directory that it would lie in.
    pub(crate) fn closes<'a>(&self, needs: &'a Profile) -> Option<&'a Path> {
        let is_closed = |(path, access): &&(PathBuf, Access)| {
            let path = resolve(path);
            let above = self.0.iter().filter(|(root, _)| path.starts_with(root));
            let allowed = above.fold(BitFlags::empty(), |allowed, (_, rights)| allowed | *rights);
            // Only device nodes have it.
            let needed = rights(*access) & !AccessFs::IoctlDev;
            !allowed.contains(needed)
        };
        needs.paths.iter().find(is_closed).map(|(path, _)| &**path)
    }
}

/// Where a path leads, symbolic links followed as far as it exists.
fn resolve(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.into());
    for ancestor in path.ancestors() {
        if let (Ok(real), Ok(rest)) = (ancestor.canonicalize(), path.strip_prefix(ancestor)) {
            // Not by `join` of nothing, which adds a slash.
            return if rest.as_os_str().is_empty() { real } else { real.join(rest) };
        }
    }
    path
}

/// Whether a socket's path is no path.
pub(crate) fn is_abstract(socket: &Path) -> bool {
    socket.as_os_str().as_bytes().first() == Some(&0)
}

/// The directory that a path's last part lies in.
pub(crate) fn directory_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.into(),
        _ => ".".into(),
    }
}

/// Which paths can still be opened for reading and writing. To tell people: it is the kernel that
/// decides.
#[derive(Clone, Debug)]
pub struct Permits(Option<Vec<PathBuf>>);

impl Permits {
    /// Nothing is in the way.
    pub fn everything() -> Permits {
        Permits(None)
    }

    /// Those beneath which `path` does not lie. `None` when it is open.
    pub fn closes(&self, path: &Path) -> Option<&[PathBuf]> {
        let roots = self.0.as_deref()?;
        let path = path.canonicalize().unwrap_or_else(|_| path.into());
        (!roots.iter().any(|root| path.starts_with(root))).then_some(roots)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_open_when_it_lies_beneath_one_that_is_kept_for_writing() {
        let directory = tempfile::tempdir().unwrap();
        let (inside, link) = (directory.path().join("a"), directory.path().join("b"));
        std::os::unix::fs::symlink("/etc/passwd", &link).unwrap();
        let mut profile = Profile::default();
        profile.allow(directory.path(), Access::ReadWrite);
        profile.allow("/etc", Access::Read);
        let permits = profile.permits();
        assert_eq!(permits.closes(&inside), None);
        assert!(permits.closes(&link).is_some());
        assert_eq!(Permits::everything().closes(&link), None);
    }

    #[test]
    fn a_path_that_is_needed_is_closed_unless_a_rule_above_it_has_every_right() {
        let directory = tempfile::tempdir().unwrap();
        let (open, shut) = (directory.path().join("open"), directory.path().join("shut"));
        [&open, &shut].iter().for_each(|path| std::fs::create_dir(path).unwrap());
        std::os::unix::fs::symlink(&shut, open.join("link")).unwrap();
        let mut profile = Profile::default();
        profile.allow(&open, Access::ReadWrite);
        profile.allow(&open, Access::Sockets);
        profile.allow(&shut, Access::Read);
        profile.allow(directory.path().join("later"), Access::ReadWrite);
        let open_paths = profile.open_paths();
        std::fs::create_dir(directory.path().join("later")).unwrap();
        let closes = |path: PathBuf, access| {
            let mut needs = Profile::default();
            needs.allow(&path, access);
            assert!(open_paths.closes(&needs).is_none_or(|closed| closed == path));
            open_paths.closes(&needs).is_some()
        };
        assert!(!closes(open.join("image"), Access::ReadWrite));
        assert!(!closes(open.clone(), Access::Sockets));
        assert!(closes(open.clone(), Access::Files));
        assert!(closes(shut.join("image"), Access::ReadWrite));
        assert!(!closes(shut.join("image"), Access::Read));
        assert!(closes(open.join("link/image"), Access::ReadWrite), "a link leads out of what is open");
        assert!(closes(open.join("../shut/image"), Access::ReadWrite), "so do dots");
        assert!(closes(directory.path().join("later"), Access::ReadWrite), "it did not exist in time");
        assert!(closes("/etc/shadow".into(), Access::Read));
        assert!(!closes("/sys/block".into(), Access::Read));
    }

    #[test]
    fn a_low_port_keeps_the_capability_that_it_takes() {
        let mut profile = Profile::default();
        profile.listen(10809);
        profile.listen(0);
        assert_eq!(profile.capabilities(), []);
        profile.listen(80);
        assert_eq!(profile.capabilities(), [Capability::CAP_NET_BIND_SERVICE]);
    }

    #[test]
    fn a_socket_lies_in_the_directory_that_its_path_names() {
        assert_eq!(directory_of(Path::new("/run/a.sock")), Path::new("/run"));
        assert_eq!(directory_of(Path::new("a.sock")), Path::new("."));
    }
}
