//! Zeroes to write when a device cannot write zeroes itself.

use block::Segment;

/// Bytes of zeroes written in one step.
pub const ZERO_STEP: usize = 1 << 20;
/// Bytes of zeroes in one segment.
pub const ZERO_PAGE_LEN: usize = 64 << 10;

#[repr(align(4096))]
struct ZeroPages {
    _bytes: [u8; ZERO_PAGE_LEN],
}

static ZEROES: ZeroPages = ZeroPages { _bytes: [0; ZERO_PAGE_LEN] };

struct ZeroList([Segment; ZERO_STEP / ZERO_PAGE_LEN]);

// SAFETY: the memory is never written, not even through the pointers.
unsafe impl Sync for ZeroList {}

static LIST: ZeroList = ZeroList(
    [Segment { base: (&raw const ZEROES).cast::<u8>().cast_mut(), len: ZERO_PAGE_LEN };
        ZERO_STEP / ZERO_PAGE_LEN],
);

/// [`ZERO_STEP`] bytes in segments that all point at the same zeroes, which must not be written to.
pub fn zero_segments() -> &'static [Segment] {
    &LIST.0
}
