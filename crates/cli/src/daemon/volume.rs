//! `freestone volume`.

use super::connection::Begun;
use super::labels::{self, LabelsArgs, RelabelArgs, SelectionArgs};
use super::table::{fields, table};
use super::{DaemonArgs, QosArgs, Session, job, limits};
use crate::error::Error;
use crate::parse;
use api::{Job, JobKind, MinQos, NewVolume, Qos, Volume, VolumeChange, VolumeMove};
use base::Size;
use client::Method;
use spec::Value;

/// The arguments of `freestone volume`.
#[derive(clap::Args, Debug)]
pub struct VolumeArgs {
    /// The command
    #[command(subcommand)]
    command: VolumeCommand,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// The commands. Volumes are named by name or UUID.
#[derive(Debug, clap::Subcommand)]
enum VolumeCommand {
    /// List the volumes of the daemon
    List {
        #[command(flatten)]
        selection: SelectionArgs,
    },
    /// Show a volume
    Show {
        /// Its name or UUID
        name: String,
    },
    /// Create a volume; it reads as zeroes, or as a copy of another object
    Create {
        /// Its name
        name: String,
        /// The backing array or device
        #[arg(
            long,
            visible_alias = "array",
            visible_alias = "device",
            alias = "on",
            value_name = "ARRAY|DEVICE"
        )]
        backing: String,
        /// Its size; with --from the size of the source is the default
        #[arg(long, value_name = "SIZE", value_parser = parse::value::<Size>, required_unless_present = "from")]
        size: Option<Size>,
        /// The source of its content; if exports serve it writable, --pivot is needed
        #[arg(long, value_name = "DEVICE|ARRAY|VOLUME")]
        from: Option<String>,
        /// Replace the source, a device or array, in its exports, whose clients stay connected
        #[arg(long, requires = "from")]
        pivot: bool,
        #[command(flatten)]
        qos: QosArgs,
        /// The group whose limits it shares
        #[arg(long, value_name = "GROUP")]
        group: Option<String>,
        #[command(flatten)]
        min_qos: MinQosArgs,
        /// Overwrite content of an array or device that has no volumes yet
        #[arg(long)]
        force: bool,
        /// Name of the provisioner token that may change and delete it
        #[arg(long, value_name = "TOKEN")]
        label: Option<String>,
        #[command(flatten)]
        labels: LabelsArgs,
    },
    /// Set and remove labels of a volume
    Label(RelabelArgs),
    /// Grow a volume, also while it is in use
    Grow {
        /// Its name or UUID
        name: String,
        /// Its new size, or the difference: 20G, +1G
        #[arg(long, value_name = "[+]SIZE", value_parser = growth)]
        size: Growth,
    },
    /// Rename a volume
    Rename {
        /// Its name or UUID
        name: String,
        /// The new name
        new_name: String,
    },
    /// Move a volume to another array or device, also while it is in use
    Move {
        /// Its name or UUID
        name: String,
        /// The new backing array or device
        #[arg(long, value_name = "ARRAY|DEVICE")]
        to: String,
        /// Wait until the move has ended
        #[arg(long)]
        wait: bool,
        /// Overwrite content of an array or device that has no volumes yet
        #[arg(long)]
        force: bool,
    },
    /// Set the limits of a volume; omitted limits are removed
    Set {
        /// Its name or UUID
        name: String,
        #[command(flatten)]
        qos: QosArgs,
        /// The group whose limits it shares
        #[arg(long, value_name = "GROUP", conflicts_with = "no_group")]
        group: Option<String>,
        #[command(flatten)]
        min_qos: MinQosArgs,
        /// Remove it from its group
        #[arg(long)]
        no_group: bool,
    },
    /// Delete a volume that no export serves; its data is lost
    Delete {
        /// Its name or UUID
        name: String,
    },
}

/// The guaranteed minimum of a volume in its group.
#[derive(clap::Args, Debug)]
struct MinQosArgs {
    /// Guaranteed requests a second, out of the limits of its group
    #[arg(long, value_name = "N", value_parser = parse::value::<Size>)]
    min_iops: Option<Size>,
    /// Guaranteed bytes a second, out of the limits of its group
    #[arg(long, value_name = "SIZE", value_parser = parse::value::<Size>)]
    min_bandwidth: Option<Size>,
}

impl MinQosArgs {
    fn min_qos(&self) -> MinQos {
        let rate = |size: Option<Size>| size.map(|size| size.0);
        MinQos { requests_per_s: rate(self.min_iops), bytes_per_s: rate(self.min_bandwidth) }
    }
}

