//! The TLS settings of an export.

/// The TLS settings of an export.
#[derive(Clone, Debug)]
pub struct Security {
    /// The server's identity, and the clients that it accepts.
    pub server: tls::Server,
    /// Whether clients without TLS are refused.
    pub is_required: bool,
}

impl Security {
    /// The clients with a key of their own, and whether no others may connect.
    pub fn listed(&self) -> (Vec<Box<str>>, bool) {
        let listed = self.server.identities().to_vec();
        let is_closed = !listed.is_empty() && self.is_required;
        (listed, is_closed)
    }
}
