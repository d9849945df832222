//! Options of an export, and its URI.
//!
//! Source: the NBD protocol's companion, "The NBD Uniform Resource Indicator (URI) format".

use drivers::stream::{Address, StreamError};
use nbd::Replies;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use tls::Client;

/// The protocol's port.
pub const DEFAULT_PORT: u16 = 10809;
/// Maximum connections to one export, each with a queue: more than a server has threads.
pub const MAX_CONNECTIONS: u32 = 64;
/// Maximum requests in flight on a connection: more would only wait in the server's socket.
pub const MAX_QUEUE_DEPTH: u32 = 4096;
/// Longest name of an export, by the protocol.
const MAX_NAME: usize = 4096;

/// Options of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The server's address.
    pub address: Address,
    /// Name of the export; empty for the server's default.
    pub export: String,
    /// Refuse writes, even if the server allows them.
    pub read_only: bool,
    /// Maximum connections and so queues; 0: as many as the server allows. A server without
    /// `CAN_MULTI_CONN` gets one; a larger number is then an error.
    pub connections: u32,
    /// Requests in flight on each connection: 1 to [`MAX_QUEUE_DEPTH`].
    pub queue_depth: u32,
    /// Timeout of connecting and handshake together, in milliseconds.
    pub timeout_ms: u64,
    /// Time that requests wait for a new connection when the server vanishes, in seconds; 0: they
    /// fail at once, and the queue does not reconnect.
    pub reconnect_delay_s: u32,
    /// The richest form of replies to ask for.
    pub replies: Replies,
    /// TLS. `Some`: the server is refused without it.
    pub tls: Option<Tls>,
}

/// The trusted servers, and the client's identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tls {
    /// Certificates or a key, already loaded: every connection of the session uses them.
    pub client: Client,
    /// The server name that its certificate must have, if it differs from the host connected to.
    /// For a Unix socket the default is `localhost`.
    pub host: Option<String>,
    /// The sources of `client`.
    sources: Sources,
}

/// Where certificates or keys are.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sources {
    certificates: Option<PathBuf>,
    keys: Option<PathBuf>,
    username: Option<String>,
}

impl Sources {
    fn load(&self) -> Result<Client, String> {
        let client = match (&self.certificates, &self.keys) {
            (Some(_), Some(_)) => return Err("certificates and keys exclude each other".into()),
            (_, None) if self.username.is_some() => return Err("a user name requires a file of keys".into()),
            (Some(directory), None) => Client::with_certificates(directory),
            (None, Some(file)) => Client::with_key(file, self.username.as_deref()),
            (None, None) => Client::with_system_authorities(),
        };
        client.map_err(|error| error.to_string())
    }
}

impl Tls {
    /// Loads a directory of certificates, or a key file and the key's name; `host` is the server's
    /// name. Without certificates and keys, the system's authorities are trusted.
    ///
    /// # Errors
    /// The file and the reason.
    pub fn new(
        certificates: Option<&Path>,
        keys: Option<&Path>,
        username: Option<&str>,
        host: Option<String>,
    ) -> Result<Tls, String> {
        let [certificates, keys] = [certificates, keys].map(|path| path.map(Path::to_owned));
        let sources = Sources { certificates, keys, username: username.map(str::to_owned) };
        Ok(Tls { client: sources.load()?, host, sources })
    }

    /// Loads the certificates or keys again, which may have changed. The system's authorities are
    /// read once.
    ///
    /// # Errors
    /// The file and the reason.
    pub(super) fn renewed(&self) -> Result<Tls, String> {
        let Sources { certificates: None, keys: None, .. } = &self.sources else {
            return Ok(Tls { client: self.sources.load()?, ..self.clone() });
        };
        Ok(self.clone())
    }

    /// Keeps the certificates or keys in a sandbox.
    #[cfg(feature = "sandbox")]
    pub(super) fn keep(&self, profile: &mut sandbox::Profile) {
        let Sources { certificates, keys, .. } = &self.sources;
        certificates.iter().chain(keys).for_each(|path| profile.allow_settings(path));
    }
}

impl Options {
    /// The defaults for the default export of the server at `address`.
    pub fn new(address: Address) -> Options {
        Options {
            address,
            export: String::new(),
            read_only: false,
            connections: 0,
            queue_depth: 128,
            timeout_ms: 10_000,
            reconnect_delay_s: 0,
            replies: Replies::Extended,
            tls: None,
        }
    }

    /// The defaults for the export that `uri` names: `nbd://HOST[:PORT]/EXPORT` or
    /// `nbd+unix:///EXPORT?socket=PATH`.
    ///
    /// # Errors
    /// A sentence that says what is wrong with it.
    pub fn from_uri(uri: &str) -> Result<Options, String> {
        parse(uri).map_err(|why| format!("{uri}: {why}"))
    }

    /// A TLS session with the server, if TLS is configured.
    ///
    /// # Errors
    /// When the server's name is invalid.
    pub(super) fn session(&self) -> Result<Option<tls::Session>, StreamError> {
        let Some(Tls { client, host, .. }) = &self.tls else { return Ok(None) };
        let name = match (host, &self.address) {
            (Some(host), _) | (None, Address::Tcp { host, .. }) => host,
            (None, Address::Unix(_)) => "localhost",
        };
        Ok(Some(client.session(name)?))
    }

