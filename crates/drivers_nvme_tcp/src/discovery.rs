//! Reads the log page of a discovery service.
//!
//! Source: Base Specification 2.0, 5.16.1.23 (the page); NVMe/TCP Transport Specification 1.0, 3.1
//! (port 8009).

use super::controller::Controller;
use super::error::OpenError;
use super::identity::Identity;
use super::options::Options;
use drivers::stream::{Cancel, Deadline};
use nvme::Command;
use nvme::command::log_page;
use nvme::fabrics::Nqn;
use nvme::fabrics::discovery::{DiscoveryEntry, DiscoveryHeader, RECORD_BYTES};

/// Records read at once: 4 KiB, which every controller supports.
const AT_ONCE: u64 = 4;
/// Maximum number of records: more than any network has.
const MAX_RECORDS: u64 = 4096;
/// How often the log may change while it is read.
const ATTEMPTS: u32 = 8;

/// Queries the discovery service at the options' address. The options' subsystem is ignored.
///
/// # Errors
/// When there is no service, it violates the protocol, its log keeps changing, or `cancel` was
/// called.
pub fn discover(options: &Options, cancel: &Cancel) -> Result<Vec<DiscoveryEntry>, OpenError> {
    // A short visit: no keep-alive is needed.
    let options = Options { nqn: Nqn::discovery(), keep_alive_s: 0, ..options.clone() };
    let host = Identity::new(options)?;
    let deadline = Deadline::new(host.options.timeout_ms, cancel);
    let mut controller = Controller::reach(&host, &deadline)?;
    for _ in 0..ATTEMPTS {
        let before = header(&mut controller, &deadline)?;
        let entries = entries(&mut controller, before.records, &deadline)?;
        if header(&mut controller, &deadline)? == before {
            // Best effort: the controller ends with the connection.
            let _ = controller.shut_down(&deadline);
            return Ok(entries);
        }
    }
    Err(OpenError::Unusable("the discovery log changes faster than it can be read".into()))
}

fn header(controller: &mut Controller, deadline: &Deadline<'_>) -> Result<DiscoveryHeader, OpenError> {
    let mut bytes = [0; RECORD_BYTES];
    read(controller, 0, &mut bytes, deadline)?;
    let header = DiscoveryHeader::parse(&bytes);
    if header.record_format != 0 {
        let message = format!("its discovery log has the unknown format {}", header.record_format);
        return Err(OpenError::Unusable(message));
    }
    if header.records > MAX_RECORDS {
        let message = format!("its discovery log has {} records: at most {MAX_RECORDS}", header.records);
        return Err(OpenError::Unusable(message));
    }
    Ok(header)
}

fn entries(
    controller: &mut Controller,
    count: u64,
    deadline: &Deadline<'_>,
) -> Result<Vec<DiscoveryEntry>, OpenError> {
    let mut found = Vec::new();
    for first in (0..count).step_by(AT_ONCE as usize) {
        let mut bytes = vec![0; RECORD_BYTES * AT_ONCE.min(count - first) as usize];
        read(controller, (first + 1) * RECORD_BYTES as u64, &mut bytes, deadline)?;
        let (records, _) = bytes.as_chunks::<RECORD_BYTES>();
        for (record, bytes) in (first..).zip(records) {
            match DiscoveryEntry::parse(bytes) {
                Ok(entry) => found.push(entry),
                // Other records may still be useful.
                Err(error) => {
                    tracing::warn!(record, %error, "invalid record in the discovery log")
                }
            }
        }
    }
    Ok(found)
}

fn read(
    controller: &mut Controller,
    offset: u64,
    to: &mut [u8],
    deadline: &Deadline<'_>,
) -> Result<(), OpenError> {
    let command = Command::get_log_page_from(0, log_page::DISCOVERY, offset, to.len() as u32);
    controller.admin("to read the discovery log", &command, to, deadline).map(|_| ())
}
