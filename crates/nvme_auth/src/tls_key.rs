//! A pre-shared key of TLS for NVMe/TCP, in three forms: as text
//! (`NVMeTLSkey-1:01:base64 of key and CRC-32:`), in a file, and derived for TLS.
//!
//! `nvme gen-tls-key` makes such texts. The two digits name the hash that binds the key to the name
//! of its host: SHA-256 (`01`, a key of 32 bytes) or SHA-384 (`02`, 48 bytes). With `00` a key of
//! 32 bytes is not bound. The key's identity in TLS contains the names of host and subsystem, so a
//! session identifies both.
//!
//! Hosts derive the key for TLS from the text in four ways. A target must support all of them:
//!
//! | identity | used by | labels of HKDF |
//! |---|---|---|
//! | `NVMe1R01 host subsystem digest` | the specification | with the lengths of RFC 8446 |
//! | the same with another digest | libnvme 1.13 and others of its time | without |
//! | `NVMe0R01 host subsystem` | the same, with the older identity | without |
//! | the same identity with another key | SPDK | with the lengths of RFC 8446 |
//!
//! `R02` stands in the identities of keys for SHA-384.
//!
//! Source: NVMe/TCP Transport Specification 1.0, 3.6.1.3 to 3.6.1.5; RFC 5869; RFC 8446 section
//! 7.1. The older labels were derived from the keys that nvme-cli 2.13 put into the kernel's
//! keyring.

use crate::KeyError;
use crate::key::{FileError, decode, read_one};
use crate::mac::mac;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use nvme::fabrics::Nqn;
use nvme::fabrics::auth::Hash;
use std::path::Path;
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

/// The prefix of a key's text.
const PREFIX: &str = "NVMeTLSkey-1:";
/// A key between a target and one host.
#[derive(Clone)]
pub struct TlsKey {
    /// Whether the hash binds the key to the host's name.
    is_bound: bool,
    hash: Hash,
    /// As long as the hash.
    key: Zeroizing<Vec<u8>>,
}

/// Why a text is not a supported key. Messages do not repeat the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TlsKeyError {
    /// The text does not have the form of a key.
    #[error("a key looks like NVMeTLSkey-1:01:…: (nvme gen-tls-key makes one)")]
    Form,
    /// The hash is unknown.
    #[error("the key is for an unknown hash: want 00, 01 (SHA-256) or 02 (SHA-384)")]
    Hash,
    /// Base64, length or checksum is wrong.
    #[error("{0}")]
    Content(KeyError),
}

/// A key derived for TLS, with its identity.
pub struct TlsSecret {
    /// The identity.
    pub identity: String,
    /// The key: 32 bytes for suites with SHA-256, 48 bytes for those with SHA-384.
    pub key: Zeroizing<Vec<u8>>,
}

/// How HKDF-Expand-Label encodes its label.
#[derive(Clone, Copy)]
enum Labels {
    /// As in RFC 8446.
    Specified,
    /// As in older libnvme: the output length in the machine's byte order, and no other lengths.
    Older,
}

impl Labels {
    fn expand(self, hash: Hash, key: &[u8], label: &str, context: &[u8]) -> Zeroizing<Vec<u8>> {
        let extracted = mac(hash, &vec![0; hash.bytes()], &[key]);
        let length = hash.bytes() as u16;
        // The output is one block of the hash.
        match self {
            Labels::Specified => {
                let label = format!("tls13 {label}");
                let (label_len, context_len) = ([label.len() as u8], [context.len() as u8]);
                let parts =
                    [&length.to_be_bytes()[..], &label_len, label.as_bytes(), &context_len, context, &[1]];
                mac(hash, &extracted, &parts)
            }
            Labels::Older => {
                let parts = [&length.to_le_bytes()[..], b"tls13 ", label.as_bytes(), context, &[1]];
                mac(hash, &extracted, &parts)
            }
        }
    }
}

impl TlsKey {
    /// Parses a key's text.
    ///
    /// # Errors
    /// If the text is not a supported key.
    pub fn parse(text: &str) -> Result<TlsKey, TlsKeyError> {
        let rest = text.strip_prefix(PREFIX).ok_or(TlsKeyError::Form)?;
        let (hash, rest) = rest.split_once(':').ok_or(TlsKeyError::Form)?;
        let base64 = rest.strip_suffix(':').ok_or(TlsKeyError::Form)?;
        let (is_bound, hash) = match hash {
            "00" => (false, Hash::Sha256),
            "01" => (true, Hash::Sha256),
            "02" => (true, Hash::Sha384),
            _ => return Err(TlsKeyError::Hash),
        };
        let key = decode(base64, &[hash.bytes()]).map_err(TlsKeyError::Content)?;
        Ok(TlsKey { is_bound, hash, key })
    }

