//! Hosts that have to prove who they are: with both sides' messages well made, and each of them
//! wrong once.

use crate::host::{Done, HOST, Host, Pdu};
use crate::server::{MIB, SUBSYSTEM, Server};
use exports::Export;
use exports_nvme_tcp::{Access, Auth, Choices, Config, Group, Hash, HostSecrets, Keys, Nqn};
use nvme::Status;
use nvme::fabrics::auth::{self, Body, Failure, Message};
use nvme::fabrics::nqn::DISCOVERY;
use nvme::fabrics::property::{PropertyGet, offset};
use nvme::fabrics::{ANY_CONTROLLER, ConnectResponse, disconnect};
use nvme::{Command, Sgl, SubmissionEntry};
use nvme_auth::response::Parties;
use nvme_auth::{Key, host};
use std::sync::Arc;
use std::time::{Duration, Instant};

// nvme gen-dhchap-key -n nqn.2014-08.org.example:host -m 1, and -m 0.
const SECRET: &str = "DHHC-1:01:Rf8y5+e9Ojte9c9rSi2001pCK3PD9ldfyFwjgMZGmppOqurY:";
const OF_TARGET: &str = "DHHC-1:00:UXd4h42Y65lhbGJjuMYxBibkg5fTSyqamwk98bpgfR7eJWVa:";

/// Asks hosts for proof. The one that has two secrets is [`HOST`], the one that has one is
/// `nqn.one`.
fn server(choices: Choices) -> Server {
    server_with(choices, |config| config)
}

fn server_with(choices: Choices, change: impl FnOnce(Config) -> Config) -> Server {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys");
    secrets::write(&path, format!("{HOST} {SECRET} {OF_TARGET}\nnqn.one {SECRET}\n")).unwrap();
    let keys = Arc::new(Keys::read(&path).unwrap());
    let auth = Some(Auth { keys, choices: Arc::new(choices), is_required: true });
    let access = Access { auth, ..Access::default() };
    Server::with(MIB, |config| change(Config { access, ..config }))
}

fn only(hash: Hash, group: Group) -> Choices {
    Choices { hashes: vec![hash], groups: vec![group] }
}

fn simple() -> Server {
    server(only(Hash::Sha256, Group::Null))
}

fn parties() -> Parties {
    Parties { host: Nqn::new(HOST).unwrap(), subsystem: Nqn::new(SUBSYSTEM).unwrap() }
}

fn key(text: &str) -> Key {
    Key::parse(text).unwrap()
}

/// A queue whose Connect was answered.
fn connected(address: &str, queue: u16, controller: u16, has_digests: bool) -> Host {
    let mut host = Host::initialized(address, has_digests, has_digests);
    let done = host.connect(SUBSYSTEM, queue, 32, controller, 0);
    assert_eq!(done.status, Status::SUCCESS);
    let entry = nvme::CompletionEntry { result: done.result, ..nvme::CompletionEntry::new(0, done.status) };
    assert!(ConnectResponse::parse(&entry).needs_authentication);
    host
}

fn send(host: &mut Host, message: &[u8]) -> Done {
    let (id, len) = (host.id(), message.len() as u32);
    host.send_with(auth::send(id, len, Sgl::InCapsule { offset: 0, len }), message);
    host.finish(id)
}

fn receive(host: &mut Host, len: u32) -> Done {
    let id = host.id();
    host.send(auth::receive(id, len));
    host.finish(id)
}

fn say(host: &mut Host, message: &[u8]) {
    assert_eq!(send(host, message).status, Status::SUCCESS);
}

fn hear(host: &mut Host) -> Vec<u8> {
    let done = receive(host, 4096);
    assert_eq!(done.status, Status::SUCCESS);
    done.data
}

/// Proves who the host is, and asks for the same from the target if there is a secret for that.
fn authenticate(host: &mut Host, of_target: Option<&Key>) {
    let (parties, secret) = (parties(), key(SECRET));
    let mut talk = host::Host::new(&parties, &secret, of_target, 7);
    say(host, &talk.negotiate());
    let reply = talk.reply(&hear(host)).unwrap();
    say(host, &reply);
    if let Some(message) = talk.conclude(&hear(host)).unwrap() {
        say(host, &message);
    }
}

/// The reason for which the host is disconnected.
fn failure(host: &mut Host) -> Failure {
    let bytes = hear(host);
    let Body::Failure1(failure) = Message::parse(&bytes).unwrap().0.body else { panic!("{bytes:?}") };
    assert!(host.is_disconnected());
    failure
}

