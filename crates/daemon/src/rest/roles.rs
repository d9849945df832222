//! Roles, and the one table of the operations that each may request.
//!
//! A request is judged twice. Its operation is judged before its body is read ([`super::judge`]).
//! Its body is judged before it is handled ([`super::judged::Judged::check`], by
//! [`super::request::Body`]): `force`, devices, paths and listening sockets take a role of their
//! own in any operation ([`Ask`]). Both checks read the request alone, so a refusal reveals nothing
//! of the file system. Rights that depend on the daemon's objects are checked within the change, by
//! [`Authority`].
//!
//! The document shows the table as `x-roles`, and a test calls every operation with every role.

use super::answer::Failure;
use crate::engine::Authority;
use axum::extract::{FromRequestParts, Request};
use axum::http::request::Parts;
use axum::http::{Method, StatusCode};
use serde_json::{Map, Value, json};
use std::convert::Infallible;
use std::sync::Arc;
use utoipa::openapi::{OpenApi, extensions::ExtensionsBuilder};

pub use api::Role;

use Role::{Admin, Operator, Provisioner, ReadOnly};

/// Nothing of the daemon is shown.
const ANYBODY: &[Role] = Role::ALL;
/// A provisioner sees its own.
const SEES_OWN: &[Role] = Role::ALL;
/// A provisioner sees how large its volumes can be, and nothing of the volumes of others.
const SEES_ROOM: &[Role] = Role::ALL;
const READS: &[Role] = &[ReadOnly, Operator, Admin];
/// A provisioner makes and changes its own.
const MAKES: &[Role] = &[Provisioner, Operator, Admin];
/// A provisioner removes its own.
const REMOVES: &[Role] = &[Provisioner, Admin];
const OPERATES: &[Role] = &[Operator, Admin];
pub(super) const ADMINISTERS: &[Role] = &[Admin];

/// Something that a request asks for beyond its operation, and that takes a role of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// `force`: content may be overwritten.
    Force,
    /// A device that an array does not know, or an export of a whole device or array.
    RawDevice,
    /// An option that names a path outside the daemon's own directories.
    Path,
    /// An export that listens beyond loopback addresses and does not require TLS.
    OpenListener,
    /// Groups, guaranteed minima, names and labels of volumes; processors, data planes and ANA
    /// states of exports.
    Settings,
}

impl Ask {
    /// Everything that can be asked for.
    pub const ALL: [Ask; 5] = [Ask::Force, Ask::RawDevice, Ask::Path, Ask::OpenListener, Ask::Settings];

    /// The word for it.
    pub const fn name(self) -> &'static str {
        match self {
            Ask::Force => "force",
            Ask::RawDevice => "raw-device",
            Ask::Path => "path",
            Ask::OpenListener => "open-listener",
            Ask::Settings => "settings",
        }
    }

    /// The roles that may ask for it, wherever that is.
    pub const fn roles(self) -> &'static [Role] {
        match self {
            Ask::Force | Ask::RawDevice | Ask::Path | Ask::OpenListener => ADMINISTERS,
            Ask::Settings => OPERATES,
        }
    }

    /// Its meaning, for the document.
    const fn about(self) -> &'static str {
        match self {
            Ask::Force => "`force` is true: content may be overwritten",
            Ask::RawDevice => {
                "a device that an array does not know yet, or an export of a whole device or array"
            }
            Ask::Path => {
                "an export option that names a keyring or a path; free are files below `keys`, directories below \
                 `reservations` in the state directory, the socket `NAME.sock` in the runtime directory"
            }
            Ask::OpenListener => {
                "an export that listens beyond loopback addresses, written as numbers, and does not require TLS"
            }
            Ask::Settings => {
                "a volume's new name, group or guaranteed minimum, an export's processors, data plane or ANA states, or a \
                 label other than the token's name"
            }
        }
    }
}

/// An operation of the API.
#[derive(Debug)]
pub struct Row {
    /// Its method.
    pub method: Method,
    /// Its path, as the router has it.
    pub path: &'static str,
    /// The roles that may ask for it.
    pub roles: &'static [Role],
    /// Rights that a request may need beyond that.
    pub asks: &'static [Ask],
}

