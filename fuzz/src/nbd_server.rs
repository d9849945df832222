//! A hostile NBD client, and a running `exports_nbd`, over its socket.
//!
//! The client agrees on a form of replies, or sends anything. Then it mixes valid requests with
//! changed ones and random bytes, ends its side, and reads the replies. Whatever it sends, nothing
//! may panic, the server must disconnect, and no resource of the connection may remain. As long as
//! the client has sent only requests with valid boundaries, each must be answered once.

use crate::input::Input;
use drivers::mem::{MemDevice, Options};
use exports::Export;
use exports_nbd::{Address, Config, Nbd};
use reactor::{CoreConfig, Cores};
use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

const DEVICE_BYTES: u64 = 1 << 20;
const MAX_ACTIONS: usize = 64;
/// Longest payload of a valid write.
const MAX_WRITE: usize = 2048;
/// Longest valid read: all replies fit into the client's socket buffer; otherwise the server would
/// rightly wait.
const MAX_READ: u64 = 64 << 10;
/// Timeout for every operation of the server.
const DEADLINE: Duration = Duration::from_secs(15);

/// The server that all inputs share. Its cores are dropped last: they outlive the export.
struct Server {
    export: Nbd,
    socket: PathBuf,
    _cores: Cores,
}

fn server() -> &'static Mutex<Server> {
    static SERVER: OnceLock<Mutex<Server>> = OnceLock::new();
    SERVER.get_or_init(|| {
        let socket = std::env::temp_dir().join(format!("fuzz-nbd-{}.sock", std::process::id()));
        let cores = Cores::start(&[CoreConfig::default(), CoreConfig::default()]).expect("two cores");
        let device = Arc::new(MemDevice::new(&Options::new(DEVICE_BYTES)).expect("a small disk"));
        let address = Address::Unix { path: socket.clone(), permissions: 0o600 };
        let config = Config { name: "disk".into(), ..Config::new(address) };
        let export = Nbd::start(device, cores.all(), config).expect("an export");
        Mutex::new(Server { export, socket, _cores: cores })
    })
}

/// Runs one input.
///
/// # Panics
/// When the server violates a requirement.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let server = server().lock().expect("inputs come one after the other");
    let stream = UnixStream::connect(&server.socket).expect("the server listens");
    stream.set_read_timeout(Some(DEADLINE)).expect("a socket of ours");
    converse(stream, &mut input, false);
    let start = Instant::now();
    while server.export.stats().clients() > 0 {
        assert!(start.elapsed() < DEADLINE, "something of the connection is left");
        std::thread::yield_now();
    }
}

/// A client's connection.
pub(crate) trait Line: Read + Write {
    /// Closes the sending side. The server may have disconnected.
    fn end(&mut self);

    /// Whether the server received all bytes unchanged.
    fn is_sound(&self) -> bool {
        true
    }
}

impl Line for UnixStream {
    fn end(&mut self) {
        let _ = self.shutdown(Shutdown::Write);
    }
}

/// Runs a conversation, from the greeting to the end of the stream. If `is_greeted`, the client has
/// already read and answered the greeting.
pub(crate) fn converse(stream: impl Line, input: &mut Input<'_>, is_greeted: bool) {
    let form = input.one_of(&[Form::Simple, Form::Structured, Form::Extended]);
    let mut client = Client { stream, form, asked: HashMap::new(), is_sound: true, is_greeted };
    if input.u8() < 224 {
        let is_agreed = client.agree().is_some();
        for _ in 0..MAX_ACTIONS {
            if input.is_empty() || !is_agreed {
                break;
            }
            client.act(input);
        }
    } else {
        client.is_sound = false;
        while !input.is_empty() {
            client.babble(input);
        }
    }
    client.stream.end();
    client.is_sound &= client.stream.is_sound();
    client.listen();
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Simple,
    Structured,
    Extended,
}

struct Client<S> {
    stream: S,
    form: Form,
    /// Length of a successful reply's data, by cookie.
    asked: HashMap<u64, usize>,
    /// All requests so far had valid boundaries.
    is_sound: bool,
    is_greeted: bool,
}

impl<S: Line> Client<S> {
    fn send(&mut self, bytes: &[u8]) {
        let _ = self.stream.write_all(bytes); // the server may have disconnected
    }

    fn option(&mut self, number: u32, data: &[u8]) {
        let len = (data.len() as u32).to_be_bytes();
        self.send(&[b"IHAVEOPT", &number.to_be_bytes()[..], &len, data].concat());
    }

    /// Completes a valid handshake.
    fn agree(&mut self) -> Option<()> {
        if !self.is_greeted {
            self.send(&[0, 0, 0, 3]);
        }
        let context = b"\0\0\0\0\0\0\0\x01\0\0\0\x0fbase:allocation";
        match self.form {
            Form::Simple => {}
            Form::Structured => self.option(8, &[]),
            Form::Extended => self.option(11, &[]),
        }
        if self.form != Form::Simple {
            self.option(10, context);
        }
        self.option(7, &[0; 6]);
        let acknowledgements = if self.form == Form::Simple { 1 } else { 3 };
        if !self.is_greeted {
            self.expect(18)?;
        }
        for _ in 0..acknowledgements {
            loop {
                let header = self.expect(20)?;
                self.expect(number(&header[16..20]) as usize)?;
                if number(&header[12..16]) == 1 {
                    break;
                }
                assert_eq!(header[12] & 0x80, 0, "a valid option was refused");
            }
        }
        Some(())
    }

