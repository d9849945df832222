//! The control socket of a running array: how `freestone array` reaches the `freestone serve` that
//! runs it.
//!
//! ```text
//!   freestone array fail NAME …      freestone serve
//!     client ── JSON lines ──► server (a thread of its own) ── messages ──► the array's core
//! ```
//!
//! A Unix socket of mode 0600 in the directory of [`directory`], called after the array's UUID.
//! Each line is a [`protocol::Request`] or a [`protocol::Reply`], in turn.

pub mod client;
pub mod protocol;
pub mod server;

use raid::Uuid;
use sandbox::Profile;
pub use stack::kinds::restart_log::runtime_directory as directory;
use std::path::{Path, PathBuf};

/// The socket of the array with this UUID.
pub fn path_of(uuid: Uuid) -> PathBuf {
    directory().join(format!("array-{uuid}.sock"))
}

/// Keeps, in a sandbox, what it takes to listen at `socket`. Its directory is made.
pub fn keep(socket: &Path, profile: &mut Profile) {
    if let Some(directory) = socket.parent().filter(|directory| !directory.as_os_str().is_empty()) {
        profile.make_directory(directory);
    }
    profile.allow_socket(socket);
}

/// The same for the socket of any array.
pub fn keep_any(profile: &mut Profile) {
    keep(&directory().join("any"), profile);
}
