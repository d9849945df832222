//! The tests of `freestone` as a process. They are one program: a program for each file would take
//! longer to link than most of them run.

mod array;
mod array_daemon;
mod array_life;
mod attach;
mod bench;
mod common;
mod copies;
mod disks;
mod export_host;
mod fs;
mod grow;
mod history;
mod image;
mod image_served;
mod labels;
mod nbd_reconnect;
mod nbd_shared;
mod nvme_tcp;
mod pool;
mod pool_online;
mod rbd;
mod sandbox;
mod serve;
mod status;
mod usage;
mod vhost_user_reconnect;
