//! PDUs of NVMe/TCP, both sides.
//!
//! ```text
//!   ┌ common header ┬ rest of header ┬ HDGST? ┬ padding ┬ data ┬ DDGST? ┐
//!   0               8              hlen               pdo            plen
//! ```
//!
//! [`Framing`] holds the options of one direction of a connection. [`Framing::accept`] checks the
//! first eight bytes of a PDU and returns the places of its parts ([`Frame`]). After that, each PDU
//! type parses its header, once complete. To send, a type's `encode` writes all bytes before the
//! data. This module does not allocate.
//!
//! Source: NVM Express TCP Transport Specification 1.0, section 3 ("TCP").

use crate::wire::{array_at, put, u16_at, u32_at};

/// Bytes of the common header.
pub const COMMON_BYTES: usize = 8;
/// Bytes of the headers of ICReq and ICResp.
pub const IC_BYTES: usize = 128;
/// Bytes of a command capsule's header.
pub const COMMAND_BYTES: usize = 72;
/// Bytes of every other header.
pub const HEADER_BYTES: usize = 24;
/// Bytes of a digest.
pub const DIGEST_BYTES: usize = 4;
/// Limit of bytes before the data that an `encode` writes: a command's header and its digest with
/// an alignment of 72. A peer may send up to [`MAX_PEER_FRONT`].
pub const MAX_FRONT: usize = 144;
/// Limit of bytes before the data: PDO is a field of eight bits.
pub const MAX_PEER_FRONT: usize = 255;
/// Limit of bytes of a rejected header that a termination request carries.
pub const MAX_TERMINATION_DATA: usize = 128;
/// Smallest MAXH2CDATA in bytes.
pub const MIN_MAX_H2C_DATA: u32 = 4096;
/// The port of subsystems, and that of discovery controllers.
pub const DEFAULT_PORT: u16 = 4420;
/// See [`DEFAULT_PORT`].
pub const DISCOVERY_PORT: u16 = 8009;

/// Common header flag: a header digest follows the header.
pub const FLAG_HEADER_DIGEST: u8 = 1;
/// Common header flag: a data digest follows the data.
pub const FLAG_DATA_DIGEST: u8 = 1 << 1;
/// Data PDUs: no more follow for this command (C2HData) or this R2T (H2CData).
pub const FLAG_LAST_PDU: u8 = 1 << 2;
/// C2HData: the command succeeded, and no response capsule follows.
pub const FLAG_SUCCESS: u8 = 1 << 3;

/// ICReq, ICResp: header digests (wanted, granted).
const DIGEST_HEADER: u8 = 1;
/// ICReq, ICResp: data digests (wanted, granted).
const DIGEST_DATA: u8 = 1 << 1;
/// Largest HPDA or CPDA: 32 dwords.
const MAX_ALIGN: u8 = 31;

/// The sender of a PDU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The initiator.
    Host,
    /// The target.
    Controller,
}

/// The type of a PDU (TCP 3.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PduType {
    /// The host initializes the connection.
    IcReq = 0x00,
    /// The controller accepts the connection.
    IcResp = 0x01,
    /// The host ends the connection because of an error.
    H2cTermReq = 0x02,
    /// The controller ends the connection because of an error.
    C2hTermReq = 0x03,
    /// A command, optionally with data.
    CapsuleCmd = 0x04,
    /// A completion.
    CapsuleResp = 0x05,
    /// Data to the controller.
    H2cData = 0x06,
    /// Data to the host.
    C2hData = 0x07,
    /// The controller is ready for data.
    R2t = 0x09,
}

impl PduType {
    const fn of(byte: u8) -> Option<PduType> {
        Some(match byte {
            0x00 => PduType::IcReq,
            0x01 => PduType::IcResp,
            0x02 => PduType::H2cTermReq,
            0x03 => PduType::C2hTermReq,
            0x04 => PduType::CapsuleCmd,
            0x05 => PduType::CapsuleResp,
            0x06 => PduType::H2cData,
            0x07 => PduType::C2hData,
            0x09 => PduType::R2t,
            _ => return None,
        })
    }

