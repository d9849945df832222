//! The command line as a whole: the commands, and their help.
//!
//! Only `main` and tests import this file. Options and parsers that commands share are in
//! [`crate::parse`].

use crate::array::ArrayArgs;
use crate::bench::BenchArgs;
use crate::daemon::{
    CompletionArgs, CoreArgs, DeviceArgs, DisksArgs, EventArgs, ExportArgs, GroupArgs, HistoryArgs, JobArgs,
    ManArgs, PortalArgs, StatusArgs, SupportArgs, TopArgs, VolumeArgs,
};
use crate::discover::DiscoverArgs;
use crate::error::Error;
use crate::fs::FsArgs;
use crate::image::ImageArgs;
use crate::info::InfoArgs;
use crate::pool::PoolArgs;
use crate::serve::ServeArgs;
use crate::ublk::UblkArgs;
use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory, Parser, Subcommand};
use hosting::export;
use stack::kinds;
use std::path::PathBuf;

/// Block storage for virtual machines, networks and programs.
#[derive(Debug, Parser)]
#[command(name = "freestone", version, disable_help_subcommand = true, after_help = EXIT_CODES)]
pub struct Cli {
    /// Socket of freestoned, for commands that use the daemon; also accepted after the command
    // An id of its own: clap hands values down by id.
    #[arg(id = "daemon-socket", long = "socket", value_name = "PATH")]
    socket: Option<PathBuf>,
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

impl Cli {
    /// Gives the command the socket that stands before it.
    ///
    /// # Errors
    /// When the command asks no daemon, or has a socket of its own.
    pub fn place_socket(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        let Some(socket) = self.socket.take() else { return Ok(()) };
        let shown = socket.display().to_string();
        let (name, matches) = matches.subcommand().expect("clap asks for a command");
        // Commands that ask no daemon do not have the option.
        let is_given = matches.try_contains_id("socket").is_ok()
            && matches.value_source("socket") == Some(ValueSource::CommandLine);
        if is_given {
            return Err(Error::Usage(format!("--socket {shown}: it is given before and behind {name}")));
        }
        match self.command.set_socket(socket) {
            true => Ok(()),
            false => Err(Error::Usage(format!("--socket {shown}: freestone {name} asks no daemon"))),
        }
    }
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve devices to clients until SIGTERM or SIGINT
    Serve(ServeArgs),
    /// Measure a device, or an export through its socket
    Bench(BenchArgs),
    /// Print the properties and limits of a device
    Info(InfoArgs),
    /// List the subsystems of a discovery service, or the images of a Ceph cluster
    Discover(DiscoverArgs),
    /// Create, manage and inspect RAID arrays
    Array(ArrayArgs),
    /// Check and repair the table of a pool of volumes
    Pool(PoolArgs),
    /// Create, convert, inspect and check disk images
    Image(ImageArgs),
    /// Manage volumes of the daemon: create, grow, limit, move, delete
    Volume(VolumeArgs),
    /// Manage exports of the daemon, to which clients attach
    Export(ExportArgs),
    /// Manage portals of the daemon, listeners that exports share
    Portal(PortalArgs),
    /// Manage devices of the daemon: files, drives, network storage
    Device(DeviceArgs),
    /// List the disks of the daemon's host, and which of them are free
    Disks(DisksArgs),
    /// Manage groups of volumes that share limits
    Group(GroupArgs),
    /// Manage jobs of the daemon, such as rebuilds, scrubs and moves
    Job(JobArgs),
    /// List the cores of the daemon
    Core(CoreArgs),
    /// List events of the daemon
    Event(EventArgs),
    /// Print the load of an object of the daemon over the last day, and its events
    History(HistoryArgs),
    /// Print the readiness of the daemon, or wait for it with --wait
    Status(StatusArgs),
    /// Collect a support bundle
    Support(SupportArgs),
    /// Watch the volumes of the daemon
    Top(TopArgs),
    /// Print the completion script of a shell
    Completion(CompletionArgs),
    /// Write manual pages
    Man(ManArgs),
    /// Manage disks of this machine's kernel, /dev/ublkbN
    Ublk(UblkArgs),
    /// Serve directories to virtual machines over virtio-fs
    Fs(FsArgs),
}

impl Command {
    /// Sets the socket of the daemon; `false` when the command uses no daemon.
    fn set_socket(&mut self, socket: PathBuf) -> bool {
        match self {
            Command::Array(args) => args.socket = Some(socket),
            Command::Pool(args) => args.socket = socket,
            Command::Volume(VolumeArgs { daemon, .. })
            | Command::Export(ExportArgs { daemon, .. })
            | Command::Portal(PortalArgs { daemon, .. })
            | Command::Device(DeviceArgs { daemon, .. })
            | Command::Disks(DisksArgs { daemon, .. })
            | Command::Group(GroupArgs { daemon, .. })
            | Command::Job(JobArgs { daemon, .. })
            | Command::Core(CoreArgs { daemon, .. })
            | Command::Event(EventArgs { daemon, .. })
            | Command::History(HistoryArgs { daemon, .. })
            | Command::Status(StatusArgs { daemon, .. })
            | Command::Support(SupportArgs { daemon, .. })
            | Command::Top(TopArgs { daemon, .. }) => daemon.socket = socket,
            Command::Serve(_)
            | Command::Bench(_)
            | Command::Info(_)
            | Command::Discover(_)
            | Command::Image(_)
            | Command::Completion(_)
            | Command::Man(_)
            | Command::Ublk(_)
            | Command::Fs(_) => return false,
        }
        true
    }
}

const EXIT_CODES: &str = "Exit codes: 0 success, 1 failure, 2 invalid command line.";

const SPECS: &str = "\
Devices, layers and exports are written KIND:KEY=VALUE,KEY=VALUE. A comma inside a value is doubled. A key without \
a value means on. Sizes take K, M, G or T (powers of 1024); on is also true or yes, off is also false or no.";

const SERVE_EXAMPLES: &str = "\
Examples:
  A file as a disk with four queues, on two processors:
    freestone serve --device io_uring:path=disk.img,direct=on \\
        --export vhost-user-blk:socket=/tmp/disk.sock,queues=4 --cores 0,1
  In QEMU:
    -object memory-backend-memfd,id=mem,size=1G,share=on -numa node,memdev=mem \\
    -chardev socket,id=disk,path=/tmp/disk.sock,reconnect=1 \\
    -device vhost-user-blk-pci,chardev=disk,num-queues=4
  (reconnect=1 is for QEMU before 9.2; newer versions take reconnect-ms=100)
  Two disks, one of them sometimes slow:
    freestone serve --device mem:size=1G,id=a --device mem:size=1G,id=b \\
        --layer fault:device=b,op=read,probability=0.001,delay-us=50000 \\
        --export vhost-user-blk:socket=a.sock,device=a \\
        --export vhost-user-blk:socket=b.sock,device=b
  A file for NBD clients, such as nbdcopy, qemu-img and the kernel's nbd-client:
    freestone serve --device io_uring:path=disk.img --export nbd:listen=127.0.0.1:10809

Signals:
  SIGTERM, SIGINT   stop accepting, complete requests in flight, flush every device, remove the
                    sockets, exit with 0; a second signal ends the program immediately
  SIGHUP            read the size of every device again and announce changes to clients
  SIGUSR1           print the counters of stats layers and exports";

const BENCH_EXAMPLES: &str = "\
Examples:
  Random reads from a file, as fio's io_uring engine does them:
    freestone bench --device io_uring:path=disk.img,direct=on --rw randread --bs 4K --qd 32 --time 5
  An export through its socket, polling from processor 1:
    freestone bench --device virtio-blk-vhost-user:path=/tmp/disk.sock --cores 1
  Every operation at random offsets, with verification of all reads:
    freestone bench --device virtio-blk-vhost-user:path=/tmp/disk.sock --rw randall --verify --queues 4

Latency is measured from submission to completion. The clock is read once per batch of completions, which costs some \
nanoseconds a request; --no-latency avoids that.";

const DISCOVER_EXAMPLES: &str = "\
Examples:
  The subsystems of a target, then a namespace of one:
    freestone discover nvme-tcp:address=10.0.0.1:4420
    freestone info --device nvme-tcp:address=10.0.0.1:4420,nqn=nqn.2014-08.org.example:disks

