//! The transport to another process over a vhost-user socket: the client side.
//!
//! ```text
//!   VhostUser ─► Frontend ── Unix socket ──►  server  ◄── memory by descriptors, eventfds
//!      └─ Link, on the listening thread: the end of the connection, changes of the configuration
//! ```
//!
//! Source: QEMU, docs/interop/vhost-user.rst.

mod frontend;
mod link;

#[cfg(test)]
pub(in crate::virtio_blk) use frontend::{FLAG_NEED_REPLY, FLAG_REPLY, FLAG_VERSION, message, write_all};
pub use frontend::{Frontend, FrontendError, FrontendReq, Reply};

use super::failure::Failure;
use super::options::Choice;
use super::peer::{Listener, Peer, as_fd, lock};
use super::regions::Region;
use super::transport::{Doorbell, NewQueue, RunningQueue, Traits, Transport};
use link::Link;
use reactor::PeerEvent;
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use vhost::vhost_user::VhostUserProtocolFeatures as Protocol;
use virtio::blk::ConfigSpace;
use virtio::ring::MAX_QUEUE_SIZE;
use vmm_sys_util::eventfd::EventFd;

/// Protocol features that are used if the server offers them.
const WELCOME: Protocol = Protocol::MQ
    .union(Protocol::CONFIG)
    .union(Protocol::REPLY_ACK)
    .union(Protocol::BACKEND_REQ)
    .union(Protocol::CONFIGURE_MEM_SLOTS);
/// Number of regions in one `SET_MEM_TABLE` that every server accepts.
const TABLE_REGIONS: u64 = 8;
/// Both positions of a packed ring at the start: slot 0, wrap counter 1.
const PACKED_START: u32 = 0x8000_8000;
/// Lengths of the configuration space to request: servers refuse a length that exceeds theirs. The
/// second ends after the fields of write zeroes.
const CONFIG_LENGTHS: [usize; 2] = [ConfigSpace::BYTES, 60];

/// State shared with the listening thread.
type Shared<T> = Arc<Mutex<T>>;

/// The connection to a vhost-user-blk server.
pub struct VhostUser {
    peer: Arc<Peer>,
    frontend: Shared<Frontend>,
    offered: u64,
    protocol: Protocol,
    traits: Traits,
    /// The memory in which the server tracks requests in flight. It must live as long as the
    /// connection.
    inflight: OnceLock<File>,
    _listener: Listener,
}

impl VhostUser {
    /// Negotiates with the server.
    ///
    /// # Errors
    /// When the server violates the protocol, or lacks a required feature.
    pub fn new(
        peer: Arc<Peer>,
        mut frontend: Frontend,
        inflight: Choice,
        timeout: Duration,
    ) -> Result<VhostUser, Failure> {
        frontend.send(FrontendReq::SET_OWNER, &[], &[])?;
        let offered = frontend.call(FrontendReq::GET_FEATURES, &[], &[])?.u64_at(0);
        if offered & virtio::VHOST_USER_F_PROTOCOL_FEATURES == 0 {
            return Err(format!("the server offers no protocol features (features {offered:#x})").into());
        }
        let protocol = negotiate_protocol(&mut frontend, inflight)?;
        if !protocol.contains(Protocol::CONFIG) {
            return Err("the server offers no configuration space".into());
        }
        if inflight == Choice::On && !protocol.contains(Protocol::INFLIGHT_SHMFD) {
            return Err("the server offers no in-flight memory".into());
        }
        let max_queues = count(&mut frontend, FrontendReq::GET_QUEUE_NUM, protocol, Protocol::MQ, 1)?;
        let slots = Protocol::CONFIGURE_MEM_SLOTS;
        let max_regions =
            count(&mut frontend, FrontendReq::GET_MAX_MEM_SLOTS, protocol, slots, TABLE_REGIONS)?;
        let backend = match protocol.contains(Protocol::BACKEND_REQ) {
            true => Some(give_channel(&mut frontend, timeout)?),
            false => None,
        };
        let traits = Traits {
            max_queues: max_queues.min(u16::MAX.into()) as u16,
            // No message of the protocol reports the server's limit.
            max_queue_size: MAX_QUEUE_SIZE,
            max_regions,
            region_alignment: 1,
            needs_region_fd: true,
            addresses: vec![0..=u64::MAX],
            starts_together: false,
        };
        let frontend = Arc::new(Mutex::new(frontend));
        let listener = Listener::start(Link::new(peer.clone(), frontend.clone(), backend)?)?;
        let inflight = OnceLock::new();
        Ok(VhostUser { peer, frontend, offered, protocol, traits, inflight, _listener: listener })
    }

