//! Listening addresses of exports.

use std::fmt;
use std::path::PathBuf;

/// An address that an export listens on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A Unix socket that the export creates.
    Unix {
        /// Its path.
        path: PathBuf,
        /// Its permission bits.
        permissions: u32,
    },
    /// A TCP port: address and port, such as `127.0.0.1:10809`, `[::1]:10809` or `localhost:10809`.
    Tcp(String),
    /// A listening socket passed by systemd: with the name from its unit (`FileDescriptorName=`),
    /// or the first unused one.
    Systemd(Option<String>),
}

impl Address {
    /// Parses the value of `listen=`: `systemd`, `systemd:NAME`, or an address and a port.
    pub fn of_listen(text: &str) -> Address {
        match text.strip_prefix("systemd") {
            Some("") => Address::Systemd(None),
            Some(name) if name.starts_with(':') => Address::Systemd(Some(name[1..].to_owned())),
            _ => Address::Tcp(text.to_owned()),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Unix { path, .. } => write!(f, "{}", path.display()),
            Address::Tcp(address) => f.write_str(address),
            Address::Systemd(None) => f.write_str("systemd"),
            Address::Systemd(Some(name)) => write!(f, "systemd:{name}"),
        }
    }
}
