//! What `freestone array` takes.

use crate::args::{self, CommonArgs};
use graph::spec::Size;
use raid::metadata::maintenance::parse_period;
use raid::metadata::{Goal, MaintenanceChange, Window};
use std::path::PathBuf;

/// The arguments of `freestone array`.
#[derive(clap::Args, Debug)]
pub struct ArrayArgs {
    /// What to do with which array
    #[command(subcommand)]
    pub command: ArrayCommand,
    /// Ask the server with this control socket (freestone serve --control), and nobody else
    #[arg(long, global = true, value_name = "SOCKET")]
    pub control: Option<PathBuf>,
    /// The socket of freestoned: only its arrays are meant [default: create, list and delete ask the daemon that runs, if
    /// one does; other commands look for the array among all that run]
    #[arg(long, global = true, value_name = "PATH", env = api::SOCKET_VARIABLE)]
    pub socket: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

/// What to do.
#[derive(Debug, clap::Subcommand)]
pub enum ArrayCommand {
    /// Make an array of devices; what they hold is lost
    Create(CreateArgs),
    /// Every array of freestoned
    List,
    /// Have freestoned end an array and forget it; what is on it is lost
    Delete(DeleteArgs),
    /// Find an array's members, recover what a crash has left, and say whether it can be served
    Assemble(AssembleArgs),
    /// End the freestone serve that runs an array
    Stop(RunningArgs),
    /// Say what an array is and how it is; without a name, all that run
    Show(ShowArgs),
    /// Take members out of an array
    Fail(MembersArgs),
    /// Let members go that are out, and spares; a member that is in use has to be failed first
    Remove(RemoveArgs),
    /// Add devices: empty slots are filled with them, others wait as spares
    #[command(visible_alias = "spare")]
    Add(AddArgs),
    /// Take former members back; what has changed since is copied
    #[command(name = "re-add")]
    ReAdd(ReAddArgs),
    /// Copy a member to another device, which takes its place
    Replace(ReplaceArgs),
    /// Make an array larger: its members have grown, not all of them was used, it gets groups of new ones, or another
    /// shape
    Grow(GrowArgs),
    /// Compare the parity of a running array with its data
    Scrub(ScrubArgs),
    /// Choose when an array is scrubbed, and how many read errors a member may have
    Set(SetArgs),
    /// Let rebuild, resync and scrub of a running array stand still
    Pause(RunningArgs),
    /// Let them go on
    Resume(RunningArgs),
    /// End the scrub or replacement that runs
    Cancel(RunningArgs),
    /// Print the superblocks of members
    Examine(ExamineArgs),
    /// Verify metadata, log and parity of an array that does not run
    Check(CheckArgs),
}

/// `freestone array create`.
#[derive(clap::Args, Debug)]
pub struct CreateArgs {
    /// The array's name
    pub name: String,
    /// The devices, in the order of their slots: files, block devices or device specifications
    #[arg(value_name = "MEMBER", required = true)]
    pub members: Vec<String>,
    /// 0, 1, 10, 5, 6, 7.3, 50, 60, 70 or n+m
    #[arg(long, value_parser = args::level)]
    pub level: raid::Level,
    /// Bytes of a strip [default: the largest of 16K to 128K with at most 1M of data in a stripe]
    #[arg(long, value_name = "SIZE", value_parser = args::value::<Size>)]
    pub strip: Option<Size>,
    /// ppl, bitmap or none [default: ppl; bitmap for mirrors, none for level 0]
    #[arg(long, value_parser = args::consistency)]
    pub consistency: Option<raid::Consistency>,
    /// Independent groups, for levels 10, 50, 60, 70 and n+m
    #[arg(long, value_name = "N")]
    pub groups: Option<usize>,
    /// Parity strips, for level n+m
    #[arg(long, value_name = "M")]
    pub parities: Option<usize>,
    /// Copies of everything, for level 10; level 1 has as many as members [default: 2]
    #[arg(long, value_name = "N")]
    pub copies: Option<usize>,
    /// A device that waits for a member to fail, and then takes its place; may be given several times
    #[arg(long, value_name = "DEVICE")]
    pub spare: Vec<String>,
    /// Bytes of each member to use at most [default: all of the smallest]
    #[arg(long, value_name = "SIZE", value_parser = args::value::<Size>)]
    pub size: Option<Size>,
    #[command(flatten)]
    pub maintenance: MaintenanceArgs,
    /// Members hold something: overwrite it
    #[arg(long)]
    pub force: bool,
}

/// Choices about scrubs and read errors.
#[derive(clap::Args, Clone, Copy, Debug)]
pub struct MaintenanceArgs {
    /// Scrub the array by itself: the time from one scrub to the next in hours, days or weeks, such as 30d, or off
    /// [default: off]
    #[arg(long, value_name = "TIME", value_parser = parse_period)]
    scrub_every: Option<u32>,
    /// When scheduled scrubs may run, every day, in UTC: HH:MM-HH:MM, or off for any time [default: off]
    #[arg(long, value_name = "TIMES", value_parser = args::parsed::<Window>)]
    scrub_window: Option<Window>,
    /// Corrected read errors in an hour beyond which a spare replaces a member, or off [default: 20]
    #[arg(long, value_name = "N", value_parser = args::read_errors)]
    read_errors: Option<u32>,
}

impl MaintenanceArgs {
    /// What changes.
    pub fn change(&self) -> MaintenanceChange {
        MaintenanceChange {
            scrub_period_s: self.scrub_every,
            scrub_window: self.scrub_window,
            read_errors: self.read_errors,
        }
    }
}

/// `freestone array set`.
#[derive(clap::Args, Debug)]
pub struct SetArgs {
    /// The array's name or UUID
    #[arg(value_name = "ARRAY")]
    pub array: String,
    #[command(flatten)]
    pub maintenance: MaintenanceArgs,
    #[command(flatten)]
    pub place: Place,
}

/// `freestone array delete`.
#[derive(clap::Args, Debug)]
pub struct DeleteArgs {
    /// The array's name or UUID
    #[arg(value_name = "ARRAY")]
    pub array: String,
    /// Leave its members as they are, so that it can be run again
    #[arg(long)]
    pub keep: bool,
    /// Do not ask whether to go on
    #[arg(long, short = 'y')]
    pub yes: bool,
}

/// `freestone array assemble`.
#[derive(clap::Args, Debug)]
pub struct AssembleArgs {
    #[command(flatten)]
    pub members: Members,
    /// Go on although members are missing that could have gone on without these
    #[arg(long)]
    pub run: bool,
    /// Go on although data may be lost; says what
    #[arg(long)]
    pub force: bool,
}

/// Members of one array, offline.
#[derive(clap::Args, Debug)]
pub struct Members {
    /// Its members: files, block devices or device specifications
    #[arg(value_name = "MEMBER")]
    pub members: Vec<String>,
    /// The array's name or UUID; members of others are refused, or passed over by --scan
    #[arg(long, value_name = "ARRAY")]
    pub name: Option<String>,
    /// Look for members among the files and block devices of this directory
    #[arg(long, value_name = "DIR")]
    pub scan: Vec<PathBuf>,
}

/// A running array.
#[derive(clap::Args, Debug)]
pub struct RunningArgs {
    /// The array's name or UUID
    #[arg(value_name = "ARRAY")]
    pub array: String,
}

/// `freestone array show`.
#[derive(clap::Args, Debug)]
pub struct ShowArgs {
    /// The array's name or UUID
    #[arg(value_name = "ARRAY")]
    pub array: Option<String>,
    #[command(flatten)]
    pub place: Place,
}

/// Where an array's members are when it does not run.
#[derive(clap::Args, Debug)]
pub struct Place {
    /// A member of the array, if the array does not run
    #[arg(long, value_name = "MEMBER")]
    pub member: Vec<String>,
    /// A directory that holds its members, if the array does not run
    #[arg(long, value_name = "DIR")]
    pub scan: Vec<PathBuf>,
}

impl Place {
    /// Whether there is anything to look at.
    pub fn is_given(&self) -> bool {
        !(self.member.is_empty() && self.scan.is_empty())
    }