    /// The side that sends it.
    pub const fn sender(self) -> Side {
        match self {
            PduType::IcReq | PduType::H2cTermReq | PduType::CapsuleCmd | PduType::H2cData => Side::Host,
            PduType::IcResp
            | PduType::C2hTermReq
            | PduType::CapsuleResp
            | PduType::C2hData
            | PduType::R2t => Side::Controller,
        }
    }

    /// Bytes of its header without a digest: HLEN.
    pub const fn header_bytes(self) -> usize {
        match self {
            PduType::IcReq | PduType::IcResp => IC_BYTES,
            PduType::CapsuleCmd => COMMAND_BYTES,
            _ => HEADER_BYTES,
        }
    }

    /// Whether it has the negotiated digests.
    const fn has_digests(self) -> bool {
        !matches!(self, PduType::IcReq | PduType::IcResp | PduType::H2cTermReq | PduType::C2hTermReq)
    }

    const fn has_data(self) -> bool {
        matches!(self, PduType::CapsuleCmd | PduType::H2cData | PduType::C2hData)
    }
}

/// Fatal error status (TCP 3.6.2.3), the reason for the end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum FatalStatus {
    /// A header field is invalid; FEI is its offset.
    InvalidHeader = 1,
    /// A PDU is not allowed in this state.
    Sequence = 2,
    /// The header digest does not match; FEI is the received one.
    HeaderDigest = 3,
    /// Data lies outside of the requested range.
    DataOutOfRange = 4,
    /// More R2Ts (to a controller), or more data (to a host), than negotiated.
    LimitExceeded = 5,
    /// A parameter is not supported; FEI is its offset.
    UnsupportedParameter = 6,
}

impl FatalStatus {
    const fn of(number: u16) -> Option<FatalStatus> {
        Some(match number {
            1 => FatalStatus::InvalidHeader,
            2 => FatalStatus::Sequence,
            3 => FatalStatus::HeaderDigest,
            4 => FatalStatus::DataOutOfRange,
            5 => FatalStatus::LimitExceeded,
            6 => FatalStatus::UnsupportedParameter,
            _ => return None,
        })
    }
}

impl std::fmt::Display for FatalStatus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            FatalStatus::InvalidHeader => "invalid PDU header field",
            FatalStatus::Sequence => "PDU sequence error",
            FatalStatus::HeaderDigest => "header digest error",
            FatalStatus::DataOutOfRange => "data transfer out of range",
            FatalStatus::LimitExceeded => "transfer limit exceeded",
            FatalStatus::UnsupportedParameter => "unsupported parameter",
        })
    }
}

/// A protocol error of the peer, as a termination request reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{status}: {info:#x}")]
pub struct Fatal {
    /// FES.
    pub status: FatalStatus,
    /// FEI.
    pub info: u32,
}

impl Fatal {
    /// An error with a FEI of 0.
    pub const fn new(status: FatalStatus) -> Fatal {
        Fatal { status, info: 0 }
    }

    /// The error of an invalid field at `offset` of the header.
    pub const fn field(offset: u32) -> Fatal {
        Fatal { status: FatalStatus::InvalidHeader, info: offset }
    }
}

/// The negotiated options of one direction of a connection. The default, which applies before
/// negotiation, has no digests and no alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Framing {
    /// Headers are followed by their digest.
    pub header_digest: bool,
    /// Data is followed by its digest.
    pub data_digest: bool,
    /// Data starts at a multiple of this many bytes of its PDU: a multiple of 4, at most 128.
    pub align_bytes: u8,
}

impl Default for Framing {
    fn default() -> Framing {
        Framing { header_digest: false, data_digest: false, align_bytes: 4 }
    }
}

