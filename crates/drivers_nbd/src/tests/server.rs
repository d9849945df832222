//! A handwritten server, controlled by the test.

use super::super::{Address, Cancel, NbdQueue, Options, Replies, Session};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// The flags of an export that supports everything.
pub(super) const ALL_FLAGS: u16 = 1 | 1 << 2 | 1 << 3 | 1 << 5 | 1 << 6 | 1 << 8 | 1 << 11;
pub(super) const SIZE: u64 = 64 << 20;

/// The properties of the export.
#[derive(Clone, Copy)]
pub(super) struct Export {
    pub(super) replies: Replies,
    pub(super) flags: u16,
    pub(super) size: u64,
    pub(super) blocks: Option<[u32; 3]>,
    /// The identifier of `base:allocation`, if the export has it.
    pub(super) context: Option<u32>,
}

impl Export {
    pub(super) fn good(replies: Replies) -> Export {
        Export { replies, flags: ALL_FLAGS, size: SIZE, blocks: Some([1, 4096, 1 << 20]), context: None }
    }
}

/// How a client is served after its handshake.
pub(super) type Serve = Box<dyn FnOnce(&mut Client) + Send>;

/// A server on its own thread, for one connection. Dropping it waits for the thread.
pub(super) struct Server {
    pub(super) options: Options,
    thread: Option<JoinHandle<()>>,
    _dir: tempfile::TempDir,
}

impl Server {
    /// Runs `serve` with the first client from its first byte on.
    pub(super) fn raw(serve: impl FnOnce(Client) + Send + 'static) -> Server {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let thread = std::thread::spawn(move || {
            serve(Client::accept(&listener));
        });
        let mut options = Options::new(Address::Unix(path));
        (options.timeout_ms, options.queue_depth) = (10_000, 16);
        Server { options, thread: Some(thread), _dir: dir }
    }

    /// Serves clients one after the other, each as it says, for a queue that reconnects for
    /// `delay_s` seconds.
    pub(super) fn in_turn(delay_s: u32, turns: Vec<(Export, Serve)>) -> (Server, Arc<Session>, NbdQueue) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let thread = std::thread::spawn(move || {
            for (export, serve) in turns {
                let mut client = Client::accept(&listener);
                client.agree(&export);
                serve(&mut client);
            }
        });
        let mut options = Options::new(Address::Unix(path));
        (options.timeout_ms, options.queue_depth, options.reconnect_delay_s) = (10_000, 16, delay_s);
        let session = Session::open(&options, &Cancel::never()).unwrap();
        let queue = session.start_queue(&Cancel::never()).unwrap();
        (Server { options, thread: Some(thread), _dir: dir }, session, queue)
    }

    /// Agrees on `export`, then runs `serve` and opens a queue.
    pub(super) fn start(
        export: Export,
        serve: impl FnOnce(&mut Client) + Send + 'static,
    ) -> (Server, Arc<Session>, NbdQueue) {
        let server = Server::raw(move |mut client| {
            client.agree(&export);
            serve(&mut client);
        });
        let session = Session::open(&server.options, &Cancel::never()).unwrap();
        let queue = session.start_queue(&Cancel::never()).unwrap();
        assert_eq!(session.facts().replies, export.replies);
        (server, session, queue)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking(), "the server panicked");
        }
    }
}

/// A received request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Asked {
    pub(super) command: u16,
    pub(super) flags: u16,
    pub(super) cookie: u64,
    pub(super) offset: u64,
    pub(super) len: u64,
}

/// The connection to the client.
pub(super) struct Client {
    pub(super) stream: UnixStream,
    pub(super) replies: Replies,
}

