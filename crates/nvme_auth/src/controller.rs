//! The controller's side of one authentication: messages in, messages out.
//!
//! ```text
//!   Negotiate? ─► owes Challenge ─► Reply? ─► owes Success1 ─┬─► Success2? ─┬─► authenticated
//!                                                            └──────────────┘
//!   anything wrong ─► owes Failure1 ─► failed          Failure2 ─► failed
//! ```
//!
//! `?` waits for a message of the host; *owes* waits until the host receives a message. A
//! connection has one attempt: a host that fails must connect again.

use crate::group::Half;
use crate::keys::HostKeys;
use crate::response::{Context, Parties, Prover};
use crate::{next_sequence, random};
use nvme::fabrics::auth::{self, Body, Challenge, Failure, Group, Hash, Message, Negotiate, Reply, Success1};
use std::sync::Arc;
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

/// The hashes and groups that a target accepts, in order of preference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choices {
    /// Hashes.
    pub hashes: Vec<Hash>,
    /// Groups.
    pub groups: Vec<Group>,
}

impl Default for Choices {
    /// All of them. Prefers the strongest hash and the cheapest group. No group is used only if the
    /// host supports none: an eavesdropper can then test guesses of the secret offline, among 2²⁵⁶.
    fn default() -> Choices {
        let [null, groups @ ..] = Group::ALL else { unreachable!("there are six") };
        Choices {
            hashes: Hash::ALL.iter().rev().copied().collect(),
            groups: groups.iter().chain([null]).copied().collect(),
        }
    }
}

impl Choices {
    /// Whether no host can ever authenticate.
    pub fn is_empty(&self) -> bool {
        self.hashes.is_empty() || self.groups.is_empty()
    }
}

/// The result of an authentication so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// More messages must follow.
    Pending,
    /// The host has proven its identity, and the controller too if the host required that.
    Authenticated,
    /// One side has not proven its identity.
    Failed(Failure),
}

/// The host sent a message that is not allowed in this state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfTurn;

/// One authentication.
pub struct Controller {
    parties: Parties,
    keys: Arc<HostKeys>,
    choices: Arc<Choices>,
    transaction: u16,
    chosen: Option<(Hash, Group)>,
    stage: Stage,
}

/// The state of an authentication.
enum Stage {
    Negotiate,
    Owes(Vec<u8>, Then),
    Reply(Asked),
    Success2,
    Ended(Outcome),
}

/// The state after the host has received the owed message.
enum Then {
    Reply(Asked),
    Success2,
    End(Outcome),
}

/// The challenge that was sent to the host.
struct Asked {
    hash: Hash,
    half: Half,
    sequence: u32,
    challenge: Zeroizing<Vec<u8>>,
}

impl Controller {
    /// Authenticates a host that shares `keys`.
    pub fn new(parties: Parties, keys: Arc<HostKeys>, choices: Arc<Choices>) -> Controller {
        Controller { parties, keys, choices, transaction: 0, chosen: None, stage: Stage::Negotiate }
    }

    /// The result so far.
    pub fn outcome(&self) -> Outcome {
        match self.stage {
            Stage::Ended(outcome) => outcome,
            _ => Outcome::Pending,
        }
    }

    /// The chosen hash and group, after the host's offer.
    pub fn chosen(&self) -> Option<(Hash, Group)> {
        self.chosen
    }

    /// Handles a message of the host. If it is invalid, the host receives the reason as the next
    /// owed message.
    ///
    /// # Errors
    /// If the authentication has ended, or will end with the message that the host has not received
    /// yet.
    pub fn take(&mut self, bytes: &[u8]) -> Result<(), OutOfTurn> {
        let stage = match std::mem::replace(&mut self.stage, Stage::Negotiate) {
            ended @ (Stage::Owes(_, Then::End(_)) | Stage::Ended(_)) => {
                self.stage = ended;
                return Err(OutOfTurn);
            }
            stage => stage,
        };
        self.stage = self.answer(stage, bytes).unwrap_or_else(|failure| self.fail(failure));
        Ok(())
    }

    /// The message that the host receives next.
    pub fn owed(&self) -> Option<&[u8]> {
        match &self.stage {
            Stage::Owes(message, _) => Some(message),
            _ => None,
        }
    }

    /// Called after the host has received the owed message.
    pub fn deliver(&mut self) {
        self.stage = match std::mem::replace(&mut self.stage, Stage::Negotiate) {
            Stage::Owes(_, Then::Reply(asked)) => Stage::Reply(asked),
            Stage::Owes(_, Then::Success2) => Stage::Success2,
            Stage::Owes(_, Then::End(outcome)) => Stage::Ended(outcome),
            stage => stage,
        };
    }