/// The places of a PDU's parts; offsets count from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Its type.
    pub kind: PduType,
    /// Its flags.
    pub flags: u8,
    /// Bytes of its header, without a digest.
    pub header_bytes: usize,
    /// A header digest follows the header.
    pub has_header_digest: bool,
    /// Start of the data; [`Frame::len`] without data.
    pub data_offset: usize,
    /// Bytes of data; 0 without data.
    pub data_len: u32,
    /// A data digest follows the data.
    pub has_data_digest: bool,
    /// Bytes of the whole PDU.
    pub len: u32,
}

impl Frame {
    /// Bytes of header, digest and padding: all before the data.
    pub const fn front_bytes(&self) -> usize {
        self.data_offset
    }

    /// Whether this data PDU is the last of its command or R2T.
    pub const fn is_last(&self) -> bool {
        self.flags & FLAG_LAST_PDU != 0
    }

    /// Whether this C2HData also reports the command's success.
    pub const fn is_success(&self) -> bool {
        self.flags & FLAG_SUCCESS != 0
    }

    /// Compares the header with the digest that follows it. `front` is the PDU from its start on,
    /// at least header and digest.
    ///
    /// # Errors
    /// If they do not match.
    pub fn check_header_digest(&self, front: &[u8]) -> Result<(), Fatal> {
        if !self.has_header_digest {
            return Ok(());
        }
        let found = u32_at(front, self.header_bytes);
        if found == header_digest(&front[..self.header_bytes]) {
            return Ok(());
        }
        Err(Fatal { status: FatalStatus::HeaderDigest, info: found })
    }
}

impl Framing {
    /// Checks the common header of a PDU that `from` sent. Only this function checks lengths: all
    /// offsets of the returned [`Frame`] lie in the PDU.
    ///
    /// # Errors
    /// The protocol error to report to `from` before the connection ends.
    pub fn accept(&self, common: &[u8; COMMON_BYTES], from: Side) -> Result<Frame, Fatal> {
        let (flags, hlen, pdo, len) =
            (common[1], usize::from(common[2]), usize::from(common[3]), u32_at(common, 4));
        let kind = PduType::of(common[0]).filter(|kind| kind.sender() == from).ok_or(Fatal::field(0))?;
        let header_bytes = kind.header_bytes();
        if hlen != header_bytes {
            return Err(Fatal::field(2));
        }
        let has_header_digest = self.header_digest && kind.has_digests();
        if kind.has_digests() && has_header_digest != (flags & FLAG_HEADER_DIGEST != 0) {
            return Err(Fatal::field(1));
        }
        let least = header_bytes + if has_header_digest { DIGEST_BYTES } else { 0 };
        let frame = Frame {
            kind,
            flags,
            header_bytes,
            has_header_digest,
            data_offset: least,
            data_len: 0,
            has_data_digest: false,
            len,
        };
        match len.checked_sub(least as u32).ok_or(Fatal::field(4))? {
            0 => Ok(frame),
            rest if matches!(kind, PduType::H2cTermReq | PduType::C2hTermReq) => {
                let data_len = Some(rest).filter(|rest| *rest <= MAX_TERMINATION_DATA as u32);
                Ok(Frame { data_len: data_len.ok_or(Fatal::field(4))?, ..frame })
            }
            _ if kind.has_data() => self.accept_data(frame, pdo, least),
            _ => Err(Fatal::field(4)),
        }
    }

    /// The rest of [`Framing::accept`] for a PDU with data, which may not start before byte
    /// `least`.
    fn accept_data(&self, frame: Frame, pdo: usize, least: usize) -> Result<Frame, Fatal> {
        if pdo < least || !pdo.is_multiple_of(usize::from(self.align_bytes.max(1))) {
            return Err(Fatal::field(3));
        }
        if self.data_digest != (frame.flags & FLAG_DATA_DIGEST != 0) {
            return Err(Fatal::field(1));
        }
        let tail = if self.data_digest { DIGEST_BYTES } else { 0 };
        let data_len = frame.len.checked_sub((pdo + tail) as u32).filter(|len| *len > 0);
        let data_len = data_len.ok_or(Fatal::field(4))?;
        Ok(Frame { data_offset: pdo, data_len, has_data_digest: self.data_digest, ..frame })
    }

