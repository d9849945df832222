//! The arguments of `freestone array`.

use crate::parse::{self, CommonArgs};
use base::Size;
use hosting::vocabulary::raid_level;
use raid::metadata::maintenance::parse_period;
use raid::metadata::{Goal, MaintenanceChange, Window};
use std::path::PathBuf;

/// The arguments of `freestone array`.
#[derive(clap::Args, Debug)]
pub struct ArrayArgs {
    /// The command
    #[command(subcommand)]
    pub command: ArrayCommand,
    /// Control socket of one server (freestone serve --control); no other is searched
    #[arg(long, global = true, value_name = "SOCKET")]
    pub control: Option<PathBuf>,
    /// Socket of freestoned: the command uses only its arrays [default: create, list and delete use
    /// a running daemon; other commands search all running arrays]
    #[arg(long, global = true, value_name = "PATH", env = api::SOCKET_VARIABLE)]
    pub socket: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

/// The commands.
#[derive(Debug, clap::Subcommand)]
pub enum ArrayCommand {
    /// Create an array of devices; their content is lost
    Create(CreateArgs),
    /// List the arrays of freestoned
    List,
    /// Stop and delete an array of freestoned; its data is lost
    Delete(DeleteArgs),
    /// Find the members of an array, recover from a crash, and report whether it can be served
    Assemble(AssembleArgs),
    /// Stop the freestone serve that runs an array
    Stop(RunningArgs),
    /// Show configuration and state of an array, or of all running arrays
    Show(ShowArgs),
    /// Mark members of an array as failed
    Fail(MembersArgs),
    /// Detach failed members and spares; fail an active member first
    Remove(RemoveArgs),
    /// Add devices: they fill empty slots, further ones become spares
    #[command(visible_alias = "spare")]
    Add(AddArgs),
    /// Re-add former members; changes since then are copied
    #[command(name = "re-add")]
    ReAdd(ReAddArgs),
    /// Copy a member to another device, which replaces it
    Replace(ReplaceArgs),
    /// Grow an array: use more of each member, add groups of members, or reshape it
    Grow(GrowArgs),
    /// Compare parity and data of a running array
    Scrub(ScrubArgs),
    /// Set the scrub schedule of an array and the read-error budget of its members
    Set(SetArgs),
    /// Pause rebuild, resync and scrub of a running array
    Pause(RunningArgs),
    /// Resume rebuild, resync and scrub of a running array
    Resume(RunningArgs),
    /// Cancel the running scrub or replacement
    Cancel(RunningArgs),
    /// Print the superblocks of members
    Examine(ExamineArgs),
    /// Verify metadata, log and parity of a stopped array
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
    #[arg(long, value_parser = parse::level)]
    pub level: api::Level,
    /// Bytes of a strip [default: the largest of 16K to 128K with at most 1M of data in a stripe]
    #[arg(long, value_name = "SIZE", value_parser = parse::value::<Size>)]
    pub strip: Option<Size>,
    /// ppl, bitmap or none [default: ppl; bitmap for mirrors, none for level 0]
    #[arg(long, value_parser = parse::consistency)]
    pub consistency: Option<api::Consistency>,
    /// Independent groups, for levels 10, 50, 60, 70 and n+m
    #[arg(long, value_name = "N")]
    pub groups: Option<usize>,
    /// Parity strips, for level n+m
    #[arg(long, value_name = "M")]
    pub parities: Option<usize>,
    /// Copies of each block, for level 10; level 1 has one per member [default: 2]
    #[arg(long, value_name = "N")]
    pub copies: Option<usize>,
    /// A spare, which replaces a member that fails; may be repeated
    #[arg(long, value_name = "DEVICE")]
    pub spare: Vec<String>,
    /// Bytes of each member to use at most [default: all of the smallest]
    #[arg(long, value_name = "SIZE", value_parser = parse::value::<Size>)]
    pub size: Option<Size>,
    #[command(flatten)]
    pub maintenance: MaintenanceArgs,
    /// Overwrite content of the members
    #[arg(long)]
    pub force: bool,
}

/// Choices about scrubs and read errors.
#[derive(clap::Args, Clone, Copy, Debug)]
pub struct MaintenanceArgs {
    /// Period of scheduled scrubs in hours, days or weeks, such as 30d, or off [default: off]
    #[arg(long, value_name = "TIME", value_parser = parse_period)]
    scrub_every: Option<u32>,
    /// Daily window of scheduled scrubs in UTC: HH:MM-HH:MM, or off for any time [default: off]
    #[arg(long, value_name = "TIMES", value_parser = parse::parsed::<Window>)]
    scrub_window: Option<Window>,
    /// Corrected read errors per hour after which a spare replaces a member, or off [default: 20]
    #[arg(long, value_name = "N", value_parser = parse::read_errors)]
    read_errors: Option<u32>,
}

impl MaintenanceArgs {
    /// The requested change.
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
    /// Keep the superblocks of its members, so that the array can be run again
    #[arg(long)]
    pub keep: bool,
    /// Do not ask for confirmation
    #[arg(long, short = 'y')]
    pub yes: bool,
}

/// `freestone array assemble`.
#[derive(clap::Args, Debug)]
pub struct AssembleArgs {
    #[command(flatten)]
    pub members: Members,
    /// Start although the missing members may hold newer data
    #[arg(long)]
    pub run: bool,
    /// Start although data may be lost; the loss is printed
    #[arg(long)]
    pub force: bool,
}

/// Members of one array, offline.
#[derive(clap::Args, Debug)]
pub struct Members {
    /// The members: files, block devices or device specifications
    #[arg(value_name = "MEMBER")]
    pub members: Vec<String>,
    /// Name or UUID of the array; members of others are refused, or ignored by --scan
    #[arg(long, value_name = "ARRAY")]
    pub name: Option<String>,
    /// Search the files and block devices of this directory for members
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

/// The members of a stopped array.
#[derive(clap::Args, Debug)]
pub struct Place {
    /// A member of the array, if the array is stopped
    #[arg(long, value_name = "MEMBER")]
    pub member: Vec<String>,
    /// A directory that holds its members, if the array is stopped
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
    /// Failed members by slot, UUID or device (failed: all of them); spares by UUID or device
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
    /// Overwrite content of the devices
    #[arg(long)]
    pub force: bool,
    /// Make them spares for every array, not only for this one
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
    /// The replacing device
    #[arg(long, value_name = "DEVICE")]
    pub with: String,
    /// Overwrite content of the device
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
    #[arg(long, value_name = "SIZE", value_parser = parse::value::<Size>)]
    pub size: Option<Size>,
    /// New members: whole groups, as large as the present ones. With --level or --members they join
    /// the only group. The array must be stopped
    #[arg(long, value_name = "MEMBER", num_args = 1.., conflicts_with = "size")]
    pub add: Vec<String>,
    /// New level of the only group, with the present and added members: 5, 6, 7.3 or n+m (keeps the
    /// parity). The array must be stopped; its data is moved while it is served afterwards
    #[arg(long, value_parser = parse::level, conflicts_with = "size")]
    pub level: Option<api::Level>,
    /// Members of the only group, with those that are added
    #[arg(long, value_name = "N", conflicts_with = "size")]
    pub members: Option<usize>,
    /// Overwrite content of the new members
    #[arg(long, requires = "add")]
    pub force: bool,
    #[command(flatten)]
    pub place: Place,
}

impl GrowArgs {
    /// The goal of the reshape, if one is requested.
    pub fn goal(&self) -> Option<Goal> {
        let goal = Goal { level: self.level.map(raid_level), members: self.members };
        (goal != Goal::default()).then_some(goal)
    }
}

/// `freestone array scrub`.
#[derive(clap::Args, Debug)]
pub struct ScrubArgs {
    #[command(flatten)]
    pub array: RunningArgs,
    /// Rewrite wrong strips
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
    /// Rewrite wrong strips
    #[arg(long)]
    pub repair: bool,
}
