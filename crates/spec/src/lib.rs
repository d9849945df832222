//! `kind:key=value,key=value`: how devices, layers and exports are written.
//!
//! A comma inside a value is doubled, as QEMU does. A key without a value means `on`; `_` in a key
//! is `-`. A [`Kind`] lists its keys; parser, messages and help use the same list. Each kind stands
//! in the room of its driver, layer or export, next to the function that reads its values. A table
//! of [`Entry`] lists the kinds that a role has.

#![forbid(unsafe_code)]

mod help;
mod redact;
mod table;
mod value;

pub use help::{HELP_WIDTH, KEY_TEXT, help};
pub use redact::{MASK, redact, redact_value};
pub use table::{Entry, kinds, parse};
pub use value::{CpuList, Seconds, Switch, Value};

use std::path::Path;

/// A key and its value as a specification has them: commas are doubled.
pub fn field(key: &str, value: &str) -> String {
    format!("{key}={}", value.replace(',', ",,"))
}

/// The object that a specification describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A leaf.
    Device,
    /// A device over devices.
    Layer,
    /// An export.
    Export,
    /// A discovery service.
    Discovery,
    /// A listener that exports share.
    Portal,
}

impl Role {
    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            Role::Device => "device",
            Role::Layer => "layer",
            Role::Export => "export",
            Role::Discovery => "discovery service",
            Role::Portal => "portal",
        }
    }
}

/// One kind of device, layer or export, as parser and help know it.
#[derive(Debug)]
pub struct Kind {
    /// The text before the colon.
    pub name: &'static str,
    /// One line for the help.
    pub about: &'static str,
    /// Its keys, in the order in which the help shows them.
    pub keys: &'static [Key],
}

/// One key of a [`Kind`].
#[derive(Debug)]
pub struct Key {
    /// The text before the equals sign.
    pub name: &'static str,
    /// Placeholder of the value in help texts. `PATH`, `FILE` and `DIR` are places in the file
    /// system.
    pub value: &'static str,
    /// One line for the help.
    pub about: &'static str,
    /// Whether it names a file or directory that is read when the specification is parsed.
    pub is_read: bool,
}

impl Key {
    /// The same key, of a file or directory that is read when the specification is parsed.
    pub const fn read(self) -> Key {
        Key { is_read: true, ..self }
    }

    /// Whether its value names a place in the file system.
    pub fn is_path(&self) -> bool {
        matches!(self.value, "PATH" | "FILE" | "DIR")
    }
}

/// The key of devices and exports that can be read-only.
pub const READ_ONLY: Key = key("readonly", "on|off", "refuse writes [off]");
/// The key that names a device.
pub const ID: Key = key("id", "NAME", "the name by which layers and exports refer to this device");

/// A table entry of a [`Kind`]'s keys.
pub const fn key(name: &'static str, value: &'static str, about: &'static str) -> Key {
    Key { name, value, about, is_read: false }
}

/// A specification whose kind and keys are known. Values are looked at when they are asked for.
#[derive(Clone, Debug)]
pub struct Spec {
    role: Role,
    text: String,
    kind: &'static Kind,
    fields: Vec<(String, String)>,
}

impl Spec {
    /// Takes `text` apart.
    ///
    /// # Errors
    /// When there is no such kind, or the kind has no such key, or a key comes twice.
    pub fn parse(role: Role, kinds: &[&'static Kind], text: &str) -> Result<Spec, SpecError> {
        let failed = |fault| SpecError { role, text: text.to_owned(), fault };
        let (name, rest) = text.split_once(':').unwrap_or((text, ""));
        let kind = kinds.iter().copied().find(|kind| kind.name == name).ok_or_else(|| {
            let known = kinds.iter().map(|kind| kind.name).collect();
            failed(Fault::UnknownKind { role, kind: name.to_owned(), known })
        })?;
        let mut fields: Vec<(String, String)> = Vec::new();
        for part in split_at_commas(rest) {
            let (key, value) = part.split_once('=').unwrap_or((&part, "on"));
            let key = &*key.replace('_', "-");
            if !kind.keys.iter().any(|known| known.name == key) {
                let known = kind.keys.iter().map(|key| key.name).collect();
                return Err(failed(Fault::UnknownKey { key: key.to_owned(), kind: kind.name, known }));
            }
            if fields.iter().any(|(earlier, _)| earlier == key) {
                return Err(failed(Fault::Repeated(key.to_owned())));
            }
            fields.push((key.to_owned(), value.to_owned()));
        }
        Ok(Spec { role, text: text.to_owned(), kind, fields })
    }

    /// The kind's name.
    pub fn kind(&self) -> &'static str {
        self.kind.name
    }

