//! The limits of a file or block device: from `statx(2)` and, for a drive, from `/sys/dev/block`
//! (`Documentation/ABI/stable/sysfs-block` of the kernel).

use super::operation::Backing;
use super::tail::Tail;
use super::{Options, TAIL_NEEDS_DESCRIPTOR};
use crate::sysfs::Sysfs;
use block::{DeviceError, Limits};
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};

/// Largest supported block size.
const MAX_BLOCK_SIZE: u32 = 64 << 10;
/// Longest transfer in bytes: one `read(2)` moves slightly less than 2 GiB.
const MAX_TRANSFER: u32 = 1 << 30;

/// The current size of the file or device in bytes.
pub(super) fn size(file: &File) -> io::Result<u64> {
    // The file's position is unused, and unlike its metadata this also works for block devices.
    let mut file = file;
    file.seek(SeekFrom::End(0))
}

/// The capacity in bytes of `size` bytes in blocks of `block_size`. A regular file that ends inside
/// a block includes that block: its missing bytes read as zeroes, and only zeroes may be written
/// there. A partial block of a block device is not used.
pub(super) fn capacity(size: u64, is_block_device: bool, block_size: u32) -> u64 {
    let block = u64::from(block_size);
    if is_block_device { size / block * block } else { size.next_multiple_of(block) }
}

/// The properties of an open file or block device. Sizes are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileFacts {
    /// Whether it is a block device rather than a regular file.
    pub is_block_device: bool,
    /// Whether the page cache is bypassed.
    pub is_direct: bool,
    /// Whether it is open for reading only.
    pub read_only: bool,
    /// Alignment of every memory segment's address and length; 1 through the page cache.
    pub memory_alignment: u32,
    /// Alignment of offsets and lengths; 1 through the page cache.
    pub offset_alignment: u32,
    /// A block device's logical block size, at least 512; 512 for a regular file.
    pub logical_block_size: u32,
    /// Physical block size of a block device, or block size of a file system.
    pub physical_block_size: u32,
    /// The preferred I/O size; 0 when unknown.
    pub optimal_io_size: u32,
    /// Granularity of a block device's discard; 0 without discard.
    pub discard_granularity: u32,
    /// Start of the first whole discard granule of a partition.
    pub discard_offset: u32,
    /// Whether a block device supports discards; `None` for a regular file, where only a try shows
    /// it.
    pub has_discard: Option<bool>,
    /// Whether a block device can write zeroes without receiving them.
    pub zeroes_itself: bool,
    /// Whether completed writes may be lost without a flush.
    pub needs_flush: bool,
    /// Whether a durable write costs less than a write and a flush.
    pub native_fua: bool,
    /// Whether the medium rotates.
    pub rotational: bool,
    /// Whether the drive can be polled for completions.
    pub can_poll: bool,
}

impl FileFacts {
    /// Queries the properties of `file`.
    ///
    /// # Errors
    /// When a query fails, or the file was opened for direct I/O that its file system does not
    /// support.
    pub(super) fn of(file: &File) -> io::Result<FileFacts> {
        let metadata = file.metadata()?;
        // SAFETY: no pointer is passed.
        let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
        if flags < 0 {
            return Err(io::Error::last_os_error());
        }
        let is_direct = flags & libc::O_DIRECT != 0;
        let is_block_device = metadata.file_type().is_block_device();
        let drive = Sysfs::of(if is_block_device { metadata.rdev() } else { metadata.dev() });
        let own = drive.as_ref().filter(|_| is_block_device);
        let number = |attribute| own.and_then(|s| s.number::<u64>(attribute)).unwrap_or(0);
        let logical = if is_block_device { number("logical_block_size").max(512) as u32 } else { 512 };
        let (memory_alignment, offset_alignment) =
            if is_direct { direct_alignment(file, logical)? } else { (1, 1) };
        let granularity = number("discard_granularity") as u32;
        Ok(FileFacts {
            is_block_device,
            is_direct,
            read_only: flags & libc::O_ACCMODE == libc::O_RDONLY,
            memory_alignment,
            offset_alignment,
            logical_block_size: logical,
            physical_block_size: if is_block_device {
                number("physical_block_size") as u32
            } else {
                metadata.blksize() as u32
            },
            optimal_io_size: number("optimal_io_size") as u32,
            discard_granularity: granularity,
            // Several drivers report the granularity there, which as an offset means 0.
            discard_offset: match number("../discard_alignment") as u32 {
                offset if granularity > 0 => offset % granularity,
                _ => 0,
            },
            has_discard: is_block_device.then(|| number("discard_max_bytes") > 0),
            zeroes_itself: number("write_zeroes_max_bytes") > 0,
            needs_flush: !(is_direct && is_write_through(own)),
            native_fua: !is_block_device || !is_direct || number("fua") == 1,
            rotational: drive.as_ref().and_then(|s| s.number("rotational")) == Some(1u8),
            can_poll: is_direct && drive.as_ref().is_some_and(Sysfs::has_poll_queues),
        })
    }

    /// The properties that a queue needs. `block_size` is that of direct I/O.
    pub(super) fn backing(&self, file: &File, block_size: u32) -> Backing {
        Backing {
            is_block_device: self.is_block_device,
            is_direct: self.is_direct,
            block_size,
            zeroes_itself: self.zeroes_itself,
            is_in_memory: super::inline::is_in_memory(file),
        }
    }
}

