//! Commands of the daemon: nouns with verbs, each of them one or two requests to the REST API of
//! `freestoned`.
//!
//! ```text
//!   freestone volume create v1 --backing data --size 64M ─► client ─► POST /v1/volumes ─► freestoned
//! ```
//!
//! Lists and things go to standard output, as tables for people, or as the API's own JSON with
//! `--json`.

pub mod array;
mod completion;
mod connection;
mod core;
pub mod device;
mod disks;
pub mod drive;
mod event;
mod export;
mod group;
mod history;
mod job;
mod labels;
pub mod pool;
mod portal;
mod qemu;
pub mod running;
mod status;
mod support;
mod table;
mod top;
mod volume;

pub use completion::{CompletionArgs, ManArgs, complete, write_pages};
pub use core::CoreArgs;
pub use device::DeviceArgs;
pub use disks::DisksArgs;
pub use event::EventArgs;
pub use export::ExportArgs;
pub use group::GroupArgs;
pub use history::HistoryArgs;
pub use job::JobArgs;
pub use portal::PortalArgs;
pub use status::StatusArgs;
pub use support::SupportArgs;
pub use top::TopArgs;
pub use volume::VolumeArgs;

use crate::error::Error;
use crate::parse::CommonArgs;
use api::{Qos, Rate};
use connection::Client;
use serde::Serialize;
use std::io::{BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};

/// Options of commands that use the daemon.
#[derive(clap::Args, Debug)]
pub struct DaemonArgs {
    /// Socket of freestoned
    #[arg(long, global = true, value_name = "PATH", env = api::SOCKET_VARIABLE, default_value = api::DEFAULT_SOCKET)]
    pub(crate) socket: PathBuf,
    /// Print the request instead of sending it
    #[arg(long, global = true)]
    dry_run: bool,
    /// Do not ask for confirmation
    #[arg(long, short = 'y', global = true)]
    yes: bool,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

/// A client of the daemon, and the format of output.
pub struct Session {
    client: Client,
    is_json: bool,
    is_sure: bool,
}

impl Session {
    /// Creates a session with the daemon that the arguments name, without connecting.
    ///
    /// # Errors
    /// When there are no sockets to be had.
    pub fn new(args: &DaemonArgs) -> Result<Session, Error> {
        Session::at(&args.socket, args.dry_run, args.yes, args.common.json)
    }

    /// With the daemon at `socket`.
    ///
    /// # Errors
    /// As [`Session::new`].
    pub fn at(socket: &Path, is_dry: bool, is_sure: bool, is_json: bool) -> Result<Session, Error> {
        Ok(Session { client: Client::new(socket, is_dry)?, is_json, is_sure })
    }

    /// Prints something: as `human` says it, or in JSON.
    fn print(&self, subject: &impl Serialize, human: impl FnOnce() -> String) {
        let text = match self.is_json {
            true => serde_json::to_string(subject).expect("plain data"),
            false => human(),
        };
        // The reader of standard output is gone; the program cannot do anything about it.
        let _ = writeln!(std::io::stdout().lock(), "{text}");
    }

    /// Prints what a change has led to, if it was made.
    fn print_change<T: Serialize>(&self, changed: Option<T>, human: impl FnOnce(&T) -> String) {
        if let Some(changed) = changed {
            self.print(&changed, || human(&changed));
        }
    }

    /// Asks whether `what` is to happen, unless that is sure.
    ///
    /// # Errors
    /// When the user declines, or standard input is no terminal.
    fn confirm(&self, what: &str) -> Result<(), Error> {
        if self.is_sure || self.client.is_dry() {
            return Ok(());
        }
        let stdin = std::io::stdin();
        if !stdin.is_terminal() {
            return Err(Error::Usage(format!("{what}: give --yes if that is meant")));
        }
        eprint!("{what}. Continue? [y/N] ");
        let mut answer = String::new();
        stdin
            .lock()
            .read_line(&mut answer)
            .map_err(|error| Error::Runtime(format!("standard input: {error}")))?;
        match answer.trim() {
            "y" | "Y" | "yes" => Ok(()),
            _ => Err(Error::Runtime("nothing was done".into())),
        }
    }
}

/// Limits of a volume or group: each is RATE or RATE:BURST.
#[derive(clap::Args, Debug, Default)]
pub struct QosArgs {
    /// Requests a second
    #[arg(long, value_name = "N[:BURST]", value_parser = rate)]
    iops: Option<Rate>,
    /// Reads a second
    #[arg(long, value_name = "N[:BURST]", value_parser = rate)]
    read_iops: Option<Rate>,
    /// Writes a second
    #[arg(long, value_name = "N[:BURST]", value_parser = rate)]
    write_iops: Option<Rate>,
    /// Bytes a second
    #[arg(long, value_name = "SIZE[:BURST]", value_parser = rate)]
    bandwidth: Option<Rate>,
    /// Bytes read a second
    #[arg(long, value_name = "SIZE[:BURST]", value_parser = rate)]
    read_bandwidth: Option<Rate>,
    /// Bytes written a second
    #[arg(long, value_name = "SIZE[:BURST]", value_parser = rate)]
    write_bandwidth: Option<Rate>,
}

impl QosArgs {
    fn qos(&self) -> Qos {
        let QosArgs { iops, read_iops, write_iops, bandwidth, read_bandwidth, write_bandwidth } = *self;
        Qos { iops, read_iops, write_iops, bandwidth, read_bandwidth, write_bandwidth }
    }
}

fn rate(text: &str) -> Result<Rate, String> {
    Rate::parse(text).ok_or_else(|| format!("expected {}", Rate::EXPECTED))
}

/// Limits in a word or two.
fn limits(qos: &Qos) -> String {
    let limit = |(name, rate): (&str, Option<Rate>)| {
        let rate = rate?;
        let name = name.replace('_', "-");
        let burst = if rate.burst > 0 { format!(":{}", rate.burst) } else { String::new() };
        Some(format!("{name} {}{burst}", rate.per_s))
    };
    let limits: Vec<String> = qos.list().into_iter().filter_map(limit).collect();
    limits.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_rates_with_or_without_bursts() {
        assert_eq!(rate("5000"), Ok(Rate { per_s: 5000, burst: 0 }));
        assert_eq!(rate("1M:4M"), Ok(Rate { per_s: 1 << 20, burst: 4 << 20 }));
        for bad in ["", "0", "x", "1:", "1:x"] {
            assert!(rate(bad).is_err(), "{bad}");
        }
        let qos = QosArgs { iops: rate("10:20").ok(), read_bandwidth: rate("1M").ok(), ..QosArgs::default() };
        assert_eq!(limits(&qos.qos()), "iops 10:20, read-bandwidth 1048576");
    }
}
