//! Images that QEMU's programs make, read by this crate and by `qemu-img`. Needs `qemu-utils`.

mod damage;
mod read;
mod tools;
