//! The messages of the specification, as a correct client would send them.

use super::server::{QUEUES, Toys};
use std::os::fd::{AsRawFd, RawFd};

/// Number of requests: those of the specification and some beyond.
pub const MAX_REQUEST: u8 = 48;

/// The flag that requests an acknowledgement.
pub const NEED_REPLY: u32 = 8;
/// Version 1.
pub const VERSION: u32 = 1;

pub const GET_FEATURES: u32 = 1;
pub const SET_FEATURES: u32 = 2;
pub const SET_OWNER: u32 = 3;
pub const SET_MEM_TABLE: u32 = 5;
pub const SET_LOG_BASE: u32 = 6;
pub const SET_VRING_NUM: u32 = 8;
pub const SET_VRING_ADDR: u32 = 9;
pub const SET_VRING_BASE: u32 = 10;
pub const GET_VRING_BASE: u32 = 11;
pub const SET_VRING_KICK: u32 = 12;
pub const SET_VRING_CALL: u32 = 13;
pub const SET_VRING_ERR: u32 = 14;
pub const SET_PROTOCOL_FEATURES: u32 = 16;
pub const SET_VRING_ENABLE: u32 = 18;
const SET_BACKEND_REQ_FD: u32 = 21;
const GET_CONFIG: u32 = 24;
const SET_CONFIG: u32 = 25;
const GET_INFLIGHT_FD: u32 = 31;
const SET_INFLIGHT_FD: u32 = 32;
const ADD_MEM_REG: u32 = 37;
const REM_MEM_REG: u32 = 38;
const SET_DEVICE_STATE_FD: u32 = 42;

/// MQ, LOG_SHMFD, REPLY_ACK, BACKEND_REQ, CONFIG, INFLIGHT_SHMFD, RESET_DEVICE,
/// CONFIGURE_MEM_SLOTS.
pub const PROTOCOL_FEATURES: u64 = 1 | 1 << 1 | 1 << 3 | 1 << 5 | 1 << 9 | 1 << 12 | 1 << 13 | 1 << 15;

/// Values that the client has sent to the export, so that its messages match each other.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Bits to accept.
    pub features: u64,
    /// Entries of each ring.
    pub size: u16,
    /// Start position of each ring.
    pub bases: [u32; QUEUES as usize],
    /// Layout of the first guest's memory.
    pub layout: u8,
}

/// A message before any error is added.
#[derive(Debug, Default)]
pub struct Message {
    /// Payload.
    pub body: Vec<u8>,
    /// Descriptors.
    pub fds: Vec<RawFd>,
}

/// The message with number `request` for `queue`.
pub fn message(request: u32, queue: usize, plan: &Plan, toys: &mut Toys) -> Message {
    let words = |words: &[u64]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    let pair = |value: u32| words(&[queue as u64 | u64::from(value) << 32]);
    let inflight = [4096, 0, u64::from(QUEUES) | u64::from(plan.size) << 16];
    let event = |which: usize| toys.events[queue][which].as_raw_fd();
    let (body, fds) = match request {
        SET_FEATURES => (words(&[plan.features]), vec![]),
        SET_PROTOCOL_FEATURES => (words(&[PROTOCOL_FEATURES]), vec![]),
        SET_MEM_TABLE => return memory_table(plan, toys),
        SET_LOG_BASE => (words(&[64, 0]), vec![toys.small.fd().as_raw_fd()]),
        SET_VRING_NUM => (pair(plan.size.into()), vec![]),
        SET_VRING_ADDR => {
            let areas = toys.guests[queue].areas();
            let log = areas.device - crate::guest::USER;
            (words(&[queue as u64, areas.descriptors, areas.device, areas.driver, log]), vec![])
        }
        SET_VRING_BASE => (pair(plan.bases[queue]), vec![]),
        GET_VRING_BASE => (pair(0), vec![]),
        SET_VRING_KICK => (words(&[queue as u64]), vec![event(0)]),
        SET_VRING_CALL => (words(&[queue as u64]), vec![event(1)]),
        SET_VRING_ERR => (words(&[queue as u64]), vec![event(2)]),
        SET_VRING_ENABLE => (pair(1), vec![]),
        SET_BACKEND_REQ_FD => (vec![], vec![toys.others[2].as_raw_fd()]),
        GET_CONFIG => ([words(&[60 << 32]), vec![0; 4 + 60]].concat(), vec![]),
        SET_CONFIG => ([words(&[32 | 1 << 32]), vec![0; 4 + 1]].concat(), vec![]),
        GET_INFLIGHT_FD => (words(&inflight), vec![]),
        SET_INFLIGHT_FD => (words(&inflight), vec![toys.sparse.as_raw_fd()]),
        ADD_MEM_REG => (words(&[0, 1 << 50, 4096, 1 << 50, 0]), vec![toys.small.fd().as_raw_fd()]),
        REM_MEM_REG => (words(&[0, 1 << 50, 4096, 1 << 50, 0]), vec![]),
        SET_DEVICE_STATE_FD => (words(&[0]), vec![toys.others[0].as_raw_fd()]),
        _ => (vec![], vec![]),
    };
    Message { body, fds }
}

/// Address of a huge sparse memory, more than 32-bit lengths can count.
pub const HUGE_ADDR: u64 = 1 << 44;
/// Its length in bytes.
pub const HUGE_BYTES: u64 = 1 << 33;

/// The memory of both guests, the first in the plan's layout, the second as one region; and the
/// huge memory.
fn memory_table(plan: &Plan, toys: &mut Toys) -> Message {
    let mut table = Message::default();
    for (guest, layout) in toys.guests.iter_mut().zip([plan.layout, 0]) {
        let regions: Vec<_> = guest.choose(layout).collect();
        for [guest_addr, len, user_addr, offset] in regions {
            table.body.extend([guest_addr, len, user_addr, offset].map(u64::to_le_bytes).as_flattened());
            table.fds.push(guest.file().fd().as_raw_fd());
        }
    }
    table.body.extend([HUGE_ADDR, HUGE_BYTES, HUGE_ADDR, 0].map(u64::to_le_bytes).as_flattened());
    table.fds.push(toys.sparse.as_raw_fd());
    let count = table.fds.len() as u64;
    table.body.splice(..0, count.to_le_bytes());
    table
}

/// The messages that start a queue, in the usual order.
pub const BOOT: [u32; 8] = [
    SET_VRING_NUM,
    SET_VRING_BASE,
    SET_VRING_ADDR,
    SET_VRING_CALL,
    SET_VRING_ERR,
    SET_VRING_KICK,
    SET_VRING_ENABLE,
    GET_FEATURES,
];
