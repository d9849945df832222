//! A connection with blocking commands, one at a time: the start of every connection, and the admin
//! queue.

use super::error::{OpenError, Violation};
use super::options::Options;
use ::stream::Wire;
use drivers::stream::{Deadline, Stream, StreamError};
use nvme::tcp::{
    C2hData, COMMON_BYTES, CapsuleCmd, CapsuleResp, DataDigest, Fatal, Frame, Framing, HEADER_BYTES,
    IC_BYTES, IcReq, IcResp, MAX_FRONT, MAX_PEER_FRONT, MAX_TERMINATION_BYTES, PduType, Side, TermReq,
};
use nvme::{CompletionEntry, Sgl, Status, SubmissionEntry};
use std::io;
use std::os::fd::RawFd;

/// The negotiated parameters of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Terms {
    pub(super) to_send: Framing,
    pub(super) to_receive: Framing,
    /// Maximum data bytes of one PDU to the target.
    pub(super) max_h2c_data: u32,
}

/// A connection and its queue.
pub(super) struct Link {
    stream: Stream,
    terms: Terms,
    next_id: u16,
    /// The outstanding asynchronous event request.
    event_request: Option<u16>,
    /// The event that completed it.
    event: Option<u32>,
}

impl Link {
    /// Initializes a connection over `stream`.
    pub(super) fn over(
        mut stream: Stream,
        options: &Options,
        deadline: &Deadline<'_>,
    ) -> Result<Link, OpenError> {
        let terms = agree(&mut stream, options, deadline)?;
        Ok(Link { stream, terms, next_id: 0, event_request: None, event: None })
    }

    /// Sends the command that `entry` builds for an identifier, with `data` in its capsule, and
    /// waits for its completion. Returned data is written to `to`; on success it fills all of `to`.
    pub(super) fn command(
        &mut self,
        entry: impl FnOnce(u16) -> SubmissionEntry,
        data: &[u8],
        to: &mut [u8],
        deadline: &Deadline<'_>,
    ) -> Result<CompletionEntry, OpenError> {
        match self.command_up_to(entry, data, to, deadline)? {
            (end, got) if end.status == Status::SUCCESS && got < to.len() => {
                Err(Violation::Incomplete.into())
            }
            (end, _) => Ok(end),
        }
    }

    /// As [`Link::command`], for data that may be shorter than `to`. Also returns its length.
    pub(super) fn command_up_to(
        &mut self,
        entry: impl FnOnce(u16) -> SubmissionEntry,
        data: &[u8],
        to: &mut [u8],
        deadline: &Deadline<'_>,
    ) -> Result<(CompletionEntry, usize), OpenError> {
        let id = self.send(entry, data, deadline)?;
        let mut got = 0;
        loop {
            if let Some(end) = self.receive(Some(id), to, &mut got, deadline)? {
                return Ok((end, got));
            }
        }
    }

    /// As [`Link::command`], with every other status than success as an error; `what` is the
    /// requested action, for the error message.
    pub(super) fn succeed(
        &mut self,
        what: &'static str,
        entry: impl FnOnce(u16) -> SubmissionEntry,
        to: &mut [u8],
        deadline: &Deadline<'_>,
    ) -> Result<CompletionEntry, OpenError> {
        let end = self.command(entry, &[], to, deadline)?;
        match end.status {
            Status::SUCCESS => Ok(end),
            status => Err(OpenError::Refused { command: what, status }),
        }
    }

    /// Requests the next event, unless a request is outstanding.
    pub(super) fn request_event(&mut self, deadline: &Deadline<'_>) -> Result<(), OpenError> {
        if self.event_request.is_none() {
            let command = nvme::Command::async_event_request();
            let sgl = Sgl::Transport { len: 0 };
            let id = self.send(|id| SubmissionEntry::new(&command, id, sgl), &[], deadline)?;
            self.event_request = Some(id);
        }
        Ok(())
    }