    fn answer(&mut self, stage: Stage, bytes: &[u8]) -> Result<Stage, Failure> {
        if matches!(stage, Stage::Negotiate) {
            self.transaction = auth::transaction(bytes).unwrap_or_default();
        }
        let (message, len) = Message::parse(bytes)?;
        if message.transaction != self.transaction || len != bytes.len() {
            return Err(Failure::Payload);
        }
        match (stage, message.body) {
            (_, Body::Failure2(failure)) => Ok(Stage::Ended(Outcome::Failed(failure))),
            (Stage::Negotiate, Body::Negotiate(offer)) => self.challenge(&offer),
            (Stage::Reply(asked), Body::Reply(reply)) => self.judge(asked, &reply),
            (Stage::Success2, Body::Success2) => Ok(Stage::Ended(Outcome::Authenticated)),
            _ => Err(Failure::Message),
        }
    }

    fn fail(&self, failure: Failure) -> Stage {
        self.owe(Body::Failure1(failure), Then::End(Outcome::Failed(failure)))
    }

    fn owe(&self, body: Body<'_>, then: Then) -> Stage {
        Stage::Owes(Message { transaction: self.transaction, body }.encode(), then)
    }

    fn challenge(&mut self, offer: &Negotiate) -> Result<Stage, Failure> {
        if offer.secure_channel != 0 {
            return Err(Failure::SecureChannel);
        }
        let hash = self.choices.hashes.iter().find(|hash| offer.hashes.contains(hash));
        let hash = *hash.ok_or(Failure::Hash)?;
        let group = self.choices.groups.iter().find(|group| offer.groups.contains(group));
        let group = *group.ok_or(Failure::Group)?;
        let half = Half::generate(group)?;
        let mut challenge = Zeroizing::new(vec![0; hash.bytes()]);
        random(&mut challenge)?;
        let sequence = next_sequence()?;
        let message = Challenge { hash, group, sequence, challenge: &challenge, public: half.public() };
        let message = Message { transaction: self.transaction, body: Body::Challenge(message) }.encode();
        self.chosen = Some((hash, group));
        Ok(Stage::Owes(message, Then::Reply(Asked { hash, half, sequence, challenge })))
    }

