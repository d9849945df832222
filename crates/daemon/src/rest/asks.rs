//! Rights that bodies of requests need beyond their operation, by their text alone.

use super::roles::Ask;
use crate::engine::Options;
use api::{
    ArrayAction, DeviceChange, ExportChange, JobChange, NewArray, NewDevice, NewExport, NewImageSnapshot,
    NewPortal, NewVolume, PoolAction, Qos, VolumeChange, VolumeMove,
};
use hosting::export::KINDS;
use std::net::SocketAddr;
use std::path::{Component, Path, PathBuf};

/// Something that a body asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// The kind.
    pub ask: Ask,
    /// The field or option, with its value, for the refusal.
    pub what: String,
}

impl Asked {
    fn new(ask: Ask, what: impl Into<String>) -> Asked {
        Asked { ask, what: what.into() }
    }

    /// A label for a volume or an export.
    pub fn label(label: &str) -> Asked {
        Asked::new(Ask::Settings, format!("label {label}"))
    }
}

/// Directories that exports may name for every role.
#[derive(Clone, Debug)]
pub struct OwnPlaces {
    /// Sockets of exports.
    runtime: PathBuf,
    /// Keys and certificates, which the administrator puts there.
    keys: PathBuf,
    /// Reservations of NVMe hosts.
    reservations: PathBuf,
}

impl OwnPlaces {
    /// Of a daemon with these options.
    pub fn of(options: &Options) -> OwnPlaces {
        let state = std::path::absolute(&options.state_dir).unwrap_or_else(|_| options.state_dir.clone());
        OwnPlaces {
            runtime: options.runtime_dir.clone(),
            keys: state.join("keys"),
            reservations: state.join("reservations"),
        }
    }

    /// Whether an export called `name` may name the path `value` with its option `key` for every
    /// role.
    fn has(&self, name: &str, key: &str, value: &str) -> bool {
        match key {
            // The one that it gets without the option.
            "socket" => Path::new(value) == self.runtime.join(format!("{name}.sock")),
            "reservations" => is_within(&self.reservations, value),
            "tls-certificates" | "tls-psk" | "tls-keys" | "auth-keys" => is_within(&self.keys, value),
            _ => false,
        }
    }
}

/// Whether a path is below a directory, by its text.
fn is_within(directory: &Path, value: &str) -> bool {
    let Ok(rest) = Path::new(value).strip_prefix(directory) else { return false };
    let mut parts = rest.components().peekable();
    parts.peek().is_some() && parts.all(|part| matches!(part, Component::Normal(_)))
}

/// The body of a request, as it is judged.
pub trait Asks {
    /// The rights that it needs beyond its operation.
    fn asks(&self, own: &OwnPlaces) -> Vec<Asked>;
}

/// Bodies that ask for nothing beyond their operation.
macro_rules! ask_for_nothing {
    ($($body:ty),*) => {$(
        impl Asks for $body {
            fn asks(&self, _: &OwnPlaces) -> Vec<Asked> {
                Vec::new()
            }
        }
    )*};
}

// Making devices, arrays and portals takes the role admin as it is. An export at a portal asks for
// no listener: the administrator has opened the portal's addresses to all of its exports.
ask_for_nothing!(NewDevice, NewImageSnapshot, DeviceChange, NewArray, NewPortal, PoolAction, Qos, JobChange);

fn force(is_asked: bool) -> Option<Asked> {
    is_asked.then(|| Asked::new(Ask::Force, "force"))
}

impl Asks for ArrayAction {
    fn asks(&self, _: &OwnPlaces) -> Vec<Asked> {
        let device = |name: &String| Asked::new(Ask::RawDevice, format!("using the device {name}"));
        match self {
            ArrayAction::Add { devices, force: is_forced, global: _ } => {
                devices.iter().take(1).map(device).chain(force(*is_forced)).collect()
            }
            ArrayAction::Replace { device: name, force: is_forced, member: _ } => {
                [device(name)].into_iter().chain(force(*is_forced)).collect()
            }
            // The array knows which devices were its own: that is judged within the change.
            ArrayAction::ReAdd { devices: _ }
            | ArrayAction::Fail { .. }
            | ArrayAction::Remove { .. }
            | ArrayAction::Grow { .. }
            | ArrayAction::Scrub { .. }
            | ArrayAction::Set { .. }
            | ArrayAction::Pause
            | ArrayAction::Resume
            | ArrayAction::Cancel => Vec::new(),
        }
    }
}

