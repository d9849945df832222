//! The messages of one connection to a vhost-user-blk server.
//!
//! Source: QEMU, docs/interop/vhost-user.rst.

use super::super::failure::Failure;
use super::super::options::Choice;
use super::super::regions::Region;
use super::rings::RingSetup;
use super::{Frontend, FrontendError, FrontendReq};
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use vhost::vhost_user::VhostUserProtocolFeatures as Protocol;
use virtio::blk::ConfigSpace;

/// Protocol features that are used if the server offers them.
const WELCOME: Protocol = Protocol::MQ
    .union(Protocol::CONFIG)
    .union(Protocol::REPLY_ACK)
    .union(Protocol::BACKEND_REQ)
    .union(Protocol::CONFIGURE_MEM_SLOTS);
/// Number of regions in one `SET_MEM_TABLE` that every server accepts.
const TABLE_REGIONS: u64 = 8;
/// Lengths of the configuration space to request: servers refuse a length that exceeds theirs. The
/// second ends after the fields of write zeroes.
const CONFIG_LENGTHS: [usize; 2] = [ConfigSpace::BYTES, 60];

/// A connection on which protocol features are negotiated.
pub struct Connection {
    frontend: Frontend,
    protocol: Protocol,
    /// The virtio features that the server offers.
    pub offered: u64,
    /// Number of virtqueues that the server has.
    pub max_queues: u64,
    /// Largest number of memory regions.
    pub max_regions: u64,
}

/// The memory in which a server tracks requests in flight.
pub struct Inflight {
    /// Its description by the server that created it.
    description: Vec<u8>,
    file: File,
}

impl Connection {
    /// Negotiates protocol features. Also returns the channel for the server's own messages, if the
    /// server has any.
    ///
    /// # Errors
    /// When the server violates the protocol, or lacks a required feature.
    pub fn open(
        mut frontend: Frontend,
        inflight: Choice,
        timeout: Duration,
    ) -> Result<(Connection, Option<UnixStream>), Failure> {
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
        let mut connection = Connection { frontend, protocol, offered, max_queues: 1, max_regions: 1 };
        connection.max_queues = connection.count(FrontendReq::GET_QUEUE_NUM, Protocol::MQ, 1)?;
        let slots = Protocol::CONFIGURE_MEM_SLOTS;
        connection.max_regions = connection.count(FrontendReq::GET_MAX_MEM_SLOTS, slots, TABLE_REGIONS)?;
        let backend = match protocol.contains(Protocol::BACKEND_REQ) {
            true => Some(connection.give_channel(timeout)?),
            false => None,
        };
        Ok((connection, backend))
    }

    /// Sets a time at which all exchanges end; `None`: each answer has its own timeout.
    pub fn set_end(&mut self, ends_at: Option<std::time::Instant>) {
        self.frontend.set_end(ends_at);
    }

    /// The socket.
    pub fn stream(&self) -> &UnixStream {
        self.frontend.stream()
    }

    /// Whether the server can track requests in flight.
    pub fn has_inflight(&self) -> bool {
        self.protocol.contains(Protocol::INFLIGHT_SHMFD)
    }

    /// A number that the server reports when `feature` is in use.
    fn count(
        &mut self,
        request: FrontendReq,
        feature: Protocol,
        otherwise: u64,
    ) -> Result<u64, FrontendError> {
        match self.protocol.contains(feature) {
            true => Ok(self.frontend.call(request, &[], &[])?.u64_at(0)),
            false => Ok(otherwise),
        }
    }

    /// Gives the server a channel for its own messages and returns our end.
    fn give_channel(&mut self, timeout: Duration) -> Result<UnixStream, Failure> {
        let (ours, theirs) = UnixStream::pair()?;
        // An incomplete message must not block the listening thread forever.
        ours.set_read_timeout(Some(timeout))?;
        ours.set_write_timeout(Some(timeout))?;
        self.frontend.send(FrontendReq::SET_BACKEND_REQ_FD, &[], &[theirs.as_raw_fd()])?;
        Ok(ours)
    }

    /// Sets the virtio features in use.
    pub fn set_features(&mut self, features: u64) -> Result<(), FrontendError> {
        let features = features | virtio::VHOST_USER_F_PROTOCOL_FEATURES;
        self.frontend.send(FrontendReq::SET_FEATURES, &features.to_le_bytes(), &[])
    }

    /// Reads as much of the configuration space as the server has.
    pub fn read_config(&mut self) -> Result<ConfigSpace, FrontendError> {
        let request = FrontendReq::GET_CONFIG;
        for len in CONFIG_LENGTHS {
            // Offset, size, flags, and the requested number of bytes.
            let mut payload = vec![0; 12 + len];
            payload[4..8].copy_from_slice(&(len as u32).to_le_bytes());
            let reply = self.frontend.call(request, &payload, &[])?;
            if reply.payload.len() > 12 {
                return Ok(ConfigSpace::from_bytes(&reply.payload[12..]));
            }
        }
        Err(FrontendError::BadReply { request, what: "an empty configuration space".into() })
    }

    /// Has the server create memory in which it tracks requests in flight.
    pub fn create_inflight(&mut self, queues: u16, size: u16) -> Result<Inflight, FrontendError> {
        let mut wish = vec![0; 24];
        wish[16..18].copy_from_slice(&queues.to_le_bytes());
        wish[18..20].copy_from_slice(&size.to_le_bytes());
        let request = FrontendReq::GET_INFLIGHT_FD;
        let reply = self.frontend.call(request, &wish, &[])?;
        match reply.file.filter(|_| reply.payload.len() >= 20) {
            Some(file) => Ok(Inflight { description: reply.payload, file }),
            None => Err(FrontendError::BadReply { request, what: "no memory".into() }),
        }
    }

