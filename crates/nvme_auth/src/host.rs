//! The host's side of one authentication: messages in, messages out.
//!
//! The host sends [`Host::negotiate`], answers the challenge with [`Host::reply`], and checks the
//! result with [`Host::conclude`].

use crate::group::Half;
use crate::response::{Context, Parties, Prover};
use crate::{Key, next_sequence, random};
use nvme::fabrics::auth::{Body, Challenge, Failure, Group, Hash, Message, Negotiate, Reply, Success1};
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

/// One authentication.
pub struct Host<'a> {
    parties: &'a Parties,
    key: &'a Key,
    /// The secret that the target must prove to know.
    controller_key: Option<&'a Key>,
    transaction: u16,
    chosen: Option<(Hash, Group)>,
    expected: Option<Expected>,
}

/// The content that the target's next message must have.
struct Expected {
    hash: Hash,
    response: Option<Zeroizing<Vec<u8>>>,
}

/// Why an authentication failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The target refuses the host and expects no further message.
    #[error("the target refuses the host: {0}")]
    Theirs(Failure),
    /// The host refuses the target, and must send it [`Host::failure`].
    #[error("{0}")]
    Ours(#[from] Fault),
}

/// Why the host refuses the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// A message of the target is invalid, or not allowed in this state.
    #[error("the target sent an invalid authentication message: {0}")]
    InvalidMessage(Failure),
    /// The operating system returned no random numbers.
    #[error("the operating system returned no random numbers")]
    NoRandom,
    /// The target sent no proof.
    #[error("the target does not prove that it knows its secret")]
    NoProof,
    /// The target's proof is wrong.
    #[error("the target does not know its secret")]
    WrongProof,
}

impl Fault {
    /// The reason that the target receives.
    fn failure(self) -> Failure {
        match self {
            Fault::InvalidMessage(failure) => failure,
            Fault::NoRandom | Fault::NoProof | Fault::WrongProof => Failure::Failed,
        }
    }
}

