//! Broken variants of images that are written, which the simulator must catch.
//!
//! Each mutant breaks a rule that looks dispensable. The code that keeps the rule asks [`is`]
//! whether to break it. Without the feature `mutants` the answer is a constant `false` and costs
//! nothing.

/// A broken rule. At most one is broken in the whole process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Mutant {
    /// An entry of an L2 table is written before the data of its cluster is durable.
    EntryBeforeData = 1,
    /// An entry of an L2 table is written before the refcount of its cluster.
    EntryBeforeRefcount,
    /// An entry of the refcount table is written before its block.
    RefcountTableBeforeBlock,
    /// The header names a new refcount table before that is durable.
    HeaderBeforeRefcountTable,
    /// An L1 entry is written before its L2 table is durable.
    L1BeforeL2,
    /// A cluster is free before the entry that pointed to it has changed on the disk.
    ReleaseBeforeFlush,
    /// A cluster is free while requests that began before may use it.
    ReleaseBeforeGrace,
    /// A cluster that a snapshot shares is written in place.
    SharedClusterInPlace,
    /// A flush makes data durable, and no table.
    FlushWithoutTables,
    /// A flush is answered by one that began before it.
    FlushThatBeganBefore,
    /// A flush writes tables, which a power loss may take back.
    TablesNotDurable,
    /// A write with FUA makes its data durable, and no table.
    FuaWithoutTables,
    /// The rest of a cluster that was used before keeps its old bytes.
    RestNotZeroed,
    /// The rest of a cluster that is copied is not copied.
    RestNotCopied,
    /// A write to a subcluster allocates all subclusters of its cluster.
    WholeClusterAllocated,
    /// Subclusters that a write does not touch are not copied to the new cluster.
    SubclustersNotCopied,
    /// A write to a cluster that its core had sets the entry, although another write was faster.
    CommitWithoutCompare,
    /// Subclusters of a cluster that the disk has get their bits before their data is written.
    SubclustersBeforeData,
    /// Such subclusters get their bits, although the cluster has lost its place, or they have got
    /// data meanwhile.
    SubclustersWithoutCompare,
    /// Clusters that a core had and has not used stay taken.
    LentClustersLeak,
    /// A failed write does not give its new cluster back.
    FailedWriteLeaks,
    /// The reference of an entry that changed is dropped twice.
    DroppedTwice,
    /// The references of an entry that changed stay.
    NeverDropped,
    /// A cluster is free before it is discarded.
    FreeBeforeDiscard,
    /// A search for leaks waits for no release that has begun, and frees a cluster that loses its
    /// last reference, which so becomes free twice.
    DiscardedClusterLowered,
    /// Refcounts are not written at the end.
    CloseWithoutRefcounts,
    /// An entry that was set is not in the restart log.
    EntryNotLogged,
    /// The restart log begins behind entries that a flush has not written yet.
    LogForgottenEarly,
    /// The restart log begins behind entries that it has, and that are not set yet.
    LogForgetsGroup,
    /// An entry is set before its group is in the restart log.
    GroupNotAwaited,
    /// Entries of a batch are set before they are in the restart log.
    BatchNotLogged,
    /// The restart log has room for an entry when its ring is full.
    FullLogIgnored,
    /// A restart log counts after power loss.
    LogOfEarlierStart,
    /// A restart log counts although another program has written to the image.
    LogOfOtherSession,
    /// Entries of a restart log are set, and not the refcounts of their clusters.
    RestoredWithoutRefcount,
    /// Requests change the disk while a snapshot is made.
    SnapshotWithoutHold,
    /// A snapshot is made while requests that began before change the disk.
    SnapshotWithoutGrace,
    /// Clusters that a snapshot shares still count as the disk's own.
    CopiedBitsStay,
    /// The header names a snapshot before its tables and refcounts are durable.
    HeaderBeforeSnapshot,
    /// The image is not marked as dirty while a snapshot is made.
    SnapshotNotMarked,
    /// A dirty image is repaired although a restart log has writes that it lacks.
    RepairBeforeRestore,
    /// A search for clusters that leak does not know those that are taken meanwhile.
    ChangesDuringSearch,
    /// A write sets no bit of a dirty bitmap.
    WriteNotMarked,
    /// A discard or a write of zeroes sets no bit of a dirty bitmap.
    ClearNotMarked,
    /// A bitmap that writes change is not marked as in use.
    BitmapNotInUse,
    /// A write comes before the mark of a bitmap as in use is durable.
    BitmapInUseNotDurable,
    /// The table of a bitmap names a cluster before its refcount is written.
    BitmapTableBeforeRefcount,
    /// A bitmap is no longer in use before its table is durable.
    BitmapSavedBeforeTable,
    /// A stream removes the backing file that internal snapshots need.
    StreamUnderSnapshots,
    /// A stream removes the name of the backing file before its data is in durable tables.
    StreamWithoutFlush,
    /// The backing file is read after the end of a stream.
    StreamWithoutGrace,
    /// A commit writes to a cluster of the backing file of which the image lacks data.
    CommitNotCompleted,
    /// A commit writes to such a cluster if what the image lacks reads as zeroes.
    CommitWithoutZeroes,
    /// A commit writes to a cluster of the backing file while requests may read data there.
    CommitWithoutGrace,
}

