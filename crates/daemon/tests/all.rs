//! The tests of `freestoned` as a process. They are one program: a program for each file would take
//! longer to link than most of them run.

mod audit;
mod bounds;
mod clients;
mod commits;
mod common;
mod copies;
mod disks;
mod drives;
mod frozen;
mod history;
mod hosts;
mod images;
mod keys;
mod labels;
mod life;
mod listener;
mod moves;
mod nbd_portals;
mod pivots;
mod pools;
mod portals;
mod rbd;
mod reconnect;
mod refused;
mod rest;
mod roles;
mod sandbox;
mod secrets;
mod shared_buffers;
mod throttled;
mod waiting_jobs;
mod workers;
mod zeroing;
