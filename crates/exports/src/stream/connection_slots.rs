//! Limits the connections of an export: how many there may be, and from which clients.
//!
//! ```text
//!   handshake done ─► judge: total, address, host, others' share ─► ConnectionSlot (freed on drop)
//!   visitor ────────► a slot of its own kind; a new visitor replaces the oldest
//! ```
//!
//! Four rules keep one peer from taking every slot:
//! 1. Connections of one address are bounded while its clients are not authenticated.
//! 2. Connections of one host name are bounded.
//! 3. Half of the slots are reserved for listed hosts, in equal shares, as far as they are not
//!    connected.
//! 4. Visitors (NVMe discovery) do not count. They have a limit of their own, and a new one
//!    replaces the oldest.

use super::Security;
use super::budget::{MemoryBudget, Minimum, Reserved};
use super::log_limit::LogLimit;
use ::stream::disconnect;
use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// From this many slots on, a quarter is withheld from each address and each host that is not
/// listed.
const LEAST_TO_KEEP: usize = 32;
/// Minimum number of visitors, whatever the number of slots.
const LEAST_VISITORS: usize = 16;

/// A client's origin, for limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// This machine, through a Unix socket: its permissions control access.
    Local,
    /// An IPv4 address.
    V4([u8; 4]),
    /// The /64 network of an IPv6 address: a single machine usually has all of it.
    V6([u8; 8]),
}

impl From<IpAddr> for Origin {
    fn from(address: IpAddr) -> Origin {
        match address.to_canonical() {
            IpAddr::V4(address) => Origin::V4(address.octets()),
            IpAddr::V6(address) => {
                let octets = address.octets();
                Origin::V6(std::array::from_fn(|i| octets[i]))
            }
        }
    }
}

/// Connection limits of an export.
#[derive(Clone, Debug, Default)]
pub struct ConnectionLimits {
    /// All connections.
    pub total: usize,
    /// Unauthenticated connections of one address. `None`: see [`default_limit`].
    pub of_address: Option<usize>,
    /// Connections of one host. `None`: as many as the shares of others leave if only listed hosts
    /// may connect, else see [`default_limit`].
    pub of_host: Option<usize>,
    /// Listed hosts; each has reserved slots.
    pub listed: Vec<Box<str>>,
    /// Whether only listed hosts may connect.
    pub is_closed: bool,
}

impl ConnectionLimits {
    /// Limits where the clients with keys of `tls` are the listed hosts.
    pub fn with_tls(tls: Option<&Security>, total: usize, of_address: Option<usize>) -> ConnectionLimits {
        let (listed, is_closed) = tls.map(Security::listed).unwrap_or_default();
        ConnectionLimits { total, of_address, of_host: None, listed, is_closed }
    }
}

/// The connections that one address or one host may have out of `total`: three quarters, or all of
/// a few.
pub fn default_limit(total: usize) -> usize {
    if total < LEAST_TO_KEEP { total } else { total - total / 4 }
}

/// A client that requests a slot.
#[derive(Clone, Copy, Debug)]
pub struct Applicant<'a> {
    /// Its origin.
    pub origin: Origin,
    /// The name of its host, if the protocol has one.
    pub host: Option<&'a str>,
    /// Whether the client authenticated as this host.
    pub is_proven: bool,
}

/// The reason why a slot was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoSlot {
    /// All connections of the export are in use: their number.
    #[error("all {0} connections are in use (clients=)")]
    Total(usize),
    /// Those of the client's address.
    #[error("the client's address already has {0} connections (address-clients=)")]
    Address(usize),
    /// Those of the client's host.
    #[error("the client's host already has {0} connections (host-clients=)")]
    Host(usize),
    /// The remaining ones are reserved for listed hosts.
    #[error("the remaining connections are reserved for listed hosts (clients=)")]
    Kept,
    /// The memory budget has no minimum left.
    #[error("the memory for network clients is used up (--memory)")]
    Memory,
}