    /// Reads the next bytes of the server; `None` if it did not receive the client's bytes
    /// unchanged.
    fn expect(&mut self, len: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; len];
        let result = self.stream.read_exact(&mut bytes);
        assert!(result.is_ok() || !self.stream.is_sound(), "the server does not answer: {result:?}");
        result.is_ok().then_some(bytes)
    }

    /// Sends an option, or random bytes.
    fn babble(&mut self, input: &mut Input<'_>) {
        match input.below(8) {
            0 => {
                let bytes = input.bytes(64).to_vec();
                self.send(&bytes);
            }
            1 => self.send(&[0, 0, 0, input.u8() & 7]),
            _ => {
                let number = input.one_of(&[1, 2, 3, 5, 6, 7, 7, 8, 9, 10, 11, 99]);
                let data = match input.below(4) {
                    0 => Vec::new(),
                    1 => vec![0; 6],
                    2 => input.bytes(64).to_vec(),
                    _ => {
                        let name = input.bytes(8).to_vec();
                        let query = input.bytes(16).to_vec();
                        let len = |bytes: &[u8]| (bytes.len() as u32).to_be_bytes().to_vec();
                        let count = vec![0, 0, 0, input.u8() & 3];
                        [len(&name), name.clone(), count, len(&query), query.clone()].concat()
                    }
                };
                self.option(number, &data);
            }
        }
    }

    fn act(&mut self, input: &mut Input<'_>) {
        let cookie = self.asked.len() as u64;
        let offset = 512 * u64::from(input.u16() % 2050);
        match input.below(16) {
            0..=3 => {
                let len = (512 * (1 + u64::from(input.u8()))).min(MAX_READ);
                self.request(0, 0, cookie, offset, len, &[]);
            }
            4..=7 => {
                let payload = vec![input.u8(); 512 * (1 + input.below(MAX_WRITE / 512))];
                let flags = u16::from(input.u8() & 1);
                self.request(1, flags, cookie, offset, payload.len() as u64, &payload);
            }
            8..=10 => {
                let command = input.one_of(&[3, 4, 5, 6, 7, 9]);
                let len = 512 * u64::from(input.u16());
                self.request(command, 0, cookie, offset, len, &[]);
            }
            11 | 12 => {
                // Any header with a valid boundary.
                let command = input.one_of(&[0, 3, 4, 5, 6, 7, 8, 0xffff]);
                let (flags, offset) = (input.u16() & !(1 << 5), input.u64());
                let len = u64::from(input.u32() & 0xffff);
                self.request(command, flags, cookie, offset, len, &[]);
            }
            13 => {
                self.is_sound = false;
                let (command, flags) = (u16::from(input.u8() & 15), input.u16());
                let (offset, len) = (input.u64(), input.u64());
                let payload = input.bytes(64).to_vec();
                self.request(command, flags, cookie, offset, len, &payload);
            }
            14 => {
                self.is_sound = false;
                let bytes = input.bytes(48).to_vec();
                self.send(&bytes);
            }
            _ => std::thread::yield_now(),
        }
    }

    fn request(&mut self, command: u16, flags: u16, cookie: u64, offset: u64, len: u64, payload: &[u8]) {
        let is_extended = self.form == Form::Extended;
        let flags = if is_extended && command == 1 { flags | 1 << 5 } else { flags };
        let mut bytes = if is_extended { 0x21e4_1c71_u32 } else { 0x2560_9513 }.to_be_bytes().to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend(command.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        if is_extended {
            bytes.extend(len.to_be_bytes());
        } else {
            bytes.extend((len as u32).to_be_bytes());
        }
        bytes.extend(payload);
        self.send(&bytes);
        self.asked.insert(cookie, if command == 0 { len as usize } else { 0 });
    }

    /// Reads until the end of the stream.
    fn listen(&mut self) {
        let mut said = Vec::new();
        let end = self.stream.read_to_end(&mut said);
        if !self.is_sound {
            let is_late = end.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock);
            assert!(!is_late, "the server does not disconnect");
            return;
        }
        end.expect("the server answers and hangs up");
        let mut rest = &said[..];
        while !rest.is_empty() {
            let (cookie, len) = self.reply(rest);
            let is_asked = self.asked.remove(&cookie).is_some();
            assert!(is_asked, "an answer to nothing, or a second one: cookie {cookie}");
            rest = &rest[len..];
        }
        assert!(self.asked.is_empty(), "requests without an answer: {:?}", self.asked);
    }

    /// Cookie and length of the reply at the start of `bytes`.
    fn reply(&self, bytes: &[u8]) -> (u64, usize) {
        let magic = number(&bytes[..4]);
        match self.form {
            Form::Simple => {
                assert_eq!(magic, 0x6744_6698);
                let cookie = number(&bytes[8..16]);
                let is_good = number(&bytes[4..8]) == 0;
                let data = if is_good { self.asked.get(&cookie).copied().unwrap_or(0) } else { 0 };
                (cookie, 16 + data)
            }
            Form::Structured => {
                assert_eq!(magic, 0x668e_33ef);
                (number(&bytes[8..16]), 20 + number(&bytes[16..20]) as usize)
            }
            Form::Extended => {
                assert_eq!(magic, 0x6e8a_278c);
                (number(&bytes[8..16]), 32 + number(&bytes[24..32]) as usize)
            }
        }
    }
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}
