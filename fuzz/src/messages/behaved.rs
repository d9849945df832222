//! A correct client, which must be served in time whatever clients came before it.

use super::request::{self, BOOT, GET_VRING_BASE, NEED_REPLY, PROTOCOL_FEATURES, VERSION};
use super::server::{DEADLINE, Server};
use super::wire;
use crate::driver::{Buffer, Driver};
use crate::guest::{DATA, FRAMES};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};
use virtio::blk::{VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT};

const SIZE: u16 = 16;
const SECTOR_BYTES: u32 = 512;

/// Connects, writes a sector, reads it back and leaves.
pub fn check(server: &mut Server) {
    let socket = server.connect();
    let toys = &mut server.toys;
    let ask = |request: u32, body: &[u8], fds: &[i32], flags: u32| {
        let mut bytes: Vec<u8> = [request, VERSION | flags, body.len() as u32].map(u32::to_le_bytes).concat();
        bytes.extend(body);
        assert!(wire::send(&socket, &bytes, fds, DEADLINE), "request {request} was not taken");
        let answer = wire::receive(&socket, DEADLINE);
        let (number, answer) = answer.unwrap_or_else(|| panic!("no answer to request {request}"));
        assert_eq!(number, request);
        answer
    };
    let word = |answer: Vec<u8>| u64::from_le_bytes(answer.try_into().expect("an answer of eight bytes"));
    let offered = word(ask(request::GET_FEATURES, &[], &[], 0));
    let features = offered & (virtio::VIRTIO_F_VERSION_1 | virtio::VHOST_USER_F_PROTOCOL_FEATURES);
    let plan = request::Plan { features, size: SIZE, bases: [0; 2], layout: 0 };
    // Acknowledgements may be requested only after this message, whose own is the first.
    let protocol = PROTOCOL_FEATURES.to_le_bytes();
    send_unanswered(&socket, request::SET_FEATURES, &features.to_le_bytes());
    send_unanswered(&socket, request::SET_PROTOCOL_FEATURES, &protocol);
    toys.guests[0].reset();
    let (mut driver, _) = Driver::new(&toys.guests[0], SIZE, false, 0);
    for request in [request::SET_OWNER, request::SET_MEM_TABLE].into_iter().chain(BOOT) {
        let message = request::message(request, 0, &plan, toys);
        let answer = ask(request, &message.body, &message.fds, NEED_REPLY);
        assert!(request == request::GET_FEATURES || word(answer) == 0, "request {request} was refused");
    }
    let data = [0xc3; SECTOR_BYTES as usize];
    toys.guests[0].write(DATA, &data);
    let kick = || {
        let one = 1u64;
        // SAFETY: writes eight live bytes.
        unsafe { libc::write(toys.events[0][0].as_raw_fd(), (&raw const one).cast(), 8) };
    };
    for (kind, at) in [(VIRTIO_BLK_T_OUT, DATA), (VIRTIO_BLK_T_IN, DATA + 0x200)] {
        let guest = &toys.guests[0];
        guest.write(FRAMES, &kind.to_le_bytes());
        guest.write(FRAMES + 8, &3u64.to_le_bytes());
        guest.write(FRAMES + 32, &[0xff]);
        let buffer = |addr, len, is_writable| Buffer { addr, len, is_writable };
        let buffers = [
            buffer(FRAMES, 16, false),
            buffer(at, SECTOR_BYTES, kind == VIRTIO_BLK_T_IN),
            buffer(FRAMES + 32, 1, true),
        ];
        assert!(driver.offer(guest, &buffers, false));
        kick();
        let start = Instant::now();
        while driver.poll(guest).is_none() {
            assert!(start.elapsed() < DEADLINE, "a request of type {kind} is not completed");
            std::thread::sleep(Duration::from_micros(20));
        }
        assert_eq!(guest.read(FRAMES + 32), [0], "a request of type {kind} failed");
    }
    assert_eq!(toys.guests[0].read(DATA + 0x200), data, "the data read differs from the data written");
    let base = word(ask(GET_VRING_BASE, &[0; 8], &[], 0));
    assert_eq!(base, 2 << 32, "two chains were popped");
}

fn send_unanswered(socket: &std::os::unix::net::UnixStream, request: u32, body: &[u8]) {
    let mut bytes: Vec<u8> = [request, VERSION, body.len() as u32].map(u32::to_le_bytes).concat();
    bytes.extend(body);
    assert!(wire::send(socket, &bytes, &[], DEADLINE), "request {request} was not taken");
}
