//! Hashes, plain and with a key.

use hmac::{Hmac, KeyInit, Mac};
use nvme::fabrics::auth::Hash;
use sha2::{Digest, Sha256, Sha384, Sha512};
use zeroize::Zeroizing;

/// The keyed hash of the concatenated parts.
pub(crate) fn mac(hash: Hash, key: &[u8], parts: &[&[u8]]) -> Zeroizing<Vec<u8>> {
    fn of<M: Mac + KeyInit>(key: &[u8], parts: &[&[u8]]) -> Zeroizing<Vec<u8>> {
        let mut mac = <M as KeyInit>::new_from_slice(key).expect("keys may have any length");
        parts.iter().for_each(|part| mac.update(part));
        Zeroizing::new(mac.finalize().into_bytes().to_vec())
    }
    match hash {
        Hash::Sha256 => of::<Hmac<Sha256>>(key, parts),
        Hash::Sha384 => of::<Hmac<Sha384>>(key, parts),
        Hash::Sha512 => of::<Hmac<Sha512>>(key, parts),
    }
}

/// The hash of `bytes`.
pub(crate) fn digest(hash: Hash, bytes: &[u8]) -> Zeroizing<Vec<u8>> {
    Zeroizing::new(match hash {
        Hash::Sha256 => Sha256::digest(bytes).to_vec(),
        Hash::Sha384 => Sha384::digest(bytes).to_vec(),
        Hash::Sha512 => Sha512::digest(bytes).to_vec(),
    })
}
