//! A hostile NBD client of an export with TLS, and a running `exports_nbd`, over its socket.
//!
//! The client requests TLS, correctly or not, and then sends input bytes, an edited ClientHello, or
//! a whole session. Inside a session it behaves as the client of `nbd_server`, but it may flip,
//! truncate, repeat or mix records with plain bytes. Nothing may panic, the server must disconnect,
//! and no resource of the connection may remain. A client without TLS must receive no information
//! about the export. A session with unedited records must be served as one without TLS.

use crate::input::Input;
use crate::nbd_server::{Line, converse};
use drivers::mem::{MemDevice, Options};
use exports::Export;
use exports_nbd::{Address, Config, Nbd, Security};
use reactor::{CoreConfig, Cores};
use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};
use tls::{Client, Plain, Session, SessionError};

const DEVICE_BYTES: u64 = 1 << 20;
/// Timeout for every operation of the server.
const DEADLINE: Duration = Duration::from_secs(15);
/// A name that only clients with TLS may receive.
const NAME: &str = "confidential";
const KEYS: &str = "alice:00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff\n";
const STARTTLS: &[u8] = b"IHAVEOPT\0\0\0\x05\0\0\0\0";
const MAX_EDITS: usize = 8;

/// The server that all inputs share. Its cores are dropped last: they outlive the export.
struct Server {
    export: Nbd,
    socket: PathBuf,
    client: Client,
    _cores: Cores,
}

fn server() -> &'static Mutex<Server> {
    static SERVER: OnceLock<Mutex<Server>> = OnceLock::new();
    SERVER.get_or_init(|| {
        let place = |what: &str| std::env::temp_dir().join(format!("fuzz-{what}-{}", std::process::id()));
        let (keys, socket) = (place("keys"), place("nbd-tls.sock"));
        let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&keys);
        file.and_then(|mut file| file.write_all(KEYS.as_bytes())).expect("a file of ours");
        let security = Security { server: tls::Server::with_keys(&keys).expect("a key"), is_required: true };
        let client = Client::with_key(&keys, None).expect("a key");
        let cores = Cores::start(&[CoreConfig::default(), CoreConfig::default()]).expect("two cores");
        let device = Arc::new(MemDevice::new(&Options::new(DEVICE_BYTES)).expect("a small disk"));
        let address = Address::Unix { path: socket.clone(), permissions: 0o600 };
        let config = Config { name: NAME.into(), tls: Some(security), ..Config::new(address) };
        let export = Nbd::start(device, cores.all(), config).expect("an export");
        Mutex::new(Server { export, socket, client, _cores: cores })
    })
}

/// Runs one input.
///
/// # Panics
/// When the server violates a requirement.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let server = server().lock().expect("inputs come one after the other");
    let mut socket = UnixStream::connect(&server.socket).expect("the server listens");
    socket.set_read_timeout(Some(DEADLINE)).expect("a socket of ours");
    let session = server.client.session("localhost").expect("a name");
    match input.below(4) {
        0 => babble(&mut socket, session, &mut input),
        choice => {
            let edits = if choice == 1 { 0 } else { 1 + input.below(MAX_EDITS) };
            let edits = (0..edits).map(|_| Edit::new(&mut input)).collect();
            greet(&mut socket);
            let mut stream = Secure { socket, session, edits, record: 0, is_sound: true, has_ended: false };
            if stream.handshake() {
                converse(stream, &mut input, true);
            } else {
                assert!(!stream.is_sound, "the handshake failed although nothing was edited");
                stream.hear_out();
            }
        }
    }
    let start = Instant::now();
    while server.export.stats().clients() > 0 {
        assert!(start.elapsed() < DEADLINE, "something of the connection is left");
        std::thread::yield_now();
    }
}

/// Requests TLS correctly.
fn greet(socket: &mut UnixStream) {
    let mut answer = [0; 18 + 20];
    socket.write_all(&[0, 0, 0, 3]).and_then(|()| socket.write_all(STARTTLS)).expect("the server listens");
    socket.read_exact(&mut answer).expect("the server answers");
    assert_eq!(answer[18 + 12..], [0, 0, 0, 1, 0, 0, 0, 0], "TLS is refused");
}

