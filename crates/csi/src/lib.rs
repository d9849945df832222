//! `freestone-csi`: volumes of Freestone for container orchestrators, by the Container Storage
//! Interface (CSI, `proto/csi.proto`).
//!
//! ```text
//!   orchestrator ──gRPC──► service ──► controller ──REST──► freestoned of each storage host
//!                                 └──► node ──► nvme-tcp │ ublk │ fake ──► mounts, or Kata
//! ```
//!
//! - The **controller** ([`controller`]) keeps no state: a volume's identity is `BACKEND/UUID`, and
//!   all else is asked of `freestoned`. Volumes and exports carry labels by which a repeated call
//!   finds them, so the driver may be killed between any two requests.
//! - The **node** ([`node`]) attaches a volume to its machine, and mounts it. It keeps one record
//!   for each volume that it has attached, and checks it against the system.
//! - Both are synchronous, with one lock for each volume; [`service`] runs them on threads that may
//!   wait.
//!
//! A volume's only way to another machine is an NVMe/TCP export without hosts: publishing adds a
//! host to it, and unpublishing removes the host. The daemon answers the removal when no write of
//! the host is in flight, so it is a fence.

#![forbid(unsafe_code)]

pub mod capability;
pub mod config;
pub mod controller;
pub mod fault;
pub mod gc;
pub mod ids;
pub mod locks;
pub mod node;
pub mod parameters;
pub mod service;
pub mod topology;

/// The messages and services of CSI, generated from `proto/csi.proto`.
#[allow(missing_docs, clippy::all)]
pub mod proto {
    tonic::include_proto!("csi.v1");
}
