//! A host that must authenticate, and does or sends similar messages.

use super::{Host, SUBSYSTEM};
use crate::input::Input;
use exports_nvme_tcp::{Auth, Choices, Group, Hash, Keys, Nqn};
use nvme::fabrics::ANY_CONTROLLER;
use nvme::fabrics::auth::{self, Body, Failure, Message};
use nvme::tcp::{C2hData, COMMON_BYTES, PduType, Side};
use nvme::{Command, Sgl, SubmissionEntry};
use nvme_auth::response::Parties;
use nvme_auth::{HostKeys, Key, host};
use socket2::{Domain, SockAddr, Socket, Type};
use std::io::{ErrorKind, Read};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

const HOST: &str = "nqn.2014-08.org.example:host";
const SECRET: &str = "DHHC-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
const OF_TARGET: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
const TRANSACTION: u16 = 7;

fn key(text: &str) -> Key {
    Key::parse(text).expect("a secret")
}

fn name(text: &str) -> Nqn {
    Nqn::new(text).expect("a name")
}

/// The authentication that the target requires, with fast methods.
pub(super) fn asked() -> Auth {
    let keys = HostKeys { host: key(SECRET), controller: Some(key(OF_TARGET)) };
    let choices = Choices { hashes: Hash::ALL.to_vec(), groups: vec![Group::Null, Group::Ffdhe2048] };
    let keys = Arc::new(Keys::of_hosts([(name(HOST), keys)]));
    Auth { keys, choices: Arc::new(choices), is_required: true }
}

/// Runs one input: each byte is an action, a command that the target answers or disconnects for.
pub(super) fn play(address: &str, setup: u8, input: &mut Input<'_>) {
    let mut host = connect(address).initialize(setup & 1 != 0, setup & 2 != 0);
    host.is_sound = false;
    host.connect(0, 64, ANY_CONTROLLER);
    let (secret, of_target) = (key(SECRET), key(OF_TARGET));
    let parties = Parties { host: name(HOST), subsystem: name(SUBSYSTEM) };
    let asks_back = (setup & 4 != 0).then_some(&of_target);
    let mut talk = host::Host::new(&parties, &secret, asks_back, TRANSACTION);
    let mut heard = Vec::new();
    for id in 0..48 {
        if input.is_empty() {
            break;
        }
        let message = match input.below(8) {
            0 => Some(talk.negotiate()),
            // Without a message the host sends no command, and the target has nothing to answer.
            1 => match talk.reply(&heard) {
                Ok(message) => Some(message),
                Err(_) => continue,
            },
            2 => match talk.conclude(&heard) {
                Ok(Some(message)) => Some(message),
                Ok(None) | Err(_) => continue,
            },
            3 => Some(Message { transaction: TRANSACTION, body: Body::Failure2(Failure::Failed) }.encode()),
            4 => Some(input.bytes(96).to_vec()),
            5 => {
                let cdw = [(); 6].map(|()| input.u32());
                let command =
                    Command { opcode: input.one_of(&[0x7f, 6, 2, 0x18]), nsid: input.u8().into(), cdw };
                let len = input.u16().into();
                let sgl =
                    input.one_of(&[Sgl::None, Sgl::Transport { len }, Sgl::InCapsule { offset: 0, len }]);
                host.command(&SubmissionEntry::new(&command, id, sgl), &[]);
                None
            }
            _ => {
                let len = input.one_of(&[4096, 4096, 4096, 16, 0]);
                host.command(&auth::receive(id, len), &[]);
                None
            }
        };
        if let Some(mut message) = message {
            // A correct message, or one with a changed byte.
            if input.u8() & 3 == 3 && !message.is_empty() {
                let at = input.below(message.len());
                message[at] = input.u8();
            }
            let len = message.len() as u32;
            host.command(&auth::send(id, len, Sgl::InCapsule { offset: 0, len }), &message);
        }
        match host.answer() {
            Some(data) if data.is_empty() => {}
            Some(data) => heard = data,
            None => break,
        }
    }
    host.listen();
}

/// Connects from another address for each input: the target records failures by address.
fn connect(address: &str) -> Host {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    let next = NEXT.fetch_add(1, Ordering::Relaxed) % 0xff_fffe + 1;
    let own = SocketAddr::from((Ipv4Addr::from(0x7f00_0000 | next), 0));
    let target: SocketAddr = address.parse().expect("an address");
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    socket.bind(&SockAddr::from(own)).expect("an address of this machine");
    socket.connect(&SockAddr::from(target)).expect("the target listens");
    Host::on(socket.into())
}

impl Host {
    /// The completion of the only command in flight with its data; `None` when the target has
    /// disconnected.
    fn answer(&mut self) -> Option<Vec<u8>> {
        let mut found = Vec::new();
        loop {
            let mut common = [0; COMMON_BYTES];
            if let Err(error) = self.stream.read_exact(&mut common) {
                assert!(error.kind() != ErrorKind::WouldBlock, "the target does not answer");
                return None;
            }
            let frame = self.framing.accept(&common, Side::Controller).expect("a PDU");
            let mut pdu = vec![0; frame.len as usize];
            pdu[..COMMON_BYTES].copy_from_slice(&common);
            self.stream.read_exact(&mut pdu[COMMON_BYTES..]).expect("all of the PDU");
            match frame.kind {
                PduType::C2hData => {
                    let header = pdu.first_chunk().expect("long enough");
                    let data = C2hData::parse(header, &frame).expect("data");
                    found.extend(&pdu[frame.data_offset..][..frame.data_len as usize]);
                    if data.is_success {
                        return Some(found);
                    }
                }
                PduType::CapsuleResp => return Some(found),
                // The host's message only resembled a PDU, or its command waits for data.
                _ => return None,
            }
        }
    }
}
