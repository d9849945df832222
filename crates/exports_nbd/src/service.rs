//! An export as a portal serves it: its offer, its slots, its cores and its counters.

use crate::blocks::RangeLock;
use crate::connection::{MAX_REQUESTS, Session};
use crate::handshake::{Catalog, NbdHandshake, Offered};
use crate::offer::{self, Offer};
use crate::request::Rules;
use block::{Device, DirtyBitmap};
use exports::ConnectionStats;
use exports::stream::{Admitted, Applicant, ConnectionSlots, FRAGMENT, Minimum, Parts, Places, Registry};
use exports::{Error, Peer, Stats};
use reactor::CoreRef;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Memory guaranteed to a connection: short requests, a fragment in each direction, the stream
/// buffer, a block.
const MINIMUM: Minimum = Minimum {
    requests: FRAGMENT,
    capsules: 0,
    fixed: 2 * FRAGMENT + ::stream::BUFFER_BYTES + offer::MAX_BLOCK as usize,
};

/// How an export is served.
pub(crate) struct ServiceConfig {
    /// Its name in logs.
    pub(crate) log_name: Arc<str>,
    /// The name that clients choose it by.
    pub(crate) name: String,
    /// A description for people.
    pub(crate) description: String,
    /// Whether it refuses writes even if the device accepts them.
    pub(crate) is_read_only: bool,
    /// The identities of the clients that may use it; `None`: all.
    pub(crate) identities: Option<BTreeSet<Box<str>>>,
    /// The cores that serve connections, in turn. Empty: all.
    pub(crate) core_map: Vec<usize>,
}

/// An export that clients may choose.
pub(crate) struct Service {
    config: ServiceConfig,
    pub(crate) device: Arc<dyn Device>,
    bitmaps: Arc<[Arc<dyn DirtyBitmap>]>,
    contexts: Arc<[String]>,
    /// As clients may use it now, in bytes.
    pub(crate) capacity: Arc<AtomicU64>,
    /// Serialises unaligned writes.
    writes: Arc<RangeLock>,
    registry: Registry,
    pub(crate) stats: Arc<Stats>,
    pub(crate) places: Arc<Places>,
    /// One per address of the portal.
    slots: Vec<Arc<ConnectionSlots>>,
    /// The turn of the next connection.
    next: AtomicUsize,
    is_closed: AtomicBool,
}

impl Service {
    /// An export of `device` with these connection slots.
    ///
    /// # Errors
    /// When the configuration names a core that does not exist.
    pub(crate) fn new(
        device: Arc<dyn Device>,
        cores: &[CoreRef],
        config: ServiceConfig,
        slots: Vec<Arc<ConnectionSlots>>,
    ) -> Result<Service, Error> {
        let bitmaps: Arc<[Arc<dyn DirtyBitmap>]> = device.bitmaps().into();
        Ok(Service {
            capacity: Arc::new(AtomicU64::new(device.limits().capacity)),
            writes: RangeLock::new(cores, config.log_name.clone()),
            contexts: offer::contexts(&bitmaps),
            bitmaps,
            device,
            registry: Registry::new(),
            stats: Arc::new(Stats::new(cores.len())),
            places: Places::new(cores, &config.core_map)?,
            config,
            slots,
            next: AtomicUsize::new(0),
            is_closed: AtomicBool::new(false),
        })
    }

    /// The name that clients choose it by.
    pub(crate) fn name(&self) -> &str {
        &self.config.name
    }

    pub(crate) fn description(&self) -> &str {
        &self.config.description
    }

    /// Whether it is only for clients with certain keys.
    pub(crate) fn has_identities(&self) -> bool {
        self.config.identities.is_some()
    }

    /// Whether a client with this proven identity may use it.
    pub(crate) fn admits(&self, identity: Option<&str>) -> bool {
        let Some(identities) = &self.config.identities else { return true };
        identity.is_some_and(|identity| identities.contains(identity))
    }

    /// Passes a client that has chosen the export at this address to a core, on the control thread
    /// of the address.
    pub(crate) fn serve<C: Catalog>(&self, address: usize, admitted: Admitted<NbdHandshake<C>>) {
        let host = admitted.handshake.identity();
        let applicant = Applicant { origin: admitted.origin, host, is_proven: host.is_some() };
        let Ok(slot) = self.slots[address].take(applicant, MINIMUM, &admitted.peer) else { return };
        let place = self.places.of_turn(self.next.fetch_add(1, Ordering::Relaxed));
        let agreed = admitted.handshake.agreed();
        let offer = self.offer();
        tracing::info!(
            export = &*self.config.log_name,
            peer = admitted.peer,
            core = place,
            tls = admitted.wire.agreed(),
            "client connected"
        );
        let client = Peer {
            address: Some(admitted.peer.clone()),
            host: host.map(str::to_owned),
            is_secured: admitted.wire.is_secured(),
            is_authenticated: host.is_some(),
            queue: None,
        };
        let parts = Parts {
            wire: admitted.wire,
            peer: admitted.peer,
            export: self.config.log_name.clone(),
            stats: ConnectionStats::new(self.stats.queues[place].clone(), self.stats.connect_peer(client)),
            slot,
        };
        let rules = Rules {
            form: agreed.form,
            selected: agreed.selected,
            is_read_only: offer.is_read_only,
            knows_blocks: agreed.knows_blocks,
            limits: offer.limits,
        };
        let (device, capacity, early) = (self.device.clone(), self.capacity.clone(), admitted.early);
        let (writes, bitmaps) = (self.writes.clone(), self.bitmaps.clone());
        let open = move || Session::open(rules, device, bitmaps, &writes, capacity, &early);
        if self.registry.serve(&self.places.cores()[place], parts, MAX_REQUESTS, open).is_err() {
            tracing::warn!(
                export = &*self.config.log_name,
                core = place,
                "client disconnected: the core has stopped"
            );
        }
    }

    /// Refuses clients from now on.
    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
    }

    /// Ends every connection, and waits until they are gone. Must not be called on a core.
    pub(crate) fn drain(&self) {
        self.registry.drain(self.places.cores());
    }
}

impl Offered for Service {
    fn offer(&self) -> Offer {
        let limits = self.device.limits();
        let ServiceConfig { name, description, is_read_only, .. } = &self.config;
        let is_read_only = *is_read_only || limits.read_only;
        let (name, description) = (name.clone(), description.clone());
        Offer { name, description, limits, is_read_only, contexts: self.contexts.clone() }
    }

    fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }
}
