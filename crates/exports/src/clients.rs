//! The clients of an export: their connections, and the bytes that each NVMe host has moved.
//!
//! A connection of a network protocol counts its bytes in a cache line of its own, which its core
//! writes. Connects and ends take a lock; requests do not.

use block::Op;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Most hosts of an export whose bytes are kept. Hosts that are not connected make room for others,
/// those first that have been gone for longest.
const MAX_HOSTS: usize = 128;

/// The peer of a connection.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    /// Its address, as logs have it. `None` for protocols without addresses.
    pub address: Option<String>,
    /// The NQN of an NVMe host, or the identity that a client has proven by TLS.
    pub host: Option<String>,
    /// Whether TLS protects the connection.
    pub is_secured: bool,
    /// Whether the peer has proven its name.
    pub is_authenticated: bool,
    /// The queue, if the protocol is NVMe.
    pub queue: Option<NvmeQueue>,
}

/// A queue of an NVMe controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NvmeQueue {
    /// The controller.
    pub controller: u16,
    /// The queue; 0 for the admin queue.
    pub queue: u16,
}

/// A connection at present.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connection {
    /// The peer.
    pub peer: Peer,
    /// When it has connected, in nanoseconds since 1970.
    pub since_ns: u64,
    /// Bytes that it has moved; `None` where a protocol does not count them by connection.
    pub bytes: Option<Moved>,
}

/// Bytes that were read and written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// Bytes read by clients.
    pub read: u64,
    /// Bytes written by clients.
    pub written: u64,
}

impl Moved {
    fn and(self, other: Moved) -> Moved {
        let add = u64::saturating_add; // another process may be hostile
        Moved { read: add(self.read, other.read), written: add(self.written, other.written) }
    }
}

/// Bytes of one connection. The core that serves it writes; any thread may read. Has cache lines of
/// its own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Bytes {
    read: AtomicU64,
    written: AtomicU64,
}

impl Bytes {
    #[inline]
    pub fn count(&self, op: Op, bytes: u64) {
        let counter = match op {
            Op::Read => &self.read,
            Op::Write => &self.written,
            Op::WriteZeroes | Op::Discard | Op::Flush => return,
        };
        // One core writes at a time.
        counter.store(counter.load(Ordering::Relaxed) + bytes, Ordering::Relaxed);
    }

    fn moved(&self) -> Moved {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Moved { read: of(&self.read), written: of(&self.written) }
    }
}

/// The clients of an export.
#[derive(Debug, Default)]
pub struct Clients {
    open: BTreeMap<u64, Open>,
    /// By NQN.
    hosts: BTreeMap<String, Host>,
    /// The number of the last connection or end.
    last: u64,
}

#[derive(Debug)]
struct Open {
    peer: Peer,
    since_ns: u64,
    bytes: Option<Arc<Bytes>>,
}

/// A host that has connected.
#[derive(Debug, Default)]
struct Host {
    connections: usize,
    /// Of its connections that have ended.
    ended: Moved,
    /// The number of the last end.
    last_end: u64,
}

impl Open {
    /// The host whose bytes are kept.
    fn host(&self) -> Option<&str> {
        self.peer.queue.and(self.peer.host.as_deref())
    }
}

impl Clients {
    /// Adds a connection. Returns its number.
    pub fn connect(&mut self, peer: Peer, bytes: Option<Arc<Bytes>>) -> u64 {
        self.last += 1;
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let open = Open { peer, since_ns: since.as_nanos() as u64, bytes };
        if let Some(host) = open.host() {
            if !self.hosts.contains_key(host) {
                self.make_room();
            }
            if self.hosts.len() < MAX_HOSTS || self.hosts.contains_key(host) {
                self.hosts.entry(host.into()).or_default().connections += 1;
            }
        }
        self.open.insert(self.last, open);
        self.last
    }

    /// Forgets the host that has been gone for longest, if there are too many.
    fn make_room(&mut self) {
        if self.hosts.len() < MAX_HOSTS {
            return;
        }
        let gone = self.hosts.iter().filter(|(_, host)| host.connections == 0);
        if let Some(name) = gone.min_by_key(|(_, host)| host.last_end).map(|(name, _)| name.clone()) {
            self.hosts.remove(&name);
        }
    }

