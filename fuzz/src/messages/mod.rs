//! The target `messages`: a client of a running vhost-user-blk export that says anything, in any order, with any
//! descriptors, while its guest works on the rings.
//!
//! ```text
//!   input ──► Hostile ──socket──► export on two cores ──► a memory disk that sometimes takes its time
//!             then Behaved ──────► must be served, in time; then nothing of either may be left in the process
//! ```
//!
//! The export runs in threads of its own, so an input does not always do the same. By default each message waits
//! for the export to have dealt with it, which leaves little to chance.

mod behaved;
mod hostile;
mod request;
mod server;
mod wire;

use crate::input::Input;
use hostile::Hostile;
use server::Server;
use std::cell::RefCell;

thread_local! {
    static SERVER: RefCell<Option<Server>> = const { RefCell::new(None) };
}

/// Runs one input.
pub fn run(bytes: &[u8]) {
    SERVER.with_borrow_mut(|server| {
        let server = server.get_or_insert_with(Server::start);
        Hostile::connect(server).run(&mut Input::new(bytes));
        behaved::check(server);
        server.check_nothing_left();
    });
}
