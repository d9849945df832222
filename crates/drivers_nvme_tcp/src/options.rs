//! Options of a namespace: the subsystem's address, and the host's identity.

use base::Uuid;
use drivers::stream::Address;
use nvme::fabrics::Nqn;
use nvme_auth::{Key, Keyring, TlsKey};
use std::net::IpAddr;
use std::path::{Path, PathBuf};

/// The protocol's port.
pub const DEFAULT_PORT: u16 = nvme::tcp::DEFAULT_PORT;
/// The discovery port.
pub const DISCOVERY_PORT: u16 = nvme::tcp::DISCOVERY_PORT;
/// Maximum I/O queues, each with its own connection: more than a target has cores.
pub const MAX_QUEUES: u32 = 64;
/// Maximum requests in flight on a queue: limited by the bits of a command identifier besides its
/// generation.
pub const MAX_QUEUE_DEPTH: u32 = 1024;
/// Longest keep-alive timeout: ten minutes.
const MAX_KEEP_ALIVE_S: u32 = 600;

/// Options of a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The target's address.
    pub address: Address,
    /// The subsystem.
    pub nqn: Nqn,
    /// The namespace; `None` for the first one.
    pub nsid: Option<u32>,
    /// The host's name. `None`: that of this machine (`/etc/nvme/hostnqn`), or one derived from its
    /// identifier.
    pub host_nqn: Option<Nqn>,
    /// The host's identifier. `None`: that of this machine (`/etc/nvme/hostid`), or a new one each
    /// time.
    pub host_id: Option<[u8; 16]>,
    /// The host's secret, if the target requires authentication.
    pub key: Option<Key>,
    /// The target's secret, if it must authenticate itself.
    pub controller_key: Option<Key>,
    /// The key of TLS that host and target share; `None`: without TLS.
    pub tls_key: Option<TlsKey>,
    /// The keyring with keys of TLS, instead of one key. They are looked up for each connection.
    pub tls_keyring: Option<Keyring>,
    /// The files of these secrets, which are read again before each attempt to reconnect.
    pub key_files: KeyFiles,
    /// Refuse writes, even if the target allows them.
    pub read_only: bool,
    /// Maximum I/O queues; 0 for as many as the target allows.
    pub queues: u32,
    /// Requests in flight on each queue: 1 to [`MAX_QUEUE_DEPTH`]. A target may allow less.
    pub queue_depth: u32,
    /// Enable header digests.
    pub header_digest: bool,
    /// Enable data digests.
    pub data_digest: bool,
    /// Keep-alive timeout in seconds, after which host and target consider each other dead; 0:
    /// none.
    pub keep_alive_s: u32,
    /// Timeout of connecting, in milliseconds.
    pub timeout_ms: u64,
    /// Timeout of a command in seconds; then the connection is aborted.
    pub io_timeout_s: u32,
    /// Maximum pause between attempts to reconnect, in seconds.
    pub reconnect_delay_s: u32,
    /// Time to keep reconnecting before requests fail, in seconds; 0: they fail at once.
    pub loss_timeout_s: u32,
}

/// The files of secrets; `None`: the secret, if there is one, stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyFiles {
    /// That of [`Options::key`].
    pub key: Option<PathBuf>,
    /// That of [`Options::controller_key`].
    pub controller_key: Option<PathBuf>,
    /// That of [`Options::tls_key`].
    pub tls_key: Option<PathBuf>,
}

impl KeyFiles {
    /// The files.
    pub fn iter(&self) -> impl Iterator<Item = &Path> {
        [&self.key, &self.controller_key, &self.tls_key].into_iter().flatten().map(PathBuf::as_path)
    }
}

