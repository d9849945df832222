//! `freestone device`.

use super::drive;
use super::table::{fields, table};
use super::volume::{Growth, growth};
use super::{DaemonArgs, Session, job};
use crate::error::Error;
use crate::output::time;
use crate::parse;
use api::{Device, DeviceChange, ImageSnapshot, Job, JobChange, NewDevice, NewImageSnapshot};
use base::Size;
use client::Method;
use std::time::Duration;

/// The arguments of `freestone device`.
#[derive(clap::Args, Debug)]
pub struct DeviceArgs {
    /// The command
    #[command(subcommand)]
    command: DeviceCommand,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// The commands.
#[derive(Debug, clap::Subcommand)]
enum DeviceCommand {
    /// List the devices of the daemon
    List,
    /// Show a device
    Show {
        /// Its name
        name: String,
    },
    /// Register a device; the daemon opens it now and at each of its starts
    #[command(visible_alias = "add")]
    Create {
        /// Its name
        name: String,
        /// A path, or KIND:KEY=VALUE,… as freestone serve --device takes it
        spec: String,
        /// Create the image of a device of the kind rbd with this size first
        #[arg(long, value_name = "SIZE", value_parser = parse::value::<Size>)]
        size: Option<Size>,
    },
    /// Grow the image of a device of the kind rbd, also while it is in use
    Grow {
        /// Its name
        name: String,
        /// Its new size, or the difference: 20G, +1G
        #[arg(long, value_name = "[+]SIZE", value_parser = growth)]
        size: Growth,
    },
    /// Close and forget an unused device; its content stays
    Delete {
        /// Its name
        name: String,
    },
    /// Copy the data of the backing file into a device of the kind qcow2, also while it is in use;
    /// then it has no backing file
    Stream(DeviceJob),
    /// Copy the data of a device of the kind qcow2 to its backing file, also while it is in use;
    /// then the device is the backing file
    Commit(DeviceJob),
    /// List, make and delete internal snapshots of a device of the kind qcow2, also while it is in
    /// use
    Snapshot {
        /// The command
        #[command(subcommand)]
        command: SnapshotCommand,
    },
}

/// The commands of `freestone device snapshot`.
#[derive(Debug, clap::Subcommand)]
enum SnapshotCommand {
    /// List the snapshots of a device
    List {
        /// Name of the device
        device: String,
    },
    /// Make a snapshot; writes of clients wait until it is durable
    Create {
        /// Name of the device
        device: String,
        /// Name of the snapshot
        name: String,
    },
    /// Delete a snapshot
    Delete {
        /// Name of the device
        device: String,
        /// Name of the snapshot, or its identifier
        name: String,
    },
}

impl DeviceArgs {
    /// Carries the command out.
    ///
    /// # Errors
    /// When the daemon refuses the request or does not answer.
    pub fn run(&self) -> Result<(), Error> {
        let session = Session::new(&self.daemon)?;
        match &self.command {
            DeviceCommand::List => {
                let devices: Vec<Device> = session.client.get(&["devices"])?;
                session.print(&devices, || list(&devices));
            }
            DeviceCommand::Show { name } => {
                let device: Device = session.client.get(&["devices", name])?;
                session.print(&device, || show(&device));
            }
            DeviceCommand::Create { name, spec, size } => {
                let size_bytes = size.map(|size| size.0);
                let new = NewDevice { name: name.clone(), spec: spec.clone(), size_bytes };
                let device = session.client.change::<Device>(Method::POST, &["devices"], &new)?;
                session.print_change(device, show);
            }
            DeviceCommand::Grow { name, size } => {
                let path = ["devices", name];
                let present = || Ok(session.client.get::<Device>(&path)?.capacity_bytes.unwrap_or(0));
                let size_bytes = size.of(present)?;
                let change = DeviceChange { size_bytes };
                let device = session.client.change::<Device>(Method::PATCH, &path, &change)?;
                session.print_change(device, show);
            }
            DeviceCommand::Delete { name } => session.client.delete(&["devices", name], &[])?,
            DeviceCommand::Snapshot { command } => command.run(&session)?,
            DeviceCommand::Stream(job) => job.begin(&session, "stream")?,
            DeviceCommand::Commit(job) => job.begin(&session, "commit")?,
        }
        Ok(())
    }
}

/// The arguments of a command that begins a job of a device.
#[derive(clap::Args, Debug)]
struct DeviceJob {
    /// Name of the device
    name: String,
    /// Bytes a second at most
    #[arg(long, value_name = "SIZE", value_parser = parse::value::<Size>)]
    max: Option<Size>,
    /// Wait until the job has ended
    #[arg(long)]
    wait: bool,
}

impl DeviceJob {
    fn begin(&self, session: &Session, kind: &str) -> Result<(), Error> {
        let pace = JobChange { max_bytes_per_s: self.max.map(|max| max.0), ..JobChange::default() };
        let job = session.client.change::<Job>(Method::POST, &["devices", &self.name, kind], &pace)?;
        session.print_change(job.clone(), |job| job::list(std::slice::from_ref(job)));
        match job.filter(|_| self.wait) {
            Some(job) => job::wait(session, Some(&job.id)),
            None => Ok(()),
        }
    }
}

impl SnapshotCommand {
    fn run(&self, session: &Session) -> Result<(), Error> {
        match self {
            SnapshotCommand::List { device } => {
                let known: Vec<ImageSnapshot> = session.client.get(&["devices", device, "snapshots"])?;
                session.print(&known, || snapshots(&known));
            }
            SnapshotCommand::Create { device, name } => {
                let new = NewImageSnapshot { name: name.clone() };
                let path = ["devices", device, "snapshots"];
                let made = session.client.change::<ImageSnapshot>(Method::POST, &path, &new)?;
                session.print_change(made, |made| snapshots(std::slice::from_ref(made)));
            }
            SnapshotCommand::Delete { device, name } => {
                session.client.delete(&["devices", device, "snapshots", name], &[])?;
            }
        }
        Ok(())
    }
}

fn snapshots(known: &[ImageSnapshot]) -> String {
    let row = |snapshot: &ImageSnapshot| {
        [snapshot.id.clone(), snapshot.name.clone(), size(snapshot.size_bytes), time(snapshot.created_at_ns)]
    };
    table(["ID", "NAME", "SIZE", "CREATED"], &known.iter().map(row).collect::<Vec<_>>())
}

fn size(bytes: Option<u64>) -> String {
    bytes.map(|bytes| Size(bytes).to_string()).unwrap_or_default()
}

/// When a pool is full, by its recent use: `12d 4h`. Empty if that is unknown.
pub fn full_in(full_in_s: Option<u64>) -> String {
    // Whole hours: it is an estimate.
    let hours = full_in_s.map(|seconds| Duration::from_secs(seconds / 3600 * 3600));
    hours.map(|hours| humantime::format_duration(hours).to_string()).unwrap_or_default()
}

fn list(devices: &[Device]) -> String {
    let row = |device: &Device| {
        let used_by = device.volumes.len() + device.exports.len();
        [
            device.name.clone(),
            size(device.capacity_bytes),
            size(device.free_bytes),
            used_by.to_string(),
            device.drive.as_ref().map(drive::name).unwrap_or_default(),
            device.error.clone().unwrap_or_else(|| device.spec.clone()),
        ]
    };
    table(["NAME", "SIZE", "FREE", "USES", "DRIVE", "WHAT"], &devices.iter().map(row).collect::<Vec<_>>())
}

fn show(device: &Device) -> String {
    let mut rows = vec![
        ("name", device.name.clone()),
        ("device", device.spec.clone()),
        (
            "size",
            device.capacity_bytes.map(|bytes| format!("{} ({bytes} bytes)", Size(bytes))).unwrap_or_default(),
        ),
        ("block size", device.block_bytes.map(|bytes| bytes.to_string()).unwrap_or_default()),
        ("free", size(device.free_bytes)),
        ("full in", full_in(device.full_in_s)),
        ("volumes", device.volumes.join(", ")),
        ("exports", device.exports.join(", ")),
        ("error", device.error.clone().unwrap_or_default()),
    ];
    rows.extend(drive::fields(device.drive.as_ref()));
    fields(&rows)
}