    /// Bytes before the data of a PDU of `kind`, with or without data; its `encode` writes as many.
    pub fn front_bytes(&self, kind: PduType, has_data: bool) -> usize {
        let digest = if self.header_digest && kind.has_digests() { DIGEST_BYTES } else { 0 };
        let least = kind.header_bytes() + digest;
        if has_data { least.next_multiple_of(self.align_bytes.max(1).into()) } else { least }
    }

    /// Writes the common header of a PDU with `data_len` bytes of data to the front of `to`, and
    /// zeroes up to the data. Returns the start of the data. [`Framing::seal`] completes the
    /// header.
    fn open(&self, kind: PduType, flags: u8, data_len: u32, to: &mut [u8]) -> usize {
        let front = self.front_bytes(kind, data_len > 0);
        let header_digest = self.header_digest && kind.has_digests();
        let data_digest = self.data_digest && kind.has_digests() && data_len > 0;
        let tail = if data_digest { DIGEST_BYTES as u32 } else { 0 };
        to[..front].fill(0);
        to[0] = kind as u8;
        to[1] = flags
            | if header_digest { FLAG_HEADER_DIGEST } else { 0 }
            | if data_digest { FLAG_DATA_DIGEST } else { 0 };
        to[2] = kind.header_bytes() as u8;
        to[3] = if kind.has_data() && data_len > 0 { front as u8 } else { 0 };
        put(to, 4, (front as u32 + data_len + tail).to_le_bytes());
        front
    }

    /// Writes the digest after a complete header.
    fn seal(&self, kind: PduType, to: &mut [u8]) {
        if self.header_digest && kind.has_digests() {
            let header = kind.header_bytes();
            let digest = header_digest(&to[..header]);
            put(to, header, digest.to_le_bytes());
        }
    }
}

/// The digest of a header, sent in little-endian order.
pub fn header_digest(header: &[u8]) -> u32 {
    crc32c::crc32c(header)
}

/// The digest of data in several parts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DataDigest(u32);

impl DataDigest {
    /// The digest of no data.
    pub const fn new() -> DataDigest {
        DataDigest(0)
    }

    /// Adds the next part.
    pub fn update(&mut self, piece: &[u8]) {
        self.0 = crc32c::crc32c_append(self.0, piece);
    }

    /// The digest of all parts, in wire order.
    pub const fn to_bytes(self) -> [u8; DIGEST_BYTES] {
        self.0.to_le_bytes()
    }
}

/// Initialize Connection Request (TCP 3.6.2.1): the options that the host requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcReq {
    /// Data to the host starts at multiples of this many bytes of its PDU: 4 to 128, a multiple of
    /// 4.
    pub align_bytes: u8,
    /// The host requests header digests.
    pub header_digest: bool,
    /// The host requests data digests.
    pub data_digest: bool,
    /// Limit of R2Ts in flight for one command; at least 1.
    pub max_r2t: u32,
}

impl IcReq {
    /// Reads the PDU.
    ///
    /// # Errors
    /// The protocol error of a host with another version or invalid fields.
    pub fn parse(header: &[u8; IC_BYTES]) -> Result<IcReq, Fatal> {
        let (align_bytes, digests) = parse_ic(header)?;
        Ok(IcReq {
            align_bytes,
            header_digest: digests & DIGEST_HEADER != 0,
            data_digest: digests & DIGEST_DATA != 0,
            max_r2t: u32_at(header, 12).saturating_add(1),
        })
    }

    /// Writes the PDU.
    pub fn encode(&self) -> [u8; IC_BYTES] {
        let digests = digests(self.header_digest, self.data_digest);
        encode_ic(PduType::IcReq, self.align_bytes, digests, self.max_r2t.max(1) - 1)
    }
}

