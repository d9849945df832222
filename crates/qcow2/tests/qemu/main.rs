//! Images that QEMU and the crate `imago` make, read and written by this crate and by them. Needs
//! `qemu-utils`.

mod backing;
mod bitmap_changes;
mod bitmaps;
mod changes;
mod damage;
mod disk;
mod freeing;
mod imago;
mod live_snapshots;
mod losing;
mod over;
mod read;
mod repair;
mod resize;
mod restart;
mod shared_places;
mod snapshots;
mod stream;
mod tools;
mod write;
