//! The target `messages`: a client of a running vhost-user-blk export that sends any messages, in
//! any order, with any descriptors, while its guest works on the rings.
//!
//! ```text
//!   input ──► Hostile ──socket──► export on two cores ──► a memory disk that sometimes delays requests
//!             then Behaved ──────► must be served in time; then the process must hold no resource of either
//! ```
//!
//! The export runs in its own threads, so the behaviour of an input may vary. By default each
//! message waits until the export has processed it, which makes most runs repeatable.

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
