//! From a byte of the disk to its place: L1 table, slices of L2 tables, entries.

use crate::cache::{Budget, Cache};
use crate::entry::{BadEntry, Geometry, OFFSET, Place};
use crate::image::Image;
use crate::reader::Reader;
use block::IoError;
use std::cell::RefCell;
use std::rc::Rc;

/// Bytes of an L2 table that are read and cached together.
const SLICE: u64 = 4096;

/// The tables of an open image, shared by all cores. They never change.
pub(crate) struct Tables {
    pub(crate) geometry: Geometry,
    l1: Box<[u64]>,
    /// Size of the disk in bytes.
    size: u64,
    budget: Budget,
}

/// A run of bytes of the disk with one kind of place, without a gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The place of its first byte.
    pub place: Place,
    /// Length in bytes.
    pub len: u64,
}

impl Tables {
    /// The tables of `image`, of which all cores cache at most `cache_bytes`.
    pub(crate) fn new(image: &Image, cache_bytes: u64) -> Tables {
        let budget = Budget::new(cache_bytes);
        Tables { geometry: image.geometry(), l1: image.l1.clone(), size: image.size, budget }
    }

    /// Bytes of a slice.
    fn slice_bytes(&self) -> u64 {
        SLICE.min(self.geometry.cluster_size())
    }

    /// Bytes of the disk that a slice maps.
    fn slice_span(&self) -> u64 {
        self.slice_bytes() / self.geometry.entry_bytes() as u64 * self.geometry.cluster_size()
    }

    fn l2_span(&self) -> u64 {
        self.geometry.l2_entries() * self.geometry.cluster_size()
    }

    /// The first byte of the L2 table for byte `offset` of the disk; `None` if there is no table.
    fn l2_offset(&self, offset: u64) -> Result<Option<u64>, IoError> {
        let entry = *self.l1.get((offset / self.l2_span()) as usize).ok_or(IoError::OutOfRange)?;
        self.geometry.l2_table(entry).map_err(|BadEntry| IoError::Corrupt)
    }

    /// The run without an L2 table that starts at `offset`: up to the next table or `end`.
    fn without_table(&self, offset: u64, end: u64) -> Run {
        let mut stop = offset - offset % self.l2_span() + self.l2_span();
        while stop < end && self.l1.get((stop / self.l2_span()) as usize).is_some_and(|e| e & OFFSET == 0) {
            stop += self.l2_span();
        }
        Run { place: Place::Unallocated, len: stop.min(end) - offset }
    }

    /// The run that starts at `offset` in this slice: up to a change, the slice's end, or `end`.
    fn in_slice(&self, slice: &[u8], offset: u64, end: u64) -> Result<Run, IoError> {
        let (cluster_size, entry_bytes) = (self.geometry.cluster_size(), self.geometry.entry_bytes());
        let place_at = |at: u64| {
            let within = at % cluster_size;
            let index = (at % self.slice_span() / cluster_size) as usize;
            let entry = self.geometry.entry(slice, index * entry_bytes);
            self.geometry.place(entry, at - within, within).map_err(|BadEntry| IoError::Corrupt)
        };
        let (place, mut len) = place_at(offset)?;
        let stop = (offset - offset % self.slice_span() + self.slice_span()).min(end);
        while offset + len < stop {
            // An entry that is damaged is an error of the requests that reach it.
            match place_at(offset + len) {
                Ok((next, more)) if place.continues(len, next) => len += more,
                _ => break,
            }
        }
        Ok(Run { place, len: len.min(end - offset) })
    }
}

/// The lookups of one core.
pub(crate) struct Lookup {
    cache: Cache,
    /// Number and bytes of the slice that was used last.
    last: RefCell<Option<(u64, Rc<[u8]>)>>,
}

impl Lookup {
    pub(crate) fn new(tables: &Tables) -> Lookup {
        Lookup { cache: Cache::new(tables.budget.clone(), usize::MAX), last: RefCell::default() }
    }

    /// The run at `offset`, at most `len` bytes, if it needs no I/O. The range is on the disk.
    #[inline]
    pub(crate) fn try_run(&self, tables: &Tables, offset: u64, len: u64) -> Option<Result<Run, IoError>> {
        let number = offset / tables.slice_span();
        if let Some((last, slice)) = &*self.last.borrow()
            && *last == number
        {
            return Some(tables.in_slice(slice, offset, offset + len));
        }
        self.try_cached(tables, number, offset, len)
    }

    fn try_cached(
        &self,
        tables: &Tables,
        number: u64,
        offset: u64,
        len: u64,
    ) -> Option<Result<Run, IoError>> {
        match tables.l2_offset(offset) {
            Err(error) => return Some(Err(error)),
            Ok(None) => return Some(Ok(tables.without_table(offset, offset + len))),
            Ok(Some(_)) => {}
        }
        let slice = self.cache.get(number)?;
        let run = tables.in_slice(&slice, offset, offset + len);
        *self.last.borrow_mut() = Some((number, slice));
        Some(run)
    }

    /// The run at `offset`, at most `len` bytes. The range is on the disk.
    ///
    /// # Errors
    /// [`IoError::Corrupt`] when a table is invalid or not in the file, or the device's error.
    pub(crate) async fn run(
        &self,
        tables: &Tables,
        reader: &Reader,
        offset: u64,
        len: u64,
    ) -> Result<Run, IoError> {
        debug_assert!(offset + len <= tables.size.next_multiple_of(512));
        if let Some(run) = self.try_run(tables, offset, len) {
            return run;
        }
        let table = tables.l2_offset(offset)?.ok_or(IoError::Corrupt)?;
        let (number, span) = (offset / tables.slice_span(), tables.slice_span());
        let at = table + offset % tables.l2_span() / span * tables.slice_bytes();
        let load = async { reader.read_named(at, tables.slice_bytes()).await.map(Rc::from) };
        let slice = self.cache.get_or_load(number, load).await?;
        let run = tables.in_slice(&slice, offset, offset + len);
        *self.last.borrow_mut() = Some((number, slice));
        run
    }
}
