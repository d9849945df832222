//! Windows onto the memory of a request's caller.

use std::marker::PhantomData;

/// One segment of caller memory, laid out as C's `struct iovec`. It may be guest memory: volatile,
/// shared and hostile, so it is never turned into a slice.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First byte.
    pub base: *mut u8,
    /// Length in bytes.
    pub len: usize,
}

/// A buffer of the kernel in the table of an io_uring. This process cannot read or write its bytes:
/// only operations of that ring can use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegisteredBuffer {
    /// The number of the ring among those of the calling core.
    pub ring: u32,
    /// The buffer's place in the ring's table.
    pub index: u16,
    /// First byte of the window inside the buffer.
    pub offset: usize,
    /// Length of the window in bytes.
    pub len: usize,
}

/// A window onto a caller's segment list, or onto a [`RegisteredBuffer`]. Splitting a request
/// copies 32 bytes, never the list.
///
/// Only devices that say so ([`crate::Device::takes_registered`]) get windows onto registered
/// buffers. Every access to bytes ends in [`Segments`], which panics for such a window.
#[derive(Clone, Copy)]
pub struct Data<'a> {
    /// For a registered buffer an aligned number that is never read through: see
    /// [`Data::registered`].
    segments: *const Segment,
    /// 0 for a registered buffer.
    count: u32,
    is_stable: bool,
    is_registered: bool,
    /// The place of a registered buffer.
    index: u16,
    skip: usize,
    len: usize,
    borrow: PhantomData<&'a [Segment]>,
}

impl<'a> Data<'a> {
    /// A window onto all of `segments`.
    ///
    /// # Safety
    /// The list and the memory behind it stay valid until every request that carries this window,
    /// or a part of it, has completed. This holds even when the borrow `'a` ends earlier.
    /// Until then no Rust reference to that memory exists (for a write: no mutable one).
    pub unsafe fn new(segments: &'a [Segment]) -> Self {
        let len = segments.iter().map(|s| s.len).sum();
        let count = u32::try_from(segments.len()).expect("a request has fewer than 2^32 segments");
        let segments = segments.as_ptr();
        Data { segments, count, len, ..Data::none() }
    }

    /// A window onto all of one segment.
    ///
    /// # Safety
    /// As [`Data::new`].
    #[inline]
    pub const unsafe fn one(segment: &'a Segment) -> Self {
        Data { segments: segment, count: 1, len: segment.len, ..Data::none() }
    }