impl Options {
    /// Reads the secrets from their files, and checks that the keyring can be used.
    ///
    /// # Errors
    /// The file or keyring and the reason. Then nothing has changed.
    pub fn read_keys(&mut self) -> Result<(), String> {
        let KeyFiles { key, controller_key, tls_key } = &self.key_files;
        if let Some(keyring) = &self.tls_keyring {
            if tls_key.is_some() {
                return Err("tls-key and tls-keyring: want one of them".into());
            }
            keyring.check().map_err(|error| format!("tls-keyring: {error}"))?;
        }
        let key = read("dhchap-key", key, Key::read)?;
        let controller_key = read("dhchap-ctrl-key", controller_key, Key::read)?;
        let tls_key = read("tls-key", tls_key, TlsKey::read)?;
        self.key = key.or(self.key.take());
        self.controller_key = controller_key.or(self.controller_key.take());
        self.tls_key = tls_key.or(self.tls_key.take());
        Ok(())
    }

    /// The defaults for the first namespace of the subsystem `nqn` at `address`.
    pub fn new(address: Address, nqn: Nqn) -> Options {
        Options {
            address,
            nqn,
            nsid: None,
            host_nqn: None,
            host_id: None,
            key: None,
            controller_key: None,
            tls_key: None,
            tls_keyring: None,
            key_files: KeyFiles::default(),
            read_only: false,
            queues: 0,
            queue_depth: 128,
            header_digest: false,
            data_digest: false,
            keep_alive_s: 5,
            timeout_ms: 10_000,
            io_timeout_s: 30,
            reconnect_delay_s: 10,
            loss_timeout_s: 600,
        }
    }

    /// A name for people.
    pub fn name(&self) -> String {
        match self.nsid {
            Some(nsid) => format!("nvme-tcp://{}/{}/{nsid}", self.address, self.nqn),
            None => format!("nvme-tcp://{}/{}", self.address, self.nqn),
        }
    }

    /// Checks the options.
    pub(super) fn check(&self) -> Result<(), String> {
        if !(1..=MAX_QUEUE_DEPTH).contains(&self.queue_depth) {
            return Err(format!("queue depth {}: want 1 to {MAX_QUEUE_DEPTH}", self.queue_depth));
        }
        if self.queues > MAX_QUEUES {
            return Err(format!("{} queues: want at most {MAX_QUEUES}", self.queues));
        }
        if self.timeout_ms == 0 || self.io_timeout_s == 0 {
            return Err("timeout of 0: want at least 1".into());
        }
        if self.keep_alive_s > MAX_KEEP_ALIVE_S {
            return Err(format!("keep-alive {} s: want at most {MAX_KEEP_ALIVE_S}", self.keep_alive_s));
        }
        if self.nsid.is_some_and(|nsid| nsid == 0 || nsid == u32::MAX) {
            return Err(format!("namespace {}: want 1 to {}", self.nsid.unwrap_or(0), u32::MAX - 1));
        }
        if self.controller_key.is_some() {
            match &self.key {
                None => return Err("authentication of the target requires a secret of the host, too".into()),
                key if *key == self.controller_key => {
                    return Err("host and target must not have the same secret".into());
                }
                Some(_) => {}
            }
        }
        if self.nqn.is_discovery() {
            return Err("the discovery subsystem has no namespaces".into());
        }
        Ok(())
    }
}

/// The secret in a file, if there is one. An error names the option.
fn read<T, E: std::fmt::Display>(
    option: &str,
    path: &Option<PathBuf>,
    read: impl FnOnce(&Path) -> Result<T, E>,
) -> Result<Option<T>, String> {
    let secret = path.as_deref().map(read).transpose();
    secret.map_err(|error| format!("{option}: {error}"))
}

/// Parses `HOST[:PORT]`, `[IPv6][:PORT]` or an IPv6 address without a port.
///
/// # Errors
/// The text and the expected format.
pub fn parse_address(text: &str) -> Result<Address, String> {
    parse_address_at(text, DEFAULT_PORT)
}

