//! Errors that make a ring unusable.

use crate::ring::MAX_SEGMENTS;

/// A violation of the specification by a driver or by the process that writes its memory. It is
/// fatal to the queue: the ring cannot be trusted, and every later call returns the same error.
/// Other queues are not affected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages say it
pub enum RingError {
    #[error("a {layout} ring cannot have {size} entries")]
    BadSize { layout: &'static str, size: u16 },
    #[error("the ring's {area} at user address {addr:#x} is outside guest memory or misaligned")]
    BadArea { area: &'static str, addr: u64 },
    #[error("ring position {position} is outside a ring of {size} entries")]
    BadPosition { position: u16, size: u16 },
    #[error("the available index is {avail_idx}, more than {size} entries ahead of {next_avail}")]
    AvailableJump { avail_idx: u16, next_avail: u16, size: u16 },
    #[error("more descriptors are available than the {size} entries of the ring, counting those in flight")]
    TooManyInFlight { size: u16 },
    #[error("descriptor {index} starts a chain while it is in flight")]
    AlreadyInFlight { index: u16 },
    #[error("descriptor {index} of a table of {count}")]
    DescriptorOutOfRange { index: u16, count: u16 },
    #[error("buffer id {id} in a ring of {size} entries")]
    IdOutOfRange { id: u16, size: u16 },
    #[error("a descriptor chain longer than the {limit} descriptors of its table")]
    ChainTooLong { limit: u16 },
    #[error("a descriptor chain with more than {MAX_SEGMENTS} segments of memory")]
    TooManySegments,
    #[error("an empty buffer at guest address {addr:#x}")]
    EmptyBuffer { addr: u64 },
    #[error("a buffer of {len} bytes at guest address {addr:#x} is not guest memory")]
    OutsideMemory { addr: u64, len: u64 },
    #[error("a file of the guest's memory was truncated")]
    MemoryLost,
    #[error("a readable buffer after a writable one")]
    ReadableAfterWritable,
    #[error("an indirect descriptor without VIRTIO_F_INDIRECT_DESC")]
    IndirectNotNegotiated,
    #[error("an indirect descriptor inside an indirect table")]
    NestedIndirect,
    #[error("an indirect descriptor that is not the last of its chain")]
    IndirectWithNext,
    #[error("an indirect table of {len} bytes")]
    BadIndirectLength { len: u32 },
    #[error("the in-flight region is of version {version}, this is version 1")]
    InflightVersion { version: u16 },
    #[error("the in-flight region tracks {tracked} {layout} descriptors, the ring has {size}")]
    InflightLayout { layout: &'static str, tracked: u16, size: u16 },
    #[error("the in-flight region is corrupt: {what}")]
    InflightCorrupt { what: &'static str },
}