    /// A window onto `len` bytes of a buffer that is registered as `index` with the calling core's
    /// ring number `ring`.
    ///
    /// The caller keeps the ring open and the buffer in its table until every request that
    /// carries this window, or a part of it, has completed. The window reaches no memory of
    /// this process, so a breach is not unsafe; the kernel then refuses the operation, or uses
    /// another buffer. The device takes registered buffers
    /// ([`crate::Device::takes_registered`]).
    #[inline]
    pub const fn registered(ring: u32, index: u16, len: usize) -> Data<'static> {
        // Aligned and not null, as an empty list of segments must be.
        let segments = std::ptr::without_provenance((ring as usize + 1) * align_of::<Segment>());
        Data { segments, is_registered: true, index, len, ..Data::none() }
    }

    /// The registered buffer and the window's place in it; `None` for memory.
    #[inline]
    pub fn as_registered(&self) -> Option<RegisteredBuffer> {
        let Data { index, skip: offset, len, .. } = *self;
        let ring = || (self.segments.addr() / align_of::<Segment>() - 1) as u32;
        self.is_registered.then(|| RegisteredBuffer { ring: ring(), index, offset, len })
    }

    /// Whether the window is onto a registered buffer, whose bytes this process cannot use.
    #[inline]
    pub const fn is_registered(&self) -> bool {
        self.is_registered
    }

    /// The same window, marked as stable memory. A layer that needs the content more than once, as
    /// RAID does for parity and mirrors, reads it in place and makes no copy.
    ///
    /// # Safety
    /// No code writes to the memory while a write request carries this window or a part of it.
    /// Memory that a guest, a client or a C caller can write to is never stable.
    #[inline]
    #[must_use]
    pub const unsafe fn stable(self) -> Self {
        Data { is_stable: true, ..self }
    }

    /// Whether the memory of a write keeps its content until the write has completed
    /// ([`Data::stable`]).
    #[inline]
    pub const fn is_stable(&self) -> bool {
        self.is_stable
    }

    /// A window without memory.
    pub const fn none() -> Self {
        Data {
            segments: std::ptr::NonNull::dangling().as_ptr(),
            count: 0,
            is_stable: false,
            is_registered: false,
            index: 0,
            skip: 0,
            len: 0,
            borrow: PhantomData,
        }
    }

    /// Bytes in the window.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether the window holds no byte.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The window that starts `from` bytes into this one and is `len` bytes long. Walks over the
    /// segments before it.
    ///
    /// # Panics
    /// If the part does not lie inside the window.
    pub fn part(self, from: usize, len: usize) -> Self {
        assert!(
            from.checked_add(len).is_some_and(|end| end <= self.len),
            "part {from}+{len} of {}",
            self.len
        );
        let mut part = Data { skip: self.skip + from, len, ..self };
        while let Some(first) = part.list().first() {
            if part.skip < first.len {
                break;
            }
            part.skip -= first.len;
            // SAFETY: the list has a first element, so one past it is in bounds.
            part.segments = unsafe { part.segments.add(1) };
            part.count -= 1;
        }
        part
    }

    /// The segments in the window, first and last trimmed to it. The iterator panics if the
    /// window is onto a registered buffer.
    pub fn iter(&self) -> Segments<'a> {
        Segments { list: self.list(), skip: self.skip, left: self.len }
    }

    /// Number of segments that the window touches. Walks the list. A registered buffer counts as
    /// one.
    pub fn segment_count(&self) -> usize {
        if self.is_registered { 1 } else { self.iter().count() }
    }

    /// The caller's own list if the window starts and ends on segment borders. It can be passed to
    /// the kernel without a copy.
    pub fn as_whole_list(&self) -> Option<&'a [Segment]> {
        let list = self.list();
        (self.skip == 0 && list.iter().map(|s| s.len).sum::<usize>() == self.len).then_some(list)
    }

    /// The memory of a window within one segment, else `None`.
    pub fn as_single(&self) -> Option<Segment> {
        let first = self.list().first()?;
        (first.len >= self.skip + self.len)
            .then(|| Segment { base: first.base.wrapping_add(self.skip), len: self.len })
    }

    /// Whether every segment starts and ends on a multiple of `alignment` (a power of two).
    pub fn is_aligned(&self, alignment: usize) -> bool {
        let bits = self.iter().fold(0, |bits, s| bits | s.base.addr() | s.len);
        bits & (alignment - 1) == 0
    }

    /// Copies the window's first bytes into `target`; returns the number of bytes copied.
    pub fn copy_to(&self, target: &mut [u8]) -> usize {
        let mut done = 0;
        for s in self.iter() {
            let n = s.len.min(target.len() - done);
            // SAFETY: `s` is valid by the contract of `new`, and the target is ours. A guest may
            // write during the copy, which then holds a mix of its bytes: the device model allows
            // that.
            unsafe { std::ptr::copy_nonoverlapping(s.base, target[done..].as_mut_ptr(), n) };
            done += n;
        }
        done
    }

    /// Copies `source` into the window's first bytes; returns the number of bytes copied.
    pub fn copy_from(&self, source: &[u8]) -> usize {
        let mut done = 0;
        for s in self.iter() {
            let n = s.len.min(source.len() - done);
            // SAFETY: as in `copy_to`.
            unsafe { std::ptr::copy_nonoverlapping(source[done..].as_ptr(), s.base, n) };
            done += n;
        }
        done
    }

    /// Fills the window with `byte`.
    pub fn fill(&self, byte: u8) {
        for s in self.iter() {
            // SAFETY: as in `copy_to`.
            unsafe { std::ptr::write_bytes(s.base, byte, s.len) };
        }
    }

    fn list(&self) -> &'a [Segment] {
        // SAFETY: `segments` and `count` come from a slice that lives for `'a`, less what `part`
        // skipped.
        unsafe { std::slice::from_raw_parts(self.segments, self.count as usize) }
    }
}

impl std::fmt::Debug for Data<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Data").field("len", &self.len).field("segments", &self.segment_count()).finish()
    }
}

/// The segments of a [`Data`], trimmed to its window; none is empty. All access to bytes goes
/// through it.
///
/// # Panics
/// When it is advanced over a registered buffer, which only a device without
/// [`crate::Device::takes_registered`] does.
#[derive(Clone)]
pub struct Segments<'a> {
    list: &'a [Segment],
    skip: usize,
    left: usize,
}

impl Iterator for Segments<'_> {
    type Item = Segment;

    #[inline]
    fn next(&mut self) -> Option<Segment> {
        while self.left > 0 {
            // A window onto memory ends with its list or before it.
            let Some((first, rest)) = self.list.split_first() else { no_bytes(self.left) };
            self.list = rest;
            let skip = std::mem::take(&mut self.skip);
            if first.len > skip {
                let len = (first.len - skip).min(self.left);
                self.left -= len;
                return Some(Segment { base: first.base.wrapping_add(skip), len });
            }
            self.skip = skip - first.len;
        }
        None
    }
}

