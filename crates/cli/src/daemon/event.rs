//! `freestone event`: what has happened.

use super::{DaemonArgs, Session};
use crate::error::Error;
use crate::output::time;
use api::Event;
use std::io::BufRead;

/// The arguments of `freestone event`.
#[derive(clap::Args, Debug)]
pub struct EventArgs {
    /// The command
    #[command(subcommand)]
    command: EventCommand,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// The commands.
#[derive(Debug, clap::Subcommand)]
enum EventCommand {
    /// List the last thousand events since the start of the daemon
    List {
        /// Wait for further events and print them
        #[arg(long, short)]
        follow: bool,
    },
}

impl EventArgs {
    /// Carries the command out.
    ///
    /// # Errors
    /// When the daemon does not answer.
    pub fn run(&self) -> Result<(), Error> {
        let session = Session::new(&self.daemon)?;
        match self.command {
            EventCommand::List { follow: false } => {
                let events: Vec<Event> = session.client.get(&["events"])?;
                events.iter().for_each(|event| session.print(event, || line_of(event)));
            }
            EventCommand::List { follow: true } => {
                for text in session.client.follow(&["events", "stream"])?.lines() {
                    let text = text
                        .map_err(|error| Error::Runtime(format!("connection to freestoned lost: {error}")))?;
                    let Some(data) = text.strip_prefix("data:") else { continue };
                    if let Ok(event) = serde_json::from_str::<Event>(data) {
                        session.print(&event, || line_of(&event));
                    }
                }
            }
        }
        Ok(())
    }
}

fn line_of(event: &Event) -> String {
    line(event.at_ns, &event.kind, &event.name, &event.what, &event.text)
}

/// Something that happened, in one line.
pub(super) fn line(at_ns: u64, kind: &str, name: &str, what: &str, text: &str) -> String {
    format!("{}  {kind} {name}  {what}: {text}", time(at_ns))
}
