//! The vhost-user client against a server that others wrote: `qemu-storage-daemon`. Where it is not
//! installed, these tests say so and pass.

mod buffers;
mod conformance;
mod requests;
mod server;
