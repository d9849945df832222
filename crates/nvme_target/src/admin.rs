//! Commands of admin queues: properties, identification, log pages, events. Features are in
//! [`features`](super::features).
//!
//! Source: Base Specification 2.0, 5 (admin commands), 6 (fabrics commands). A discovery controller
//! supports those that 5.1 of NVMe over Fabrics lists.

use crate::controller::MAX_EVENT_REQUESTS;
use crate::copy;
use crate::failure::Failure;
use crate::ports;
use crate::queue::{Queue, Reply};
use crate::subsystem::{MAX_ENTRIES, Namespace};
use crate::transport::{Command, Transport};
use crate::{MAX_TRANSFER, log_pages};
use nvme::command::{admin, cns};
use nvme::fabrics::property::{Capabilities, PropertyGet, PropertySet, Version, offset};
use nvme::fabrics::{self, FabricsType};
use nvme::identify::controller_data::{
    ControllerData, ControllerType, aocs, cmic, ctratt, encode_nvm, oacs, oaes, oncs, sgls,
};
use nvme::identify::lists::{ALL_NAMESPACES, NamespaceId, encode_descriptors, encode_namespaces};
use nvme::identify::namespace_data::{NamespaceData, dlfeat, nsfeat};
use nvme::reservation;
use nvme::{CommandSet, IDENTIFY_BYTES, IdentifyData, MIN_PAGE_BYTES, Status, SubmissionEntry};
use std::future::poll_fn;
use std::ops::RangeInclusive;

/// VWC: a flush may name all namespaces (bits 2:1 are 11b).
const FLUSH_ALL: u8 = 3 << 1;
/// The timeout of CAP; the controller is always ready.
const READY_TIMEOUT_MS: u32 = 7500;
/// KAS: the granularity of the keep-alive timeout, in 100 ms.
const KEEP_ALIVE_UNITS: u16 = 1;

impl Queue {
    /// Executes a command of an admin queue.
    pub(crate) async fn admin<T: Transport>(
        &self,
        mut command: Command<T::Memory>,
        transport: &T,
    ) -> Result<Reply<T::Memory>, Failure> {
        let entry = command.entry;
        entry.check_not_fused()?;
        if entry.opcode == fabrics::OPCODE {
            return Ok(Reply { result: self.fabrics(&entry)?, ..Reply::default() });
        }
        let controller = self.controller();
        if !controller.status().is_ready {
            return Err(Status::COMMAND_SEQUENCE_ERROR.into());
        }
        match entry.opcode {
            admin::KEEP_ALIVE => Ok(Reply::default()),
            admin::IDENTIFY => {
                let data = if controller.is_discovery {
                    self.identify_discovery(&entry, T::IN_CAPSULE_BYTES)
                } else {
                    self.identify(&entry, T::IN_CAPSULE_BYTES)
                };
                self.reply_with_all(&entry, &data?, transport).await
            }
            admin::GET_LOG_PAGE => {
                let page = log_pages::read(controller, &entry.cdw, &entry, transport)?;
                self.reply_with(&entry, &page, transport).await
            }
            admin::GET_FEATURES => self.get_features(&entry, transport).await,
            admin::SET_FEATURES => self.set_features(&mut command, transport).await,
            admin::ASYNC_EVENT_REQUEST => {
                Ok(Reply { result: self.wait_for_event().await?, ..Reply::default() })
            }
            admin::GET_LBA_STATUS if !controller.is_discovery => self.lba_status(&entry, transport).await,
            // Bit 0: the command was not aborted. Only the device can delay a command.
            admin::ABORT if !controller.is_discovery => Ok(Reply { result: 1, ..Reply::default() }),
            _ => Err(Status::INVALID_OPCODE.into()),
        }
    }

    /// Executes a fabrics command. Returns dwords 0 and 1 of its completion.
    fn fabrics(&self, entry: &SubmissionEntry) -> Result<u64, Failure> {
        Ok(match FabricsType::of(entry) {
            Some(FabricsType::PropertyGet) => {
                let get = PropertyGet::parse(&entry.cdw).ok_or(Status::INVALID_FIELD)?;
                self.property(get)?
            }
            Some(FabricsType::PropertySet) => {
                let set = PropertySet::parse(&entry.cdw).ok_or(Status::INVALID_FIELD)?;
                match (set.offset, set.bytes) {
                    (offset::CC, 4) => self.controller().configure(set.value as u32)?,
                    _ => return Err(Status::INVALID_FIELD.into()),
                }
                0
            }
            Some(FabricsType::Connect) => return Err(Status::COMMAND_SEQUENCE_ERROR.into()),
            Some(FabricsType::Disconnect) => return Err(Status::INVALID_QUEUE_TYPE.into()),
            _ => return Err(Status::INVALID_FIELD.into()),
        })
    }

