//! The arrays of a server, as their control sockets reach them.

use crate::array::control::path_of;
use crate::array::control::protocol::{Command, Done};
use crate::array::control::server::{ControlSocket, Controlled};
use crate::error::Error;
use block::{Device, IoError};
use graph::Stack;
use raid::Uuid;
use raid::admin::report::ArrayReport;
use raid::array::Array;
use raid::metadata::Table;
use reactor::{CoreRef, CoreStopped};
use std::sync::Arc;

/// Ends the server, as SIGTERM does.
pub type Stop = Arc<dyn Fn() + Send + Sync>;

/// Has every array of the stacks use `core`, and commit there.
///
/// # Errors
/// When a member's channel cannot be opened.
pub fn settle(stacks: &[Stack], core: &CoreRef) -> Result<(), Error> {
    for array in stacks.iter().flat_map(|stack| &stack.arrays) {
        let array = array.clone();
        let opened = core.block_on(move |_| async move { array.open_channel().map(drop) })?;
        opened?;
    }
    Ok(())
}

/// Listens for commands to the arrays of the stacks. An array whose socket cannot be made is served without one.
pub fn listen(stacks: &[Stack], core: &CoreRef, stop: &Stop) -> Vec<ControlSocket> {
    let arrays = stacks.iter().flat_map(|stack| &stack.arrays);
    let exclusive = stacks.len() == 1;
    let listen = |array: &Arc<Array>| {
        let path = path_of(array.config().uuid);
        let (array, core, stop) = (array.clone(), core.clone(), stop.clone());
        let name = array.config().name.clone();
        let running = Arc::new(Running { array, core, stop, is_alone: exclusive });
        ControlSocket::listen(&path, running)
            .inspect_err(|error| {
                tracing::warn!(array = name, %error, path = %path.display(), "no control socket");
            })
            .ok()
    };
    arrays.filter_map(listen).collect()
}

/// Ends the service of every array, so that its next start has nothing to recover.
///
/// # Errors
/// Names the first array that could not be stopped; all have been tried.
pub fn stop(stacks: &[Stack], core: &CoreRef) -> Result<(), Error> {
    let mut result = Ok(());
    for array in stacks.iter().flat_map(|stack| &stack.arrays) {
        let name = array.config().name.clone();
        let array = array.clone();
        let stopped = core.block_on(move |_| async move { array.stop().await })?;
        if let Err(error) = stopped {
            let error = Error::Runtime(format!("array {name}: it cannot be stopped in good order: {error}"));
            tracing::error!(%error, "the array is recovered at its next start");
            result = result.and(Err(error));
        }
    }
    result
}

/// A running array.
struct Running {
    array: Arc<Array>,
    core: CoreRef,
    stop: Stop,
    /// The server has no other devices.
    is_alone: bool,
}

impl Controlled for Running {
    fn control(&self, command: Command) -> Result<Done, String> {
        let text = match command {
            Command::Show => String::new(),
            Command::Stop => self.end()?,
            Command::Fail { members } => self.fail(&members)?,
        };
        let array = Some(ArrayReport::of_running(&self.array));
        Ok(Done { text, array, pid: std::process::id() })
    }
}

impl Running {
    fn end(&self) -> Result<String, String> {
        if !self.is_alone {
            return Err("its server serves other devices too: end the server instead (SIGTERM)".into());
        }
        (self.stop)();
        Ok("stopping".into())
    }

    fn fail(&self, members: &[String]) -> Result<String, String> {
        let table = self.array.table();
        let slots: Vec<usize> =
            members.iter().map(|member| self.slot(member, &table)).collect::<Result<_, _>>()?;
        let mut said = Vec::new();
        for slot in slots {
            let array = self.array.clone();
            let failed = self.core.block_on(move |_| async move { array.fail(slot).await });
            match failed.map_err(gone)? {
                Ok(()) => said.push(format!("slot {slot} is out")),
                Err(IoError::Invalid) => {
                    return Err(format!("slot {slot}: the array would not survive without it"));
                }
                Err(error) => return Err(format!("slot {slot}: {error}")),
            }
        }
        Ok(said.join(", "))
    }

    /// The slot that a person means: by number, the member's UUID, or its device.
    fn slot(&self, name: &str, table: &Table) -> Result<usize, String> {
        let count = table.members.len();
        if let Ok(slot) = name.parse::<usize>() {
            return match slot < count {
                true => Ok(slot),
                false => Err(format!("slot {slot}: there is no such slot (0 to {})", count - 1)),
            };
        }
        if let Some(uuid) = Uuid::parse(name) {
            let slot = table.members.iter().position(|member| member.uuid == uuid);
            return slot.ok_or_else(|| format!("member {uuid}: it is not in the array"));
        }
        let slots = self.array.slots();
        let is_it =
            |device: &str| device == name || device.split_once(':').is_some_and(|(_, path)| path == name);
        let slot = slots.iter().find(|slot| slot.device.as_deref().is_some_and(is_it)).map(|slot| slot.slot);
        slot.ok_or_else(|| {
            let known: Vec<_> = slots.iter().filter_map(|slot| slot.device.as_deref()).collect();
            format!("member {name}: it is not in the array; there are {}", known.join(", "))
        })
    }
}

fn gone(_: CoreStopped) -> String {
    "the server is ending".into()
}
