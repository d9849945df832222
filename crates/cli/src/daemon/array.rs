//! `freestone array` where a daemon is asked: making, listing and deleting. Commands for an array
//! that runs are those of [`super::running`] when the daemon was named, else they go through the
//! array's control socket.

use super::Session;
use super::table::table;
use crate::error::Error;
use api::{Array, NewArray};
use base::Size;
use client::Method;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// The daemon to ask: the one that was named, or the one that runs where daemons do.
pub fn socket(named: Option<&Path>) -> Option<PathBuf> {
    let named = named.map(PathBuf::from);
    named.or_else(|| UnixStream::connect(api::DEFAULT_SOCKET).ok().map(|_| api::DEFAULT_SOCKET.into()))
}

/// Has the daemon at `socket` make an array.
///
/// # Errors
/// With why it did not.
pub fn create(socket: &Path, new: &NewArray, is_json: bool) -> Result<(), Error> {
    let session = Session::at(socket, false, false, is_json)?;
    let array = session.client.change::<Array>(Method::POST, &["arrays"], new)?;
    session.print_change(array, |array: &Array| {
        let size = Size(array.capacity_bytes);
        format!(
            "created array {} ({}): level {}, {size}; freestoned runs it",
            array.name,
            array.uuid,
            level(array)
        )
    });
    Ok(())
}

/// Lists the arrays of a daemon.
///
/// # Errors
/// When it does not answer.
pub fn list(socket: &Path, is_json: bool) -> Result<(), Error> {
    let session = Session::at(socket, false, false, is_json)?;
    let arrays: Vec<Array> = session.client.get(&["arrays"])?;
    let row = |array: &Array| {
        [
            array.name.clone(),
            array.state.name().to_owned(),
            level(array).to_owned(),
            Size(array.capacity_bytes).to_string(),
            array.free_bytes.map(|bytes| Size(bytes).to_string()).unwrap_or_default(),
            format!("{}/{}", array.live_members(), array.members.len()),
            array.volumes.len().to_string(),
            array.error.clone().unwrap_or_default(),
        ]
    };
    let heading = ["NAME", "STATE", "LEVEL", "SIZE", "FREE", "LIVE", "VOLUMES", "ERROR"];
    session.print(&arrays, || table(heading, &arrays.iter().map(row).collect::<Vec<_>>()));
    Ok(())
}

/// Has a daemon end an array and forget it.
///
/// # Errors
/// With why it did not.
pub fn delete(socket: &Path, name: &str, is_kept: bool, is_sure: bool) -> Result<(), Error> {
    let session = Session::at(socket, false, is_sure, false)?;
    let array: Array = session.client.get(&["arrays", name])?;
    if !is_kept {
        let size = Size(array.capacity_bytes);
        session.confirm(&format!(
            "array {} ({size}, level {}) and what is on it is lost",
            array.name,
            level(&array)
        ))?;
    }
    let query: &[(&str, &str)] = if is_kept { &[("keep", "true")] } else { &[] };
    session.client.delete(&["arrays", &array.name], query)
}

/// The level's name; empty while the array is offline.
fn level(array: &Array) -> &'static str {
    array.level.map_or("", api::Level::name)
}
