//! The paths, ports, capabilities and kinds of sockets that a server keeps. Pure data, derived from
//! the devices and exports to serve.

use crate::Capability;
use crate::access::{Access, rights};
use landlock::{AccessFs, BitFlags};
use std::collections::BTreeSet;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Ports below this one need `CAP_NET_BIND_SERVICE`.
const FIRST_UNPRIVILEGED: u16 = 1024;
/// Files that the system's resolver reads. Not all of `/etc`, which holds secrets that root may
/// read.
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
/// Name servers send long answers over TCP.
const DNS_PORT: u16 = 53;
/// Paths that every server may read: properties of devices, and libraries. The resolver loads
/// libraries at its first use, and backtraces take names from them.
const ALWAYS: [&str; 5] = ["/sys", "/usr/lib", "/usr/lib64", "/lib", "/lib64"];

/// The list of keys that the process may view, without their content.
pub(crate) const KEYS: &str = "/proc/keys";

/// Directories that hold secrets of others: a file in there is kept by itself.
const SHARED: [&str; 6] = ["/", "/etc", "/root", "/home", "/tmp", "/var/tmp"];

/// Whether a directory, without symbolic links in its path, has files of many purposes: the
/// directories of users, and those of the system.
pub fn is_shared(directory: &Path) -> bool {
    SHARED.iter().any(|shared| directory == Path::new(shared))
        || directory.parent() == Some(Path::new("/home"))
}

/// The paths, ports and privileges that a server keeps.
#[derive(Clone, Debug)]
pub struct Profile {
    pub(crate) paths: BTreeSet<(PathBuf, Access)>,
    /// Paths that every server, or every resolver of names, may read, and directories of settings;
    /// a host may lack them. No capability is kept for them.
    pub(crate) background: Vec<PathBuf>,
    /// Sockets to create; leftovers of a predecessor are removed.
    pub(crate) sockets: Vec<PathBuf>,
    /// Sockets of other processes, to connect to.
    pub(crate) peers: Vec<PathBuf>,
    /// Directories to create before the sandbox is entered.
    pub(crate) directories: Vec<PathBuf>,
    /// TCP ports to listen on; `None`: any.
    pub(crate) listen: Option<BTreeSet<u16>>,
    /// TCP ports to connect to; `None`: any.
    pub(crate) connect: Option<BTreeSet<u16>>,
    /// Set when Internet sockets may be created.
    pub(crate) has_network: bool,
    pub(crate) locks_memory: bool,
    pub(crate) changes_groups: bool,
    pub(crate) reads_keyrings: bool,
    pub(crate) capabilities: Vec<Capability>,
}

impl Default for Profile {
    fn default() -> Self {
        // Backtraces take names and lines from the program itself.
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
            reads_keyrings: false,
            capabilities: Vec::new(),
        }
    }
}

impl Profile {
    /// Keeps access to a path and to all paths below it. A path that does not exist when the
    /// sandbox is entered stays closed.
    pub fn allow(&mut self, path: impl Into<PathBuf>, access: Access) {
        self.paths.insert((path.into(), access));
    }

    /// Keeps a file of settings or keys, or a directory of them, that is read again while the
    /// process serves. Another file may take its place: the directory is kept, and the directories
    /// that symbolic links lead to, unless [`is_shared`].
    pub fn allow_settings(&mut self, path: &Path) {
        self.allow(path, Access::Read);
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
        let links = entries.filter(|entry| entry.is_symlink());
        let own = (!path.is_dir()).then(|| path.to_owned());
        for file in own.into_iter().chain(links) {
            // Where it is, and where it leads to.
            let places =
                [directory_of(&file).canonicalize(), file.canonicalize().map(|real| directory_of(&real))];
            for directory in places.into_iter().flatten().filter(|directory| !is_shared(directory)) {
                // The file decides whether a capability is needed.
                self.background.push(directory);
            }
        }
    }

    /// Allows creating a Unix socket, replacing a predecessor's leftover, and removing it.
    pub fn allow_socket(&mut self, path: &Path) {
        self.allow(directory_of(path), Access::Sockets);
        self.sockets.push(path.into());
    }

    /// Allows connecting to a Unix socket of another process, which may be created later. A path
    /// that begins with a zero byte names an abstract socket.
    pub fn connect_to(&mut self, path: impl Into<PathBuf>) {
        self.peers.push(path.into());
    }

    /// Allows creating, writing and removing a regular file. Its directory is created as by
    /// [`Profile::make_directory`].
    pub fn allow_file(&mut self, path: &Path) {
        self.make_directory(directory_of(path));
        self.allow(directory_of(path), Access::Files);
    }

    /// Creates a missing directory before the sandbox is entered, and gives it to the user that the
    /// process switches to. A failure is reported by the code that uses the directory.
    pub fn make_directory(&mut self, path: impl Into<PathBuf>) {
        self.directories.push(path.into());
    }

    /// Allows listening on a TCP port.
    pub fn listen(&mut self, port: u16) {
        self.has_network = true;
        if let Some(ports) = &mut self.listen {
            ports.insert(port);
        }
        if (1..FIRST_UNPRIVILEGED).contains(&port) {
            self.keep(Capability::CAP_NET_BIND_SERVICE);
        }
    }

    /// Allows listening on any TCP port; ports below 1024 still need the capability.
    pub fn listen_anywhere(&mut self) {
        self.has_network = true;
        self.listen = None;
        self.keep(Capability::CAP_NET_BIND_SERVICE);
    }

    /// Allows connecting to a TCP port of any host.
    pub fn connect(&mut self, port: u16) {
        self.has_network = true;
        if let Some(ports) = &mut self.connect {
            ports.insert(port);
        }
    }

