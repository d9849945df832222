//! The NBD client against servers that others wrote: nbdkit, `qemu-nbd`, `qemu-storage-daemon`.
//! Where one is not installed, its tests say so and pass.

mod conformance;
mod requests;
mod server;