/// The connection slots of an export at one listener.
pub struct ConnectionSlots {
    /// Slots that several exports share; each connection takes one of them, too.
    shared: Option<Arc<ConnectionSlots>>,
    budget: MemoryBudget,
    export: Arc<str>,
    table: Mutex<Table>,
    refusals: LogLimit,
}

struct Table {
    limits: ConnectionLimits,
    next_id: u64,
    /// Oldest first.
    taken: Vec<Taken>,
}

struct Taken {
    id: u64,
    origin: Origin,
    host: Option<Box<str>>,
    is_proven: bool,
    /// The socket of a visitor.
    visitor: Option<Weak<OwnedFd>>,
}

/// A connection slot; freed when dropped.
pub struct ConnectionSlot {
    slots: Arc<ConnectionSlots>,
    id: u64,
    /// The memory guaranteed to its connection.
    reserved: Option<Reserved>,
    /// Its slot among those that several exports share.
    _shared: Option<Box<ConnectionSlot>>,
}

impl ConnectionSlot {
    /// Takes the reserved memory. May be called once.
    pub(super) fn take_reserved(&mut self) -> Reserved {
        self.reserved.take().expect("a connection starts once")
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.slots.table().taken.retain(|taken| taken.id != self.id);
    }
}

impl ConnectionSlots {
    /// Creates the slots of the named export, whose connections allocate from `budget`.
    pub fn new(limits: ConnectionLimits, budget: MemoryBudget, export: Arc<str>) -> Arc<ConnectionSlots> {
        ConnectionSlots::within(None, limits, budget, export)
    }

    /// As [`ConnectionSlots::new`]; each connection also takes one of the `shared` slots.
    pub fn within(
        shared: Option<Arc<ConnectionSlots>>,
        limits: ConnectionLimits,
        budget: MemoryBudget,
        export: Arc<str>,
    ) -> Arc<ConnectionSlots> {
        Arc::new(ConnectionSlots {
            shared,
            budget,
            export,
            table: Mutex::new(Table { limits, next_id: 0, taken: Vec::new() }),
            refusals: LogLimit::default(),
        })
    }

    /// The number of connections that count against the limits: all but those of visitors.
    pub fn connected(&self) -> usize {
        self.table().connected().count()
    }

    /// Replaces the listed hosts; existing connections keep their slots.
    pub fn set_listed(&self, listed: Vec<Box<str>>, is_closed: bool) {
        let limits = &mut self.table().limits;
        (limits.listed, limits.is_closed) = (listed, is_closed);
    }

    /// Takes a slot and reserves the minimum memory of its connection.
    ///
    /// # Errors
    /// When a limit refuses the client; logged at a bounded rate.
    pub fn take(
        self: &Arc<Self>,
        applicant: Applicant<'_>,
        minimum: Minimum,
        peer: &str,
    ) -> Result<ConnectionSlot, NoSlot> {
        let shared = match &self.shared {
            Some(shared) => Some(Box::new(shared.take(applicant, Minimum::default(), peer)?)),
            None => None,
        };
        let mut table = self.table();
        let judged = table.judge(applicant);
        let reserved = judged.and_then(|()| self.budget.reserve(minimum).ok_or(NoSlot::Memory));
        let reserved = match reserved {
            Ok(reserved) => Some(reserved),
            Err(reason) => {
                drop(table);
                self.note_refusal(applicant, peer, reason);
                return Err(reason);
            }
        };
        let host = applicant.host.map(Box::from);
        let id = table.add(applicant.origin, host, applicant.is_proven, None);
        drop(table);
        Ok(ConnectionSlot { slots: self.clone(), id, reserved, _shared: shared })
    }

    /// Checks whether [`ConnectionSlots::take`] would succeed now.
    ///
    /// # Errors
    /// As [`ConnectionSlots::take`], and logged likewise.
    pub fn check(&self, applicant: Applicant<'_>, peer: &str) -> Result<(), NoSlot> {
        if let Some(shared) = &self.shared {
            shared.check(applicant, peer)?;
        }
        let judged = self.table().judge(applicant);
        judged.inspect_err(|reason| self.note_refusal(applicant, peer, *reason))
    }

