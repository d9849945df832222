//! Writes of a guest to its memory: valid requests, nearly valid ones, and random bytes.

use crate::driver::{Buffer, Driver, slot_at};
use crate::guest::{DATA, DEVICE, DRIVER, FRAME_BYTES, FRAMES, Guest, MAX_SIZE, TABLE_BYTES, TABLES};
use crate::input::Input;

/// Offers a chain as drivers do: a virtio-blk request with buffers of any length that fit into
/// memory.
pub fn offer(driver: &mut Driver, guest: &Guest, may_be_indirect: bool, input: &mut Input<'_>) {
    let Some(id) = driver.next_id().filter(|&id| id < MAX_SIZE) else { return };
    let shape = input.u8();
    let frame = FRAMES + u64::from(id) * FRAME_BYTES;
    let kind = input.one_of(&[0u32, 1, 4, 8, 11, 13, 14, 0x8000_0000]);
    guest.write(frame, &kind.to_le_bytes());
    guest.write(frame + 8, &u64::from(input.u16()).to_le_bytes());
    let mut buffers = Vec::with_capacity(12);
    let base = guest.base();
    let mut push = |addr, len, is_writable| buffers.push(Buffer { addr: base + addr, len, is_writable });
    let cut = if shape & 1 == 0 { 0 } else { shape >> 4 };
    if cut > 0 {
        push(frame, cut.into(), false);
    }
    push(frame + u64::from(cut), 16 - u32::from(cut), false);
    let reads = kind == 0 || kind == 8;
    for _ in 0..input.below(5) {
        let (addr, len) = some_memory(guest, input);
        // Sectors, or ranges of a discard, if the space allows; or any length.
        let units: &[u32] = if shape & 8 == 0 { &[512, 16, 1] } else { &[1] };
        let unit = units.iter().find(|&&unit| len >= unit).expect("no buffer is empty");
        push(addr, len / unit * unit, reads);
    }
    if shape & 2 == 0 {
        push(frame + 32, 1, true);
    }
    driver.offer(guest, &buffers, shape & 4 != 0 && may_be_indirect);
}

/// Some memory beyond the ring, possibly across the border of two adjacent regions.
fn some_memory(guest: &Guest, input: &mut Input<'_>) -> (u64, u32) {
    let parts = guest.parts();
    let index = input.below(parts.len());
    let (at, wanted) = (u64::from(input.u16()), u64::from(input.u16() >> input.below(16)));
    let part = parts[index];
    let first = if index == 0 { DATA } else { 0 };
    let addr = part.guest + first + at % (part.len - first);
    let mut end = part.guest + part.len;
    while let Some(next) = parts.iter().find(|next| next.guest == end) {
        end += next.len;
    }
    (addr, wanted.clamp(1, end - addr) as u32)
}

/// Any address, usually near a border of memory.
fn raw_address(guest: &Guest, input: &mut Input<'_>) -> u64 {
    let part = input.one_of(guest.parts());
    match input.u8() % 8 {
        0 => input.u64(),
        1 => (part.guest + part.len).wrapping_sub(input.u8().into()),
        2 => part.guest.wrapping_sub(input.u8().into()),
        3 => TABLES + u64::from(input.u8()) * 16,
        _ => part.guest + u64::from(input.u16()) % part.len,
    }
}

fn raw_length(input: &mut Input<'_>) -> u32 {
    match input.u8() % 8 {
        0 => 0,
        1 => input.u32(),
        2 => 16 * u32::from(input.u16()),
        3 | 4 => 16 * u32::from(input.u8() % 16),
        _ => u32::from(input.u8()) + 1,
    }
}

/// Writes any descriptor to any place of the ring.
pub fn write_descriptor(guest: &Guest, is_packed: bool, input: &mut Input<'_>) {
    let at = slot_at(u16::from(input.u8()) % MAX_SIZE);
    write_descriptor_at(at, guest, is_packed, input);
}

fn write_descriptor_at(at: u64, guest: &Guest, is_packed: bool, input: &mut Input<'_>) {
    let (addr, len) = (guest.base().wrapping_add(raw_address(guest, input)), raw_length(input));
    let flags = input.u16();
    let other = if flags & 0x100 != 0 { input.u16() } else { u16::from(input.u8()) % MAX_SIZE };
    match is_packed {
        false => guest.write_desc(at, addr, len, flags & 7, other),
        true => guest.write_desc(at, addr, len, other, flags),
    }
}

/// Writes an indirect table of arbitrary descriptors.
pub fn write_table(guest: &Guest, is_packed: bool, input: &mut Input<'_>) {
    let table = TABLES + u64::from(input.u8() % 4) * TABLE_BYTES;
    for i in 0..input.below(6) as u64 {
        write_descriptor_at(table + 16 * i, guest, is_packed, input);
    }
}

/// Makes any slot or entry available, whatever it contains.
pub fn make_available(guest: &Guest, is_packed: bool, input: &mut Input<'_>) {
    let (at, step) = (input.u8(), input.u8());
    if is_packed {
        let flags = slot_at(u16::from(at) % MAX_SIZE) + 14;
        let lap = [0x80, 0x8000, 0x8080, 0][usize::from(step % 4)];
        return guest.write_u16(flags, guest.read_u16(flags) & !0x8080 | lap);
    }
    let idx = guest.read_u16(DRIVER + 2);
    let size = 1 << (step >> 4 & 7).min(6);
    guest.write_u16(DRIVER + 4 + 2 * u64::from(idx % size), at.into());
    guest.write_u16(DRIVER + 2, idx.wrapping_add((step % 8).into()));
}

/// Writes any bytes, usually to the ring and its tables.
pub fn write_anywhere(guest: &Guest, _is_packed: bool, input: &mut Input<'_>) {
    let at = match input.u8() % 4 {
        0 => return guest.write(raw_address(guest, input), input.bytes(16)),
        1 => DRIVER + u64::from(input.u8()),
        2 => DEVICE + u64::from(input.u8()),
        _ => u64::from(input.u16()) % FRAMES,
    };
    guest.write(at, input.bytes(16));
}

/// Writes bytes of headers and data, which the guest may change at any time.
pub fn write_data(guest: &Guest, input: &mut Input<'_>) {
    let at = FRAMES + u64::from(input.u16()) % 0x1800;
    guest.write(at, input.bytes(16));
}