    /// Removes a connection.
    pub fn disconnect(&mut self, number: u64) {
        self.last += 1;
        let Some(open) = self.open.remove(&number) else { return };
        // A host that was not kept when it connected has no count to lower.
        let kept = open.host().and_then(|host| self.hosts.get_mut(host)).filter(|host| host.connections > 0);
        if let Some(host) = kept {
            host.connections -= 1;
            host.ended = host.ended.and(open.bytes.as_ref().map(|bytes| bytes.moved()).unwrap_or_default());
            host.last_end = self.last;
        }
    }

    /// The connections, the oldest first.
    pub fn connections(&self) -> Vec<Connection> {
        let of = |Open { peer, since_ns, bytes }: &Open| {
            let bytes = bytes.as_ref().map(|bytes| bytes.moved());
            Connection { peer: peer.clone(), since_ns: *since_ns, bytes }
        };
        self.open.values().map(of).collect()
    }

    /// The bytes of each NVMe host, those of former connections included.
    pub fn hosts(&self) -> BTreeMap<String, Moved> {
        let mut hosts: BTreeMap<String, Moved> =
            self.hosts.iter().map(|(name, host)| (name.clone(), host.ended)).collect();
        for open in self.open.values() {
            let moved = open.bytes.as_ref().map(|bytes| bytes.moved()).unwrap_or_default();
            if let Some(host) = open.host().and_then(|host| hosts.get_mut(host)) {
                *host = host.and(moved);
            }
        }
        hosts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(host: &str, queue: u16) -> Peer {
        let queue = Some(NvmeQueue { controller: 1, queue });
        Peer { host: Some(host.into()), queue, ..Peer::default() }
    }

    #[test]
    fn a_host_keeps_the_bytes_of_connections_that_have_ended() {
        let mut clients = Clients::default();
        let bytes = [(); 2].map(|()| Arc::new(Bytes::default()));
        let numbers =
            [0, 1].map(|queue| clients.connect(peer("a", queue as u16), Some(bytes[queue].clone())));
        bytes[0].count(Op::Read, 512);
        bytes[1].count(Op::Write, 4096);
        bytes[1].count(Op::Discard, 4096);
        let moved = Moved { read: 512, written: 4096 };
        assert_eq!(clients.hosts(), BTreeMap::from([("a".to_owned(), moved)]));
        clients.disconnect(numbers[1]);
        assert_eq!(clients.hosts()["a"], moved);
        let connections = clients.connections();
        assert_eq!(connections.len(), 1);
        assert_eq!(
            (&connections[0].peer, connections[0].bytes),
            (&peer("a", 0), Some(Moved { read: 512, written: 0 }))
        );
        clients.disconnect(numbers[0]);
        assert_eq!(clients.hosts()["a"], moved);
    }

    #[test]
    fn the_hosts_that_are_gone_for_longest_make_room_and_connected_ones_stay() {
        let mut clients = Clients::default();
        let numbers: Vec<u64> =
            (0..MAX_HOSTS).map(|host| clients.connect(peer(&format!("h{host}"), 1), None)).collect();
        let late = clients.connect(peer("late", 1), None);
        assert!(!clients.hosts().contains_key("late"), "every other host is connected");
        clients.disconnect(late);
        clients.disconnect(numbers[7]);
        clients.disconnect(numbers[3]);
        clients.connect(peer("new", 1), None);
        let hosts = clients.hosts();
        assert_eq!(hosts.len(), MAX_HOSTS);
        assert!(hosts.contains_key("new") && hosts.contains_key("h3") && !hosts.contains_key("h7"));
    }

    #[test]
    fn clients_of_other_protocols_are_listed_and_are_no_hosts() {
        let mut clients = Clients::default();
        clients.connect(Peer { host: Some("cn".into()), ..Peer::default() }, None);
        assert_eq!((clients.connections()[0].bytes, clients.hosts().len()), (None, 0));
    }
}
