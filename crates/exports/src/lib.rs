//! What clients attach to.
//!
//! An export speaks one protocol to its clients and hands their requests to a [`block::Device`], on the cores
//! its queues are mapped to. Control (connections, negotiation, mappings) runs on the export's own thread and
//! reaches the cores by message; the data path takes no lock.

pub mod vhost_user_blk;
