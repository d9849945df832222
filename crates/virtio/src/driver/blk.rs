//! virtio-blk requests on a [`Ring`], laid out so that a request touches few cache lines.
//!
//! ```text
//!   slot's line (64 B)   │ header │ table: header ─ data ─ status │   one read or write of one segment
//!   status bytes         │ s0 s1 s2 … s63 │ s64 …                    neighbours share a line
//!   slot's long table    │ header, data × max_segments, status │ payload │ everything else
//! ```
//!
//! With indirect descriptors the ring's descriptor of a slot always points to the same line. In a
//! split ring it therefore never changes, and a read of 4 KiB costs the device one line of the
//! driver besides the available ring.

use super::ring::PAGE;
use super::{Buffer, Ring, RingBroken, RingConfig, RingLayout, SharedArea};
use crate::blk::{HEADER_BYTES, Header, ID_BYTES, Range, VIRTIO_BLK_T_GET_ID};
use crate::ring::{DESC_BYTES, DESC_F_NEXT, DESC_F_WRITE, PackedDescriptor, SplitDescriptor};

/// Offset of the three-entry table in a slot's line, after the header.
const TABLE_IN_LINE: usize = HEADER_BYTES;
/// Bytes of a slot's line.
const LINE: usize = 64;
/// Bytes after a slot's long table for the range of a discard, or the identity.
const PAYLOAD_BYTES: usize = 32;
/// Value of a status byte until the device first writes it, and after an error.
const NO_STATUS: u8 = 0xff;

/// Configuration of a queue.
#[derive(Clone, Copy, Debug)]
pub struct BlkQueueConfig {
    /// The ring.
    pub ring: RingConfig,
    /// `VIRTIO_F_INDIRECT_DESC` was negotiated.
    pub indirect: bool,
    /// Largest number of data segments in a request, at most the ring's size minus two: a chain is
    /// never longer than the ring.
    pub max_segments: u16,
}

impl BlkQueueConfig {
    /// Largest number of requests in flight. Without indirect descriptors this counts requests of
    /// one segment; longer ones may find the ring full earlier.
    pub fn depth(&self) -> u16 {
        if self.indirect { self.ring.size } else { self.ring.size / 3 }
    }

    /// Bytes of shared memory that the queue needs, in whole pages. It starts at a page
    /// ([`RingLayout`]).
    pub fn memory_len(&self) -> usize {
        Layout::new(self).len
    }
}

/// Offsets of the parts of a queue's memory in bytes.
struct Layout {
    lines: usize,
    status: usize,
    tables: usize,
    table_len: usize,
    len: usize,
}

impl Layout {
    fn new(config: &BlkQueueConfig) -> Layout {
        let depth = usize::from(config.depth());
        let table_len =
            ((usize::from(config.max_segments) + 2) * DESC_BYTES + PAYLOAD_BYTES).next_multiple_of(LINE);
        let lines = RingLayout::new(config.ring.size, config.ring.packed).len.next_multiple_of(128);
        let status = lines + (depth * LINE).next_multiple_of(128);
        let tables = status + depth.next_multiple_of(128);
        Layout { lines, status, tables, table_len, len: (tables + depth * table_len).next_multiple_of(PAGE) }
    }
}

/// Why a request was not added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PushError {
    /// The request has more segments than the queue allows.
    TooManySegments,
    /// Too few descriptors are free now; only without indirect descriptors.
    Full,
}

/// The driver side of one virtio-blk virtqueue. A *slot* identifies a request in flight: any unused
/// number below the depth.
pub struct BlkQueue {
    ring: Ring,
    config: BlkQueueConfig,
    memory: SharedArea,
    layout: Layout,
    chain: Vec<Buffer>,
}

// SAFETY: the memory is valid on any thread while the queue lives (contract of `new`).
unsafe impl Send for BlkQueue {}

impl BlkQueue {
    /// An empty queue in `memory`, with the ring at its start. Interrupts are off.
    ///
    /// # Panics
    /// When the specification does not allow the configuration, or the memory is too short or not
    /// aligned to 128 bytes.
    ///
    /// # Safety
    /// `memory` is valid, and only the device touches it while the queue lives.
    pub unsafe fn new(config: BlkQueueConfig, memory: SharedArea) -> BlkQueue {
        let layout = Layout::new(&config);
        assert!(config.depth() > 0, "{config:?} has no room for a request");
        assert!(config.max_segments > 0 && config.max_segments <= config.ring.size.max(3) - 2, "{config:?}");
        assert!(
            memory.len >= layout.len && memory.base.addr().is_multiple_of(128),
            "{memory:?} for {config:?}"
        );
        // SAFETY: the memory is ours by the contract.
        let ring = unsafe { Ring::new(config.ring, memory) };
        let chain = Vec::with_capacity(usize::from(config.max_segments) + 2);
        let queue = BlkQueue { ring, config, memory, layout, chain };
        for slot in 0..config.depth() {
            let status = Buffer { addr: queue.status_addr(slot), len: 1 };
            queue.write_entry(queue.line(slot) + TABLE_IN_LINE, 0, queue.header_buffer(slot), 0, false);
            queue.write_entry(queue.line(slot) + TABLE_IN_LINE, 2, status, DESC_F_WRITE, true);
            // SAFETY: the slot's status byte lies in our memory.
            unsafe { queue.status_ptr(slot).write_volatile(NO_STATUS) };
        }
        queue
    }

