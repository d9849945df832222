//! A hostile client, which must not break the export.

use super::request::{self, BOOT, HUGE_ADDR, MAX_REQUEST, Message, NEED_REPLY, Plan, VERSION};
use super::server::{QUEUES, Server};
use super::wire;
use crate::chains;
use crate::driver::{Buffer, Driver};
use crate::guest::{FRAMES, MAX_SIZE};
use crate::input::Input;
use exports::Export;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Largest number of actions in one input.
const MAX_ACTIONS: usize = 100;
/// Timeout for an answer that the client may have made impossible.
const TIMEOUT: Duration = Duration::from_millis(20);
/// Number of requests in one storm, which races with the cores.
const STORM: usize = 64;

/// A connection and its client's plan.
pub struct Hostile<'a> {
    server: &'a mut Server,
    socket: UnixStream,
    plan: Plan,
    drivers: [Driver; QUEUES as usize],
    /// A message was cut short: the following bytes count as its rest, and no answer arrives in
    /// time.
    is_out_of_step: bool,
}

impl<'a> Hostile<'a> {
    /// Connects.
    pub fn connect(server: &'a mut Server) -> Self {
        let socket = server.connect();
        let toys = &mut server.toys;
        toys.guests.iter_mut().for_each(|guest| guest.reset());
        for event in toys.events.as_flattened() {
            let mut count = 0u64;
            // SAFETY: reads eight bytes into a live variable.
            unsafe { libc::read(event.as_raw_fd(), (&raw mut count).cast(), 8) };
        }
        for queue in 0..QUEUES {
            // An earlier input may have moved the queue.
            server.export.remap_queue(queue, queue.into()).expect("the core exists");
        }
        let toys = &mut server.toys;
        let drivers = [0, 1].map(|queue| Driver::new(&toys.guests[queue], 1, false, 0).0);
        let plan = Plan { features: 0, size: 1, bases: [0; 2], layout: 0 };
        Hostile { server, socket, plan, drivers, is_out_of_step: false }
    }

    /// Runs all actions of the input and disconnects.
    pub fn run(mut self, input: &mut Input<'_>) {
        self.make_plan(input);
        for _ in 0..MAX_ACTIONS {
            if input.is_empty() {
                break;
            }
            self.act(input);
        }
    }

    fn make_plan(&mut self, input: &mut Input<'_>) {
        let choices = input.u8();
        let is_packed = choices & 1 != 0;
        let mut features = virtio::VIRTIO_F_VERSION_1 | virtio::VHOST_USER_F_PROTOCOL_FEATURES;
        for (bit, feature) in [
            virtio::VIRTIO_F_RING_PACKED,
            virtio::VIRTIO_F_EVENT_IDX,
            virtio::VIRTIO_F_INDIRECT_DESC,
            virtio::VHOST_F_LOG_ALL,
            virtio::blk::VIRTIO_BLK_F_FLUSH,
            virtio::blk::VIRTIO_BLK_F_CONFIG_WCE,
        ]
        .into_iter()
        .enumerate()
        {
            features |= if choices & 1 << bit != 0 { feature } else { 0 };
        }
        let size = match is_packed {
            false => 1 << input.below(7),
            true => 1 + input.u16() % MAX_SIZE,
        };
        let start = input.u16();
        let guests = &self.server.toys.guests;
        let [first, second] = [0, 1].map(|queue| Driver::new(&guests[queue], size, is_packed, start));
        self.plan = Plan { features, size, bases: [first.1, second.1], layout: input.u8() };
        self.drivers = [first.0, second.0];
    }

    fn is_packed(&self) -> bool {
        self.plan.features & virtio::VIRTIO_F_RING_PACKED != 0
    }

    fn act(&mut self, input: &mut Input<'_>) {
        let queue = usize::from(input.u8() & 0x80 != 0);
        let guest = &self.server.toys.guests[queue];
        let is_packed = self.is_packed();
        match input.below(32) {
            0 => self.negotiate(),
            1 | 2 => self.boot(queue),
            3 => {
                self.negotiate();
                self.boot(queue);
            }
            4..=8 => self.say(queue, input),
            12 => chains::write_descriptor(guest, is_packed, input),
            13 => chains::make_available(guest, is_packed, input),
            14 => chains::write_anywhere(guest, is_packed, input),
            15 => chains::write_table(guest, is_packed, input),
            16 => chains::write_data(guest, input),
            17 => self.kick(queue),
            18 => self.storm(queue, input),
            19 => self.send_noise(input),
            20 => drop(self.server.export.remap_queue(queue as u16, input.below(3))),
            21 => drop(self.server.export.notify_resize()),
            22 => self.offer_huge(queue, input),
            23 => std::thread::sleep(Duration::from_micros(input.u8().into())),
            24 => {
                let has_events = self.plan.features & virtio::VIRTIO_F_EVENT_IDX != 0;
                self.drivers[queue].set_wish(guest, has_events, input.u16());
            }
            // New actions take numbers from here, so that inputs keep their meaning.
            _ => self.offer(queue, input),
        }
    }

    fn send(&mut self, request: u32, flags: u32, len: usize, message: &Message) {
        let mut bytes: Vec<u8> = [request, flags, len as u32].map(u32::to_le_bytes).concat();
        bytes.extend(&message.body);
        wire::send(&self.socket, &bytes, &message.fds, TIMEOUT);
    }

    fn say_plainly(&mut self, request: u32, queue: usize) {
        let message = request::message(request, queue, &self.plan, &mut self.server.toys);
        self.send(request, VERSION, message.body.len(), &message);
    }