/// Sends anything, partly in plain text although TLS is required.
fn babble(socket: &mut UnixStream, mut session: Session, input: &mut Input<'_>) {
    // Creates the ClientHello.
    let _ = session.handshake();
    let hello = session.unsent().to_vec();
    let option = |number: u8, data: &[u8]| {
        let len = (data.len() as u32).to_be_bytes();
        [b"IHAVEOPT\0\0\0", &[number][..], &len, data].concat()
    };
    let mut said = Vec::new();
    while !input.is_empty() {
        match input.below(8) {
            0 => said.extend(input.bytes(64)),
            1 => said.extend([0, 0, 0, input.u8() & 7]),
            2 => said.extend(STARTTLS),
            3 => said.extend(option(input.one_of(&[1, 2, 3, 6, 7, 8, 10, 11, 99]), input.bytes(16))),
            4 => said.extend(option(6, b"\0\0\0\x0cconfidential\0\0")),
            5 => said.extend(&hello),
            6 => {
                let mut edited = hello.clone();
                for _ in 0..input.below(4) {
                    let at = usize::from(input.u16()) % edited.len();
                    edited[at] = input.u8();
                }
                edited.truncate(edited.len() - usize::from(input.u8()) % edited.len());
                said.extend(edited);
            }
            _ => {
                let bytes = input.bytes(64);
                let kind = input.one_of(&[20, 21, 22, 23, 24]);
                said.extend([kind, 3, 3, 0, bytes.len() as u8]);
                said.extend(bytes);
            }
        }
    }
    let _ = socket.write_all(&said); // the server may have disconnected
    socket.end();
    let heard = hear_out(socket);
    let is_told = heard.windows(NAME.len()).any(|part| part == NAME.as_bytes());
    assert!(!is_told, "a client without TLS has got the export's name");
}

/// Reads until the end of the stream.
fn hear_out(socket: &mut UnixStream) -> Vec<u8> {
    let mut heard = Vec::new();
    let end = socket.read_to_end(&mut heard);
    let is_late = end.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
    assert!(!is_late, "the server does not disconnect");
    heard
}

/// An edit of one record.
struct Edit {
    record: usize,
    action: u8,
    at: usize,
    byte: u8,
}

impl Edit {
    fn new(input: &mut Input<'_>) -> Edit {
        let (record, action) = (input.below(12), input.u8());
        Edit { record, action, at: usize::from(input.u16()), byte: input.u8() }
    }

    fn apply(&self, record: &mut Vec<u8>) {
        if record.is_empty() {
            return;
        }
        let at = self.at % record.len();
        match self.action % 8 {
            0..=2 => record[at] ^= self.byte | 1,
            3 => record.truncate(at),
            4 => record.extend_from_within(..),
            5 => record.insert(at, self.byte),
            // Inserts a record of another kind, or plain bytes.
            6 => drop(record.splice(..0, [20 + self.byte % 5, 3, 3, 0, 2, 1, self.byte])),
            _ => drop(record.splice(..0, STARTTLS.iter().copied())),
        }
    }
}

/// A session over a socket.
struct Secure {
    socket: UnixStream,
    session: Session,
    edits: Vec<Edit>,
    /// Number of records sent.
    record: usize,
    is_sound: bool,
    has_ended: bool,
}

impl Secure {
    /// Runs the handshake. Returns whether it completed.
    fn handshake(&mut self) -> bool {
        loop {
            let result = self.session.handshake();
            self.flush_records();
            match result {
                Ok(true) => return true,
                Ok(false) if !self.has_ended => {
                    if self.feed().is_err() {
                        return false;
                    }
                }
                _ => return false,
            }
        }
    }

    /// Sends the session's output record by record.
    fn flush_records(&mut self) {
        let said = self.session.unsent().to_vec();
        self.session.sent(said.len());
        let mut rest = &said[..];
        while rest.len() >= 5 {
            let len = 5 + usize::from(u16::from_be_bytes([rest[3], rest[4]]));
            let (record, behind) = rest.split_at(len.min(rest.len()));
            let mut record = record.to_vec();
            for edit in self.edits.iter().filter(|edit| edit.record == self.record) {
                edit.apply(&mut record);
                self.is_sound = false;
            }
            let _ = self.socket.write_all(&record); // the server may have disconnected
            self.record += 1;
            rest = behind;
        }
    }

    fn feed(&mut self) -> io::Result<()> {
        let mut bytes = [0; 4096];
        if !self.is_sound {
            // The server may wait forever for the rest of a record.
            let _ = self.socket.shutdown(Shutdown::Write);
        }
        let len = match self.socket.read(&mut bytes) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => panic!("the server does not answer"),
            result => result?,
        };
        self.session.feed(&bytes[..len]);
        if len == 0 {
            self.session.feed_end();
            self.has_ended = true;
        }
        Ok(())
    }

    fn hear_out(&mut self) {
        self.end();
        hear_out(&mut self.socket);
    }
}

impl Read for Secure {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.session.read(to) {
                Ok(Plain::Bytes(len)) => return Ok(len),
                // The closing alert is sent as far as the socket accepts it; answers are counted
                // elsewhere.
                Ok(Plain::End) | Err(SessionError::Truncated) => return Ok(0),
                Ok(Plain::Nothing) if self.has_ended || to.is_empty() => return Ok(0),
                Ok(Plain::Nothing) => self.feed()?,
                Err(error) => return Err(io::Error::other(error.to_string())),
            }
        }
    }
}

impl Write for Secure {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.session.write(bytes).map_err(|error| io::Error::other(error.to_string()))?;
        self.flush_records();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Line for Secure {
    fn end(&mut self) {
        self.session.close();
        self.flush_records();
        let _ = self.socket.shutdown(Shutdown::Write); // the server may have disconnected
    }

    fn is_sound(&self) -> bool {
        self.is_sound
    }
}
