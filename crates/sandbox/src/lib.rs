//! What a server gives up before it serves, so that a client who finds a hole in it finds little
//! behind it.
//!
//! ```text
//!   Profile ──► confine ──► (open devices) ──► switch_user ──► (cores, threads) ──► seal ──► clients
//!               paths, ports, capabilities       uid, gid                           system calls
//! ```
//!
//! The order is the idea. Landlock and capabilities belong to a thread and are inherited by those
//! that it starts, so they are given up before the first other thread exists; then no thread is
//! without them, on any kernel. A user can be switched later, since the C library does that on all
//! threads, and system calls are filtered last and on all threads at once
//! (`SECCOMP_FILTER_FLAG_TSYNC`). All of it is for good: nothing here can be undone.
//!
//! What is refused is an error of the call, `EACCES` or `EPERM`, and the server goes on: it has
//! people's data. Only what no server calls, such as `execve`, ends the process ([`calls`]). Each
//! refused call says so once on standard error.
//!
//! Sources: landlock(7), seccomp(2), capabilities(7), `Documentation/userspace-api/landlock.rst`.

#![deny(unsafe_code)] // but for the signal handler in `refusal`

mod calls;
mod capabilities;
mod filter;
mod paths;
mod profile;
mod refusal;
mod status;
mod user;

pub use capabilities::{Capability, permitted};
pub use profile::{Access, Permits, Profile};
pub use refusal::refused_calls;
pub use status::InForce;
pub use user::{User, effective_user};

use profile::OpenPaths;
use std::io;
use std::os::fd::RawFd;
use std::path::Path;

/// Whether to give anything up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// What this kernel can do.
    #[default]
    Auto,
    /// All of it, or an error.
    Required,
    /// Nothing.
    Off,
}

impl Mode {
    /// Every mode.
    pub const ALL: [Mode; 3] = [Mode::Auto, Mode::Required, Mode::Off];

    /// Its name on a command line.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Auto => "auto",
            Mode::Required => "required",
            Mode::Off => "off",
        }
    }

    /// The mode of that name.
    pub fn parse(name: &str) -> Option<Mode> {
        Mode::ALL.into_iter().find(|mode| mode.name() == name)
    }
}

/// Why something cannot be given up.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No path can be closed.
    #[error("this kernel does not have Landlock, or has it switched off")]
    NoLandlock,
    /// The kernel refuses a set of rules.
    #[error("Landlock: {0}")]
    Landlock(#[from] landlock::RulesetError),
    /// System calls cannot be filtered.
    #[error("seccomp: {0}")]
    Seccomp(#[from] seccompiler::Error),
    /// Capabilities cannot be read or dropped.
    #[error("capabilities: {0}")]
    Capabilities(#[from] caps::errors::CapsError),
    /// Privileges might be gained by executing programs.
    #[error("no_new_privs: {0}")]
    NoNewPrivs(io::Error),
    /// The signal handler that turns a refused call into an error cannot be installed.
    #[error("SIGSYS cannot be handled: {0}")]
    Signal(io::Error),
    /// Another user cannot be become.
    #[error("user {user}: {error}")]
    User {
        /// The user.
        user: String,
        /// Why.
        error: io::Error,
    },
}

/// Gives up all capabilities, and the gain of any by executing programs. For a process that starts
/// confined ones.
///
/// # Errors
/// When the kernel refuses.
pub fn drop_privileges(mode: Mode) -> Result<(), Error> {
    if mode == Mode::Off {
        return Ok(());
    }
    nix::sys::prctl::set_no_new_privs().map_err(|error| Error::NoNewPrivs(error.into()))?;
    capabilities::keep(&Profile::default())
}

/// Closes every descriptor but standard input, output and error: those that the process was started
/// with by accident.
/// To be called before anything is opened.
///
/// # Errors
/// When the kernel does not say what is open.
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
    /// `None`: every path.
    open_paths: Option<OpenPaths>,
}

impl Sandbox {
    /// Nothing is given up yet. `profile` is what is kept; `user` whom to become.
    pub fn new(mode: Mode, profile: Profile, user: Option<User>) -> Sandbox {
        Sandbox { mode, profile, user, in_force: InForce::default(), open_paths: None }
    }

    /// First: gives up paths, ports and capabilities. To be called while the process has one
    /// thread, since those it starts later inherit what the calling one has.
    ///
    /// # Errors
    /// When the kernel refuses, or cannot do it and it is required.
    pub fn confine(&mut self) -> Result<(), Error> {
        self.make_directories();
        if self.mode == Mode::Off {
            return Ok(());
        }
        nix::sys::prctl::set_no_new_privs().map_err(|error| Error::NoNewPrivs(error.into()))?;
        self.in_force.no_new_privs = true;
        // As the rules find them.
        let open_paths = self.profile.open_paths();
        self.in_force.landlock = self.as_far_as_asked(paths::restrict(&self.profile))?;
        self.open_paths = self.in_force.landlock.is_ok().then_some(open_paths);
        // Somebody else is become with the privileges of now, which the kernel takes away with
        // that.
        if self.user.is_none() {
            capabilities::keep(&self.profile)?;
        }
        Ok(())
    }

    fn make_directories(&self) {
        for path in self.profile.directories.iter().filter(|path| !path.exists()) {
            let made = std::fs::create_dir_all(path);
            if let (Ok(()), Some(user)) = (made, &self.user) {
                let _ = user.own(path); // as with the rest: whoever needs it says so
            }
        }
    }

    /// Second, when devices are open: becomes the user that was asked for, on all threads.
    ///
    /// # Errors
    /// When that is not allowed.
    pub fn switch_user(&mut self) -> Result<(), Error> {
        let Some(user) = &self.user else { return Ok(()) };
        if self.profile.locks_memory {
            capabilities::raise_locked_memory(); // or it is what the user's limit says
        }
        user.switch()?;
        if self.mode != Mode::Off {
            capabilities::keep(&self.profile)?;
        }
        Ok(())
    }

    /// Last, before the first client: gives up system calls, on all threads.
    ///
    /// # Errors
    /// When the kernel refuses and it is required.
    pub fn seal(&mut self) -> Result<(), Error> {
        self.in_force.capabilities = capabilities::permitted()?;
        self.in_force.user = nix::unistd::geteuid().as_raw();
        if self.mode == Mode::Off {
            return Ok(());
        }
        self.in_force.seccomp = self.as_far_as_asked(filter::restrict(&self.profile))?;
        Ok(())
    }

    /// What cannot be given up is an error only where it must be.
    fn as_far_as_asked<T>(&self, result: Result<T, Error>) -> Result<Result<T, String>, Error> {
        match result {
            Err(error) if self.mode == Mode::Required => Err(error),
            result => Ok(result.map_err(|error| error.to_string())),
        }
    }

    /// How much was asked for.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// What holds so far.
    pub fn in_force(&self) -> &InForce {
        &self.in_force
    }

    /// The first path that `needs` names and that cannot be opened, or not in that way, in this
    /// sandbox.
    pub fn closes<'a>(&self, needs: &'a Profile) -> Option<&'a Path> {
        self.open_paths.as_ref().and_then(|open| open.closes(needs))
    }

    /// The paths that can still be opened.
    pub fn permits(&self) -> Permits {
        match self.in_force.landlock {
            Ok(_) => self.profile.permits(),
            Err(_) => Permits::everything(),
        }
    }
}
