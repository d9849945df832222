//! A subsystem as a portal serves it: its slots, its cores and its counters.

use exports::stream::{ConnectionSlots, Places, Registry};
use exports::{Error, Stats};
use nvme_auth::tls_key::TlsSecret;
use nvme_target::{Listed, Subsystem};
use reactor::CoreRef;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// A subsystem that hosts may connect to.
pub(crate) struct Service {
    pub(crate) subsystem: Arc<Subsystem>,
    /// One per port.
    pub(crate) slots: Vec<Arc<ConnectionSlots>>,
    pub(crate) cores: ServiceCores,
    /// The core of the first controller, so that the subsystems of a portal begin on different
    /// ones.
    first: usize,
    /// Controllers since the start, one counter per port.
    controllers: Vec<AtomicUsize>,
    is_closed: AtomicBool,
}

/// The cores that serve connections, and their counters.
#[derive(Clone)]
pub(crate) struct ServiceCores {
    pub(crate) registry: Registry,
    pub(crate) stats: Arc<Stats>,
    pub(crate) places: Arc<Places>,
}

impl ServiceCores {
    /// Serves with these cores, or with those of them that `map` names.
    ///
    /// # Errors
    /// When `map` names a core that does not exist.
    pub(crate) fn new(cores: &[CoreRef], map: &[usize]) -> Result<ServiceCores, Error> {
        let places = Places::new(cores, map)?;
        Ok(ServiceCores { registry: Registry::new(), stats: Arc::new(Stats::new(cores.len())), places })
    }

    /// Ends every connection, and waits until they are gone. Must not be called on a core.
    pub(crate) fn drain(&self) {
        self.registry.drain(self.places.cores());
    }
}

impl Listed for Service {
    type Tls = tls::Server;

    fn subsystem(&self) -> &Arc<Subsystem> {
        &self.subsystem
    }

    fn tls<'a>(secrets: impl Iterator<Item = &'a TlsSecret>) -> Result<tls::Server, Error> {
        let secrets = secrets.map(|secret| (secret.identity.clone(), secret.key.clone()));
        tls::Server::with_secrets(secrets).map_err(|error| Error::Config(format!("TLS: {error}")))
    }
}

impl Service {
    pub(crate) fn new(
        subsystem: Arc<Subsystem>,
        slots: Vec<Arc<ConnectionSlots>>,
        cores: ServiceCores,
        first: usize,
    ) -> Arc<Service> {
        let controllers = slots.iter().map(|_| AtomicUsize::new(0)).collect();
        Arc::new(Service { subsystem, slots, cores, first, controllers, is_closed: AtomicBool::new(false) })
    }

    /// The core of a queue that connects at the port with this index. Controllers are distributed
    /// over the cores, and the queues of each controller, too.
    pub(crate) fn place(&self, port: usize, queue_id: u16) -> usize {
        let turn = match queue_id {
            0 => self.controllers[port].fetch_add(1, Ordering::Relaxed).wrapping_add(port),
            queue_id => usize::from(queue_id) - 1,
        };
        self.cores.places.of_turn(self.first.wrapping_add(turn))
    }

    /// Refuses hosts from now on.
    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }
}
