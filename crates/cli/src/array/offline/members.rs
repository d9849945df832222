//! Members on this host: named one by one, or found in directories.

use crate::array::args::Members;
use crate::error::Error;
use raid::admin::open::{Candidate, Selection, Wanted};
use stack::array::{ArrayError, choose, scan};
use stack::kinds::device::DeviceConfig;
use stack::kinds::member::member;
use stack::retry::retry_while;

/// The purpose of opening members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Only to look at them: a running array is not disturbed.
    Read,
    /// To change them: claims them, so that no other process opens them for writing.
    Write,
}

/// Opens the members that are named.
///
/// # Errors
/// When a specification is invalid. A device that cannot be opened is in the list with the reason.
pub fn open(names: &[String], access: Access) -> Result<Vec<Candidate>, Error> {
    Ok(configs(names, access)?.iter().map(candidate).collect())
}

/// A member's name, and its device.
type Named = (String, Box<dyn DeviceConfig>);

fn configs(names: &[String], access: Access) -> Result<Vec<Named>, Error> {
    let parse = |name: &String| Ok((name.clone(), member(name, true, access == Access::Read)?));
    names.iter().map(parse).collect()
}

fn candidate((name, config): &Named) -> Candidate {
    Candidate { name: name.clone(), device: config.open(), is_named: true }
}

/// Opens the members of one array, named or found, and decides whether it may be started.
///
/// # Errors
/// Says why not, with the devices' names.
pub fn select(members: &Members, wanted: &Wanted) -> Result<Selection, Error> {
    if members.members.is_empty() && members.scan.is_empty() {
        return Err(Error::Usage("members are needed, or --scan DIR with --name ARRAY".into()));
    }
    if !members.scan.is_empty() && wanted.array.is_none() {
        return Err(Error::Usage("--scan needs --name ARRAY".into()));
    }
    let configs = configs(&members.members, Access::Write)?;
    let selection = retry_while(ArrayError::is_in_use, || {
        let mut candidates: Vec<Candidate> = configs.iter().map(candidate).collect();
        for directory in &members.scan {
            candidates.extend(scan(directory, wanted.array.as_deref().unwrap_or_default(), true, false)?);
        }
        choose(candidates, wanted)
    });
    selection.map_err(failed)
}

/// An array cannot be opened.
pub fn failed(error: stack::array::ArrayError) -> Error {
    Error::Runtime(error.to_string())
}
