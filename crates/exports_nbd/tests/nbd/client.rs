//! A client written by hand, which can do everything right or anything wrong.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const DISC: u16 = 2;
pub const FLUSH: u16 = 3;
pub const TRIM: u16 = 4;
pub const CACHE: u16 = 5;
pub const WRITE_ZEROES: u16 = 6;
pub const BLOCK_STATUS: u16 = 7;

pub const FUA: u16 = 1;
pub const FAST_ZERO: u16 = 1 << 4;
pub const PAYLOAD_LEN: u16 = 1 << 5;

pub const EPERM: u32 = 1;
pub const EIO: u32 = 5;
pub const EINVAL: u32 = 22;
pub const ENOSPC: u32 = 28;
pub const EOVERFLOW: u32 = 75;
pub const ENOTSUP: u32 = 95;
pub const ESHUTDOWN: u32 = 108;

/// How requests and replies look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Simple,
    Structured,
    Extended,
}

pub const FORMS: [Form; 3] = [Form::Simple, Form::Structured, Form::Extended];

/// A reply of one part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    pub cookie: u64,
    /// The error number; 0 for success.
    pub error: u32,
    /// Of a structured one; -1 of a simple one.
    pub kind: i32,
    pub data: Vec<u8>,
}

pub struct Client {
    pub stream: UnixStream,
    pub form: Form,
    /// Lengths of reads in flight: a simple reply does not say.
    reads: HashMap<u64, usize>,
    pub size: u64,
    pub flags: u16,
}

/// The data of an option with queries for metadata contexts of the export with the empty name.
pub fn queries(contexts: &[&str]) -> Vec<u8> {
    let mut data = vec![0; 4];
    data.extend((contexts.len() as u32).to_be_bytes());
    for context in contexts {
        data.extend((context.len() as u32).to_be_bytes());
        data.extend(context.as_bytes());
    }
    data
}

impl Client {
    /// A client that has heard the greeting and said its flags.
    pub fn greeted(socket: &Path) -> Client {
        let mut client = Client::silent(socket);
        let mut greeting = [0; 18];
        client.stream.read_exact(&mut greeting).unwrap();
        assert_eq!(&greeting, b"NBDMAGICIHAVEOPT\0\x03");
        client.stream.write_all(&[0, 0, 0, 3]).unwrap();
        client
    }