/// As [`parse_address`], with another default port.
///
/// # Errors
/// The text and the expected format.
pub fn parse_address_at(text: &str, port_if_none: u16) -> Result<Address, String> {
    let wrong = || format!("{text:?} is not an address: want HOST, HOST:PORT or [IPV6]:PORT");
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => rest.split_once(']').ok_or_else(wrong)?,
        None if text.parse::<IpAddr>().is_ok() => (text, ""),
        None => text.find(':').map_or((text, ""), |at| text.split_at(at)),
    };
    if host.is_empty() || host.contains(['\0', '/']) {
        return Err(wrong());
    }
    let port = match port {
        "" => port_if_none,
        port => {
            let digits = port.strip_prefix(':').and_then(|digits| digits.parse().ok());
            digits.filter(|port| *port != 0).ok_or_else(wrong)?
        }
    };
    Ok(Address::Tcp { host: host.to_owned(), port })
}

/// The host's identity: from the options, else from this machine's files, else a new one.
pub(super) fn host(options: &Options) -> ([u8; 16], Nqn) {
    let read = |path| std::fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default();
    let uuid = |path| Uuid::parse(&read(path)).map(|uuid| uuid.0);
    let id = options.host_id.or_else(|| uuid("/etc/nvme/hostid"));
    // The fallback is the same for all such hosts, which matters only for reservations.
    let id = id.or_else(|| uuid("/proc/sys/kernel/random/uuid")).unwrap_or([0xf5; 16]);
    let name = options.host_nqn.clone();
    let of_machine = || Nqn::new(&read("/etc/nvme/hostnqn")).ok().filter(|_| options.host_id.is_none());
    (id, name.or_else(of_machine).unwrap_or_else(|| Nqn::of_uuid(&id)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> Options {
        Options::new(parse_address("example.com").unwrap(), Nqn::new("nqn.2014-08.org.example:disk").unwrap())
    }

    #[test]
    fn addresses_name_host_and_port() {
        let cases = [
            ("example.com", "example.com:4420"),
            ("10.0.0.1:8009", "10.0.0.1:8009"),
            ("::1", "[::1]:4420"),
            ("[fe80::1]:99", "[fe80::1]:99"),
            ("[fe80::1]", "[fe80::1]:4420"),
        ];
        for (text, address) in cases {
            assert_eq!(parse_address(text).unwrap().to_string(), address);
        }
        for wrong in ["", ":4420", "a:0", "a:x", "a:70000", "[::1", "[::1]x", "/run/a"] {
            assert!(parse_address(wrong).unwrap_err().contains("not an address"), "{wrong}");
        }
    }

    #[test]
    fn a_host_is_named_by_its_identifier_unless_it_has_a_name() {
        let id = Uuid::parse("00112233-4455-6677-8899-aabbccddeeff").unwrap().0;
        let known = Options { host_id: Some(id), ..options() };
        let name = "nqn.2014-08.org.nvmexpress:uuid:00112233-4455-6677-8899-aabbccddeeff";
        assert_eq!(host(&known), (id, Nqn::new(name).unwrap()));
        let named = Options { host_nqn: Some(Nqn::new("nqn.a").unwrap()), ..known };
        assert_eq!(host(&named).1.as_str(), "nqn.a");
    }

    #[test]
    fn options_out_of_range_are_errors_that_name_the_value() {
        let good = options();
        let key = Key::parse("DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:").unwrap();
        assert_eq!(good.check(), Ok(()));
        let cases = [
            (Options { queue_depth: 0, ..good.clone() }, "queue depth 0"),
            (Options { queue_depth: 5000, ..good.clone() }, "queue depth 5000"),
            (Options { queues: 65, ..good.clone() }, "65 queues"),
            (Options { timeout_ms: 0, ..good.clone() }, "timeout of 0"),
            (Options { keep_alive_s: 601, ..good.clone() }, "keep-alive 601 s"),
            (Options { nsid: Some(0), ..good.clone() }, "namespace 0"),
            (Options { controller_key: Some(key.clone()), ..good.clone() }, "requires a secret of the host"),
            (
                Options { controller_key: Some(key.clone()), key: Some(key), ..good.clone() },
                "the same secret",
            ),
            (Options { nqn: Nqn::discovery(), ..good }, "no namespaces"),
        ];
        for (options, why) in cases {
            assert!(options.check().unwrap_err().contains(why), "{options:?}");
        }
    }
}
