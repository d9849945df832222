//! The process that serves an array, reached over its control socket.

use super::args::GrowArgs;
use super::host::{Host, Outcome, absolute, cannot_extend, event};
use crate::error::Error;
use api::{Array, ArrayAction};
use hosting::control::client::{self, Client};
use hosting::control::protocol::{Command, Done};
use std::path::Path;

/// An array behind a control socket.
pub struct Control {
    client: Client,
    /// The name by which the user called it.
    array: String,
    report: Array,
}

impl Control {
    /// The running array of this name or UUID, at the socket `path` or wherever arrays run.
    ///
    /// # Errors
    /// When the server at `path` does not answer or has no such array, or several arrays have the
    /// name.
    pub fn find(path: Option<&Path>, array: &str) -> Result<Option<Control>, Error> {
        let found = match path {
            Some(path) => client::at(path, array).map(Some),
            None => client::find(array),
        };
        let found = found.map_err(|error| failed(array, error))?;
        Ok(found.map(|(client, report)| Control { client, array: array.to_owned(), report }))
    }

    /// Every running array, of the server at `path` or of all.
    ///
    /// # Errors
    /// When the server at `path` does not answer.
    pub fn all(path: Option<&Path>) -> Result<Vec<Array>, Error> {
        match path {
            Some(path) => client::all_at(path).map_err(Error::Runtime),
            None => Ok(client::running().into_iter().map(|(_, report)| report).collect()),
        }
    }

    fn ask(&mut self, command: Command) -> Result<Done, Error> {
        self.client.ask(command).map_err(|error| failed(&self.array, error))
    }
}

impl Host for Control {
    fn show(&mut self) -> Result<Vec<Array>, Error> {
        Ok(vec![self.report.clone()])
    }

    fn act(&mut self, action: ArrayAction) -> Result<Outcome, Error> {
        let event = event(&action);
        let done = self.ask(Command::Act(absolute(action)))?;
        Ok(Outcome::running(event, &self.array, done.pid, &done.text))
    }

    fn extend(&mut self, args: &GrowArgs) -> Result<Outcome, Error> {
        Err(cannot_extend(args))
    }

    fn stop(&mut self) -> Result<Outcome, Error> {
        let done = self.ask(Command::Stop)?;
        // The array is stopped when its sockets are gone: members are free again.
        self.client.wait_for_end();
        Ok(Outcome::running("stopped", &self.array, done.pid, &done.text))
    }
}

fn failed(array: &str, error: String) -> Error {
    Error::Runtime(format!("array {array}: {error}"))
}