    fn negotiate(&mut self) {
        for request in [
            request::SET_OWNER,
            request::GET_FEATURES,
            request::SET_FEATURES,
            request::SET_PROTOCOL_FEATURES,
            request::SET_MEM_TABLE,
        ] {
            self.say_plainly(request, 0);
        }
        self.keep_step();
    }

    fn boot(&mut self, queue: usize) {
        BOOT.into_iter().for_each(|request| self.say_plainly(request, queue));
        self.keep_step();
    }

    /// Sends one message, correct or with an error.
    fn say(&mut self, queue: usize, input: &mut Input<'_>) {
        let request = u32::from(input.u8() % MAX_REQUEST);
        let mut message = request::message(request, queue, &self.plan, &mut self.server.toys);
        let wrong = input.u8();
        if wrong & 1 != 0 && !message.body.is_empty() {
            let at = input.below(message.body.len());
            let value = some_number(input).to_le_bytes();
            let width = input.one_of(&[1, 2, 4, 8]);
            let end = message.body.len().min(at + width);
            message.body[at..end].copy_from_slice(&value[..end - at]);
        }
        if wrong & 2 != 0 {
            let count = input.below(wire::MAX_FDS + 1);
            let first = input.u8();
            message.fds = (0..count).map(|i| self.server.toys.any(first.wrapping_add(i as u8))).collect();
        }
        if wrong & 4 != 0 {
            message.body.resize(some_number(input) as usize % 0x1100, input.u8());
        }
        let mut len = message.body.len();
        if wrong & 8 != 0 {
            len = some_number(input) as usize;
            self.is_out_of_step = true;
        }
        let flags = if wrong & 16 != 0 { input.u32() } else { VERSION };
        self.send(request, flags | if wrong & 32 != 0 { NEED_REPLY } else { 0 }, len, &message);
        if wrong & 64 == 0 {
            self.keep_step();
        }
    }

    /// Waits until the export has processed all messages, unless it cannot know the end of a
    /// message.
    fn keep_step(&mut self) {
        wire::drain(&self.socket);
        if self.is_out_of_step {
            return;
        }
        self.send(request::GET_FEATURES, VERSION, 0, &Message::default());
        loop {
            match wire::receive(&self.socket, TIMEOUT) {
                Some((request::GET_FEATURES, body)) if body.len() == 8 => return,
                Some(_) => {}
                None => {
                    self.is_out_of_step = true;
                    return;
                }
            }
        }
    }

    fn send_noise(&mut self, input: &mut Input<'_>) {
        let fds: Vec<_> = (0..input.below(4)).map(|_| self.server.toys.any(input.u8())).collect();
        wire::send(&self.socket, input.bytes(64), &fds, TIMEOUT);
        self.is_out_of_step = true;
    }

    fn kick(&self, queue: usize) {
        let one = 1u64;
        // SAFETY: writes eight live bytes.
        unsafe { libc::write(self.server.toys.events[queue][0].as_raw_fd(), (&raw const one).cast(), 8) };
    }

    fn offer(&mut self, queue: usize, input: &mut Input<'_>) {
        let indirect = self.plan.features & virtio::VIRTIO_F_INDIRECT_DESC != 0;
        chains::offer(&mut self.drivers[queue], &self.server.toys.guests[queue], indirect, input);
        self.kick(queue);
    }

    /// Offers a request whose total length exceeds 32 bits.
    fn offer_huge(&mut self, queue: usize, input: &mut Input<'_>) {
        let guest = &self.server.toys.guests[queue];
        guest.write(FRAMES, &u32::from(input.u8() % 16).to_le_bytes());
        guest.write(FRAMES + 8, &u64::from(input.u8()).to_le_bytes());
        let header = Buffer { addr: guest.base() + FRAMES, len: 16, is_writable: false };
        let writable = input.u8();
        let huge = (0..input.below(6)).map(|i| {
            let len = u32::MAX - u32::from(input.u8());
            Buffer { addr: HUGE_ADDR + i as u64, len, is_writable: writable & 1 == 0 }
        });
        let status = Buffer { addr: guest.base() + FRAMES + 32, len: 1, is_writable: true };
        let buffers: Vec<_> = [header].into_iter().chain(huge).chain([status]).collect();
        self.drivers[queue].offer(guest, &buffers, writable & 2 != 0);
        self.kick(queue);
    }

    /// Changes a few bytes of the ring repeatedly while the cores read them.
    fn storm(&mut self, queue: usize, input: &mut Input<'_>) {
        let (at, bytes) = (u64::from(input.u16()) % 0x2400, input.bytes(16));
        let guest = &self.server.toys.guests[queue];
        let before: [u8; 16] = guest.read(at);
        self.kick(queue);
        for i in 0..STORM {
            guest.write(at, if i % 2 == 0 { bytes } else { &before[..bytes.len()] });
            std::hint::spin_loop();
        }
    }
}

/// Any number, or one near a limit.
fn some_number(input: &mut Input<'_>) -> u64 {
    match input.u8() % 8 {
        0 => input.u64(),
        1 => 1 << (input.u8() % 64),
        2 => (1u64 << (input.u8() % 64)).wrapping_sub(1),
        3 => u64::MAX - u64::from(input.u8()),
        4 => crate::guest::USER + u64::from(input.u16()),
        5 => u64::from(input.u16()),
        _ => input.u8().into(),
    }
}
