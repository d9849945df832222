//! The connections of a listener of the API: their number, their time limits, and their order when
//! one has to go.
//!
//! A client that has not proven its identity must not use up the daemon's descriptors, memory or
//! time:
//!
//! - The TLS handshake, the head of a request, the pause between requests and the body of a request
//!   have a time limit.
//! - A connection whose client has not shown a valid token within [`Limits::stranger`] is closed,
//!   whatever it does.
//! - Connections are limited for each client and in all. At a limit, the oldest connection without
//!   a valid token is closed for the new one. Without such a connection the new one is closed.
//!
//! A client is an IPv4 address, an IPv6 network of 64 bits, or a user of this machine. Access to
//! the Unix socket is the proof of its clients, so the first request of a connection makes it a
//! known one.

use nix::sys::resource::{Resource, getrlimit};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use tokio::time::timeout;

/// At most one warning about refused connections in this time.
const WARNING_PERIOD: Duration = Duration::from_secs(60);
/// The connections of a listener take at most one in this number of the descriptors of the process.
const DESCRIPTOR_SHARE: u64 = 4;
/// Bits of an IPv6 address that one client can choose at will.
const HOST_BITS: u32 = 64;

/// Limits of the connections of a listener.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Time for the TLS handshake.
    pub(super) handshake: Duration,
    /// Time for the head of a request: from the start of the connection, or from the end of the
    /// request before.
    pub(super) head: Duration,
    /// Time for the body of a request, from the end of its head.
    pub(super) body: Duration,
    /// Time for a request with a valid token, from the start of the connection.
    pub(super) stranger: Duration,
    /// Time for which sent bytes may stay without an acknowledgement, on TCP.
    pub(super) unacknowledged: Duration,
    /// Connections in all.
    pub(super) connections: usize,
    /// Connections of one client.
    pub(super) per_client: usize,
}

impl Limits {
    /// Limits over TCP, where clients are hostile until they show a token.
    pub(super) const TCP: Limits = Limits {
        handshake: Duration::from_secs(10),
        head: Duration::from_secs(10),
        body: Duration::from_secs(30),
        stranger: Duration::from_secs(60),
        unacknowledged: Duration::from_secs(60),
        connections: 256,
        per_client: 128,
    };
    /// Limits on the Unix socket. Its clients may keep an idle connection longer, as HTTP libraries
    /// do.
    pub(super) const UNIX: Limits = Limits { head: Duration::from_secs(60), per_client: 192, ..Limits::TCP };

    /// These limits, with no more connections than leave most descriptors to the other listener,
    /// devices and exports.
    pub(super) fn within_process(self) -> Limits {
        let descriptors = getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft);
        self.within(descriptors)
    }

    fn within(self, descriptors: u64) -> Limits {
        let share = usize::try_from(descriptors / DESCRIPTOR_SHARE).unwrap_or(usize::MAX).max(2);
        let connections = self.connections.min(share);
        let per_client = (self.per_client * connections / self.connections).max(1);
        Limits { connections, per_client, ..self }
    }
}

/// The other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Peer {
    /// A host.
    Address(IpAddr),
    /// A process of this machine, where the system tells which.
    Process { user: u32, process: Option<i32> },
    /// A process that the system does not tell.
    Unknown,
}

impl Peer {
    /// The part of it that counts as one client.
    pub(super) fn client(self) -> Peer {
        match self {
            Peer::Address(address) => Peer::Address(network(address)),
            Peer::Process { user, .. } => Peer::Process { user, process: None },
            Peer::Unknown => Peer::Unknown,
        }
    }
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Peer::Address(address) => address.fmt(f),
            Peer::Process { user, process: Some(process) } => write!(f, "user {user}, process {process}"),
            Peer::Process { user, process: None } => write!(f, "user {user}"),
            Peer::Unknown => f.write_str("a process of this machine"),
        }
    }
}

fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from(address.to_bits() >> HOST_BITS << HOST_BITS).into(),
        address => address,
    }
}

/// A SHA-256 by which a token is known.
pub(super) type Digest = [u8; 32];