const fn row(method: Method, path: &'static str, roles: &'static [Role], asks: &'static [Ask]) -> Row {
    Row { method, path, roles, asks }
}

/// Every operation. An operation that is not listed takes the role admin.
pub const MATRIX: &[Row] = &[
    row(Method::GET, "/", ANYBODY, &[]),
    row(Method::GET, "/web/{name}", ANYBODY, &[]),
    row(Method::GET, "/v1/openapi.json", ANYBODY, &[]),
    row(Method::GET, "/metrics", READS, &[]),
    row(Method::GET, "/v1/disks", READS, &[]),
    row(Method::GET, "/v1/devices", READS, &[]),
    row(Method::POST, "/v1/devices", ADMINISTERS, &[]),
    row(Method::GET, "/v1/devices/{name}", READS, &[]),
    row(Method::PATCH, "/v1/devices/{name}", ADMINISTERS, &[]),
    row(Method::DELETE, "/v1/devices/{name}", ADMINISTERS, &[]),
    row(Method::GET, "/v1/devices/{name}/snapshots", READS, &[]),
    row(Method::POST, "/v1/devices/{name}/snapshots", OPERATES, &[]),
    row(Method::DELETE, "/v1/devices/{name}/snapshots/{snapshot}", ADMINISTERS, &[]),
    row(Method::POST, "/v1/devices/{name}/stream", OPERATES, &[]),
    row(Method::POST, "/v1/devices/{name}/commit", ADMINISTERS, &[]),
    row(Method::GET, "/v1/arrays", READS, &[]),
    row(Method::POST, "/v1/arrays", ADMINISTERS, &[]),
    row(Method::GET, "/v1/arrays/{name}", READS, &[]),
    row(Method::DELETE, "/v1/arrays/{name}", ADMINISTERS, &[]),
    row(Method::GET, "/v1/arrays/{name}/members", READS, &[]),
    row(Method::POST, "/v1/arrays/{name}/actions", OPERATES, &[Ask::Force, Ask::RawDevice]),
    row(Method::GET, "/v1/volumes", SEES_OWN, &[]),
    row(Method::POST, "/v1/volumes", MAKES, &[Ask::Force, Ask::Settings]),
    row(Method::GET, "/v1/volumes/{name}", SEES_OWN, &[]),
    row(Method::PATCH, "/v1/volumes/{name}", MAKES, &[Ask::Settings]),
    row(Method::DELETE, "/v1/volumes/{name}", REMOVES, &[]),
    row(Method::POST, "/v1/volumes/{name}/move", OPERATES, &[Ask::Force]),
    row(Method::GET, "/v1/pools/{backing}", READS, &[]),
    row(Method::GET, "/v1/pools/{backing}/capacity", SEES_ROOM, &[]),
    row(Method::POST, "/v1/pools/{backing}/actions", OPERATES, &[]),
    row(Method::GET, "/v1/groups", READS, &[]),
    row(Method::PUT, "/v1/groups/{name}", OPERATES, &[]),
    row(Method::DELETE, "/v1/groups/{name}", OPERATES, &[]),
    row(Method::GET, "/v1/portals", READS, &[]),
    row(Method::POST, "/v1/portals", ADMINISTERS, &[]),
    row(Method::GET, "/v1/portals/{name}", READS, &[]),
    row(Method::DELETE, "/v1/portals/{name}", ADMINISTERS, &[]),
    row(Method::GET, "/v1/exports", SEES_OWN, &[]),
    row(Method::POST, "/v1/exports", MAKES, &[Ask::RawDevice, Ask::Path, Ask::OpenListener, Ask::Settings]),
    row(Method::GET, "/v1/exports/{name}", SEES_OWN, &[]),
    row(Method::PATCH, "/v1/exports/{name}", MAKES, &[Ask::Settings]),
    row(Method::DELETE, "/v1/exports/{name}", MAKES, &[]),
    row(Method::GET, "/v1/exports/{name}/attach", SEES_OWN, &[]),
    row(Method::GET, "/v1/exports/{name}/clients", SEES_OWN, &[]),
    row(Method::GET, "/v1/jobs", READS, &[]),
    row(Method::GET, "/v1/jobs/{id}", READS, &[]),
    row(Method::PATCH, "/v1/jobs/{id}", OPERATES, &[]),
    row(Method::DELETE, "/v1/jobs/{id}", OPERATES, &[]),
    row(Method::GET, "/v1/system", READS, &[]),
    row(Method::GET, "/v1/events", READS, &[]),
    row(Method::GET, "/v1/health", READS, &[]),
    row(Method::GET, "/v1/events/stream", READS, &[]),
    row(Method::GET, "/v1/samples", READS, &[]),
    row(Method::GET, "/v1/history", READS, &[]),
];

