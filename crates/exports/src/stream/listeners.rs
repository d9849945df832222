//! The listening sockets of a portal, and their acceptors.

use super::acceptor::{AcceptHandler, Acceptor};
use super::{Address, Listener};
use crate::Error;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Default number of concurrent connections of each address of a portal.
pub const DEFAULT_PORTAL_CLIENTS: usize = 4096;
/// Maximum number of concurrent connections of each address of a portal.
pub const MAX_PORTAL_CLIENTS: usize = 65536;
/// Maximum number of addresses of a portal.
pub const MAX_ADDRESSES: usize = 16;

/// The fault of a portal with so many addresses, and so many clients at each.
pub fn fault_of_portal(addresses: usize, clients: usize) -> Option<String> {
    if !(1..=MAX_ADDRESSES).contains(&addresses) {
        Some(format!("{addresses} addresses: want 1 to {MAX_ADDRESSES}"))
    } else if !(1..=MAX_PORTAL_CLIENTS).contains(&clients) {
        Some(format!("{clients} clients: want 1 to {MAX_PORTAL_CLIENTS}"))
    } else {
        None
    }
}

/// Sockets that are bound first, and accept clients later: clients that connect meanwhile wait.
/// Dropping it stops accepting.
pub struct Listeners {
    /// The portal's name in logs.
    name: Arc<str>,
    /// With the TCP ports that the system chose.
    addresses: Vec<String>,
    /// Before [`Listeners::accept`].
    waiting: Mutex<Vec<Listener>>,
    /// One per address, after [`Listeners::accept`].
    acceptors: Mutex<Vec<Acceptor>>,
}

impl Listeners {
    /// Listens at each address.
    ///
    /// # Errors
    /// When the system refuses a socket.
    pub fn bind<'a>(
        name: Arc<str>,
        addresses: impl IntoIterator<Item = &'a Address>,
    ) -> Result<Listeners, Error> {
        let waiting: Vec<Listener> = addresses.into_iter().map(Listener::bind).collect::<Result<_, _>>()?;
        let addresses = waiting.iter().map(Listener::local_address).collect();
        Ok(Listeners { name, addresses, waiting: Mutex::new(waiting), acceptors: Mutex::default() })
    }

    /// The addresses that clients connect to.
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// Accepts clients, also those that wait already, with a handler for the address of each index.
    /// Later calls do nothing.
    ///
    /// # Errors
    /// When the system refuses a thread.
    pub fn accept<H: AcceptHandler>(&self, handler: impl Fn(usize) -> H) -> Result<(), Error> {
        let waiting = std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner));
        let mut acceptors = self.acceptors();
        for (address, listener) in waiting.into_iter().enumerate() {
            acceptors.push(Acceptor::open(listener, self.name.to_string(), handler(address))?);
        }
        Ok(())
    }

    /// As [`Acceptor::settle`], at every address. Must not be called on a core.
    pub fn settle(&self) {
        self.acceptors().iter().for_each(Acceptor::settle);
    }

    /// Stops accepting clients. Those that are connected stay. Must not be called on a core.
    pub fn close(&self) {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.acceptors().drain(..).for_each(Acceptor::close);
    }

    fn acceptors(&self) -> MutexGuard<'_, Vec<Acceptor>> {
        self.acceptors.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Listeners {
    fn drop(&mut self) {
        self.close();
    }
}
