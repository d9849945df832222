//! Properties of a namespace: from its controller, and from Linux, which has its own limits
//! (`/sys/class/block/nvmeXnY/queue`, the block device that belongs to `/dev/ngXnY`).

use super::admin::{self, AdminError};
use super::error::OpenError;
use crate::passthrough::transfer::{MAX_IOVECS, TransferLimits};
use crate::sysfs::Sysfs;
use block::Limits;
use nvme::command::{cns, opcode};
use nvme::identify::{Deallocation, supports_io_command};
use nvme::zns::{ZonedNamespace, append_limit};
use nvme::{CommandLimits, CommandSet, Controller, MAX_BLOCKS, Namespace};
use std::fs::File;

/// Longest request; longer than a command, so it is split.
const MAX_TRANSFER: u32 = 1 << 30;
/// Longest discard and write zeroes, split likewise.
const MAX_COMMAND: u64 = 1 << 40;
/// Memory segments that every kernel's NVMe driver supports in one command (`NVME_MAX_SEGS` of
/// Linux 5.19). Used without a block device that reports the limit.
const LEAST_MAX_SEGMENTS: u32 = 127;
/// Larger preferred sizes of a namespace are ignored as invalid.
const MAX_PREFERENCE: u64 = 1 << 30;

/// The properties of a namespace. Sizes are in bytes unless the name says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceFacts {
    /// Namespace identifier.
    pub nsid: u32,
    /// Size.
    pub capacity: u64,
    /// Size of a logical block, as a power of two.
    pub block_shift: u32,
    /// Whether the namespace refuses writes.
    pub is_write_protected: bool,
    /// Whether there is a volatile write cache, enabled or not.
    pub has_write_cache: bool,
    /// Whether completed writes may be lost without a flush: the cache is enabled.
    pub needs_flush: bool,
    /// Longest transfer of one command, a multiple of the block. Longer requests are split.
    pub max_transfer: u32,
    /// Maximum memory pages of one command.
    pub max_pages: u32,
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
    /// Whether the controller has queues that can be polled for completions.
    pub can_poll: bool,
    /// The properties of a zoned namespace.
    pub zones: Option<ZoneFacts>,
}

/// The zones of a host-managed namespace. Sizes are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZoneFacts {
    /// Distance between the starts of two zones.
    pub zone_size: u64,
    /// Number of zones.
    pub zones: u64,
    /// Maximum zones that are open or closed; 0: no limit.
    pub max_active: u32,
    /// Maximum zones that are open; 0: no limit.
    pub max_open: u32,
    /// Longest zone append; `None` without the command.
    pub max_append: Option<u32>,
}

impl NamespaceFacts {
    /// Queries the properties of the namespace of `file`.
    ///
    /// # Errors
    /// When it is not a namespace, may not be queried, or is not supported.
    pub(super) fn of(file: &File) -> Result<NamespaceFacts, OpenError> {
        let nsid = admin::namespace_id(file).map_err(OpenError::of_first_call)?;
        let ask = |cns, csi: CommandSet| {
            admin::identify(file, nsid, cns, csi.csi()).map_err(|e| OpenError::of_admin("identify", e))
        };
        let command_set = match admin::descriptors(file, nsid) {
            Ok(list) => CommandSet::of_descriptors(&list)?,
            // Controllers before NVMe 1.3 have no such list, and one command set.
            Err(AdminError::Controller(_)) => CommandSet::Nvm,
            Err(error) => return Err(OpenError::of_admin("identify", error)),
        };
        let controller = Controller::parse(&*ask(cns::CONTROLLER, CommandSet::Nvm)?);
        let namespace = Namespace::parse(&*ask(cns::NAMESPACE, CommandSet::Nvm)?)?;
        // Controllers before NVMe 1.4 (TP 4040) have no such structure, and a controller without it
        // has no limits.
        let limits = admin::identify(file, nsid, cns::COMMAND_SET_CONTROLLER, CommandSet::Nvm.csi())
            .map_or(CommandLimits::default(), |data| CommandLimits::parse(&data));
        let drive = Sysfs::of_namespace(file);
        let (max_transfer, max_pages) = transfer_limits(&controller, &namespace, drive.as_ref());
        let bytes = |blocks: u32| u64::from(blocks) << namespace.block_shift;
        let preference = |blocks: u32| match bytes(blocks) {
            size if size.is_power_of_two() && size <= MAX_PREFERENCE => size as u32,
            _ => 1 << namespace.block_shift,
        };
        let facts = NamespaceFacts {
            nsid,
            capacity: namespace.blocks << namespace.block_shift,
            block_shift: namespace.block_shift,
            is_write_protected: namespace.is_write_protected,
            has_write_cache: controller.has_volatile_cache,
            // If the controller does not report the state of its cache, it counts as enabled.
            needs_flush: controller.has_volatile_cache && admin::is_write_cache_on(file).unwrap_or(true),
            max_transfer,
            max_pages,
            zero_blocks: limits.zero_blocks(&controller, namespace.block_shift),
            zeroes_by_deallocating: namespace.zeroes_by_deallocating,
            deallocation: limits.deallocation(&controller),
            preferred_write: preference(namespace.preferred_write_blocks),
            preferred_discard: preference(namespace.preferred_deallocate_blocks),
            optimal_io: Some(bytes(namespace.optimal_write_blocks))
                .filter(|size| *size <= MAX_PREFERENCE)
                .unwrap_or(0) as u32,
            can_poll: drive.is_some_and(|d| d.has_poll_queues()),
            zones: None,
        };
        if command_set == CommandSet::Nvm {
            return Ok(facts);
        }
        let zoned = ZonedNamespace::parse(&*ask(cns::COMMAND_SET_NAMESPACE, command_set)?, &namespace)?;
        let has_append = admin::effects_log(file, command_set.csi())
            .is_ok_and(|log| supports_io_command(&log, opcode::ZONE_APPEND));
        let limit = append_limit(&*ask(cns::COMMAND_SET_CONTROLLER, command_set)?);
        let zones = ZoneFacts {
            zone_size: zoned.zone_blocks << namespace.block_shift,
            zones: namespace.blocks / zoned.zone_blocks,
            max_active: zoned.max_active,
            max_open: zoned.max_open,
            max_append: has_append.then(|| limit.map_or(max_transfer, |limit| limit.min(max_transfer))),
        };
        Ok(NamespaceFacts { zones: Some(zones), ..facts })
    }

