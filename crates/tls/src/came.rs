//! Results of reading from a session or a wire, and the size of a record.

/// Most bytes of payload in one record.
pub const RECORD: usize = 16 << 10;

/// Result of [`crate::Session::read`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plain {
    /// Number of decrypted bytes of the peer.
    Bytes(usize),
    /// Nothing until more is fed.
    Nothing,
    /// The peer sent a close notification.
    End,
}

/// Result of [`crate::Wire::receive`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Came {
    /// Bytes; `is_drained` is set when neither the wire nor the socket has more.
    Bytes {
        /// Number of bytes handed over.
        len: usize,
        /// Set when these were all.
        is_drained: bool,
    },
    /// Nothing now; more may follow when the socket is readable.
    Nothing,
    /// The peer sent a close notification.
    End,
}
