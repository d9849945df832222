//! NVMe in-band authentication: its two commands, and the messages of DH-HMAC-CHAP of both sides.
//!
//! ```text
//!   host                                       controller
//!     Send     Negotiate  ──────────────────────►            hashes and groups of the host
//!     Receive             ◄────────────────────── Challenge  the chosen ones, C1, the controller's DH value
//!     Send     Reply      ──────────────────────►            the response to C1, the host's DH value, optionally C2
//!     Receive             ◄────────────────────── Success1   the response to C2, if any
//!     Send     Success2   ──────────────────────►            only with C2
//! ```
//!
//! On an error the controller sends Failure1 or the host Failure2 instead, and the connection ends.
//! This module has only the layout; the crate `nvme-auth` computes the values.
//!
//! Source: Base Specification 2.0, 6.1 and 6.2 (the commands), 8.13.3 to 8.13.5 (the messages).

use super::FabricsType;
use crate::entry::{Sgl, SubmissionEntry};
use crate::wire::{put, u16_at, u32_at};

/// SECP: the security protocol number of in-band authentication.
const SECURITY_PROTOCOL: u32 = 0xe9;
/// SPSP0 and SPSP1, both 1.
const SECURITY_SPECIFIC: u32 = 0x0101;
/// Bytes of the header of every message: type, identifier, transaction, and two fields that depend
/// on the message.
const HEADER_BYTES: usize = 8;
/// Bytes of a challenge, a reply or a success before the values.
const FIXED_BYTES: usize = 16;
/// Bytes of one protocol descriptor of a negotiation.
const PROTOCOL_BYTES: usize = 64;
/// Limit of hashes, and of groups, of a descriptor.
const MAX_IDS: usize = 30;
/// AUTHID of DH-HMAC-CHAP.
const DH_HMAC_CHAP: u8 = 1;
/// Limit of bytes of any message: a negotiation of 255 protocols.
pub const MAX_MESSAGE_BYTES: usize = HEADER_BYTES + 255 * PROTOCOL_BYTES;

/// AUTH_TYPE of messages common to all protocols.
const COMMON: u8 = 0;
/// AUTH_TYPE of those of DH-HMAC-CHAP.
const CHAP: u8 = 1;

/// Bytes of a Send (TL), or of the buffer of a Receive (AL); `None` for another security protocol.
pub const fn parse_len(cdw: &[u32; 6]) -> Option<u32> {
    match cdw[0] == SECURITY_PROTOCOL << 24 | SECURITY_SPECIFIC << 8 {
        true => Some(cdw[1]),
        false => None,
    }
}

/// Authentication Send: the entry for a message of `len` bytes that `sgl` describes.
pub const fn send(command_id: u16, len: u32, sgl: Sgl) -> SubmissionEntry {
    FabricsType::AuthenticationSend.entry(command_id, sgl, dwords(len))
}

/// Authentication Receive: the entry that receives a message of up to `len` bytes.
pub const fn receive(command_id: u16, len: u32) -> SubmissionEntry {
    FabricsType::AuthenticationReceive.entry(command_id, Sgl::Transport { len }, dwords(len))
}

const fn dwords(len: u32) -> [u32; 6] {
    [SECURITY_PROTOCOL << 24 | SECURITY_SPECIFIC << 8, len, 0, 0, 0, 0]
}