/// The identity that a client has proven last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Proof {
    None,
    Token(Digest),
    /// Access to the Unix socket.
    Socket,
}

/// A connection, as its requests see it.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) peer: Peer,
    pub(super) limits: Limits,
    proof: Mutex<Proof>,
    is_closing: AtomicBool,
    close: Notify,
}

impl Connection {
    fn new(peer: Peer, limits: Limits) -> Arc<Connection> {
        let (is_closing, close) = Default::default();
        Arc::new(Connection { peer, limits, proof: Mutex::new(Proof::None), is_closing, close })
    }

    /// The client has shown the valid token with this digest.
    pub(super) fn recognize(&self, token: Digest) {
        *self.proof() = Proof::Token(token);
    }

    /// The client has sent a request over the Unix socket.
    pub(super) fn trust(&self) {
        *self.proof() = Proof::Socket;
    }

    fn proof(&self) -> MutexGuard<'_, Proof> {
        self.proof.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_stranger(&self) -> bool {
        *self.proof() == Proof::None
    }

    fn close(&self) {
        self.is_closing.store(true, Ordering::SeqCst);
        self.close.notify_one();
    }

    /// Returns when the connection has to be closed.
    pub(super) async fn ended(&self) {
        let is_late = timeout(self.limits.stranger, self.close.notified()).await.is_err();
        if is_late && !self.is_stranger() {
            self.close.notified().await;
        }
    }
}

/// The connections of a listener, the oldest first.
#[derive(Debug)]
pub(super) struct Connections {
    limits: Limits,
    open: Mutex<Vec<Arc<Connection>>>,
    /// A connection has ended. Only the accepting task waits.
    freed: Notify,
    warned: Mutex<Option<Instant>>,
}

impl Connections {
    pub(super) fn new(limits: Limits) -> Arc<Connections> {
        let (open, freed, warned) = Default::default();
        Arc::new(Connections { limits, open, freed, warned })
    }

    fn open(&self) -> MutexGuard<'_, Vec<Arc<Connection>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes connections whose clients have shown a token that is not valid any more.
    pub(super) fn close_unless(&self, is_valid: impl Fn(&Digest) -> bool) {
        for connection in self.open().iter() {
            if matches!(&*connection.proof(), Proof::Token(token) if !is_valid(token)) {
                connection.close();
            }
        }
    }

    /// Returns a place for a connection, after closing another one where a limit is reached. None:
    /// every connection that counts towards the limit belongs to a known client.
    pub(super) async fn admit(self: &Arc<Self>, peer: Peer) -> Option<Place> {
        let client = peer.client();
        loop {
            {
                let mut open = self.open();
                let of_client = open.iter().filter(|other| other.peer.client() == client).count();
                let is_client_limit = of_client >= self.limits.per_client;
                if !is_client_limit && open.len() < self.limits.connections {
                    let connection = Connection::new(peer, self.limits);
                    open.push(connection.clone());
                    return Some(Place { connections: self.clone(), connection });
                }
                let mut rivals =
                    open.iter().filter(|other| !is_client_limit || other.peer.client() == client);
                let is_closing = rivals.clone().any(|other| other.is_closing.load(Ordering::SeqCst));
                if !is_closing {
                    rivals.find(|other| other.is_stranger())?.close();
                }
            }
            self.freed.notified().await;
        }
    }

    /// Logs that a connection of `peer` was refused or could not be accepted, at a bounded rate.
    pub(super) fn warn(&self, peer: Option<Peer>, reason: &str) {
        let mut warned = self.warned.lock().unwrap_or_else(PoisonError::into_inner);
        if warned.is_none_or(|at| at.elapsed() > WARNING_PERIOD) {
            *warned = Some(Instant::now());
            let peer = peer.map(|peer| peer.to_string());
            let Limits { connections, per_client, .. } = self.limits;
            tracing::warn!(peer, reason, connections, per_client, "API connection refused");
        }
    }
}

