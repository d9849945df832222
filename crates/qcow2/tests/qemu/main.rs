//! Images that QEMU makes, read and written by this crate and by QEMU. Needs `qemu-utils`.

mod backing;
mod changes;
mod damage;
mod losing;
mod read;
mod repair;
mod resize;
mod snapshots;
mod tools;
mod write;
