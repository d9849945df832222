//! The arrays of a server, as their control sockets reach them.

use crate::array::control::path_of;
use crate::array::control::protocol::{Command, Done};
use crate::array::control::server::{ControlSocket, Controlled};
use crate::error::Error;
use block::{Device, IoError};
use graph::Stack;
use graph::kinds::raid::member;
use raid::Uuid;
use raid::admin::report::ArrayReport;
use raid::array::Array;
use raid::jobs::{Jobs, Options, SparePool};
use raid::metadata::{Table, probe};
use reactor::{CoreRef, CoreStopped};
use std::sync::Arc;

/// Ends the server, as SIGTERM does.
pub type Stop = Arc<dyn Fn() + Send + Sync>;

/// An array, and who keeps it: rebuilds, resyncs, scrubs.
pub type Kept = (Arc<Array>, Arc<Jobs>);

/// Has every array of the stacks commit, and be kept, on `core`.
///
/// # Errors
/// When a member's channel cannot be opened.
pub fn keep(stacks: &[Stack], core: &CoreRef) -> Result<Vec<Kept>, Error> {
    let mut kept = Vec::new();
    let spares = SparePool::default();
    for array in stacks.iter().flat_map(|stack| &stack.arrays) {
        let subject = array.clone();
        let options = Options { spares: spares.clone(), ..Options::default() };
        let jobs = core.block_on(move |_| async move { subject.keep(options) })??;
        kept.push((array.clone(), Arc::new(jobs)));
    }
    Ok(kept)
}

/// Listens for commands to the arrays of the stacks. An array whose socket cannot be made is served without one.
pub fn listen(kept: &[Kept], stacks: &[Stack], core: &CoreRef, stop: &Stop) -> Vec<ControlSocket> {
    let is_alone = kept.len() == 1 && stacks.len() == 1;
    let listen = |(array, jobs): &Kept| {
        let path = path_of(array.config().uuid);
        let name = array.config().name.clone();
        let (array, jobs, core, stop) = (array.clone(), jobs.clone(), core.clone(), stop.clone());
        let running = Arc::new(Running { array, jobs, core, stop, is_alone });
        ControlSocket::listen(&path, running)
            .inspect_err(|error| {
                tracing::warn!(array = name, %error, path = %path.display(), "no control socket");
            })
            .ok()
    };
    kept.iter().filter_map(listen).collect()
}

/// Ends the service of every array, so that its next start has nothing to recover.
///
/// # Errors
/// Names the first array that could not be stopped; all have been tried.
pub fn stop(kept: &[Kept], core: &CoreRef) -> Result<(), Error> {
    let mut result = Ok(());
    for (array, jobs) in kept {
        let name = array.config().name.clone();
        let (array, jobs) = (array.clone(), jobs.clone());
        let stopped = core.block_on(move |_| async move {
            jobs.stop().await;
            array.stop().await
        })?;
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
    jobs: Arc<Jobs>,
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
            Command::Add { devices, force } => self.add(&devices, force)?,
            Command::ReAdd { devices } => self.re_add(&devices)?,
            Command::Replace { member, device, force } => self.replace(&member, &device, force)?,
            Command::Scrub { repair } => {
                self.jobs.scrub(repair);
                "a scrub begins".into()
            }
            Command::Pause => {
                self.jobs.pause();
                "jobs stand still".into()
            }
            Command::Resume => {
                self.jobs.resume();
                "jobs go on".into()
            }
            Command::Cancel => {
                self.jobs.cancel();
                "what can be given up is given up".into()
            }
        };
        let array = Some(ArrayReport::of_running(&self.array, &self.jobs.status()));
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

    fn add(&self, devices: &[String], force: bool) -> Result<String, String> {
        let mut said = Vec::new();
        for name in devices {
            let device = self.open(name, force)?;
            let jobs = self.jobs.clone();
            let added = self.core.block_on(move |_| async move { jobs.add(device).await });
            added.map_err(gone)?.map_err(|error| error.to_string())?;
            said.push(format!("{name} is a spare, or fills an empty slot"));
        }
        Ok(said.join(", "))
    }

    fn re_add(&self, devices: &[String]) -> Result<String, String> {
        let mut said = Vec::new();
        for name in devices {
            // It is one of ours: what it holds is what is wanted.
            let device = self.open(name, true)?;
            let jobs = self.jobs.clone();
            let added = self.core.block_on(move |_| async move { jobs.re_add(device).await });
            let is_partial = added.map_err(gone)?.map_err(|error| error.to_string())?;
            let how = if is_partial { "gets what has changed" } else { "gets everything" };
            said.push(format!("{name} {how}"));
        }
        Ok(said.join(", "))
    }

    fn replace(&self, member: &str, name: &str, force: bool) -> Result<String, String> {
        let slot = self.slot(member, &self.array.table())?;
        let device = self.open(name, force)?;
        let jobs = self.jobs.clone();
        let begun = self.core.block_on(move |_| async move { jobs.replace(slot, device).await });
        begun.map_err(gone)?.map_err(|error| error.to_string())?;
        Ok(format!("slot {slot} is copied to {name}"))
    }

    /// Opens a device that is to be a member, and sees that nothing on it would be missed.
    fn open(&self, name: &str, force: bool) -> Result<Arc<dyn Device>, String> {
        let config = member(name, true, false).map_err(|error| error.to_string())?;
        let device = config.open().map_err(|error| error.to_string())?;
        if force {
            return Ok(device);
        }
        let subject = device.clone();
        let found = self.core.block_on(move |_| async move {
            let channel = subject.open_channel().map_err(|error| error.to_string())?;
            probe(&*channel, &subject.limits()).await.map_err(|error| error.to_string())
        });
        let found = found.map_err(gone)?.map_err(|error| format!("{name}: it cannot be read: {error}"))?;
        if found.is_empty() {
            return Ok(device);
        }
        let found: Vec<String> = found.iter().map(ToString::to_string).collect();
        Err(format!("{name} holds {} (--force overwrites it)", found.join(", ")))
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
