//! A secret in its text form: `DHHC-1:01:base64 of secret and CRC-32:`.
//!
//! `nvme gen-dhchap-key` makes such texts. The two digits name the hash that binds the secret to
//! the name of its owner. A controller that learns the bound secret of one host cannot impersonate
//! another.
//!
//! Source: Base Specification 2.0, 8.13.5.7 (transformation) and 8.13.5.8 (representation).

use crate::mac::mac;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use nvme::fabrics::Nqn;
use nvme::fabrics::auth::Hash;
use std::path::{Path, PathBuf};
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

/// The prefix of a secret's text.
const PREFIX: &str = "DHHC-1:";
/// Bytes of the checksum after the secret.
const CRC_BYTES: usize = 4;
/// Limit of bytes of a file with one secret, whose text has 107.
const MAX_FILE_BYTES: u64 = 4096;

/// A secret.
#[derive(Clone)]
pub struct Key {
    /// The hash that binds it to a name; `None`: not bound.
    hash: Option<Hash>,
    secret: Zeroizing<Vec<u8>>,
}

/// Why a text is not a secret. Messages do not repeat the text: it may be nearly a valid secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// The text does not have the form of a secret.
    #[error("a secret looks like DHHC-1:00:…: (nvme gen-dhchap-key makes one)")]
    Form,
    /// The hash is unknown.
    #[error("the secret's hash must be 00, 01, 02 or 03")]
    Hash,
    /// The secret is not base64.
    #[error("the secret is not base64")]
    Base64,
    /// The secret has an invalid length.
    #[error("the secret has {0} bytes: want 32, or 48 or 64 for DH-HMAC-CHAP")]
    Length(usize),
    /// The checksum is wrong.
    #[error("the secret's checksum is wrong: a character was lost or changed")]
    Checksum,
}

/// Why a file with secrets cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError<E: std::error::Error + 'static = KeyError> {
    /// The file cannot be read, or other users have access to it.
    #[error(transparent)]
    File(#[from] secrets::Error),
    /// The content is not a secret.
    #[error("{path}: {source}", path = .path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: E,
    },
}

/// Reads a file that contains one text for `parse` and otherwise only white space.
pub(crate) fn read_one<T, E: std::error::Error>(
    path: &Path,
    parse: impl FnOnce(&str) -> Result<T, E>,
) -> Result<T, FileError<E>> {
    let text = secrets::read_text(path, MAX_FILE_BYTES)?;
    parse(text.trim()).map_err(|source| FileError::Key { path: path.to_owned(), source })
}

impl Key {
    /// Parses a secret's text.
    ///
    /// # Errors
    /// If the text is not a secret.
    pub fn parse(text: &str) -> Result<Key, KeyError> {
        let rest = text.strip_prefix(PREFIX).ok_or(KeyError::Form)?;
        let (hash, rest) = rest.split_once(':').ok_or(KeyError::Form)?;
        let base64 = rest.strip_suffix(':').ok_or(KeyError::Form)?;
        let hash = match hash {
            "00" => None,
            "01" => Some(Hash::Sha256),
            "02" => Some(Hash::Sha384),
            "03" => Some(Hash::Sha512),
            _ => return Err(KeyError::Hash),
        };
        Ok(Key { hash, secret: decode(base64, &[32, 48, 64])? })
    }

    /// Reads a file that contains one secret and otherwise only white space.
    ///
    /// # Errors
    /// If the file cannot be read or does not contain a secret.
    pub fn read(path: &Path) -> Result<Key, FileError> {
        read_one(path, Key::parse)
    }

    /// The secret bound to `name`.
    pub(crate) fn bound_to(&self, name: &Nqn) -> Zeroizing<Vec<u8>> {
        match self.hash {
            Some(hash) => mac(hash, &self.secret, &[name.as_str().as_bytes(), b"NVMe-over-Fabrics"]),
            None => self.secret.clone(),
        }
    }
}

/// Decodes base64 with a checksum at its end. The content must have one of these lengths in bytes.
pub(crate) fn decode(base64: &str, lengths: &[usize]) -> Result<Zeroizing<Vec<u8>>, KeyError> {
    let mut secret = Zeroizing::new(STANDARD.decode(base64).map_err(|_| KeyError::Base64)?);
    let len = secret.len().saturating_sub(CRC_BYTES);
    if !lengths.contains(&len) {
        return Err(KeyError::Length(len));
    }
    if secret[len..] != crc32fast::hash(&secret[..len]).to_le_bytes() {
        return Err(KeyError::Checksum);
    }
    secret.truncate(len);
    Ok(secret)
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(…)")
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Key) -> bool {
        self.hash == other.hash && bool::from(self.secret.ct_eq(&other.secret))
    }
}

impl Eq for Key {}

#[cfg(test)]
mod tests {
    use super::*;

    // nvme gen-dhchap-key -m 1 -s 00…1f, and so on with -l and -m.
    const PLAIN: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";

    #[test]
    fn a_text_is_parsed_to_hash_and_secret() {
        let key = Key::parse(PLAIN).unwrap();
        assert_eq!((key.hash, &key.secret[..]), (None, &(0..32).collect::<Vec<u8>>()[..]));
        let bound = Key::parse(&PLAIN.replace(":00:", ":01:")).unwrap();
        assert_eq!(bound.hash, Some(Hash::Sha256));
        assert_ne!(bound, key);
        assert_eq!(key, key.clone());
        assert_eq!(format!("{key:?}"), "Key(…)");
    }

    #[test]
    fn an_invalid_text_is_refused_with_the_reason() {
        let cases = [
            ("", KeyError::Form),
            ("DHHC-1", KeyError::Form),
            ("DHHC-1:00", KeyError::Form),
            (&PLAIN[..PLAIN.len() - 1], KeyError::Form),
            ("DHHC-2:00:AAAA:", KeyError::Form),
            ("DHHC-1:04:AAAA:", KeyError::Hash),
            ("DHHC-1:1:AAAA:", KeyError::Hash),
            ("DHHC-1:00:AAA*:", KeyError::Base64),
            ("DHHC-1:00::", KeyError::Length(0)),
            ("DHHC-1:00:AAAA:", KeyError::Length(0)),
            ("DHHC-1:00:AAAAAAAAAAA=:", KeyError::Length(4)),
        ];
        for (text, why) in cases {
            assert_eq!(Key::parse(text).unwrap_err(), why, "{text}");
        }
        let changed = PLAIN.replace("AAEC", "AAED");
        assert_eq!(Key::parse(&changed).unwrap_err(), KeyError::Checksum);
    }

    #[test]
    fn a_file_holds_one_secret() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        assert!(Key::read(&path).unwrap_err().to_string().contains("/key: No such file"));
        secrets::write(&path, format!("{PLAIN}\n")).unwrap();
        assert_eq!(Key::read(&path).unwrap(), Key::parse(PLAIN).unwrap());
        secrets::write(&path, "DHHC-1:07:AAAA:").unwrap();
        assert!(
            Key::read(&path)
                .unwrap_err()
                .to_string()
                .ends_with("/key: the secret's hash must be 00, 01, 02 or 03")
        );
        secrets::write(&path, vec![b' '; 5000]).unwrap();
        assert!(Key::read(&path).unwrap_err().to_string().contains("longer than 4096 bytes"));
    }
}