    /// Takes a visitor's slot. When all are in use, it disconnects the oldest visitor of the
    /// address that has the most.
    ///
    /// # Errors
    /// When the memory budget has no room for it.
    pub fn visit(
        self: &Arc<Self>,
        origin: Origin,
        minimum: Minimum,
        socket: &Arc<OwnedFd>,
        peer: &str,
    ) -> Result<ConnectionSlot, NoSlot> {
        let Some(reserved) = self.budget.reserve(minimum) else {
            self.note_refusal(Applicant { origin, host: None, is_proven: false }, peer, NoSlot::Memory);
            return Err(NoSlot::Memory);
        };
        let reserved = Some(reserved);
        let mut table = self.table();
        let visitors = || table.taken.iter().filter(|taken| taken.visitor.is_some());
        let evicted = (visitors().count() >= table.max_visitors())
            .then(|| oldest_of_most(visitors().map(|taken| (taken.origin, taken.id))))
            .flatten();
        if let Some(id) = evicted {
            let place = table.taken.iter().position(|taken| taken.id == id).expect("just found");
            let gone = table.taken.remove(place);
            if let Some(socket) = gone.visitor.and_then(|socket| socket.upgrade()) {
                disconnect(&socket);
            }
            if let Some(count) = self.refusals.due() {
                tracing::warn!(
                    export = &*self.export,
                    origin = ?gone.origin,
                    count,
                    "discovery connection closed: a newer connection replaced it"
                );
            }
        }
        let id = table.add(origin, None, false, Some(Arc::downgrade(socket)));
        drop(table);
        Ok(ConnectionSlot { slots: self.clone(), id, reserved, _shared: None })
    }

