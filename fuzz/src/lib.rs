//! Hostile guests, servers, clients and members for the fuzz targets.
//!
//! ```text
//!   bytes ──► Input ──► actions ──► rings:     a guest's memory and virtio::device, in one thread, step by step
//!                            ├────► messages:  a vhost-user client and a running export, over its socket
//!                            ├────► nbd:       an NBD server and drivers_nbd, over a socket pair, step by step
//!                            ├────► nbd-server: an NBD client and a running export, over its socket
//!                            ├────► nvme-tcp:  an NVMe/TCP target and drivers_nvme_tcp, over a socket pair, step by step
//!                            ├────► nvme-tcp-target: an NVMe/TCP host and a running export, over its socket
//!                            ├────► members:   edited members of arrays and the RAID engine, under virtual time
//!                            ├────► pool:      edited copies of a pool's table, and pools on a disk in memory
//!                            ├────► rest:      requests built from the OpenAPI document, and a daemon in the process
//!                            ├────► files:     files of tokens, keys and the configuration, and all that read them
//!                            ├────► images:    edited disk images, and all that reads them
//!                            ├────► journal:   edited journals of VDUSE exports, and a successor
//!                            └────► nbd-tls:   an NBD client with TLS and a running export, over its socket
//! ```
//!
//! An input is a program: a few bytes of setup, then one byte for each action, followed by its
//! operands. Every byte sequence is a valid program, so that small changes of the input become
//! small changes of behaviour.
//!
//! Every mapping of a file has inaccessible pages around it ([`guard`]). So an access outside guest
//! memory ends the process even without a sanitizer.

pub mod chains;
pub mod driver;
pub mod files;
pub mod guard;
pub mod guest;
pub mod images;
pub mod input;
pub mod journal;
pub mod members;
pub mod memfd;
pub mod messages;
pub mod nbd;
pub mod nbd_server;
pub mod nbd_tls;
pub mod nvme_tcp;
pub mod nvme_tcp_target;
pub mod pool;
pub mod rest;
pub mod rings;