impl Client {
    /// The next client.
    pub(super) fn accept(listener: &UnixListener) -> Client {
        let (stream, _) = listener.accept().unwrap();
        // A failed test must not wait forever.
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(60))).unwrap();
        Client { stream, replies: Replies::Simple }
    }

    pub(super) fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    pub(super) fn send(&mut self, bytes: &[u8]) {
        // In many tests the client disconnects.
        let _ = self.stream.write_all(bytes);
    }

    /// Waits until the client disconnects.
    pub(super) fn linger(&mut self) {
        let _ = std::io::copy(&mut self.stream, &mut std::io::sink());
    }

    /// Sends the greeting with the flags given; returns the client's flags.
    pub(super) fn greet(&mut self, flags: u16) -> u32 {
        self.send(b"NBDMAGICIHAVEOPT");
        self.send(&flags.to_be_bytes());
        u32::from_be_bytes(self.bytes())
    }

    /// The next option: its number and its data.
    pub(super) fn option(&mut self) -> (u32, Vec<u8>) {
        assert_eq!(&self.bytes::<8>(), b"IHAVEOPT");
        let (option, len) = (u32::from_be_bytes(self.bytes()), u32::from_be_bytes(self.bytes()));
        let mut data = vec![0; len as usize];
        self.stream.read_exact(&mut data).unwrap();
        (option, data)
    }

    /// A reply to an option.
    pub(super) fn answer(&mut self, option: u32, kind: u32, data: &[u8]) {
        let mut reply = 0x0003_e889_0455_65a9_u64.to_be_bytes().to_vec();
        reply.extend(option.to_be_bytes());
        reply.extend(kind.to_be_bytes());
        reply.extend((data.len() as u32).to_be_bytes());
        reply.extend(data);
        self.send(&reply);
    }

    pub(super) fn about_export(&mut self, size: u64, flags: u16) {
        let info = [&[0, 0][..], &size.to_be_bytes(), &flags.to_be_bytes()].concat();
        self.answer(7, 3, &info);
    }

    pub(super) fn about_blocks(&mut self, blocks: [u32; 3]) {
        let info = [&[0, 3][..], &blocks.map(u32::to_be_bytes).concat()].concat();
        self.answer(7, 3, &info);
    }

    /// The whole handshake.
    pub(super) fn agree(&mut self, export: &Export) {
        assert_eq!(self.greet(3), 3);
        loop {
            let (option, _) = self.option();
            let wanted = match option {
                8 => Replies::Structured,
                11 => Replies::Extended,
                7 => break,
                10 => {
                    if let Some(context) = export.context {
                        self.answer(10, 4, &[&context.to_be_bytes()[..], b"base:allocation"].concat());
                        self.answer(10, 1, &[]);
                    } else {
                        self.answer(10, 1 << 31 | 1, b"not here");
                    }
                    continue;
                }
                option => panic!("option {option}"),
            };
            if wanted == export.replies {
                self.answer(option, 1, &[]);
                self.replies = wanted;
            } else {
                self.answer(option, 1 << 31 | 1, b"not here");
            }
        }
        self.about_export(export.size, export.flags);
        if let Some(blocks) = export.blocks {
            self.about_blocks(blocks);
        }
        self.answer(7, 1, &[]);
    }

    /// The next request; its payload, if any, has not been read.
    pub(super) fn request(&mut self) -> Asked {
        let is_extended = self.replies == Replies::Extended;
        let magic = if is_extended { 0x21e4_1c71 } else { 0x2560_9513_u32 };
        assert_eq!(self.bytes(), magic.to_be_bytes());
        let (flags, command) = (u16::from_be_bytes(self.bytes()), u16::from_be_bytes(self.bytes()));
        let (cookie, offset) = (u64::from_be_bytes(self.bytes()), u64::from_be_bytes(self.bytes()));
        let len = if is_extended {
            u64::from_be_bytes(self.bytes())
        } else {
            u32::from_be_bytes(self.bytes()).into()
        };
        Asked { command, flags, cookie, offset, len }
    }

    pub(super) fn payload(&mut self, asked: &Asked) -> Vec<u8> {
        let mut data = vec![0; asked.len as usize];
        self.stream.read_exact(&mut data).unwrap();
        data
    }

    /// Answers without data, in the negotiated form.
    pub(super) fn done(&mut self, asked: &Asked, error: u32) {
        let bytes = match (self.replies, error) {
            (Replies::Simple, _) => simple(asked.cookie, error, &[]),
            (_, 0) => self.part(asked, 1, 0, &[]),
            _ => self.part(asked, 1, 0x8001, &[&error.to_be_bytes()[..], &[0, 0]].concat()),
        };
        self.send(&bytes);
    }

    /// Answers a read.
    pub(super) fn data(&mut self, asked: &Asked, data: &[u8]) {
        let bytes = match self.replies {
            Replies::Simple => simple(asked.cookie, 0, data),
            _ => self.part(asked, 1, 1, &[&asked.offset.to_be_bytes(), data].concat()),
        };
        self.send(&bytes);
    }

    /// A part of a structured or extended reply.
    pub(super) fn part(&self, asked: &Asked, flags: u16, kind: u16, payload: &[u8]) -> Vec<u8> {
        part(self.replies, asked, flags, kind, payload)
    }
}

pub(super) fn simple(cookie: u64, error: u32, data: &[u8]) -> Vec<u8> {
    [&[0x67, 0x44, 0x66, 0x98], &error.to_be_bytes()[..], &cookie.to_be_bytes(), data].concat()
}

pub(super) fn part(replies: Replies, asked: &Asked, flags: u16, kind: u16, payload: &[u8]) -> Vec<u8> {
    let is_extended = replies == Replies::Extended;
    let magic = if is_extended { 0x6e8a_278c_u32 } else { 0x668e_33ef };
    let mut bytes = magic.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(asked.cookie.to_be_bytes());
    if is_extended {
        bytes.extend(asked.offset.to_be_bytes());
        bytes.extend((payload.len() as u64).to_be_bytes());
    } else {
        bytes.extend((payload.len() as u32).to_be_bytes());
    }
    bytes.extend(payload);
    bytes
}
