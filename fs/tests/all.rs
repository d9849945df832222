//! The program and its device, seen by a front end of vhost-user without a guest.

mod common;
mod device;
mod program;
