//! `freestone fs`: directories of the host for virtual machines, over virtio-fs.
//!
//! ```text
//!   guest ─ virtio-fs ─► virtiofsd (speaks FUSE) ◄─ supervise: flags of a profile, socket, restarts, end
//! ```
//!
//! With several request queues, the server is `freestone-fs`, a program of the same release that
//! stands on virtiofsd's library. It has virtiofsd's flags and the words of its log.
//!
//! This program never speaks FUSE itself, and no request of a guest passes through it.

pub mod process;
mod profile;
mod program;
mod supervise;

use crate::error::Error;
use crate::output::Output;
use crate::parse::{self, CommonArgs};
use api::Attach;
use hosting::attach::{quoted, virtio_fs};
use hosting::export::Permissions;
use profile::{Flag, Profile};
use program::Program;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Longest path of a Unix socket, in bytes: `sun_path` with its final zero, unix(7).
const MAX_SOCKET_PATH: usize = 107;
/// Longest tag, in bytes: virtio 1.2 section 5.11.4.
const MAX_TAG: usize = 36;
/// Flags of virtiofsd that this program sets.
const OWN_FLAGS: [&str; 10] = [
    "--shared-dir",
    "--socket",
    "--socket-path",
    "--socket-group",
    "--fd",
    "--log-level",
    "--syslog",
    "--sandbox",
    "--print-capabilities",
    "--queues",
];
/// Most request queues: those of `freestone-fs`.
const MAX_QUEUES: i64 = 63;

/// The arguments of `freestone fs`.
#[derive(clap::Args, Debug)]
pub struct FsArgs {
    /// The command
    #[command(subcommand)]
    pub command: FsCommand,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

/// The commands.
#[derive(Debug, clap::Subcommand)]
pub enum FsCommand {
    /// Serve a directory to a virtual machine with virtiofsd or freestone-fs, until SIGTERM, SIGINT
    /// or the end of the machine
    Serve(ServeArgs),
    /// Print the options of virtual machine monitors for a socket, and the mount of the guest
    Attach(AttachArgs),
}

/// `freestone fs serve`.
#[derive(clap::Args, Debug)]
pub struct ServeArgs {
    /// The directory
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// The Unix socket for the virtual machine monitor
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// The kind of use, which decides the flags of virtiofsd
    #[arg(long, value_enum, default_value = "latency")]
    profile: Profile,
    /// Request queues, 1 to 63. More than one are served by freestone-fs, each by a thread of its
    /// own; guests use them from Linux 6.11 on
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u16).range(1..=MAX_QUEUES))]
    queues: u16,
    /// Processors of the guest, 1 to 1024: threads of the profile throughput with one queue
    /// [default: 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    vcpus: Option<u16>,
    /// Limit of open files of virtiofsd, 1024 or more [default: virtiofsd's, under dense 32768]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1024..=1 << 30))]
    nofile: Option<u64>,
    /// Sandbox of virtiofsd: namespaces of its own (as another user than root a user namespace,
    /// too), chroot (root only), or none
    #[arg(long, value_enum, default_value = "namespace")]
    sandbox: Sandbox,
    /// Permission bits of the socket, octal [default: 600, with --socket-group 660]
    #[arg(long, value_name = "MODE", value_parser = parse::value::<Permissions>)]
    socket_permissions: Option<Permissions>,
    /// Group of the socket, by number [default: the user's]
    #[arg(long, value_name = "GID")]
    socket_group: Option<u32>,
    /// The program [default: the first of /usr/libexec, /usr/lib/qemu and PATH that is new enough;
    /// with several queues the freestone-fs next to this program, or of ../libexec or PATH]
    #[arg(long, value_name = "PATH")]
    virtiofsd: Option<PathBuf>,
    /// Print the command line of virtiofsd and the reason of each flag, and end
    #[arg(long)]
    explain: bool,
    /// Further flags of virtiofsd, such as --xattr or --readonly; they replace those of the profile
    #[arg(last = true, value_name = "FLAG")]
    flags: Vec<String>,
}

/// `freestone fs attach`.
#[derive(clap::Args, Debug)]
pub struct AttachArgs {
    /// Print only the line for this program: qemu, libvirt-domain, libvirt-filesystem,
    /// cloud-hypervisor, mount or fstab
    program: Option<String>,
    /// The socket of freestone fs serve
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// Request queues, 1 to 63, and no more than those of freestone fs serve
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u16).range(1..=MAX_QUEUES))]
    queues: u16,
    /// Name by which the guest mounts the file system
    #[arg(long, value_name = "NAME", default_value = "fs", value_parser = tag)]
    tag: String,
}

/// How virtiofsd confines itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Sandbox {
    /// Namespaces of its own
    Namespace,
    /// The directory is its root
    Chroot,
    /// System calls are restricted alone
    None,
}

