//! The restrictions that a server enters before it serves, to limit the damage of a client that
//! exploits a bug.
//!
//! ```text
//!   Profile ──► confine ──► (open devices) ──► switch_user ──► (cores, threads) ──► seal ──► clients
//!               paths, ports, capabilities       uid, gid                           system calls
//! ```
//!
//! The order is essential. Landlock and capabilities belong to a thread, and new threads inherit
//! them. They are restricted before a second thread exists; then they hold for every thread, on any
//! kernel. The user can be switched later, since the C library switches it on all threads. System
//! calls are filtered last, on all threads at once (`SECCOMP_FILTER_FLAG_TSYNC`). No step can be
//! undone.
//!
//! A refused call fails with `EACCES` or `EPERM`, and the server keeps running: it holds users'
//! data. Only calls that no server makes, such as `execve`, end the process (`calls`). The first
//! refusal of each call writes a line to standard error.
//!
//! Sources: landlock(7), seccomp(2), capabilities(7), `Documentation/userspace-api/landlock.rst`.

#![deny(unsafe_code)] // except for the signal handler in `refusal`

mod access;
mod calls;
mod capabilities;
mod filter;
mod paths;
mod profile;
mod refusal;
mod status;
mod user;

pub use access::Access;
pub use capabilities::{Capability, permitted};
pub use profile::{Permits, Profile, is_shared};
pub use refusal::refused_calls;
pub use status::InForce;
pub use user::{User, effective_user};

use profile::{KEYS, OpenPaths};
use std::fs::File;
use std::io;
use std::os::fd::RawFd;
use std::path::Path;
use std::sync::OnceLock;

/// How strictly a process is restricted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Apply the restrictions that this kernel supports.
    #[default]
    Auto,
    /// Apply all restrictions, or fail.
    Required,
    /// Apply no restriction.
    Off,
}

impl Mode {
    /// Every mode.
    pub const ALL: [Mode; 3] = [Mode::Auto, Mode::Required, Mode::Off];

    /// Returns the mode's name on a command line.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Auto => "auto",
            Mode::Required => "required",
            Mode::Off => "off",
        }
    }

    /// Returns the mode with that name.
    pub fn parse(name: &str) -> Option<Mode> {
        Mode::ALL.into_iter().find(|mode| mode.name() == name)
    }
}