    /// A name for people: the export as a URI.
    pub fn name(&self) -> String {
        let s = if self.tls.is_some() { "s" } else { "" };
        match &self.address {
            address @ Address::Tcp { .. } => format!("nbd{s}://{address}/{}", self.export),
            address @ Address::Unix(_) => format!("nbd{s}+unix:///{}?socket={address}", self.export),
        }
    }

    /// Checks the options.
    pub(super) fn check(&self) -> Result<(), String> {
        if !(1..=MAX_QUEUE_DEPTH).contains(&self.queue_depth) {
            return Err(format!("queue depth {}: want 1 to {MAX_QUEUE_DEPTH}", self.queue_depth));
        }
        if self.connections > MAX_CONNECTIONS {
            return Err(format!("{} connections: want at most {MAX_CONNECTIONS}", self.connections));
        }
        if self.timeout_ms == 0 {
            return Err("timeout of 0 ms: want at least 1".into());
        }
        if self.export.len() > MAX_NAME || self.export.contains('\0') {
            return Err(format!("export {:?}: at most {MAX_NAME} bytes, none of them zero", self.export));
        }
        Ok(())
    }
}

fn parse(uri: &str) -> Result<Options, String> {
    let (scheme, rest) = uri
        .split_once("://")
        .ok_or("an NBD URI is nbd://HOST[:PORT]/EXPORT or nbd+unix:///EXPORT?socket=PATH")?;
    let rest = rest.split_once('#').map_or(rest, |(rest, _)| rest);
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, export) = rest.split_once('/').unwrap_or((rest, ""));
    let (transport, is_secure) = match scheme {
        "nbd" => ("nbd", false),
        "nbds" => ("nbd", true),
        "nbd+unix" => ("nbd+unix", false),
        "nbds+unix" => ("nbd+unix", true),
        _ => return Err(format!("{scheme:?} is not an NBD scheme (nbd, nbds, nbd+unix and nbds+unix are)")),
    };
    let mut socket = None;
    let (user, authority) =
        authority.rsplit_once('@').map_or((None, authority), |(user, host)| (Some(user), host));
    let mut username = user.filter(|_| is_secure).map(text).transpose()?;
    let (mut certificates, mut keys, mut host) = (None, None, None);
    for part in query.split('&').filter(|part| !part.is_empty()) {
        match part.split_once('=').unwrap_or((part, "")) {
            ("socket", path) => socket = Some(decode(path)?),
            (key, _) if key.starts_with("tls-") && !is_secure => {
                return Err(format!("{key} is only valid for nbds:// and nbds+unix://"));
            }
            ("tls-certificates", path) => certificates = Some(path_of(path)?),
            ("tls-psk-file", path) => keys = Some(path_of(path)?),
            ("tls-username", name) => username = Some(text(name)?),
            ("tls-hostname", name) => host = Some(text(name)?),
            (key, _) => return Err(format!("{key} is not a parameter of an NBD URI (socket is)")),
        }
    }
    let address = match (transport, socket) {
        ("nbd", None) => tcp(authority)?,
        ("nbd", Some(_)) => return Err("socket= is only valid for nbd+unix://".into()),
        ("nbd+unix", Some(path)) if !path.is_empty() && authority.is_empty() => {
            Address::Unix(PathBuf::from(OsString::from_vec(path)))
        }
        ("nbd+unix", Some(path)) if !path.is_empty() => {
            return Err(format!(
                "nbd+unix:// takes no host ({authority:?}); three slashes come before the export"
            ));
        }
        _ => return Err("nbd+unix:// needs ?socket=PATH".into()),
    };
    let export = String::from_utf8(decode(export)?).map_err(|_| "the export's name is not UTF-8")?;
    let tls = match is_secure {
        true => Some(Tls::new(certificates.as_deref(), keys.as_deref(), username.as_deref(), host)?),
        false => None,
    };
    Ok(Options { export, tls, ..Options::new(address) })
}

fn path_of(text: &str) -> Result<PathBuf, String> {
    Ok(PathBuf::from(OsString::from_vec(decode(text)?)))
}

fn text(text: &str) -> Result<String, String> {
    String::from_utf8(decode(text)?).map_err(|_| format!("{text:?} is not UTF-8"))
}

fn tcp(authority: &str) -> Result<Address, String> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']').ok_or("an IPv6 address ends with ]")?;
            (host, port)
        }
        None => authority.find(':').map_or((authority, ""), |at| authority.split_at(at)),
    };
    let host = String::from_utf8(decode(host)?).map_err(|_| "the host's name is not UTF-8")?;
    if host.is_empty() || host.contains('\0') {
        return Err("nbd:// needs a host".into());
    }
    let port = match port {
        "" | ":" => DEFAULT_PORT,
        port => match port.strip_prefix(':').and_then(|digits| digits.parse().ok()) {
            Some(port) if port != 0 => port,
            _ => return Err(format!("{port:?} is not a valid port")),
        },
    };
    Ok(Address::Tcp { host, port })
}