/// Initialize Connection Response (TCP 3.6.2.2): the options that the controller grants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcResp {
    /// Data to the controller starts at multiples of this many bytes of its PDU: 4 to 128, a
    /// multiple of 4.
    pub align_bytes: u8,
    /// Headers have digests.
    pub header_digest: bool,
    /// Data has digests.
    pub data_digest: bool,
    /// Limit of bytes of data in one H2CData: at least [`MIN_MAX_H2C_DATA`], a multiple of 4.
    pub max_h2c_data: u32,
}

impl IcResp {
    /// Reads the PDU.
    ///
    /// # Errors
    /// The protocol error of a controller with another version or invalid fields.
    pub fn parse(header: &[u8; IC_BYTES]) -> Result<IcResp, Fatal> {
        let (align_bytes, digests) = parse_ic(header)?;
        let max_h2c_data = u32_at(header, 12);
        if max_h2c_data < MIN_MAX_H2C_DATA || !max_h2c_data.is_multiple_of(4) {
            return Err(Fatal::field(12));
        }
        let (header_digest, data_digest) = (digests & DIGEST_HEADER != 0, digests & DIGEST_DATA != 0);
        Ok(IcResp { align_bytes, header_digest, data_digest, max_h2c_data })
    }

    /// Writes the PDU.
    pub fn encode(&self) -> [u8; IC_BYTES] {
        let digests = digests(self.header_digest, self.data_digest);
        encode_ic(PduType::IcResp, self.align_bytes, digests, self.max_h2c_data)
    }
}

const fn digests(header: bool, data: bool) -> u8 {
    (if header { DIGEST_HEADER } else { 0 }) | (if data { DIGEST_DATA } else { 0 })
}

/// Alignment in bytes, and digests.
fn parse_ic(header: &[u8; IC_BYTES]) -> Result<(u8, u8), Fatal> {
    if u16_at(header, 8) != 0 {
        return Err(Fatal { status: FatalStatus::UnsupportedParameter, info: 8 });
    }
    if header[10] > MAX_ALIGN {
        return Err(Fatal::field(10));
    }
    Ok((4 * (header[10] + 1), header[11]))
}

fn encode_ic(kind: PduType, align_bytes: u8, digests: u8, last: u32) -> [u8; IC_BYTES] {
    let mut header = [0; IC_BYTES];
    Framing::default().open(kind, 0, 0, &mut header);
    header[10] = (align_bytes / 4).saturating_sub(1).min(MAX_ALIGN);
    header[11] = digests;
    put(&mut header, 12, last.to_le_bytes());
    header
}

/// H2CTermReq and C2HTermReq (TCP 3.6.2.3, 3.6.2.4): one side ends the connection because of a
/// protocol error. The rejected header follows as data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TermReq {
    /// The reason, or the number of an unknown reason.
    pub status: Result<FatalStatus, u16>,
    /// FEI: offset in the header, or the received digest.
    pub info: u32,
}

/// Limit of bytes of a whole termination request.
pub const MAX_TERMINATION_BYTES: usize = HEADER_BYTES + MAX_TERMINATION_DATA;

impl TermReq {
    /// Reads the header.
    pub fn parse(header: &[u8; HEADER_BYTES]) -> TermReq {
        let number = u16_at(header, 8);
        TermReq { status: FatalStatus::of(number).ok_or(number), info: u32_at(header, 10) }
    }

    /// Writes the whole PDU, which `from` sends because of a PDU that starts with `rejected` (cut
    /// off after [`MAX_TERMINATION_DATA`] bytes); returns its length.
    pub fn encode(fatal: Fatal, from: Side, rejected: &[u8], to: &mut [u8; MAX_TERMINATION_BYTES]) -> usize {
        let kind = match from {
            Side::Host => PduType::H2cTermReq,
            Side::Controller => PduType::C2hTermReq,
        };
        let rejected = &rejected[..rejected.len().min(MAX_TERMINATION_DATA)];
        let front = Framing::default().open(kind, 0, rejected.len() as u32, to);
        put(to, 8, (fatal.status as u16).to_le_bytes());
        put(to, 10, fatal.info.to_le_bytes());
        to[front..front + rejected.len()].copy_from_slice(rejected);
        front + rejected.len()
    }
}