    /// The virtio features that the server offers.
    pub fn offered(&self) -> u64 {
        self.offered
    }

    fn tell_queue(&self, new: &NewQueue<'_>, kick: &EventFd) -> Result<(), FrontendError> {
        let NewQueue { index, queue, call, .. } = *new;
        let ring = queue.config().ring;
        let base = if ring.packed { PACKED_START } else { 0 };
        let mut addresses = pair(index, 0);
        // Ring addresses are those of this process, and the device's area precedes the driver's.
        let [descriptors, driver, device] = new.areas().map(|area| area.base.addr() as u64);
        for address in [descriptors, device, driver, 0] {
            addresses.extend_from_slice(&address.to_le_bytes());
        }
        let number = u64::from(index).to_le_bytes();
        let mut frontend = lock(&self.frontend);
        frontend.send(FrontendReq::SET_VRING_NUM, &pair(index, ring.size.into()), &[])?;
        frontend.send(FrontendReq::SET_VRING_BASE, &pair(index, base), &[])?;
        frontend.send(FrontendReq::SET_VRING_ADDR, &addresses, &[])?;
        frontend.send(FrontendReq::SET_VRING_CALL, &number, &[call.as_raw_fd()])?;
        frontend.send(FrontendReq::SET_VRING_KICK, &number, &[kick.as_raw_fd()])?;
        frontend.send(FrontendReq::SET_VRING_ENABLE, &pair(index, 1), &[])
    }

    fn has_slots(&self) -> bool {
        self.protocol.contains(Protocol::CONFIGURE_MEM_SLOTS)
    }

    fn send_region(&self, request: FrontendReq, region: Region) -> Result<(), FrontendError> {
        let fd = region.memory.fd.filter(|_| request == FrontendReq::ADD_MEM_REG);
        let mut payload = vec![0; 8];
        describe(&mut payload, region);
        self.send_memory(request, &payload, fd.as_slice())
    }

    fn send_table(&self, list: &[Region]) -> Result<(), FrontendError> {
        let mut payload = (list.len() as u64).to_le_bytes().to_vec();
        for region in list {
            describe(&mut payload, *region);
        }
        let fds: Vec<RawFd> = list.iter().filter_map(|r| r.memory.fd).collect();
        self.send_memory(FrontendReq::SET_MEM_TABLE, &payload, &fds)
    }

    fn send_memory(&self, request: FrontendReq, payload: &[u8], fds: &[RawFd]) -> Result<(), FrontendError> {
        let mut frontend = lock(&self.frontend);
        frontend.send(request, payload, fds)?;
        if !self.protocol.contains(Protocol::REPLY_ACK) {
            // A request may reach the server through a ring before this message: any reply shows
            // that it was read.
            frontend.call(FrontendReq::GET_FEATURES, &[], &[])?;
        }
        Ok(())
    }
}

impl Transport for VhostUser {
    fn traits(&self) -> &Traits {
        &self.traits
    }

    fn read_config(&self) -> Result<ConfigSpace, Failure> {
        Ok(read_config(&self.frontend)?)
    }

    fn set_features(&self, features: u64) -> Result<(), Failure> {
        let features = features | virtio::VHOST_USER_F_PROTOCOL_FEATURES;
        Ok(lock(&self.frontend).send(FrontendReq::SET_FEATURES, &features.to_le_bytes(), &[])?)
    }

    fn prepare(&self, queues: u16, ring_size: u16) -> Result<(), Failure> {
        if self.protocol.contains(Protocol::INFLIGHT_SHMFD) {
            let file = share_inflight(&mut lock(&self.frontend), queues, ring_size)?;
            self.inflight.set(file).map_err(|_| "the in-flight memory is already set")?;
        }
        Ok(())
    }

    fn map(&self, region: Region, all: &[Region]) -> Result<(), Failure> {
        match self.has_slots() {
            true => self.send_region(FrontendReq::ADD_MEM_REG, region)?,
            false => self.send_table(all)?,
        }
        Ok(())
    }

    fn unmap(&self, region: Region, rest: &[Region]) -> Result<(), Failure> {
        match self.has_slots() {
            true => self.send_region(FrontendReq::REM_MEM_REG, region)?,
            false => self.send_table(rest)?,
        }
        Ok(())
    }