    /// Processes received PDUs while no command is pending. Called when the socket is readable.
    pub(super) fn listen(&mut self, deadline: &Deadline<'_>) -> Result<(), OpenError> {
        let mut has_pdu = self.stream.has_arrived(deadline)?;
        while has_pdu {
            self.receive(None, &mut [], &mut 0, deadline)?;
            has_pdu = self.has_unread();
        }
        Ok(())
    }

    /// Whether PDUs have arrived that the socket does not report.
    pub(super) fn has_unread(&mut self) -> bool {
        self.stream.has_unread()
    }

    /// Returns the event that arrived since the last call.
    pub(super) fn take_event(&mut self) -> Option<u32> {
        self.event.take()
    }

    pub(super) fn terms(&self) -> Terms {
        self.terms
    }

    pub(super) fn fd(&self) -> RawFd {
        self.stream.fd()
    }

    pub(super) fn into_wire(self) -> Wire {
        self.stream.into_wire()
    }

    fn send(
        &mut self,
        entry: impl FnOnce(u16) -> SubmissionEntry,
        data: &[u8],
        deadline: &Deadline<'_>,
    ) -> Result<u16, OpenError> {
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        let framing = self.terms.to_send;
        let mut message = vec![0; MAX_FRONT];
        let command = CapsuleCmd { entry: entry(id).encode(), data_len: data.len() as u32 };
        let front = command.encode(&framing, &mut message);
        message.truncate(front);
        message.extend(data);
        if framing.data_digest && !data.is_empty() {
            message.extend(digest(data));
        }
        self.stream.write(&message, deadline)?;
        Ok(id)
    }

    /// Processes one PDU: data, the completion of command `id`, or an event.
    fn receive(
        &mut self,
        id: Option<u16>,
        to: &mut [u8],
        got: &mut usize,
        deadline: &Deadline<'_>,
    ) -> Result<Option<CompletionEntry>, OpenError> {
        let mut front = [0; MAX_PEER_FRONT];
        let result = self.receive_pdu(id, to, got, &mut front, deadline);
        if let Err(OpenError::Protocol(violation)) = &result {
            // Best effort: the connection ends in any case.
            let _ = self.stream.write(&termination(violation, &front[..HEADER_BYTES]), deadline);
        }
        result
    }

    fn receive_pdu(
        &mut self,
        id: Option<u16>,
        to: &mut [u8],
        got: &mut usize,
        front: &mut [u8; MAX_PEER_FRONT],
        deadline: &Deadline<'_>,
    ) -> Result<Option<CompletionEntry>, OpenError> {
        let frame = receive_front(&mut self.stream, &self.terms.to_receive, front, deadline)?;
        let header = front.first_chunk::<HEADER_BYTES>().expect("no header is shorter");
        match frame.kind {
            PduType::C2hData => {
                let data = C2hData::parse(header, &frame).map_err(Violation::from)?;
                if Some(data.command_id) != id {
                    return Err(Violation::Command(data.command_id).into());
                }
                let outside = Violation::Outside { offset: data.offset, len: data.len };
                if data.offset as usize != *got || data.len as usize > to.len() - *got {
                    return Err(outside.into());
                }
                let target = &mut to[*got..*got + data.len as usize];
                self.stream.read(target, deadline)?;
                self.check_digest(&frame, target, deadline)?;
                *got += data.len as usize;
                let end = CompletionEntry::new(data.command_id, Status::SUCCESS);
                Ok(data.is_success.then_some(end))
            }
            PduType::CapsuleResp => {
                let end = CompletionEntry::parse(&CapsuleResp::parse(header).entry);
                if Some(end.command_id) == id {
                    return Ok(Some(end));
                }
                if self.event_request != Some(end.command_id) {
                    return Err(Violation::Command(end.command_id).into());
                }
                self.event_request = None;
                self.event = (end.status == Status::SUCCESS).then_some(end.result as u32);
                Ok(None)
            }
            PduType::C2hTermReq => Err(terminated(header).into()),
            other => Err(Violation::Unexpected(other).into()),
        }
    }