    fn property(&self, get: PropertyGet) -> Result<u64, Status> {
        let controller = self.controller();
        let capabilities = Capabilities {
            max_entries: MAX_ENTRIES,
            is_contiguous: true,
            ready_timeout_ms: READY_TIMEOUT_MS,
            command_sets: Capabilities::NVM,
            min_page_bytes: MIN_PAGE_BYTES,
            max_page_bytes: MIN_PAGE_BYTES,
        };
        Ok(match (get.offset, get.bytes) {
            (offset::CAP, 8) => capabilities.encode(),
            (offset::VS, 4) => Version::V1_4.encode().into(),
            (offset::CC, 4) => controller.configuration().into(),
            (offset::CSTS, 4) => controller.status().encode().into(),
            _ => return Err(Status::INVALID_FIELD),
        })
    }

    fn identify(&self, entry: &SubmissionEntry, in_capsule_bytes: u32) -> Result<IdentifyData, Failure> {
        let subsystem = &self.controller().subsystem;
        let find = || subsystem.namespace(entry.nsid).ok_or(Status::INVALID_NAMESPACE);
        let command_set = (entry.cdw[1] >> 24) as u8;
        let is_nvm = command_set == CommandSet::Nvm.csi();
        let namespaces = || subsystem.namespaces.iter().map(|namespace| namespace.id);
        Ok(match entry.cdw[0] as u8 {
            cns::CONTROLLER => self.controller_data(in_capsule_bytes).encode(),
            // Without namespace management there is no data that all namespaces share, and every
            // namespace is active.
            cns::NAMESPACE => namespace_data(find()?, subsystem.has_reservations()).encode(),
            cns::ACTIVE_NAMESPACES if entry.nsid < ALL_NAMESPACES - 1 => {
                encode_namespaces(namespaces(), entry.nsid)
            }
            cns::COMMAND_SET_ACTIVE_NAMESPACES if is_nvm && entry.nsid < ALL_NAMESPACES - 1 => {
                encode_namespaces(namespaces(), entry.nsid)
            }
            cns::ACTIVE_NAMESPACES => return Err(Status::INVALID_NAMESPACE.into()),
            cns::DESCRIPTORS => {
                let uuid = find()?.uuid;
                encode_descriptors(&[
                    NamespaceId::Uuid(uuid),
                    NamespaceId::Nguid(uuid),
                    NamespaceId::CommandSet(CommandSet::Nvm),
                ])
            }
            // Nothing beyond the Identify data; the only limit is the transfer length.
            cns::COMMAND_SET_NAMESPACE if is_nvm => {
                find()?;
                [0; IDENTIFY_BYTES]
            }
            cns::COMMAND_SET_CONTROLLER if is_nvm => encode_nvm(aocs::ALLOCATED_LBAS),
            _ => return Err(Status::INVALID_FIELD.into()),
        })
    }

    fn identify_discovery(
        &self,
        entry: &SubmissionEntry,
        in_capsule_bytes: u32,
    ) -> Result<IdentifyData, Failure> {
        match entry.cdw[0] as u8 {
            cns::CONTROLLER => {
                let async_events = oaes::DISCOVERY_LOG;
                Ok(ControllerData { async_events, ..self.common_data(in_capsule_bytes) }.encode())
            }
            _ => Err(Status::INVALID_FIELD.into()),
        }
    }

    /// The Identify fields that both kinds of controllers share.
    fn common_data(&self, in_capsule_bytes: u32) -> ControllerData {
        let controller = self.controller();
        let subsystem = &controller.subsystem;
        ControllerData {
            serial: subsystem.serial.clone(),
            model: "Freestone".into(),
            firmware: env!("CARGO_PKG_VERSION").into(),
            max_transfer_exponent: (MAX_TRANSFER / MIN_PAGE_BYTES).ilog2() as u8,
            controller_id: controller.id,
            version: Version::V1_4.encode(),
            attributes: ctratt::LONG_HOST_ID,
            controller_type: ControllerType::Discovery,
            async_event_limit: MAX_EVENT_REQUESTS as u8 - 1,
            log_attributes: 1 << 2,
            keep_alive_granularity: KEEP_ALIVE_UNITS,
            max_commands: MAX_ENTRIES as u16,
            sgls: sgls::SUPPORTED | sgls::OFFSET | sgls::TRANSPORT,
            subsystem: subsystem.nqn.as_str().into(),
            command_capsule_units: (64 + in_capsule_bytes) / 16,
            response_capsule_units: 1,
            max_data_descriptors: 1,
            ..ControllerData::default()
        }
    }