    /// The value of a key, if it was given.
    ///
    /// # Errors
    /// When it is not of the type that is asked for.
    ///
    /// # Panics
    /// When the kind's table has no such key.
    pub fn get<V: Value>(&self, key: &str) -> Result<Option<V>, SpecError> {
        assert!(self.kind.keys.iter().any(|k| k.name == key), "{} has no key {key}", self.kind.name);
        let Some((_, text)) = self.fields.iter().find(|(name, _)| name == key) else { return Ok(None) };
        match V::parse(text) {
            Some(value) => Ok(Some(value)),
            None => Err(self.failed(Fault::BadValue {
                key: key.to_owned(),
                value: text.clone(),
                expected: V::expected(),
            })),
        }
    }

    /// The value of a key, or `default`.
    ///
    /// # Errors
    /// As [`Spec::get`].
    pub fn get_or<V: Value>(&self, key: &str, default: V) -> Result<V, SpecError> {
        Ok(self.get(key)?.unwrap_or(default))
    }

    /// The value of a key that must be there.
    ///
    /// # Errors
    /// As [`Spec::get`], and when the key was not given.
    pub fn require<V: Value>(&self, key: &str) -> Result<V, SpecError> {
        let missing = || {
            let value = self.kind.keys.iter().find(|k| k.name == key).map_or("", |k| k.value);
            self.failed(Fault::Missing { key: key.to_owned(), value })
        };
        self.get(key)?.ok_or_else(missing)
    }

    /// Whether the switch `key` is on; it is off by default.
    ///
    /// # Errors
    /// As [`Spec::get`].
    pub fn is_on(&self, key: &str) -> Result<bool, SpecError> {
        Ok(self.get_or(key, Switch(false))?.0)
    }

    /// Paths of the files and directories that are read when the kind parses this.
    pub fn read_paths(&self) -> impl Iterator<Item = &Path> {
        let is_read = |name: &str| self.kind.keys.iter().any(|key| key.name == name && key.is_read);
        self.fields.iter().filter(move |(name, _)| is_read(name)).map(|(_, value)| Path::new(value))
    }

    /// An error about this specification that no single value explains.
    pub fn refuse(&self, message: impl Into<String>) -> SpecError {
        self.failed(Fault::Refused(message.into()))
    }

    fn failed(&self, fault: Fault) -> SpecError {
        SpecError { role: self.role, text: self.text.clone(), fault }
    }
}

/// The error of an invalid specification. Displayed with its role and text:
/// `device mem: size=SIZE is missing`.
#[derive(Debug, thiserror::Error)]
#[error("{} {text}: {fault}", role.name())]
pub struct SpecError {
    role: Role,
    text: String,
    fault: Fault,
}

impl SpecError {
    /// The error about `text` that no single value explains.
    pub fn refused(role: Role, text: &str, message: String) -> SpecError {
        SpecError { role, text: text.to_owned(), fault: Fault::Refused(message) }
    }
}