    /// Reads a file that contains one key and otherwise only white space.
    ///
    /// # Errors
    /// If the file cannot be read or does not contain a supported key.
    pub fn read(path: &Path) -> Result<TlsKey, FileError<TlsKeyError>> {
        read_one(path, TlsKey::parse)
    }

    /// The keys for TLS, one for each way in which a host may derive it. The specified way is the
    /// first; the last two have the same identity.
    pub fn secrets(&self, host: &Nqn, subsystem: &Nqn) -> Vec<TlsSecret> {
        let names = format!("{host} {subsystem}");
        let number = if self.hash == Hash::Sha384 { "02" } else { "01" };
        // With the digest in the identity, and without.
        let derive = |labels: Labels| {
            let retained = match self.is_bound {
                true => labels.expand(self.hash, &self.key, "HostNQN", host.as_str().as_bytes()),
                false => self.key.clone(),
            };
            let digest = mac(self.hash, &retained, &[names.as_bytes(), b" NVMe-over-Fabrics"]);
            let digest = STANDARD.encode(&*digest);
            let secret = |identity: String, context: &str| {
                let key = labels.expand(self.hash, &retained, "nvme-tls-psk", context.as_bytes());
                TlsSecret { identity, key }
            };
            let older = format!("NVMe0R{number} {names}");
            let context = format!("{number} {digest}");
            (secret(format!("NVMe1R{number} {names} {digest}"), &context), secret(older.clone(), &older))
        };
        let [(first, last), (older, before_last)] = [Labels::Specified, Labels::Older].map(derive);
        let mut secrets = vec![first];
        // For a key that is not bound the digests are equal; the specified key has precedence.
        if older.identity != secrets[0].identity {
            secrets.push(older);
        }
        secrets.extend([before_last, last]);
        secrets
    }
}

impl PartialEq for TlsKey {
    fn eq(&self, other: &TlsKey) -> bool {
        (self.is_bound, self.hash) == (other.is_bound, other.hash) && bool::from(self.key.ct_eq(&other.key))
    }
}

impl Eq for TlsKey {}

impl std::fmt::Debug for TlsKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TlsKey(…)")
    }
}

/// The host and the subsystem that an identity names, if it is one of [`TlsKey::secrets`].
pub fn named_by(identity: &str) -> Option<(Nqn, Nqn)> {
    let mut words = identity.split(' ');
    words.next().filter(|kind| matches!(*kind, "NVMe0R01" | "NVMe1R01" | "NVMe0R02" | "NVMe1R02"))?;
    Some((Nqn::new(words.next()?).ok()?, Nqn::new(words.next()?).ok()?))
}