/// A list of identifiers: variant, number, bytes of its values, name.
macro_rules! identifiers {
    ($(#[$doc:meta])* $kind:ident { $($(#[$of:meta])* $name:ident = $id:literal, $bytes:literal, $text:literal;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum $kind {
            $($(#[$of])* $name = $id,)*
        }

        impl $kind {
            /// All of them, the weakest first.
            pub const ALL: &[$kind] = &[$($kind::$name,)*];

            /// The one with this identifier.
            pub const fn of(id: u8) -> Option<$kind> {
                match id {
                    $($id => Some($kind::$name),)*
                    _ => None,
                }
            }

            /// Bytes of its values.
            pub const fn bytes(self) -> usize {
                match self {
                    $($kind::$name => $bytes,)*
                }
            }

            /// Its name in nvme-cli and nvmet.
            pub const fn name(self) -> &'static str {
                match self {
                    $($kind::$name => $text,)*
                }
            }
        }

        impl std::fmt::Display for $kind {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

identifiers! {
    /// A hash function (Base 8.13.5.1).
    Hash {
        /// SHA-256.
        Sha256 = 1, 32, "sha256";
        /// SHA-384.
        Sha384 = 2, 48, "sha384";
        /// SHA-512.
        Sha512 = 3, 64, "sha512";
    }
}

identifiers! {
    /// A Diffie-Hellman group (Base 8.13.5.1), of RFC 7919.
    Group {
        /// None: the challenges alone.
        Null = 0, 0, "null";
        /// 2048 bits.
        Ffdhe2048 = 1, 256, "ffdhe2048";
        /// 3072 bits.
        Ffdhe3072 = 2, 384, "ffdhe3072";
        /// 4096 bits.
        Ffdhe4096 = 3, 512, "ffdhe4096";
        /// 6144 bits.
        Ffdhe6144 = 4, 768, "ffdhe6144";
        /// 8192 bits.
        Ffdhe8192 = 5, 1024, "ffdhe8192";
    }
}

/// Why an authentication failed (Base 8.13.4.2, reason code explanation).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u8)]
pub enum Failure {
    /// The response is wrong.
    #[error("authentication failed")]
    Failed = 1,
    /// The sides have no protocol in common.
    #[error("no usable authentication protocol")]
    Protocol = 2,
    /// Only one side wants a secure channel.
    #[error("secure channel concatenation mismatch")]
    SecureChannel = 3,
    /// The sides have no hash in common.
    #[error("no usable hash function")]
    Hash = 4,
    /// The sides have no group in common, or a value is not of the group.
    #[error("no usable DH group")]
    Group = 5,
    /// A message has invalid fields.
    #[error("incorrect payload")]
    Payload = 6,
    /// A message is not allowed in this state.
    #[error("incorrect protocol message")]
    Message = 7,
}

impl Failure {
    /// The failure with this code; [`Failure::Failed`] for unknown codes.
    const fn of(code: u8) -> Failure {
        match code {
            2 => Failure::Protocol,
            3 => Failure::SecureChannel,
            4 => Failure::Hash,
            5 => Failure::Group,
            6 => Failure::Payload,
            7 => Failure::Message,
            _ => Failure::Failed,
        }
    }
}

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message<'a> {
    /// T_ID: the transaction, numbered by the host.
    pub transaction: u16,
    /// The content.
    pub body: Body<'a>,
}

/// The content of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body<'a> {
    /// AUTH_Negotiate.
    Negotiate(Negotiate),
    /// DH-HMAC-CHAP_Challenge.
    Challenge(Challenge<'a>),
    /// DH-HMAC-CHAP_Reply.
    Reply(Reply<'a>),
    /// DH-HMAC-CHAP_Success1.
    Success1(Success1<'a>),
    /// DH-HMAC-CHAP_Success2.
    Success2,
    /// AUTH_Failure1, the controller's.
    Failure1(Failure),
    /// AUTH_Failure2, the host's.
    Failure2(Failure),
}

/// The hashes and groups of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Negotiate {
    /// SC_C: kind of secure channel that follows; 0 for none.
    pub secure_channel: u8,
    /// The known ones of the host's hashes, in its order of preference.
    pub hashes: Vec<Hash>,
    /// The known ones of the host's groups, likewise.
    pub groups: Vec<Group>,
}

/// The challenge of a controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Challenge<'a> {
    /// The chosen hash.
    pub hash: Hash,
    /// The chosen group.
    pub group: Group,
    /// S1.
    pub sequence: u32,
    /// C1, as long as the hash.
    pub challenge: &'a [u8],
    /// The controller's public value, as long as the group's prime.
    pub public: &'a [u8],
}

/// The reply of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply<'a> {
    /// S2; 0 if the controller need not authenticate itself.
    pub sequence: u32,
    /// R1. C2, if present, has the same length.
    pub response: &'a [u8],
    /// C2.
    pub challenge: Option<&'a [u8]>,
    /// The host's public value.
    pub public: &'a [u8],
}

/// The controller's acceptance of the host, and its own proof.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Success1<'a> {
    /// Bytes of the hash.
    pub hash_bytes: u8,
    /// R2, if the host sent C2.
    pub response: Option<&'a [u8]>,
}

mod id {
    //! AUTH_ID (Base 8.13.3).
    pub(super) const NEGOTIATE: u8 = 0x00;
    pub(super) const CHALLENGE: u8 = 0x01;
    pub(super) const REPLY: u8 = 0x02;
    pub(super) const SUCCESS1: u8 = 0x03;
    pub(super) const SUCCESS2: u8 = 0x04;
    pub(super) const FAILURE2: u8 = 0xf0;
    pub(super) const FAILURE1: u8 = 0xf1;
}

/// T_ID of a message that may be invalid otherwise, for the answer to it.
pub fn transaction(bytes: &[u8]) -> Option<u16> {
    (bytes.len() >= HEADER_BYTES).then(|| u16_at(bytes, 4))
}

impl<'a> Message<'a> {
    /// Parses a message at the start of `bytes`; also returns its length. Linux pads the data that
    /// it sends with zeroes.
    ///
    /// # Errors
    /// The reason to send back if the message is invalid.
    pub fn parse(bytes: &'a [u8]) -> Result<(Message<'a>, usize), Failure> {
        let transaction = transaction(bytes).ok_or(Failure::Payload)?;
        let fixed = || bytes.first_chunk::<FIXED_BYTES>().ok_or(Failure::Payload);
        let (body, len) = match (bytes[0], bytes[1]) {
            (COMMON, id::NEGOTIATE) => Negotiate::parse(bytes)?,
            (COMMON, id::FAILURE1) => (Body::Failure1(Failure::of(bytes[7])), HEADER_BYTES),
            (COMMON, id::FAILURE2) => (Body::Failure2(Failure::of(bytes[7])), HEADER_BYTES),
            (CHAP, id::CHALLENGE) => Challenge::parse(fixed()?, &bytes[FIXED_BYTES..])?,
            (CHAP, id::REPLY) => Reply::parse(fixed()?, &bytes[FIXED_BYTES..])?,
            (CHAP, id::SUCCESS1) => Success1::parse(fixed()?, &bytes[FIXED_BYTES..])?,
            (CHAP, id::SUCCESS2) => fixed().map(|_| (Body::Success2, FIXED_BYTES))?,
            _ => return Err(Failure::Message),
        };
        Ok((Message { transaction, body }, len))
    }

    /// Encodes the message.
    ///
    /// # Panics
    /// If a value is longer than its length field allows.
    pub fn encode(&self) -> Vec<u8> {
        let header = |kind: u8, id: u8| {
            let mut bytes = vec![kind, id, 0, 0, 0, 0, 0, 0];
            put(&mut bytes, 4, self.transaction.to_le_bytes());
            bytes
        };
        let failure = |id: u8, failure: Failure| {
            let mut bytes = header(COMMON, id);
            bytes[6] = 1; // the only reason code
            bytes[7] = failure as u8;
            bytes
        };
        match &self.body {
            Body::Negotiate(negotiate) => negotiate.encode(header(COMMON, id::NEGOTIATE)),
            Body::Challenge(challenge) => challenge.encode(header(CHAP, id::CHALLENGE)),
            Body::Reply(reply) => reply.encode(header(CHAP, id::REPLY)),
            Body::Success1(success) => success.encode(header(CHAP, id::SUCCESS1)),
            Body::Success2 => {
                let mut bytes = header(CHAP, id::SUCCESS2);
                bytes.resize(FIXED_BYTES, 0);
                bytes
            }
            Body::Failure1(reason) => failure(id::FAILURE1, *reason),
            Body::Failure2(reason) => failure(id::FAILURE2, *reason),
        }
    }
}

impl Negotiate {
    /// Parses the first protocol that is DH-HMAC-CHAP.
    fn parse(bytes: &[u8]) -> Result<(Body<'_>, usize), Failure> {
        let len = HEADER_BYTES + usize::from(bytes[7]) * PROTOCOL_BYTES;
        let protocols = bytes.get(HEADER_BYTES..len).ok_or(Failure::Payload)?;
        let mut protocols = protocols.chunks_exact(PROTOCOL_BYTES);
        let protocol = protocols.find(|protocol| protocol[0] == DH_HMAC_CHAP).ok_or(Failure::Protocol)?;
        let ids = |count: u8, at: usize| {
            let count = usize::from(count);
            if count > MAX_IDS { Err(Failure::Payload) } else { Ok(protocol[at..at + count].iter().copied()) }
        };
        let negotiate = Negotiate {
            secure_channel: bytes[6],
            hashes: ids(protocol[2], 4)?.filter_map(Hash::of).collect(),
            groups: ids(protocol[3], 4 + MAX_IDS)?.filter_map(Group::of).collect(),
        };
        Ok((Body::Negotiate(negotiate), len))
    }

    fn encode(&self, mut bytes: Vec<u8>) -> Vec<u8> {
        assert!(self.hashes.len() <= MAX_IDS && self.groups.len() <= MAX_IDS, "there are fewer");
        bytes[6] = self.secure_channel;
        bytes[7] = 1;
        let mut protocol = [0; PROTOCOL_BYTES];
        protocol[0] = DH_HMAC_CHAP;
        protocol[2] = self.hashes.len() as u8;
        protocol[3] = self.groups.len() as u8;
        self.hashes.iter().enumerate().for_each(|(i, hash)| protocol[4 + i] = *hash as u8);
        self.groups.iter().enumerate().for_each(|(i, group)| protocol[4 + MAX_IDS + i] = *group as u8);
        bytes.extend(protocol);
        bytes
    }
}

impl<'a> Challenge<'a> {
    fn parse(fixed: &[u8; FIXED_BYTES], rest: &'a [u8]) -> Result<(Body<'a>, usize), Failure> {
        let hash = Hash::of(fixed[8]).filter(|hash| hash.bytes() == usize::from(fixed[6]));
        let hash = hash.ok_or(Failure::Hash)?;
        let group = Group::of(fixed[9]).ok_or(Failure::Group)?;
        let (challenge, rest) = rest.split_at_checked(hash.bytes()).ok_or(Failure::Payload)?;
        let public_bytes = usize::from(u16_at(fixed, 10));
        if public_bytes != group.bytes() {
            return Err(Failure::Payload);
        }
        let public = rest.get(..public_bytes).ok_or(Failure::Payload)?;
        let sequence = u32_at(fixed, 12);
        let len = FIXED_BYTES + challenge.len() + public.len();
        Ok((Body::Challenge(Challenge { hash, group, sequence, challenge, public }), len))
    }

    fn encode(&self, mut bytes: Vec<u8>) -> Vec<u8> {
        bytes[6] = short(self.challenge.len());
        bytes.extend([self.hash as u8, self.group as u8]);
        bytes.extend(public_len(self.public).to_le_bytes());
        bytes.extend(self.sequence.to_le_bytes());
        bytes.extend(self.challenge);
        bytes.extend(self.public);
        bytes
    }
}

impl<'a> Reply<'a> {
    /// C2 has its place in the message even if it is not used.
    fn parse(fixed: &[u8; FIXED_BYTES], rest: &'a [u8]) -> Result<(Body<'a>, usize), Failure> {
        let hash_bytes = usize::from(fixed[6]);
        let (response, rest) = rest.split_at_checked(hash_bytes).ok_or(Failure::Payload)?;
        let (challenge, rest) = rest.split_at_checked(hash_bytes).ok_or(Failure::Payload)?;
        let challenge = match fixed[8] {
            0 => None,
            1 => Some(challenge),
            _ => return Err(Failure::Payload),
        };
        let public = rest.get(..usize::from(u16_at(fixed, 10))).ok_or(Failure::Payload)?;
        let len = FIXED_BYTES + 2 * hash_bytes + public.len();
        Ok((Body::Reply(Reply { sequence: u32_at(fixed, 12), response, challenge, public }), len))
    }

    fn encode(&self, mut bytes: Vec<u8>) -> Vec<u8> {
        let hash_bytes = self.response.len();
        bytes[6] = short(hash_bytes);
        bytes.extend([u8::from(self.challenge.is_some()), 0]);
        bytes.extend(public_len(self.public).to_le_bytes());
        bytes.extend(self.sequence.to_le_bytes());
        bytes.extend(self.response);
        match self.challenge {
            Some(challenge) => bytes.extend(challenge),
            None => bytes.resize(bytes.len() + hash_bytes, 0),
        }
        bytes.extend(self.public);
        bytes
    }
}

impl<'a> Success1<'a> {
    /// Without a response Linux omits its place.
    fn parse(fixed: &[u8; FIXED_BYTES], rest: &'a [u8]) -> Result<(Body<'a>, usize), Failure> {
        let hash_bytes = fixed[6];
        let response = match fixed[8] {
            0 => None,
            1 => Some(rest.get(..usize::from(hash_bytes)).ok_or(Failure::Payload)?),
            _ => return Err(Failure::Payload),
        };
        let len = FIXED_BYTES + response.map_or(0, <[u8]>::len);
        Ok((Body::Success1(Success1 { hash_bytes, response }), len))
    }

    fn encode(&self, mut bytes: Vec<u8>) -> Vec<u8> {
        bytes[6] = self.hash_bytes;
        bytes.resize(FIXED_BYTES, 0);
        match self.response {
            Some(response) => {
                bytes[8] = 1;
                bytes.extend(response);
            }
            None => bytes.resize(FIXED_BYTES + usize::from(self.hash_bytes), 0),
        }
        bytes
    }
}

fn short(len: usize) -> u8 {
    u8::try_from(len).expect("no hash is longer than 64 bytes")
}

fn public_len(public: &[u8]) -> u16 {
    u16::try_from(public.len()).expect("no prime is longer than 1024 bytes")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn negotiation() -> Message<'static> {
        let (hashes, groups) = (Hash::ALL.to_vec(), Group::ALL.to_vec());
        Message {
            transaction: 0x0201,
            body: Body::Negotiate(Negotiate { secure_channel: 0, hashes, groups }),
        }
    }

    #[test]
    fn the_commands_name_the_protocol_and_their_length() {
        let bytes = send(5, 72, Sgl::InCapsule { offset: 0, len: 72 }).encode();
        assert_eq!((bytes[0], bytes[4]), (0x7f, 0x05));
        assert_eq!(bytes[40..48], [0, 1, 1, 0xe9, 72, 0, 0, 0]);
        let entry = SubmissionEntry::parse(&receive(6, 4096).encode());
        assert_eq!(FabricsType::of(&entry), Some(FabricsType::AuthenticationReceive));
        assert_eq!(parse_len(&entry.cdw), Some(4096));
        for wrong in [0, 0xea01_0100, 0xe901_0200, 0xe902_0100, 0xe901_0101] {
            assert_eq!(parse_len(&[wrong, 72, 0, 0, 0, 0]), None, "{wrong:#x}");
        }
    }

    #[test]
    fn messages_are_laid_out_as_the_specification_has_them() {
        let bytes = negotiation().encode();
        assert_eq!(bytes.len(), 72);
        assert_eq!(bytes[..16], [0, 0, 0, 0, 1, 2, 0, 1, 1, 0, 3, 6, 1, 2, 3, 0]);
        assert_eq!(bytes[42..48], [0, 1, 2, 3, 4, 5]);
        let (challenge, public) = ([7; 32], [9; 256]);
        let body = Challenge {
            hash: Hash::Sha256,
            group: Group::Ffdhe2048,
            sequence: 0x0403_0201,
            challenge: &challenge,
            public: &public,
        };
        let bytes = Message { transaction: 3, body: Body::Challenge(body) }.encode();
        assert_eq!(bytes[..16], [1, 1, 0, 0, 3, 0, 32, 0, 1, 1, 0, 1, 1, 2, 3, 4]);
        assert_eq!((bytes[16], bytes[48], bytes.len()), (7, 9, 304));
        let body = Reply { sequence: 5, response: &challenge, challenge: Some(&[8; 32]), public: &public };
        let bytes = Message { transaction: 3, body: Body::Reply(body) }.encode();
        assert_eq!(bytes[..16], [1, 2, 0, 0, 3, 0, 32, 0, 1, 0, 0, 1, 5, 0, 0, 0]);
        assert_eq!((bytes[16], bytes[48], bytes[80], bytes.len()), (7, 8, 9, 336));
        let body = Success1 { hash_bytes: 32, response: Some(&challenge) };
        let bytes = Message { transaction: 3, body: Body::Success1(body) }.encode();
        assert_eq!(bytes[..16], [1, 3, 0, 0, 3, 0, 32, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!((bytes[16], bytes.len()), (7, 48));
        let bytes = Message { transaction: 3, body: Body::Success2 }.encode();
        assert_eq!(bytes, [1, 4, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        let bytes = Message { transaction: 3, body: Body::Failure1(Failure::Hash) }.encode();
        assert_eq!(bytes, [0, 0xf1, 0, 0, 3, 0, 1, 4]);
        let bytes = Message { transaction: 3, body: Body::Failure2(Failure::Failed) }.encode();
        assert_eq!(bytes, [0, 0xf0, 0, 0, 3, 0, 1, 1]);
    }

    #[test]
    fn an_invalid_message_is_refused_with_the_reason() {
        let good = negotiation().encode();
        let failure = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = good.clone();
            change(&mut bytes);
            Message::parse(&bytes).unwrap_err()
        };
        assert_eq!(failure(&|bytes| bytes.truncate(7)), Failure::Payload);
        assert_eq!(failure(&|bytes| bytes.truncate(71)), Failure::Payload);
        assert_eq!(failure(&|bytes| bytes[7] = 2), Failure::Payload);
        assert_eq!(failure(&|bytes| bytes[7] = 0), Failure::Protocol);
        assert_eq!(failure(&|bytes| bytes[8] = 2), Failure::Protocol);
        assert_eq!(failure(&|bytes| bytes[10] = 31), Failure::Payload);
        assert_eq!(failure(&|bytes| bytes[11] = 31), Failure::Payload);
        assert_eq!(failure(&|bytes| bytes[0] = 2), Failure::Message);
        assert_eq!(failure(&|bytes| bytes[1] = 9), Failure::Message);
        let challenge = [[1, 1, 0, 0, 3, 0, 32, 0, 1, 0, 0, 0, 1, 0, 0, 0].as_slice(), &[7; 32]].concat();
        let failure = |at: usize, byte: u8| {
            let mut bytes = challenge.clone();
            bytes[at] = byte;
            Message::parse(&bytes).unwrap_err()
        };
        assert!(Message::parse(&challenge).is_ok());
        assert_eq!(failure(6, 48), Failure::Hash);
        assert_eq!(failure(8, 4), Failure::Hash);
        assert_eq!(failure(9, 6), Failure::Group);
        assert_eq!(failure(9, 1), Failure::Payload);
        assert_eq!(failure(10, 1), Failure::Payload);
        assert_eq!(Message::parse(&challenge[..47]), Err(Failure::Payload));
        assert_eq!(Message::parse(&challenge[..15]), Err(Failure::Payload));
    }

    #[test]
    fn of_several_protocols_and_identifiers_those_that_are_known_count() {
        let mut bytes = negotiation().encode();
        let mut other = [0; PROTOCOL_BYTES];
        other[0] = 0x77;
        bytes.splice(8..8, other);
        bytes[7] = 2;
        bytes[8 + 64 + 4] = 0xee;
        let (message, len) = Message::parse(&bytes).unwrap();
        let Body::Negotiate(negotiate) = message.body else { panic!("not a negotiation") };
        assert_eq!((negotiate.hashes, len), (vec![Hash::Sha384, Hash::Sha512], 136));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_none_and_any_message_is_read_as_it_was_written(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..1400), kind in 0u8..2, id in 0u8..8,
        ) {
            if bytes.len() >= 2 {
                let ids = [0, 1, 2, 3, 4, 0xf0, 0xf1, 9];
                (bytes[0], bytes[1]) = (kind, ids[usize::from(id)]);
            }
            if let Ok((message, len)) = Message::parse(&bytes) {
                prop_assert!(len <= bytes.len());
                let again = message.encode();
                prop_assert_eq!(Message::parse(&again).unwrap().0, message);
            }
        }

        #[test]
        fn any_challenge_and_reply_are_read_as_they_were_written(
            (transaction, sequence, seed) in any::<(u16, u32, u8)>(), hash in 0usize..3, group in 0usize..6, has_challenge in any::<bool>(),
        ) {
            let (hash, group) = (Hash::ALL[hash], Group::ALL[group]);
            let (value, public) = (vec![seed; hash.bytes()], vec![!seed; group.bytes()]);
            let challenge = Challenge { hash, group, sequence, challenge: &value, public: &public };
            let reply = Reply { sequence, response: &value, challenge: has_challenge.then_some(&value), public: &public };
            let success = Success1 { hash_bytes: hash.bytes() as u8, response: has_challenge.then_some(&value) };
            for body in [Body::Challenge(challenge), Body::Reply(reply), Body::Success1(success)] {
                let message = Message { transaction, body };
                let bytes = message.encode();
                let (read, len) = Message::parse(&bytes).unwrap();
                prop_assert!(len <= bytes.len());
                prop_assert_eq!(read, message);
            }
        }
    }
}