    /// Gives the server the in-flight memory that it or a predecessor has created.
    pub fn set_inflight(&mut self, inflight: &Inflight) -> Result<(), FrontendError> {
        let Inflight { description, file } = inflight;
        self.frontend.send(FrontendReq::SET_INFLIGHT_FD, description, &[file.as_raw_fd()])
    }

    fn has_slots(&self) -> bool {
        self.protocol.contains(Protocol::CONFIGURE_MEM_SLOTS)
    }

    /// Makes all of `regions` known to a server that knows none.
    pub fn set_regions(&mut self, regions: &[Region]) -> Result<(), FrontendError> {
        match self.has_slots() {
            true => regions.iter().try_for_each(|region| self.add_region(*region, regions)),
            false if regions.is_empty() => Ok(()),
            false => self.send_table(regions),
        }
    }

    /// Makes a region known; `all` includes it.
    pub fn add_region(&mut self, region: Region, all: &[Region]) -> Result<(), FrontendError> {
        match self.has_slots() {
            true => self.send_region(FrontendReq::ADD_MEM_REG, region),
            false => self.send_table(all),
        }
    }

    /// Removes a region; `rest` is the remaining list.
    pub fn remove_region(&mut self, region: Region, rest: &[Region]) -> Result<(), FrontendError> {
        match self.has_slots() {
            true => self.send_region(FrontendReq::REM_MEM_REG, region),
            false => self.send_table(rest),
        }
    }

    fn send_region(&mut self, request: FrontendReq, region: Region) -> Result<(), FrontendError> {
        let fd = region.memory.fd.filter(|_| request == FrontendReq::ADD_MEM_REG);
        let mut payload = vec![0; 8];
        describe(&mut payload, region);
        self.send_memory(request, &payload, fd.as_slice())
    }

    fn send_table(&mut self, list: &[Region]) -> Result<(), FrontendError> {
        let mut payload = (list.len() as u64).to_le_bytes().to_vec();
        for region in list {
            describe(&mut payload, *region);
        }
        let fds: Vec<RawFd> = list.iter().filter_map(|r| r.memory.fd).collect();
        self.send_memory(FrontendReq::SET_MEM_TABLE, &payload, &fds)
    }

    fn send_memory(
        &mut self,
        request: FrontendReq,
        payload: &[u8],
        fds: &[RawFd],
    ) -> Result<(), FrontendError> {
        self.frontend.send(request, payload, fds)?;
        if !self.protocol.contains(Protocol::REPLY_ACK) {
            // A request may reach the server through a ring before this message: any reply shows
            // that it was read.
            self.frontend.call(FrontendReq::GET_FEATURES, &[], &[])?;
        }
        Ok(())
    }

    /// Sets up a virtqueue, which does not run yet, at position `base`.
    pub fn set_ring(&mut self, ring: &RingSetup, base: u32) -> Result<(), FrontendError> {
        let index = ring.index;
        let mut addresses = pair(index, 0);
        // Ring addresses are those of this process, and the device's area precedes the driver's.
        let [descriptors, driver, device] = ring.areas().map(|area| area.addr() as u64);
        for address in [descriptors, device, driver, 0] {
            addresses.extend_from_slice(&address.to_le_bytes());
        }
        let number = u64::from(index).to_le_bytes();
        let frontend = &mut self.frontend;
        frontend.send(FrontendReq::SET_VRING_NUM, &pair(index, ring.config.ring.size.into()), &[])?;
        frontend.send(FrontendReq::SET_VRING_BASE, &pair(index, base), &[])?;
        frontend.send(FrontendReq::SET_VRING_ADDR, &addresses, &[])?;
        frontend.send(FrontendReq::SET_VRING_CALL, &number, &[ring.call.as_raw_fd()])?;
        frontend.send(FrontendReq::SET_VRING_KICK, &number, &[ring.kick.as_raw_fd()])
    }

    /// Has the server serve a virtqueue.
    pub fn enable_ring(&mut self, index: u16) -> Result<(), FrontendError> {
        self.frontend.send(FrontendReq::SET_VRING_ENABLE, &pair(index, 1), &[])
    }

    /// Sets up an empty virtqueue, and has the server serve it.
    pub fn start_ring(&mut self, ring: &RingSetup) -> Result<(), FrontendError> {
        self.set_ring(ring, ring.first_base())?;
        self.enable_ring(ring.index)
    }

    /// Stops a virtqueue. The server has released its memory when this returns.
    pub fn stop_ring(&mut self, index: u16) -> Result<(), FrontendError> {
        self.frontend.send(FrontendReq::SET_VRING_ENABLE, &pair(index, 0), &[])?;
        self.frontend.call(FrontendReq::GET_VRING_BASE, &pair(index, 0), &[])?;
        Ok(())
    }
}

fn negotiate_protocol(frontend: &mut Frontend, inflight: Choice) -> Result<Protocol, FrontendError> {
    let offered = frontend.call(FrontendReq::GET_PROTOCOL_FEATURES, &[], &[])?.u64_at(0);
    let welcome = if inflight == Choice::Off { WELCOME } else { WELCOME | Protocol::INFLIGHT_SHMFD };
    let protocol = Protocol::from_bits_truncate(offered) & welcome;
    frontend.send(FrontendReq::SET_PROTOCOL_FEATURES, &protocol.bits().to_le_bytes(), &[])?;
    frontend.set_protocol(protocol);
    Ok(protocol)
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