    /// Offsets of the ring's three areas in the queue's memory, for the transport.
    pub fn ring_layout(&self) -> RingLayout {
        RingLayout::new(self.config.ring.size, self.config.ring.packed)
    }

    /// Configuration of the queue.
    pub fn config(&self) -> &BlkQueueConfig {
        &self.config
    }

    /// The ring, for tests that inspect or corrupt it.
    pub fn ring(&mut self) -> &mut Ring {
        &mut self.ring
    }

    /// The queue's memory, for tests that play a hostile driver.
    pub fn memory(&self) -> SharedArea {
        self.memory
    }

    /// Adds a request whose data is one segment; the device writes it when `device_writes`.
    ///
    /// # Errors
    /// [`PushError::Full`].
    ///
    /// # Panics
    /// When `slot` is in flight or not below the depth.
    #[inline]
    pub fn push_single(
        &mut self,
        slot: u16,
        header: Header,
        data: Buffer,
        device_writes: bool,
    ) -> Result<(), PushError> {
        if !self.config.indirect {
            return self.push(slot, header, &[data], device_writes);
        }
        assert!(slot < self.config.depth(), "slot {slot}");
        let line = self.line(slot);
        self.write_header(line, header);
        self.write_entry(line + TABLE_IN_LINE, 1, data, if device_writes { DESC_F_WRITE } else { 0 }, false);
        let table = self.memory.guest_addr + (line + TABLE_IN_LINE) as u64;
        self.ring.add_indirect(slot, table, 3 * DESC_BYTES as u32);
        Ok(())
    }

    /// Adds a request with any number of data segments, including none; the device writes them when
    /// `device_writes`.
    ///
    /// # Errors
    /// When the request has too many segments, or the ring is full.
    ///
    /// # Panics
    /// When `slot` is in flight or not below the depth.
    pub fn push(
        &mut self,
        slot: u16,
        header: Header,
        data: &[Buffer],
        device_writes: bool,
    ) -> Result<(), PushError> {
        assert!(slot < self.config.depth(), "slot {slot}");
        if data.len() > usize::from(self.config.max_segments) {
            return Err(PushError::TooManySegments);
        }
        self.write_header(self.line(slot), header);
        let status = Buffer { addr: self.status_addr(slot), len: 1 };
        let readable = if device_writes { 1 } else { 1 + data.len() };
        if self.config.indirect {
            let table = self.table(slot);
            self.write_entry(table, 0, self.header_buffer(slot), 0, false);
            for (i, buffer) in data.iter().enumerate() {
                let flags = if device_writes { DESC_F_WRITE } else { 0 };
                self.write_entry(table, 1 + i, *buffer, flags, false);
            }
            self.write_entry(table, 1 + data.len(), status, DESC_F_WRITE, true);
            let len = (data.len() + 2) * DESC_BYTES;
            self.ring.add_indirect(slot, self.memory.guest_addr + table as u64, len as u32);
            return Ok(());
        }
        self.chain.clear();
        self.chain.push(self.header_buffer(slot));
        self.chain.extend_from_slice(data);
        self.chain.push(status);
        if self.ring.add_chain(slot, &self.chain, readable) { Ok(()) } else { Err(PushError::Full) }
    }

    /// Adds a discard or write zeroes of one range.
    ///
    /// # Errors
    /// [`PushError::Full`].
    ///
    /// # Panics
    /// When `slot` is in flight or not below the depth.
    pub fn push_range(&mut self, slot: u16, kind: u32, range: Range) -> Result<(), PushError> {
        assert!(slot < self.config.depth(), "slot {slot}");
        let range = range.to_bytes();
        self.write(self.payload(slot), range);
        let data = self.payload_buffer(slot, range.len());
        self.push(slot, Header { kind, ioprio: 0, sector: 0 }, &[data], false)
    }

    /// Adds a request for the device's identity, which [`BlkQueue::id`] returns once the request is
    /// done.
    ///
    /// # Errors
    /// [`PushError::Full`].
    ///
    /// # Panics
    /// When `slot` is in flight or not below the depth.
    pub fn push_get_id(&mut self, slot: u16) -> Result<(), PushError> {
        assert!(slot < self.config.depth(), "slot {slot}");
        self.write(self.payload(slot), [0; ID_BYTES]);
        let data = self.payload_buffer(slot, ID_BYTES);
        self.push(slot, Header { kind: VIRTIO_BLK_T_GET_ID, ioprio: 0, sector: 0 }, &[data], true)
    }