/// A connection among the others, until it is dropped.
pub(super) struct Place {
    connections: Arc<Connections>,
    pub(super) connection: Arc<Connection>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.connections.open().retain(|other| !Arc::ptr_eq(other, &self.connection));
        self.connections.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    /// Polls once: admission waits only while another connection closes.
    fn poll<F: Future>(future: F) -> Option<F::Output> {
        match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(output) => Some(output),
            Poll::Pending => None,
        }
    }

    fn connections(connections: usize, per_client: usize) -> Arc<Connections> {
        Connections::new(Limits { connections, per_client, ..Limits::TCP })
    }

    fn address(text: &str) -> Peer {
        Peer::Address(text.parse().unwrap())
    }

    #[track_caller]
    fn enter(connections: &Arc<Connections>, peer: Peer) -> Place {
        poll(connections.admit(peer)).expect("no wait").expect("a place")
    }

    fn is_closing(place: &Place) -> bool {
        place.connection.is_closing.load(Ordering::SeqCst)
    }

    #[test]
    fn at_the_limit_of_an_address_its_own_oldest_unknown_connection_is_closed() {
        let connections = connections(8, 2);
        let other = enter(&connections, address("10.0.0.2"));
        let (known, oldest) =
            (enter(&connections, address("10.0.0.1")), enter(&connections, address("10.0.0.1")));
        known.connection.recognize([1; 32]);
        let mut admission = pin!(connections.admit(address("::ffff:10.0.0.1")));
        assert!(poll(&mut admission).is_none(), "the new connection waits for the end of the old one");
        assert_eq!((is_closing(&other), is_closing(&known), is_closing(&oldest)), (false, false, true));
        drop(oldest);
        let newest = poll(&mut admission).unwrap().unwrap();
        newest.connection.recognize([1; 32]);
        assert!(poll(connections.admit(address("10.0.0.1"))).unwrap().is_none(), "two known connections");
        assert!(!is_closing(&other) && !is_closing(&known) && !is_closing(&newest));
    }

    #[test]
    fn at_the_limit_of_all_the_oldest_unknown_connection_of_any_address_is_closed() {
        let connections = connections(3, 2);
        let known = enter(&connections, address("10.0.0.1"));
        known.connection.recognize([1; 32]);
        let (oldest, newer) =
            (enter(&connections, address("10.0.0.2")), enter(&connections, address("10.0.0.3")));
        let mut admission = pin!(connections.admit(address("10.0.0.4")));
        assert!(poll(&mut admission).is_none());
        assert_eq!((is_closing(&known), is_closing(&oldest), is_closing(&newer)), (false, true, false));
        drop(oldest);
        assert!(poll(&mut admission).unwrap().is_some());
    }

    #[test]
    fn an_ipv6_network_and_a_user_count_as_one_client() {
        let connections = connections(8, 1);
        for (one, same, other) in [
            (address("2001:db8::1"), address("2001:db8::ffff:1"), address("2001:db8:0:1::1")),
            (
                Peer::Process { user: 7, process: Some(1) },
                Peer::Process { user: 7, process: Some(2) },
                Peer::Process { user: 8, process: Some(1) },
            ),
        ] {
            let first = enter(&connections, one);
            first.connection.trust();
            assert!(poll(connections.admit(same)).unwrap().is_none(), "{same}");
            drop(enter(&connections, other));
        }
    }

    #[test]
    fn connections_of_a_token_that_is_not_valid_any_more_are_closed() {
        let connections = connections(8, 8);
        let places = [(); 4].map(|()| enter(&connections, address("10.0.0.1")));
        places[1].connection.recognize([1; 32]);
        places[2].connection.recognize([2; 32]);
        places[3].connection.trust();
        connections.close_unless(|token| token == &[1; 32]);
        assert_eq!(places.each_ref().map(is_closing), [false, false, true, false]);
    }

    #[test]
    fn connections_leave_most_descriptors_of_a_process_to_others() {
        let limits = |descriptors| {
            let Limits { connections, per_client, .. } = Limits::TCP.within(descriptors);
            (connections, per_client)
        };
        assert_eq!(
            [limits(1 << 20), limits(1024), limits(64), limits(0)],
            [(256, 128), (256, 128), (16, 8), (2, 1)]
        );
    }
}