fn tag(text: &str) -> Result<String, String> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    match (1..=MAX_TAG).contains(&text.len()) && text.bytes().all(is_plain) {
        true => Ok(text.to_owned()),
        false => Err(format!("expected 1 to {MAX_TAG} letters, digits, '-', '_' or '.'")),
    }
}

/// Runs the command.
///
/// # Errors
/// When an argument is invalid, virtiofsd is missing or fails, or a guest has lost its mount.
pub fn run(args: &FsArgs) -> Result<(), Error> {
    let output = Output::new(args.common.json);
    match &args.command {
        FsCommand::Attach(args) => attach(args, output),
        FsCommand::Serve(args) => {
            let plan = ServePlan::new(args)?;
            if args.explain {
                plan.explain(output);
                return Ok(());
            }
            supervise::run(&plan, output)
        }
    }
}

fn attach(args: &AttachArgs, output: Output) -> Result<(), Error> {
    let socket = absolute(&args.socket)?;
    check_length(&socket)?;
    let text = socket
        .to_str()
        .ok_or_else(|| Error::Usage(format!("--socket {}: want a path in UTF-8", socket.display())))?;
    let Attach { mut lines, mut argv } = virtio_fs(text, &args.tag, args.queues);
    if let Some(program) = &args.program {
        if !lines.contains_key(program) {
            let known = lines.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            return Err(Error::Usage(format!("{program}: nothing is known for it, but for {known}")));
        }
        lines.retain(|name, _| name == program);
        argv.retain(|name, _| name == program);
    }
    let human = match &args.program {
        Some(_) => lines.values().cloned().collect::<String>(),
        None => titled(&lines),
    };
    output.event("attach", human, json!({ "lines": lines, "argv": argv }));
    Ok(())
}

fn titled(lines: &BTreeMap<String, String>) -> String {
    lines.iter().map(|(name, line)| format!("{name}:\n  {line}")).collect::<Vec<_>>().join("\n")
}

/// Refuses a path that is too long for a socket.
fn check_length(path: &Path) -> Result<(), Error> {
    match path.as_os_str().as_bytes().len() {
        len if len > MAX_SOCKET_PATH => {
            let name = path.display();
            Err(Error::Usage(format!("--socket {name}: {len} bytes: want {MAX_SOCKET_PATH} at most")))
        }
        _ => Ok(()),
    }
}

fn absolute(socket: &Path) -> Result<PathBuf, Error> {
    std::path::absolute(socket)
        .map_err(|error| Error::Usage(format!("--socket {}: {error}", socket.display())))
}

/// A server to start, of which everything that can be checked before has been checked.
struct ServePlan {
    program: Program,
    profile: Profile,
    directory: PathBuf,
    socket: PathBuf,
    permissions: u32,
    group: Option<u32>,
    flags: Vec<Flag>,
}

impl ServePlan {
    fn new(args: &ServeArgs) -> Result<ServePlan, Error> {
        let directory = directory(&args.directory)?;
        check_length(&args.socket)?;
        refuse_inside(&absolute(&args.socket)?, &directory)?;
        if args.sandbox == Sandbox::Chroot && sandbox::effective_user() != 0 {
            return Err(Error::Usage("--sandbox chroot: it needs root".into()));
        }
        args.flags.iter().try_for_each(|flag| check_flag(flag))?;
        let program = Program::find(args.virtiofsd.as_deref(), args.queues)?;
        let mut flags = own_flags(&directory, args.sandbox);
        flags.extend(args.profile.flags(args.vcpus, args.nofile, args.queues));
        let given = args.flags.iter().map(|text| Flag { text: text.clone(), why: "given after --" });
        flags.extend(given);
        let usual = if args.socket_group.is_some() { 0o660 } else { 0o600 };
        Ok(ServePlan {
            program,
            profile: args.profile,
            directory,
            socket: args.socket.clone(),
            permissions: args.socket_permissions.map_or(usual, |permissions| permissions.0),
            group: args.socket_group,
            flags,
        })
    }

    /// Program and arguments.
    fn command(&self) -> Vec<OsString> {
        let flags = self.flags.iter().map(|flag| flag.text.clone().into());
        std::iter::once(self.program.path.clone().into()).chain(flags).collect()
    }

    fn line(&self) -> String {
        let (directory, socket) = (self.directory.display(), self.socket.display());
        format!(
            "{directory} at {socket}, profile {}, {} {}",
            self.profile.name(),
            self.program.name,
            self.program.version
        )
    }

    fn json(&self) -> Value {
        let argv: Vec<_> = self.command().iter().map(|word| word.to_string_lossy().into_owned()).collect();
        json!({
            "directory": self.directory,
            "socket": self.socket.display().to_string(),
            "profile": self.profile.name(),
            "program": self.program.name,
            "version": self.program.version,
            "argv": argv,
        })
    }