    fn start_queue(&self, new: NewQueue<'_>) -> Result<RunningQueue, Failure> {
        let kick = EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)?;
        let doorbell = Doorbell::Shared(Box::new(PeerEvent::new(as_fd(&kick))?));
        self.tell_queue(&new, &kick)?;
        Ok(RunningQueue { doorbell, has_event: true })
    }

    fn run(&self) -> Result<(), Failure> {
        Ok(())
    }

    fn stop_queue(&self, index: u16) -> Result<(), Failure> {
        if self.peer.is_gone() {
            return Ok(());
        }
        let mut frontend = lock(&self.frontend);
        frontend.send(FrontendReq::SET_VRING_ENABLE, &pair(index, 0), &[])?;
        frontend.call(FrontendReq::GET_VRING_BASE, &pair(index, 0), &[])?;
        Ok(())
    }

    fn shutdown(&self) {
        // The listening thread notifies the queues.
        lock(&self.frontend).shutdown();
    }
}

/// Reads as much of the configuration space as the server has.
fn read_config(frontend: &Mutex<Frontend>) -> Result<ConfigSpace, FrontendError> {
    let request = FrontendReq::GET_CONFIG;
    for len in CONFIG_LENGTHS {
        // Offset, size, flags, and the requested number of bytes.
        let mut payload = vec![0; 12 + len];
        payload[4..8].copy_from_slice(&(len as u32).to_le_bytes());
        let reply = lock(frontend).call(request, &payload, &[])?;
        if reply.payload.len() > 12 {
            return Ok(ConfigSpace::from_bytes(&reply.payload[12..]));
        }
    }
    Err(FrontendError::BadReply { request, what: "an empty configuration space".into() })
}

fn negotiate_protocol(frontend: &mut Frontend, inflight: Choice) -> Result<Protocol, FrontendError> {
    let offered = frontend.call(FrontendReq::GET_PROTOCOL_FEATURES, &[], &[])?.u64_at(0);
    let welcome = if inflight == Choice::Off { WELCOME } else { WELCOME | Protocol::INFLIGHT_SHMFD };
    let protocol = Protocol::from_bits_truncate(offered) & welcome;
    frontend.send(FrontendReq::SET_PROTOCOL_FEATURES, &protocol.bits().to_le_bytes(), &[])?;
    frontend.set_protocol(protocol);
    Ok(protocol)
}

/// A number that the server reports when `feature` is in use.
fn count(
    frontend: &mut Frontend,
    request: FrontendReq,
    protocol: Protocol,
    feature: Protocol,
    otherwise: u64,
) -> Result<u64, FrontendError> {
    if !protocol.contains(feature) {
        return Ok(otherwise);
    }
    let reply = frontend.call(request, &[], &[])?;
    Ok(reply.u64_at(0))
}

/// Gives the server a channel for its own messages and returns our end.
fn give_channel(frontend: &mut Frontend, timeout: Duration) -> Result<UnixStream, Failure> {
    let (ours, theirs) = UnixStream::pair()?;
    // An incomplete message must not block the listening thread forever.
    ours.set_read_timeout(Some(timeout))?;
    ours.set_write_timeout(Some(timeout))?;
    frontend.send(FrontendReq::SET_BACKEND_REQ_FD, &[], &[theirs.as_raw_fd()])?;
    Ok(ours)
}

/// Requests in-flight memory from the server and returns it, as a front end does after the first
/// connection.
fn share_inflight(frontend: &mut Frontend, queues: u16, size: u16) -> Result<File, FrontendError> {
    let mut wish = vec![0; 24];
    wish[16..18].copy_from_slice(&queues.to_le_bytes());
    wish[18..20].copy_from_slice(&size.to_le_bytes());
    let request = FrontendReq::GET_INFLIGHT_FD;
    let reply = frontend.call(request, &wish, &[])?;
    let Some(file) = reply.file.filter(|_| reply.payload.len() >= 20) else {
        return Err(FrontendError::BadReply { request, what: "no memory".into() });
    };
    frontend.send(FrontendReq::SET_INFLIGHT_FD, &reply.payload, &[file.as_raw_fd()])?;
    Ok(file)
}

/// Appends a region in the form of `SET_MEM_TABLE` and `ADD_MEM_REG`.
fn describe(payload: &mut Vec<u8>, region: Region) {
    let memory = region.memory;
    for field in [region.guest_addr, memory.len as u64, memory.addr as u64, memory.fd_offset] {
        payload.extend_from_slice(&field.to_le_bytes());
    }
}

fn pair(index: u16, value: u32) -> Vec<u8> {
    [u32::from(index).to_le_bytes(), value.to_le_bytes()].concat()
}
