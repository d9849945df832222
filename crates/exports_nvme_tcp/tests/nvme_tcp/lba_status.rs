//! Get LBA Status, with its log page and its feature.

use crate::host::Host;
use crate::server::{MIB, SUBSYSTEM, Server, export};
use block::{IoError, Status as BlockStatus};
use drivers::io_uring::{Options as UringOptions, UringDevice};
use exports_nvme_tcp::AccessState;
use nvme::command::{cns, feature, log_page};
use nvme::fabrics::{ANY_CONTROLLER, nqn};
use nvme::identify::controller_data::{ControllerData, aocs, oacs, oaes};
use nvme::lba_status::{Action, GetLbaStatus, LbaRange, LbaStatusList};
use nvme::{Command, IDENTIFY_BYTES, Status};
use std::sync::Arc;

/// Blocks in a MiB.
const BLOCKS: u64 = MIB / 512;

const ALL: GetLbaStatus = GetLbaStatus { action: Action::Allocated, lba: 0, blocks: 0, bytes: 4096 };

fn status(host: &mut Host, get: &GetLbaStatus) -> Result<LbaStatusList, Status> {
    let done = host.run(&get.command(1), get.bytes as u32);
    match done.status {
        Status::SUCCESS => Ok(LbaStatusList::parse(&done.data).unwrap()),
        status => Err(status),
    }
}

/// The ranges of a list as blocks from and to, and whether it is complete.
fn ranges(host: &mut Host, get: &GetLbaStatus) -> (Vec<(u64, u64)>, bool) {
    let list = status(host, get).unwrap();
    let ends = |range: &LbaRange| (range.lba, range.lba + range.blocks);
    (list.ranges.iter().map(ends).collect(), list.is_complete)
}

#[test]
fn allocated_blocks_are_those_that_are_not_holes_that_read_as_zeroes() {
    let server = Server::start(8 * MIB);
    server.device.report(&[
        (MIB, BlockStatus::ZERO_HOLE),
        (2 * MIB, BlockStatus::DATA),
        (3 * MIB, BlockStatus::ZERO),
        (4 * MIB, BlockStatus::ZERO_HOLE),
        (5 * MIB, BlockStatus::HOLE),
        (8 * MIB, BlockStatus::ZERO_HOLE),
    ]);
    let mut host = server.host();
    host.enable();
    let all = vec![(BLOCKS, 3 * BLOCKS), (4 * BLOCKS, 5 * BLOCKS)];
    assert_eq!(ranges(&mut host, &ALL), (all, true));
    // Only the requested range, even if an extent is longer.
    let part = GetLbaStatus { lba: 2 * BLOCKS + 7, blocks: 9, ..ALL };
    assert_eq!(ranges(&mut host, &part), (vec![(2 * BLOCKS + 7, 2 * BLOCKS + 16)], true));
    let hole = GetLbaStatus { lba: 5 * BLOCKS, ..ALL };
    assert_eq!(ranges(&mut host, &hole), (vec![], true));
    // No device reports blocks that it may be unable to read.
    for action in [Action::Scan, Action::Tracked] {
        assert_eq!(ranges(&mut host, &GetLbaStatus { action, ..ALL }), (vec![], true));
    }
    server.device.fail_at(MIB, IoError::DeviceGone);
    assert_eq!(status(&mut host, &ALL), Err(Status::INTERNAL_PATH_ERROR));
}

#[test]
fn a_host_reads_a_long_list_in_parts() {
    let server = Server::start(MIB);
    let extent = |i: u64| {
        ((i + 1) * 8192, if i.is_multiple_of(2) { BlockStatus::DATA } else { BlockStatus::ZERO_HOLE })
    };
    server.device.report(&(0..128).map(extent).collect::<Vec<_>>());
    let mut host = server.host();
    host.enable();
    let expected: Vec<_> = (0..64).map(|i| (i * 32, i * 32 + 16)).collect();
    let mut found = Vec::new();
    let mut is_complete = false;
    while !is_complete {
        let lba = found.last().map_or(0, |(_, end)| *end);
        // Room for 10 descriptors and a half.
        let (more, is_last) = ranges(&mut host, &GetLbaStatus { lba, bytes: 8 + 10 * 16 + 8, ..ALL });
        assert!(is_last || more.len() == 10);
        found.extend(more);
        is_complete = is_last;
    }
    assert_eq!(found, expected);
    // The list ends with the last allocated block, so it is complete although it is full.
    assert_eq!(ranges(&mut host, &GetLbaStatus { bytes: 8 + 64 * 16, ..ALL }), (expected, true));
    assert_eq!(ranges(&mut host, &GetLbaStatus { bytes: 8, ..ALL }), (vec![], false));
    // The buffer is shorter than the list may be.
    let done = host.run(&ALL.command(1), 8 + 2 * 16);
    let list = LbaStatusList::parse(&done.data).unwrap();
    assert!(list.ranges.len() == 2 && !list.is_complete);
}