    fn controller_data(&self, in_capsule_bytes: u32) -> ControllerData {
        let subsystem = &self.controller().subsystem;
        let namespaces = &subsystem.namespaces;
        let all = |has: fn(&Namespace) -> bool| namespaces.iter().all(has);
        let is_cached = namespaces.iter().any(|namespace| namespace.limits.volatile_cache);
        let mut commands = oncs::COMPARE | oncs::DATASET_MANAGEMENT | oncs::VERIFY | oncs::COPY;
        if subsystem.has_reservations() {
            commands |= oncs::RESERVATIONS;
        }
        if all(|namespace| namespace.limits.max_write_zeroes > 0) {
            commands |= oncs::WRITE_ZEROES;
        }
        ControllerData {
            paths: cmic::PORTS | cmic::CONTROLLERS | cmic::ASYMMETRIC_ACCESS,
            // Get LBA Status requires the LBA status event, which never happens.
            async_events: oaes::NAMESPACE_ATTRIBUTES | oaes::ASYMMETRIC_ACCESS | oaes::LBA_STATUS,
            ana_transition_s: ports::TRANSITION_S,
            ana_capabilities: ports::CAPABILITIES,
            ana_group_max: ports::GROUP,
            ana_groups: ports::GROUP,
            controller_type: ControllerType::Io,
            admin_commands: oacs::GET_LBA_STATUS,
            // Bit 1: the log page of commands and their effects is supported.
            log_attributes: 1 << 2 | 1 << 1,
            abort_limit: 3,
            // One slot, read-only.
            firmware_slots: 1 | 1 << 1,
            submission_exponents: 0x66,
            completion_exponents: 0x44,
            namespaces: namespaces.len() as u32,
            commands,
            copy_formats: copy::FORMATS,
            volatile_cache: FLUSH_ALL | u8::from(is_cached),
            max_allowed_namespaces: namespaces.len() as u32,
            ..self.common_data(in_capsule_bytes)
        }
    }

    /// The namespaces that `nsid` selects: one, or all.
    pub(crate) fn meant(&self, nsid: u32) -> Result<RangeInclusive<u32>, Status> {
        let subsystem = &self.controller().subsystem;
        match nsid {
            ALL_NAMESPACES => Ok(1..=subsystem.namespaces.len() as u32),
            _ => subsystem.namespace(nsid).map(|found| found.id..=found.id).ok_or(Status::INVALID_NAMESPACE),
        }
    }

    async fn wait_for_event(&self) -> Result<u64, Failure> {
        let controller = self.controller();
        if !controller.begin_event_request() {
            return Err(Status::TOO_MANY_EVENT_REQUESTS.into());
        }
        match poll_fn(|cx| controller.poll_event(cx)).await {
            Some(event) => Ok(event.encode().into()),
            None => Err(Failure::Gone),
        }
    }
}

fn namespace_data(namespace: &Namespace, has_reservations: bool) -> NamespaceData {
    let limits = &namespace.limits;
    let blocks = namespace.capacity() >> namespace.block_shift();
    // In blocks, 0-based.
    let units = |bytes: u32| (bytes / limits.block_size).clamp(1, 1 << 16).wrapping_sub(1) as u16;
    NamespaceData {
        blocks,
        capacity: blocks,
        used: blocks,
        features: nsfeat::PREFERENCES,
        // Any number of controllers may attach it.
        paths: 1,
        ana_group: ports::GROUP,
        deallocation: dlfeat::WRITE_ZEROES,
        write_granularity: units(limits.physical_block_size),
        write_alignment: units(limits.physical_block_size),
        deallocate_granularity: units(limits.discard_alignment),
        deallocate_alignment: units(limits.discard_alignment),
        optimal_write: units(limits.optimal_io_size.max(limits.physical_block_size)),
        copy_range_blocks: copy::max_blocks(limits.block_size) as u16,
        copy_blocks: copy::max_blocks(limits.block_size),
        copy_ranges: (nvme::MAX_RANGES - 1) as u8,
        reservations: match (has_reservations, namespace.reserved.can_persist()) {
            (false, _) => 0,
            (true, true) => reservation::CAPABILITIES | reservation::CAPABILITY_PERSISTS,
            (true, false) => reservation::CAPABILITIES,
        },
        is_write_protected: namespace.is_read_only,
        nguid: namespace.uuid,
        block_shift: namespace.block_shift() as u8,
        ..NamespaceData::default()
    }
}
