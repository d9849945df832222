//! Names of volumes, which users choose.

use base::Uuid;
use std::fmt;

/// Longest name, in bytes.
pub const MAX_NAME: usize = 63;

/// A name of 1 to [`MAX_NAME`] letters, digits, `.`, `_` and `-`. It begins with a letter or a
/// digit and does not look like a UUID.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Box<str>);

/// Why a text is not a name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// The text is too short or too long.
    #[error("a name of {0} bytes: want 1 to {MAX_NAME}")]
    Length(usize),
    /// The text contains an invalid character.
    #[error("{0:?}: a name has letters, digits, '.', '_' and '-', and begins with one of the first two")]
    Character(String),
    /// The text looks like a UUID.
    #[error("{0:?}: a name must not look like a UUID")]
    Uuid(String),
}

impl Name {
    /// Checks a text and converts it to a name.
    ///
    /// # Errors
    /// When the text is not a valid name.
    pub fn new(text: &str) -> Result<Name, NameError> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
        if !(1..=MAX_NAME).contains(&text.len()) {
            Err(NameError::Length(text.len()))
        } else if !text.bytes().all(is_plain) || !text.as_bytes()[0].is_ascii_alphanumeric() {
            Err(NameError::Character(text.into()))
        } else if Uuid::parse_hyphenated(text).is_some() {
            Err(NameError::Uuid(text.into()))
        } else {
            Ok(Name(text.into()))
        }
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
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
        assert_eq!(Name::new(&uuid), Err(NameError::Uuid(uuid.clone())));
        assert!(Name::new(&uuid.replace('-', "")).is_ok());
    }
}