    /// The identity that a finished request wrote to `slot`.
    ///
    /// # Panics
    /// When `slot` is not below the depth.
    pub fn id(&self, slot: u16) -> [u8; ID_BYTES] {
        assert!(slot < self.config.depth(), "slot {slot}");
        // SAFETY: the payload area of a slot below the depth lies in our memory and is long enough.
        unsafe { self.memory.base.add(self.payload(slot)).cast::<[u8; ID_BYTES]>().read_volatile() }
    }

    /// Makes all requests visible to the device that were added since the last call. Returns
    /// whether the device wants a kick.
    #[inline]
    pub fn publish(&mut self) -> bool {
        self.ring.publish()
    }

    /// Calls `done` with slot and status byte of each request that the device has completed.
    /// Returns their number.
    ///
    /// # Errors
    /// When the device broke the ring, now or before; requests already reported stay done.
    #[inline]
    pub fn reap(&mut self, mut done: impl FnMut(u16, u8)) -> Result<usize, RingBroken> {
        let mut count = 0;
        while let Some(used) = self.ring.poll()? {
            let status = self.status_ptr(used.token);
            // SAFETY: the ring hands back tokens that were pushed, so the byte lies in our memory.
            let value = unsafe { status.read_volatile() };
            if value != 0 {
                // SAFETY: as above.
                unsafe { status.write_volatile(NO_STATUS) };
            }
            done(used.token, value);
            count += 1;
        }
        Ok(count)
    }

    /// Number of requests that the device has not completed.
    pub fn in_flight(&self) -> u16 {
        self.ring.in_flight()
    }

    /// Whether [`BlkQueue::reap`] would return a request or an error.
    #[inline]
    pub fn has_used(&self) -> bool {
        self.ring.has_used()
    }

    /// Asks for an interrupt with the next completed request. Returns `false` when one is already
    /// completed.
    pub fn arm(&mut self) -> bool {
        self.ring.arm()
    }

    /// Asks for no interrupts. Some may still arrive.
    pub fn disarm(&mut self) {
        self.ring.disarm();
    }

    #[inline]
    fn line(&self, slot: u16) -> usize {
        self.layout.lines + usize::from(slot) * LINE
    }

    #[inline]
    fn table(&self, slot: u16) -> usize {
        self.layout.tables + usize::from(slot) * self.layout.table_len
    }

    /// Offset of the last bytes after a slot's long table.
    fn payload(&self, slot: u16) -> usize {
        self.table(slot) + self.layout.table_len - PAYLOAD_BYTES
    }

    fn payload_buffer(&self, slot: u16, len: usize) -> Buffer {
        Buffer { addr: self.memory.guest_addr + self.payload(slot) as u64, len: len as u32 }
    }

    fn header_buffer(&self, slot: u16) -> Buffer {
        Buffer { addr: self.memory.guest_addr + self.line(slot) as u64, len: HEADER_BYTES as u32 }
    }

    fn status_addr(&self, slot: u16) -> u64 {
        self.memory.guest_addr + (self.layout.status + usize::from(slot)) as u64
    }

    #[inline]
    fn status_ptr(&self, slot: u16) -> *mut u8 {
        self.memory.base.wrapping_add(self.layout.status + usize::from(slot))
    }

    #[inline]
    fn write_header(&self, line: usize, header: Header) {
        self.write(line, header.to_bytes());
    }

    /// Writes entry `index` of the indirect table at `table`.
    #[inline]
    fn write_entry(&self, table: usize, index: usize, buffer: Buffer, flags: u16, last: bool) {
        let Buffer { addr, len } = buffer;
        // The entries of a packed ring's table need no NEXT flag.
        let words = if self.config.ring.packed {
            PackedDescriptor { addr, len, id: 0, flags }.to_words()
        } else if last {
            SplitDescriptor { addr, len, flags, next: 0 }.to_words()
        } else {
            SplitDescriptor { addr, len, flags: flags | DESC_F_NEXT, next: index as u16 + 1 }.to_words()
        };
        let at = table + index * DESC_BYTES;
        self.write(at, words[0].to_le_bytes());
        self.write(at + 8, words[1].to_le_bytes());
    }

    #[inline]
    fn write<const N: usize>(&self, at: usize, bytes: [u8; N]) {
        debug_assert!(at + N <= self.memory.len);
        // SAFETY: offsets come from the layout with a slot below the depth and an index below the
        // table's length, so they lie in our memory. The device reads the bytes only after they
        // were published.
        unsafe { self.memory.base.add(at).cast::<[u8; N]>().write(bytes) };
    }
}