fn setting(field: &str, is_asked: bool) -> Option<Asked> {
    is_asked.then(|| Asked::new(Ask::Settings, field))
}

impl Asks for NewVolume {
    fn asks(&self, _: &OwnPlaces) -> Vec<Asked> {
        // The authority over the source is judged within the change.
        let NewVolume {
            group,
            min_qos,
            force: is_forced,
            label,
            name: _,
            backing: _,
            size_bytes: _,
            from: _,
            pivot: _,
            qos: _,
            labels: _,
        } = self;
        let settings = [
            setting("group", group.is_some()),
            setting("min_qos", *min_qos != api::MinQos::default()),
            label.as_deref().map(Asked::label),
        ];
        settings.into_iter().flatten().chain(force(*is_forced)).collect()
    }
}

impl Asks for VolumeChange {
    fn asks(&self, _: &OwnPlaces) -> Vec<Asked> {
        // The limits of a group stay above those of a volume, and take another request.
        let VolumeChange { name, size_bytes: _, qos: _, group, min_qos, labels: _ } = self;
        let settings = [
            setting("name", name.is_some()),
            setting("group", group.is_some()),
            setting("min_qos", min_qos.is_some()),
        ];
        settings.into_iter().flatten().collect()
    }
}

impl Asks for ExportChange {
    fn asks(&self, _: &OwnPlaces) -> Vec<Asked> {
        let ExportChange { cores, data_plane, hosts: _, ana, labels: _ } = self;
        let settings = [
            setting("cores", cores.is_some()),
            setting("data_plane", data_plane.is_some()),
            setting("ana", ana.is_some()),
        ];
        settings.into_iter().flatten().collect()
    }
}

impl Asks for VolumeMove {
    fn asks(&self, _: &OwnPlaces) -> Vec<Asked> {
        force(self.force).into_iter().collect()
    }
}

impl Asks for NewExport {
    fn asks(&self, own: &OwnPlaces) -> Vec<Asked> {
        let path = |(key, value): (&String, &String)| {
            let is_path = names_path(&self.kind, key, value) && !own.has(&self.name, key, value);
            is_path.then(|| Asked::new(Ask::Path, format!("option {key}={value}")))
        };
        let mut all: Vec<Asked> = self.options.iter().filter_map(path).collect();
        if let Some(listen) = self.options.get("listen")
            && !requires_tls(self)
            && let Some(place) = listen.split('+').find(|place| !is_loopback(place))
        {
            all.push(Asked::new(Ask::OpenListener, format!("listening on {place} without TLS")));
        }
        all.extend(self.label.as_deref().map(Asked::label));
        all
    }
}

/// Whether an option of a kind of export names a place in the file system, or a keyring of the
/// daemon's user. An absolute path is one whatever the kind takes it for, and so is an option that
/// the kind does not know.
fn names_path(kind: &str, key: &str, value: &str) -> bool {
    let kind = KINDS.iter().find(|known| known.name == kind);
    let known = kind.and_then(|kind| kind.keys.iter().find(|known| known.name == key));
    let is_place = known.is_none_or(|key| key.is_path()) || key == "tls-keyring";
    is_place || (value.starts_with('/') && key != "description")
}

/// Whether every client of an export goes through TLS.
fn requires_tls(export: &NewExport) -> bool {
    let has = |key: &str| export.options.contains_key(key);
    let is_required = export.options.get("tls").is_none_or(|mode| mode == "require");
    is_required && ["tls-certificates", "tls-psk", "tls-keys", "tls-keyring"].into_iter().any(has)
}

