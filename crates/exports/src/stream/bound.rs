//! A socket that one process binds for an export in another: see [`super::passed`].

use super::Address;
use super::listener::Listener;
use crate::Error;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// A socket that listens for an export in another process. Dropping it closes the socket here, and
/// removes a path.
pub struct BoundSocket {
    listener: Listener,
    address: String,
}

impl BoundSocket {
    /// Listens at `address`.
    ///
    /// # Errors
    /// As an export that starts there.
    pub fn bind(address: &Address) -> Result<BoundSocket, Error> {
        Ok(BoundSocket { listener: Listener::bind(address)?, address: address.to_string() })
    }

    /// The address as an export's configuration writes it.
    pub fn address(&self) -> &str {
        &self.address
    }
}

impl AsFd for BoundSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is the listener's, which is borrowed as long.
        unsafe { BorrowedFd::borrow_raw(self.listener.as_raw_fd()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::pass_socket;
    use std::net::TcpStream;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_socket_that_is_passed_is_taken_once_and_its_path_stays_with_who_bound_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let address = Address::Unix { path: path.clone(), permissions: 0o600 };
        let bound = BoundSocket::bind(&address).unwrap();
        let early = UnixStream::connect(&path).unwrap();
        pass_socket(bound.address(), bound.as_fd().try_clone_to_owned().unwrap());
        let served = Listener::bind(&address).unwrap();
        assert!(served.accept().is_ok(), "a client that came before is served");
        assert_eq!(served.local_address(), path.display().to_string());
        let error = Listener::bind(&address).err().unwrap().to_string();
        assert!(error.contains("in use by another process"), "{error}");
        drop((served, early));
        assert!(UnixStream::connect(&path).is_ok(), "the socket is still there");
        drop(bound);
        assert!(!path.exists());
    }

    #[test]
    fn a_tcp_socket_is_passed_under_the_address_that_was_configured() {
        let address = Address::Tcp("localhost:0".into());
        let bound = BoundSocket::bind(&address).unwrap();
        let port = bound.listener.local_address();
        pass_socket("localhost:0", bound.as_fd().try_clone_to_owned().unwrap());
        let served = Listener::bind(&address).unwrap();
        assert_eq!(served.local_address(), port);
        let _client = TcpStream::connect(&port).unwrap();
    }
}
