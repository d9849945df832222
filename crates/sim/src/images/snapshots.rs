//! Internal snapshots: made and deleted while users work, and compared with what they must hold for
//! ever.

use super::world::{Pending, World};
use crate::oracle::Violation;
use crate::user::Host;
use block::{Device, Flags, Op};
use qcow2::{Image, LiveImage, Problem, Qcow2};
use reactor::Simulation;
use std::sync::Arc;
use std::time::Duration;

/// Longest read of a snapshot in bytes.
const PART: usize = 64 << 10;

/// Makes a snapshot.
pub fn create(world: &World, simulation: &Simulation, image: &LiveImage) {
    let name = format!("s{}", world.made.replace(world.made.get() + 1));
    let ticket = world.disk.oracle.borrow_mut().begin_read();
    let created = image.create_snapshot(&name, Duration::ZERO);
    let oracle = world.disk.oracle.borrow().clone();
    world.disk.oracle.borrow_mut().forget_read(ticket);
    match created {
        Ok(_) => {
            let Some(content) = read(world, simulation, &name) else {
                return world.pending.borrow_mut().push(Pending::Made(name, oracle, ticket, true));
            };
            judge(world, &name, oracle.check_moment(ticket, &content));
            world.snapshots.borrow_mut().push((name, content));
        }
        Err(error) => failed(world, error.problem, Pending::Made(name, oracle, ticket, false)),
    }
}

/// Deletes the oldest snapshot, or makes one if there is none.
pub fn delete(world: &World, simulation: &Simulation, image: &LiveImage) {
    let oldest = world.snapshots.borrow().first().map(|(name, _)| name.clone());
    let Some(name) = oldest else { return create(world, simulation, image) };
    match image.delete_snapshot(&name) {
        Ok(()) => world.snapshots.borrow_mut().retain(|(other, _)| *other != name),
        Err(error) => failed(world, error.problem, Pending::Deleted(name)),
    }
}

/// A change fails only for a reason. It may have happened if the device has failed.
fn failed(world: &World, problem: Problem, pending: Pending) {
    let is_excused = match &problem {
        _ if !world.machine.is_on() => true,
        Problem::Refused(why) if why.starts_with("no room") => world.shape.fixed.is_some(),
        Problem::Refused(why) if why.contains("references") => world.shape.refcount_order < 4,
        // A deletion that failed may have happened.
        Problem::Refused(why) if why.starts_with("no snapshot") => world.is_deleted(&pending),
        Problem::Refused(why) if why.contains("while the image is in use") => world.shape.cluster_bits < 11,
        Problem::Write { .. } | Problem::Io { .. } => world.has_failed(),
        _ => false,
    };
    if !is_excused {
        return world.fail(format!("a change of snapshots failed: {problem}"));
    }
    if !matches!(problem, Problem::Refused(_)) || !world.machine.is_on() {
        world.is_unsettled.set(true);
        world.pending.borrow_mut().push(pending);
    }
}

fn judge(world: &World, name: &str, result: Result<(), Violation>) {
    if let Err(violation) = result {
        world.fail(format!("snapshot {name}: {}", violation.0));
    }
}

/// Checks that the image has its snapshots with their content. A pending one belongs to them if the
/// image has it.
pub fn check(world: &World, simulation: &Simulation) {
    let device: Arc<dyn Device> = Arc::new(world.file.clone());
    let opened = simulation.cores()[0].remote().block_on(move |_| async move { Image::open(device).await });
    let found: Vec<String> = match opened.expect("the core runs") {
        Ok(image) => image.snapshots.into_iter().map(|snapshot| snapshot.name).collect(),
        Err(_) if !world.machine.is_on() => return,
        Err(error) => return world.fail(format!("the image does not open: {error}")),
    };
    for pending in world.pending.take() {
        match pending {
            Pending::Made(name, oracle, ticket, is_sure) if is_sure || found.contains(&name) => {
                let Some(content) = read(world, simulation, &name) else {
                    world.pending.borrow_mut().push(Pending::Made(name, oracle, ticket, is_sure));
                    continue;
                };
                judge(world, &name, oracle.check_moment(ticket, &content));
                world.snapshots.borrow_mut().push((name, content));
            }
            Pending::Deleted(name) if !found.contains(&name) => {
                world.snapshots.borrow_mut().retain(|(other, _)| *other != name);
            }
            Pending::Made(..) | Pending::Deleted(_) => {}
        }
    }
    // One that was pending may be older than others.
    let place = |name: &String| found.iter().position(|other| other == name);
    world.snapshots.borrow_mut().sort_by_key(|(name, _)| place(name));
    let expected: Vec<String> = world.snapshots.borrow().iter().map(|(name, _)| name.clone()).collect();
    if found != expected {
        world.fail(format!("the image has the snapshots {found:?}, not {expected:?}"));
    }
    for (name, content) in &*world.snapshots.borrow() {
        if read(world, simulation, name).is_some_and(|now| now != *content) {
            world.fail(format!("snapshot {name} has changed"));
        }
    }
}

/// The content of a snapshot, unless power goes before, or a request to the file fails.
fn read(world: &World, simulation: &Simulation, name: &str) -> Option<Vec<u8>> {
    let device: Arc<dyn Device> = Arc::new(world.file.clone());
    let (others, size, wanted) = (world.others(), world.shape.size as usize, name.to_owned());
    let read = simulation.cores()[0].remote().block_on(move |_| async move {
        let image = Image::open(device).await?;
        let disk = Qcow2::new(image.at_snapshot(&wanted).await?, others, PART as u64)?;
        let Ok(channel) = disk.open_channel() else { return Ok(None) };
        let mut bytes = Vec::new();
        while bytes.len() < size {
            let buffer = reactor::current().buffers().take(PART.min(size - bytes.len())).await;
            let (buffer, result) =
                buffer.transfer(&*channel, Op::Read, Flags::NONE, bytes.len() as u64).await;
            if result.is_err() {
                return Ok(None);
            }
            bytes.extend_from_slice(buffer.as_slice());
        }
        Ok::<_, qcow2::Error>(Some(bytes))
    });
    let content = read.expect("the core runs").ok().flatten();
    if content.is_none() && world.machine.is_on() && !world.has_failed() {
        world.fail(format!("snapshot {name} cannot be read"));
    }
    content.filter(|_| world.machine.is_on())
}
