//! Log pages (Base 5.16): their content, and the part that a host requests.

use crate::controller::Controller;
use crate::discovery::{self, Catalog, Visitor};
use crate::transport::Transport;
use nvme::command::{admin, log_page, opcode};
use nvme::fabrics;
use nvme::identify::lists::encode_namespaces;
use nvme::{HealthLog, Status, SubmissionEntry, lba_status};

/// Longest part of a page that one command can read.
const MAX_BYTES: u64 = crate::MAX_TRANSFER as u64;
/// Retain asynchronous event: the read does not clear the event.
const RETAIN: u32 = 1 << 15;
/// RGO of the access state page: omit the namespaces of each group.
const ONLY_GROUPS: u32 = 1 << 8;
/// CSUPP: the command is supported. LBCC: it modifies blocks.
const SUPPORTED: u32 = 1;
const CHANGES_DATA: u32 = 1 << 1;

/// Returns the requested part of a page.
///
/// # Errors
/// When the page does not exist, or the requested part is invalid.
pub(crate) fn read<T: Transport>(
    controller: &Controller,
    cdw: &[u32; 6],
    entry: &SubmissionEntry,
    transport: &T,
) -> Result<Vec<u8>, Status> {
    let dwords = u64::from(cdw[0] >> 16) | u64::from(cdw[1] & 0xffff) << 16;
    let (len, start) = ((dwords + 1) * 4, u64::from(cdw[2]) | u64::from(cdw[3]) << 32);
    if len > MAX_BYTES || !start.is_multiple_of(4) {
        return Err(Status::INVALID_FIELD);
    }
    let is_read = cdw[0] & RETAIN == 0;
    if let Some(catalog) = &controller.subsystem.catalog {
        return match cdw[0] as u8 {
            log_page::DISCOVERY => {
                // First: a change during the read is another event.
                if is_read {
                    controller.forget_listing();
                }
                discovery_log(controller, &**catalog, transport, start, len as usize)
            }
            _ => Err(Status::INVALID_LOG_PAGE),
        };
    }
    let page = match cdw[0] as u8 {
        // Failed commands are not recorded.
        log_page::ERROR_INFORMATION => vec![0; 64],
        log_page::SMART => smart(),
        log_page::FIRMWARE_SLOT => firmware(),
        log_page::CHANGED_NAMESPACES => encode_namespaces(controller.changed(is_read), 0).to_vec(),
        log_page::ASYMMETRIC_ACCESS => {
            if is_read {
                controller.forget_access();
            }
            controller.port.log_page(controller.subsystem.namespaces.len() as u32, cdw[0] & ONLY_GROUPS != 0)
        }
        log_page::LBA_STATUS_INFORMATION => lba_status::empty_log().to_vec(),
        log_page::RESERVATION_NOTIFICATION => controller.notification(is_read).to_vec(),
        log_page::COMMAND_EFFECTS if (entry.cdw[4] >> 24) as u8 == 0 => {
            effects(controller.subsystem.has_reservations())
        }
        _ => return Err(Status::INVALID_LOG_PAGE),
    };
    if start > page.len() as u64 {
        return Err(Status::INVALID_FIELD);
    }
    let mut part = page[start as usize..].to_vec();
    part.resize(len as usize, 0);
    Ok(part)
}

/// Healthy, with full spare capacity: the export does not know the media below the device.
fn smart() -> Vec<u8> {
    HealthLog { spare_percent: 100, spare_threshold_percent: 10, ..HealthLog::default() }.encode().to_vec()
}

fn firmware() -> Vec<u8> {
    let mut page = vec![0; 512];
    page[0] = 1; // the active slot
    page[8..16].fill(b' ');
    let revision = env!("CARGO_PKG_VERSION").as_bytes();
    let len = revision.len().min(8);
    page[8..8 + len].copy_from_slice(&revision[..len]);
    page
}

/// Commands Supported and Effects: 256 dwords for admin commands, then as many for I/O commands.
fn effects(has_reservations: bool) -> Vec<u8> {
    const ADMIN: [u8; 9] = [
        admin::GET_LOG_PAGE,
        admin::IDENTIFY,
        admin::ABORT,
        admin::SET_FEATURES,
        admin::GET_FEATURES,
        admin::ASYNC_EVENT_REQUEST,
        admin::KEEP_ALIVE,
        admin::GET_LBA_STATUS,
        fabrics::OPCODE,
    ];
    const READING: [u8; 4] = [opcode::FLUSH, opcode::READ, opcode::COMPARE, opcode::VERIFY];
    const RESERVING: [u8; 4] = [
        opcode::RESERVATION_REGISTER,
        opcode::RESERVATION_REPORT,
        opcode::RESERVATION_ACQUIRE,
        opcode::RESERVATION_RELEASE,
    ];
    const CHANGING: [u8; 4] = [opcode::WRITE, opcode::WRITE_ZEROES, opcode::DATASET_MANAGEMENT, opcode::COPY];
    let mut page = vec![0; 4096];
    let mut put = |place: usize, opcode: u8, effect: u32| {
        let at = place + 4 * usize::from(opcode);
        page[at..at + 4].copy_from_slice(&effect.to_le_bytes());
    };
    ADMIN.iter().for_each(|opcode| put(0, *opcode, SUPPORTED));
    READING.iter().for_each(|opcode| put(1024, *opcode, SUPPORTED));
    RESERVING.iter().filter(|_| has_reservations).for_each(|opcode| put(1024, *opcode, SUPPORTED));
    CHANGING.iter().for_each(|opcode| put(1024, *opcode, SUPPORTED | CHANGES_DATA));
    page
}

/// A part of the discovery log, for the host of a discovery controller.
fn discovery_log<T: Transport>(
    controller: &Controller,
    catalog: &dyn Catalog,
    transport: &T,
    start: u64,
    len: usize,
) -> Result<Vec<u8>, Status> {
    let visitor = Visitor {
        host: &controller.host.nqn,
        is_secured: transport.is_secured(),
        port: controller.port.id,
        transport: controller.port.transport,
        address: transport.local_address(),
    };
    discovery::read(catalog, &visitor, start, len)
}