#[cold]
fn no_bytes(len: usize) -> ! {
    panic!("access to {len} bytes of a registered buffer, which only its ring can use");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segments(buffers: &mut [Vec<u8>]) -> Vec<Segment> {
        buffers.iter_mut().map(|b| Segment { base: b.as_mut_ptr(), len: b.len() }).collect()
    }

    #[test]
    fn a_part_of_a_part_is_the_part_of_the_whole() {
        let mut buffers = [vec![0u8; 3], vec![], vec![0; 5], vec![0; 8]];
        let list = segments(&mut buffers);
        // SAFETY: the buffers outlive the windows.
        let whole = unsafe { Data::new(&list) };
        let source: Vec<u8> = (0..16).collect();
        assert_eq!(whole.copy_from(&source), 16);
        for from in 0..=16 {
            for len in 0..=16 - from {
                let part = whole.part(from, len);
                let mut got = vec![0; len];
                assert_eq!(part.copy_to(&mut got), len);
                assert_eq!(got, source[from..from + len]);
                for inner in 0..=len {
                    let mut got = vec![0; len - inner];
                    part.part(inner, len - inner).copy_to(&mut got);
                    assert_eq!(got, source[from + inner..from + len]);
                }
            }
        }
    }

    #[test]
    fn only_a_window_on_segment_borders_is_a_whole_list() {
        let mut buffers = [vec![0u8; 4], vec![0; 4]];
        let list = segments(&mut buffers);
        // SAFETY: the buffers outlive the windows.
        let whole = unsafe { Data::new(&list) };
        assert!(whole.as_whole_list().is_some());
        assert!(whole.part(1, 3).as_whole_list().is_none());
        assert_eq!(whole.part(4, 4).as_whole_list().map(<[_]>::len), Some(1));
        assert_eq!(whole.part(1, 2).as_single().map(|s| s.len), Some(2));
        assert!(whole.part(3, 2).as_single().is_none());
    }

    #[test]
    fn a_part_of_stable_memory_is_stable() {
        let mut buffers = [vec![0u8; 4], vec![0; 4]];
        let list = segments(&mut buffers);
        // SAFETY: the buffers outlive the windows, and nothing writes to them.
        let (plain, stable) = unsafe { (Data::new(&list), Data::new(&list).stable()) };
        assert!(!plain.is_stable() && !plain.part(1, 6).is_stable());
        assert!(stable.is_stable() && stable.part(1, 6).part(4, 1).is_stable());
        assert!(size_of::<Data<'_>>() == 32);
    }

    #[test]
    fn fill_touches_nothing_outside_the_window() {
        let mut buffers = [vec![1u8; 4], vec![1; 4]];
        let list = segments(&mut buffers);
        // SAFETY: the buffers outlive the windows.
        unsafe { Data::new(&list) }.part(2, 4).fill(0);
        assert_eq!(buffers, [vec![1, 1, 0, 0], vec![0, 0, 1, 1]]);
    }

    #[test]
    #[should_panic(expected = "part 9+0 of 8")]
    fn a_part_outside_the_window_is_refused() {
        let mut buffers = [vec![1u8; 8]];
        let list = segments(&mut buffers);
        // SAFETY: the buffers outlive the windows.
        unsafe { Data::new(&list) }.part(9, 0);
    }

    #[test]
    fn a_part_of_a_registered_buffer_is_its_range() {
        let whole = Data::registered(7, 300, 4096);
        let buffer = |offset, len| Some(RegisteredBuffer { ring: 7, index: 300, offset, len });
        assert_eq!(whole.as_registered(), buffer(0, 4096));
        assert_eq!(whole.part(512, 2048).part(512, 1024).as_registered(), buffer(1024, 1024));
        assert!(whole.is_registered() && !whole.is_stable() && !whole.is_empty());
        assert_eq!((whole.len(), whole.segment_count()), (4096, 1));
        assert!(whole.as_single().is_none() && whole.as_whole_list().is_none());
        assert!(Data::none().as_registered().is_none());
        assert_eq!(format!("{whole:?}"), "Data { len: 4096, segments: 1 }");
        assert_eq!(whole.part(4096, 0).iter().count(), 0);
    }

    #[test]
    #[should_panic(expected = "access to 4096 bytes of a registered buffer")]
    fn bytes_of_a_registered_buffer_cannot_be_filled() {
        Data::registered(0, 0, 4096).fill(0);
    }

    #[test]
    #[should_panic(expected = "access to 4096 bytes of a registered buffer")]
    fn bytes_of_a_registered_buffer_cannot_be_copied() {
        Data::registered(0, 0, 4096).copy_to(&mut [0; 512]);
    }

    #[test]
    #[should_panic(expected = "access to 512 bytes of a registered buffer")]
    fn the_alignment_of_a_registered_buffer_is_not_known() {
        Data::registered(0, 0, 512).is_aligned(512);
    }
}
