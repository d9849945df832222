//! NVMe Qualified Names (Base 4.5), the names of subsystems and hosts.

use crate::wire::put_text;
use base::Uuid;

/// Limit of bytes of a name.
pub const MAX_NQN: usize = 223;
/// The name of every discovery subsystem.
pub const DISCOVERY: &str = "nqn.2014-08.org.nvmexpress.discovery";
/// Prefix of names made from a UUID.
pub const UUID_PREFIX: &str = "nqn.2014-08.org.nvmexpress:uuid:";

/// A name: UTF-8, starts with `nqn.`, at most [`MAX_NQN`] bytes. Names of [`Nqn::of_any`] may have
/// another start.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Nqn(Box<str>);

/// Why a text is not a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NqnError {
    /// The text does not start with `nqn.`.
    #[error("an NVMe name starts with \"nqn.\"")]
    Prefix,
    /// The text is longer than [`MAX_NQN`], or has no end in its field.
    #[error("an NVMe name has at most {MAX_NQN} bytes")]
    Length,
    /// The text is not UTF-8, or contains control characters.
    #[error("an NVMe name is printable UTF-8")]
    Text,
}

impl Nqn {
    /// Checks a name.
    ///
    /// # Errors
    /// If the text is not a name.
    pub fn new(text: &str) -> Result<Nqn, NqnError> {
        Nqn::of_any(text).and_then(|name| if name.is_qualified() { Ok(name) } else { Err(NqnError::Prefix) })
    }

    /// Whether it starts with `nqn.`, as the specification requires.
    pub fn is_qualified(&self) -> bool {
        self.0.starts_with("nqn.")
    }

    /// Checks a name of a subsystem, for which Linux allows any text: `blktests-subsystem-0`.
    ///
    /// # Errors
    /// If it is empty, too long, or not printable.
    pub fn of_any(text: &str) -> Result<Nqn, NqnError> {
        if text.len() > MAX_NQN {
            return Err(NqnError::Length);
        }
        if text.chars().any(char::is_control) {
            return Err(NqnError::Text);
        }
        if text.is_empty() {
            return Err(NqnError::Prefix);
        }
        Ok(Nqn(text.into()))
    }

    /// The discovery subsystem.
    pub fn discovery() -> Nqn {
        Nqn(DISCOVERY.into())
    }

    /// Whether it is [`DISCOVERY`].
    pub fn is_discovery(&self) -> bool {
        &*self.0 == DISCOVERY
    }

    /// The name of a host (or subsystem) with this UUID.
    pub fn of_uuid(uuid: &[u8; 16]) -> Nqn {
        Nqn(format!("{UUID_PREFIX}{}", Uuid(*uuid)).into())
    }

    /// The name in a field, which ends before the first zero byte.
    ///
    /// # Errors
    /// If it is not a name, or does not end in the field.
    pub fn parse_field(field: &[u8]) -> Result<Nqn, NqnError> {
        text_of_field(field).and_then(Nqn::new)
    }

    /// As [`Nqn::parse_field`], for a subsystem with any name ([`Nqn::of_any`]).
    ///
    /// # Errors
    /// As [`Nqn::of_any`].
    pub fn parse_any_field(field: &[u8]) -> Result<Nqn, NqnError> {
        text_of_field(field).and_then(Nqn::of_any)
    }

    /// The text of the name.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Writes the name and zeroes to a field.
    pub(crate) fn put(&self, bytes: &mut [u8], at: usize, len: usize) {
        put_text(bytes, at, len, &self.0, 0);
    }
}

fn text_of_field(field: &[u8]) -> Result<&str, NqnError> {
    let end = field.iter().position(|byte| *byte == 0).ok_or(NqnError::Length)?;
    std::str::from_utf8(&field[..end]).map_err(|_| NqnError::Text)
}

impl std::fmt::Display for Nqn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::str::FromStr for Nqn {
    type Err = NqnError;

    fn from_str(text: &str) -> Result<Nqn, NqnError> {
        Nqn::new(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        assert_eq!(Nqn::new("nqn.2014-08.org.example:a").unwrap().as_str(), "nqn.2014-08.org.example:a");
        assert_eq!(Nqn::new("iqn.2014-08.org"), Err(NqnError::Prefix));
        assert_eq!(Nqn::new(""), Err(NqnError::Prefix));
        assert_eq!(Nqn::new("nqn.a\n"), Err(NqnError::Text));
        let longest = format!("nqn.{}", "a".repeat(MAX_NQN - 4));
        assert!(Nqn::new(&longest).is_ok());
        assert_eq!(Nqn::new(&format!("{longest}a")), Err(NqnError::Length));
        assert_eq!(Nqn::parse_field(b"nqn.a\0b"), Nqn::new("nqn.a"));
        assert_eq!(Nqn::parse_field(b"nqn.a"), Err(NqnError::Length));
        assert_eq!(Nqn::parse_field(b"nqn.\xff\0"), Err(NqnError::Text));
        assert!(Nqn::discovery().is_discovery());
        let other = Nqn::of_any("blktests-subsystem-0").unwrap();
        assert!(!other.is_qualified() && Nqn::discovery().is_qualified());
        assert_eq!(Nqn::parse_any_field(b"blktests-subsystem-0\0"), Ok(other));
        assert_eq!((Nqn::of_any(""), Nqn::of_any("a\n")), (Err(NqnError::Prefix), Err(NqnError::Text)));
    }

    #[test]
    fn a_uuid_makes_a_name() {
        let uuid = std::array::from_fn(|i| i as u8 + 0xf0);
        let name = "nqn.2014-08.org.nvmexpress:uuid:f0f1f2f3-f4f5-f6f7-f8f9-fafbfcfdfeff";
        assert_eq!(Nqn::of_uuid(&uuid).as_str(), name);
        assert_eq!(Nqn::new(name), Ok(Nqn::of_uuid(&uuid)));
    }
}
