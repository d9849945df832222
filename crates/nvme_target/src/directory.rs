//! The subsystems of a portal, by name, and the TLS keys of all their hosts.
//!
//! ```text
//!   add, remove, change of hosts ─► listing ◄─ handshakes (control threads): the subsystem of a Connect
//!   (one at a time)                    ▲
//!                                      └────── discovery controllers (cores): an excerpt
//! ```
//!
//! Keys in keyrings of the kernel are looked up for each handshake with TLS, by the control thread.
//!
//! The lock of the listing is held for look-ups only, because cores take it, too. No core keeps a
//! subsystem that it found there, so the last reference to one is never dropped on a core.

use crate::access::AdmittedHosts;
use crate::controller::Controller;
use crate::discovery::{Catalog, Excerpt, Visitor};
use crate::ports::Port;
use crate::subsystem::Subsystem;
use exports::Error;
use exports::stream::LogLimit;
use nvme::fabrics::Nqn;
use nvme::fabrics::discovery::{DiscoveryEntry, SECURITY_TLS, TREQ_NOT_REQUIRED, TREQ_REQUIRED};
use nvme_auth::Keyring;
use nvme_auth::keyring::{self, KeyringSecrets};
use nvme_auth::tls_key::{TlsSecret, named_by};
use reactor::CoreRef;
use std::collections::{BTreeMap, BTreeSet, btree_map::Entry};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Maximum number of subsystems of a portal.
pub const MAX_SUBSYSTEMS: usize = 4096;

/// A subsystem in a directory, with what its transport keeps about it.
pub trait Listed: Send + Sync + 'static {
    /// TLS with the keys of all hosts of a portal.
    type Tls: Clone + Send;

    /// The subsystem.
    fn subsystem(&self) -> &Arc<Subsystem>;

    /// TLS with these keys.
    ///
    /// # Errors
    /// When a key cannot be used, or the transport has no TLS.
    fn tls<'a>(secrets: impl Iterator<Item = &'a TlsSecret>) -> Result<Self::Tls, Error>;
}

/// The subsystems of a portal.
pub struct Directory<S: Listed> {
    /// The portal's name, for errors.
    portal: Arc<str>,
    /// Locked during a change.
    changes: Mutex<()>,
    /// Limits the log lines about keyrings.
    faults: LogLimit,
    listing: Mutex<Listing<S>>,
}

struct Listing<S: Listed> {
    services: BTreeMap<Nqn, Arc<S>>,
    /// With the keys of all hosts of all subsystems, except for those in keyrings; `None` if no
    /// subsystem has TLS.
    tls: Option<S::Tls>,
    /// Whether a subsystem takes keys from a keyring.
    has_keyrings: bool,
    /// Whether every subsystem requires TLS, and there is one.
    requires_tls: bool,
    /// Counts changes.
    generation: u64,
}

/// TLS at a portal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortalTls {
    /// No subsystem has it.
    Off,
    /// At least one has it.
    Allowed,
    /// Every subsystem requires it.
    Required,
}

impl<S: Listed> Directory<S> {
    /// The directory of a portal with this name, without subsystems.
    pub fn new(portal: Arc<str>) -> Arc<Directory<S>> {
        let listing = Listing {
            services: BTreeMap::new(),
            tls: None,
            has_keyrings: false,
            requires_tls: false,
            generation: 0,
        };
        Arc::new(Directory {
            portal,
            changes: Mutex::default(),
            faults: LogLimit::default(),
            listing: Mutex::new(listing),
        })
    }

    /// The discovery subsystem, which lists the subsystems of the directory.
    ///
    /// # Errors
    /// When the system refuses a thread.
    pub fn discovery(
        self: &Arc<Self>,
        serial: String,
        ports: Vec<Arc<Port>>,
        cores: &[CoreRef],
    ) -> Result<Subsystem, Error> {
        Subsystem::discovery(self.clone(), serial, ports, cores, self.portal.clone())
    }

    /// Adds a subsystem.
    ///
    /// # Errors
    /// When its name is taken, there are too many, or TLS refuses the keys.
    pub fn add(&self, service: Arc<S>) -> Result<(), Error> {
        let _alone = self.begin();
        let nqn = service.subsystem().nqn.clone();
        let mut services = self.listing().services.clone();
        let fault = |fault: String| Err(Error::Config(format!("portal {}: {fault}", self.portal)));
        if services.len() >= MAX_SUBSYSTEMS {
            return fault(format!("it has {MAX_SUBSYSTEMS} subsystems, which is the maximum"));
        }
        match services.entry(nqn) {
            Entry::Occupied(entry) => return fault(format!("subsystem {} exists already", entry.key())),
            Entry::Vacant(entry) => entry.insert(service),
        };
        self.put(services, None)
    }