/// A new size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Growth {
    To(u64),
    By(u64),
}

impl Growth {
    /// The new size of an object whose present size `size` reads.
    pub(super) fn of(self, size: impl FnOnce() -> Result<u64, Error>) -> Result<u64, Error> {
        match self {
            Growth::To(size) => Ok(size),
            Growth::By(more) => Ok(size()?.saturating_add(more)),
        }
    }
}

pub(super) fn growth(text: &str) -> Result<Growth, String> {
    let growth = match text.strip_prefix('+') {
        Some(more) => Size::parse(more).map(|size| Growth::By(size.0)),
        None => Size::parse(text).map(|size| Growth::To(size.0)),
    };
    growth.ok_or_else(|| format!("expected {}, or + and that", Size::expected()))
}

impl VolumeArgs {
    /// Carries the command out.
    ///
    /// # Errors
    /// When the daemon refuses the request or does not answer.
    pub fn run(&self) -> Result<(), Error> {
        let session = Session::new(&self.daemon)?;
        let find = |name: &str| session.client.get::<Volume>(&["volumes", name]);
        let change = |name: &str, change: VolumeChange| {
            let volume = session.client.change::<Volume>(Method::PATCH, &["volumes", name], &change)?;
            session.print_change(volume, show);
            Ok(())
        };
        match &self.command {
            VolumeCommand::List { selection } => {
                let volumes: Vec<Volume> = session.client.list(&["volumes"], &selection.query())?;
                session.print(&volumes, || list(&volumes));
                Ok(())
            }
            VolumeCommand::Show { name } => {
                let volume = find(name)?;
                session.print(&volume, || show(&volume));
                Ok(())
            }
            VolumeCommand::Create {
                name,
                backing,
                size,
                from,
                pivot,
                qos,
                group,
                min_qos,
                force,
                label,
                labels,
            } => {
                let (name, backing, qos) = (name.clone(), backing.clone(), qos.qos());
                let (group, min_qos, label) = (group.clone(), min_qos.min_qos(), label.clone());
                let new = NewVolume {
                    name,
                    backing,
                    size_bytes: size.map_or(0, |size| size.0),
                    from: from.clone(),
                    pivot: *pivot,
                    qos,
                    group,
                    min_qos,
                    force: *force,
                    label,
                    labels: labels.labels(),
                };
                let made = session.client.change::<Begun<Volume>>(Method::POST, &["volumes"], &new)?;
                match made {
                    Some(Begun::Done(volume)) if volume.copying_from.is_some() => {
                        wait_for_copy(&session, &volume)
                    }
                    made => finish(&session, made, &new.name, new.size_bytes),
                }
            }
            VolumeCommand::Label(args) => {
                let labels = Some(args.change()?);
                change(&args.name, VolumeChange { labels, ..VolumeChange::default() })
            }
            VolumeCommand::Grow { name, size } => {
                let size = size.of(|| Ok(find(name)?.size_bytes))?;
                let change = VolumeChange { size_bytes: Some(size), ..VolumeChange::default() };
                let path = ["volumes", name];
                let grown = session.client.change::<Begun<Volume>>(Method::PATCH, &path, &change)?;
                finish(&session, grown, name, size)
            }
            VolumeCommand::Rename { name, new_name } => {
                change(name, VolumeChange { name: Some(new_name.clone()), ..VolumeChange::default() })
            }
            VolumeCommand::Move { name, to, wait, force } => {
                let place = VolumeMove { backing: to.clone(), force: *force };
                let job = session.client.change::<Job>(Method::POST, &["volumes", name, "move"], &place)?;
                session.print_change(job.clone(), |job| job::list(std::slice::from_ref(job)));
                match job.filter(|_| *wait) {
                    Some(job) => {
                        job::wait(&session, Some(&job.id))?;
                        check_moved(&find(name)?, &job.backing)
                    }
                    None => Ok(()),
                }
            }
            VolumeCommand::Set { name, qos, group, min_qos, no_group } => {
                let group = if *no_group { Some(String::new()) } else { group.clone() };
                let qos = qos.qos();
                // A command that only sets the group leaves the limits unchanged.
                let qos = (group.is_none() || qos != Qos::default()).then_some(qos);
                let min_qos = min_qos.min_qos();
                let min_qos = (qos.is_some() || min_qos != MinQos::default()).then_some(min_qos);
                change(name, VolumeChange { qos, group, min_qos, ..VolumeChange::default() })
            }
            VolumeCommand::Delete { name } => {
                let Volume { name, uuid, backing, size_bytes, .. } = find(name)?;
                session.confirm(&format!(
                    "volume {name} ({} on {backing}) and what is on it is lost",
                    Size(size_bytes)
                ))?;
                session.client.delete(&["volumes", &uuid], &[])
            }
        }
    }
}