/// Whether `ADDR:PORT` or `ADDR:PORT@STATE` is reached from this host alone. A name may stand for
/// any address.
fn is_loopback(place: &str) -> bool {
    let address = place.split_once('@').map_or(place, |(address, _)| address);
    address.parse::<SocketAddr>().is_ok_and(|address| address.ip().is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asks(kind: &str, options: &[(&str, &str)]) -> Vec<Ask> {
        let own = OwnPlaces {
            runtime: "/run/f".into(),
            keys: "/var/f/keys".into(),
            reservations: "/var/f/reservations".into(),
        };
        let options = options.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let new = NewExport { name: "e".into(), kind: kind.into(), options, ..NewExport::default() };
        new.asks(&own).into_iter().map(|asked| asked.ask).collect()
    }

    #[test]
    fn every_option_that_names_a_path_is_judged_unless_it_is_the_daemons_own() {
        let mut paths = 0;
        for kind in KINDS {
            for key in kind.keys.iter().filter(|key| key.is_path()) {
                let others = [
                    "/etc/shadow",
                    "relative",
                    "/var/f/keys/../../x",
                    "/var/f/keys",
                    "/run/f/other.sock",
                    "",
                ];
                for value in others {
                    assert_eq!(
                        asks(kind.name, &[(key.name, value)]),
                        [Ask::Path],
                        "{} {}",
                        kind.name,
                        key.name
                    );
                }
                paths += 1;
            }
        }
        assert_eq!(paths, 8, "a kind has another option that names a path: judge it, and count it here");
        for (key, value) in [
            ("socket", "/run/f/e.sock"),
            ("tls-psk", "/var/f/keys/psk"),
            ("tls-certificates", "/var/f/keys/a/b"),
        ] {
            assert_eq!(asks("nbd", &[(key, value)]), [], "{key}");
        }
        assert_eq!(asks("nvme-tcp", &[("reservations", "/var/f/reservations/e")]), []);
        assert_eq!(asks("nvme-tcp", &[("tls-keyring", "@u")]), [Ask::Path]);
        assert_eq!(asks("nbd", &[("nonsense", "x")]), [Ask::Path]);
        assert_eq!(asks("nbd", &[("name", "/x")]), [Ask::Path]);
        assert_eq!(asks("nbd", &[("name", "x"), ("description", "/x")]), []);
    }

    #[test]
    fn listening_beyond_loopback_is_judged_unless_every_client_goes_through_tls() {
        let open = [Ask::OpenListener];
        let psk = ("tls-psk", "/var/f/keys/psk");
        for listen in
            ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "localhost:1", "systemd", "systemd:x", "", "127.0.0.1"]
        {
            assert_eq!(asks("nbd", &[("listen", listen)]), open, "{listen}");
        }
        for listen in ["127.0.0.1:1", "[::1]:1", "127.1.2.3:1"] {
            assert_eq!(asks("nbd", &[("listen", listen)]), [], "{listen}");
        }
        assert_eq!(asks("nbd", &[("listen", "0.0.0.0:1"), psk]), []);
        assert_eq!(asks("nbd", &[("listen", "0.0.0.0:1"), psk, ("tls", "require")]), []);
        for mode in ["allow", "off", "nonsense"] {
            assert_eq!(asks("nbd", &[("listen", "0.0.0.0:1"), psk, ("tls", mode)]), open, "{mode}");
        }
        let ports = "127.0.0.1:1@optimized+10.0.0.1:2@change";
        assert_eq!(asks("nvme-tcp", &[("listen", ports)]), open);
        assert_eq!(asks("nvme-tcp", &[("listen", ports), ("tls-keys", "/var/f/keys/k")]), []);
        assert_eq!(asks("nvme-tcp", &[("listen", ports), ("tls-keyring", ".nvme")]), [Ask::Path]);
        // The administrator has opened the portal.
        assert_eq!(asks("nvme-tcp", &[("portal", "net"), ("nqn", "nqn.a")]), []);
        assert_eq!(asks("nbd", &[("portal", "net"), ("identities", "alice")]), []);
    }
}