impl std::fmt::Display for TermReq {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.status {
            Ok(status) => write!(f, "{status}: {:#x}", self.info),
            Err(number) => write!(f, "fatal error status {number:#x}: {:#x}", self.info),
        }
    }
}

/// A command capsule (TCP 3.6.2.5): a submission queue entry, optionally followed by data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CapsuleCmd {
    /// The submission queue entry.
    pub entry: [u8; 64],
    /// Bytes of data in the capsule.
    pub data_len: u32,
}

impl CapsuleCmd {
    /// Reads the header of the PDU with this frame.
    pub fn parse(header: &[u8; COMMAND_BYTES], frame: &Frame) -> CapsuleCmd {
        CapsuleCmd { entry: array_at(header, 8), data_len: frame.data_len }
    }

    /// Writes everything before the data to the front of `to` and returns its length, at most
    /// [`MAX_FRONT`].
    ///
    /// # Panics
    /// When `to` is shorter.
    pub fn encode(&self, framing: &Framing, to: &mut [u8]) -> usize {
        let front = framing.open(PduType::CapsuleCmd, 0, self.data_len, to);
        put(to, 8, self.entry);
        framing.seal(PduType::CapsuleCmd, to);
        front
    }
}

/// A response capsule (TCP 3.6.2.6): a completion queue entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CapsuleResp {
    /// The completion queue entry.
    pub entry: [u8; 16],
}

impl CapsuleResp {
    /// Reads the header.
    pub fn parse(header: &[u8; HEADER_BYTES]) -> CapsuleResp {
        CapsuleResp { entry: array_at(header, 8) }
    }

    /// Writes the PDU to the front of `to` and returns its length.
    ///
    /// # Panics
    /// When `to` is shorter.
    pub fn encode(&self, framing: &Framing, to: &mut [u8]) -> usize {
        let front = framing.open(PduType::CapsuleResp, 0, 0, to);
        put(to, 8, self.entry);
        framing.seal(PduType::CapsuleResp, to);
        front
    }
}

/// Data to the controller (TCP 3.6.2.7), requested by an R2T.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct H2cData {
    /// Identifier of the command.
    pub command_id: u16,
    /// Tag of the R2T.
    pub tag: u16,
    /// Offset in the command's data, in bytes; a multiple of 4.
    pub offset: u32,
    /// Length in bytes.
    pub len: u32,
    /// The last PDU for this R2T.
    pub is_last: bool,
}

impl H2cData {
    /// Reads the header of the PDU with this frame.
    ///
    /// # Errors
    /// If the PDU has no data, or the length field does not match it.
    pub fn parse(header: &[u8; HEADER_BYTES], frame: &Frame) -> Result<H2cData, Fatal> {
        let (offset, len) = data_place(header, frame)?;
        Ok(H2cData {
            command_id: u16_at(header, 8),
            tag: u16_at(header, 10),
            offset,
            len,
            is_last: frame.is_last(),
        })
    }

    /// Writes everything before the data to the front of `to` and returns its length, at most
    /// [`MAX_FRONT`].
    ///
    /// # Panics
    /// When `to` is shorter.
    pub fn encode(&self, framing: &Framing, to: &mut [u8]) -> usize {
        let flags = if self.is_last { FLAG_LAST_PDU } else { 0 };
        let front = framing.open(PduType::H2cData, flags, self.len, to);
        put(to, 8, self.command_id.to_le_bytes());
        put(to, 10, self.tag.to_le_bytes());
        put(to, 12, self.offset.to_le_bytes());
        put(to, 16, self.len.to_le_bytes());
        framing.seal(PduType::H2cData, to);
        front
    }
}