impl<'a> Host<'a> {
    /// The authentication number `transaction` of a host with `key`. The target must prove to know
    /// `controller_key`, if any.
    pub fn new(
        parties: &'a Parties,
        key: &'a Key,
        controller_key: Option<&'a Key>,
        transaction: u16,
    ) -> Host<'a> {
        Host { parties, key, controller_key, transaction, chosen: None, expected: None }
    }

    /// The hash and group that the target has chosen, after its challenge.
    pub fn chosen(&self) -> Option<(Hash, Group)> {
        self.chosen
    }

    fn encode(&self, body: Body<'_>) -> Vec<u8> {
        Message { transaction: self.transaction, body }.encode()
    }

    /// The first message.
    pub fn negotiate(&self) -> Vec<u8> {
        let (hashes, groups) = (Hash::ALL.to_vec(), Group::ALL.to_vec());
        self.encode(Body::Negotiate(Negotiate { secure_channel: 0, hashes, groups }))
    }

    /// The message that ends the authentication after `fault`.
    pub fn failure(&self, fault: Fault) -> Vec<u8> {
        self.encode(Body::Failure2(fault.failure()))
    }

    /// The answer to a challenge.
    ///
    /// # Errors
    /// If `bytes` are not a valid challenge, or the target refuses the host.
    pub fn reply(&mut self, bytes: &[u8]) -> Result<Vec<u8>, Refusal> {
        let Body::Challenge(challenge) = self.parse(bytes)? else {
            return Err(Fault::InvalidMessage(Failure::Message).into());
        };
        let Challenge { hash, group, sequence, challenge, public } = challenge;
        let half = Half::generate(group).map_err(|_| Fault::NoRandom)?;
        let own_public = half.public().to_vec();
        let shared = half.agree(public).map_err(Fault::InvalidMessage)?;
        let shared = shared.as_ref().map(|shared| &shared[..]);
        let context = Context { parties: self.parties, hash, transaction: self.transaction, shared };
        let response = context.respond(Prover::Host, self.key, sequence, challenge);
        let mut reply = Reply { sequence: 0, response: &response, challenge: None, public: &own_public };
        let mut own_challenge = Zeroizing::new(vec![0; hash.bytes()]);
        let mut expected = None;
        if let Some(key) = self.controller_key {
            random(&mut own_challenge).map_err(|_| Fault::NoRandom)?;
            reply.sequence = next_sequence().map_err(|_| Fault::NoRandom)?;
            reply.challenge = Some(&own_challenge);
            expected = Some(context.respond(Prover::Controller, key, reply.sequence, &own_challenge));
        }
        self.chosen = Some((hash, group));
        self.expected = Some(Expected { hash, response: expected });
        Ok(self.encode(Body::Reply(reply)))
    }

    /// Checks the target's last message. Returns the message that the host must still send, if any.
    ///
    /// # Errors
    /// If the target refuses the host, or the host the target.
    pub fn conclude(&self, bytes: &[u8]) -> Result<Option<Vec<u8>>, Refusal> {
        let invalid = |failure| Refusal::from(Fault::InvalidMessage(failure));
        let Body::Success1(Success1 { hash_bytes, response }) = self.parse(bytes)? else {
            return Err(invalid(Failure::Message));
        };
        let Expected { hash, response: expected } =
            self.expected.as_ref().ok_or(invalid(Failure::Message))?;
        if usize::from(hash_bytes) != hash.bytes() {
            return Err(invalid(Failure::Hash));
        }
        let Some(expected) = expected else { return Ok(None) };
        let response = response.ok_or(Fault::NoProof)?;
        if !bool::from(expected.ct_eq(response)) {
            return Err(Fault::WrongProof.into());
        }
        Ok(Some(self.encode(Body::Success2)))
    }

    /// Parses a message. Ignores bytes after its end, because targets fill the whole buffer.
    fn parse<'m>(&self, bytes: &'m [u8]) -> Result<Body<'m>, Refusal> {
        let (message, _) = Message::parse(bytes).map_err(Fault::InvalidMessage)?;
        match message.body {
            Body::Failure1(failure) => Err(Refusal::Theirs(failure)),
            _ if message.transaction != self.transaction => {
                Err(Fault::InvalidMessage(Failure::Payload).into())
            }
            body => Ok(body),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Choices, Controller, HostKeys};
    use nvme::fabrics::Nqn;
    use proptest::prelude::*;
    use std::sync::Arc;

    proptest! {
        /// Valid messages with changed bytes, and of any length. Each is answered, or refused with
        /// a reason.
        #[test]
        fn every_message_of_either_side_is_answered_or_refused(
            changes in proptest::collection::vec((any::<u16>(), any::<u8>()), 0..3),
            len in 0usize..200,
            is_cut in any::<bool>(),
            group in prop_oneof![9 => Just(Group::Null), 1 => Just(Group::Ffdhe2048)],
        ) {
            let spoil = |message: &[u8]| {
                let mut message = message.to_vec();
                for (at, byte) in &changes {
                    let at = usize::from(*at) % message.len();
                    message[at] = *byte;
                }
                if is_cut {
                    message.resize(len, 0);
                }
                message
            };
            let name = |text| Nqn::new(text).unwrap();
            let parties = Parties { host: name("nqn.host"), subsystem: name("nqn.disk") };
            let key = |hash: &str| {
                Key::parse(&format!("DHHC-1:{hash}:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:")).unwrap()
            };
            let keys = Arc::new(HostKeys { host: key("01"), controller: Some(key("02")) });
            let choices = Arc::new(Choices { hashes: Hash::ALL.to_vec(), groups: vec![group] });
            let controller = || Controller::new(parties.clone(), keys.clone(), choices.clone());
            let mut host = Host::new(&parties, &keys.host, keys.controller.as_ref(), 3);
            // The controller receives an invalid message as the first, and then as the second. So
            // does the host.
            let mut spoiled = controller();
            spoiled.take(&spoil(&host.negotiate())).unwrap();
            prop_assert!(spoiled.owed().is_some());
            let mut controller = controller();
            controller.take(&host.negotiate()).unwrap();
            let challenge = controller.owed().unwrap().to_vec();
            controller.deliver();
            let _ = host.reply(&spoil(&challenge));
            let reply = host.reply(&challenge).unwrap();
            let spoiled_reply = spoil(&reply);
            controller.take(&spoiled_reply).unwrap();
            let end = controller.owed().unwrap().to_vec();
            // Only changes of reserved bytes are accepted.
            let is_same = Message::parse(&spoiled_reply) == Message::parse(&reply);
            prop_assert_eq!(host.conclude(&end).is_ok(), is_same && spoiled_reply.len() == reply.len());
            let _ = host.conclude(&spoil(&end));
        }
    }
}
