//! A test guest: memory, and a driver that follows the specification byte by byte. It shares no
//! code with the queues it tests.

mod crash;
mod hostile;
mod model;
mod speed;

use super::*;
use crate::mapping::sealed_file;
use crate::memory::RegionSpec;
use std::collections::HashMap;

/// Guest addresses of the rings; user addresses lie [`USER`] higher.
const DESC: u64 = 0x1000;
const DRIVER: u64 = 0x1_1000;
const DEVICE: u64 = 0x2_1000;
const USER: u64 = 0x7000_0000_0000;
/// Where buffers and indirect tables may lie: the upper half of the low region.
const HEAP: u64 = 0x4_0000;
/// Two adjacent regions (in guest addresses only) that meet at [`BORDER`]. Nothing else lies below
/// the high region.
const BORDER: u64 = 0x8_0000;
const END: u64 = 0xa_0000;
const HIGH: u64 = 0x1_0000_0000;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

const _: () = {
    const fn moves_between_cores<T: Send>() {}
    moves_between_cores::<VirtQueue>();
    moves_between_cores::<Chain>();
    moves_between_cores::<InflightQueue>();
    moves_between_cores::<Arc<GuestMemory>>();
};

#[derive(Clone)]
struct Guest(Arc<GuestMemory>);

impl Guest {
    fn new() -> Guest {
        // In this order, the two adjacent regions are unlikely to be adjacent in this process.
        let regions = [(0, BORDER), (HIGH, 0x1000), (BORDER, END - BORDER)];
        let specs = regions.map(|(guest_addr, len)| {
            let fd = sealed_file(c"guest", len).unwrap();
            RegionSpec { guest_addr, len, user_addr: guest_addr + USER, fd, fd_offset: 0 }
        });
        Guest(Arc::new(GuestMemory::map(specs.into()).unwrap()))
    }

    fn host(&self, addr: u64, len: u64) -> *mut u8 {
        self.0.translate(addr, len).expect("tests stay in memory")
    }

    fn write(&self, addr: u64, bytes: &[u8]) {
        let at = self.host(addr, bytes.len() as u64);
        // SAFETY: translated, and no reference to guest memory exists.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
    }