    fn note_refusal(&self, applicant: Applicant<'_>, peer: &str, reason: NoSlot) {
        if let Some(count) = self.refusals.due() {
            let (export, host) = (&*self.export, applicant.host);
            tracing::warn!(export, peer, host, %reason, count, "connection refused");
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn max_visitors(&self) -> usize {
        (self.limits.total / 4).max(LEAST_VISITORS)
    }

    fn connected(&self) -> impl Iterator<Item = &Taken> {
        self.taken.iter().filter(|taken| taken.visitor.is_none())
    }

    fn judge(&self, applicant: Applicant<'_>) -> Result<(), NoSlot> {
        let ConnectionLimits { total, of_address, of_host, is_closed, .. } = &self.limits;
        let connected = || self.connected();
        let count = connected().count();
        if count >= *total {
            return Err(NoSlot::Total(count));
        }
        let of_address = of_address.unwrap_or_else(|| default_limit(*total));
        if !applicant.is_proven && applicant.origin != Origin::Local {
            let its =
                connected().filter(|taken| !taken.is_proven && taken.origin == applicant.origin).count();
            if its >= of_address {
                return Err(NoSlot::Address(its));
            }
        }
        let of_host = of_host.or_else(|| (!is_closed).then(|| default_limit(*total)));
        if let (Some(host), Some(of_host)) = (applicant.host, of_host) {
            let its = connected().filter(|taken| taken.host.as_deref() == Some(host)).count();
            if its >= of_host {
                return Err(NoSlot::Host(its));
            }
        }
        let kept = self.kept_from(applicant.host, connected());
        if total - count <= kept { Err(NoSlot::Kept) } else { Ok(()) }
    }

    /// Slots that are reserved for listed hosts other than `host`.
    fn kept_from<'a>(&self, host: Option<&str>, connected: impl Iterator<Item = &'a Taken>) -> usize {
        let ConnectionLimits { total, listed, .. } = &self.limits;
        let kept = total / 2;
        let share = (kept / listed.len().max(1)).max(1);
        let mut counts: HashMap<&str, usize> = HashMap::new();
        for taken in connected {
            taken.host.iter().for_each(|host| *counts.entry(&**host).or_default() += 1);
        }
        let others = listed.iter().filter(|listed| Some(&***listed) != host);
        let missing = others.map(|other| share.saturating_sub(counts.get(&**other).copied().unwrap_or(0)));
        missing.sum::<usize>().min(kept)
    }

    fn add(
        &mut self,
        origin: Origin,
        host: Option<Box<str>>,
        is_proven: bool,
        visitor: Option<Weak<OwnedFd>>,
    ) -> u64 {
        self.next_id += 1;
        self.taken.push(Taken { id: self.next_id, origin, host, is_proven, visitor });
        self.next_id
    }
}

/// Given connections oldest first, returns the oldest one of the origin that has the most. Returns
/// `None` when there are none.
pub fn oldest_of_most<T: Copy>(connections: impl Iterator<Item = (Origin, T)> + Clone) -> Option<T> {
    let mut counts: HashMap<Origin, usize> = HashMap::new();
    connections.clone().for_each(|(origin, _)| *counts.entry(origin).or_default() += 1);
    let most = counts.values().copied().max()?;
    let crowded: HashSet<Origin> =
        counts.into_iter().filter(|(_, count)| *count == most).map(|(origin, _)| origin).collect();
    connections.into_iter().find(|(origin, _)| crowded.contains(origin)).map(|(_, id)| id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    const A: Origin = Origin::V4([10, 0, 0, 1]);
    const B: Origin = Origin::V4([10, 0, 0, 2]);

    fn slots(limits: ConnectionLimits) -> Arc<ConnectionSlots> {
        ConnectionSlots::new(limits, MemoryBudget::new(0), "export".into())
    }

    fn of(origin: Origin, host: Option<&str>, is_proven: bool) -> Applicant<'_> {
        Applicant { origin, host, is_proven }
    }

    /// Takes slots until one is refused.
    fn fill(slots: &Arc<ConnectionSlots>, applicant: Applicant<'_>) -> (Vec<ConnectionSlot>, NoSlot) {
        let mut taken = Vec::new();
        loop {
            match slots.take(applicant, Minimum::default(), "peer") {
                Ok(slot) => taken.push(slot),
                Err(reason) => return (taken, reason),
            }
        }
    }

    #[test]
    fn one_address_leaves_a_quarter_to_others_unless_there_are_few_places() {
        let open = slots(ConnectionLimits { total: 64, ..ConnectionLimits::default() });
        let (taken, reason) = fill(&open, of(A, None, false));
        assert_eq!((taken.len(), reason), (48, NoSlot::Address(48)));
        let (others, reason) = fill(&open, of(B, None, false));
        assert_eq!((others.len(), reason), (16, NoSlot::Total(64)));
        drop(taken);
        assert!(open.take(of(A, None, false), Minimum::default(), "peer").is_ok(), "slots are freed");
        let few = slots(ConnectionLimits { total: 4, ..ConnectionLimits::default() });
        assert_eq!(fill(&few, of(A, None, false)).0.len(), 4);
        let local = slots(ConnectionLimits { total: 64, ..ConnectionLimits::default() });
        assert_eq!(fill(&local, of(Origin::Local, None, false)).0.len(), 64);
        let said = slots(ConnectionLimits { total: 64, of_address: Some(2), ..ConnectionLimits::default() });
        assert_eq!(fill(&said, of(A, None, false)).0.len(), 2);
        let proven = of(A, Some("nqn.a"), true);
        assert_eq!(fill(&said, proven).0.len(), 48, "hosts with keys may share an address");
    }

    #[test]
    fn one_host_cannot_take_the_shares_of_others() {
        let listed: Vec<Box<str>> = vec!["nqn.a".into(), "nqn.b".into()];
        let limits = ConnectionLimits { total: 256, listed, is_closed: true, ..ConnectionLimits::default() };
        let both = slots(limits.clone());
        let (first, reason) = fill(&both, of(A, Some("nqn.a"), true));
        assert_eq!((first.len(), reason), (192, NoSlot::Kept));
        assert_eq!(fill(&both, of(B, None, true)).0.len(), 0, "strangers have no share");
        let (second, reason) = fill(&both, of(A, Some("nqn.b"), true));
        assert_eq!((second.len(), reason), (64, NoSlot::Total(256)));
        drop((first, second));
        let said = slots(ConnectionLimits { of_host: Some(9), ..limits });
        let (taken, reason) = fill(&said, of(A, Some("nqn.a"), true));
        assert_eq!((taken.len(), reason), (9, NoSlot::Host(9)));
        let only = ConnectionLimits { total: 64, listed: vec!["nqn.a".into()], is_closed: true, ..limits };
        let count = |limits| fill(&slots(limits), of(A, Some("nqn.a"), true)).0.len();
        assert_eq!(count(only.clone()), 64, "no other host may come");
        assert_eq!(count(ConnectionLimits { is_closed: false, ..only }), 48, "others may");
    }

    #[test]
    fn exports_share_slots_and_each_has_limits_of_its_own() {
        let limits = |total| ConnectionLimits { total, ..ConnectionLimits::default() };
        let shared = slots(limits(5));
        let one = |total| {
            let budget = MemoryBudget::new(0);
            ConnectionSlots::within(Some(shared.clone()), limits(total), budget, "export".into())
        };
        let (first, second) = (one(3), one(4));
        let (taken, reason) = fill(&first, of(A, None, false));
        assert_eq!((taken.len(), reason), (3, NoSlot::Total(3)));
        assert_eq!(shared.table().taken.len(), 3, "a refused connection gives the shared slot back");
        let (others, reason) = fill(&second, of(B, None, false));
        assert_eq!((others.len(), reason), (2, NoSlot::Total(5)));
        assert_eq!(second.check(of(B, None, false), "peer"), Err(NoSlot::Total(5)));
        drop(taken);
        assert_eq!(fill(&second, of(B, None, false)).0.len(), 2);
        drop(others);
        assert_eq!(shared.table().taken.len(), 0);
    }

    #[test]
    fn more_listed_hosts_than_places_share_half_of_them() {
        let listed = (0..1000).map(|i| format!("nqn.{i}").into()).collect();
        let slots =
            slots(ConnectionLimits { total: 64, listed, is_closed: true, ..ConnectionLimits::default() });
        let (taken, _) = fill(&slots, of(A, Some("nqn.0"), true));
        assert_eq!(taken.len(), 32);
        assert_eq!(fill(&slots, of(A, Some("nqn.1"), true)).0.len(), 0, "still 999 could come");
    }

    #[test]
    fn visitors_take_no_places_and_the_oldest_of_the_crowd_makes_room() {
        let slots = slots(ConnectionLimits { total: 8, ..ConnectionLimits::default() });
        let socket = || Arc::new(OwnedFd::from(UnixStream::pair().unwrap().0));
        let sockets: Vec<_> = (0..40).map(|_| socket()).collect();
        let visit = |origin, socket| slots.visit(origin, Minimum::default(), socket, "peer").unwrap();
        let lonely = visit(B, &sockets[0]);
        let crowd: Vec<ConnectionSlot> = sockets[1..].iter().map(|socket| visit(A, socket)).collect();
        assert_eq!(slots.table().taken.len(), LEAST_VISITORS);
        let ids: Vec<u64> = slots.table().taken.iter().map(|taken| taken.id).collect();
        assert_eq!(ids[0], lonely.id, "the address with one visitor keeps it");
        assert_eq!(ids[1..], crowd[24..].iter().map(|slot| slot.id).collect::<Vec<_>>());
        assert_eq!(fill(&slots, of(A, None, false)).0.len(), 8);
        drop(crowd);
        assert_eq!(slots.table().taken.len(), 1, "an evicted visitor gives back nothing of others");
    }

    #[test]
    fn a_network_of_ipv6_is_one_origin() {
        let origin = |text: &str| Origin::from(text.parse::<IpAddr>().unwrap());
        assert_eq!(origin("2001:db8::1"), origin("2001:db8::2:3"));
        assert_ne!(origin("2001:db8::1"), origin("2001:db8:0:1::1"));
        assert_eq!(origin("::ffff:10.0.0.1"), A);
    }
}
