//! Properties: named, typed values, and the states in which they can be read and written.

use super::{Error, Result};

/// Where an instance is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// It has a driver.
    Created,
    /// It has a device.
    Connected,
    /// It has queues.
    Started,
}

/// The value of a property.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// True or false.
    Bool(bool),
    /// A signed 32-bit number.
    Int(i32),
    /// An unsigned 64-bit number.
    Uint64(u64),
    /// Text.
    Str(String),
}

/// The type of a property.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `bool`
    Bool,
    /// `int`
    Int,
    /// `uint64_t`
    Uint64,
    /// text
    Str,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Bool => "bool",
            Kind::Int => "int",
            Kind::Uint64 => "uint64",
            Kind::Str => "str",
        }
    }

    fn parse(self, name: &str, text: &str) -> Result<Value> {
        let refused =
            |expected: &str| Error::new(libc::EINVAL, format!("property {name}: '{text}' is not {expected}"));
        match self {
            Kind::Bool => text.parse().map(Value::Bool).map_err(|_| refused("'true' or 'false'")),
            Kind::Int => text.parse().map(Value::Int).map_err(|_| refused("a signed 32-bit number")),
            Kind::Uint64 => text.parse().map(Value::Uint64).map_err(|_| refused("an unsigned 64-bit number")),
            Kind::Str => Ok(Value::Str(text.to_owned())),
        }
    }
}

impl Value {
    /// Its type.
    pub fn kind(&self) -> Kind {
        match self {
            Value::Bool(_) => Kind::Bool,
            Value::Int(_) => Kind::Int,
            Value::Uint64(_) => Kind::Uint64,
            Value::Str(_) => Kind::Str,
        }
    }
}

impl std::fmt::Display for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Value::Bool(value) => value.fmt(f),
            Value::Int(value) => value.fmt(f),
            Value::Uint64(value) => value.fmt(f),
            Value::Str(value) => f.write_str(value),
        }
    }
}

impl From<bool> for Value {
    fn from(value: bool) -> Value {
        Value::Bool(value)
    }
}

impl From<i32> for Value {
    fn from(value: i32) -> Value {
        Value::Int(value)
    }
}

impl From<u64> for Value {
    fn from(value: u64) -> Value {
        Value::Uint64(value)
    }
}

impl From<&str> for Value {
    fn from(value: &str) -> Value {
        Value::Str(value.to_owned())
    }
}

/// When a property can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writable {
    /// The program only reads it.
    Never,
    /// In this state only.
    In(State),
}

/// A property as its driver declares it.
pub struct Spec {
    /// Its name.
    pub name: &'static str,
    /// First state in which programs can read it.
    pub readable_from: State,
    /// When programs can set it.
    pub writable: Writable,
    /// Its value before a program or a device sets it; it also has the type.
    pub initial: Value,
}

impl Spec {
    /// A property that the user sets before the device is connected.
    pub fn setting(name: &'static str, initial: impl Into<Value>) -> Spec {
        let (readable_from, writable) = (State::Created, Writable::In(State::Created));
        Spec { name, readable_from, writable, initial: initial.into() }
    }

    /// A property that the user sets between connecting and starting.
    pub fn tuning(name: &'static str, initial: impl Into<Value>) -> Spec {
        let (readable_from, writable) = (State::Connected, Writable::In(State::Connected));
        Spec { name, readable_from, writable, initial: initial.into() }
    }

    /// A property that the device reports; `unknown` until it is connected.
    pub fn fact(name: &'static str, unknown: impl Into<Value>) -> Spec {
        let readable_from = State::Connected;
        Spec { name, readable_from, writable: Writable::Never, initial: unknown.into() }
    }

    /// A property of the driver that never changes.
    pub fn constant(name: &'static str, value: impl Into<Value>) -> Spec {
        Spec { name, readable_from: State::Created, writable: Writable::Never, initial: value.into() }
    }
}

