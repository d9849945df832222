//! The command line. Options that virtiofsd has, too, have its names and its meaning.

use clap::Parser;
use log::LevelFilter;
use std::time::Duration;
use virtiofsd::passthrough::{CachePolicy, InodeFileHandlesMode, NegotiationMode};
use virtiofsd::sandbox::SandboxMode;
use virtiofsd::seccomp::SeccompAction;
use virtiofsd::vhost_user::MAX_TAG_LEN;

/// Most request queues. The library vhost-user-backend assigns queues to threads by 64 bits, of
/// which the hiprio queue has one.
pub const MAX_QUEUES: u16 = 63;
/// How long a guest keeps names and attributes under the policies `metadata` and `always`.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Serve a directory to a virtual machine over virtio-fs, with several request queues.
///
/// Standard input is the listening socket: `freestone fs serve --queues N` starts this program.
#[derive(Debug, Parser)]
#[command(name = "freestone-fs", version = VERSION, args_override_self = true)]
pub struct Args {
    /// The directory
    #[arg(long, value_name = "DIR")]
    pub shared_dir: String,
    /// The listening socket, which is standard input
    #[arg(long, value_name = "FD", value_parser = clap::value_parser!(u16).range(0..=0))]
    pub fd: u16,
    /// Request queues, 1 to 63, each with a thread of its own
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_QUEUES)))]
    pub queues: u16,
    /// Name of the file system in the configuration space, for monitors that read it
    #[arg(long, value_name = "NAME", value_parser = tag)]
    pub tag: Option<String>,
    /// Sandbox: namespace, chroot or none
    #[arg(long, value_name = "KIND", default_value = "namespace")]
    pub sandbox: SandboxMode,
    /// Reaction to an unknown system call: kill, log, trap, or none for no filter
    #[arg(long, value_name = "ACTION", default_value = "kill", value_parser = seccomp)]
    pub seccomp: SeccompAction,
    /// Capabilities to add to those of the profile, or to remove, such as +sys_admin:-chown
    #[arg(
        long,
        value_name = "LIST",
        default_value = "",
        allow_hyphen_values = true,
        hide_default_value = true
    )]
    pub modcaps: String,
    /// Limit of open files; 0 leaves it as it is [default: the smaller of 1000000 and fs.nr_open]
    #[arg(long, value_name = "N")]
    pub rlimit_nofile: Option<u64>,
    /// Policy of the guest's caches
    #[arg(long, value_enum, value_name = "POLICY", default_value = "auto")]
    pub cache: Cache,
    /// Let the guest collect writes
    #[arg(long)]
    pub writeback: bool,
    /// Pass O_DIRECT of programs in the guest on to the host
    #[arg(long)]
    pub allow_direct_io: bool,
    /// Let programs in the guest map files shared under the policies metadata and never
    #[arg(long)]
    pub allow_mmap: bool,
    /// Refer to files by handles rather than by open files: never, prefer or mandatory
    #[arg(long, value_name = "MODE", default_value = "prefer", value_parser = file_handles)]
    pub inode_file_handles: InodeFileHandlesMode,
    /// Make file systems below the directory file systems of their own in the guest
    #[arg(long)]
    pub announce_submounts: bool,
    /// Refuse all changes
    #[arg(long)]
    pub readonly: bool,
    /// Serve extended attributes
    #[arg(long)]
    pub xattr: bool,
    /// POSIX ACLs, with extended attributes: never, auto or always
    #[arg(long, value_name = "MODE", default_value = "never")]
    pub posix_acl: NegotiationMode,
    /// Answer no READDIRPLUS
    #[arg(long)]
    pub no_readdirplus: bool,
    /// Let the host remove set-user-ID and set-group-ID bits on writes
    #[arg(long)]
    pub killpriv_v2: bool,
    /// Keep O_NOATIME, which only owners of files may use
    #[arg(long)]
    pub preserve_noatime: bool,
    /// Log level: error, warn, info, debug, trace or off
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log_level: LevelFilter,
}

/// The version of this program, and the one of the library.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (library virtiofsd 1.14.0)");

/// The names, attributes and data that a guest keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Cache {
    /// Names and attributes for a second, data until a file is opened again
    Auto,
    /// Everything
    Always,
    /// Names and attributes
    Metadata,
    /// Nothing
    Never,
}

impl Cache {
    /// The policy of the library.
    pub fn policy(self) -> CachePolicy {
        match self {
            Cache::Auto => CachePolicy::Auto,
            Cache::Always => CachePolicy::Always,
            Cache::Metadata => CachePolicy::Metadata,
            Cache::Never => CachePolicy::Never,
        }
    }

    /// How long the guest keeps names and attributes.
    pub fn timeout(self) -> Duration {
        match self {
            Cache::Never => Duration::ZERO,
            Cache::Auto => Duration::from_secs(1),
            Cache::Metadata | Cache::Always => DAY,
        }
    }
}

fn tag(text: &str) -> Result<String, String> {
    match (1..=MAX_TAG_LEN).contains(&text.len()) {
        true => Ok(text.to_owned()),
        false => Err(format!("{} bytes: want 1 to {MAX_TAG_LEN}", text.len())),
    }
}

fn seccomp(text: &str) -> Result<SeccompAction, &'static str> {
    match text {
        "none" => Ok(SeccompAction::Allow),
        "kill" => Ok(SeccompAction::Kill),
        "log" => Ok(SeccompAction::Log),
        "trap" => Ok(SeccompAction::Trap),
        _ => Err("want kill, log, trap or none"),
    }
}

fn file_handles(text: &str) -> Result<InodeFileHandlesMode, &'static str> {
    match text {
        "never" => Ok(InodeFileHandlesMode::Never),
        "prefer" => Ok(InodeFileHandlesMode::Prefer),
        "mandatory" => Ok(InodeFileHandlesMode::Mandatory),
        _ => Err("want never, prefer or mandatory"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(more: &[&str]) -> Result<Args, String> {
        let words = ["freestone-fs", "--shared-dir=/d", "--fd=0", "--queues=4"];
        Args::try_parse_from(words.iter().chain(more)).map_err(|error| error.to_string())
    }

    #[test]
    fn a_later_option_replaces_that_of_the_profile() {
        let args = parse(&["--cache=never", "--cache=always", "--queues=63"]).unwrap();
        assert_eq!((args.queues, args.cache), (63, Cache::Always));
    }

    #[test]
    fn invalid_options_are_refused_with_their_value() {
        for (option, reason) in [
            ("--queues=0", "0 is not in 1..=63"),
            ("--queues=64", "64 is not in 1..=63"),
            ("--fd=3", "3 is not in 0..=0"),
            ("--tag=", "0 bytes: want 1 to 36"),
            ("--tag=0123456789012345678901234567890123456", "37 bytes: want 1 to 36"),
            ("--seccomp=off", "want kill, log, trap or none"),
            ("--inode-file-handles=x", "want never, prefer or mandatory"),
            ("--thread-pool-size=4", "unexpected argument '--thread-pool-size'"),
        ] {
            let text = parse(&[option]).unwrap_err();
            assert!(text.contains(reason), "{option}: {text}");
        }
    }

    #[test]
    fn the_version_names_the_library_of_the_lock_file() {
        let lock = include_str!("../Cargo.lock");
        let entry = lock.split("[[package]]").find(|entry| entry.contains("name = \"virtiofsd\"")).unwrap();
        let version = entry.lines().find_map(|line| line.strip_prefix("version = ")).unwrap();
        assert!(
            VERSION.ends_with(&format!("virtiofsd {})", version.trim_matches('"'))),
            "{VERSION} {version}"
        );
    }
}
