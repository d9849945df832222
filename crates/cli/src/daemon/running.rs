//! An array that a daemon runs, reached over the daemon's API: no other process is asked.

use super::Session;
use crate::array::args::GrowArgs;
use crate::array::host::{Host, Outcome, absolute, cannot_extend, event};
use crate::error::Error;
use api::{Array, ArrayAction, Done, System};
use client::Method;
use std::path::Path;

/// An array of a daemon.
pub struct RunningArray {
    session: Session,
    array: Array,
    /// The name by which the user called it.
    name: String,
}

impl RunningArray {
    /// The array that the daemon at `socket` has by this name or UUID, if it has one.
    ///
    /// # Errors
    /// When the daemon does not answer.
    pub fn find(socket: &Path, name: &str) -> Result<Option<RunningArray>, Error> {
        let session = Session::at(socket, false, false, false)?;
        let array = session.client.find(&["arrays", name])?;
        Ok(array.map(|array| RunningArray { session, array, name: name.to_owned() }))
    }

    /// Every array of the daemon at `socket`.
    ///
    /// # Errors
    /// As [`RunningArray::find`].
    pub fn all(socket: &Path) -> Result<Vec<Array>, Error> {
        Ok(Session::at(socket, false, false, false)?.client.get(&["arrays"])?)
    }

    fn pid(&self) -> Result<u32, Error> {
        Ok(self.session.client.get::<System>(&["system"])?.pid)
    }
}

impl Host for RunningArray {
    fn show(&mut self) -> Result<Vec<Array>, Error> {
        Ok(vec![self.array.clone()])
    }

    fn act(&mut self, action: ArrayAction) -> Result<Outcome, Error> {
        let (event, pid) = (event(&action), self.pid()?);
        let path = ["arrays", &self.array.uuid, "actions"];
        let done: Option<Done> = self.session.client.change(Method::POST, &path, &absolute(action))?;
        let text = done.map(|done| done.text).unwrap_or_default();
        Ok(Outcome::running(event, &self.name, pid, &text))
    }

    fn extend(&mut self, args: &GrowArgs) -> Result<Outcome, Error> {
        Err(cannot_extend(args))
    }

    fn stop(&mut self) -> Result<Outcome, Error> {
        let (name, pid) = (&self.array.name, self.pid()?);
        Err(Error::Runtime(format!(
            "array {name}: freestoned (process {pid}) runs it and serves other devices too: \
             freestone array delete --keep {name} ends the array alone"
        )))
    }
}
