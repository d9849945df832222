//! Universally unique identifiers (RFC 9562).

use serde::{Deserialize, Serialize};
use std::fmt;
use std::io;

/// 128 bits that identify an object: in memory and on disk the bytes in the order of the text.
///
/// Its text, in JSON too, has 8-4-4-4-12 lower-case hexadecimal digits.
///
/// ```
/// use base::Uuid;
///
/// let uuid = Uuid::parse("00112233-4455-6677-8899-AABBCCDDEEFF").unwrap();
/// assert_eq!(uuid.to_string(), "00112233-4455-6677-8899-aabbccddeeff");
/// assert_eq!(Uuid::parse("00112233445566778899aabbccddeeff"), Some(uuid));
/// assert_ne!(Uuid::random()?, Uuid::random()?);
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Uuid(pub [u8; 16]);

impl Uuid {
    /// Returns a new UUID (version 4) of the system's random bits.
    ///
    /// # Errors
    /// When the system returns no random bits.
    pub fn random() -> io::Result<Uuid> {
        let mut bits = [0; 16];
        getrandom::fill(&mut bits).map_err(|error| io::Error::other(error.to_string()))?;
        Ok(Uuid::from_random(bits))
    }

    /// Returns the UUID (version 4) of these random bits.
    pub fn from_random(mut bits: [u8; 16]) -> Uuid {
        bits[6] = bits[6] & 0x0f | 0x40;
        bits[8] = bits[8] & 0x3f | 0x80;
        Uuid(bits)
    }

    /// Parses 32 hexadecimal digits. Hyphens between them are ignored. `None`: `text` is no UUID.
    pub fn parse(text: &str) -> Option<Uuid> {
        let mut digits = text.chars().filter(|c| *c != '-').map(|c| c.to_digit(16));
        let mut bytes = [0; 16];
        for byte in &mut bytes {
            *byte = (digits.next()?? << 4 | digits.next()??) as u8;
        }
        digits.next().is_none().then_some(Uuid(bytes))
    }

    /// Parses only the form with four hyphens, 8-4-4-4-12 digits. Where a key is a UUID or a name,
    /// 32 digits alone are a name.
    pub fn parse_hyphenated(text: &str) -> Option<Uuid> {
        Uuid::parse(text).filter(|uuid| uuid.to_string().eq_ignore_ascii_case(text))
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, byte) in self.0.iter().enumerate() {
            let hyphen = if matches!(at, 4 | 6 | 8 | 10) { "-" } else { "" };
            write!(f, "{hyphen}{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl From<Uuid> for String {
    fn from(uuid: Uuid) -> String {
        uuid.to_string()
    }
}

impl TryFrom<String> for Uuid {
    type Error = String;

    fn try_from(text: String) -> Result<Uuid, String> {
        Uuid::parse(&text).ok_or_else(|| format!("{text}: invalid UUID"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "00112233-4455-6677-8899-aabbccddeeff";

    #[test]
    fn a_uuid_survives_its_text() {
        let uuid = Uuid::parse(TEXT).unwrap();
        assert_eq!((uuid.0[0], uuid.0[1], uuid.0[15]), (0, 0x11, 0xff));
        assert_eq!((uuid.to_string(), format!("{uuid:?}")), (TEXT.to_owned(), TEXT.to_owned()));
        let random = Uuid::random().unwrap();
        assert_eq!(Uuid::parse(&random.to_string()), Some(random));
    }

    #[test]
    fn a_random_uuid_has_version_4_and_the_variant_of_the_rfc() {
        let (one, other) = (Uuid::random().unwrap(), Uuid::random().unwrap());
        assert!(one != other && one.0[6] >> 4 == 4 && one.0[8] >> 6 == 2);
        let ones = "ffffffff-ffff-4fff-bfff-ffffffffffff";
        assert_eq!(Uuid::from_random([0xff; 16]).to_string(), ones);
    }

    #[test]
    fn hyphens_are_optional_unless_a_name_could_be_meant() {
        let uuid = Uuid::parse(TEXT);
        let digits = TEXT.replace('-', "");
        let shifted = "001122334-455-6677-8899-aabbccddeeff";
        for text in [TEXT, &TEXT.to_uppercase(), &digits, shifted] {
            assert_eq!(Uuid::parse(text), uuid, "{text}");
        }
        assert_eq!(Uuid::parse_hyphenated(TEXT), uuid);
        assert_eq!(Uuid::parse_hyphenated(&TEXT.to_uppercase()), uuid);
        for text in [&*digits, shifted] {
            assert_eq!(Uuid::parse_hyphenated(text), None, "{text}");
        }
    }

    #[test]
    fn other_texts_are_no_uuid() {
        let (letter, sign) = (TEXT.replace('f', "g"), TEXT.replace('0', "+"));
        let (short, long, wide) = (&TEXT[1..], format!("{TEXT}0"), TEXT.replace('1', "é"));
        for text in ["", "-", "12", short, &long, &letter, &sign, &wide, &format!("{TEXT} ")] {
            assert_eq!(Uuid::parse(text), None, "{text}");
        }
    }

    #[test]
    fn json_has_the_text() {
        let uuid = Uuid::parse(TEXT).unwrap();
        let json = format!("\"{TEXT}\"");
        assert_eq!(serde_json::to_string(&uuid).unwrap(), json);
        assert_eq!(serde_json::from_str::<Uuid>(&json).unwrap(), uuid);
        let error = serde_json::from_str::<Uuid>("\"12\"").unwrap_err().to_string();
        assert!(error.starts_with("12: invalid UUID"), "{error}");
    }
}