    /// Removes a subsystem. Handshakes may still have it.
    pub fn remove(&self, service: &Arc<S>) {
        let _alone = self.begin();
        let mut services = self.listing().services.clone();
        if !services.get(&service.subsystem().nqn).is_some_and(|found| Arc::ptr_eq(found, service)) {
            return;
        }
        services.remove(&service.subsystem().nqn);
        if let Err(error) = self.put(services, None) {
            // Keys of the removed subsystem lead nowhere.
            tracing::error!(portal = &*self.portal, %error, "TLS keys of a removed subsystem are still accepted");
            let mut listing = self.listing();
            listing.services.remove(&service.subsystem().nqn);
            listing.generation += 1;
        }
    }

    /// Admits these hosts to a subsystem from now on, with their TLS keys. Returns the controllers
    /// of others, which are revoked: see [`Subsystem::disconnect`].
    ///
    /// # Errors
    /// When TLS refuses the keys; then nothing changes.
    ///
    /// [`Subsystem::disconnect`]: super::subsystem::Subsystem::disconnect
    pub fn admit(&self, service: &S, admitted: AdmittedHosts) -> Result<Vec<Arc<Controller>>, Error> {
        let _alone = self.begin();
        let services = self.listing().services.clone();
        self.put(services, Some((&service.subsystem().nqn, &admitted)))?;
        Ok(service.subsystem().admit(admitted))
    }

    /// Puts a listing in force, in which one subsystem may have other hosts.
    fn put(
        &self,
        services: BTreeMap<Nqn, Arc<S>>,
        changed: Option<(&Nqn, &AdmittedHosts)>,
    ) -> Result<(), Error> {
        let admitted: Vec<_> = services.values().map(|service| service.subsystem().admitted()).collect();
        let hosts: Vec<(&Nqn, &AdmittedHosts)> = services
            .keys()
            .zip(&admitted)
            .map(|(nqn, admitted)| match changed {
                Some((changed, hosts)) if changed == nqn => (nqn, hosts),
                _ => (nqn, &**admitted),
            })
            .collect();
        let has_keyrings = hosts.iter().any(|(_, hosts)| hosts.keyring().is_some());
        let mut security = hosts.iter().map(|(_, hosts)| hosts.access.tls.as_ref());
        let has_tls = security.clone().any(|tls| tls.is_some());
        let requires_tls = !hosts.is_empty() && security.all(|tls| tls.is_some_and(|tls| tls.is_required));
        let tls = has_tls.then(|| S::tls(secrets(&hosts, &BTreeMap::new()).into_iter())).transpose()?;
        let mut listing = self.listing();
        let generation = listing.generation + 1;
        let before = std::mem::replace(
            &mut *listing,
            Listing { services, tls, has_keyrings, requires_tls, generation },
        );
        drop(listing);
        drop(before); // not under the lock
        Ok(())
    }

    /// The subsystem with this name. Must not be called on a core.
    pub fn find(&self, nqn: &Nqn) -> Option<Arc<S>> {
        self.listing().services.get(nqn).cloned()
    }

    /// The number of subsystems.
    pub fn count(&self) -> usize {
        self.listing().services.len()
    }

    /// The TLS configuration for a handshake, if a subsystem has TLS: with the keys that are in
    /// keyrings now. Must not be called on a core.
    pub fn tls_server(&self) -> Option<S::Tls> {
        let services = {
            let listing = self.listing();
            match listing.has_keyrings {
                true => listing.services.clone(),
                false => return listing.tls.clone(),
            }
        };
        let admitted: Vec<_> = services.values().map(|service| service.subsystem().admitted()).collect();
        let hosts: Vec<_> = services.keys().zip(admitted.iter().map(|admitted| &**admitted)).collect();
        let in_keyrings = self.look_up(&hosts);
        match S::tls(secrets(&hosts, &in_keyrings).into_iter()) {
            Ok(tls) => Some(tls),
            Err(error) => {
                tracing::error!(portal = &*self.portal, %error, "TLS keys of keyrings are not accepted");
                self.listing().tls.clone()
            }
        }
    }

    /// The keys in the keyrings of subsystems, for these subsystems and for discovery.
    fn look_up(&self, hosts: &[(&Nqn, &AdmittedHosts)]) -> InKeyrings {
        let mut subsystems: BTreeMap<&Keyring, BTreeSet<&Nqn>> = BTreeMap::new();
        for (nqn, hosts) in hosts {
            if let Some(keyring) = hosts.keyring() {
                subsystems.entry(keyring).or_default().insert(nqn);
            }
        }
        let find = |(keyring, names): (&Keyring, BTreeSet<&Nqn>)| {
            let wants = |_: &Nqn, subsystem: &Nqn| subsystem.is_discovery() || names.contains(subsystem);
            let found = keyring::find(keyring, wants).unwrap_or_else(|error| {
                self.warn(&error);
                KeyringSecrets::default()
            });
            found.unusable.iter().for_each(|key| self.warn(key));
            (keyring.clone(), found.secrets)
        };
        subsystems.into_iter().map(find).collect()
    }

