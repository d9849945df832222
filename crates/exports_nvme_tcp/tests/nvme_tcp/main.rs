//! The NVMe/TCP target, as its hosts find it: good ones, bad ones, and those that vanish.

mod access;
mod admin;
mod authentication;
mod conformance;
mod ending;
mod host;
mod hostile;
mod io;
mod keyring;
mod lba_status;
mod places;
mod portal;
mod removal;
mod reservations;
mod server;
mod tls;
