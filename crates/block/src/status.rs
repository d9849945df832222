//! Block status: which parts of a device hold data, and which read as zeroes.

use crate::IoFuture;
use std::cell::Cell;
use std::fmt;

/// The status of a range of bytes: a small set of flags, empty for data.
///
/// The bits are those of the context `base:allocation` of NBD (`doc/proto.md`, "base: metadata
/// context").
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Status(u8);

impl Status {
    /// Data, or nothing is known: the range must be read.
    pub const DATA: Status = Status(0);
    /// No storage is allocated.
    pub const HOLE: Status = Status(1);
    /// The range reads as zeroes.
    pub const ZERO: Status = Status(2);
    /// A hole that reads as zeroes.
    pub const ZERO_HOLE: Status = Status(3);

    /// Whether every flag of `other` is set here.
    pub const fn contains(self, other: Status) -> bool {
        self.0 & other.0 == other.0
    }

    /// The flags as NBD sends them: 1 for a hole, 2 for zeroes.
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// The status that NBD's flags stand for. Other bits are ignored.
    pub const fn from_bits(bits: u32) -> Status {
        Status(bits as u8 & Status::ZERO_HOLE.0)
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(["data", "hole", "zero", "hole, zero"][usize::from(self.0)])
    }
}

/// A range of bytes with one status, behind the one before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatusExtent {
    /// Length in bytes.
    pub len: u64,
    /// The status of the bytes.
    pub status: Status,
}

/// The answer to [`crate::Channel::block_status`]: extents without gaps, in memory of the caller.
/// It holds at most [`StatusReport::MAX_EXTENTS`] extents, so a query needs no memory of its own.
///
/// ```
/// use block::{Status, StatusReport};
///
/// let report = StatusReport::new();
/// report.push(4096, Status::ZERO_HOLE);
/// report.push(4096, Status::ZERO_HOLE);
/// report.push(512, Status::DATA);
/// assert_eq!((report.len(), report.covered()), (2, 8704));
/// assert_eq!(report.extents().next().unwrap().len, 8192);
/// ```
pub struct StatusReport {
    extents: [Cell<StatusExtent>; StatusReport::MAX_EXTENTS],
    len: Cell<usize>,
    covered: Cell<u64>,
}

impl StatusReport {
    /// Limit of extents in a report.
    pub const MAX_EXTENTS: usize = 64;

    /// An empty report.
    pub fn new() -> StatusReport {
        StatusReport {
            extents: [const { Cell::new(StatusExtent { len: 0, status: Status::DATA }) }; Self::MAX_EXTENTS],
            len: Cell::new(0),
            covered: Cell::new(0),
        }
    }

    /// Appends `len` bytes. Bytes with the status of those before them extend that extent. Returns
    /// whether there was room: a device ends its answer where there is none.
    pub fn push(&self, len: u64, status: Status) -> bool {
        let count = self.len.get();
        if len == 0 {
            return true;
        }
        if let Some(last) = count.checked_sub(1).map(|last| &self.extents[last])
            && last.get().status == status
        {
            last.set(StatusExtent { len: last.get().len + len, status });
        } else if let Some(next) = self.extents.get(count) {
            next.set(StatusExtent { len, status });
            self.len.set(count + 1);
        } else {
            return false;
        }
        self.covered.set(self.covered.get() + len);
        true
    }

    /// The answer of a device that does not know where it has data: `len` bytes of data.
    pub fn answer_data(&self, len: u64) -> IoFuture<'static> {
        self.push(len, Status::DATA);
        IoFuture::ready(Ok(()))
    }

    /// The extents, in the order of the device.
    pub fn extents(&self) -> impl Iterator<Item = StatusExtent> {
        self.extents[..self.len.get()].iter().map(Cell::get)
    }

    /// Number of extents.
    pub fn len(&self) -> usize {
        self.len.get()
    }

    /// Whether there is no extent.
    pub fn is_empty(&self) -> bool {
        self.len.get() == 0
    }

    /// Number of bytes that the extents cover.
    pub fn covered(&self) -> u64 {
        self.covered.get()
    }

    /// Removes all extents.
    pub fn clear(&self) {
        self.len.set(0);
        self.covered.set(0);
    }
}

impl Default for StatusReport {
    fn default() -> Self {
        StatusReport::new()
    }
}

impl fmt::Debug for StatusReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.extents()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_report_takes_only_bytes_of_its_last_extent() {
        let report = StatusReport::new();
        for i in 0..StatusReport::MAX_EXTENTS {
            let status = if i % 2 == 0 { Status::DATA } else { Status::ZERO };
            assert!(report.push(512, status));
        }
        assert!(!report.push(512, Status::DATA));
        assert!(report.push(512, Status::ZERO) && report.push(0, Status::DATA));
        assert_eq!((report.len(), report.covered()), (64, 65 * 512));
        report.clear();
        assert!(report.is_empty() && report.covered() == 0);
    }
}
