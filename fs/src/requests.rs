//! Requests of all queues: FUSE_INIT before the others, and an answer for what is no request.
//!
//! A session begins with FUSE_INIT and ends with FUSE_DESTROY or a reset of the device. While one
//! of these runs, no other request of any queue does: all forget the guest's files. A request
//! outside a session fails with EIO.
//!
//! The library reads the header of a request again. A guest that changes it in between disturbs its
//! own session alone: the library has locks of its own.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};
use vhost_user_backend::bitmap::BitmapMmapRegion;
use virtio_queue::DescriptorChain;
use virtiofsd::descriptor_utils::{Reader, Writer};
use virtiofsd::filesystem::FileSystem;
use virtiofsd::fuse::{InHeader, Opcode, OutHeader};
use virtiofsd::server::Server;
use vm_memory::{ByteValued, GuestMemoryLoadGuard, GuestMemoryMmap};

/// The memory of the guest.
pub type Memory = GuestMemoryMmap<BitmapMmapRegion>;
/// The buffers of a request.
pub type Chain = DescriptorChain<GuestMemoryLoadGuard<Memory>>;

/// Invalid requests that are logged. A guest may send any number of them.
const MAX_LOGGED: u64 = 10;
const EIO: i32 = 5;
const EINVAL: i32 = 22;
const INIT: u32 = Opcode::Init as u32;
const DESTROY: u32 = Opcode::Destroy as u32;
/// Requests that have no answer.
const SILENT: [u32; 4] =
    [Opcode::Forget as u32, Opcode::BatchForget as u32, Opcode::Interrupt as u32, DESTROY];

/// The file system, and whether the guest has a session.
pub struct Requests<F: FileSystem + Sync> {
    server: Server<F>,
    has_session: RwLock<bool>,
    invalid: AtomicU64,
}

impl<F: FileSystem + Sync> Requests<F> {
    /// Requests to this file system.
    pub fn new(fs: F) -> Requests<F> {
        Requests { server: Server::new(fs), has_session: RwLock::new(false), invalid: AtomicU64::new(0) }
    }

    /// Carries a request out; returns the length of its answer, in bytes.
    pub fn carry_out(&self, queue: usize, memory: &Memory, chain: Chain) -> usize {
        let header = match Reader::new(memory, chain.clone()) {
            Ok(mut reader) => reader.read_obj::<InHeader>().map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        let header = match header {
            Ok(header) => header,
            Err(reason) => {
                self.log_invalid(queue, &format!("header: {reason}"));
                return fail(memory, chain, 0, EIO);
            }
        };
        let result = match header.opcode {
            // A lock that is poisoned belongs to a server that is ending.
            INIT | DESTROY => {
                let mut has_session = self.has_session.write().unwrap_or_else(PoisonError::into_inner);
                let result = self.pass_on(header, memory, chain.clone());
                let is_granted = matches!(result, Ok(len) if len > size_of::<OutHeader>());
                *has_session = header.opcode == INIT && is_granted;
                result
            }
            opcode => {
                let has_session = self.has_session.read().unwrap_or_else(PoisonError::into_inner);
                match *has_session {
                    true => self.pass_on(header, memory, chain.clone()),
                    false if SILENT.contains(&opcode) => Ok(0),
                    false => Ok(fail(memory, chain.clone(), header.unique, EIO)),
                }
            }
        };
        result.unwrap_or_else(|reason| {
            self.log_invalid(queue, &format!("operation {}: {reason}", header.opcode));
            match SILENT.contains(&header.opcode) {
                true => 0,
                false => fail(memory, chain, header.unique, EINVAL),
            }
        })
    }

    /// Ends the session.
    pub fn reset(&self) {
        let mut has_session = self.has_session.write().unwrap_or_else(PoisonError::into_inner);
        *has_session = false;
        self.server.destroy();
    }

    /// Refuses a chain without room for an answer: the library would panic.
    fn pass_on(&self, header: InHeader, memory: &Memory, chain: Chain) -> Result<usize, String> {
        let reader = Reader::new(memory, chain.clone()).map_err(|error| error.to_string())?;
        let writer = Writer::new(memory, chain).map_err(|error| error.to_string())?;
        if writer.available_bytes() < size_of::<OutHeader>() && !SILENT.contains(&header.opcode) {
            return Err(format!("room of {} bytes for the answer", writer.available_bytes()));
        }
        self.server.handle_message(reader, writer, None::<&mut ()>).map_err(|error| error.to_string())
    }

    fn log_invalid(&self, queue: usize, reason: &str) {
        let before = self.invalid.fetch_add(1, Ordering::Relaxed);
        if before < MAX_LOGGED {
            log::warn!("queue {queue}: invalid request: {reason}");
        }
        if before + 1 == MAX_LOGGED {
            log::warn!("further invalid requests are not logged");
        }
    }
}

/// Answers with an error, if the chain has room for one; returns the length of the answer.
fn fail(memory: &Memory, chain: Chain, unique: u64, errno: i32) -> usize {
    let answer = OutHeader { len: size_of::<OutHeader>() as u32, error: -errno, unique };
    match Writer::new(memory, chain) {
        Ok(mut writer) if writer.available_bytes() >= answer.as_slice().len() => {
            writer.write_obj(answer).map_or(0, |()| answer.as_slice().len())
        }
        _ => 0,
    }
}