    fn read<const N: usize>(&self, addr: u64) -> [u8; N] {
        let mut bytes = [0; N];
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(self.host(addr, N as u64), bytes.as_mut_ptr(), N) };
        bytes
    }

    fn read_u16(&self, addr: u64) -> u16 {
        u16::from_le_bytes(self.read(addr))
    }

    fn read_u32(&self, addr: u64) -> u32 {
        u32::from_le_bytes(self.read(addr))
    }

    fn write_u16(&self, addr: u64, value: u16) {
        self.write(addr, &value.to_le_bytes());
    }

    fn clear_rings(&self) {
        self.write(0, &vec![0; HEAP as usize]);
    }

    /// 16 bytes of a descriptor: `a`, `b` are flags and next (split), id and flags (packed).
    fn write_desc(&self, at: u64, addr: u64, len: u32, a: u16, b: u16) {
        self.write(at, &addr.to_le_bytes());
        self.write(at + 8, &len.to_le_bytes());
        self.write_u16(at + 12, a);
        self.write_u16(at + 14, b);
    }

    fn config(&self, size: u16, is_packed: bool) -> QueueConfig {
        QueueConfig {
            size,
            areas: RingAreas { descriptors: USER + DESC, driver: USER + DRIVER, device: USER + DEVICE },
            state: RingState::from_vring_base(if is_packed { 0x8000_8000 } else { 0 }, is_packed),
            event_idx: false,
            indirect: true,
            memory: self.0.clone(),
            inflight: None,
            log: None,
        }
    }

    fn queue(&self, size: u16, is_packed: bool) -> VirtQueue {
        VirtQueue::new(self.config(size, is_packed)).unwrap()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Buffer {
    addr: u64,
    len: u32,
    is_writable: bool,
}

/// The driver of one ring.
struct Driver {
    guest: Guest,
    size: u16,
    is_packed: bool,
    event_idx: bool,
    /// Split: free descriptors. Packed: free buffer ids.
    free: Vec<u16>,
    free_slots: u16,
    /// For each head or ID in flight: its descriptors or slots, and the caller's token.
    in_flight: HashMap<u16, (Vec<u16>, u64)>,
    avail: u16,
    avail_wrap: bool,
    used: u16,
    used_wrap: bool,
    next_table: u64,
    /// Packed: the first slot of the chain added last.
    last_slot: u16,
}

impl Driver {
    fn new(guest: &Guest, size: u16, is_packed: bool, event_idx: bool) -> Driver {
        // Out of order, so that an index never equals a position by chance.
        let free = (0..size).map(|i| if is_packed { i } else { (i * 7 + 3) % size }).rev().collect();
        Driver {
            guest: guest.clone(),
            size,
            is_packed,
            event_idx,
            free,
            free_slots: size,
            in_flight: HashMap::new(),
            avail: 0,
            avail_wrap: true,
            used: 0,
            used_wrap: true,
            next_table: 0,
            last_slot: 0,
        }
    }

    /// Makes a chain available; `false` when the ring is full.
    fn add(&mut self, buffers: &[Buffer], is_indirect: bool, token: u64) -> bool {
        let slots = if is_indirect { 1 } else { buffers.len() };
        let room = if self.is_packed { self.free_slots.into() } else { self.free.len() };
        if slots > room || self.free.is_empty() {
            return false;
        }
        let table = is_indirect.then(|| self.write_table(buffers));
        let table = table.map(|addr| [Buffer { addr, len: 16 * buffers.len() as u32, is_writable: false }]);
        let (entries, extra): (&[Buffer], u16) = match &table {
            Some(entry) => (entry, INDIRECT),
            None => (buffers, 0),
        };
        match self.is_packed {
            false => self.add_split(entries, extra, token),
            true => self.add_packed(entries, extra, token),
        }
        true
    }

    fn write_table(&mut self, buffers: &[Buffer]) -> u64 {
        let bytes = 16 * buffers.len() as u64;
        // Tables are taken round robin, from room for far more than a ring can hold.
        if self.next_table + bytes > 0x1_0000 {
            self.next_table = 0;
        }
        let table = HEAP + self.next_table;
        self.next_table += bytes;
        for (i, b) in buffers.iter().enumerate() {
            let flags = if b.is_writable { WRITE } else { 0 };
            let at = table + 16 * i as u64;
            match self.is_packed {
                true => self.guest.write_desc(at, b.addr, b.len, 0xdead, flags),
                false if i + 1 == buffers.len() => self.guest.write_desc(at, b.addr, b.len, flags, 0),
                false => self.guest.write_desc(at, b.addr, b.len, flags | NEXT, i as u16 + 1),
            }
        }
        table
    }

    fn add_split(&mut self, entries: &[Buffer], extra: u16, token: u64) {
        let taken = self.free.split_off(self.free.len() - entries.len());
        for (i, (&index, b)) in taken.iter().zip(entries).enumerate() {
            let flags = extra | if b.is_writable { WRITE } else { 0 };
            let next = taken.get(i + 1);
            let flags = if next.is_some() { flags | NEXT } else { flags };
            let at = DESC + 16 * u64::from(index);
            self.guest.write_desc(at, b.addr, b.len, flags, next.copied().unwrap_or(0xffff));
        }
        self.guest.write_u16(DRIVER + 4 + 2 * u64::from(self.avail % self.size), taken[0]);
        self.avail = self.avail.wrapping_add(1);
        self.guest.write_u16(DRIVER + 2, self.avail);
        assert!(self.in_flight.insert(taken[0], (taken, token)).is_none());
    }

    fn add_packed(&mut self, entries: &[Buffer], extra: u16, token: u64) {
        let id = self.free.pop().unwrap();
        let first = (self.avail, self.avail_wrap);
        let mut first_flags = 0;
        self.last_slot = first.0;
        for (i, b) in entries.iter().enumerate() {
            let more = if i + 1 < entries.len() { NEXT } else { 0 };
            let lap = if self.avail_wrap { 1 << 7 } else { 1 << 15 };
            let flags = extra | more | lap | if b.is_writable { WRITE } else { 0 };
            let at = DESC + 16 * u64::from(self.avail);
            if i == 0 {
                first_flags = flags;
                let not_yet = self.guest.read_u16(at + 14);
                self.guest.write_desc(at, b.addr, b.len, id, not_yet);
            } else {
                self.guest.write_desc(at, b.addr, b.len, id, flags);
            }
            self.avail += 1;
            if self.avail == self.size {
                (self.avail, self.avail_wrap) = (0, !self.avail_wrap);
            }
        }
        self.guest.write_u16(DESC + 16 * u64::from(first.0) + 14, first_flags);
        self.free_slots -= entries.len() as u16;
        assert!(self.in_flight.insert(id, (vec![0; entries.len()], token)).is_none());
    }

    /// The token and length of the next used chain.
    fn poll(&mut self) -> Option<(u64, u32)> {
        let (id, len) = match self.is_packed {
            false if self.guest.read_u16(DEVICE + 2) == self.used => return None,
            false => {
                let at = DEVICE + 4 + 8 * u64::from(self.used % self.size);
                (self.guest.read_u32(at), self.guest.read_u32(at + 4))
            }
            true => {
                let at = DESC + 16 * u64::from(self.used);
                let flags = self.guest.read_u16(at + 14);
                if [flags & 1 << 7 != 0, flags & 1 << 15 != 0] != [self.used_wrap; 2] {
                    return None;
                }
                (self.guest.read_u16(at + 12).into(), self.guest.read_u32(at + 8))
            }
        };
        let (taken, token) =
            self.in_flight.remove(&(id as u16)).expect("a chain is used that is not in flight");
        if self.is_packed {
            self.free.insert(0, id as u16);
            self.free_slots += taken.len() as u16;
            self.used += taken.len() as u16;
            if self.used >= self.size {
                (self.used, self.used_wrap) = (self.used - self.size, !self.used_wrap);
            }
        } else {
            taken.into_iter().for_each(|i| self.free.insert(0, i));
            self.used = self.used.wrapping_add(1);
        }
        Some((token, len))
    }

    /// Sets whether the next used chain raises an interrupt.
    fn want_interrupts(&self, is_wanted: bool) {
        match (self.is_packed, self.event_idx) {
            (false, false) => self.guest.write_u16(DRIVER, u16::from(!is_wanted)),
            (false, true) => {
                let event = if is_wanted { self.used } else { self.used.wrapping_sub(1) };
                self.guest.write_u16(DRIVER + 4 + 2 * u64::from(self.size), event);
            }
            (true, true) if is_wanted => {
                self.guest.write_u16(DRIVER, self.used | u16::from(self.used_wrap) << 15);
                self.guest.write_u16(DRIVER + 2, 2);
            }
            (true, _) => self.guest.write_u16(DRIVER + 2, u16::from(!is_wanted)),
        }
    }

    /// Whether the device wants to be notified of the chain added last.
    fn must_notify(&self) -> bool {
        match (self.is_packed, self.event_idx) {
            (false, false) => self.guest.read_u16(DEVICE) & 1 == 0,
            (false, true) => {
                let event = self.guest.read_u16(DEVICE + 4 + 8 * u64::from(self.size));
                event == self.avail.wrapping_sub(1)
            }
            (true, _) => match self.guest.read_u16(DEVICE + 2) & 3 {
                0 => true,
                1 => false,
                _ => {
                    assert!(self.event_idx);
                    self.guest.read_u16(DEVICE) & 0x7fff == self.last_slot
                }
            },
        }
    }
}