/// The properties that every driver has.
pub fn common(driver: &str, can_add_queues: bool) -> Vec<Spec> {
    vec![
        Spec::constant("can-add-queues", can_add_queues),
        Spec::constant("driver", driver),
        Spec::setting("read-only", false),
        Spec::fact("capacity", 0u64),
        Spec::fact("max-queues", i32::MAX),
        Spec::tuning("num-queues", 1),
        Spec::tuning("num-poll-queues", 0),
        Spec::fact("supports-poll-queues", false),
        Spec::fact("max-mem-regions", u64::MAX),
        Spec::fact("may-pin-mem-regions", false),
        Spec::fact("mem-region-alignment", 1u64),
        Spec::fact("needs-mem-regions", false),
        Spec::fact("needs-mem-region-fd", false),
        Spec::fact("optimal-io-alignment", 1),
        Spec::fact("optimal-io-size", 0),
        Spec::fact("request-alignment", 1),
        Spec::fact("flush-needed", true),
        Spec::fact("buf-alignment", 1),
        Spec::fact("can-grow", false),
        Spec::fact("max-segments", 1024),
        Spec::fact("max-segment-len", 0),
        Spec::fact("max-transfer", 0),
        Spec::fact("optimal-buf-alignment", 4096),
        Spec::fact("supports-fua-natively", false),
        Spec::fact("max-write-zeroes-len", 0u64),
        Spec::fact("discard-alignment", 0),
        Spec::fact("discard-alignment-offset", 0),
        Spec::fact("max-discard-len", 0u64),
    ]
}

struct Entry {
    spec: Spec,
    value: Value,
}

/// The properties of an instance.
pub struct Properties(Vec<Entry>);

impl Properties {
    /// Properties with their initial values.
    pub fn new(specs: impl IntoIterator<Item = Spec>) -> Properties {
        Properties(specs.into_iter().map(|spec| Entry { value: spec.initial.clone(), spec }).collect())
    }

    /// Every property's name, in the order of the documentation.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        self.0.iter().map(|entry| entry.spec.name)
    }

    /// Returns a property as a program may read it.
    ///
    /// # Errors
    /// `ENOENT` unknown, `ENODEV` not readable before the instance is connected.
    pub fn get(&self, name: &str, state: State) -> Result<&Value> {
        let entry = self.find(name)?;
        if state < entry.spec.readable_from {
            let message = format!("property {name} has no value before blkio_connect()");
            return Err(Error::new(libc::ENODEV, message));
        }
        Ok(&entry.value)
    }

    /// A property's type.
    ///
    /// # Errors
    /// `ENOENT` unknown.
    pub fn kind(&self, name: &str) -> Result<Kind> {
        Ok(self.find(name)?.spec.initial.kind())
    }

    /// Checks the value that a program wants to set, and does not set it; text is converted to the
    /// property's type.
    ///
    /// # Errors
    /// `ENOENT` unknown, `ENOTTY` wrong type, `EACCES` read-only, `EBUSY` too late, `ENODEV` too
    /// early, `EINVAL` text that is no value of the type.
    pub fn convert(&self, name: &str, value: Value, state: State) -> Result<Value> {
        let spec = &self.find(name)?.spec;
        let kind = spec.initial.kind();
        let value = match value {
            Value::Str(text) => kind.parse(name, &text)?,
            value if value.kind() == kind => value,
            value => return Err(wrong_kind(name, kind, value.kind())),
        };
        match spec.writable {
            Writable::Never => Err(Error::new(libc::EACCES, format!("property {name} is read-only"))),
            Writable::In(wanted) if state > wanted => {
                let when = if state == State::Connected { "connected" } else { "started" };
                let message = format!("property {name} cannot be set once the instance is {when}");
                Err(Error::new(libc::EBUSY, message))
            }
            Writable::In(wanted) if state < wanted => {
                let message = format!("property {name} cannot be set before blkio_connect()");
                Err(Error::new(libc::ENODEV, message))
            }
            Writable::In(_) => Ok(value),
        }
    }

    /// Writes a value.
    ///
    /// # Panics
    /// For a name or type that the driver has not declared.
    pub fn put(&mut self, name: &str, value: impl Into<Value>) {
        let value = value.into();
        let entry = self.0.iter_mut().find(|entry| is_called(entry.spec.name, name));
        let entry = entry.unwrap_or_else(|| panic!("property {name} is not declared"));
        assert_eq!(entry.spec.initial.kind(), value.kind(), "type of property {name}");
        entry.value = value;
    }

    /// Back to the state before the device was connected: facts are unknown again.
    pub fn forget_facts(&mut self) {
        for entry in &mut self.0 {
            if entry.spec.readable_from == State::Connected {
                entry.value = entry.spec.initial.clone();
            }
        }
    }

    /// The value of a property.
    ///
    /// # Panics
    /// When the driver has not declared it, or with another type.
    pub fn bool(&self, name: &str) -> bool {
        match self.value(name) {
            Value::Bool(value) => *value,
            other => panic!("property {name} is {other:?}"),
        }
    }

    /// The value of a property.
    ///
    /// # Panics
    /// When the driver has not declared it, or with another type.
    pub fn int(&self, name: &str) -> i32 {
        match self.value(name) {
            Value::Int(value) => *value,
            other => panic!("property {name} is {other:?}"),
        }
    }

    /// The value of a property.
    ///
    /// # Panics
    /// When the driver has not declared it, or with another type.
    pub fn uint64(&self, name: &str) -> u64 {
        match self.value(name) {
            Value::Uint64(value) => *value,
            other => panic!("property {name} is {other:?}"),
        }
    }

    /// The value of a property.
    ///
    /// # Panics
    /// When the driver has not declared it, or with another type.
    pub fn str(&self, name: &str) -> &str {
        match self.value(name) {
            Value::Str(value) => value,
            other => panic!("property {name} is {other:?}"),
        }
    }

    fn value(&self, name: &str) -> &Value {
        &self.find(name).unwrap_or_else(|e| panic!("{e}")).value
    }

    fn find(&self, name: &str) -> Result<&Entry> {
        let found = self.0.iter().find(|entry| is_called(entry.spec.name, name));
        found.ok_or_else(|| Error::new(libc::ENOENT, format!("unknown property '{name}'")))
    }
}