pub(super) fn find(method: &Method, path: &str) -> Option<&'static Row> {
    let method = if method == Method::HEAD { &Method::GET } else { method };
    MATRIX.iter().find(|row| row.method == *method && row.path == path)
}

/// The sender of a request.
#[derive(Clone, Debug)]
pub struct Caller {
    /// For the log.
    pub who: Arc<str>,
    /// The user of the Unix socket, or role and name of the token: the same for all requests of
    /// a caller.
    pub identity: Arc<str>,
    /// Its role.
    pub role: Role,
    /// The name of its token, which a provisioner's objects carry as label.
    pub label: Arc<str>,
}

impl Caller {
    /// A caller that no listener has named: it may see what every role may see.
    fn unknown() -> Caller {
        let who: Arc<str> = "an unknown caller".into();
        Caller { identity: who.clone(), who, role: ReadOnly, label: "".into() }
    }

    /// The sender of this request.
    pub fn of(request: &Request) -> Caller {
        request.extensions().get().cloned().unwrap_or_else(Caller::unknown)
    }

    /// The authority of its changes.
    pub fn authority(&self) -> Authority {
        match self.role {
            Admin => Authority::Full,
            Operator | ReadOnly => Authority::Operator,
            Provisioner => Authority::Label(self.label.to_string()),
        }
    }

    pub(super) fn refuse(&self, what: &str, roles: &[Role]) -> Failure {
        let roles: Vec<&str> = roles.iter().map(|role| role.name()).collect();
        let detail =
            format!("{}: role {}: {what} takes the role {}", self.who, self.role.name(), roles.join(" or "));
        Failure::new(StatusCode::FORBIDDEN, "forbidden", "The role may not do that", detail)
    }
}

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Caller, Infallible> {
        Ok(parts.extensions.get().cloned().unwrap_or_else(Caller::unknown))
    }
}

/// Shows the table in the document.
pub fn describe(document: &mut OpenApi) {
    let names = |roles: &[Role]| json!(roles.iter().map(|role| role.name()).collect::<Vec<_>>());
    for row in MATRIX {
        let Some(item) = document.paths.paths.get_mut(row.path) else { continue };
        let operation = match row.method {
            Method::POST => &mut item.post,
            Method::PUT => &mut item.put,
            Method::PATCH => &mut item.patch,
            Method::DELETE => &mut item.delete,
            _ => &mut item.get,
        };
        let Some(operation) = operation else { continue };
        let mut shown = Map::from_iter([("operation".to_owned(), names(row.roles))]);
        shown.extend(row.asks.iter().map(|ask| (ask.name().to_owned(), names(ask.roles()))));
        let extension = ExtensionsBuilder::new().add("x-roles", Value::Object(shown)).build();
        operation.extensions.get_or_insert_default().merge(extension);
    }
    let mut text = document.info.description.take().unwrap_or_default();
    text += "\n\nRoles: `x-roles` lists the roles that may ask for an `operation`, and the roles for what a request may \
             ask for beyond it:\n\n";
    for ask in Ask::ALL {
        text += &format!("- `{}`: {}.\n", ask.name(), ask.about());
    }
    text += "\nA `provisioner` sees, changes and removes only volumes and exports whose `label` is its token's name.";
    document.info.description = Some(text);
}