/// Up to where the target waits for a reply: the host, and the reply.
fn challenged(server: &Server) -> (Host, Vec<u8>) {
    let (parties, secret) = (parties(), key(SECRET));
    let mut host = connected(server.address(), 0, ANY_CONTROLLER, false);
    let mut talk = host::Host::new(&parties, &secret, None, 7);
    say(&mut host, &talk.negotiate());
    let reply = talk.reply(&hear(&mut host)).unwrap();
    (host, reply)
}

#[test]
fn a_host_that_proves_who_it_is_on_every_queue_reads_and_writes() {
    let of_target = key(OF_TARGET);
    for hash in Hash::ALL {
        for group in [Group::Null, Group::Ffdhe2048, Group::Ffdhe8192] {
            let server = server(only(*hash, group));
            for (has_digests, of_target) in [(false, None), (true, Some(&of_target))] {
                let mut admin = connected(server.address(), 0, ANY_CONTROLLER, has_digests);
                authenticate(&mut admin, of_target);
                admin.enable();
                let mut io = connected(server.address(), 1, admin.controller, has_digests);
                authenticate(&mut io, of_target);
                assert_eq!(io.write(3, &[7; 512]), Status::SUCCESS);
                assert_eq!(io.read(3, 1), [7; 512]);
            }
        }
    }
}

#[test]
fn nothing_is_served_before() {
    let server = simple();
    let mut admin = connected(server.address(), 0, ANY_CONTROLLER, false);
    assert_eq!(admin.get(offset::CAP, 8).status, Status::AUTHENTICATION_REQUIRED);
    assert_eq!(admin.set(offset::CC, 1).status, Status::AUTHENTICATION_REQUIRED);
    assert_eq!(admin.run(&Command::keep_alive(), 0).status, Status::AUTHENTICATION_REQUIRED);
    assert_eq!(admin.run(&Command::identify(0, 1, 0), 4096).status, Status::AUTHENTICATION_REQUIRED);
    assert_eq!(admin.connect(SUBSYSTEM, 0, 32, ANY_CONTROLLER, 0).status, Status::COMMAND_SEQUENCE_ERROR);
    let id = admin.id();
    admin.send(disconnect(id));
    assert_eq!(admin.finish(id).status, Status::INVALID_QUEUE_TYPE);
    authenticate(&mut admin, None);
    admin.enable();
    let mut io = connected(server.address(), 1, admin.controller, false);
    assert_eq!(io.run(&Command::read(1, 0, 1), 512).status, Status::AUTHENTICATION_REQUIRED);
    assert_eq!(io.write(0, &[1; 512]), Status::AUTHENTICATION_REQUIRED);
    assert_eq!(server.device.executed(), 0);
    let id = io.id();
    io.send(disconnect(id));
    assert_eq!(io.finish(id).status, Status::SUCCESS);
    assert!(io.is_disconnected());
    // The queue is free for who can have it.
    let mut io = connected(server.address(), 1, admin.controller, false);
    authenticate(&mut io, None);
    assert_eq!(io.read(0, 1).len(), 512);
    // Once is enough.
    assert_eq!(send(&mut io, &[0; 72]).status, Status::INVALID_FIELD);
    assert_eq!(io.read(0, 1).len(), 512);
}

#[test]
fn a_host_without_a_secret_is_refused_and_discovers_nothing() {
    let server = simple();
    let mut stranger = Host::initialized(server.address(), false, false);
    let mut data = nvme::fabrics::ConnectData {
        host_id: [3; 16],
        controller_id: ANY_CONTROLLER,
        subsystem: Nqn::new(SUBSYSTEM).unwrap(),
        host: Nqn::new("nqn.stranger").unwrap(),
    };
    let connect = nvme::fabrics::Connect {
        record_format: 0,
        queue_id: 0,
        entries: 32,
        attributes: 4,
        keep_alive_ms: 0,
    };
    assert_eq!(stranger.connect_as(&connect, &data).status, Status::CONNECT_INVALID_HOST);
    // Discovery is open to all hosts without authentication.
    data.subsystem = Nqn::discovery();
    for (name, records) in [("nqn.stranger", 1), (HOST, 2)] {
        data.host = Nqn::new(name).unwrap();
        let mut host = Host::initialized(server.address(), false, false);
        assert_eq!(host.connect_as(&connect, &data).status, Status::SUCCESS);
        host.enable();
        let page = host.run(&Command::get_log_page(0, 0x70, 0, 1024), 1024).data;
        assert_eq!(u64::from_le_bytes(page[8..16].try_into().unwrap()), records, "{name}");
    }
}

