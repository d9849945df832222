//! What comes through a session or a wire, and how much at once.

/// Most bytes of one record.
pub const RECORD: usize = 16 << 10;

/// What [`crate::Session::read`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plain {
    /// So many bytes of what the peer says.
    Bytes(usize),
    /// Nothing before more is fed.
    Nothing,
    /// The peer has said goodbye.
    End,
}

/// What [`crate::Wire::receive`] brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Came {
    /// So many bytes; `is_drained` when nothing more is here or with the socket.
    Bytes {
        /// How many were handed over.
        len: usize,
        /// Whether that was all.
        is_drained: bool,
    },
    /// Nothing now: when the socket can be read there may be more.
    Nothing,
    /// The peer has said goodbye.
    End,
}