    /// Allows connecting to any TCP port of any host, and to any abstract Unix socket.
    pub fn connect_anywhere(&mut self) {
        self.has_network = true;
        self.connect = None;
    }

    /// Allows looking up host names.
    pub fn resolve_names(&mut self) {
        self.background.extend(NAMES.iter().map(PathBuf::from));
        self.connect(DNS_PORT);
    }

    /// Allows locking any amount of memory, such as buffers registered with the kernel.
    pub fn lock_memory(&mut self) {
        self.locks_memory = true;
    }

    /// Allows changing the group of files.
    pub fn change_groups(&mut self) {
        self.changes_groups = true;
        self.keep(Capability::CAP_CHOWN);
    }

    /// Allows finding and reading keys in keyrings of the kernel.
    pub fn read_keyrings(&mut self) {
        self.reads_keyrings = true;
        self.background.push(KEYS.into());
    }

    /// Returns whether the profile connects to abstract Unix sockets.
    pub(crate) fn has_abstract_peers(&self) -> bool {
        self.connect.is_none() || self.peers.iter().any(|peer| is_abstract(peer))
    }

    /// Keeps a capability, if the process has it.
    pub fn keep(&mut self, capability: Capability) {
        if !self.capabilities.contains(&capability) {
            self.capabilities.push(capability);
        }
    }

    /// Returns the capabilities that are kept regardless of the paths.
    pub fn capabilities(&self) -> &[Capability] {
        &self.capabilities
    }

    /// Returns the targets of the paths at present. Missing paths are omitted: the kernel keeps
    /// them closed.
    pub(crate) fn open_paths(&self) -> OpenPaths {
        let background = self.background.iter().map(|path| (path, Access::Read));
        let paths = self.paths.iter().map(|(path, access)| (path, *access)).chain(background);
        let existing = paths.filter(|(path, _)| path.exists());
        OpenPaths(existing.map(|(path, access)| (resolve(path), rights(access))).collect())
    }

    /// Returns the paths that can be opened at present.
    pub fn permits(&self) -> Permits {
        let is_writable = |access| matches!(access, Access::ReadWrite | Access::Resize);
        let roots = self.paths.iter().filter(|(_, access)| is_writable(*access));
        Permits(Some(roots.filter_map(|(path, _)| path.canonicalize().ok()).collect()))
    }
}

/// The open paths of a sandbox, each with the rights below it. For messages: the kernel decides.
#[derive(Debug)]
pub(crate) struct OpenPaths(Vec<(PathBuf, BitFlags<AccessFs>)>);

impl OpenPaths {
    /// Returns the first path of `needs` that is not open for its access. Ports are not compared.
    ///
    /// A path that does not exist is judged by the directory that it would lie in.
    pub(crate) fn closes<'a>(&self, needs: &'a Profile) -> Option<&'a Path> {
        let is_closed = |(path, access): &&(PathBuf, Access)| {
            let path = resolve(path);
            let above = self.0.iter().filter(|(root, _)| path.starts_with(root));
            let allowed = above.fold(BitFlags::empty(), |allowed, (_, rights)| allowed | *rights);
            // Only device nodes have this right.
            let needed = rights(*access) & !AccessFs::IoctlDev;
            !allowed.contains(needed)
        };
        needs.paths.iter().find(is_closed).map(|(path, _)| &**path)
    }
}

/// Returns the target of a path; symbolic links are followed as far as the path exists.
fn resolve(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.into());
    for ancestor in path.ancestors() {
        if let (Ok(real), Ok(rest)) = (ancestor.canonicalize(), path.strip_prefix(ancestor)) {
            // `join` with an empty path would add a slash.
            return if rest.as_os_str().is_empty() { real } else { real.join(rest) };
        }
    }
    path
}

/// Returns whether a socket's name is abstract.
pub(crate) fn is_abstract(socket: &Path) -> bool {
    socket.as_os_str().as_bytes().first() == Some(&0)
}

/// Returns the directory that contains a path's last component.
pub(crate) fn directory_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.into(),
        _ => ".".into(),
    }
}

/// The paths that can still be opened for reading and writing. For messages: the kernel decides.
#[derive(Clone, Debug)]
pub struct Permits(Option<Vec<PathBuf>>);

impl Permits {
    /// Permits every path.
    pub fn everything() -> Permits {
        Permits(None)
    }

    /// Returns the permitted paths if `path` lies below none of them; `None` if it is open.
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
    fn settings_may_be_replaced_in_their_directory_and_where_links_lead() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().canonicalize().unwrap();
        let [keys, archive] = ["keys", "archive"].map(|name| folder.join(name));
        [&keys, &archive].iter().for_each(|directory| std::fs::create_dir(directory).unwrap());
        std::fs::write(archive.join("key1"), "").unwrap();
        std::os::unix::fs::symlink("../archive/key1", keys.join("key")).unwrap();
        let closes = |path: &Path, wanted: &Path| {
            let (mut profile, mut needs) = (Profile::default(), Profile::default());
            profile.allow_settings(path);
            needs.allow(wanted, Access::Read);
            profile.open_paths().closes(&needs).is_some()
        };
        for path in [&keys, &keys.join("key")] {
            assert!(!closes(path, &archive) && !closes(path, &keys) && closes(path, &folder), "{path:?}");
        }
        assert!(closes(&archive, &keys));
        for (path, shared) in
            [("/etc/hostname", "/etc"), ("/tmp/key", "/tmp"), ("/home/user/key", "/home/user")]
        {
            assert!(closes(Path::new(path), Path::new(shared)), "{path}");
        }
    }

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
    fn files_of_the_resolver_that_a_host_lacks_are_not_missed() {
        let mut profile = Profile::default();
        profile.resolve_names();
        assert_eq!(profile.open_paths().closes(&profile), None);
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