#[test]
fn a_host_with_a_wrong_secret_is_informed_and_disconnected() {
    let server = simple();
    for text in [OF_TARGET, &SECRET.replace("-1:01:", "-1:02:")] {
        let (parties, wrong) = (parties(), key(text));
        let mut host = connected(server.address(), 0, ANY_CONTROLLER, false);
        let mut talk = host::Host::new(&parties, &wrong, None, 7);
        say(&mut host, &talk.negotiate());
        let reply = talk.reply(&hear(&mut host)).unwrap();
        say(&mut host, &reply);
        assert_eq!(host.get(offset::CAP, 8).status, Status::AUTHENTICATION_REQUIRED);
        assert_eq!(failure(&mut host), Failure::Failed);
    }
    // The target has no secret of its own that it could prove to this host.
    let (secret, of_target) = (key(SECRET), key(OF_TARGET));
    let one = Parties { host: Nqn::new("nqn.one").unwrap(), ..parties() };
    let mut host = Host::initialized(server.address(), false, false);
    let data = nvme::fabrics::ConnectData {
        host_id: [3; 16],
        controller_id: ANY_CONTROLLER,
        subsystem: one.subsystem.clone(),
        host: one.host.clone(),
    };
    let connect = nvme::fabrics::Connect {
        record_format: 0,
        queue_id: 0,
        entries: 32,
        attributes: 4,
        keep_alive_ms: 0,
    };
    assert_eq!(host.connect_as(&connect, &data).status, Status::SUCCESS);
    let mut talk = host::Host::new(&one, &secret, Some(&of_target), 7);
    say(&mut host, &talk.negotiate());
    let reply = talk.reply(&hear(&mut host)).unwrap();
    say(&mut host, &reply);
    assert_eq!(failure(&mut host), Failure::Failed);
    server.wait_for_clients(0);
}

#[test]
fn each_message_that_is_wrong_ends_the_connection_with_a_reason() {
    let server = simple();
    let (parties, secret) = (parties(), key(SECRET));
    let negotiation = host::Host::new(&parties, &secret, None, 7).negotiate();
    let changed = |at: usize, byte: u8| {
        let mut bytes = negotiation.clone();
        bytes[at] = byte;
        bytes
    };
    let cases = [
        (vec![0; 4], Failure::Payload),
        (negotiation[..71].to_vec(), Failure::Payload),
        ([&negotiation[..], &[0; 8]].concat(), Failure::Payload),
        (vec![0; 16 << 10], Failure::Protocol),
        (changed(0, 9), Failure::Message),
        (changed(1, 0x55), Failure::Message),
        (changed(6, 1), Failure::SecureChannel),
        (changed(8, 2), Failure::Protocol),
        (changed(10, 0), Failure::Hash),
        (changed(11, 0), Failure::Group),
    ];
    for (message, reason) in &cases[..8] {
        let mut host = connected(server.address(), 0, ANY_CONTROLLER, false);
        say(&mut host, message);
        assert_eq!(failure(&mut host), *reason);
    }
    // Another server: this one has counted enough failures of this address.
    let server = simple();
    for (message, reason) in &cases[8..] {
        let mut host = connected(server.address(), 0, ANY_CONTROLLER, false);
        say(&mut host, message);
        assert_eq!(failure(&mut host), *reason);
    }
    let at_reply = |change: &dyn Fn(&mut Vec<u8>)| {
        let (mut host, mut reply) = challenged(&server);
        change(&mut reply);
        say(&mut host, &reply);
        failure(&mut host)
    };
    assert_eq!(at_reply(&|reply| reply.truncate(20)), Failure::Payload);
    assert_eq!(at_reply(&|reply| reply.resize(200, 0)), Failure::Payload);
    assert_eq!(at_reply(&|reply| reply[4] ^= 1), Failure::Payload, "another transaction");
    assert_eq!(at_reply(&|reply| reply[16] ^= 1), Failure::Failed);
    assert_eq!(at_reply(&|reply| reply[10] = 32), Failure::Payload, "a DH value without a group");
    assert_eq!(at_reply(&|reply| reply.clone_from(&negotiation)), Failure::Message, "from the start");
    let (_, replayed) = challenged(&server);
    assert_eq!(at_reply(&|reply| reply.clone_from(&replayed)), Failure::Failed);
    let success2 = Message { transaction: 7, body: Body::Success2 }.encode();
    assert_eq!(at_reply(&|reply| reply.clone_from(&success2)), Failure::Message);
}