    fn judge(&self, asked: Asked, reply: &Reply<'_>) -> Result<Stage, Failure> {
        let Asked { hash, half, sequence, challenge } = asked;
        if reply.response.len() != hash.bytes() {
            return Err(Failure::Hash);
        }
        let shared = half.agree(reply.public)?;
        let shared = shared.as_ref().map(|shared| &shared[..]);
        let context = Context { parties: &self.parties, hash, transaction: self.transaction, shared };
        let expected = context.respond(Prover::Host, &self.keys.host, sequence, &challenge);
        if !bool::from(expected.ct_eq(reply.response)) {
            return Err(Failure::Failed);
        }
        let hash_bytes = hash.bytes() as u8; // 64 at most
        // A challenge with the sequence number 0 is for a secure channel only.
        let Some(challenge) = reply.challenge.filter(|_| reply.sequence != 0) else {
            let success = Success1 { hash_bytes, response: None };
            return Ok(self.owe(Body::Success1(success), Then::End(Outcome::Authenticated)));
        };
        let Some(key) = &self.keys.controller else {
            tracing::warn!(
                host = self.parties.host.as_str(),
                "authentication failed: the host requires proof of the target, which has no secret for it"
            );
            return Err(Failure::Failed);
        };
        let response = context.respond(Prover::Controller, key, reply.sequence, challenge);
        let success = Success1 { hash_bytes, response: Some(&response) };
        Ok(self.owe(Body::Success1(success), Then::Success2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::{Fault, Host, Refusal};
    use crate::{Key, Keys};
    use nvme::fabrics::Nqn;

    const SECRET: &str = "DHHC-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
    const OTHER: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";

    fn parties() -> Parties {
        let name = |text| Nqn::new(text).unwrap();
        Parties { host: name("nqn.host"), subsystem: name("nqn.disk") }
    }

    fn key(text: &str) -> Key {
        Key::parse(text).unwrap()
    }

    fn controller(choices: Choices) -> Controller {
        let keys = HostKeys { host: key(SECRET), controller: Some(key(OTHER)) };
        Controller::new(parties(), Arc::new(keys), Arc::new(choices))
    }

    fn only(hash: Hash, group: Group) -> Choices {
        Choices { hashes: vec![hash], groups: vec![group] }
    }

    /// Delivers the owed message to the host.
    fn ask(controller: &mut Controller) -> Vec<u8> {
        let message = controller.owed().unwrap().to_vec();
        controller.deliver();
        message
    }

    /// Exchanges messages to the end; returns the results of the host and of the controller.
    fn exchange(controller: &mut Controller, mut host: Host<'_>) -> (Result<(), Refusal>, Outcome) {
        controller.take(&host.negotiate()).unwrap();
        let reply = match host.reply(&ask(controller)) {
            Ok(reply) => reply,
            Err(refusal) => return (Err(refusal), controller.outcome()),
        };
        controller.take(&reply).unwrap();
        let end = host.conclude(&ask(controller));
        if let Ok(Some(message)) = &end {
            assert_eq!(controller.outcome(), Outcome::Pending);
            controller.take(message).unwrap();
        }
        if let Err(Refusal::Ours(fault)) = end {
            controller.take(&host.failure(fault)).unwrap();
        }
        (end.map(|_| ()), controller.outcome())
    }

    #[test]
    fn a_host_with_the_secret_is_authenticated_with_every_hash_and_group() {
        let (secret, other) = (key(SECRET), key(OTHER));
        for (hash, group) in Hash::ALL.iter().flat_map(|hash| Group::ALL.iter().map(|group| (*hash, *group)))
        {
            for other in [None, Some(&other)] {
                let mut controller = controller(only(hash, group));
                let end = exchange(&mut controller, Host::new(&parties(), &secret, other, 7));
                assert_eq!(end, (Ok(()), Outcome::Authenticated), "{hash} {group}");
                assert!(controller.owed().is_none());
                assert_eq!(controller.take(&[]), Err(OutOfTurn));
            }
        }
    }

    #[test]
    fn a_side_without_the_secret_is_refused() {
        let (secret, other) = (key(SECRET), key(OTHER));
        for group in [Group::Null, Group::Ffdhe2048] {
            let choices = || only(Hash::Sha384, group);
            let end = exchange(&mut controller(choices()), Host::new(&parties(), &other, None, 1));
            assert_eq!(end, (Err(Refusal::Theirs(Failure::Failed)), Outcome::Failed(Failure::Failed)));
            let end = exchange(&mut controller(choices()), Host::new(&parties(), &secret, Some(&secret), 1));
            assert_eq!(end, (Err(Fault::WrongProof.into()), Outcome::Failed(Failure::Failed)));
            // The secret of one host does not authenticate another.
            let stranger = Parties { host: Nqn::new("nqn.stranger").unwrap(), ..parties() };
            let end = exchange(&mut controller(choices()), Host::new(&stranger, &secret, None, 1));
            assert_eq!(end.1, Outcome::Failed(Failure::Failed));
            // A controller without a secret of its own cannot prove its identity.
            let mut plain = controller(choices());
            plain.keys = Arc::new(HostKeys { host: key(SECRET), controller: None });
            let end = exchange(&mut plain, Host::new(&parties(), &secret, Some(&other), 1));
            assert_eq!(end, (Err(Refusal::Theirs(Failure::Failed)), Outcome::Failed(Failure::Failed)));
        }
    }

    #[test]
    fn the_target_chooses_by_its_preference_from_the_hosts_offer() {
        let chosen = |hashes: &[Hash], groups: &[Group]| {
            let mut controller = controller(Choices::default());
            let offer = Negotiate { secure_channel: 0, hashes: hashes.to_vec(), groups: groups.to_vec() };
            let message = Message { transaction: 9, body: Body::Negotiate(offer) };
            controller.take(&message.encode()).unwrap();
            match Message::parse(controller.owed().unwrap()).unwrap().0.body {
                Body::Challenge(challenge) => Ok((challenge.hash, challenge.group)),
                Body::Failure1(failure) => Err(failure),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(chosen(Hash::ALL, Group::ALL), Ok((Hash::Sha512, Group::Ffdhe2048)));
        assert_eq!(chosen(&[Hash::Sha256], &[Group::Null]), Ok((Hash::Sha256, Group::Null)));
        assert_eq!(chosen(&[], Group::ALL), Err(Failure::Hash));
        assert_eq!(chosen(Hash::ALL, &[]), Err(Failure::Group));
    }

    #[test]
    fn every_wrong_message_ends_it_with_the_reason() {
        let (secret, parties) = (key(SECRET), parties());
        let choices = || only(Hash::Sha256, Group::Ffdhe2048);
        let failure = |at_reply: bool, change: &dyn Fn(&mut Vec<u8>)| {
            let (mut controller, mut host) = (controller(choices()), Host::new(&parties, &secret, None, 5));
            let mut message = host.negotiate();
            if at_reply {
                controller.take(&message).unwrap();
                message = host.reply(&ask(&mut controller)).unwrap();
            }
            change(&mut message);
            controller.take(&message).unwrap();
            assert_eq!(controller.outcome(), Outcome::Pending, "the host has not received the reason");
            assert_eq!(controller.take(&message), Err(OutOfTurn));
            let Body::Failure1(failure) = Message::parse(controller.owed().unwrap()).unwrap().0.body else {
                panic!("no failure")
            };
            controller.deliver();
            assert_eq!(controller.outcome(), Outcome::Failed(failure));
            assert!(controller.owed().is_none());
            failure
        };
        assert_eq!(failure(false, &|bytes| bytes.clear()), Failure::Payload);
        assert_eq!(failure(false, &|bytes| bytes.truncate(40)), Failure::Payload);
        assert_eq!(failure(false, &|bytes| bytes.push(0)), Failure::Payload);
        assert_eq!(failure(false, &|bytes| bytes[6] = 1), Failure::SecureChannel);
        assert_eq!(failure(false, &|bytes| bytes[8] = 9), Failure::Protocol);
        assert_eq!(failure(false, &|bytes| bytes[1] = 4), Failure::Message);
        assert_eq!(failure(false, &|bytes| (bytes[0], bytes[1]) = (1, 4)), Failure::Payload);
        assert_eq!(failure(true, &|bytes| bytes.truncate(15)), Failure::Payload);
        assert_eq!(failure(true, &|bytes| bytes.truncate(300)), Failure::Payload);
        assert_eq!(failure(true, &|bytes| bytes.push(0)), Failure::Payload);
        assert_eq!(failure(true, &|bytes| bytes[4] = 6), Failure::Payload);
        assert_eq!(failure(true, &|bytes| bytes[8] = 2), Failure::Payload);
        assert_eq!(failure(true, &|bytes| bytes[16] ^= 1), Failure::Failed);
        assert_eq!(failure(true, &|bytes| bytes[100] ^= 1), Failure::Failed);
        assert_eq!(failure(true, &|bytes| bytes[80..].fill(0)), Failure::Group);
        // Shorter values of both kinds.
        assert_eq!(
            failure(true, &|bytes| {
                bytes[6] = 16;
                bytes.truncate(304);
            }),
            Failure::Hash
        );
        assert_eq!(
            failure(true, &|bytes| {
                bytes[10] = 4;
                bytes[11] = 0;
                bytes.truncate(84);
            }),
            Failure::Payload
        );
        let negotiation = Host::new(&parties, &secret, None, 5).negotiate();
        assert_eq!(failure(true, &|bytes| bytes.clone_from(&negotiation)), Failure::Message);
    }

    #[test]
    fn a_replayed_reply_is_refused() {
        let (secret, parties) = (key(SECRET), parties());
        let choices = only(Hash::Sha256, Group::Null);
        let mut first = controller(choices.clone());
        let mut host = Host::new(&parties, &secret, None, 5);
        first.take(&host.negotiate()).unwrap();
        let reply = host.reply(&ask(&mut first)).unwrap();
        first.take(&reply).unwrap();
        ask(&mut first);
        assert_eq!(first.outcome(), Outcome::Authenticated);
        let mut second = controller(choices);
        second.take(&host.negotiate()).unwrap();
        ask(&mut second);
        second.take(&reply).unwrap();
        ask(&mut second);
        assert_eq!(second.outcome(), Outcome::Failed(Failure::Failed));
    }

    #[test]
    fn a_host_refuses_a_target_without_proof() {
        let (secret, other, parties) = (key(SECRET), key(OTHER), parties());
        let mut controller = controller(only(Hash::Sha256, Group::Null));
        let mut host = Host::new(&parties, &secret, Some(&other), 5);
        controller.take(&host.negotiate()).unwrap();
        let challenge = ask(&mut controller);
        let success = |hash_bytes, response| {
            Message { transaction: 5, body: Body::Success1(Success1 { hash_bytes, response }) }.encode()
        };
        let invalid = |failure| Err(Fault::InvalidMessage(failure).into());
        assert_eq!(host.conclude(&success(32, None)), invalid(Failure::Message), "not at the start");
        host.reply(&challenge).unwrap();
        assert_eq!(host.conclude(&success(32, None)), Err(Fault::NoProof.into()));
        assert_eq!(host.conclude(&success(32, Some(&[0; 32]))), Err(Fault::WrongProof.into()));
        assert_eq!(host.conclude(&success(48, Some(&[0; 48]))), invalid(Failure::Hash));
        assert_eq!(host.conclude(&challenge), invalid(Failure::Message));
        assert_eq!(host.conclude(&[]), invalid(Failure::Payload));
        let mut late = challenge.clone();
        late[4] = 6;
        assert_eq!(host.reply(&late).unwrap_err(), Fault::InvalidMessage(Failure::Payload).into());
    }

    #[test]
    fn nothing_of_a_secret_is_printed() {
        assert!(!format!("{:?}", HostKeys { host: key(SECRET), controller: None }).contains("AAEC"));
        assert!(format!("{:?}", Keys::default()).contains("Keys"));
    }
}