/// Data to the host (TCP 3.6.2.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct C2hData {
    /// Identifier of the command.
    pub command_id: u16,
    /// Offset in the command's data, in bytes; a multiple of 4.
    pub offset: u32,
    /// Length in bytes.
    pub len: u32,
    /// The last PDU for this command.
    pub is_last: bool,
    /// The command succeeded, and no response capsule follows. Only with `is_last`.
    pub is_success: bool,
}

impl C2hData {
    /// Reads the header of the PDU with this frame.
    ///
    /// # Errors
    /// If the PDU has no data, the length field does not match it, or it reports success and is not
    /// the last.
    pub fn parse(header: &[u8; HEADER_BYTES], frame: &Frame) -> Result<C2hData, Fatal> {
        let (offset, len) = data_place(header, frame)?;
        let (is_last, is_success) = (frame.is_last(), frame.is_success());
        if is_success && !is_last {
            return Err(Fatal::field(1));
        }
        Ok(C2hData { command_id: u16_at(header, 8), offset, len, is_last, is_success })
    }

    /// Writes everything before the data to the front of `to` and returns its length, at most
    /// [`MAX_FRONT`].
    ///
    /// # Panics
    /// When `to` is shorter.
    pub fn encode(&self, framing: &Framing, to: &mut [u8]) -> usize {
        let flags =
            (if self.is_last { FLAG_LAST_PDU } else { 0 }) | (if self.is_success { FLAG_SUCCESS } else { 0 });
        let front = framing.open(PduType::C2hData, flags, self.len, to);
        put(to, 8, self.command_id.to_le_bytes());
        put(to, 12, self.offset.to_le_bytes());
        put(to, 16, self.len.to_le_bytes());
        framing.seal(PduType::C2hData, to);
        front
    }
}

/// Offset and length of a data PDU's data within the command's data.
fn data_place(header: &[u8; HEADER_BYTES], frame: &Frame) -> Result<(u32, u32), Fatal> {
    let (offset, len) = (u32_at(header, 12), u32_at(header, 16));
    if len == 0 || len != frame.data_len {
        return Err(Fatal::field(16));
    }
    if offset.checked_add(len).is_none() {
        return Err(Fatal::new(FatalStatus::DataOutOfRange));
    }
    Ok((offset, len))
}

/// Ready to Transfer (TCP 3.6.2.9): the controller requests a part of a command's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct R2t {
    /// Identifier of the command.
    pub command_id: u16,
    /// Tag that the data must carry.
    pub tag: u16,
    /// Offset in the command's data, in bytes.
    pub offset: u32,
    /// Length in bytes.
    pub len: u32,
}

impl R2t {
    /// Reads the header.
    ///
    /// # Errors
    /// If the length is 0, or the end exceeds 32 bits.
    pub fn parse(header: &[u8; HEADER_BYTES]) -> Result<R2t, Fatal> {
        let (offset, len) = (u32_at(header, 12), u32_at(header, 16));
        if len == 0 {
            return Err(Fatal::field(16));
        }
        if offset.checked_add(len).is_none() {
            return Err(Fatal::new(FatalStatus::DataOutOfRange));
        }
        Ok(R2t { command_id: u16_at(header, 8), tag: u16_at(header, 10), offset, len })
    }

    /// Writes the PDU to the front of `to` and returns its length.
    ///
    /// # Panics
    /// When `to` is shorter.
    pub fn encode(&self, framing: &Framing, to: &mut [u8]) -> usize {
        let front = framing.open(PduType::R2t, 0, 0, to);
        put(to, 8, self.command_id.to_le_bytes());
        put(to, 10, self.tag.to_le_bytes());
        put(to, 12, self.offset.to_le_bytes());
        put(to, 16, self.len.to_le_bytes());
        framing.seal(PduType::R2t, to);
        front
    }
}

#[cfg(test)]
mod tests;
