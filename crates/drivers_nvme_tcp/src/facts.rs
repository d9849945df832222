//! Properties of a namespace and its controller.

use super::error::OpenError;
use block::Limits;
use nvme::fabrics::property::Capabilities;
use nvme::identify::lists::{NamespaceId, parse_descriptors};
use nvme::identify::{ControllerData, ControllerType, Deallocation, NamespaceData};
use nvme::{CommandLimits, CommandSet, Controller, IdentifyData, MAX_BLOCKS, Namespace};

/// Longest request; longer than a command, so it is split.
const MAX_TRANSFER: u32 = 1 << 30;
/// Longest discard and write zeroes, split likewise.
const MAX_RANGE: u64 = 1 << 40;
/// Longest transfer of one command if the controller has no limit or a higher one: a target buffers
/// all of its data in memory.
const MAX_COMMAND: u32 = 1 << 20;
/// Larger preferred sizes of a namespace are ignored as invalid.
const MAX_PREFERENCE: u64 = 1 << 30;

/// Distinguishes a namespace from every other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Identity {
    nguid: [u8; 16],
    eui64: [u8; 8],
    uuid: [u8; 16],
}

/// The properties of a namespace. Sizes are in bytes unless the name says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Namespace identifier.
    pub nsid: u32,
    /// Size.
    pub capacity: u64,
    /// Size of a logical block, as a power of two.
    pub block_shift: u32,
    /// Whether the namespace refuses writes.
    pub is_write_protected: bool,
    /// Whether there is a volatile write cache.
    pub has_cache: bool,
    /// Longest transfer of one command, a multiple of the block.
    pub max_transfer: u32,
    /// Maximum data in a command's capsule.
    pub in_capsule: u32,
    /// Maximum blocks of one write zeroes command; `None` without the command.
    pub zero_blocks: Option<u32>,
    /// Whether write zeroes may deallocate.
    pub zeroes_by_deallocating: bool,
    /// Limits of a deallocation; `None` without the command.
    pub deallocation: Option<Deallocation>,
    /// Writes of this size, at its multiples, cost no read. A power of two.
    pub preferred_write: u32,
    /// Discards of this size, at its multiples, are effective. A power of two.
    pub preferred_discard: u32,
    /// The preferred write size; 0 when unknown.
    pub optimal_io: u32,
    /// Maximum entries of a queue, by the controller's capabilities.
    pub max_entries: u32,
    /// Maximum commands in flight on a queue.
    pub max_commands: u32,
    pub(super) identity: Identity,
}

/// The structures that the controller returned, from which facts are derived.
pub(super) struct Structures<'a> {
    pub(super) capabilities: Capabilities,
    pub(super) controller: &'a IdentifyData,
    pub(super) nsid: u32,
    pub(super) namespace: &'a IdentifyData,
    /// Empty if not supported.
    pub(super) descriptors: &'a IdentifyData,
    /// All zeroes if not supported, which means no limits.
    pub(super) limits: &'a IdentifyData,
}

impl Facts {
    /// Evaluates the structures.
    ///
    /// # Errors
    /// When the namespace cannot be used.
    pub(super) fn new(structures: &Structures<'_>) -> Result<Facts, OpenError> {
        let data = ControllerData::parse(structures.controller);
        if data.controller_type == ControllerType::Discovery {
            return Err(OpenError::Unusable("the controller is a discovery controller".into()));
        }
        if CommandSet::of_descriptors(structures.descriptors)? != CommandSet::Nvm {
            return Err(OpenError::Unusable("the namespace is zoned".into()));
        }
        if structures.namespace.iter().all(|byte| *byte == 0) {
            return Err(OpenError::NoNamespace(format!(" {}", structures.nsid)));
        }
        let (controller, namespace) =
            (Controller::parse(structures.controller), Namespace::parse(structures.namespace)?);
        if namespace.blocks == 0 {
            return Err(OpenError::Unusable("the namespace has no blocks".into()));
        }
        let limits = CommandLimits::parse(structures.limits);
        let block = 1u32 << namespace.block_shift;
        let bytes = |blocks: u32| u64::from(blocks) << namespace.block_shift;
        let preference = |blocks: u32| match bytes(blocks) {
            size if size.is_power_of_two() && size <= MAX_PREFERENCE => size as u32,
            _ => block,
        };
        // MDTS counts in the controller's smallest pages.
        let pages = u64::from(structures.capabilities.min_page_bytes / nvme::MIN_PAGE_BYTES);
        let most = controller.max_transfer.map_or(u64::from(MAX_COMMAND), |bytes| u64::from(bytes) * pages);
        let most = most.min(MAX_COMMAND.into()).min(bytes(MAX_BLOCKS)) as u32;
        let optimal = Some(bytes(namespace.optimal_write_blocks)).filter(|size| *size <= MAX_PREFERENCE);
        Ok(Facts {
            nsid: structures.nsid,
            capacity: namespace.blocks << namespace.block_shift,
            block_shift: namespace.block_shift,
            is_write_protected: namespace.is_write_protected,
            has_cache: controller.has_volatile_cache,
            max_transfer: (most & !(block - 1)).max(block),
            // In-capsule data at an offset is not supported.
            in_capsule: if data.in_capsule_offset_units == 0 { data.in_capsule_bytes() } else { 0 },
            zero_blocks: limits.zero_blocks(&controller, namespace.block_shift),
            zeroes_by_deallocating: namespace.zeroes_by_deallocating,
            deallocation: limits.deallocation(&controller),
            preferred_write: preference(namespace.preferred_write_blocks),
            preferred_discard: preference(namespace.preferred_deallocate_blocks),
            optimal_io: optimal.unwrap_or(0) as u32,
            max_entries: structures.capabilities.max_entries,
            max_commands: if data.max_commands == 0 { u32::MAX } else { data.max_commands.into() },
            identity: identity(structures),
        })
    }

    /// Size of a logical block.
    pub fn block_size(&self) -> u32 {
        1 << self.block_shift
    }

    /// The limits of a device over the namespace; `read_only` refuses all writes.
    pub fn limits(&self, read_only: bool) -> Limits {
        let whole_blocks = |len: u64| len & !(u64::from(self.block_size()) - 1);
        let read_only = read_only || self.is_write_protected;
        Limits {
            block_size: self.block_size(),
            physical_block_size: self.preferred_write,
            optimal_io_size: self.optimal_io,
            memory_alignment: 1,
            max_transfer: MAX_TRANSFER,
            max_segments: 1024,
            max_discard: if self.deallocation.is_some() { whole_blocks(MAX_RANGE) } else { 0 },
            discard_alignment: self.preferred_discard,
            max_write_zeroes: whole_blocks(MAX_RANGE),
            read_only,
            volatile_cache: self.has_cache && !read_only,
            native_fua: true,
            ..Limits::new(self.capacity)
        }
    }

    /// Whether `other` describes the same namespace, possibly with another size.
    pub(super) fn is_same(&self, other: &Facts) -> bool {
        self.identity == other.identity && self.nsid == other.nsid && self.block_shift == other.block_shift
    }
}

fn identity(structures: &Structures<'_>) -> Identity {
    let data = NamespaceData::parse(structures.namespace);
    let mut identity = Identity { nguid: data.nguid, eui64: data.eui64, uuid: [0; 16] };
    for id in parse_descriptors(structures.descriptors) {
        match id {
            NamespaceId::Eui64(id) => identity.eui64 = id,
            NamespaceId::Nguid(id) => identity.nguid = id,
            NamespaceId::Uuid(id) => identity.uuid = id,
            NamespaceId::CommandSet(_) => {}
        }
    }
    identity
}
