//! What people call volumes, and what never changes about them.

use std::fmt;

/// Longest name, in bytes.
pub const MAX_NAME: usize = 63;

/// A name: 1 to [`MAX_NAME`] letters, digits, `.`, `_` and `-`, the first a letter or a digit, and not the form of a UUID.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Box<str>);

/// Why something is no name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// Too short or too long.
    #[error("a name of {0} bytes: want 1 to {MAX_NAME}")]
    Length(usize),
    /// A character that does not belong.
    #[error("{0:?}: a name has letters, digits, '.', '_' and '-', and begins with one of the first two")]
    Character(String),
    /// It could not be told from a UUID.
    #[error("{0:?}: a name must not look like a UUID")]
    Uuid(String),
}

impl Name {
    /// Takes a text for a name.
    ///
    /// # Errors
    /// When it is none.
    pub fn new(text: &str) -> Result<Name, NameError> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
        if !(1..=MAX_NAME).contains(&text.len()) {
            Err(NameError::Length(text.len()))
        } else if !text.bytes().all(is_plain) || !text.as_bytes()[0].is_ascii_alphanumeric() {
            Err(NameError::Character(text.into()))
        } else if Uuid::parse(text).is_some() {
            Err(NameError::Uuid(text.into()))
        } else {
            Ok(Name(text.into()))
        }
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// An identity that nothing else has (RFC 9562).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Uuid(pub [u8; 16]);

impl Uuid {
    /// A new one (version 4).
    ///
    /// # Errors
    /// When the system gives no random bytes.
    pub fn random() -> std::io::Result<Uuid> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).map_err(|error| std::io::Error::other(error.to_string()))?;
        bytes[6] = bytes[6] & 0x0f | 0x40;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        Ok(Uuid(bytes))
    }

    /// Reads 8-4-4-4-12 hexadecimal digits.
    pub fn parse(text: &str) -> Option<Uuid> {
        let has_form = text.len() == 36
            && text.bytes().enumerate().all(|(at, byte)| match at {
                8 | 13 | 18 | 23 => byte == b'-',
                _ => byte.is_ascii_hexdigit(),
            });
        let digits: String = text.split('-').collect();
        u128::from_str_radix(&digits, 16).ok().filter(|_| has_form).map(|uuid| Uuid(uuid.to_be_bytes()))
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, byte) in self.0.iter().enumerate() {
            write!(f, "{}{byte:02x}", if matches!(at, 4 | 6 | 8 | 10) { "-" } else { "" })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_what_can_be_typed_anywhere() {
        for good in ["a", "vm-1.root_disk", "0", &"x".repeat(63)] {
            assert_eq!(Name::new(good).unwrap().as_str(), good);
        }
        assert_eq!(Name::new(""), Err(NameError::Length(0)));
        assert_eq!(Name::new(&"x".repeat(64)), Err(NameError::Length(64)));
        for bad in ["-a", ".", "a b", "a/b", "ä", "a\0"] {
            assert!(matches!(Name::new(bad), Err(NameError::Character(_))), "{bad}");
        }
        let uuid = Uuid::random().unwrap().to_string();
        assert_eq!(Name::new(&uuid), Err(NameError::Uuid(uuid)));
    }

    #[test]
    fn a_uuid_is_written_as_it_is_read() {
        let text = "00112233-4455-6677-8899-aabbccddeeff";
        let uuid = Uuid::parse(text).unwrap();
        assert_eq!((uuid.0[0], uuid.0[15], uuid.to_string()), (0, 0xff, text.to_owned()));
        let dashes = text.replace('-', "");
        let shifted = "001122334-455-6677-8899-aabbccddeeff";
        for bad in ["", &dashes, shifted, &text.replace('f', "g"), &text.replace('0', "+")] {
            assert_eq!(Uuid::parse(bad), None, "{bad}");
        }
        let (one, other) = (Uuid::random().unwrap(), Uuid::random().unwrap());
        assert!(one != other && one.0[6] >> 4 == 4 && one.0[8] >> 6 == 2);
    }
}
