//! The result of reading from a session, and the size of a record.

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
