//! The storage hosts of a cluster, from the file of `--backends`.

use crate::ids::is_zone;
use client::{Access, Client};
use serde::Deserialize;
use std::collections::HashSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Limit of a request to a daemon. The orchestrator repeats a call that was not answered by then.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(50);
/// The longest token or certificate file, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// Why the configuration cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file is no TOML, or lacks a key or has one too many.
    #[error("{}: {message}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The line and the problem.
        message: String,
    },
    /// A value is wrong.
    #[error("backend {backend:?}: {message}")]
    Value {
        /// Name of the backend.
        backend: String,
        /// The key, the value and the problem.
        message: String,
    },
    /// The token of a backend cannot be read.
    #[error("backend {backend:?}: token-file: {source}")]
    Token {
        /// Name of the backend.
        backend: String,
        /// The file and the problem.
        source: secrets::Error,
    },
}

/// A daemon whose volumes the controller gives out.
pub struct Backend {
    /// Name, a part of the identities of its volumes.
    pub name: String,
    /// Its API.
    pub client: Client,
    /// The array or device for volumes whose storage class names none.
    pub backing: Option<String>,
    /// The addresses of its exports.
    pub listener: Listener,
    /// The zone whose nodes reach it; none: every node does.
    pub zone: Option<String>,
    /// The directory of the storage host for reservations of nodes, an absolute path.
    pub reservations: Option<String>,
}

/// The place at which a backend's exports listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listener {
    /// An address with a port for each export.
    Ports {
        /// Address that nodes connect to, with the first port.
        first: SocketAddr,
        /// The last port.
        last: u16,
    },
    /// A portal of the daemon, which all exports share.
    Portal {
        /// Name of the portal.
        name: String,
        /// Addresses that nodes connect to.
        addresses: Vec<SocketAddr>,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    backend: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Entry {
    name: String,
    url: String,
    token_file: Option<PathBuf>,
    ca_file: Option<PathBuf>,
    backing: Option<String>,
    listen: Option<String>,
    portal: Option<String>,
    #[serde(default)]
    addresses: Vec<SocketAddr>,
    zone: Option<String>,
    reservations: Option<String>,
}

/// Reads the file of `--backends`.
///
/// # Errors
/// See [`ConfigError`].
pub fn read(path: &Path) -> Result<Vec<Backend>, ConfigError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    let file: File = toml::from_str(&text)
        .map_err(|error| ConfigError::Syntax { path: path.to_owned(), message: error.to_string() })?;
    let mut names = HashSet::new();
    if file.backend.is_empty() {
        return Err(ConfigError::Syntax { path: path.to_owned(), message: "no [[backend]]".into() });
    }
    file.backend
        .into_iter()
        .map(|entry| {
            let is_new = names.insert(entry.name.clone());
            let wrong = |message: String| ConfigError::Value { backend: entry.name.clone(), message };
            let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
            if entry.name.is_empty() || entry.name.len() > 63 || !entry.name.bytes().all(is_name) {
                return Err(wrong("name: want 1 to 63 letters, digits, '.', '_' and '-'".into()));
            }
            match is_new {
                true => open(entry),
                false => Err(wrong("two backends have this name".into())),
            }
        })
        .collect()
}

fn open(entry: Entry) -> Result<Backend, ConfigError> {
    let Entry { name, url, token_file, ca_file, backing, listen, portal, addresses, zone, reservations } =
        entry;
    let wrong = |message: String| ConfigError::Value { backend: name.clone(), message };
    let listener = match (listen, portal) {
        (Some(listen), None) if addresses.is_empty() => ports(&listen).map_err(wrong)?,
        (Some(_), None) => return Err(wrong("addresses belong to portal, not to listen".into())),
        (None, Some(_)) if addresses.is_empty() => {
            return Err(wrong("portal: addresses = [\"ADDR:PORT\", …] is missing".into()));
        }
        (None, Some(name)) => Listener::Portal { name, addresses },
        (Some(_), Some(_)) | (None, None) => return Err(wrong("want either listen or portal".into())),
    };
    if let Some(zone) = zone.as_deref().filter(|zone| !is_zone(zone)) {
        return Err(wrong(format!("zone={zone:?}: want a value of a label of Kubernetes")));
    }
    if let Some(directory) = reservations.as_deref().filter(|directory| !directory.starts_with('/')) {
        return Err(wrong(format!("reservations={directory:?}: want an absolute path")));
    }
    let client = match url.strip_prefix("unix://") {
        Some(socket) if token_file.is_none() && ca_file.is_none() => {
            Client::at_socket(Path::new(socket), Some(REQUEST_TIMEOUT))
        }
        Some(_) => return Err(wrong(format!("{url}: token-file and ca-file are for TCP"))),
        None => {
            let token = token_file.map(|path| secrets::read_text(&path, MAX_FILE)).transpose();
            let token = token.map_err(|source| ConfigError::Token { backend: name.clone(), source })?;
            let authorities = ca_file.map(|path| {
                std::fs::read(&path).map_err(|error| wrong(format!("ca-file: {}: {error}", path.display())))
            });
            let access = Access {
                token: token.map(|token| token.trim().to_owned()),
                authorities: authorities.transpose()?,
            };
            Client::at_address(&url, access, Some(REQUEST_TIMEOUT))
        }
    };
    let client = client.map_err(|error| wrong(error.to_string()))?;
    Ok(Backend { name, client, backing, listener, zone, reservations })
}

