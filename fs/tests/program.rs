//! The program `freestone-fs` on a directory.

use crate::common::*;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid};
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Instant;
use tempfile::TempDir;
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserConfigFlags;
use vmm_sys_util::eventfd::EventFd;

const EINVAL: i32 = 22;
const EIO: i32 = 5;
const ENOENT: i32 = 2;
const EPROTO: i32 = 71;

struct Server {
    child: Child,
    /// Lines, until all of its processes have ended.
    log: Receiver<String>,
    folder: TempDir,
}

impl Server {
    /// A server that waits for a client. As root it has its sandbox and its filter of system calls.
    fn start(more: &[&str]) -> Server {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("tree")).unwrap();
        let listener = UnixListener::bind(folder.path().join("s")).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_freestone-fs"));
        command.arg("--shared-dir").arg(folder.path().join("tree")).arg("--fd=0");
        if !geteuid().is_root() {
            command.arg("--sandbox=none");
        }
        command.args(more).stdin(OwnedFd::from(listener)).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let (sender, log) = channel();
        std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Server { child, log, folder }
    }

    /// Reads the log up to a line with these words, which it returns.
    #[track_caller]
    fn line(&mut self, words: &str) -> String {
        let mut before = Vec::new();
        loop {
            match self.log.recv_timeout(PATIENCE) {
                Ok(line) if line.contains(words) => return line,
                Ok(line) => before.push(line),
                Err(error) => panic!("no line with {words}: {error}: {before:?}"),
            }
        }
    }

    fn connect(&self) -> UnixStream {
        UnixStream::connect(self.folder.path().join("s")).unwrap()
    }

    fn guest(&mut self, queues: usize) -> Guest {
        self.line("Waiting for vhost-user socket connection");
        Guest::connect(self.connect(), queues)
    }

    /// Its exit code.
    fn end(mut self) -> Option<i32> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < deadline, "the server does not end");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn number(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes[..8].try_into().unwrap())
}

#[test]
fn every_queue_serves_files_at_the_same_time_as_the_others() {
    let mut server = Server::start(&["--queues=4"]);
    let mut guest = server.guest(5);
    assert_eq!(guest.frontend.get_queue_num().unwrap(), 5);
    guest.init(2);
    let queues = 1..=4;
    let mut files = Vec::new();
    for queue in queues.clone() {
        guest.send(queue, CREATE, 1, &create(&format!("file-{queue}")));
    }
    queues.clone().for_each(|queue| guest.kick(queue));
    for queue in queues.clone() {
        let answer = guest.answer(queue).unwrap();
        files.push((number(&answer), number(&answer[128..])));
    }
    let data = |queue: usize| vec![b'0' + queue as u8; 1000 * queue];
    for (queue, (node, handle)) in queues.clone().zip(&files) {
        let body = [transfer(*handle, data(queue).len()), data(queue)].concat();
        guest.send(queue, WRITE_FILE, *node, &body);
    }
    queues.clone().for_each(|queue| guest.kick(queue));
    for queue in queues.clone() {
        assert_eq!(guest.answer(queue).unwrap()[..4], (1000 * queue as u32).to_le_bytes());
    }
    for queue in queues {
        // Another queue than the one that wrote.
        let (node, handle) = files[queue % 4];
        let expected = data(queue % 4 + 1);
        assert_eq!(guest.ask(queue, READ, node, &transfer(handle, 4000)), Ok(expected.clone()));
        let path = server.folder.path().join(format!("tree/file-{}", queue % 4 + 1));
        assert_eq!(fs::read(path).unwrap(), expected);
    }
    guest.send(0, FORGET, files[0].0, &1u64.to_le_bytes());
    guest.kick(0);
    assert_eq!(guest.wait(0), 0);
    // The program's own process is the parent of the one that serves.
    kill(Pid::from_raw(server.child.id() as i32), Signal::SIGUSR1).unwrap();
    assert!(server.line("requests: ").ends_with("requests: hiprio 1, request queues 3 4 3 3"));
    drop(guest);
    server.line("Client disconnected");
    assert_eq!(server.end(), Some(0));
}

#[test]
fn no_request_of_any_queue_runs_before_the_session_begins() {
    let mut server = Server::start(&["--queues=3"]);
    let mut guest = server.guest(4);
    for queue in 1..=3 {
        assert_eq!(guest.ask(queue, LOOKUP, 1, b"x\0"), Err(EIO));
    }
    // Requests without an answer.
    guest.send(0, FORGET, 1, &1u64.to_le_bytes());
    guest.kick(0);
    assert_eq!(guest.wait(0), 0);
    // A version of which the server knows none, and a request that ends early.
    for (body, error) in [(&[6, 0, 0, 0].repeat(4)[..], EPROTO), (&[7, 0, 0, 0], EINVAL)] {
        assert_eq!(guest.ask(2, INIT, 0, body), Err(error));
        assert_eq!(guest.ask(1, LOOKUP, 1, b"x\0"), Err(EIO));
    }
    guest.init(3);
    for queue in 1..=3 {
        assert_eq!(guest.ask(queue, LOOKUP, 1, b"x\0"), Err(ENOENT));
    }
    guest.send(2, DESTROY, 0, b"");
    guest.kick(2);
    assert_eq!(guest.wait(2), 0);
    assert_eq!(guest.ask(1, LOOKUP, 1, b"x\0"), Err(EIO));
    // A reset of the device ends a session, too, and the guest's driver begins the next one.
    guest.init(1);
    guest.frontend.reset_device().unwrap();
    let features = guest.frontend.get_features().unwrap();
    guest.frontend.set_features(features).unwrap();
    (0..4).for_each(|queue| guest.frontend.set_vring_enable(queue, true).unwrap());
    assert_eq!(guest.ask(2, LOOKUP, 1, b"x\0"), Err(EIO));
    guest.init(2);
    assert_eq!(guest.ask(1, LOOKUP, 1, b"x\0"), Err(ENOENT));
    drop(guest);
    assert_eq!(server.end(), Some(0));
}