/// Decodes `%XX`.
fn decode(text: &str) -> Result<Vec<u8>, String> {
    let (mut bytes, mut rest) = (Vec::with_capacity(text.len()), text.as_bytes());
    while let Some((first, tail)) = rest.split_first() {
        rest = tail;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let digit = |at: usize| tail.get(at).and_then(|byte| char::from(*byte).to_digit(16));
        let (Some(high), Some(low)) = (digit(0), digit(1)) else {
            return Err(format!("{text:?} has a % without two hexadecimal digits"));
        };
        bytes.push((high * 16 + low) as u8);
        rest = &tail[2..];
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp_uri(uri: &str) -> (String, u16, String) {
        let options = Options::from_uri(uri).unwrap();
        let Address::Tcp { host, port } = options.address else { panic!("{uri}: {:?}", options.address) };
        (host, port, options.export)
    }

    #[test]
    fn uris_name_host_port_and_export() {
        let cases = [
            ("nbd://example.com/disk", "example.com", 10809, "disk"),
            ("nbd://example.com", "example.com", 10809, ""),
            ("nbd://example.com:1234/", "example.com", 1234, ""),
            ("nbd://example.com//disk", "example.com", 10809, "/disk"),
            ("nbd://example.com/hello%20world", "example.com", 10809, "hello world"),
            ("nbd://user@127.0.0.1:10809/a/b", "127.0.0.1", 10809, "a/b"),
            ("nbd://[::1]:99/x", "::1", 99, "x"),
            ("nbd://[fe80::1]", "fe80::1", 10809, ""),
        ];
        for (uri, host, port, export) in cases {
            assert_eq!(tcp_uri(uri), (host.into(), port, export.into()), "{uri}");
        }
        let name = Options::from_uri("nbd://[::1]:99/x").unwrap().name();
        assert_eq!(name, "nbd://[::1]:99/x");
    }

    #[test]
    fn uris_name_a_socket() {
        let options = Options::from_uri("nbd+unix:///disk?socket=/run/a%20b").unwrap();
        assert_eq!((options.address, &*options.export), (Address::Unix("/run/a b".into()), "disk"));
        let options = Options::from_uri("nbd+unix:///?socket=%00name").unwrap();
        assert_eq!(options.name(), "nbd+unix:///?socket=@name");
        assert_eq!((options.address, &*options.export), (Address::Unix("\0name".into()), ""));
    }

    #[test]
    fn a_uri_that_makes_no_sense_is_an_error_that_names_it() {
        let cases = [
            ("disk.img", "nbd://HOST"),
            ("http://a/b", "\"http\" is not an NBD scheme"),
            ("nbds://a/b?tls-certificates=/nowhere", "/nowhere/ca-cert.pem: No such file"),
            ("nbds://a/b?tls-psk-file=/nowhere", "/nowhere: No such file"),
            ("nbds://a/b?tls-psk-file=/a&tls-certificates=/b", "exclude each other"),
            ("nbds://user@a/b?tls-certificates=/b", "requires a file of keys"),
            ("nbds://a/b?tls-type=psk", "tls-type is not a parameter"),
            ("nbd://a/b?tls-psk-file=/a", "tls-psk-file is only valid for nbds"),
            ("nbd:///b", "needs a host"),
            ("nbd://a:0/b", "\":0\" is not a valid port"),
            ("nbd://a:70000/b", "is not a valid port"),
            ("nbd://[::1/b", "ends with ]"),
            ("nbd://a/%zz", "two hexadecimal digits"),
            ("nbd://a/%f", "two hexadecimal digits"),
            ("nbd://a/%ff", "not UTF-8"),
            ("nbd://a/b?socket=/x", "is only valid for nbd+unix"),
            ("nbd+unix:///b", "needs ?socket=PATH"),
            ("nbd+unix:///b?socket=", "needs ?socket=PATH"),
            ("nbd+unix://host/b?socket=/x", "takes no host"),
            ("nbd+unix:///b?path=/x", "path is not a parameter"),
        ];
        for (uri, why) in cases {
            let error = Options::from_uri(uri).unwrap_err();
            assert!(error.starts_with(uri) && error.contains(why), "{error}");
        }
    }

    #[test]
    fn options_out_of_range_are_errors_that_name_the_value() {
        let good = Options::from_uri("nbd://a").unwrap();
        assert_eq!(good.check(), Ok(()));
        let cases = [
            (Options { queue_depth: 0, ..good.clone() }, "queue depth 0"),
            (Options { queue_depth: 5000, ..good.clone() }, "queue depth 5000"),
            (Options { connections: 65, ..good.clone() }, "65 connections"),
            (Options { timeout_ms: 0, ..good.clone() }, "0 ms"),
            (Options { export: "x\0".into(), ..good.clone() }, "none of them zero"),
            (Options { export: "x".repeat(5000), ..good }, "at most 4096"),
        ];
        for (options, why) in cases {
            assert!(options.check().unwrap_err().contains(why), "{options:?}");
        }
    }
}
