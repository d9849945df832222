//! An NVMe subsystem without its transport: namespaces, controllers, and the execution of commands.
//!
//! ```text
//!   host ─► transport ─┬─ Connect ─► Entrance ─► Directory ─► Subsystem ─► Controller   (control)
//!                      └─ Command ─► Queue ─► device ─► Answer ─► transport ─► host      (a core)
//! ```
//!
//! A host connects an admin queue, which creates a [`Controller`], then any number of I/O queues.
//! One core serves each [`Queue`]. A transport receives commands, passes them to their queue, and
//! sends the answers: see [`Transport`], and `tests/plain_queues.rs` for one in memory. The crate
//! `exports_nvme_tcp` is the transport over TCP.
//!
//! A transport listens at addresses, each a port of its subsystems. Hosts then have several paths,
//! and learn which is best ([`ports`]). A controller belongs to the port that its host connected
//! to.
//!
//! | module | purpose |
//! |---|---|
//! | [`transport`] | the interface of a transport |
//! | [`config`] | the configuration of a subsystem |
//! | [`entrance`], [`directory`] | the subsystems that hosts find at a portal |
//! | [`authentication`] | authenticates the host, if required |
//! | [`ports`] | the addresses of the subsystem, and their access states |
//! | [`access`] | the hosts that may connect, which change while the subsystem serves |
//! | [`subsystem`], [`controller`] | admission, and the state that the queues of a host share |
//! | [`queue`] | a queue: from a command to its completion |
//! | [`reservations`] | write access of hosts that share a namespace |
//! | [`io`], [`copy`], [`admin`], [`features`], [`log_pages`], [`discovery`], [`lba_status`] | execution of commands |
//!
//! Source: NVM Express Base Specification 2.0, NVM Command Set Specification 1.0 (for Get LBA
//! Status 1.1).

mod access;
mod admin;
mod authentication;
mod config;
mod controller;
mod copy;
mod directory;
mod discovery;
mod entrance;
mod failure;
mod failures;
mod features;
mod host;
mod io;
mod lba_status;
mod log_pages;
mod ports;
mod queue;
mod refusal;
mod reservations;
mod subsystem;
mod transport;

pub use access::AdmittedHosts;
pub use authentication::{Authentication, Response, Step};
pub use config::{
    CONTROLLER_IDS, DEFAULT_QUEUES, MAX_NAMESPACES, MAX_QUEUES, MAX_SERIAL, NamespaceConfig, SubsystemConfig,
    default_serial,
};
pub use controller::Controller;
pub use directory::{Directory, Listed, MAX_SUBSYSTEMS, PortalTls};
pub use entrance::{Entrance, Newcomer};
pub use failure::Failure;
pub use host::Host;
pub use ports::Port;
pub use queue::Queue;
pub use refusal::Refusal;
pub use subsystem::{Admission, MAX_ENTRIES, Subsystem};
pub use transport::{Answer, Command, Connection, Transport};

/// Longest transfer of a command: MDTS.
pub const MAX_TRANSFER: u32 = 1 << 20;
/// Bytes that Compare, Copy and Verify process at a time.
const PART: usize = 64 << 10;
/// Memory that the command with the scratch memory of a connection has: a part of its data, and a
/// copy of it.
pub const SCRATCH_BYTES: usize = 2 * PART;
