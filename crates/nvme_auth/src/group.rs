//! Diffie-Hellman over the groups of RFC 7919: a secret that both sides compute and an eavesdropper
//! cannot.

use crate::primes::prime;
use crate::random;
use crypto_bigint::modular::{BoxedMontyForm, BoxedMontyParams};
use crypto_bigint::{BoxedUint, Odd};
use nvme::fabrics::auth::{Failure, Group};
use zeroize::{Zeroize, Zeroizing};

/// Bytes of an exponent: more than twice the strength of the strongest group (RFC 7919, 5.2,
/// requires 400 bits).
const EXPONENT_BYTES: usize = 64;
/// The generator of every group.
const GENERATOR: u8 = 2;

/// The half of one side. Used once.
pub(crate) struct Half {
    group: Group,
    exponent: Zeroizing<[u8; EXPONENT_BYTES]>,
    public: Vec<u8>,
}

impl Half {
    /// Generates a half. Takes about 1 ms with 2048 bits, and 20 ms with 8192.
    ///
    /// # Errors
    /// If the operating system returns no random bytes.
    pub(crate) fn generate(group: Group) -> Result<Half, Failure> {
        let mut exponent = Zeroizing::new([0; EXPONENT_BYTES]);
        if group != Group::Null {
            random(&mut exponent[..])?;
        }
        Ok(Half::with(group, exponent))
    }

    fn with(group: Group, exponent: Zeroizing<[u8; EXPONENT_BYTES]>) -> Half {
        let mut generator = vec![0; group.bytes()];
        if let Some(lowest) = generator.last_mut() {
            *lowest = GENERATOR;
        }
        let public = power(group, &generator, &exponent).to_vec();
        Half { group, exponent, public }
    }

    /// The public value, sent to the other side: as long as the prime, and empty without a group.
    pub(crate) fn public(&self) -> &[u8] {
        &self.public
    }

    /// The secret shared with the side that sent the value `public`. `None` without a group.
    ///
    /// # Errors
    /// If the value is not of the group: its length is wrong, or it makes the secret predictable
    /// (RFC 7919, 5.1).
    pub(crate) fn agree(self, public: &[u8]) -> Result<Option<Zeroizing<Vec<u8>>>, Failure> {
        if public.len() != self.group.bytes() {
            return Err(Failure::Payload);
        }
        if self.group == Group::Null {
            return Ok(None);
        }
        if !is_between(public, self.group) {
            return Err(Failure::Group);
        }
        Ok(Some(power(self.group, public, &self.exponent)))
    }
}

/// Whether `1 < public < prime - 1`.
fn is_between(public: &[u8], group: Group) -> bool {
    let mut highest = prime(group).to_vec();
    highest[group.bytes() - 1] -= 1; // the lowest byte of every prime is 0xff
    let (lowest, rest) = public.split_last().expect("as long as the prime");
    let is_above = *lowest > 1 || rest.iter().any(|byte| *byte != 0);
    is_above && *public < *highest
}

/// `base ^ exponent` modulo the group's prime, with the length of the prime. The time does not
/// depend on `exponent`; it may depend on `base`, which is public.
fn power(group: Group, base: &[u8], exponent: &[u8; EXPONENT_BYTES]) -> Zeroizing<Vec<u8>> {
    if group == Group::Null {
        return Zeroizing::default();
    }
    let number = |bytes: &[u8]| {
        BoxedUint::from_be_slice(bytes, 8 * bytes.len() as u32).expect("as many bits as bytes have")
    };
    let modulus = Odd::new(number(prime(group))).expect("a prime is odd");
    let base = BoxedMontyForm::new(number(base), &BoxedMontyParams::new_vartime(modulus));
    let mut exponent = number(exponent);
    let mut power = base.pow(&exponent);
    let mut plain = power.retrieve();
    let bytes = Zeroizing::new(plain.to_be_bytes().into_vec());
    exponent.zeroize();
    power.zeroize();
    plain.zeroize();
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_agree_in_every_group() {
        for group in Group::ALL {
            let (one, other) = (Half::generate(*group).unwrap(), Half::generate(*group).unwrap());
            let (mine, yours) = (one.public().to_vec(), other.public().to_vec());
            assert_eq!(mine.len(), group.bytes());
            let secret = one.agree(&yours).unwrap();
            assert!(secret == other.agree(&mine).unwrap() && secret.is_some() == (*group != Group::Null));
            assert!(mine != yours || *group == Group::Null);
        }
    }

    /// From Python:
    ///
    /// ```python
    /// exponent = int.from_bytes(bytes(range(64)), 'big')
    /// hashlib.sha256(pow(2, exponent, p).to_bytes(b // 8, 'big'))
    /// ```
    #[test]
    fn powers_are_those_of_another_implementation() {
        let exponent = Zeroizing::new(std::array::from_fn(|i| i as u8));
        let expected = [
            (
                "2a0199e924494317f21660a90b0d1d18238389a2d85f800bd08cfba82e1b60ef",
                "b39001ebbd81d69bb8fffa26dcbd7d941707e70f35d7e8d578f452b8af848dd5",
            ),
            (
                "e83464b6d4a36955a05dcc356ac64559af81268fe7cc34f5948aaaf9bba93383",
                "cb6f8799f0af59bb3d7aa135db0e4f2a323027e8a25662e54c91dabfad1a6ff4",
            ),
            (
                "ce9e3e4cdee8b7603a15f69739d55cf2cbafe1d32d5bf700888976c91554496a",
                "31061aa67244f82a7e8d6fe3222e4332a1bcf7aec2a71963e373ff75830d8ac7",
            ),
            (
                "ccc0c127315888eb301fedbbc8df874b59c9c635e7f61511682aaea88bd1434d",
                "12bb44ec1f5606c74ad986696fcaa5b13e30d299ae5b3a2acf84a03e3674e69a",
            ),
            (
                "af82394e0273911c27ff62adaebfa44b27f5ff717a007b59e4d014966aaf5329",
                "726ea66cb70753d5c30257b062d0159cc4409d88664ac341abf253bae71adb75",
            ),
        ];
        for (group, (public, secret)) in Group::ALL[1..].iter().zip(expected) {
            let half = Half::with(*group, exponent.clone());
            assert_eq!(crate::response::hex_of_hash(half.public()), public, "{group}");
            // 3 is an arbitrary valid value.
            let mut other = vec![0; group.bytes()];
            other[group.bytes() - 1] = 3;
            assert_eq!(
                crate::response::hex_of_hash(&half.agree(&other).unwrap().unwrap()),
                secret,
                "{group}"
            );
        }
    }

    #[test]
    fn values_that_make_the_secret_predictable_are_refused() {
        for group in &Group::ALL[1..] {
            let half = || Half::with(*group, Zeroizing::new([1; 64]));
            let small = |value: u8| [vec![0; group.bytes() - 1], vec![value]].concat();
            let below = |less: u8| {
                let mut value = prime(*group).to_vec();
                value[group.bytes() - 1] -= less;
                value
            };
            for bad in [small(0), small(1), below(0), below(1), vec![0xff; group.bytes()]] {
                assert_eq!(half().agree(&bad).unwrap_err(), Failure::Group, "{group}");
            }
            assert!(half().agree(&small(2)).is_ok() && half().agree(&below(2)).is_ok());
            for bad in [vec![], vec![5; group.bytes() - 1], vec![5; group.bytes() + 1]] {
                assert_eq!(half().agree(&bad).unwrap_err(), Failure::Payload, "{group}");
            }
        }
    }
}
