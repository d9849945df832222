//! Members of an array that does not run are filled: the array is started in this process, without
//! clients, until they hold everything.

use super::Members;
use super::edit::{of_array, open_unused, selected};
use super::members::{Access, open};
use crate::array::host::Outcome;
use crate::array::text;
use crate::error::Error;
use block::Device;
use hosting::vocabulary;
use raid::admin::edit::slot_of;
use raid::admin::open::Selection;
use raid::array::Array;
use raid::array::members::SlotState;
use raid::jobs::{Jobs, Options};
use serde_json::json;
use stack::array::wall_ns;
use std::future::Future;
use std::io::{IsTerminal, Write};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;

/// Interval between progress reports.
const LOOK_NS: u64 = 200_000_000;

/// A task on a started array.
enum Task {
    /// A device takes the place of a slot's member.
    Replace(usize, Arc<dyn Device>),
    /// Re-adding former members.
    ReAdd(Vec<Arc<dyn Device>>),
}

/// Replaces a member: returns when the copy is the slot's member.
///
/// # Errors
/// When there is no such member, or the copy does not succeed; the member is still the slot's then.
pub fn replace(array: &Members<'_>, member: &str, device: &str, force: bool) -> Result<Outcome, Error> {
    let selection = selected(array)?;
    let slot = slot_of(&selection, member)
        .ok_or_else(|| of_array(array.array, &format!("member {member}: it is not in the array")))?;
    let opened = open_unused(device, force)?;
    fill(array.array, selection, Task::Replace(slot, opened))?;
    Ok(Outcome {
        event: "replaced",
        text: format!("array {} (not running): {device} is slot {slot} now", array.array),
        fields: json!({ "array": array.array, "running": false, "slot": slot, "device": device }),
    })
}

/// Re-adds former members: returns when they hold everything again.
///
/// # Errors
/// When one is no former member, or cannot be rebuilt.
pub fn re_add(array: &Members<'_>, names: &[String]) -> Result<Outcome, Error> {
    let selection = selected(array)?;
    let mut devices = Vec::new();
    for name in names {
        devices.push(match selection.found.get(name) {
            Some(device) => device.clone(),
            None => open(std::slice::from_ref(name), Access::Write)?.remove(0).device?,
        });
    }
    fill(array.array, selection, Task::ReAdd(devices))?;
    Ok(Outcome {
        event: "re-added",
        text: format!("array {} (not running): {} back", array.array, names.join(", ")),
        fields: json!({ "array": array.array, "running": false, "devices": names }),
    })
}

/// Starts the array, runs a task, and stops the array cleanly.
fn fill(name: &str, selection: Selection, task: Task) -> Result<(), Error> {
    let name = name.to_owned();
    reactor::run(async move {
        let array = selection.start(wall_ns()).await.map_err(|error| Error::Runtime(error.to_string()))?;
        let jobs = array.keep(Options::default())?;
        let result = work(&array, &jobs, task).await;
        jobs.stop().await;
        let stopped = array.stop().await;
        result.map_err(|error| of_array(&name, &error))?;
        stopped.map_err(|error| of_array(&name, &format!("cannot stop cleanly: {error}")))
    })
}

async fn work(array: &Arc<Array>, jobs: &Jobs, task: Task) -> Result<(), String> {
    let devices = match task {
        Task::Replace(slot, device) => {
            jobs.replace(slot, device.clone()).await.map_err(|error| error.to_string())?;
            vec![device]
        }
        Task::ReAdd(devices) => {
            for device in &devices {
                jobs.re_add(device.clone()).await.map_err(|error| error.to_string())?;
            }
            devices
        }
    };
    let is_member = |device: &Arc<dyn Device>| {
        let is_it = |slot: &raid::array::SlotStatus| {
            slot.device.as_deref() == Some(device.name()) && slot.state == SlotState::Live
        };
        array.slots().iter().any(|slot| is_it(slot) && slot.filled.is_none())
    };
    let core = reactor::current();
    let mut idle = pin!(jobs.idle());
    let mut is_idle = false;
    while !is_idle && !devices.iter().all(is_member) {
        let mut pause = core.sleep(LOOK_NS);
        is_idle = std::future::poll_fn(|cx| match idle.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(true),
            Poll::Pending => Pin::new(&mut pause).poll(cx).map(|()| false),
        })
        .await;
        tell(array, jobs);
    }
    match devices.iter().find(|device| !is_member(device)) {
        None => Ok(()),
        Some(device) => {
            let status = jobs.status();
            let why = status.events.last().map_or("nothing was done", |event| &event.text);
            Err(format!("{}: it is no member: {why}", device.name()))
        }
    }
}

/// Shows how far it is, to people who watch.
fn tell(array: &Arc<Array>, jobs: &Jobs) {
    let (mut stderr, status) = (std::io::stderr(), jobs.status());
    if stderr.is_terminal()
        && let Some(progress) = status.running.first()
    {
        let job = vocabulary::job(&array.config().name, progress, status.is_paused);
        let _ = write!(stderr, "\r{}\x1b[K", text::job(&job));
    }
}
