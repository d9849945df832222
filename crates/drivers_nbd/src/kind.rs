//! The kind `nbd` of devices.

use super::{Address, DEFAULT_PORT, NbdDevice, Options, Replies, Tls};
use block::{Device, DeviceError};
use drivers::kind::{DeviceConfig, RECONNECT_DELAY};
#[cfg(feature = "sandbox")]
use sandbox::Profile;
use spec::{ID, Kind, READ_ONLY, Spec, SpecError, Value, key};
use std::path::PathBuf;
use std::sync::Arc;

/// The kind.
pub static KIND: Kind = Kind {
    name: "nbd",
    about: "an export of an NBD server",
    keys: &[
        key(
            "uri",
            "URI",
            "nbd[s]://HOST[:PORT]/EXPORT or nbd[s]+unix:///EXPORT?socket=PATH; or the next four",
        ),
        key("host", "HOST", "the server's name or address"),
        key("port", "N", "the server's port [10809]"),
        key("path", "PATH", "the server's Unix socket"),
        key("export", "NAME", "the export [the server's default]"),
        key("tls", "off|require", "whether TLS is required [require, with one of the next four]"),
        key(
            "tls-certificates",
            "DIR",
            "directory of ca-cert.pem [the system's CAs], client-cert.pem, client-key.pem",
        )
        .read(),
        key("tls-psk", "FILE", "lines IDENTITY:HEXKEY, keys shared with the server").read(),
        key("tls-username", "NAME", "identity to use from tls-psk [the only one]"),
        key("tls-hostname", "NAME", "host name in the server's certificate [host=, or localhost]"),
        READ_ONLY,
        key("connections", "N", "most connections, one for each core; 0: as many as the server allows [0]"),
        key("queue-depth", "N", "requests in flight on each connection [128]"),
        key("replies", "simple|structured|extended", "richest form of replies to negotiate [extended]"),
        key("timeout-ms", "N", "connection timeout [10000]"),
        RECONNECT_DELAY,
        ID,
    ],
};

/// The device of a specification.
///
/// # Errors
/// When a value is invalid, or values contradict each other, or a file of keys cannot be used.
pub fn parse(spec: &Spec) -> Result<Box<dyn DeviceConfig>, SpecError> {
    let mut options = match (spec.get::<String>("uri")?, spec.get::<PathBuf>("path")?, spec.get("host")?) {
        (Some(uri), None, None) => Options::from_uri(&uri).map_err(|why| spec.refuse(why))?,
        (None, Some(path), None) => Options::new(Address::Unix(path)),
        (None, None, Some(host)) => {
            Options::new(Address::Tcp { host, port: spec.get_or("port", DEFAULT_PORT)? })
        }
        _ => return Err(spec.refuse("one of uri=, path= and host= is needed")),
    };
    if spec.get::<u16>("port")?.is_some() && spec.get::<String>("host")?.is_none() {
        return Err(spec.refuse("port= belongs to host="));
    }
    if let Some(export) = spec.get("export")? {
        if spec.get::<String>("uri")?.is_some() {
            return Err(spec.refuse("export= and uri= both name the export"));
        }
        options.export = export;
    }
    if let Some(tls) = tls(spec)? {
        options.tls = Some(tls);
    }
    options.read_only = spec.is_on("readonly")?;
    options.connections = spec.get_or("connections", options.connections)?;
    options.queue_depth = spec.get_or("queue-depth", options.queue_depth)?;
    options.replies = spec.get_or("replies", RichestReplies(options.replies))?.0;
    options.timeout_ms = spec.get_or("timeout-ms", options.timeout_ms)?;
    options.reconnect_delay_s = spec.get_or("reconnect-delay", options.reconnect_delay_s)?;
    Ok(Box::new(options))
}

impl DeviceConfig for Options {
    fn open(&self) -> Result<Arc<dyn Device>, DeviceError> {
        Ok(Arc::new(NbdDevice::open(self)?))
    }

    #[cfg(feature = "sandbox")]
    fn keep(&self, profile: &mut Profile) {
        self.address.keep(profile);
        if let Some(tls) = &self.tls {
            tls.keep(profile);
        }
    }

    fn make_read_only(&mut self) {
        self.read_only = true;
    }
}

/// Certificates and keys are read at once, so that an invalid one is refused here.
fn tls(spec: &Spec) -> Result<Option<Tls>, SpecError> {
    let [certificates, keys] = [spec.get::<PathBuf>("tls-certificates")?, spec.get("tls-psk")?];
    let [username, host] = [spec.get::<String>("tls-username")?, spec.get("tls-hostname")?];
    let has_any = certificates.is_some() || keys.is_some() || username.is_some() || host.is_some();
    let is_wanted = spec.get("tls")?.map_or(has_any, |Required(is_required)| is_required);
    if (is_wanted || has_any) && spec.get::<String>("uri")?.is_some() {
        return Err(spec.refuse("TLS options with uri= belong into the URI: nbds:// and its parameters"));
    }
    if !is_wanted {
        return Ok(None);
    }
    let tls = Tls::new(certificates.as_deref(), keys.as_deref(), username.as_deref(), host);
    tls.map(Some).map_err(|why| spec.refuse(format!("TLS: {why}")))
}

/// Whether there is a choice but to use it.
struct Required(bool);

impl Value for Required {
    fn expected() -> String {
        "off or require".into()
    }

    fn parse(text: &str) -> Option<Self> {
        match text {
            "off" => Some(Required(false)),
            "require" => Some(Required(true)),
            _ => None,
        }
    }
}

/// The richest form of replies to negotiate.
struct RichestReplies(Replies);

impl Value for RichestReplies {
    fn expected() -> String {
        "simple, structured or extended".into()
    }

    fn parse(text: &str) -> Option<Self> {
        Some(RichestReplies(match text {
            "simple" => Replies::Simple,
            "structured" => Replies::Structured,
            "extended" => Replies::Extended,
            _ => return None,
        }))
    }
}
