//! Requests to a device, and the memory that goes with them.

use super::Buffer;
use crate::raw::ReqFlags;
use crate::{Result, Zone, ZoneAction};
use block::Op;

/// Most zones in one report; memory is allocated for as many as are asked for.
const MOST_ZONES: u32 = 1 << 16;

/// The memory that a request owns while it is in flight.
#[derive(Debug, Default)]
pub enum Memory {
    /// None.
    #[default]
    None,
    /// That of a plain read or write.
    One(Buffer),
    /// That of a vectored read or write, in this order.
    Many(Vec<Buffer>),
    /// Where a report of zones goes.
    Zones(Vec<Zone>),
}

/// The type of a request's memory, and what its user gets when it has ended.
pub trait Payload: Sized + sealed::Sealed {
    /// The result, with the memory.
    type Output;

    #[doc(hidden)]
    fn into_memory(self) -> Memory;

    #[doc(hidden)]
    fn output(result: Result<()>, memory: Memory) -> Self::Output;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for () {}
    impl Sealed for super::Buffer {}
    impl Sealed for Vec<super::Buffer> {}
    impl Sealed for Vec<super::Zone> {}
}

impl Payload for () {
    type Output = Result<()>;

    fn into_memory(self) -> Memory {
        Memory::None
    }

    fn output(result: Result<()>, _: Memory) -> Result<()> {
        result
    }
}

impl Payload for Buffer {
    type Output = (Result<()>, Buffer);

    fn into_memory(self) -> Memory {
        Memory::One(self)
    }

    fn output(result: Result<()>, memory: Memory) -> Self::Output {
        match memory {
            Memory::One(buffer) => (result, buffer),
            other => unreachable!("a request of one buffer came back with {other:?}"),
        }
    }
}

impl Payload for Vec<Buffer> {
    type Output = (Result<()>, Vec<Buffer>);

    fn into_memory(self) -> Memory {
        Memory::Many(self)
    }

    fn output(result: Result<()>, memory: Memory) -> Self::Output {
        match memory {
            Memory::Many(buffers) => (result, buffers),
            other => unreachable!("a vectored request came back with {other:?}"),
        }
    }
}

impl Payload for Vec<Zone> {
    type Output = Result<Vec<Zone>>;

    fn into_memory(self) -> Memory {
        Memory::Zones(self)
    }

    fn output(result: Result<()>, memory: Memory) -> Self::Output {
        match memory {
            Memory::Zones(zones) => result.map(|()| zones),
            other => unreachable!("a report of zones came back with {other:?}"),
        }
    }
}

/// The operation of a request, with byte offsets and lengths.
#[derive(Clone, Copy, Debug)]
pub(super) enum Operation {
    Transfer(Op, u64),
    Range(Op, u64, u64),
    ReportZones(u64),
    ManageZones(ZoneAction, Option<u64>),
}

/// A request: what to do, with which flags and memory. All offsets and lengths are bytes.
#[derive(Debug)]
#[must_use = "a request does nothing until it is given to a queue"]
pub struct Request<P> {
    pub(super) operation: Operation,
    pub(super) flags: ReqFlags,
    pub(super) payload: P,
}

impl<P> Request<P> {
    fn new(operation: Operation, payload: P) -> Request<P> {
        Request { operation, flags: ReqFlags(0), payload }
    }

    /// It has ended only when what it wrote is durable. For writes and write zeroes.
    pub fn fua(self) -> Request<P> {
        self.with(ReqFlags::FUA)
    }

    /// Space must stay allocated. For write zeroes.
    pub fn no_unmap(self) -> Request<P> {
        self.with(ReqFlags::NO_UNMAP)
    }

    /// It fails with `ENOTSUP` rather than writing zeroes as data. For write zeroes.
    pub fn no_fallback(self) -> Request<P> {
        self.with(ReqFlags::NO_FALLBACK)
    }

    fn with(mut self, flag: ReqFlags) -> Request<P> {
        self.flags.0 |= flag.0;
        self
    }
}

impl Request<Buffer> {
    /// Reads at `offset` into all of the buffer.
    pub fn read(offset: u64, buffer: Buffer) -> Request<Buffer> {
        Request::new(Operation::Transfer(Op::Read, offset), buffer)
    }

    /// Writes all of the buffer at `offset`.
    pub fn write(offset: u64, buffer: Buffer) -> Request<Buffer> {
        Request::new(Operation::Transfer(Op::Write, offset), buffer)
    }
}

impl Request<Vec<Buffer>> {
    /// Reads at `offset` into all of the buffers, in their order.
    pub fn read_vectored(offset: u64, buffers: Vec<Buffer>) -> Request<Vec<Buffer>> {
        Request::new(Operation::Transfer(Op::Read, offset), buffers)
    }

    /// Writes all of the buffers at `offset`, in their order.
    pub fn write_vectored(offset: u64, buffers: Vec<Buffer>) -> Request<Vec<Buffer>> {
        Request::new(Operation::Transfer(Op::Write, offset), buffers)
    }
}

impl Request<Vec<Zone>> {
    /// Describes up to `max` zones (and not more than 65536), from the one at `offset` on.
    pub fn report_zones(offset: u64, max: u32) -> Request<Vec<Zone>> {
        Request::new(Operation::ReportZones(offset), vec![Zone::default(); max.min(MOST_ZONES) as usize])
    }
}

impl Request<()> {
    /// Makes everything durable whose write has ended before.
    pub fn flush() -> Request<()> {
        Request::new(Operation::Range(Op::Flush, 0, 0), ())
    }

    /// Makes `len` bytes at `offset` zero.
    pub fn write_zeroes(offset: u64, len: u64) -> Request<()> {
        Request::new(Operation::Range(Op::WriteZeroes, offset, len), ())
    }

    /// Says that `len` bytes at `offset` are not needed any more.
    pub fn discard(offset: u64, len: u64) -> Request<()> {
        Request::new(Operation::Range(Op::Discard, offset, len), ())
    }

    /// Changes the state of the zone at `offset`.
    pub fn manage_zone(action: ZoneAction, offset: u64) -> Request<()> {
        Request::new(Operation::ManageZones(action, Some(offset)), ())
    }

    /// Changes the state of all zones for which that makes sense.
    pub fn manage_all_zones(action: ZoneAction) -> Request<()> {
        Request::new(Operation::ManageZones(action, None), ())
    }
}