/// The limits of the open `file`.
pub(super) fn inspect(file: &File, options: &Options) -> Result<(Limits, Backing, Tail), DeviceError> {
    let refuse = |message: String| DeviceError::new(options.device_name(), message);
    let path = options.path.display();
    let size = size(file).map_err(|e| refuse(format!("cannot learn the size of {path}")).because(e))?;
    let facts = FileFacts::of(file).map_err(|e| {
        let hint = if options.direct { " for direct I/O (direct=off does without)" } else { "" };
        refuse(format!("cannot use {path}{hint}")).because(e)
    })?;
    let least = facts.logical_block_size.max(facts.offset_alignment);
    let block_size = options.block_size.unwrap_or(least);
    if !block_size.is_power_of_two() || !(least..=MAX_BLOCK_SIZE).contains(&block_size) {
        return Err(refuse(format!(
            "block_size={block_size}: {path} takes powers of two from {least} to {MAX_BLOCK_SIZE}"
        )));
    }
    if size < u64::from(block_size) {
        return Err(refuse(format!("{path} is too small: {size} bytes, a block has {block_size}")));
    }
    let physical_block_size = sane_block_size(facts.physical_block_size, block_size);
    let has_discard = !options.read_only && facts.has_discard.unwrap_or_else(|| has_holes(file, size));
    let capacity = capacity(size, facts.is_block_device, block_size);
    if capacity > size {
        tracing::warn!(
            "{path}: size {size} is no multiple of {block_size}: capacity is {capacity} bytes, only zeroes may follow the file's end"
        );
    } else if capacity < size {
        tracing::warn!(
            "{path}: size {size} is no multiple of {block_size}: capacity is {capacity} bytes, the rest is not served"
        );
    }
    let limits = Limits {
        block_size,
        physical_block_size,
        optimal_io_size: facts.optimal_io_size,
        memory_alignment: facts.memory_alignment,
        max_transfer: MAX_TRANSFER & !(block_size - 1),
        // The kernel splits requests that exceed the drive's limits on segments and length, so
        // callers need not know these limits.
        max_segments: super::operation::MAX_IOVECS as u16,
        max_discard: if has_discard { 1 << 40 } else { 0 },
        discard_alignment: if facts.is_block_device {
            facts.discard_granularity.max(block_size)
        } else {
            physical_block_size
        },
        read_only: options.read_only,
        volatile_cache: facts.needs_flush,
        native_fua: facts.native_fua,
        rotational: facts.rotational,
        ..Limits::new(capacity)
    };
    let (backing, tail) = (facts.backing(file, block_size), Tail::none());
    tail.set_size(file, &backing, size, options.read_only)
        .map_err(|e| refuse(format!("{path}: {TAIL_NEEDS_DESCRIPTOR}")).because(e))?;
    Ok((limits, backing, tail))
}

fn sane_block_size(size: u32, least: u32) -> u32 {
    if size.is_power_of_two() { size.clamp(least, MAX_BLOCK_SIZE.max(least)) } else { least.max(4096) }
}

/// Whether a block device has no volatile cache. A regular file always needs a sync for its
/// metadata.
fn is_write_through(own: Option<&Sysfs>) -> bool {
    own.and_then(|s| s.text("write_cache")).is_some_and(|mode| mode == "write through")
}

/// Alignment of memory, and of offsets and lengths, for direct I/O.
fn direct_alignment(file: &File, logical: u32) -> io::Result<(u32, u32)> {
    // SAFETY: a plain structure of numbers, valid when zeroed.
    let mut found: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the path is a C string, the structure lives through the call.
    let result = unsafe {
        libc::statx(file.as_raw_fd(), c"".as_ptr(), libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN, &raw mut found)
    };
    if result == 0 && found.stx_mask & libc::STATX_DIOALIGN != 0 {
        return match (found.stx_dio_mem_align, found.stx_dio_offset_align) {
            (0, _) | (_, 0) => Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)),
            aligned => Ok(aligned),
        };
    }
    // Before Linux 6.1, and for file systems that do not report it: try.
    [logical, 4096]
        .into_iter()
        .find(|alignment| reads_with(file, *alignment))
        .map(|alignment| (alignment, alignment))
        .ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))
}

/// Whether a direct read with exactly this alignment of memory, offset and length succeeds.
fn reads_with(file: &File, alignment: u32) -> bool {
    let alignment = alignment as usize;
    let mut memory = vec![0u8; alignment * 4];
    let skip = memory.as_ptr().align_offset(alignment * 2) % (alignment * 2) + alignment;
    file.read_at(&mut memory[skip..skip + alignment], alignment as u64).is_ok()
}

/// Whether holes can be punched into a regular file. Tried beyond its end, where it changes
/// nothing.
fn has_holes(file: &File, size: u64) -> bool {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let beyond = size.next_multiple_of(1 << 20) as libc::off_t;
    // SAFETY: no pointer is passed.
    unsafe { libc::fallocate(file.as_raw_fd(), mode, beyond, 1 << 20) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_block_of_a_file_counts_and_a_part_of_one_on_a_device_does_not() {
        assert_eq!(capacity(1_000_123, false, 512), 1_000_448);
        assert_eq!(capacity(1_000_448, false, 512), 1_000_448);
        assert_eq!(capacity(1_000_448, true, 4096), 999_424);
    }

    #[test]
    fn odd_block_sizes_of_file_systems_are_replaced() {
        assert_eq!(sane_block_size(4096, 512), 4096);
        assert_eq!(sane_block_size(0, 512), 4096);
        assert_eq!(sane_block_size(131_072, 512), MAX_BLOCK_SIZE);
        assert_eq!(sane_block_size(12_288, 512), 4096);
        assert_eq!(sane_block_size(512, 4096), 4096);
    }

    #[test]
    fn looking_for_holes_leaves_the_file_as_it_is() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(b"abc", 0).unwrap();
        has_holes(&file, 3);
        assert_eq!(size(&file).unwrap(), 3);
    }
}
