//! Authentication of hosts and of targets.

use super::target::{Change, Secrets};
use super::*;
use nvme_auth::host::{Fault, Refusal};
use nvme_auth::{Failure, HostKeys};

const SECRET: &str = "DHHC-1:01:Rf8y5+e9Ojte9c9rSi2001pCK3PD9ldfyFwjgMZGmppOqurY:";
const OF_TARGET: &str = "DHHC-1:00:UXd4h42Y65lhbGJjuMYxBibkg5fTSyqamwk98bpgfR7eJWVa:";

fn key(text: &str) -> Option<Key> {
    Some(Key::parse(text).unwrap())
}

/// A target that requires [`SECRET`], and has [`OF_TARGET`].
fn wary() -> Target {
    let target = Target::start(Traits::default());
    change(&target, |message| message);
    target
}

/// Changes later messages to hosts.
fn change(target: &Target, change: Change) {
    let keys = HostKeys { host: Key::parse(SECRET).unwrap(), controller: key(OF_TARGET) };
    *target.state.secrets.lock().unwrap() = Some(Secrets { keys: Arc::new(keys), change });
}

fn refusal(options: &Options) -> OpenError {
    Session::open(options, &Cancel::never()).err().expect("no session")
}

#[test]
fn every_queue_proves_who_the_host_is_and_does_so_again_after_a_loss() {
    for (controller_key, header_digest) in [(None, false), (key(OF_TARGET), true)] {
        let target = wary();
        let proofs = || target.state.proofs.load(Ordering::SeqCst);
        let options = Options {
            key: key(SECRET),
            controller_key,
            header_digest,
            data_digest: true,
            ..options(&target)
        };
        let (session, mut queue) = open(&options);
        let _other = session.start_queue(&Cancel::never()).unwrap();
        assert_eq!(proofs(), 3);
        let mut memory = bytes(4096);
        let list = segment(&mut memory);
        assert_eq!(run(&mut queue, &Request::write(data(&list), Flags::NONE), 0), Ok(()));
        target.cut();
        assert_eq!(run(&mut queue, &Request::write(data(&list), Flags::NONE), 4096), Ok(()));
        assert!(proofs() >= 5, "{} proofs", proofs());
    }
}

#[test]
fn a_target_that_fills_up_the_room_is_understood() {
    let target = wary();
    change(&target, |mut message| {
        message.resize(4096, 0);
        message
    });
    let (_session, mut queue) =
        open(&Options { key: key(SECRET), controller_key: key(OF_TARGET), ..options(&target) });
    assert_eq!(run(&mut queue, &Request::flush(), 0), Ok(()));
}

#[test]
fn without_the_secret_nothing_is_opened_and_the_message_says_why() {
    let target = wary();
    let error = refusal(&options(&target));
    assert!(matches!(error, OpenError::NoKey) && error.errno() == libc::EACCES);
    assert!(error.to_string().contains("no secret is configured (dhchap-key)"));
    let error = refusal(&Options { key: key(OF_TARGET), ..options(&target) });
    assert!(matches!(error, OpenError::Authentication(Refusal::Theirs(Failure::Failed))), "{error}");
    assert_eq!(
        error.to_string(),
        "authentication failed: the target refuses the host: authentication failed"
    );
    let other = key(&SECRET.replace("-1:01:", "-1:02:"));
    let error = refusal(&Options { key: key(SECRET), controller_key: other, ..options(&target) });
    assert!(matches!(error, OpenError::Authentication(Refusal::Ours(Fault::WrongProof))), "{error}");
    assert_eq!(target.state.proofs.load(Ordering::SeqCst), 0);
}

#[test]
fn a_target_that_shall_prove_itself_cannot_get_around_it() {
    let target = Target::start(Traits::default());
    let host = Options { key: key(SECRET), ..options(&target) };
    // A host with a secret connects to a target that does not require one.
    let (_session, _queue) = open(&host);
    let wanting = Options { controller_key: key(OF_TARGET), ..host };
    assert!(matches!(refusal(&wanting), OpenError::NoProof));
    // A missing response.
    let changes: [Change; 2] = [
        |mut message| {
            if message[1] == 3 {
                message[8] = 0;
            }
            message
        },
        |mut message| {
            if message[1] == 3 {
                message[20] ^= 1;
            }
            message
        },
    ];
    for (tamper, fault) in changes.into_iter().zip([Fault::NoProof, Fault::WrongProof]) {
        change(&target, tamper);
        let error = refusal(&wanting);
        assert!(
            matches!(error, OpenError::Authentication(Refusal::Ours(found)) if found == fault),
            "{error}"
        );
    }
}

#[test]
fn an_invalid_message_of_a_target_is_an_error() {
    let target = wary();
    let host = Options { key: key(SECRET), ..options(&target) };
    let cases: [(Change, Failure); 6] = [
        (|message| message[..12].to_vec(), Failure::Payload),
        (|message| message[..40].to_vec(), Failure::Payload),
        (|message| [&[9], &message[1..]].concat(), Failure::Message),
        (|message| [&message[..4], &[0xff; 2], &message[6..]].concat(), Failure::Payload),
        (|message| [&message[..8], &[9], &message[9..]].concat(), Failure::Hash),
        (|message| [&message[..80], &[0; 256]].concat(), Failure::Group),
    ];
    for (tamper, failure) in cases {
        change(&target, tamper);
        let error = refusal(&host);
        let expected = Refusal::Ours(Fault::InvalidMessage(failure));
        assert!(matches!(error, OpenError::Authentication(found) if found == expected), "{error}");
    }
}