/// Why a restriction cannot be applied.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Paths cannot be restricted.
    #[error("the kernel does not have Landlock, or has it switched off")]
    NoLandlock,
    /// The kernel refuses a ruleset.
    #[error("Landlock: {0}")]
    Landlock(#[from] landlock::RulesetError),
    /// System calls cannot be filtered.
    #[error("seccomp: {0}")]
    Seccomp(#[from] seccompiler::Error),
    /// Capabilities cannot be read or dropped.
    #[error("capabilities: {0}")]
    Capabilities(#[from] caps::errors::CapsError),
    /// `no_new_privs` cannot be set: programs might gain privileges when executed.
    #[error("no_new_privs: {0}")]
    NoNewPrivs(io::Error),
    /// The signal handler that turns a refused call into an error cannot be installed.
    #[error("SIGSYS cannot be handled: {0}")]
    Signal(io::Error),
    /// The process cannot switch to the user.
    #[error("user {user}: {error}")]
    User {
        /// The user.
        user: String,
        /// The reason.
        error: io::Error,
    },
}

/// Drops all capabilities, and sets `no_new_privs`. For a process that starts confined ones.
///
/// # Errors
/// The kernel refuses.
pub fn drop_privileges(mode: Mode) -> Result<(), Error> {
    if mode == Mode::Off {
        return Ok(());
    }
    nix::sys::prctl::set_no_new_privs().map_err(|error| Error::NoNewPrivs(error.into()))?;
    capabilities::keep(&Profile::default())
}

/// Closes every descriptor except standard input, output and error, which the process inherited
/// unintentionally. The caller has opened nothing yet.
///
/// # Errors
/// The kernel does not list the open descriptors.
pub fn close_inherited() -> io::Result<()> {
    let names = std::fs::read_dir("/proc/self/fd")?.map(|entry| Ok(entry?.file_name()));
    for name in names.collect::<io::Result<Vec<_>>>()? {
        let descriptor = name.to_str().and_then(|name| name.parse::<RawFd>().ok());
        if let Some(descriptor) = descriptor.filter(|descriptor| *descriptor > 2) {
            let _ = nix::unistd::close(descriptor); // the list itself is closed already
        }
    }
    Ok(())
}

/// A process on its way into its sandbox.
#[derive(Debug)]
pub struct Sandbox {
    mode: Mode,
    profile: Profile,
    user: Option<User>,
    in_force: InForce,
    /// `None`: every path is open.
    open_paths: Option<OpenPaths>,
}

impl Sandbox {
    /// Prepares a sandbox without applying it. `profile` is what the server keeps; `user` is the
    /// user to switch to.
    pub fn new(mode: Mode, profile: Profile, user: Option<User>) -> Sandbox {
        Sandbox { mode, profile, user, in_force: InForce::default(), open_paths: None }
    }

    /// First step: restricts paths, ports and capabilities. The process must have one thread, since
    /// later threads inherit the restrictions of the calling one.
    ///
    /// # Errors
    /// The kernel refuses, or lacks a feature in [`Mode::Required`].
    pub fn confine(&mut self) -> Result<(), Error> {
        self.make_directories();
        if self.mode == Mode::Off {
            return Ok(());
        }
        nix::sys::prctl::set_no_new_privs().map_err(|error| Error::NoNewPrivs(error.into()))?;
        self.in_force.no_new_privs = true;
        if self.profile.reads_keyrings {
            // The kernel forgets a rule about a file of `/proc` that no process has open.
            static OPEN: OnceLock<Option<File>> = OnceLock::new();
            OPEN.get_or_init(|| File::open(KEYS).ok());
        }
        // The paths as the rules see them.
        let open_paths = self.profile.open_paths();
        self.in_force.landlock = self.as_far_as_asked(paths::restrict(&self.profile))?;
        self.open_paths = self.in_force.landlock.is_ok().then_some(open_paths);
        // Switching the user needs the present privileges, which the kernel removes with the
        // switch.
        if self.user.is_none() {
            capabilities::keep(&self.profile)?;
        }
        Ok(())
    }

    fn make_directories(&self) {
        for path in self.profile.directories.iter().filter(|path| !path.exists()) {
            let made = std::fs::create_dir_all(path);
            if let (Ok(()), Some(user)) = (made, &self.user) {
                let _ = user.own(path); // as with other errors: its user reports it
            }
        }
    }

    /// Second step, when devices are open: switches to the configured user, on all threads.
    ///
    /// # Errors
    /// The process may not switch to it.
    pub fn switch_user(&mut self) -> Result<(), Error> {
        let Some(user) = &self.user else { return Ok(()) };
        if self.profile.locks_memory {
            capabilities::raise_locked_memory(); // otherwise the user's limit applies
        }
        user.switch()?;
        if self.mode != Mode::Off {
            capabilities::keep(&self.profile)?;
        }
        Ok(())
    }

    /// Last step, before the first client: filters system calls, on all threads.
    ///
    /// # Errors
    /// The kernel refuses, in [`Mode::Required`].
    pub fn seal(&mut self) -> Result<(), Error> {
        self.in_force.capabilities = capabilities::permitted()?;
        self.in_force.user = nix::unistd::geteuid().as_raw();
        if self.mode == Mode::Off {
            return Ok(());
        }
        self.in_force.seccomp = self.as_far_as_asked(filter::restrict(&self.profile))?;
        Ok(())
    }

    /// Returns a failed restriction as an error only in [`Mode::Required`].
    fn as_far_as_asked<T>(&self, result: Result<T, Error>) -> Result<Result<T, String>, Error> {
        match result {
            Err(error) if self.mode == Mode::Required => Err(error),
            result => Ok(result.map_err(|error| error.to_string())),
        }
    }

    /// Returns the configured mode.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Returns the restrictions in force so far.
    pub fn in_force(&self) -> &InForce {
        &self.in_force
    }

    /// Returns the first path of `needs` that this sandbox does not open with the access needed.
    pub fn closes<'a>(&self, needs: &'a Profile) -> Option<&'a Path> {
        self.open_paths.as_ref().and_then(|open| open.closes(needs))
    }

    /// Returns the paths that can still be opened.
    pub fn permits(&self) -> Permits {
        match self.in_force.landlock {
            Ok(_) => self.profile.permits(),
            Err(_) => Permits::everything(),
        }
    }
}