#[derive(Debug, thiserror::Error)]
enum Fault {
    #[error("no such {}: {kind:?}; there are {}", role.name(), known.join(", "))]
    UnknownKind { role: Role, kind: String, known: Vec<&'static str> },
    #[error("unknown key {key:?}; {kind} knows {}", known.join(", "))]
    UnknownKey { key: String, kind: &'static str, known: Vec<&'static str> },
    #[error("{0} is given twice")]
    Repeated(String),
    #[error("{key}={value} is missing")]
    Missing { key: String, value: &'static str },
    #[error("{key}={value}: expected {expected}")]
    BadValue { key: String, value: String, expected: String },
    #[error("{0}")]
    Refused(String),
}

/// The parts between single commas, with doubled commas made single.
fn split_at_commas(text: &str) -> Vec<String> {
    let mut parts = Vec::new();
    if text.is_empty() {
        return parts;
    }
    let mut part = String::new();
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c == ',' && chars.next_if_eq(&',').is_none() {
            parts.push(std::mem::take(&mut part));
        } else {
            part.push(c);
        }
    }
    parts.push(part);
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::Size;
    use std::path::PathBuf;

    static DISK: Kind = Kind {
        name: "disk",
        about: "a test",
        keys: &[
            key("path", "PATH", "the file"),
            key("size", "SIZE", "its size"),
            key("direct", "on|off", "past the cache"),
            key("count", "N", "how many"),
        ],
    };

    fn parse(text: &str) -> Result<Spec, SpecError> {
        Spec::parse(Role::Device, &[&DISK], text)
    }

    fn error<T>(result: Result<T, SpecError>) -> String {
        result.err().expect("an error").to_string()
    }

    #[test]
    fn keys_and_values_come_back_with_their_types() {
        let spec = parse("disk:path=/a=b,size=4K,direct").unwrap();
        assert_eq!(spec.kind(), "disk");
        assert_eq!(spec.require::<PathBuf>("path").unwrap(), PathBuf::from("/a=b"));
        assert_eq!(spec.get::<Size>("size").unwrap(), Some(Size(4096)));
        assert_eq!(spec.get::<Switch>("direct").unwrap(), Some(Switch(true)));
        assert_eq!(spec.get_or("count", 7u32).unwrap(), 7);
        assert!(parse("disk").unwrap().fields.is_empty());
        assert!(parse("disk:").unwrap().fields.is_empty());
    }

    #[test]
    fn a_doubled_comma_is_a_comma() {
        let path = |text: &str| parse(text).unwrap().require::<PathBuf>("path").unwrap();
        assert_eq!(path("disk:path=a,,b"), PathBuf::from("a,b"));
        assert_eq!(path("disk:path=a,,,size=1"), PathBuf::from("a,"));
        assert_eq!(path("disk:path=,,,,x,direct"), PathBuf::from(",,x"));
    }

    #[test]
    fn messages_name_the_key_the_value_and_what_would_be_right() {
        let messages = [
            (parse("dsik:path=x").map(drop), r#"device dsik:path=x: no such device: "dsik"; there are disk"#),
            (
                parse("disk:sise=1G").map(drop),
                r#"device disk:sise=1G: unknown key "sise"; disk knows path, size, direct, count"#,
            ),
            (
                parse("disk:size=1,").map(drop),
                r#"device disk:size=1,: unknown key ""; disk knows path, size, direct, count"#,
            ),
            (parse("disk:size=1,size=1").map(drop), "device disk:size=1,size=1: size is given twice"),
            (
                parse("disk").unwrap().require::<PathBuf>("path").map(drop),
                "device disk: path=PATH is missing",
            ),
            (
                parse("disk:path=").unwrap().require::<PathBuf>("path").map(drop),
                "device disk:path=: path=: expected a path",
            ),
            (
                parse("disk:size=big").unwrap().get::<Size>("size").map(drop),
                "device disk:size=big: size=big: expected a number of bytes such as 512, 4K, 1M, 20G or 1T",
            ),
            (
                parse("disk:direct=maybe").unwrap().get::<Switch>("direct").map(drop),
                "device disk:direct=maybe: direct=maybe: expected on or off",
            ),
            (
                parse("disk:count=70000").unwrap().get::<u16>("count").map(drop),
                "device disk:count=70000: count=70000: expected a whole number from 0 to 65535",
            ),
        ];
        for (result, message) in messages {
            assert_eq!(error(result), message);
        }
    }

    #[test]
    fn no_text_makes_the_parser_panic() {
        for text in ["", ":", ",", ",,", "disk:,", "disk:,,", "disk:=", "disk:=,=", "é:ü=ö", "disk:path"] {
            let _ = parse(text);
        }
    }
}
