//! Responses to challenges: keyed hashes of the challenge and of the names of both sides.
//!
//! Source: Base Specification 2.0, 8.13.5.3 to 8.13.5.5.

use crate::Key;
use crate::mac::{digest, mac};
use nvme::fabrics::Nqn;
use nvme::fabrics::auth::Hash;
use zeroize::Zeroizing;

/// The side that responds to a challenge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Prover {
    Host,
    Controller,
}

/// The names of both sides.
#[derive(Clone, Debug)]
pub struct Parties {
    /// The host.
    pub host: Nqn,
    /// The subsystem, whose name its controllers use.
    pub subsystem: Nqn,
}

/// The data of a transaction that both sides know before the first response.
pub(crate) struct Context<'a> {
    pub(crate) parties: &'a Parties,
    pub(crate) hash: Hash,
    pub(crate) transaction: u16,
    /// The secret of Diffie-Hellman; `None` without a group.
    pub(crate) shared: Option<&'a [u8]>,
}

impl Context<'_> {
    /// The response of `prover`, which has `key`, to a challenge.
    pub(crate) fn respond(
        &self,
        prover: Prover,
        key: &Key,
        sequence: u32,
        challenge: &[u8],
    ) -> Zeroizing<Vec<u8>> {
        let Parties { host, subsystem } = self.parties;
        let (role, prover, other): (&[u8], _, _) = match prover {
            Prover::Host => (b"HostHost", host, subsystem),
            Prover::Controller => (b"Controller", subsystem, host),
        };
        let augmented = self.shared.map(|shared| mac(self.hash, &digest(self.hash, shared), &[challenge]));
        let parts: [&[u8]; 8] = [
            augmented.as_deref().map_or(challenge, |augmented| augmented),
            &sequence.to_le_bytes(),
            &self.transaction.to_le_bytes(),
            &[0], // SC_C: no secure channel follows
            role,
            prover.as_str().as_bytes(),
            &[0],
            other.as_str().as_bytes(),
        ];
        mac(self.hash, &key.bound_to(prover), &parts)
    }
}

#[cfg(test)]
pub(crate) fn hex_of_hash(bytes: &[u8]) -> String {
    digest(Hash::Sha256, bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parties() -> Parties {
        let name = |text| Nqn::new(text).unwrap();
        Parties {
            host: name("nqn.2014-08.org.example:host"),
            subsystem: name("nqn.2014-08.org.example:disk"),
        }
    }

    fn key(text: &str) -> Key {
        Key::parse(text).unwrap()
    }

    /// `nvme gen-dhchap-key -m 1 -n nqn.2014-08.org.example:host -s 00…1f` prints the bound secret.
    #[test]
    fn a_secret_is_bound_to_a_name_as_nvme_cli_does_it() {
        let secret = key("DHHC-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:");
        let bound = key("DHHC-1:00:eGOjOSJAEO/H5bDhWMzHdMAz5kyhHZlbqU1HWBl05iWbjbyw:");
        assert!(secret.bound_to(&parties().host) == bound.bound_to(&parties().subsystem));
        assert!(secret.bound_to(&parties().host) != secret.bound_to(&parties().subsystem));
    }

    /// The expected values are those of Python's `hmac` and `hashlib`, by the formulas of the
    /// specification:
    ///
    /// ```python
    /// C = bytes(range(h)); S, T = 0x04030201, 0x0605
    /// bound = hmac.digest(bytes(range(32)), (me + "NVMe-over-Fabrics").encode(), key_hash)
    /// if shared: C = hmac.digest(hashlib.new(hash, shared).digest(), C, hash)
    /// head = C + S.to_bytes(4, "little") + T.to_bytes(2, "little")
    /// hmac.digest(bound, head + b"\0" + role + me + b"\0" + other, hash)
    /// ```
    #[test]
    fn responses_are_those_of_another_implementation() {
        let expected = [
            [
                "f70798cb1e1bd76225685e4321052e72ac041c09fb3617875facd451ed57fd36",
                "903285ef759de356dc6fdb43a0a19efe46e907ffb6e07880388fd4739b77d1fa",
                "b906489a5746cf5b6d52dee8530987170a6e513420bf96cb7697bda821b9583d",
                "da32fd0ba1233c2eb4537ab1448ad7564aee1b4e7f0b4e6c2c990924af1cdaf5",
            ],
            [
                "0ad7ed34321a47aa2cd781131e710d68cd00c7f43ec48100630aace8cdaf63e5e1c9ce0e9e9a9ae23472282af847ed45",
                "fa7c0864864dfd3cf0db94ebc4445c9ee5536d4510b8d61cfefcb6d4240a693308470d7a8f4d2863c75c7ea76f9980c8",
                "1c206a8419e6e76588ea62a60779a0f3b985a193d337d79a23d640ef098d4e49ba30bb6aaae29d6e2eb639c800d57174",
                "75347398ab4de932c63179d34037ca5a6e60c75d1e468edbe0872480778b975e1da8eadba1702b0df6f8b18554c6390d",
            ],
            [
                "59aaf6bbd36fd5e87d85b5e63564abbf60a44e0023e9b97cc640c47abae9e286\
                 461c9d138693fcc7a262bea920934b0e07dd74db32cfbc1f272379b88d17c673",
                "0b03cc5068af61140530b227b257d937748ae6f36f1ef2ec72a866e29c20398c\
                 573e570414b2f0f21703f1b9ad2df034d2c54248802758ddbdbfbcf22250a486",
                "92e8209ef3ca0fa7fe49d578e3babc843ed8ec170c010fa1a8016cca7dad25b0\
                 2d080db4fa32c188cf7557121b5014d6fe6c1e8aa2d5aece17ceeca32d1fc88a",
                "ceee0f23b696b95029d75109275ce5a228df6d5a58acead60dd4724c18b3d08a\
                 18523d30fc5e12f302967dac7e51ffd732ac6a03fa955f5de593bec30ab1802e",
            ],
        ];
        let key = key("DHHC-1:02:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:");
        let shared = [0x5a; 256];
        for (hash, values) in Hash::ALL.iter().zip(expected) {
            let challenge: Vec<u8> = (0..hash.bytes() as u8).collect();
            let cases = [None, Some(&shared[..])]
                .into_iter()
                .flat_map(|shared| [Prover::Host, Prover::Controller].map(|prover| (shared, prover)));
            for ((shared, prover), expected) in cases.zip(values) {
                let context = Context { parties: &parties(), hash: *hash, transaction: 0x0605, shared };
                let response = context.respond(prover, &key, 0x0403_0201, &challenge);
                let text: String = response.iter().map(|byte| format!("{byte:02x}")).collect();
                assert_eq!(text, expected, "{hash} {prover:?}");
            }
        }
    }
}