    fn explain(&self, output: Output) {
        let words: Vec<String> = self.command().iter().map(|word| quoted(&word.to_string_lossy())).collect();
        let mut text = format!("{}\n\n{}", words.join(" "), self.line());
        let mut fields = self.json();
        fields["flags"] =
            self.flags.iter().map(|Flag { text, why }| json!({ "flag": text, "why": why })).collect();
        self.flags.iter().for_each(|Flag { text: flag, why }| text += &format!("\n  {flag}\n      {why}"));
        output.event("explain", text, fields);
    }
}

/// The absolute path of the directory to serve.
fn directory(path: &Path) -> Result<PathBuf, Error> {
    let name = path.display();
    let found = path.canonicalize().map_err(|error| Error::Usage(format!("DIR {name}: {error}")))?;
    if !found.is_dir() {
        return Err(Error::Usage(format!("DIR {name}: it is not a directory")));
    }
    match found.to_str() {
        Some(_) => Ok(found),
        None => Err(Error::Usage(format!("DIR {name}: virtiofsd takes a path in UTF-8 only"))),
    }
}

/// Refuses a socket that a guest could replace.
fn refuse_inside(socket: &Path, directory: &Path) -> Result<(), Error> {
    let name = socket.display();
    let parent = socket.parent().unwrap_or(Path::new("/"));
    let parent = parent
        .canonicalize()
        .map_err(|error| Error::Usage(format!("--socket {name}: its directory: {error}")))?;
    match parent.starts_with(directory) {
        true => {
            let directory = directory.display();
            Err(Error::Usage(format!(
                "--socket {name}: it is in {directory}, where the guest could replace it"
            )))
        }
        false => Ok(()),
    }
}

/// Refuses flags of virtiofsd that this program sets, and words that are no flags.
fn check_flag(text: &str) -> Result<(), Error> {
    let name = text.split_once('=').map_or(text, |(name, _)| name);
    if !name.starts_with("--") || name.len() == 2 {
        return Err(Error::Usage(format!("{text}: want a flag of virtiofsd as --FLAG or --FLAG=VALUE")));
    }
    match OWN_FLAGS.contains(&name) {
        true => Err(Error::Usage(format!("{name}: freestone fs serve sets this flag of virtiofsd"))),
        false => Ok(()),
    }
}

/// The flags under every profile.
fn own_flags(directory: &Path, sandbox: Sandbox) -> Vec<Flag> {
    let flag = |text: &str, why| Flag { text: text.to_owned(), why };
    let is_root = sandbox::effective_user() == 0;
    let sandbox = match sandbox {
        Sandbox::Namespace if is_root => flag(
            "--sandbox=namespace",
            "virtiofsd sees the directory alone, and no network and other processes",
        ),
        Sandbox::Namespace => flag(
            "--sandbox=namespace",
            "a user namespace with this user alone, in which virtiofsd sees the directory alone",
        ),
        Sandbox::Chroot => flag("--sandbox=chroot", "the directory is virtiofsd's root"),
        Sandbox::None => {
            flag("--sandbox=none", "virtiofsd sees what this user sees; system calls are restricted")
        }
    };
    vec![
        flag(&format!("--shared-dir={}", directory.display()), "the directory that the guest sees"),
        flag("--fd=0", "the socket, which gets its owner and its permissions before a client can connect"),
        flag("--log-level=info", "the log reports when virtiofsd is ready, and when a guest connects"),
        sandbox,
        flag(
            "--announce-submounts",
            "file systems below the directory are file systems of their own in the guest",
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A plan for this directory.
    pub(super) fn plan(directory: &str) -> ServePlan {
        ServePlan {
            program: Program { name: "virtiofsd", path: "/virtiofsd".into(), version: "1.13.2".into() },
            profile: Profile::Latency,
            directory: directory.into(),
            socket: "/s".into(),
            permissions: 0o600,
            group: None,
            flags: own_flags(Path::new(directory), Sandbox::Namespace),
        }
    }

    #[test]
    fn flags_of_the_caller_are_flags_that_this_program_does_not_set() {
        for good in ["--xattr", "--posix-acl=always", "--modcaps=+sys_admin"] {
            assert!(check_flag(good).is_ok(), "{good}");
        }
        for own in ["--fd=3", "--socket-path=/s", "--sandbox", "--syslog"] {
            assert!(check_flag(own).unwrap_err().to_string().contains("sets this flag"), "{own}");
        }
        for word in ["x", "-o", "--", "--=x"] {
            assert!(check_flag(word).unwrap_err().to_string().contains("want a flag"), "{word}");
        }
    }

    #[test]
    fn a_tag_is_a_short_word() {
        assert_eq!(tag(&"x".repeat(36)), Ok("x".repeat(36)));
        for bad in ["", "a b", "a,b", "ä", &"x".repeat(37)] {
            assert!(tag(bad).is_err(), "{bad}");
        }
    }
}
