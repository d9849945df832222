//! Calls that return when their request has ended.

use super::request::{Payload, Request};
use super::slots::Owner;
use super::{Buffer, Queue};
use crate::{Result, Zone};
use block::{Op, Segment};

impl Queue {
    /// Carries a request out and returns its result, with its memory if it has some.
    pub fn execute<P: Payload>(&mut self, request: Request<P>) -> P::Output {
        let token = self.begin(request, Owner::Claimant(None));
        self.wait_for(token);
        let (result, memory) = self.slots.claim(token).expect("it has ended and no other call has its token");
        P::output(result, memory)
    }

    /// Reads at byte `offset` into any memory. Where the device cannot take it, the bytes are
    /// copied.
    ///
    /// # Errors
    /// Why the request failed: `EINVAL` out of range, misaligned or too long, `EIO`, and so on.
    pub fn read_at(&mut self, offset: u64, memory: &mut [u8]) -> Result<()> {
        if self.takes(memory) {
            let segment = Segment { base: memory.as_mut_ptr(), len: memory.len() };
            return self.transfer_now(Op::Read, offset, segment);
        }
        let (result, buffer) = self.execute(Request::read(offset, Buffer::new(&self.device, memory.len())?));
        memory.copy_from_slice(&buffer);
        result
    }

    /// Writes any memory at byte `offset`. Where the device cannot take it, the bytes are copied.
    ///
    /// # Errors
    /// As [`Queue::read_at`]; `EBADF` for a read-only device.
    pub fn write_at(&mut self, offset: u64, memory: &[u8]) -> Result<()> {
        if self.takes(memory) {
            let segment = Segment { base: memory.as_ptr().cast_mut(), len: memory.len() };
            return self.transfer_now(Op::Write, offset, segment);
        }
        let mut buffer = Buffer::new(&self.device, memory.len())?;
        buffer.copy_from_slice(memory);
        self.execute(Request::write(offset, buffer)).0
    }

    /// Makes everything durable whose write has ended before.
    ///
    /// # Errors
    /// Why the request failed.
    pub fn flush(&mut self) -> Result<()> {
        self.execute(Request::flush())
    }

    /// Makes `len` bytes at `offset` zero.
    ///
    /// # Errors
    /// Why the request failed.
    pub fn write_zeroes(&mut self, offset: u64, len: u64) -> Result<()> {
        self.execute(Request::write_zeroes(offset, len))
    }

    /// Says that `len` bytes at `offset` are not needed any more.
    ///
    /// # Errors
    /// Why the request failed.
    pub fn discard(&mut self, offset: u64, len: u64) -> Result<()> {
        self.execute(Request::discard(offset, len))
    }

    /// Describes up to `max` zones, from the one at `offset` on.
    ///
    /// # Errors
    /// Why the request failed: `ENOTSUP` for a device without zones.
    pub fn report_zones(&mut self, offset: u64, max: u32) -> Result<Vec<Zone>> {
        self.execute(Request::report_zones(offset, max))
    }

    fn transfer_now(&mut self, op: Op, offset: u64, segment: Segment) -> Result<()> {
        let guard = CloseOnPanic(self);
        // SAFETY: the caller lends the memory to this function, which neither returns nor unwinds
        // before the request has ended.
        let token = unsafe { guard.0.begin_borrowed(op, offset, [segment], Owner::Claimant(None)) };
        guard.0.wait_for(token);
        std::mem::forget(guard);
        self.slots.claim(token).expect("it has ended and no other call has its token").0
    }

    /// Whether the device can use that memory as it is.
    fn takes(&self, memory: &[u8]) -> bool {
        let (start, len) = (memory.as_ptr().addr(), memory.len());
        let mask = self.device.buf_alignment.next_power_of_two() - 1;
        if (start | len) & mask != 0 {
            // A length that the device cannot have is the caller's mistake, which the request will
            // tell.
            return len & mask != 0;
        }
        !self.device.needs_regions || self.device.pool().holds(start, len)
    }
}

/// Takes borrowed memory away from the device when something below panics.
pub(super) struct CloseOnPanic<'a>(pub &'a mut Queue);

impl Drop for CloseOnPanic<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}
