//! A driver that follows the specification and knows the expected completions. It shares no code
//! with the crate under test.

use crate::guest::{DESC, DEVICE, DRIVER, Guest, TABLE_BYTES, TABLES};
use std::collections::BTreeMap;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;

/// A buffer of a chain.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    /// Guest address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// Whether the device writes it.
    pub is_writable: bool,
}

/// A chain that the device has not used yet.
#[derive(Clone, Debug)]
pub struct Offered {
    /// Descriptors (split) or slots (packed, only their number counts).
    taken: Vec<u16>,
    /// Bytes for the device to read and to write.
    pub lens: [u64; 2],
}

/// Index and wrap counter of a packed ring; the index alone for a split one.
#[derive(Clone, Copy, Debug)]
struct Place {
    index: u16,
    wrap: bool,
}

/// The driver of one ring.
#[derive(Debug)]
pub struct Driver {
    size: u16,
    is_packed: bool,
    /// Free descriptors (split) or ids (packed).
    free: Vec<u16>,
    free_slots: u16,
    /// Chains the device has not used, by head or id.
    pub in_flight: BTreeMap<u16, Offered>,
    avail: Place,
    used: Place,
}

impl Driver {
    /// Writes an empty ring that starts at `start`. Returns the driver and the base for the device.
    pub fn new(guest: &Guest, size: u16, is_packed: bool, start: u16) -> (Driver, u32) {
        let place = match is_packed {
            false => Place { index: start, wrap: false },
            true => Place { index: (start & 0x7fff) % size.max(1), wrap: start >> 15 == 0 },
        };
        let driver = Driver {
            size,
            is_packed,
            free: (0..size).rev().collect(),
            free_slots: size,
            in_flight: BTreeMap::new(),
            avail: place,
            used: place,
        };
        if !is_packed {
            guest.write_u16(DRIVER + 2, start);
            guest.write_u16(DEVICE + 2, start);
            return (driver, start.into());
        }
        for slot in 0..size {
            // The state that the previous lap left.
            let wrap = if slot < place.index { place.wrap } else { !place.wrap };
            guest.write_desc(slot_at(slot), 0, 0, 0, if wrap { AVAIL | USED } else { 0 });
        }
        let bits = u32::from(place.index) | u32::from(place.wrap) << 15;
        (driver, bits | bits << 16)
    }

    /// The ID of the next chain; `None` when the ring is full.
    pub fn next_id(&self) -> Option<u16> {
        self.free.last().copied().filter(|_| self.free_slots > 0)
    }

    /// Makes a chain available. Returns whether the ring had room.
    pub fn offer(&mut self, guest: &Guest, buffers: &[Buffer], is_indirect: bool) -> bool {
        let slots = if is_indirect { 1 } else { buffers.len() };
        let room = if self.is_packed { self.free_slots.into() } else { self.free.len() };
        let (Some(id), false) = (self.next_id(), slots > room || buffers.is_empty()) else { return false };
        let mut lens = [0; 2];
        buffers.iter().for_each(|b| lens[usize::from(b.is_writable)] += u64::from(b.len));
        let at = TABLES + u64::from(id) * TABLE_BYTES;
        let table = Buffer { addr: guest.base() + at, len: 16 * buffers.len() as u32, is_writable: false };
        if is_indirect {
            self.write_table(guest, at, buffers);
        }
        let (entries, extra) = if is_indirect { (&[table][..], INDIRECT) } else { (buffers, 0) };
        let taken = match self.is_packed {
            false => self.offer_split(guest, entries, extra),
            true => self.offer_packed(guest, entries, extra),
        };
        self.in_flight.insert(id, Offered { taken, lens });
        true
    }

    fn write_table(&self, guest: &Guest, table: u64, buffers: &[Buffer]) {
        for (i, b) in buffers.iter().enumerate() {
            let flags = if b.is_writable { WRITE } else { 0 };
            let at = table + 16 * i as u64;
            match self.is_packed {
                true => guest.write_desc(at, b.addr, b.len, 0xdead, flags),
                false if i + 1 == buffers.len() => guest.write_desc(at, b.addr, b.len, flags, 0xffff),
                false => guest.write_desc(at, b.addr, b.len, flags | NEXT, i as u16 + 1),
            }
        }
    }