#[test]
fn a_host_that_gives_up_is_hung_up_on() {
    let server = simple();
    let (mut host, _) = challenged(&server);
    say(&mut host, &Message { transaction: 7, body: Body::Failure2(Failure::Failed) }.encode());
    assert!(host.is_disconnected());
}

#[test]
fn commands_out_of_turn_or_out_of_shape_fail_and_the_talk_goes_on() {
    let server = simple();
    let (parties, secret) = (parties(), key(SECRET));
    let mut host = connected(server.address(), 0, ANY_CONTROLLER, false);
    assert_eq!(receive(&mut host, 4096).status, Status::COMMAND_SEQUENCE_ERROR, "nothing is owed yet");
    let mut talk = host::Host::new(&parties, &secret, None, 7);
    let message = talk.negotiate();
    let mut odd = |make: &dyn Fn(u16) -> SubmissionEntry, data: &[u8]| {
        let id = host.id();
        host.send_with(make(id), data);
        host.finish(id).status
    };
    let inside = Sgl::InCapsule { offset: 0, len: 72 };
    assert_eq!(odd(&|id| auth::send(id, 71, inside), &message), Status::INVALID_SGL_LENGTH);
    assert_eq!(odd(&|id| auth::send(id, 72, inside), &message[1..]), Status::INVALID_SGL_LENGTH);
    let later = Sgl::InCapsule { offset: 8, len: 72 };
    assert_eq!(odd(&|id| auth::send(id, 72, later), &message), Status::INVALID_SGL_OFFSET);
    assert_eq!(odd(&|id| auth::send(id, 72, Sgl::Transport { len: 72 }), &[]), Status::INVALID_SGL_TYPE);
    let other = |id| SubmissionEntry { cdw: [0xea01_0100, 72, 0, 0, 0, 0], ..auth::send(id, 72, inside) };
    assert_eq!(odd(&other, &message), Status::INVALID_FIELD);
    say(&mut host, &message);
    assert_eq!(receive(&mut host, 47).status, Status::INVALID_FIELD, "no room");
    let reply = talk.reply(&hear(&mut host)).unwrap();
    assert_eq!(receive(&mut host, 4096).status, Status::COMMAND_SEQUENCE_ERROR, "it is ours to speak");
    say(&mut host, &reply);
    talk.conclude(&hear(&mut host)).unwrap();
    host.enable();
}

#[test]
fn the_head_of_the_queue_goes_on_from_where_the_proof_ends() {
    let server = simple();
    let mut host = Host::initialized(server.address(), false, false);
    let data = nvme::fabrics::ConnectData {
        host_id: [3; 16],
        controller_id: ANY_CONTROLLER,
        subsystem: Nqn::new(SUBSYSTEM).unwrap(),
        host: Nqn::new(HOST).unwrap(),
    };
    let connect =
        nvme::fabrics::Connect { record_format: 0, queue_id: 0, entries: 6, attributes: 0, keep_alive_ms: 0 };
    assert_eq!(host.connect_as(&connect, &data).status, Status::SUCCESS);
    // The Connect was the first command, four more are the proof, and the queue has six places.
    authenticate(&mut host, None);
    for head in [0, 1, 2] {
        let id = host.id();
        host.send(PropertyGet { bytes: 8, offset: offset::CAP }.entry(id));
        let Pdu::Response(entry) = host.receive() else { panic!("no response") };
        assert_eq!((entry.status, entry.sq_head), (Status::SUCCESS, head));
    }
}

#[test]
fn a_host_that_sends_too_many_commands_is_disconnected() {
    let server = simple();
    let mut host = connected(server.address(), 0, ANY_CONTROLLER, false);
    for _ in 0..32 {
        assert_eq!(host.get(offset::CAP, 8).status, Status::AUTHENTICATION_REQUIRED);
    }
    assert!(host.is_disconnected());
}

#[test]
fn a_silent_host_is_disconnected_in_time() {
    let server = simple();
    let start = Instant::now();
    let (mut host, _) = challenged(&server);
    assert!(host.is_disconnected());
    let waited = start.elapsed();
    assert!(waited > Duration::from_secs(5) && waited < Duration::from_secs(60), "{waited:?}");
}

#[test]
fn an_address_that_fails_too_often_has_to_wait() {
    let server = simple();
    for _ in 0..16 {
        let mut host = connected(server.address(), 0, ANY_CONTROLLER, false);
        say(&mut host, &[0; 4]);
        assert_eq!(failure(&mut host), Failure::Payload);
    }
    let mut host = Host::initialized(server.address(), false, false);
    let done = host.connect(SUBSYSTEM, 0, 32, ANY_CONTROLLER, 0);
    assert_eq!(done.status, Status::CONNECT_CONTROLLER_BUSY);
    std::thread::sleep(Duration::from_secs(11));
    let mut host = connected(server.address(), 0, ANY_CONTROLLER, false);
    authenticate(&mut host, None);
    host.enable();
}

