//! `freestone disks`: block devices of the daemon's host.

use super::table::table;
use super::{DaemonArgs, Session};
use crate::error::Error;
use api::Disk;
use base::Size;

/// The arguments of `freestone disks`.
#[derive(clap::Args, Debug)]
pub struct DisksArgs {
    /// List only disks that are free
    #[arg(long)]
    free: bool,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

impl DisksArgs {
    /// Prints the disks.
    ///
    /// # Errors
    /// When the daemon does not answer, or cannot list them.
    pub fn run(&self) -> Result<(), Error> {
        let session = Session::new(&self.daemon)?;
        let mut disks: Vec<Disk> = session.client.get(&["disks"])?;
        disks.retain(|disk| disk.is_free || !self.free);
        session.print(&disks, || list(&disks));
        Ok(())
    }
}

/// The use of a disk in a line.
fn usage(disk: &Disk) -> String {
    let uses: Vec<&str> = disk.uses.iter().map(|item| item.text.as_str()).collect();
    match (disk.is_free, disk.read_only) {
        (true, _) => "free".into(),
        (false, true) => [vec!["read-only"], uses].concat().join("; "),
        (false, false) => uses.join("; "),
    }
}

fn list(disks: &[Disk]) -> String {
    let row = |disk: &Disk| {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let indent = if disk.partition_of.is_some() { "  " } else { "" };
        [
            format!("{indent}{}", disk.name),
            Size(disk.size_bytes).to_string(),
            disk.transport.map(|transport| transport.name().to_owned()).unwrap_or_default(),
            text(&disk.model),
            text(&disk.serial),
            usage(disk),
            disk.path.clone(),
        ]
    };
    let heading = ["NAME", "SIZE", "TRANSPORT", "MODEL", "SERIAL", "USE", "PATH"];
    table(heading, &disks.iter().map(row).collect::<Vec<_>>())
}
