//! `freestone support`: a support bundle.

use super::{DaemonArgs, Session};
use crate::error::Error;
use serde_json::{Map, Value, json};
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

/// The arguments of `freestone support`.
#[derive(clap::Args, Debug)]
pub struct SupportArgs {
    /// The command
    #[command(subcommand)]
    command: SupportCommand,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// The commands.
#[derive(Debug, clap::Subcommand)]
enum SupportCommand {
    /// Write the daemon's state into one file: names, paths and states, no data and no keys
    Collect {
        /// The file to write
        #[arg(long, short, value_name = "FILE", default_value = "freestone-support.json")]
        output: PathBuf,
    },
}

/// Resources of the API that the bundle contains.
const PARTS: [&str; 9] =
    ["system", "devices", "arrays", "volumes", "groups", "portals", "exports", "jobs", "events"];

impl SupportArgs {
    /// Carries the command out.
    ///
    /// # Errors
    /// When the daemon does not answer or the file cannot be written.
    pub fn run(&self) -> Result<(), Error> {
        let session = Session::new(&self.daemon)?;
        let SupportCommand::Collect { output } = &self.command;
        let mut collected = Map::new();
        for part in PARTS {
            // The bundle also records which part does not answer.
            let found = session.client.get::<Value>(&[part]);
            collected
                .insert(part.into(), found.unwrap_or_else(|error| json!({ "error": error.to_string() })));
        }
        let metrics = session.client.text("/metrics").unwrap_or_else(|error| error.to_string());
        collected.insert("metrics".into(), metrics.lines().map(str::to_owned).collect());
        let kernel = std::fs::read_to_string("/proc/version").unwrap_or_default();
        collected.insert("kernel".into(), kernel.trim().into());
        collected.insert("program".into(), env!("CARGO_PKG_VERSION").into());
        let text = serde_json::to_string_pretty(&collected).expect("plain data");
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(output);
        let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
        written.map_err(|error| Error::Runtime(format!("{}: {error}", output.display())))?;
        session.print(&json!({ "file": output }), || format!("written: {}", output.display()));
        Ok(())
    }
}