#[test]
fn a_guest_may_use_one_queue_of_many() {
    let mut server = Server::start(&["--queues=63"]);
    let mut guest = server.guest(2);
    guest.init(1);
    assert_eq!(guest.ask(1, LOOKUP, 1, b"x\0"), Err(ENOENT));
    assert_eq!(guest.frontend.get_queue_num().unwrap(), 64);
    drop(guest);
    assert_eq!(server.end(), Some(0));
}

#[test]
fn malformed_chains_fail_and_their_queues_continue() {
    let mut server = Server::start(&["--queues=3"]);
    let mut guest = server.guest(4);
    guest.init(1);
    let (whole, request) = (BUFFER as u32, request(LOOKUP, 7, 1, b"x\0"));
    let short = request.len() as u32 - 3;
    for queue in [3, 1, 2] {
        let [input, output] = [guest.buffer(queue, 0), guest.buffer(queue, 1)];
        let answer = (output, whole, WRITE, 0);
        // Descriptors, and whether there is room for an error.
        let chains: &[(&[Descriptor], bool)] = &[
            (&[(MEMORY, 42, NEXT, 1), answer], true),
            (&[(MEMORY - 8, 42, NEXT, 1), answer], true),
            (&[(u64::MAX - 8, 42, NEXT, 1), answer], true),
            (&[(input, 39, NEXT, 1), answer], true),
            (&[(input, short, NEXT, 1), answer], true),
            (&[(input, 0, NEXT, 1), answer], true),
            (&[answer], true),
            (&[(input, 42, NEXT, 1), (MEMORY, whole, WRITE, 0)], false),
            (&[(input, 42, NEXT, 1), (output, 15, WRITE, 0)], false),
            (&[(input, 42, 0, 0)], false),
            (&[(input, 42, NEXT, QUEUE_SIZE)], false),
            (&[(input, 1, NEXT, 0)], false),
            (&[(output, 16, INDIRECT, 0)], false),
            (&[(MEMORY, 32, INDIRECT, 0)], false),
        ];
        for (index, (chain, has_room)) in chains.iter().enumerate() {
            guest.put(&request, input);
            guest.put(&[0; 16], output);
            guest.describe(queue, chain);
            guest.offer(queue);
            guest.kick(queue);
            match has_room {
                true => assert!(guest.answer(queue).is_err(), "chain {index} is served"),
                false => assert_eq!(guest.wait(queue), 0, "chain {index}"),
            }
        }
        // Not a name, not an operation.
        assert_eq!(guest.ask(queue, LOOKUP, 1, b"x"), Err(EINVAL));
        assert_eq!(guest.ask(queue, 4711, 1, b""), Err(38));
        assert_eq!(guest.ask(queue, LOOKUP, 1, b"x\0"), Err(ENOENT));
    }
    drop(guest);
    server.line("further invalid requests are not logged");
    assert_eq!(server.end(), Some(0));
}

#[test]
fn a_broken_ring_ends_the_server() {
    let mut server = Server::start(&["--queues=2"]);
    let mut guest = server.guest(3);
    guest.set_available(2, QUEUE_SIZE + 1);
    guest.kick(2);
    let line = server.line("ERROR");
    assert!(line.contains("queue 2: invalid ring: "), "{line}");
    assert_eq!(server.end(), Some(1));
}

#[test]
fn a_queue_that_does_not_exist_is_refused() {
    let mut server = Server::start(&["--queues=2"]);
    server.line("Waiting");
    // A monitor that does not ask how many there are.
    let guest = Guest::connect_unchecked(server.connect());
    assert!(guest.try_start(3, &EventFd::new(0).unwrap()).is_err());
    assert!(server.line("ERROR").contains("vhost-user: "));
    assert_eq!(server.end(), Some(1));
}

#[test]
fn a_client_that_vanishes_within_a_message_is_the_end() {
    let mut server = Server::start(&["--queues=2"]);
    server.line("Waiting");
    let mut stream = server.connect();
    std::io::Write::write_all(&mut stream, &[1, 0, 0]).unwrap();
    drop(stream);
    assert_eq!(server.end(), Some(0));
}