  The pools and images of a Ceph cluster:
    freestone discover rbd:user=vms";

const ARRAY_EXAMPLES: &str = "\
Examples:
  Two parities over six drives, served to a virtual machine:
    freestone array create data --level 6 /dev/sd[b-g]
    freestone serve --device raid:name=data,scan=/dev --export vhost-user-blk:socket=/run/data.sock
  While it runs:
    freestone array show data
    freestone array fail data /dev/sdc
    freestone array remove data /dev/sdc
    freestone array add data /dev/sdh
    freestone array set data --scrub-every 30d --scrub-window 22:00-06:00
  While it is stopped:
    freestone array examine /dev/sdb
    freestone array check /dev/sd[b-g]

Commands reach a running array through its control socket in $XDG_RUNTIME_DIR/freestone or /run/freestone. They work \
on a stopped array directly and lock its members meanwhile. Each command reports which of the two it did.";

const UBLK_EXAMPLES: &str = "\
Examples:
  A file as a disk of this machine with two queues, until Ctrl-C:
    freestone ublk add -n 0 -q 2 --device io_uring:path=disk.img,direct=on
    freestone serve --device io_uring:path=disk.img,direct=on --export ublk:id=0,queues=2
  List and remove disks:
    freestone ublk list
    freestone ublk del -n 0
  Continue a disk whose server was killed, with either of:
    freestone ublk recover -n 0 --device io_uring:path=disk.img,direct=on
    freestone serve --device io_uring:path=disk.img,direct=on --export ublk:id=0

add and recover stay in the foreground, as freestone serve does, whose help lists devices and layers. All commands \
need root and the module ublk_drv.";

const FS_EXAMPLES: &str = "\
Examples:
  A directory for a guest with 8 processors, for large files:
    freestone fs serve /srv/data --socket /run/data-fs.sock --profile throughput --vcpus 8
  The flags of virtiofsd and their reasons:
    freestone fs serve /srv/data --socket /run/data-fs.sock --profile throughput --vcpus 8 --explain
  Four request queues, for a guest with Linux 6.11 or newer, served by freestone-fs:
    freestone fs serve /srv/data --socket /run/data-fs.sock --profile throughput --queues 4
    freestone fs attach qemu --socket /run/data-fs.sock --tag data --queues 4
  Options for QEMU, and the mount in the guest:
    freestone fs attach qemu --socket /run/data-fs.sock --tag data
    mount -t virtiofs data /mnt

serve runs virtiofsd 1.11 or newer and restarts it only while no guest has connected: a guest whose virtiofsd was \
killed has to be restarted. When the guest disconnects, serve ends with 0.";

/// The command, with help that lists every kind and key.
pub fn command() -> clap::Command {
    let devices = ("Devices (--device)", kinds::device::KINDS);
    let layers = ("Layers (--layer)", kinds::layer::KINDS);
    let exports = ("Exports (--export)", export::KINDS);
    let stack = spec::help(&[devices, layers]);
    let all = spec::help(&[devices, layers, exports]);
    let services = spec::help(&[("Discovery services", kinds::discovery::KINDS)]);
    let help = |examples: &str, kinds: &str| format!("{examples}\n\n{SPECS}\n\n{kinds}{EXIT_CODES}");
    Cli::command()
        .mut_subcommand("serve", |serve| serve.after_long_help(help(SERVE_EXAMPLES, &all)))
        .mut_subcommand("bench", |bench| bench.after_long_help(help(BENCH_EXAMPLES, &stack)))
        .mut_subcommand("info", |info| info.after_long_help(format!("{SPECS}\n\n{stack}{EXIT_CODES}")))
        .mut_subcommand("discover", |discover| {
            discover.after_long_help(format!("{DISCOVER_EXAMPLES}\n\n{services}{EXIT_CODES}"))
        })
        .mut_subcommand("ublk", |ublk| ublk.after_long_help(format!("{UBLK_EXAMPLES}\n\n{EXIT_CODES}")))
        .mut_subcommand("fs", |fs| fs.after_long_help(format!("{FS_EXAMPLES}\n\n{EXIT_CODES}")))
        .mut_subcommand("array", |array| array.after_long_help(format!("{ARRAY_EXAMPLES}\n\n{EXIT_CODES}")))
}

/// Clap's error text in one line, without its prefix.
pub fn one_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let first = text.split("\n\n").next().unwrap_or_default();
    let words: Vec<&str> = first.split_whitespace().collect();
    let line = words.join(" ");
    line.strip_prefix("error: ").unwrap_or(&line).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn help_names_every_kind_and_key() {
        let help = command().find_subcommand_mut("serve").unwrap().render_long_help().to_string();
        let tables = [kinds::device::KINDS, kinds::layer::KINDS, export::KINDS];
        for kind in tables.into_iter().flatten() {
            assert!(help.contains(kind.name), "{}", kind.name);
            kind.keys.iter().for_each(|key| assert!(help.contains(key.name), "{}", key.name));
        }
    }

    #[test]
    fn complaints_about_the_command_line_are_one_line() {
        let complaint = |args: &[&str]| one_line(&command().try_get_matches_from(args).unwrap_err());
        assert_eq!(complaint(&["freestone", "serve", "--frob"]), "unexpected argument '--frob' found");
        let missing = complaint(&["freestone", "info"]);
        assert!(
            missing.starts_with("the following required arguments were not provided: --device"),
            "{missing}"
        );
        let bad = complaint(&["freestone", "serve", "--cores", "x"]);
        assert_eq!(
            bad,
            "invalid value 'x' for '--cores <CPUS>': expected processors such as 0, 0+1 or 0-3, each once"
        );
    }
}