/// Waits for a volume to have this size, if that has become a job, and prints it.
fn finish(session: &Session, begun: Option<Begun<Volume>>, name: &str, size: u64) -> Result<(), Error> {
    let done = match begun {
        Some(Begun::Job(begun)) => {
            job::wait(session, Some(&begun.id))?;
            let volume = session.client.get::<Volume>(&["volumes", name]).ok();
            let volume = volume.filter(|volume| volume.size_bytes == size);
            Some(volume.ok_or_else(|| {
                let is = if begun.kind == JobKind::Create { "not made" } else { "as large as before" };
                Error::Runtime(format!("volume {name}: it is {is}; `freestone event list` says why"))
            })?)
        }
        Some(Begun::Done(volume)) => Some(volume),
        None => None,
    };
    session.print_change(done, show);
    Ok(())
}

/// Waits until a new volume has the content of its source, and prints it.
fn wait_for_copy(session: &Session, volume: &Volume) -> Result<(), Error> {
    job::wait(session, Some(&format!("{}.{}", volume.name, JobKind::Copy)))?;
    let found = session.client.get::<Volume>(&["volumes", &volume.uuid]).ok();
    match found.filter(|found| found.copying_from.is_none()) {
        Some(volume) => {
            session.print_change(Some(volume), show);
            Ok(())
        }
        None => Err(Error::Runtime(format!(
            "volume {}: it is not complete; `freestone event list` says why",
            volume.name
        ))),
    }
}

fn check_moved(volume: &Volume, to: &str) -> Result<(), Error> {
    match volume.backing == to {
        true => Ok(()),
        false => Err(Error::Runtime(format!(
            "volume {}: it is still on {}; `freestone event list` says why",
            volume.name, volume.backing
        ))),
    }
}

fn min_text(min: &MinQos) -> String {
    let parts = [("iops", min.requests_per_s), ("bandwidth", min.bytes_per_s)];
    let parts: Vec<String> =
        parts.into_iter().filter_map(|(name, rate)| Some(format!("{name} {}", rate?))).collect();
    parts.join(", ")
}

fn list(volumes: &[Volume]) -> String {
    let row = |volume: &Volume| {
        [
            volume.name.clone(),
            Size(volume.size_bytes).to_string(),
            match (&volume.moving_to, &volume.copying_from) {
                (Some(to), _) => format!("{} -> {to}", volume.backing),
                (None, Some(from)) => format!("{} <- {from}", volume.backing),
                (None, None) => volume.backing.clone(),
            },
            limits(&volume.qos),
            volume.group.clone().unwrap_or_default(),
            volume.exports.join(", "),
        ]
    };
    table(
        ["NAME", "SIZE", "BACKING", "LIMITS", "GROUP", "EXPORTS"],
        &volumes.iter().map(row).collect::<Vec<_>>(),
    )
}

fn show(volume: &Volume) -> String {
    fields(&[
        ("name", volume.name.clone()),
        ("uuid", volume.uuid.clone()),
        ("backing", volume.backing.clone()),
        ("size", format!("{} ({} bytes)", Size(volume.size_bytes), volume.size_bytes)),
        ("extents", volume.extents.to_string()),
        ("limits", limits(&volume.qos)),
        ("minimum", min_text(&volume.min_qos)),
        ("group", volume.group.clone().unwrap_or_default()),
        ("label", volume.label.clone().unwrap_or_default()),
        ("labels", labels::line(&volume.labels)),
        ("exports", volume.exports.join(", ")),
        ("moving to", volume.moving_to.clone().unwrap_or_default()),
        ("copying from", volume.copying_from.clone().unwrap_or_default()),
        ("error", volume.error.clone().unwrap_or_default()),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_a_size_or_a_difference() {
        assert_eq!((growth("1G"), growth("+1K")), (Ok(Growth::To(1 << 30)), Ok(Growth::By(1024))));
        assert!(growth("+").is_err() && growth("-1").is_err());
    }
}