    fn offer_split(&mut self, guest: &Guest, entries: &[Buffer], extra: u16) -> Vec<u16> {
        let mut taken = self.free.split_off(self.free.len() - entries.len());
        taken.reverse();
        for (i, (&index, b)) in taken.iter().zip(entries).enumerate() {
            let next = taken.get(i + 1);
            let more = if next.is_some() { NEXT } else { 0 };
            let flags = extra | more | if b.is_writable { WRITE } else { 0 };
            guest.write_desc(slot_at(index), b.addr, b.len, flags, next.copied().unwrap_or(0xffff));
        }
        let entry = u64::from(self.avail.index % self.size);
        guest.write_u16(DRIVER + 4 + 2 * entry, taken[0]);
        self.avail.index = self.avail.index.wrapping_add(1);
        guest.write_u16(DRIVER + 2, self.avail.index);
        taken
    }

    fn offer_packed(&mut self, guest: &Guest, entries: &[Buffer], extra: u16) -> Vec<u16> {
        let id = self.free.pop().expect("the caller has looked");
        for (i, b) in entries.iter().enumerate() {
            let more = if i + 1 < entries.len() { NEXT } else { 0 };
            let lap = if self.avail.wrap { AVAIL } else { USED };
            let flags = extra | more | lap | if b.is_writable { WRITE } else { 0 };
            guest.write_desc(slot_at(self.avail.index), b.addr, b.len, id, flags);
            self.advance(|driver| &mut driver.avail, 1);
        }
        self.free_slots -= entries.len() as u16;
        vec![0; entries.len()]
    }

    fn advance(&mut self, place: impl Fn(&mut Self) -> &mut Place, slots: u16) {
        let size = self.size;
        let place = place(self);
        place.index += slots;
        if place.index >= size {
            *place = Place { index: place.index - size, wrap: !place.wrap };
        }
    }

    /// Returns the ID of the next used chain; `None` when the device has used none.
    ///
    /// # Panics
    /// When the device has used a chain that was not offered, or used one twice.
    pub fn poll(&mut self, guest: &Guest) -> Option<u16> {
        let id = match self.is_packed {
            false if guest.read_u16(DEVICE + 2) == self.used.index => return None,
            false => {
                let entry = u64::from(self.used.index % self.size);
                u32::from_le_bytes(guest.read(DEVICE + 4 + 8 * entry))
            }
            true => {
                let flags = guest.read_u16(slot_at(self.used.index) + 14);
                if [flags & AVAIL != 0, flags & USED != 0] != [self.used.wrap; 2] {
                    return None;
                }
                guest.read_u16(slot_at(self.used.index) + 12).into()
            }
        };
        let id = u16::try_from(id).expect("an id has 16 bits");
        let offered = self.in_flight.remove(&id);
        let taken = offered.unwrap_or_else(|| panic!("chain {id} was used and is not in flight")).taken;
        if self.is_packed {
            self.free.push(id);
            self.free_slots += taken.len() as u16;
            self.advance(|driver| &mut driver.used, taken.len() as u16);
        } else {
            self.free.extend(taken.into_iter().rev());
            self.used.index = self.used.index.wrapping_add(1);
        }
        Some(id)
    }

    /// Sets the driver's interrupt request.
    pub fn set_wish(&self, guest: &Guest, event_idx: bool, wish: u16) {
        match (self.is_packed, event_idx) {
            (false, false) => guest.write_u16(DRIVER, wish & 1),
            (false, true) => {
                guest
                    .write_u16(DRIVER + 4 + 2 * u64::from(self.size), self.used.index.wrapping_add(wish & 3));
            }
            (true, false) => guest.write_u16(DRIVER + 2, wish & 1),
            (true, true) => {
                guest.write_u16(DRIVER, self.used.index | u16::from(self.used.wrap) << 15);
                guest.write_u16(DRIVER + 2, wish % 3);
            }
        }
    }
}

/// Address of a descriptor of the ring.
pub fn slot_at(index: u16) -> u64 {
    DESC + 16 * u64::from(index)
}
