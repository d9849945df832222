//! Fields of the header that change while the image is in use.

use crate::header::Header;

/// The mark in the header of the program that writes the image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Mark {
    /// The session of the restart log; 0 for none.
    pub session: u32,
    /// Whether other programs must repair the image first.
    pub is_dirty: bool,
}

/// Where the snapshot table is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SnapshotPlace {
    pub count: u32,
    pub offset: u64,
}

impl SnapshotPlace {
    /// The place that a header names.
    pub(super) fn of(header: &Header) -> SnapshotPlace {
        SnapshotPlace { count: header.snapshot_count, offset: header.snapshots_offset }
    }

    /// Whether there is a snapshot.
    pub(super) fn is_used(self) -> bool {
        self.count > 0
    }
}