    /// A client that only connects.
    pub fn silent(socket: &Path) -> Client {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(60))).unwrap();
        Client { stream, form: Form::Simple, reads: HashMap::new(), size: 0, flags: 0 }
    }

    /// A client that may send requests, and has `base:allocation` where it can. It has asked for
    /// the sizes of blocks.
    pub fn connect(socket: &Path, form: Form) -> Client {
        Client::asking(socket, form, &[0, 0, 0, 0, 0, 1, 0, 3], &["base:allocation"])
    }

    /// As [`Client::connect`], but one that has not asked for the sizes of blocks.
    pub fn unaware(socket: &Path, form: Form) -> Client {
        Client::asking(socket, form, &[0; 6], &["base:allocation"])
    }

    /// As [`Client::unaware`], with these metadata contexts.
    pub fn with_contexts(socket: &Path, form: Form, contexts: &[&str]) -> Client {
        Client::asking(socket, form, &[0; 6], contexts)
    }

    /// A client of old, with handshake flags 0.
    pub fn ancient(socket: &Path) -> Client {
        let mut client = Client::silent(socket);
        client.stream.read_exact(&mut [0; 18]).unwrap();
        client.stream.write_all(&[0; 4]).unwrap();
        client.send_option(1, b"disk");
        let mut export = [0; 8 + 2 + 124];
        client.stream.read_exact(&mut export).unwrap();
        assert_eq!(export[10..], [0; 124]);
        client.size = u64::from_be_bytes(export[..8].try_into().unwrap());
        client
    }

    fn asking(socket: &Path, form: Form, about: &[u8], contexts: &[&str]) -> Client {
        let mut client = Client::greeted(socket);
        match form {
            Form::Simple => {}
            Form::Structured => assert_eq!(client.option(8, &[]).last().unwrap().0, 1),
            Form::Extended => assert_eq!(client.option(11, &[]).last().unwrap().0, 1),
        }
        client.form = form;
        if form != Form::Simple {
            assert_eq!(client.option(10, &queries(contexts)).len(), contexts.len() + 1);
        }
        let replies = client.option(7, about);
        assert_eq!(replies.last().unwrap().0, 1);
        let export = &replies.iter().find(|(kind, data)| *kind == 3 && data[..2] == [0, 0]).unwrap().1;
        client.size = u64::from_be_bytes(export[2..10].try_into().unwrap());
        client.flags = u16::from_be_bytes(export[10..12].try_into().unwrap());
        client
    }

    /// One query of block status: the extents of each context by its identifier, as length and
    /// flags.
    pub fn status(&mut self, flags: u16, offset: u64, len: u64) -> Vec<(u32, Vec<(u64, u64)>)> {
        self.send(BLOCK_STATUS, flags, 0x5eed, offset, len);
        let is_extended = self.form == Form::Extended;
        let mut contexts = Vec::new();
        loop {
            let mut front = vec![0; if is_extended { 32 } else { 20 }];
            self.stream.read_exact(&mut front).unwrap();
            let len = u32::from_be_bytes(front[front.len() - 4..].try_into().unwrap());
            let mut data = vec![0; len as usize];
            self.stream.read_exact(&mut data).unwrap();
            let number = |bytes: &[u8]| bytes.iter().fold(0, |value, byte| value << 8 | u64::from(*byte));
            let (start, half) = if is_extended { (8, 8) } else { (4, 4) };
            let extents = data[start..].chunks_exact(2 * half);
            let extents: Vec<_> =
                extents.map(|extent| (number(&extent[..half]), number(&extent[half..]))).collect();
            assert!(!is_extended || number(&data[4..8]) == extents.len() as u64);
            contexts.push((number(&data[..4]) as u32, extents));
            if front[5] == 1 {
                return contexts;
            }
        }
    }

    pub fn send_option(&mut self, number: u32, data: &[u8]) {
        let header = [&b"IHAVEOPT"[..], &number.to_be_bytes(), &(data.len() as u32).to_be_bytes(), data];
        self.stream.write_all(&header.concat()).unwrap();
    }

    /// Sends an option; its replies, type and data, up to the one that ends it.
    pub fn option(&mut self, number: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        self.send_option(number, data);
        let mut replies = Vec::new();
        loop {
            let mut header = [0; 20];
            self.stream.read_exact(&mut header).unwrap();
            assert_eq!(header[..8], 0x0003_e889_0455_65a9u64.to_be_bytes());
            assert_eq!(header[8..12], number.to_be_bytes());
            let kind = u32::from_be_bytes(header[12..16].try_into().unwrap());
            let len = u32::from_be_bytes(header[16..].try_into().unwrap());
            let mut data = vec![0; len as usize];
            self.stream.read_exact(&mut data).unwrap();
            replies.push((kind, data));
            if kind == 1 || kind >> 31 == 1 {
                return replies;
            }
        }
    }

    /// A request's bytes.
    pub fn request(&self, command: u16, flags: u16, cookie: u64, offset: u64, len: u64) -> Vec<u8> {
        let is_extended = self.form == Form::Extended;
        let mut bytes = if is_extended { 0x21e4_1c71u32 } else { 0x2560_9513 }.to_be_bytes().to_vec();
        let flags = if is_extended && command == WRITE { flags | PAYLOAD_LEN } else { flags };
        bytes.extend(flags.to_be_bytes());
        bytes.extend(command.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        if is_extended {
            bytes.extend(len.to_be_bytes());
        } else {
            bytes.extend((len as u32).to_be_bytes());
        }
        bytes
    }

    pub fn send(&mut self, command: u16, flags: u16, cookie: u64, offset: u64, len: u64) {
        if command == READ {
            self.reads.insert(cookie, len as usize);
        }
        self.stream.write_all(&self.request(command, flags, cookie, offset, len)).unwrap();
    }

    pub fn send_write(&mut self, flags: u16, cookie: u64, offset: u64, data: &[u8]) {
        let header = self.request(WRITE, flags, cookie, offset, data.len() as u64);
        self.stream.write_all(&[&header, data].concat()).unwrap();
    }

    /// One request and its reply.
    pub fn run(&mut self, command: u16, flags: u16, offset: u64, len: u64) -> Reply {
        self.send(command, flags, 0x5eed, offset, len);
        let reply = self.reply();
        assert_eq!(reply.cookie, 0x5eed);
        reply
    }

    /// One write; its error.
    pub fn write(&mut self, flags: u16, offset: u64, data: &[u8]) -> u32 {
        self.send_write(flags, 0x5eed, offset, data);
        let reply = self.reply();
        assert_eq!(reply.cookie, 0x5eed);
        reply.error
    }

    /// One read that goes well.
    pub fn read(&mut self, offset: u64, len: u64) -> Vec<u8> {
        let reply = self.run(READ, 0, offset, len);
        assert_eq!((reply.error, reply.data.len() as u64), (0, len));
        reply.data
    }

    /// A read that may come in any number of chunks: its data, or how it fails.
    pub fn read_chunks(&mut self, offset: u64, len: u64) -> Result<Vec<u8>, u32> {
        self.send(READ, 0, 0x5eed, offset, len);
        self.chunks(offset, len)
    }

    /// The chunks of the only read in flight.
    pub fn chunks(&mut self, offset: u64, len: u64) -> Result<Vec<u8>, u32> {
        let mut data = vec![0; len as usize];
        let (mut got, mut error) = (0, 0);
        loop {
            let mut front = [0; 20];
            self.stream.read_exact(&mut front).unwrap();
            assert_eq!(front[..4], 0x668e_33efu32.to_be_bytes());
            let is_done = front[5] == 1;
            let kind = u16::from_be_bytes([front[6], front[7]]);
            let mut bytes = vec![0; u32::from_be_bytes(front[16..].try_into().unwrap()) as usize];
            self.stream.read_exact(&mut bytes).unwrap();
            if kind == 1 {
                let at = (u64::from_be_bytes(bytes[..8].try_into().unwrap()) - offset) as usize;
                data[at..at + bytes.len() - 8].copy_from_slice(&bytes[8..]);
                got += bytes.len() - 8;
            } else if kind == 0x8001 {
                error = u32::from_be_bytes(bytes[..4].try_into().unwrap());
            }
            if is_done {
                assert!(error != 0 || got == data.len(), "{got} bytes of {len}");
                return if error == 0 { Ok(data) } else { Err(error) };
            }
        }
    }

    /// The next reply.
    pub fn reply(&mut self) -> Reply {
        let mut magic = [0; 4];
        self.stream.read_exact(&mut magic).unwrap();
        match self.form {
            Form::Simple => self.simple_reply(magic),
            Form::Structured | Form::Extended => self.chunk(magic),
        }
    }

    fn simple_reply(&mut self, magic: [u8; 4]) -> Reply {
        assert_eq!(magic, 0x6744_6698u32.to_be_bytes());
        let error = u32::from_be_bytes(self.take());
        let cookie = u64::from_be_bytes(self.take());
        let len = self.reads.remove(&cookie).filter(|_| error == 0).unwrap_or(0);
        let mut data = vec![0; len];
        self.stream.read_exact(&mut data).unwrap();
        Reply { cookie, error, kind: -1, data }
    }

    fn chunk(&mut self, magic: [u8; 4]) -> Reply {
        let is_extended = self.form == Form::Extended;
        let expected = if is_extended { 0x6e8a_278cu32 } else { 0x668e_33ef };
        assert_eq!(magic, expected.to_be_bytes());
        assert_eq!(self.take(), [0, 1], "one chunk a reply");
        let kind = u16::from_be_bytes(self.take());
        let cookie = u64::from_be_bytes(self.take());
        let len = if is_extended {
            let _offset: [u8; 8] = self.take();
            u64::from_be_bytes(self.take())
        } else {
            u32::from_be_bytes(self.take()).into()
        };
        let mut data = vec![0; len as usize];
        self.stream.read_exact(&mut data).unwrap();
        let mut error = 0;
        match kind {
            1 => drop(data.drain(..8)),
            0x8001 => {
                error = u32::from_be_bytes(data[..4].try_into().unwrap());
                let text = usize::from(u16::from_be_bytes(data[4..6].try_into().unwrap()));
                assert_eq!(text + 6, data.len());
                assert_ne!(error, 0);
            }
            _ => {}
        }
        self.reads.remove(&cookie);
        Reply { cookie, error, kind: kind.into(), data }
    }

    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Whether the server has disconnected; discards remaining data.
    pub fn is_disconnected(&mut self) -> bool {
        loop {
            match self.stream.read(&mut [0; 65536]) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return true,
                Err(_) => return false,
            }
        }
    }
}
