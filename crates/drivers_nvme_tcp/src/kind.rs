//! The kind `nvme-tcp` of devices.

use super::{Address, KeyFiles, Keyring, Nqn, NvmeTcpDevice, Options, parse_address};
use base::Uuid;
use block::{Device, DeviceError};
use drivers::kind::DeviceConfig;
#[cfg(feature = "sandbox")]
use sandbox::{Access, Profile};
use spec::{ID, Key, Kind, READ_ONLY, Spec, SpecError, Value, key};
use std::sync::Arc;

/// The kind.
pub static KIND: Kind = Kind {
    name: "nvme-tcp",
    about: "a namespace of an NVMe/TCP target",
    keys: &[
        key("address", "HOST[:PORT]", "address of the target; IPv6 as [ADDR]:PORT [port 4420]"),
        key("nqn", "NQN", "the subsystem"),
        key("nsid", "N", "the namespace [the first]"),
        key("hostnqn", "NQN", "the host's name [/etc/nvme/hostnqn, or one made of hostid]"),
        key("hostid", "UUID", "the host's identifier [/etc/nvme/hostid, or a new one]"),
        key(
            "dhchap-key",
            "FILE",
            "file with the host's secret, for targets that require authentication (DHHC-1:…)",
        )
        .read(),
        key("dhchap-ctrl-key", "FILE", "file with the target's secret, to authenticate the target as well")
            .read(),
        TLS_KEY,
        TLS_KEYRING,
        READ_ONLY,
        key("queues", "N", "most I/O queues, one for each core; 0: as many as the target allows [0]"),
        key("queue-depth", "N", "requests in flight on each queue [128]"),
        key("hdgst", "on|off", "header digests [off]"),
        key("ddgst", "on|off", "data digests [off]"),
        key("kato", "S", "keep-alive timeout in seconds; 0: none [5]"),
        key("timeout-ms", "N", "connection timeout [10000]"),
        key("io-timeout", "S", "command timeout in seconds, after which the connection is closed [30]"),
        key("reconnect-delay", "S", "longest pause between reconnection attempts, in seconds [10]"),
        key(
            "ctrl-loss-tmo",
            "S",
            "time without connection after which requests fail, in seconds; 0: immediately [600]",
        ),
        ID,
    ],
};

/// The key of TLS, of devices and discovery services.
pub const TLS_KEY: Key =
    key("tls-key", "FILE", "file with the key that host and target share, for TLS 1.3 (NVMeTLSkey-1:…)")
        .read();

/// The keyring of TLS, likewise.
pub const TLS_KEYRING: Key = key(
    "tls-keyring",
    "NAME",
    "instead of tls-key: keyring with keys for TLS (.nvme, where nvme gen-tls-key puts them; a serial number; @u; @s)",
);

/// The device of a specification.
///
/// # Errors
/// When a value is invalid, or a file of a key cannot be used.
pub fn parse(spec: &Spec) -> Result<Box<dyn DeviceConfig>, SpecError> {
    let Host(address) = spec.require("address")?;
    let Name(nqn) = spec.require("nqn")?;
    let defaults = Options::new(address, nqn);
    let mut options = Options {
        nsid: spec.get("nsid")?,
        host_nqn: spec.get("hostnqn")?.map(|Name(nqn)| nqn),
        host_id: spec.get("hostid")?.map(|Uuid(id)| id),
        key_files: key_files(spec)?,
        tls_keyring: tls_keyring(spec)?,
        read_only: spec.is_on("readonly")?,
        queues: spec.get_or("queues", defaults.queues)?,
        queue_depth: spec.get_or("queue-depth", defaults.queue_depth)?,
        header_digest: spec.is_on("hdgst")?,
        data_digest: spec.is_on("ddgst")?,
        keep_alive_s: spec.get_or("kato", defaults.keep_alive_s)?,
        timeout_ms: spec.get_or("timeout-ms", defaults.timeout_ms)?,
        io_timeout_s: spec.get_or("io-timeout", defaults.io_timeout_s)?,
        reconnect_delay_s: spec.get_or("reconnect-delay", defaults.reconnect_delay_s)?,
        loss_timeout_s: spec.get_or("ctrl-loss-tmo", defaults.loss_timeout_s)?,
        ..defaults
    };
    options.read_keys().map_err(|why| spec.refuse(why))?;
    Ok(Box::new(options))
}

impl DeviceConfig for Options {
    fn open(&self) -> Result<Arc<dyn Device>, DeviceError> {
        Ok(Arc::new(NvmeTcpDevice::open(self)?))
    }

    #[cfg(feature = "sandbox")]
    fn keep(&self, profile: &mut Profile) {
        self.address.keep(profile);
        keep_host_name(profile);
        self.key_files.iter().for_each(|path| profile.allow_settings(path));
        if self.tls_keyring.is_some() {
            profile.read_keyrings();
        }
    }

    fn make_read_only(&mut self) {
        self.read_only = true;
    }
}

/// Keeps the files that name this host to targets.
#[cfg(feature = "sandbox")]
pub fn keep_host_name(profile: &mut Profile) {
    drivers::kind::keep_settings(profile, "/etc/nvme");
    profile.allow("/proc/sys/kernel/random", Access::Read);
}

/// The files of secrets that a specification names. [`Options::read_keys`] reads them.
///
/// # Errors
/// When a value is invalid.
pub fn key_files(spec: &Spec) -> Result<KeyFiles, SpecError> {
    let [key, controller_key] = [spec.get("dhchap-key")?, spec.get("dhchap-ctrl-key")?];
    Ok(KeyFiles { key, controller_key, tls_key: spec.get("tls-key")? })
}

/// The keyring that a specification names.
///
/// # Errors
/// When the name is invalid.
pub fn tls_keyring(spec: &Spec) -> Result<Option<Keyring>, SpecError> {
    let name: Option<String> = spec.get("tls-keyring")?;
    let keyring = name.as_deref().map(Keyring::new).transpose();
    keyring.map_err(|error| spec.refuse(format!("tls-keyring: {error}")))
}

struct Host(Address);

impl Value for Host {
    fn expected() -> String {
        "HOST, HOST:PORT or [IPV6]:PORT".into()
    }

    fn parse(text: &str) -> Option<Self> {
        parse_address(text).ok().map(Host)
    }
}

/// An NVMe Qualified Name.
pub struct Name(pub Nqn);

impl Value for Name {
    fn expected() -> String {
        "an NVMe name, which starts with \"nqn.\"".into()
    }

    fn parse(text: &str) -> Option<Self> {
        text.parse().ok().map(Name)
    }
}