/// Parses `ADDR:PORT` or `ADDR:FIRST-LAST`.
fn ports(text: &str) -> Result<Listener, String> {
    let want = || format!("listen={text}: want ADDR:FIRST-LAST, with an address that nodes connect to");
    let (first, last) = match text.rsplit_once('-') {
        Some((first, last)) => (first, Some(last.parse::<u16>().map_err(|_| want())?)),
        None => (text, None),
    };
    let first: SocketAddr = first.parse().map_err(|_| want())?;
    let last = last.unwrap_or(first.port());
    if first.port() == 0 {
        // The daemon's next start would choose another port, and nodes would not find it.
        Err(format!("listen={text}: want ports from 1 on, since an export keeps its port"))
    } else if first.ip().is_unspecified() || last < first.port() {
        Err(want())
    } else {
        Ok(Listener::Ports { first, last })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Vec<Backend>, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("backends.toml");
        std::fs::write(&path, text).unwrap();
        read(&path).map_err(|error| error.to_string())
    }

    fn refusal(text: &str) -> String {
        parse(text).map(drop).unwrap_err()
    }

    const HEAD: &str = "[[backend]]\nname = 'rack1'\nurl = 'unix:///run/freestone/freestoned.sock'\n";

    #[test]
    fn a_backend_has_ports_or_a_portal() {
        let backends = parse(&format!("{HEAD}listen = '10.0.0.5:4420-4499'\nbacking = 'data'")).unwrap();
        let first = "10.0.0.5:4420".parse().unwrap();
        assert_eq!(backends[0].listener, Listener::Ports { first, last: 4499 });
        assert_eq!(backends[0].backing.as_deref(), Some("data"));
        let backends = parse(&format!("{HEAD}portal = 'p'\naddresses = ['[fd00::1]:4420']")).unwrap();
        let addresses = vec!["[fd00::1]:4420".parse().unwrap()];
        assert_eq!(backends[0].listener, Listener::Portal { name: "p".into(), addresses });
    }

    #[test]
    fn mistakes_are_named() {
        let cases = [
            ("", "no [[backend]]"),
            (HEAD, "either listen or portal"),
            (&format!("{HEAD}listen = '10.0.0.5:0'"), "want ports from 1 on"),
            (&format!("{HEAD}listen = '0.0.0.0:1-2'"), "listen=0.0.0.0:1-2"),
            (&format!("{HEAD}listen = '10.0.0.5:9-8'"), "listen=10.0.0.5:9-8"),
            (&format!("{HEAD}portal = 'p'"), "addresses"),
            (&format!("{HEAD}colour = 'red'"), "colour"),
            (&format!("{HEAD}listen = '10.0.0.5:1'\nzone = 'a/b'"), "zone=\"a/b\""),
            (&format!("{HEAD}listen = '10.0.0.5:1'\nreservations = 'r'"), "reservations=\"r\""),
            (&format!("{HEAD}listen = '10.0.0.5:1'\n{HEAD}listen = '10.0.0.5:2'"), "two backends"),
            (&HEAD.replace("rack1", "a/b"), "name: want"),
            (&format!("{}listen = '10.0.0.5:1'", HEAD.replace("unix", "ftp")), "ftp://"),
        ];
        for (text, part) in cases {
            let refusal = refusal(text);
            assert!(refusal.contains(part), "{refusal}");
        }
    }

    #[test]
    fn a_token_that_others_can_read_is_refused_and_not_shown() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let token = folder.path().join("token");
        std::fs::write(&token, "c0ffee").unwrap();
        std::fs::set_permissions(&token, PermissionsExt::from_mode(0o644)).unwrap();
        let text = format!(
            "[[backend]]\nname = 'a'\nurl = 'http://127.0.0.1:1'\ntoken-file = '{}'\nlisten = '127.0.0.1:1'",
            token.display()
        );
        let refusal = refusal(&text);
        assert!(refusal.contains("token-file") && !refusal.contains("c0ffee"), "{refusal}");
    }
}
