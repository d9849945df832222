//! Descriptor chains as the driver sees them: their segments, their completion, and its errors.

/// One segment of a descriptor chain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Buffer {
    /// Guest physical address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
}

/// A chain that the device has completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// Token of the chain.
    pub token: u16,
    /// Number of bytes that the device reports as written.
    pub len: u32,
}

/// The device wrote an impossible value into the ring, which is unusable from then on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingBroken {
    /// More used entries than chains in flight.
    UsedIndex(u16),
    /// A used entry names a chain that is not in flight.
    UnknownId(u32),
}

impl std::fmt::Display for RingBroken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            RingBroken::UsedIndex(index) => {
                write!(f, "used index {index} is ahead of what was made available")
            }
            RingBroken::UnknownId(id) => write!(f, "used entry names chain {id}, which is not in flight"),
        }
    }
}

impl std::error::Error for RingBroken {}