    /// The same, for a command that works on one array's members.
    pub fn members(&self, array: &str) -> Members {
        Members { members: self.member.clone(), name: Some(array.to_owned()), scan: self.scan.clone() }
    }
}

/// `freestone array fail`.
#[derive(clap::Args, Debug)]
pub struct MembersArgs {
    /// The array's name or UUID
    #[arg(value_name = "ARRAY")]
    pub array: String,
    /// Members by slot, UUID or device
    #[arg(value_name = "MEMBER", required = true)]
    pub members: Vec<String>,
    #[command(flatten)]
    pub place: Place,
}

/// `freestone array remove`.
#[derive(clap::Args, Debug)]
pub struct RemoveArgs {
    /// The array's name or UUID
    #[arg(value_name = "ARRAY")]
    pub array: String,
    /// Members that are out, by slot, UUID or device (failed: all of them); spares, by UUID or device
    #[arg(value_name = "MEMBER", required = true)]
    pub members: Vec<String>,
    #[command(flatten)]
    pub place: Place,
}

/// `freestone array add`.
#[derive(clap::Args, Debug)]
pub struct AddArgs {
    #[command(flatten)]
    pub devices: ReAddArgs,
    /// They hold something: overwrite it
    #[arg(long)]
    pub force: bool,
    /// They are spares for any array, not for this one alone
    #[arg(long)]
    pub global: bool,
}

/// `freestone array re-add`.
#[derive(clap::Args, Debug)]
pub struct ReAddArgs {
    /// The array's name or UUID
    #[arg(value_name = "ARRAY")]
    pub array: String,
    /// Files, block devices or device specifications
    #[arg(value_name = "DEVICE", required = true)]
    pub devices: Vec<String>,
    #[command(flatten)]
    pub place: Place,
}

/// `freestone array replace`.
#[derive(clap::Args, Debug)]
pub struct ReplaceArgs {
    /// The array's name or UUID
    #[arg(value_name = "ARRAY")]
    pub array: String,
    /// The member by slot, UUID or device
    #[arg(id = "replaced", value_name = "MEMBER")]
    pub member: String,
    /// What takes its place
    #[arg(long, value_name = "DEVICE")]
    pub with: String,
    /// The device holds something: overwrite it
    #[arg(long)]
    pub force: bool,
    #[command(flatten)]
    pub place: Place,
}

/// `freestone array grow`.
#[derive(clap::Args, Debug)]
pub struct GrowArgs {
    /// The array's name or UUID
    #[arg(value_name = "ARRAY")]
    pub array: String,
    /// Bytes of each member to use at most [default: all of the smallest]
    #[arg(long, value_name = "SIZE", value_parser = args::value::<Size>)]
    pub size: Option<Size>,
    /// New members: whole groups more, as large as those that there are; with --level or --members they join the one
    /// group that there is. The array must not run
    #[arg(long, value_name = "MEMBER", num_args = 1.., conflicts_with = "size")]
    pub add: Vec<String>,
    /// Another level of one group, with the members that there are and those that are added: 5, 6, 7.3 or n+m (parity
    /// stays as it is). The array must not run; its data is moved once it is served
    #[arg(long, value_parser = args::level, conflicts_with = "size")]
    pub level: Option<raid::Level>,
    /// How many members the one group shall have, with those that are added
    #[arg(long, value_name = "N", conflicts_with = "size")]
    pub members: Option<usize>,
    /// The new members hold something: overwrite it
    #[arg(long, requires = "add")]
    pub force: bool,
    #[command(flatten)]
    pub place: Place,
}

impl GrowArgs {
    /// The shape that is wanted, if another one is.
    pub fn goal(&self) -> Option<Goal> {
        let goal = Goal { level: self.level, members: self.members };
        (goal != Goal::default()).then_some(goal)
    }
}

/// `freestone array scrub`.
#[derive(clap::Args, Debug)]
pub struct ScrubArgs {
    #[command(flatten)]
    pub array: RunningArgs,
    /// Write what is wrong anew
    #[arg(long)]
    pub repair: bool,
}

/// `freestone array examine`.
#[derive(clap::Args, Debug)]
pub struct ExamineArgs {
    /// Files, block devices or device specifications
    #[arg(value_name = "MEMBER", required = true)]
    pub members: Vec<String>,
}

/// `freestone array check`.
#[derive(clap::Args, Debug)]
pub struct CheckArgs {
    #[command(flatten)]
    pub members: Members,
    /// Write what is wrong anew
    #[arg(long)]
    pub repair: bool,
}
