//! The exports of a portal, by the name that clients choose.
//!
//! The lock is held for look-ups only; the control threads of all addresses take it.

use crate::handshake::{Catalog, Listed};
use crate::service::Service;
use exports::Error;
use exports::stream::Security;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Maximum number of exports of a portal.
pub const MAX_EXPORTS: usize = 4096;

/// The exports of a portal.
pub(crate) struct Directory {
    /// The portal, for errors.
    object: Arc<str>,
    default: DefaultExport,
    table: Mutex<Table>,
}

/// The export of clients that name none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum DefaultExport {
    /// There is none.
    None,
    /// The only export.
    Only,
    /// The export with this name, if it exists.
    Named(String),
}

struct Table {
    exports: BTreeMap<String, Arc<Service>>,
    security: Option<Security>,
}

impl Directory {
    pub(crate) fn new(object: Arc<str>, default: DefaultExport, security: Option<Security>) -> Directory {
        Directory { object, default, table: Mutex::new(Table { exports: BTreeMap::new(), security }) }
    }

    /// Adds an export.
    ///
    /// # Errors
    /// When its name is taken, there are too many, or no client could use it.
    pub(crate) fn add(&self, export: Arc<Service>) -> Result<(), Error> {
        let fault = |fault: String| Err(Error::Config(format!("{}: {fault}", self.object)));
        let mut table = self.table();
        let has_keys =
            table.security.as_ref().is_some_and(|security| !security.server.identities().is_empty());
        if export.has_identities() && !has_keys {
            let name = export.name();
            return fault(format!("export name {name:?}: identities need TLS with keys (tls-psk)"));
        }
        let count = table.exports.len();
        match table.exports.entry(export.name().to_owned()) {
            Entry::Occupied(entry) => fault(format!("export name {:?} exists already", entry.key())),
            Entry::Vacant(_) if count >= MAX_EXPORTS => {
                fault(format!("it has {MAX_EXPORTS} exports, which is the maximum"))
            }
            Entry::Vacant(entry) => {
                entry.insert(export);
                Ok(())
            }
        }
    }

    /// Removes an export. Handshakes may still have it.
    pub(crate) fn remove(&self, export: &Arc<Service>) {
        let mut table = self.table();
        if table.exports.get(export.name()).is_some_and(|found| Arc::ptr_eq(found, export)) {
            table.exports.remove(export.name());
        }
    }

    /// The number of exports.
    pub(crate) fn len(&self) -> usize {
        self.table().exports.len()
    }

    /// TLS of all exports.
    pub(crate) fn security(&self) -> Option<Security> {
        self.table().security.clone()
    }

    /// Replaces TLS, if the portal has it. Returns whether it has.
    pub(crate) fn set_security(&self, security: Security) -> bool {
        let mut table = self.table();
        let before = table.security.as_mut().map(|current| std::mem::replace(current, security));
        drop(table);
        before.is_some()
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Catalog for Directory {
    type Export = Service;

    fn find(&self, name: &[u8], identity: Option<&str>) -> Option<Arc<Service>> {
        let table = self.table();
        let found = match (name, &self.default) {
            ([], DefaultExport::Only) => table.exports.values().next(),
            ([], DefaultExport::Named(default)) => table.exports.get(default),
            (name, _) => table.exports.get(str::from_utf8(name).ok()?),
        };
        found.filter(|export| export.admits(identity)).cloned()
    }

    fn list(&self, after: Option<&str>, identity: Option<&str>) -> Option<Listed> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let table = self.table();
        let mut rest = table.exports.range::<str, _>((from, Bound::Unbounded));
        let (name, export) = rest.find(|(_, export)| export.admits(identity))?;
        Some(Listed { name: name.clone(), description: export.description().to_owned() })
    }
}