    /// Logs, at a bounded rate, that a key cannot be used.
    fn warn(&self, fault: &dyn std::error::Error) {
        if let Some(count) = self.faults.due() {
            tracing::warn!(portal = &*self.portal, error = %fault, count, "TLS key not used");
        }
    }

    /// Whether hosts may or must use TLS.
    pub fn tls(&self) -> PortalTls {
        self.listing().tls()
    }

    fn begin(&self) -> MutexGuard<'_, ()> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn listing(&self) -> MutexGuard<'_, Listing<S>> {
        self.listing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The keys that were found in keyrings.
type InKeyrings = BTreeMap<Keyring, Vec<TlsSecret>>;

/// The keys of all hosts of these subsystems. A host may have another key for each subsystem. For
/// discovery, the first one counts where the identity does not tell them apart.
fn secrets<'a>(hosts: &[(&'a Nqn, &'a AdmittedHosts)], found: &'a InKeyrings) -> Vec<&'a TlsSecret> {
    let mut keys: BTreeMap<&str, (&Nqn, Vec<&TlsSecret>)> = BTreeMap::new();
    for (nqn, hosts) in hosts {
        let leads_here = |secret: &&TlsSecret| {
            named_by(&secret.identity).is_some_and(|(_, to)| to == **nqn || to.is_discovery())
        };
        let in_keyring = hosts.keyring().and_then(|keyring| found.get(keyring)).into_iter().flatten();
        for secret in hosts.secrets.iter().chain(in_keyring.filter(leads_here)) {
            let (first, secrets) = keys.entry(&secret.identity).or_insert((nqn, Vec::new()));
            if first == nqn {
                secrets.push(secret);
            }
        }
    }
    keys.into_values().flat_map(|(_, secrets)| secrets).collect()
}

impl<S: Listed> Listing<S> {
    fn tls(&self) -> PortalTls {
        match (&self.tls, self.requires_tls) {
            (None, _) => PortalTls::Off,
            (Some(_), false) => PortalTls::Allowed,
            (Some(_), true) => PortalTls::Required,
        }
    }
}

impl<S: Listed> Catalog for Directory<S> {
    /// First the discovery subsystem, then every port of each subsystem that the visitor may use. A
    /// subsystem that requires TLS is not listed in the clear.
    fn excerpt(&self, visitor: &Visitor<'_>, wanted: Range<u64>) -> Excerpt {
        let listing = self.listing();
        let (mut records, mut entries) = (0, Vec::new());
        let mut list = |make: &dyn Fn() -> DiscoveryEntry| {
            if wanted.contains(&records) {
                entries.push(make());
            }
            records += 1;
        };
        if let Some(here) = visitor.address {
            let own = || DiscoveryEntry {
                port_id: visitor.port,
                ..DiscoveryEntry::at(visitor.transport, here, Nqn::discovery())
            };
            list(&|| listing.tls().described(own()));
            for service in listing.services.values() {
                let subsystem = service.subsystem();
                let admitted = subsystem.admitted();
                let tls = PortalTls::of(&admitted);
                if !admitted.access.allows(visitor.host) || tls == PortalTls::Required && !visitor.is_secured
                {
                    continue;
                }
                for port in &subsystem.ports {
                    let address = if port.id == visitor.port { Some(here) } else { port.address(here) };
                    let Some(address) = address else { continue };
                    list(&|| {
                        let entry = DiscoveryEntry::at(port.transport, address, subsystem.nqn.clone());
                        tls.described(DiscoveryEntry { port_id: port.id, ..entry })
                    });
                }
            }
        }
        Excerpt { generation: listing.generation, records, entries }
    }
}

impl PortalTls {
    /// TLS of one subsystem.
    fn of(admitted: &AdmittedHosts) -> PortalTls {
        match &admitted.access.tls {
            None => PortalTls::Off,
            Some(tls) if tls.is_required => PortalTls::Required,
            Some(_) => PortalTls::Allowed,
        }
    }

    /// Adds TLS to an entry.
    fn described(self, entry: DiscoveryEntry) -> DiscoveryEntry {
        let requirements = match self {
            PortalTls::Off => return entry,
            PortalTls::Allowed => TREQ_NOT_REQUIRED,
            PortalTls::Required => TREQ_REQUIRED,
        };
        DiscoveryEntry { security: SECURITY_TLS, requirements, ..entry }
    }
}