    fn check_digest(&mut self, frame: &Frame, data: &[u8], deadline: &Deadline<'_>) -> Result<(), OpenError> {
        if !frame.has_data_digest {
            return Ok(());
        }
        let mut found = [0; 4];
        self.stream.read(&mut found, deadline)?;
        if found == digest(data) { Ok(()) } else { Err(Violation::Digest.into()) }
    }
}

/// Decodes a termination request.
pub(super) fn terminated(header: &[u8; HEADER_BYTES]) -> Violation {
    let request = TermReq::parse(header);
    let status = request.status.map_or_else(|number| number, |status| status as u16);
    Violation::Terminated { status, info: request.info }
}

/// The termination request for a violation; empty if the target needs none.
pub(super) fn termination(violation: &Violation, header: &[u8]) -> Vec<u8> {
    let fatal = match violation {
        Violation::Header(fatal) => *fatal,
        Violation::Unexpected(_) | Violation::Command(_) | Violation::Incomplete => {
            Fatal::new(nvme::tcp::FatalStatus::Sequence)
        }
        Violation::Outside { .. } => Fatal::new(nvme::tcp::FatalStatus::DataOutOfRange),
        Violation::Limit => Fatal::new(nvme::tcp::FatalStatus::LimitExceeded),
        Violation::Digest | Violation::Terminated { .. } | Violation::Closed => {
            return Vec::new();
        }
    };
    let mut message = [0; MAX_TERMINATION_BYTES];
    let len = TermReq::encode(fatal, Side::Host, header, &mut message);
    message[..len].to_vec()
}

fn digest(data: &[u8]) -> [u8; 4] {
    let mut digest = DataDigest::new();
    digest.update(data);
    digest.to_bytes()
}

/// Reads everything before the data of the next PDU.
fn receive_front(
    stream: &mut Stream,
    framing: &Framing,
    front: &mut [u8; MAX_PEER_FRONT],
    deadline: &Deadline<'_>,
) -> Result<Frame, OpenError> {
    stream.read(&mut front[..COMMON_BYTES], deadline)?;
    let common = front.first_chunk().expect("there are more bytes than these");
    let frame = framing.accept(common, Side::Controller).map_err(Violation::from)?;
    stream.read(&mut front[COMMON_BYTES..frame.front_bytes()], deadline)?;
    frame.check_header_digest(front.as_slice()).map_err(Violation::from)?;
    Ok(frame)
}

/// Initializes the connection.
fn agree(stream: &mut Stream, options: &Options, deadline: &Deadline<'_>) -> Result<Terms, OpenError> {
    let wanted = IcReq {
        align_bytes: 4,
        header_digest: options.header_digest,
        data_digest: options.data_digest,
        max_r2t: 1,
    };
    stream.write(&wanted.encode(), deadline)?;
    let mut front = [0; MAX_PEER_FRONT];
    let frame = receive_front(stream, &Framing::default(), &mut front, deadline)?;
    match frame.kind {
        PduType::IcResp => {}
        PduType::C2hTermReq => {
            return Err(terminated(front.first_chunk().expect("no header is shorter")).into());
        }
        other => return Err(Violation::Unexpected(other).into()),
    }
    let header = front.first_chunk::<IC_BYTES>().expect("no header is longer");
    let granted = IcResp::parse(header).map_err(Violation::from)?;
    for (is_wanted, is_granted, what) in [
        (wanted.header_digest, granted.header_digest, "header digests"),
        (wanted.data_digest, granted.data_digest, "data digests"),
    ] {
        if is_wanted && !is_granted {
            return Err(OpenError::NotGranted(what));
        }
    }
    // Digests are used only when both sides enable them.
    let (header_digest, data_digest) = (wanted.header_digest, wanted.data_digest);
    Ok(Terms {
        to_send: Framing { header_digest, data_digest, align_bytes: granted.align_bytes },
        to_receive: Framing { header_digest, data_digest, align_bytes: wanted.align_bytes },
        max_h2c_data: granted.max_h2c_data,
    })
}

impl From<io::Error> for OpenError {
    fn from(error: io::Error) -> OpenError {
        OpenError::Stream(StreamError::Io(error))
    }
}
