//! Drives the handshake of `nbd::client` over a stream, whose every step has a deadline.

use super::error::OpenError;
use super::options::Options;
use drivers::stream::{StreamError, Timed};
use nbd::client::{Agreed, Handshake, Step};
use std::io;

/// Negotiates with the server as the options demand. Requests can follow on the stream.
///
/// # Errors
/// When the server refuses, violates the protocol, or does not answer in time.
pub(super) fn negotiate(stream: &mut Timed<'_, '_>, options: &Options) -> Result<Agreed, OpenError> {
    let mut session = options.session()?;
    let mut handshake = Handshake::new(&options.export, options.replies, session.is_some());
    let (mut received, mut to_send) = (Vec::new(), Vec::new());
    loop {
        let step = handshake.advance(&received, &mut to_send)?;
        stream.write(&to_send)?;
        to_send.clear();
        received.clear();
        match step {
            Step::Read(len) => {
                received.resize(len, 0);
                stream.read(&mut received).map_err(|error| match error {
                    StreamError::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                        handshake.end().map_or(StreamError::Io(error).into(), OpenError::Handshake)
                    }
                    error => error.into(),
                })?;
            }
            // Everything received in the clear becomes void, except for the greeting.
            Step::StartTls => stream.secure(session.take().expect("asked for because of it, and once"))?,
            Step::Agree(agreed) => return Ok(agreed),
        }
    }
}