    /// Size of a logical block.
    pub fn block_size(&self) -> u32 {
        1 << self.block_shift
    }

    /// The limits of one command, on a kernel with pages of `page` bytes.
    #[inline]
    pub(super) fn transfer_limits(&self, page: usize) -> TransferLimits {
        let NamespaceFacts { block_shift, max_transfer, max_pages, .. } = *self;
        TransferLimits { block_shift, max_transfer, max_pages, page }
    }

    /// The limits of a device over the namespace; `read_only` refuses all writes.
    pub fn limits(&self, read_only: bool) -> Limits {
        let whole_blocks = |len: u64| len & !(u64::from(self.block_size()) - 1);
        Limits {
            block_size: self.block_size(),
            physical_block_size: self.preferred_write,
            optimal_io_size: self.optimal_io,
            // The kernel copies data that is not aligned to a dword.
            memory_alignment: 4,
            max_transfer: MAX_TRANSFER,
            max_segments: MAX_IOVECS as u16,
            max_discard: if self.deallocation.is_some() { whole_blocks(MAX_COMMAND) } else { 0 },
            discard_alignment: self.preferred_discard,
            max_write_zeroes: whole_blocks(MAX_COMMAND),
            read_only: read_only || self.is_write_protected,
            volatile_cache: self.needs_flush,
            native_fua: true,
            ..Limits::new(self.capacity)
        }
    }
}

/// Bytes and memory pages of one command: the smaller limits of controller and kernel.
fn transfer_limits(controller: &Controller, namespace: &Namespace, drive: Option<&Sysfs>) -> (u32, u32) {
    let kernel: Option<u32> = drive.and_then(|d| d.number("max_hw_sectors_kb"));
    let kernel = kernel.map_or(u32::MAX, |kib| kib.saturating_mul(1024));
    let segments: Option<u32> = drive.and_then(|d| d.number("max_segments"));
    let field = MAX_BLOCKS.saturating_mul(1 << namespace.block_shift);
    let most = controller.max_transfer.unwrap_or(u32::MAX).min(kernel).min(field).min(MAX_TRANSFER);
    let block = 1 << namespace.block_shift;
    // Only a page is certain to be contiguous in memory.
    ((most & !(block - 1)).max(block), segments.unwrap_or(LEAST_MAX_SEGMENTS).max(1))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A namespace of 1 MiB with blocks of 512 bytes and short commands.
    pub const SMALL: NamespaceFacts = NamespaceFacts {
        nsid: 1,
        capacity: 1 << 20,
        block_shift: 9,
        is_write_protected: false,
        has_write_cache: true,
        needs_flush: true,
        max_transfer: 16 << 10,
        max_pages: 4,
        zero_blocks: Some(32),
        zeroes_by_deallocating: true,
        deallocation: Some(Deallocation { ranges: 2, range_blocks: 100, total_blocks: 150 }),
        preferred_write: 512,
        preferred_discard: 4096,
        optimal_io: 0,
        can_poll: false,
        zones: None,
    };

    #[test]
    fn the_least_of_all_limits_holds_and_is_whole_blocks() {
        let controller = Controller {
            max_transfer: Some(20 << 10),
            has_dataset_management: false,
            has_write_zeroes: false,
            has_volatile_cache: false,
        };
        let mut namespace = Namespace {
            blocks: 1,
            block_shift: 13,
            format: 0,
            is_write_protected: false,
            zeroes_by_deallocating: false,
            preferred_write_blocks: 1,
            preferred_deallocate_blocks: 1,
            optimal_write_blocks: 0,
        };
        assert_eq!(transfer_limits(&controller, &namespace, None), (16 << 10, LEAST_MAX_SEGMENTS));
        let any = Controller { max_transfer: None, ..controller };
        assert_eq!(transfer_limits(&any, &namespace, None).0, 512 << 20);
        namespace.block_shift = 16;
        assert_eq!(transfer_limits(&controller, &namespace, None).0, 64 << 10, "at least a block");
        assert_eq!(transfer_limits(&any, &namespace, None).0, MAX_TRANSFER);
    }

    #[test]
    fn limits_say_what_the_namespace_has() {
        let limits = SMALL.limits(false);
        assert_eq!((limits.block_size, limits.capacity), (512, 1 << 20));
        assert!(limits.volatile_cache && !limits.read_only && limits.max_discard > 0);
        let poor = NamespaceFacts { deallocation: None, is_write_protected: true, ..SMALL };
        assert_eq!(poor.limits(false).max_discard, 0);
        assert!(poor.limits(false).read_only && SMALL.limits(true).read_only);
    }
}
