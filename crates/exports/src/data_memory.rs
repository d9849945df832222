//! Memory for the data of a request, between a client and a device.

use block::Data;

/// Memory for the data of one request.
///
/// # Safety
/// [`DataMemory::data`] describes [`DataMemory::len`] bytes that the value owns. They stay where
/// they are until it is dropped, also when it moves, and no client reaches them.
#[expect(clippy::len_without_is_empty, reason = "a request with data has some")]
pub unsafe trait DataMemory {
    /// The length in bytes.
    fn len(&self) -> usize;

    /// The memory as request data.
    ///
    /// # Safety
    /// As [`Data::new`]: this must live until every request with it has completed. No other code
    /// may access the bytes meanwhile.
    unsafe fn data(&self) -> Data<'_>;

    /// Copies as many of `bytes` as fit to offset `from`. Returns how many.
    fn fill(&mut self, from: usize, bytes: &[u8]) -> usize {
        let len = bytes.len().min(self.len() - from);
        // SAFETY: no request has this memory yet: it is borrowed exclusively.
        unsafe { self.data() }.part(from, len).copy_from(&bytes[..len])
    }

    /// Copies the first bytes to `to`.
    fn copy_to(&mut self, to: &mut [u8]) {
        let mut at = 0;
        self.look(0, to.len(), |piece| {
            to[at..at + piece.len()].copy_from_slice(piece);
            at += piece.len();
        });
    }

    /// Passes `len` bytes from `start` on to `see`, piece by piece.
    fn look(&mut self, start: usize, len: usize, mut see: impl FnMut(&[u8])) {
        // SAFETY: no request has this memory now: it is borrowed exclusively.
        let data = unsafe { self.data() };
        for piece in data.part(start, len).iter() {
            // SAFETY: a piece is part of this memory, and nothing writes there meanwhile.
            see(unsafe { std::slice::from_raw_parts(piece.base, piece.len) });
        }
    }
}
