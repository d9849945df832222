//! The suite that every device passes.

use crate::buffers::SharedBuffers;
use crate::server::Server;
use conformance::Suite;
use drivers_virtio_blk::{Choice, Options, VirtioBlk};
use std::sync::Arc;

fn run(change: impl FnOnce(&mut Options)) {
    let Some(server) = Server::start() else { return };
    let mut options = Options::new(server.socket());
    change(&mut options);
    let device = VirtioBlk::open(&options).unwrap();
    let buffers = SharedBuffers::new(&device).unwrap();
    Suite::new(Arc::new(device)).buffers(Arc::new(buffers)).run();
}

#[test]
fn the_client_is_a_device_as_every_other() {
    run(|_| ());
}

#[test]
fn the_client_is_a_device_without_indirect_descriptors() {
    run(|options| {
        options.indirect = Choice::Off;
        options.event_idx = Choice::Off;
        options.queue_size = 16;
    });
}