/// The hash of an identity that [`named_by`] accepts: its key is as long.
pub fn hash_of(identity: &str) -> Hash {
    if identity.get(5..8) == Some("R02") { Hash::Sha384 } else { Hash::Sha256 }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUND: &str = "NVMeTLSkey-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
    const LONGER: &str =
        "NVMeTLSkey-1:02:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vcSEgBQ==:";

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn nqn(text: &str) -> Nqn {
        Nqn::new(text).unwrap()
    }

    /// The older keys for SHA-256 are those that nvme-cli 2.13 (libnvme 1.13) put into a kernel's
    /// keyring. Another program computed all others from the formulas.
    #[test]
    fn secrets_are_those_of_other_implementations() {
        let derived = |text: &str| -> Vec<(String, String)> {
            let secrets = TlsKey::parse(text).unwrap().secrets(&nqn("nqn.host"), &nqn("nqn.sub"));
            secrets.iter().map(|secret| (secret.identity.clone(), hex(&secret.key))).collect()
        };
        let expect = |identity: &str, key: &str| (identity.to_owned(), key.to_owned());
        let bound = [
            expect(
                "NVMe1R01 nqn.host nqn.sub gEqCzkl04JXNNRhlec5POtT02lIVWjYjIzXBKFW3oOw=",
                "ec9341b612c08e42032cfc8892288692fac1bcd6491aff5b7f68b85b9a41d1c7",
            ),
            expect(
                "NVMe1R01 nqn.host nqn.sub a0GofTg9YIYsEBBtbHd3kZG2Xu9iYHBumDqEOh+WXmI=",
                "9c09551defc7ed3738fbd985662eb2e2aeb9430f649379ddfaf09333b97c2fbe",
            ),
            expect(
                "NVMe0R01 nqn.host nqn.sub",
                "d1a79448d09b39cba34ab734db9a72d4abb80cb7dfb168fcce9b256385c355c9",
            ),
            expect(
                "NVMe0R01 nqn.host nqn.sub",
                "17d05ed84257cda49b8c6312b97cb4230aa303bbad554b0c994821a385813461",
            ),
        ];
        assert_eq!(derived(BOUND), bound);
        let longer = [
            expect(
                "NVMe1R02 nqn.host nqn.sub auWOJAeYLM0nX5duhncbi5LSxOsBGOk7VvgOXDJYxs+6LxKleOdOsYRuZIlp+tfH",
                "8a76d009ab70d45182d956c1d6584924fe336b0be7dc79f62a50c8d2b4525777e24a320c5490d7be0d6dac9318012fde",
            ),
            expect(
                "NVMe1R02 nqn.host nqn.sub iiaF4s2S+T831oGjzrtvo0S0wxRSa9OLcRrS2fy4f5R3Rx9KgCQQ3nUgPRpvfzqC",
                "8a7ea025b10adf172d2983d3fdbf1d6a6d5beb4fa9d3bf12c68fb43731e8165ceecb462b66087474f13cd15551d73f18",
            ),
            expect(
                "NVMe0R02 nqn.host nqn.sub",
                "116dc354ca52b370ba0f181933bf21a9de0a6ac7ca30fa392f1b61501da5d02a10ad2e69b42bb06e871835391e2cf47a",
            ),
            expect(
                "NVMe0R02 nqn.host nqn.sub",
                "77c34a4eee1156e5a96189cb8f0f0f18a9761be85929c03026bd1cb75325efaf907a92cef44cea50805137645f9be13d",
            ),
        ];
        assert_eq!(derived(LONGER), longer);
        let unbound = derived(&BOUND.replace(":01:", ":00:"));
        assert_eq!(unbound.len(), 3);
        assert_eq!(
            unbound[1],
            expect(
                "NVMe0R01 nqn.host nqn.sub",
                "d82dd0760fc274afa145a45fdf18df44d485f7b04c188fa355dc0e6e51377c01"
            )
        );
    }

    #[test]
    fn identities_name_host_and_subsystem() {
        let key = TlsKey::parse(BOUND).unwrap();
        let (host, subsystem) = (nqn("nqn.host"), nqn("nqn.sub"));
        let longer = TlsKey::parse(LONGER).unwrap();
        for secret in [key, longer].iter().flat_map(|key| key.secrets(&host, &subsystem)) {
            assert_eq!(named_by(&secret.identity), Some((host.clone(), subsystem.clone())));
        }
        assert_eq!(named_by("alice"), None);
        assert_eq!(named_by("NVMe0R03 nqn.host nqn.sub"), None);
    }

    #[test]
    fn an_invalid_key_is_refused_and_not_quoted() {
        for (text, why) in [
            ("", TlsKeyError::Form),
            ("NVMeTLSkey-1:01:AAEC", TlsKeyError::Form),
            ("DHHC-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:", TlsKeyError::Form),
            (&BOUND.replace(":01:", ":03:"), TlsKeyError::Hash),
            (&BOUND.replace(":01:", ":02:"), TlsKeyError::Content(KeyError::Length(32))),
            (&LONGER.replace(":02:", ":01:"), TlsKeyError::Content(KeyError::Length(48))),
            (&BOUND.replace("AAEC", "AAED"), TlsKeyError::Content(KeyError::Checksum)),
            ("NVMeTLSkey-1:01:AAECAwQF:", TlsKeyError::Content(KeyError::Length(2))),
            ("NVMeTLSkey-1:01:!:", TlsKeyError::Content(KeyError::Base64)),
        ] {
            assert_eq!(TlsKey::parse(text).err(), Some(why), "{text}");
        }
    }

    #[test]
    fn a_hosts_file_has_one_key() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        secrets::write(&path, format!("{BOUND}\n")).unwrap();
        let key = TlsKey::read(&path).unwrap();
        assert_eq!(key, TlsKey::parse(BOUND).unwrap());
        assert_ne!(key, TlsKey::parse(&BOUND.replace(":01:", ":00:")).unwrap());
        secrets::write(&path, format!("nqn.host {BOUND}\n")).unwrap();
        let error = TlsKey::read(&path).unwrap_err().to_string();
        assert!(
            error.contains("/key: a key looks like NVMeTLSkey-1:01:") && !error.contains("AAEC"),
            "{error}"
        );
    }
}
