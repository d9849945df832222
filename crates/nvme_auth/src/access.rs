//! The hosts that may connect to a subsystem, and their secrets.

use crate::{Choices, HostKeys, HostSecrets, Keys, SecretsError, TlsKeys};
use nvme::fabrics::{Nqn, NqnError};
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

/// Maximum number of listed hosts.
pub const MAX_HOSTS: usize = 1024;
/// The text of a list without hosts.
pub const NO_HOST: &str = "none";

/// The hosts that may connect.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Hosts {
    /// All.
    #[default]
    Any,
    /// Only these; none if the list is empty.
    Listed(BTreeSet<Nqn>),
}

/// Why a text is not a list of hosts.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostsError {
    /// A name is invalid.
    #[error("{0}: {1}")]
    Name(String, NqnError),
    /// There are too many.
    #[error("{0} hosts: want at most {MAX_HOSTS}")]
    TooMany(usize),
}

impl Hosts {
    /// Parses `NQN+NQN…`, or [`NO_HOST`].
    ///
    /// # Errors
    /// When a name is invalid, or the list too long.
    pub fn parse(text: &str) -> Result<Hosts, HostsError> {
        if text == NO_HOST {
            return Ok(Hosts::Listed(BTreeSet::new()));
        }
        let name = |text: &str| Nqn::new(text).map_err(|error| HostsError::Name(text.into(), error));
        Hosts::listed(text.split('+').map(name).collect::<Result<_, _>>()?)
    }

    /// Only these hosts.
    ///
    /// # Errors
    /// When there are too many.
    pub fn listed(hosts: BTreeSet<Nqn>) -> Result<Hosts, HostsError> {
        match hosts.len() {
            count if count > MAX_HOSTS => Err(HostsError::TooMany(count)),
            _ => Ok(Hosts::Listed(hosts)),
        }
    }

    /// Whether a host is among them.
    pub fn contains(&self, host: &Nqn) -> bool {
        match self {
            Hosts::Any => true,
            Hosts::Listed(hosts) => hosts.contains(host),
        }
    }
}

/// As [`Hosts::parse`] takes it; `any` for all.
impl fmt::Display for Hosts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Hosts::Any => f.write_str("any"),
            Hosts::Listed(hosts) if hosts.is_empty() => f.write_str(NO_HOST),
            Hosts::Listed(hosts) => f.write_str(&hosts.iter().map(Nqn::as_str).collect::<Vec<_>>().join("+")),
        }
    }
}

/// Authentication of hosts. A host that has a secret must authenticate.
#[derive(Clone, Debug)]
pub struct Auth {
    /// The hosts' secrets.
    pub keys: Arc<Keys>,
    /// The permitted hashes and groups.
    pub choices: Arc<Choices>,
    /// Whether hosts without a secret are refused.
    pub is_required: bool,
}

/// TLS with pre-shared keys.
#[derive(Clone, Debug)]
pub struct Security {
    /// The hosts' keys. A host that has one is refused without TLS.
    pub keys: Arc<TlsKeys>,
    /// Whether hosts without a key are refused.
    pub is_required: bool,
}

/// The hosts that may connect, and their secrets. By default, all hosts without any.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// The hosts.
    pub hosts: Hosts,
    /// Authentication of hosts. `None`: no host has a secret. Discovery never requires it.
    pub auth: Option<Auth>,
    /// TLS. `None`: all connections are in the clear.
    pub tls: Option<Security>,
}

/// A proof that a host owes: the secrets, and how they may be used.
#[derive(Clone)]
pub struct Proof {
    /// Its secrets.
    pub keys: Arc<HostKeys>,
    /// The permitted hashes and groups.
    pub choices: Arc<Choices>,
}

impl Access {
    /// Adds secrets. They replace those that the hosts have already.
    ///
    /// # Errors
    /// When a secret is invalid.
    pub fn with_secrets(mut self, secrets: &[HostSecrets]) -> Result<Access, SecretsError> {
        let (mut keys, mut tls_keys) = (Vec::new(), Vec::new());
        for of_host in secrets {
            let (host, host_keys, tls_key) = of_host.parse()?;
            keys.extend(host_keys.map(|keys| (host.clone(), keys)));
            tls_keys.extend(tls_key.map(|key| (host, key)));
        }
        if !keys.is_empty() {
            let none = || Auth { keys: Arc::default(), choices: Arc::default(), is_required: false };
            let auth = self.auth.get_or_insert_with(none);
            auth.keys = Arc::new(auth.keys.with(keys));
        }
        if !tls_keys.is_empty() {
            let none = || Security { keys: Arc::default(), is_required: false };
            let tls = self.tls.get_or_insert_with(none);
            tls.keys = Arc::new(tls.keys.with(tls_keys));
        }
        Ok(self)
    }

    /// Why a listed host cannot connect all the same.
    pub fn lacks(&self, host: &Nqn) -> Option<&'static str> {
        let has_secret =
            self.auth.as_ref().is_none_or(|auth| !auth.is_required || auth.keys.of(host).is_some());
        let has_key = self.tls.as_ref().is_none_or(|tls| !tls.is_required || tls.keys.may_have(host));
        match (has_secret, has_key) {
            (false, _) => Some("authentication is required, and the host has no secret"),
            (_, false) => Some("TLS is required, and the host has no key"),
            (true, true) => None,
        }
    }

    /// Whether an authenticated host may use the namespaces.
    pub fn allows(&self, host: &Nqn) -> bool {
        let has_secret = |auth: &Auth| !auth.is_required || auth.keys.of(host).is_some();
        self.hosts.contains(host) && self.auth.as_ref().is_none_or(has_secret)
    }

    /// The proof that a host owes.
    pub fn proof(&self, host: &Nqn) -> Option<Proof> {
        let auth = self.auth.as_ref()?;
        let keys = auth.keys.of(host)?.clone();
        Some(Proof { keys, choices: auth.choices.clone() })
    }

    /// Whether only hosts may connect that are known by name.
    pub fn is_closed(&self) -> bool {
        let needs_secret = self.auth.as_ref().is_some_and(|auth| auth.is_required);
        self.hosts != Hosts::Any || needs_secret || self.tls.as_ref().is_some_and(|tls| tls.is_required)
    }

    /// The names of the hosts that are known by name and may connect.
    pub fn listed(&self) -> Vec<Box<str>> {
        let of_auth = self.auth.iter().flat_map(|auth| auth.keys.hosts());
        let of_tls = self.tls.iter().flat_map(|tls| tls.keys.hosts());
        let mut named: BTreeSet<&Nqn> = of_auth.chain(of_tls).collect();
        if let Hosts::Listed(hosts) = &self.hosts {
            named.extend(hosts);
        }
        let may_come = |host: &&Nqn| self.allows(host) && self.lacks(host).is_none();
        named.into_iter().filter(may_come).map(|host| host.as_str().into()).collect()
    }
}