#[test]
fn the_configuration_space_is_offered_with_a_tag() {
    let mut server = Server::start(&["--queues=4", "--tag=home"]);
    let mut guest = server.guest(5);
    let flags = VhostUserConfigFlags::empty();
    let (_, space) = guest.frontend.get_config(0, 40, flags, &[0; 40]).unwrap();
    assert_eq!((&space[..5], &space[36..]), (&b"home\0"[..], &[4, 0, 0, 0][..]));
    let (_, count) = guest.frontend.get_config(36, 4, flags, &[0; 4]).unwrap();
    assert_eq!(count, [4, 0, 0, 0]);
}

#[test]
fn a_second_client_is_refused() {
    let mut server = Server::start(&["--queues=2"]);
    let guest = server.guest(3);
    server.line("Client connected");
    let refused = UnixStream::connect(server.folder.path().join("s")).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    drop(guest);
    assert_eq!(server.end(), Some(0));
}

#[test]
fn a_read_only_server_refuses_changes() {
    let mut server = Server::start(&["--queues=2", "--readonly"]);
    let mut guest = server.guest(3);
    guest.init(1);
    assert_eq!(guest.ask(2, CREATE, 1, &create("x")), Err(30));
}

#[test]
fn a_failed_start_names_its_reason() {
    let mut server = Server::start(&["--queues=2", "--rlimit-nofile=600"]);
    assert!(server.line("ERROR").ends_with("limit of open files: 600: 2 queues take 633: want more"));
    assert_eq!(server.end(), Some(1));
    let output = Command::new(env!("CARGO_BIN_EXE_freestone-fs"))
        .args(["--shared-dir=/nowhere", "--fd=0", "--queues=1"])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("standard input: ") && output.status.code() == Some(1), "{said}");
}

#[test]
fn the_version_is_that_of_the_release() {
    let versions = include_str!("../../Cargo.toml").lines().filter(|line| line.starts_with("version = "));
    let version = versions.map(|line| line.split('"').nth(1).unwrap()).next().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_freestone-fs")).arg("--version").output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.starts_with(&format!("freestone-fs {version} (library virtiofsd ")), "{said}");
}

#[test]
fn sigterm_ends_the_server_and_its_sandbox() {
    let mut server = Server::start(&["--queues=2"]);
    let mut guest = server.guest(3);
    guest.init(1);
    kill(Pid::from_raw(server.child.id() as i32), Signal::SIGTERM).unwrap();
    // The log ends when all processes have.
    let end = loop {
        if let Err(end) = server.log.recv_timeout(PATIENCE) {
            break end;
        }
    };
    assert_eq!(end, RecvTimeoutError::Disconnected);
    assert_eq!(server.end(), Some(1));
}

/// Numbers of a seed (xorshift).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    /// A number near one of these.
    fn near(&mut self, values: &[u64]) -> u64 {
        values[self.below(values.len() as u64) as usize].wrapping_add(self.below(32)).wrapping_sub(16)
    }
}

/// A chain of random descriptors, and a request of random content.
fn offer_noise(guest: &mut Guest, queue: usize, numbers: &mut Numbers) {
    let operation = if numbers.below(8) == 0 { numbers.0 as u32 } else { numbers.below(52) as u32 };
    let body: Vec<u8> = (0..numbers.below(128)).map(|_| numbers.below(4) as u8).collect();
    let mut bytes = request(operation, numbers.0, numbers.below(3), &body);
    if numbers.below(4) == 0 {
        bytes[..4].copy_from_slice(&(numbers.0 as u32).to_le_bytes());
    }
    // No answer is written over a ring.
    let places = [guest.buffer(queue, 0), guest.buffer(queue, 1), MEMORY, u64::MAX];
    guest.put(&bytes, places[0]);
    let mut chain: Vec<Descriptor> = (0..QUEUE_SIZE)
        .map(|index| {
            let address = numbers.near(&places);
            let len = numbers.near(&[16, 40, BUFFER, 1 << 20, u64::from(u32::MAX)]) as u32;
            (address, len, numbers.below(8) as u16, index + numbers.below(3) as u16)
        })
        .collect();
    // Often a chain that leads to a request.
    if numbers.below(2) == 0 {
        chain[0] = (places[0], bytes.len() as u32, NEXT, 1);
        chain[1] = (places[1], numbers.near(&[16, 144, BUFFER - 16]) as u32, WRITE, 0);
    }
    guest.describe(queue, &chain);
    guest.offer(queue);
    guest.kick(queue);
}

#[test]
fn noise_on_all_queues_at_once_is_answered() {
    for seed in 1..=4 {
        let mut server = Server::start(&["--queues=4"]);
        let mut guest = server.guest(5);
        let mut numbers = Numbers(seed);
        guest.init(1);
        for _ in 0..1000 {
            (0..5).for_each(|queue| offer_noise(&mut guest, queue, &mut numbers));
            for queue in 0..5 {
                guest.wait(queue);
            }
        }
        for queue in 1..=4 {
            guest.init(queue);
            assert_eq!(guest.ask(queue, LOOKUP, 1, b"missing\0"), Err(ENOENT));
        }
        drop(guest);
        assert_eq!(server.end(), Some(0));
    }
}
