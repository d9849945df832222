//! The properties of an image that all its cores know.

use super::bitmaps::LiveBitmaps;
use crate::entry::{BadEntry, COPIED, Geometry};
use crate::header::{Header, autoclear};
use block::{Device, IoError};
use mapping::ENTRIES;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of a word of an L2 entry.
pub(super) const WORD: u64 = 8;

/// See the module. As a table of [`mapping`] it has the words of all L2 entries: one for each
/// cluster of the disk, or two.
pub(super) struct Metadata {
    pub image: Arc<dyn Device>,
    /// The external data file, if there is one.
    pub data_file: Option<Arc<dyn Device>>,
    /// Its bytes.
    pub data_bytes: Option<u64>,
    pub header: Header,
    pub geometry: Geometry,
    pub backing: Arc<BackingState>,
    /// Bytes of the disk, in whole blocks.
    pub disk_bytes: u64,
    /// Block size of the image's device.
    pub block_size: u64,
    /// The active L1 table. The home core changes it.
    pub l1: Box<[AtomicU64]>,
    /// Places of metadata that do not move: offset and length.
    pub fixed: Vec<(u64, u64)>,
    /// The dirty bitmaps, if there are any.
    pub bitmaps: Option<LiveBitmaps>,
    /// Bytes of the image's file.
    pub capacity: Arc<AtomicU64>,
    /// Entries that were set so far. Counted before each is set, and after its data was written.
    pub set: AtomicU64,
    /// Of so many entries data and refcounts are durable.
    pub settled: AtomicU64,
    /// So many entries are durable themselves.
    pub flushed: AtomicU64,
    /// Failed changes of clusters that the disk kept. Data that another write has put there
    /// meanwhile may be lost.
    pub failed: AtomicU64,
    /// Metadata contradicts itself: the disk is only read.
    pub is_corrupt: AtomicBool,
}

/// The backing device of an image that is in use, and the job that works on it.
#[derive(Debug, Default)]
pub(super) struct BackingState {
    /// Whether clusters without a place are read from it.
    pub is_used: AtomicBool,
    job: Mutex<Option<BackingJob>>,
    /// A stream: the image has the data of all bytes before this one.
    pub copied: AtomicU64,
}

/// A job on an image and its backing file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BackingJob {
    /// The image gets the data of the backing file.
    Stream,
    /// The backing file gets the data of the image.
    Commit,
}

impl BackingState {
    pub fn new(is_used: bool) -> BackingState {
        BackingState { is_used: AtomicBool::new(is_used), ..BackingState::default() }
    }

    /// The job in progress.
    pub fn job(&self) -> Option<BackingJob> {
        *self.job.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn set_job(&self, job: Option<BackingJob>) {
        *self.job.lock().unwrap_or_else(PoisonError::into_inner) = job;
    }

    /// Whether there is a backing device.
    pub fn is_used(&self) -> bool {
        self.is_used.load(Ordering::Acquire)
    }

    /// Whether its data is copied at the moment.
    pub fn is_streaming(&self) -> bool {
        self.job() == Some(BackingJob::Stream)
    }
}

impl Metadata {
    /// Whether tables have changes that are not durable.
    pub fn is_dirty(&self) -> bool {
        self.flushed.load(Ordering::Relaxed) != self.set.load(Ordering::Relaxed)
    }

    /// Whether the disk is only read, because its metadata contradicts itself.
    pub fn is_corrupt(&self) -> bool {
        self.is_corrupt.load(Ordering::Relaxed)
    }

    /// The L2 table at `index` of the L1 table, and whether only the disk refers to it.
    ///
    /// # Errors
    /// [`IoError::Corrupt`] for an invalid entry.
    pub fn table(&self, index: usize) -> Result<Option<(u64, bool)>, IoError> {
        let Some(entry) = self.l1.get(index) else { return Ok(None) };
        let entry = entry.load(Ordering::Acquire);
        let table = self.geometry.l2_table(entry).map_err(|BadEntry| IoError::Corrupt)?;
        Ok(table.map(|table| (table, entry & COPIED != 0)))
    }

    /// Bytes of the device with the data.
    pub fn data_end(&self) -> u64 {
        self.data_bytes.unwrap_or_else(|| self.capacity.load(Ordering::Relaxed))
    }

    /// Whether the data file has the bytes of the disk, whatever entries say.
    pub fn has_raw_data(&self) -> bool {
        self.header.autoclear & autoclear::RAW_DATA != 0
    }

    /// Longest discard of the data file.
    pub fn most_data_discard(&self) -> u64 {
        self.data_file.as_ref().map_or(0, |file| file.limits().max_discard)
    }

    /// The parts of a leaf's slots in each L2 table: index in the L1 table, byte in the L2 table,
    /// and slots.
    pub fn parts(&self, leaf: u64, slots: Range<usize>) -> impl Iterator<Item = (usize, u64, Range<usize>)> {
        let per_table = self.geometry.cluster_size() / WORD;
        let first = leaf * ENTRIES as u64;
        let mut at = slots.start;
        std::iter::from_fn(move || {
            if at >= slots.end {
                return None;
            }
            let entry = first + at as u64;
            let rest = (per_table - entry % per_table).min((slots.end - at) as u64) as usize;
            let part = at..at + rest;
            at += rest;
            Some(((entry / per_table) as usize, entry % per_table * WORD, part))
        })
    }
}