/// Whether a program means this property: the manual page of libblkio writes some names with
/// underscores.
fn is_called(name: &str, asked: &str) -> bool {
    name.len() == asked.len()
        && name.bytes().zip(asked.bytes()).all(|(n, a)| n == a || (n == b'-' && a == b'_'))
}

/// The error for a value of another type than the property's.
pub fn wrong_kind(name: &str, kind: Kind, used: Kind) -> Error {
    Error::new(libc::ENOTTY, format!("property {name} is of type {}, not {}", kind.name(), used.name()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn properties() -> Properties {
        Properties::new(common("x", true))
    }

    fn errno(result: Result<Value>) -> i32 {
        result.unwrap_err().errno()
    }

    #[test]
    fn a_property_is_read_and_written_only_in_its_states() {
        let p = properties();
        assert_eq!(p.get("capacity", State::Created).unwrap_err().errno(), libc::ENODEV);
        assert_eq!(p.get("num-queues", State::Connected), Ok(&Value::Int(1)));
        let set = |name, value: Value, state| p.convert(name, value, state);
        assert_eq!(errno(set("num-queues", 2.into(), State::Created)), libc::ENODEV);
        assert_eq!(set("num-queues", 2.into(), State::Connected), Ok(Value::Int(2)));
        assert_eq!(errno(set("num-queues", 2.into(), State::Started)), libc::EBUSY);
        assert_eq!(errno(set("read-only", true.into(), State::Connected)), libc::EBUSY);
        assert_eq!(errno(set("capacity", 1u64.into(), State::Connected)), libc::EACCES);
        assert_eq!(errno(set("capacity", 1.into(), State::Connected)), libc::ENOTTY);
        assert_eq!(errno(set("nonsense", 1.into(), State::Connected)), libc::ENOENT);
    }

    #[test]
    fn text_is_converted_and_nonsense_is_refused_by_name() {
        let p = properties();
        assert_eq!(p.convert("read-only", "true".into(), State::Created), Ok(Value::Bool(true)));
        assert_eq!(p.convert("num-queues", "3".into(), State::Connected), Ok(Value::Int(3)));
        let refused = p.convert("num-queues", "4294967296".into(), State::Connected).unwrap_err();
        assert_eq!(refused.errno(), libc::EINVAL);
        assert!(refused.message().contains("num-queues") && refused.message().contains("4294967296"));
        assert_eq!(errno(p.convert("read-only", "yes".into(), State::Created)), libc::EINVAL);
    }
}