#[test]
fn hosts_that_have_proven_nothing_take_no_place_of_one_that_has() {
    let few = |config| Config { clients: 2, address_clients: Some(1), ..config };
    let server = server_with(only(Hash::Sha256, Group::Null), few);
    let _visitors: Vec<Host> = (0..40).map(|_| Host::admin(server.address(), DISCOVERY)).collect();
    let _unproven: Vec<Host> =
        (0..20).map(|_| connected(server.address(), 0, ANY_CONTROLLER, false)).collect();
    let mut admin = connected(server.address(), 0, ANY_CONTROLLER, false);
    let mut late = connected(server.address(), 0, ANY_CONTROLLER, false);
    authenticate(&mut admin, None);
    admin.enable();
    let mut other =
        Host::initialized(server.address(), false, false).of((Nqn::new("nqn.one").unwrap(), [9; 16]));
    assert_eq!(
        other.connect(SUBSYSTEM, 0, 32, ANY_CONTROLLER, 0).status,
        Status::SUCCESS,
        "one is kept for it"
    );
    // The host has its share of two places: another queue would take that of the other host.
    let (parties, secret) = (parties(), key(SECRET));
    let mut talk = host::Host::new(&parties, &secret, None, 7);
    say(&mut late, &talk.negotiate());
    let reply = talk.reply(&hear(&mut late)).unwrap();
    let last = send(&mut late, &reply);
    assert_eq!(last.status, Status::SUCCESS);
    assert_eq!(receive(&mut late, 4096).status, Status::CONNECT_CONTROLLER_BUSY);
    assert!(late.is_disconnected());
}

#[test]
fn a_peer_that_has_proven_nothing_takes_no_queue_of_a_host() {
    let server = simple();
    let mut admin = connected(server.address(), 0, ANY_CONTROLLER, false);
    authenticate(&mut admin, None);
    admin.enable();
    let mut squatter = connected(server.address(), 1, admin.controller, false);
    let mut io = connected(server.address(), 1, admin.controller, false);
    authenticate(&mut io, None);
    assert_eq!(io.write(0, &[1; 512]), Status::SUCCESS);
    // Even one that proves itself is too late, and takes nothing away when it goes.
    let (parties, secret) = (parties(), key(SECRET));
    let mut talk = host::Host::new(&parties, &secret, None, 7);
    say(&mut squatter, &talk.negotiate());
    let reply = talk.reply(&hear(&mut squatter)).unwrap();
    say(&mut squatter, &reply);
    assert_eq!(receive(&mut squatter, 4096).status, Status::COMMAND_SEQUENCE_ERROR);
    assert!(squatter.is_disconnected());
    assert_eq!(io.write(0, &[2; 512]), Status::SUCCESS);
    let mut again = Host::initialized(server.address(), false, false);
    let refused = again.connect(SUBSYSTEM, 1, 32, admin.controller, 0);
    assert_eq!(refused.status, Status::COMMAND_SEQUENCE_ERROR, "the queue is there");
}

#[test]
fn a_host_that_gets_a_secret_must_authenticate_and_others_need_not() {
    let server = Server::start(MIB);
    let (mut admin, _io) = server.connect();
    let secrets = HostSecrets {
        nqn: HOST.into(),
        dhchap: Some(SECRET.to_owned().into()),
        dhchap_ctrl: None,
        tls_psk: None,
    };
    let access = Access::default().with_secrets(&[secrets]).unwrap();
    server.export().set_access(access).unwrap();
    assert_eq!(admin.get(offset::CSTS, 4).status, Status::SUCCESS, "it stays connected");
    let mut host = connected(server.address(), 0, ANY_CONTROLLER, false);
    authenticate(&mut host, None);
    let mut one =
        Host::initialized(server.address(), false, false).of((Nqn::new("nqn.one").unwrap(), [1; 16]));
    let done = one.connect(SUBSYSTEM, 0, 32, ANY_CONTROLLER, 0);
    let entry = nvme::CompletionEntry { result: done.result, ..nvme::CompletionEntry::new(0, done.status) };
    assert!(done.status == Status::SUCCESS && !ConnectResponse::parse(&entry).needs_authentication);
    // Without the secret it is one of those.
    server.export().set_access(Access::default()).unwrap();
    assert_eq!(server.host().get(offset::CSTS, 4).status, Status::SUCCESS);
}
