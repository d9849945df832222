//! Streams: the image gets the data of its backing file while users work. After that the backing
//! file has other bytes, which no read may return.

use super::world::World;
use crate::user::Host;
use qcow2::{Image, LiveImage, Problem, Stream};
use reactor::Simulation;
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

/// Bytes that are copied at a time.
const PART: u64 = 48 << 10;

/// Streams the backing file into the image.
pub fn run(world: &Rc<World>, simulation: &Simulation, image: &Arc<LiveImage>) {
    let stream = match image.begin_stream() {
        Ok(stream) => stream,
        Err(error) => return refused(world, &error.problem),
    };
    let is_copied = Rc::new(Cell::new(false));
    world
        .users
        .spawn(&simulation.cores()[0], Box::pin(copy(world.clone(), stream.clone(), is_copied.clone())));
    simulation.run_until(|| is_copied.get() || !world.goes_on() || world.users.running() == 0);
    if !is_copied.get() || !world.goes_on() {
        return;
    }
    match stream.finish() {
        Ok(()) => world.forget_backing(true),
        Err(error) => {
            refused(world, &error.problem);
            look(world, simulation, false);
        }
    }
}

async fn copy(world: Rc<World>, stream: Stream, is_copied: Rc<Cell<bool>>) {
    let Ok(channel) = stream.open_channel() else {
        return if world.machine.is_on() {
            world.fail("a stream does not open".into())
        };
    };
    while world.goes_on() {
        match channel.copy(PART).await {
            Ok(0) => return is_copied.set(true),
            Ok(_) => {}
            Err(error) => return world.job_failed("stream", error),
        }
    }
}

/// A stream is refused only for a reason.
fn refused(world: &World, problem: &Problem) {
    let has_no_room = |why: &str| why.starts_with("no room") && world.shape.fixed.is_some();
    world.job_refused("stream", problem, has_no_room);
}

/// Looks whether the image has its backing file still. `is_closed`: nothing has it open.
pub fn look(world: &World, simulation: &Simulation, is_closed: bool) {
    if world.backing.is_none() {
        return;
    }
    let file = world.file.clone();
    let header =
        simulation.cores()[0].remote().block_on(move |_| async move { Image::open_header(&file).await });
    match header.expect("the core runs") {
        Ok(header) if header.backing_file.is_none() => world.forget_backing(is_closed),
        Ok(_) if !world.has_backing.get() => world.fail("the image has its backing file again".into()),
        _ => {}
    }
}