#[test]
fn a_sparse_file_reports_what_its_host_wrote() {
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(64 * MIB).unwrap();
    let device = Arc::new(UringDevice::open(&UringOptions::new(image.path())).unwrap());
    let (export, _cores) = export(&[device], 1, |config| config);
    let mut host = Host::admin(export.address(), SUBSYSTEM);
    host.enable();
    let mut io = host.io_queue(1, 32);
    assert_eq!(ranges(&mut host, &ALL), (vec![], true));
    assert_eq!(io.write(33 * BLOCKS, &[1; 512]), Status::SUCCESS);
    let (found, is_complete) = ranges(&mut host, &ALL);
    let [(start, end)] = found[..] else { panic!("one range: {found:?}") };
    assert!((start..end).contains(&(33 * BLOCKS)) && is_complete);
}

#[test]
fn an_invalid_get_lba_status_is_refused() {
    let server = Server::start(MIB);
    let mut host = server.host();
    host.enable();
    for (get, expected) in [
        (GetLbaStatus { lba: BLOCKS, ..ALL }, Status::LBA_OUT_OF_RANGE),
        (GetLbaStatus { lba: BLOCKS - 1, blocks: 2, ..ALL }, Status::LBA_OUT_OF_RANGE),
        (GetLbaStatus { lba: u64::MAX, blocks: 1, ..ALL }, Status::LBA_OUT_OF_RANGE),
        (GetLbaStatus { action: Action::Tracked, lba: BLOCKS, ..ALL }, Status::LBA_OUT_OF_RANGE),
        (GetLbaStatus { bytes: 4, ..ALL }, Status::INVALID_FIELD),
    ] {
        assert_eq!(status(&mut host, &get), Err(expected), "{get:?}");
    }
    let action = Command { cdw: [0, 0, 1023, 0x0300_0000, 0, 0], ..ALL.command(1) };
    assert_eq!(host.run(&action, 4096).status, Status::INVALID_FIELD);
    for nsid in [0, 2, u32::MAX] {
        assert_eq!(host.run(&ALL.command(nsid), 4096).status, Status::INVALID_NAMESPACE);
    }
    assert_eq!(host.run(&ALL.command(1), 4).status, Status::INVALID_SGL_LENGTH);
    let last = GetLbaStatus { lba: BLOCKS - 1, blocks: 1, ..ALL };
    assert_eq!(ranges(&mut host, &last), (vec![(BLOCKS - 1, BLOCKS)], true));
    server.export().set_access_state(0, AccessState::Inaccessible);
    assert_eq!(status(&mut host, &ALL), Err(Status::ANA_INACCESSIBLE));
    let mut visitor = Host::initialized(server.address(), false, false);
    assert_eq!(visitor.connect(nqn::DISCOVERY, 0, 32, ANY_CONTROLLER, 0).status, Status::SUCCESS);
    visitor.enable();
    assert_eq!(status(&mut visitor, &ALL), Err(Status::INVALID_OPCODE));
}

#[test]
fn a_controller_announces_get_lba_status_and_what_the_command_requires() {
    let server = Server::start(MIB);
    let mut host = server.host();
    host.enable();
    let mut identify = |cns| {
        let done = host.run(&Command::identify(0, cns, 0), IDENTIFY_BYTES as u32);
        assert_eq!(done.status, Status::SUCCESS);
        done.data
    };
    let controller = ControllerData::parse(&identify(cns::CONTROLLER).try_into().unwrap());
    assert_eq!(controller.admin_commands, oacs::GET_LBA_STATUS);
    assert!(controller.async_events & oaes::LBA_STATUS != 0 && controller.log_attributes & 1 << 2 != 0);
    assert_eq!(u16::from(identify(cns::COMMAND_SET_CONTROLLER)[18]), aocs::ALLOCATED_LBAS);
    let log = host.run(&Command::get_log_page(0, log_page::LBA_STATUS_INFORMATION, 0, 16), 16);
    assert_eq!(log.data, [16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    // The interval of reports stays 0, which is the closest supported value.
    let set = Command::set_features(feature::LBA_STATUS_INFORMATION, 100);
    let get = Command::get_features(feature::LBA_STATUS_INFORMATION);
    for command in [set, get] {
        let done = host.run(&command, 0);
        assert_eq!((done.status, done.result), (Status::SUCCESS, 0), "{command:?}");
    }
}