impl Mutant {
    /// Every mutant.
    pub const ALL: [Mutant; 54] = [
        Mutant::EntryBeforeData,
        Mutant::EntryBeforeRefcount,
        Mutant::RefcountTableBeforeBlock,
        Mutant::HeaderBeforeRefcountTable,
        Mutant::L1BeforeL2,
        Mutant::ReleaseBeforeFlush,
        Mutant::ReleaseBeforeGrace,
        Mutant::SharedClusterInPlace,
        Mutant::FlushWithoutTables,
        Mutant::FlushThatBeganBefore,
        Mutant::TablesNotDurable,
        Mutant::FuaWithoutTables,
        Mutant::RestNotZeroed,
        Mutant::RestNotCopied,
        Mutant::WholeClusterAllocated,
        Mutant::SubclustersNotCopied,
        Mutant::CommitWithoutCompare,
        Mutant::SubclustersBeforeData,
        Mutant::SubclustersWithoutCompare,
        Mutant::LentClustersLeak,
        Mutant::FailedWriteLeaks,
        Mutant::DroppedTwice,
        Mutant::NeverDropped,
        Mutant::FreeBeforeDiscard,
        Mutant::DiscardedClusterLowered,
        Mutant::CloseWithoutRefcounts,
        Mutant::EntryNotLogged,
        Mutant::LogForgottenEarly,
        Mutant::LogForgetsGroup,
        Mutant::GroupNotAwaited,
        Mutant::BatchNotLogged,
        Mutant::FullLogIgnored,
        Mutant::LogOfEarlierStart,
        Mutant::LogOfOtherSession,
        Mutant::RestoredWithoutRefcount,
        Mutant::SnapshotWithoutHold,
        Mutant::SnapshotWithoutGrace,
        Mutant::CopiedBitsStay,
        Mutant::HeaderBeforeSnapshot,
        Mutant::SnapshotNotMarked,
        Mutant::RepairBeforeRestore,
        Mutant::ChangesDuringSearch,
        Mutant::WriteNotMarked,
        Mutant::ClearNotMarked,
        Mutant::BitmapNotInUse,
        Mutant::BitmapInUseNotDurable,
        Mutant::BitmapTableBeforeRefcount,
        Mutant::BitmapSavedBeforeTable,
        Mutant::StreamUnderSnapshots,
        Mutant::StreamWithoutFlush,
        Mutant::StreamWithoutGrace,
        Mutant::CommitNotCompleted,
        Mutant::CommitWithoutZeroes,
        Mutant::CommitWithoutGrace,
    ];
}

base::choice_of_mutant!(Mutant);
