//! The device's requirements of requests, checked before a request is queued. The sentences for
//! requests that fail are made once, so that a completion can point at them.

use crate::segments::Memory;
use block::{IoError, Op, Segment};
use drivers::blkio::{Capacity, Codes, Properties};
use std::ffi::{CStr, CString};
use std::sync::atomic::{AtomicU64, Ordering};

/// Longest transfer whatever the device says: lengths of 32 bits travel far.
const MAX_TRANSFER: u64 = u32::MAX as u64;
/// Where every device ends: offsets are signed in system calls.
const MAX_END: u64 = i64::MAX as u64;

/// Why the library itself refuses a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Refusal {
    UnknownFlags,
    Fua,
    NoUnmap,
    NoFallback,
    ReadOnly,
    OutOfRange,
    RequestAlignment,
    BufAlignment,
    TooManySegments,
    SegmentTooLong,
    TransferTooLong,
    DiscardTooLong,
    WriteZeroesTooLong,
    NullMemory,
    NoLength,
}

impl Refusal {
    const ALL: [Refusal; 15] = [
        Refusal::UnknownFlags,
        Refusal::Fua,
        Refusal::NoUnmap,
        Refusal::NoFallback,
        Refusal::ReadOnly,
        Refusal::OutOfRange,
        Refusal::RequestAlignment,
        Refusal::BufAlignment,
        Refusal::TooManySegments,
        Refusal::SegmentTooLong,
        Refusal::TransferTooLong,
        Refusal::DiscardTooLong,
        Refusal::WriteZeroesTooLong,
        Refusal::NullMemory,
        Refusal::NoLength,
    ];

    fn errno(self, codes: Codes) -> i32 {
        match (self, codes) {
            (Refusal::ReadOnly, _) => libc::EBADF,
            (Refusal::NullMemory, Codes::Kernel) => libc::EFAULT,
            (Refusal::OutOfRange, Codes::Virtio) => libc::EIO,
            _ => libc::EINVAL,
        }
    }

    fn text(self, p: &Properties) -> String {
        let limit = |what: &str, name: &str| format!("{what} {name} ({})", limit_text(p, name));
        let other_op = |flag: &str| format!("{flag} is invalid for this request type");
        match self {
            // Programs compare these four with libblkio's texts.
            Refusal::UnknownFlags => "unsupported bits in request flags".into(),
            Refusal::Fua => other_op("BLKIO_REQ_FUA"),
            Refusal::NoUnmap => other_op("BLKIO_REQ_NO_UNMAP"),
            Refusal::NoFallback => other_op("BLKIO_REQ_NO_FALLBACK"),
            Refusal::ReadOnly => "the device is read-only".into(),
            Refusal::OutOfRange => "the request reaches beyond the end of the device".into(),
            Refusal::RequestAlignment => limit("start and length must be multiples of", "request-alignment"),
            Refusal::BufAlignment => {
                limit("buffer addresses and lengths must be multiples of", "buf-alignment")
            }
            Refusal::TooManySegments => limit("iovcnt is negative or larger than", "max-segments"),
            Refusal::SegmentTooLong => limit("an iovec is longer than", "max-segment-len"),
            Refusal::TransferTooLong => limit("the request is longer than", "max-transfer"),
            Refusal::DiscardTooLong => limit("the discard is longer than", "max-discard-len"),
            Refusal::WriteZeroesTooLong => {
                limit("the write zeroes request is longer than", "max-write-zeroes-len")
            }
            Refusal::NullMemory => "the buffer is a null pointer".into(),
            Refusal::NoLength => "the length is 0".into(),
        }
    }
}

fn limit_text(p: &Properties, name: &str) -> String {
    let value = p.get(name, crate::State::Started).map(ToString::to_string).unwrap_or_default();
    if value == "0" { MAX_TRANSFER.to_string() } else { value }
}

/// The device's requirements of requests.
pub(crate) struct Rules {
    codes: Codes,
    read_only: bool,
    can_grow: bool,
    /// Bits that must be 0 in a request's start and length.
    request_mask: u64,
    /// Bits that must be 0 in a buffer's address and length.
    buf_mask: usize,
    max_segments: usize,
    max_segment_len: usize,
    max_transfer: u64,
    max_discard: u64,
    max_write_zeroes: u64,
    /// Where the last request must end: the capacity, or as far as a file can grow.
    end: AtomicU64,
    ask_capacity: Capacity,
    messages: Box<[CString]>,
    unmapped: Option<&'static CStr>,
}

impl Rules {
    pub fn new(p: &Properties, codes: Codes, ask_capacity: Capacity) -> Rules {
        let can_grow = p.bool("can-grow");
        let mask = |name: &str| (p.int(name).max(1) as u64).next_power_of_two() - 1;
        let or_unlimited = |value: u64| if value == 0 { u64::MAX } else { value };
        let positive = |name: &str| or_unlimited(p.int(name).max(0) as u64);
        Rules {
            codes,
            read_only: p.bool("read-only"),
            can_grow,
            request_mask: mask("request-alignment"),
            buf_mask: mask("buf-alignment") as usize,
            max_segments: p.int("max-segments").max(1) as usize,
            max_segment_len: positive("max-segment-len") as usize,
            max_transfer: positive("max-transfer").min(MAX_TRANSFER),
            max_discard: or_unlimited(p.uint64("max-discard-len")),
            max_write_zeroes: or_unlimited(p.uint64("max-write-zeroes-len")),
            end: AtomicU64::new(if can_grow { MAX_END } else { ask_capacity().unwrap_or(0).min(MAX_END) }),
            ask_capacity,
            messages: Refusal::ALL.iter().map(|r| CString::new(r.text(p)).unwrap_or_default()).collect(),
            unmapped: p
                .bool("needs-mem-regions")
                .then_some(c"malformed request, or its buffer is not within one mapped memory region"),
        }
    }

    /// The sentence for a refusal.
    pub fn message(&self, refusal: Refusal) -> &CStr {
        &self.messages[refusal as usize]
    }

    /// The error code for a refusal, positive.
    pub fn errno(&self, refusal: Refusal) -> i32 {
        refusal.errno(self.codes)
    }

    /// The sentence for what the device answered.
    pub fn device_message(&self, error: IoError) -> &'static CStr {
        match error {
            IoError::OutOfRange => c"the device: beyond its end",
            IoError::Misaligned => c"the device: not aligned as it needs it",
            IoError::Invalid => self.unmapped.unwrap_or(c"the device: malformed request"),
            IoError::ReadOnly => c"the device: it is read-only",
            IoError::Unsupported => {
                c"this type of request, or one of its flags, is not supported by the device"
            }
            IoError::NoSpace => c"the device: no space left",
            IoError::Medium => c"the device: I/O error",
            IoError::Corrupt => c"the device: damaged data or metadata",
            IoError::TimedOut => c"the device: timed out",
            IoError::DeviceGone => c"the device is gone: disconnected, closed or failed permanently",
            IoError::NoMemory => c"the device: out of memory",
            IoError::TooManyActiveZones => c"the device: more than max-active-zones zones would be active",
            IoError::TooManyOpenZones => c"the device: more than max-open-zones zones would be open",
        }
    }

    /// # Errors
    /// [`Refusal::ReadOnly`].
    pub fn check_writable(&self) -> Result<(), Refusal> {
        if self.read_only { Err(Refusal::ReadOnly) } else { Ok(()) }
    }

    /// Checks a request's memory and returns its length.
    ///
    /// # Safety
    /// A list can be read.
    #[inline(always)]
    pub unsafe fn check_memory(&self, memory: &Memory) -> Result<u64, Refusal> {
        match *memory {
            Memory::None => Ok(0),
            Memory::One(segment) => self.check_segment(&segment),
            Memory::List(_, count) if count > self.max_segments => Err(Refusal::TooManySegments),
            Memory::List(_, 0) => Ok(0),
            Memory::List(list, _) if list.is_null() => Err(Refusal::NullMemory),
            Memory::List(list, count) => {
                // SAFETY: by contract.
                let list = unsafe { std::slice::from_raw_parts(list, count) };
                list.iter().try_fold(0u64, |len, segment| {
                    len.checked_add(self.check_segment(segment)?).ok_or(Refusal::TransferTooLong)
                })
            }
        }
    }

    #[inline(always)]
    fn check_segment(&self, segment: &Segment) -> Result<u64, Refusal> {
        if (segment.base.addr() | segment.len) & self.buf_mask != 0 {
            Err(Refusal::BufAlignment)
        } else if segment.len > self.max_segment_len {
            Err(Refusal::SegmentTooLong)
        } else if segment.base.is_null() && segment.len > 0 {
            Err(Refusal::NullMemory)
        } else {
            Ok(segment.len as u64)
        }
    }

    /// # Errors
    /// Why a read or write of `len` bytes at `offset` cannot be.
    #[inline(always)]
    pub fn check_transfer(&self, op: Op, offset: u64, len: u64) -> Result<(), Refusal> {
        if op == Op::Write && self.read_only {
            return Err(self.refuse_write(offset));
        }
        if (offset | len) & self.request_mask != 0 {
            return Err(Refusal::RequestAlignment);
        }
        if len > self.max_transfer {
            return Err(Refusal::TransferTooLong);
        }
        self.check_range(offset, len)
    }

    /// # Errors
    /// Why a write zeroes, discard or flush cannot be.
    pub fn check_range_op(&self, op: Op, offset: u64, len: u64) -> Result<(), Refusal> {
        if op == Op::Flush {
            return Ok(());
        }
        if self.codes == Codes::Kernel {
            if len == 0 {
                return Err(Refusal::NoLength);
            }
            if offset.checked_add(len).is_none_or(|end| end > MAX_END) {
                return Err(Refusal::OutOfRange);
            }
        }
        if self.read_only {
            return Err(self.refuse_write(offset | len));
        }
        if (offset | len) & self.request_mask != 0 {
            return Err(Refusal::RequestAlignment);
        }
        if op == Op::Discard && len > self.max_discard {
            return Err(Refusal::DiscardTooLong);
        }
        if op == Op::WriteZeroes && len > self.max_write_zeroes {
            return Err(Refusal::WriteZeroesTooLong);
        }
        self.check_range(offset, len)
    }

    /// Why a read-only device refuses to write at `place`.
    #[cold]
    fn refuse_write(&self, place: u64) -> Refusal {
        let is_aligned = place & self.request_mask == 0;
        if self.codes == Codes::Virtio && !is_aligned { Refusal::RequestAlignment } else { Refusal::ReadOnly }
    }

    #[inline(always)]
    fn check_range(&self, offset: u64, len: u64) -> Result<(), Refusal> {
        let end = self.end.load(Ordering::Relaxed);
        if offset <= end && len <= end - offset { Ok(()) } else { self.check_grown(offset, len) }
    }

    /// The device may have grown since it was last asked.
    #[cold]
    fn check_grown(&self, offset: u64, len: u64) -> Result<(), Refusal> {
        if !self.can_grow {
            let capacity = (self.ask_capacity)().map_err(|_| Refusal::OutOfRange)?;
            self.end.store(capacity.min(MAX_END), Ordering::Relaxed);
        }
        let end = self.end.load(Ordering::Relaxed);
        match offset.checked_add(len) {
            Some(wanted) if wanted <= end => Ok(()),
            _ => Err(Refusal::OutOfRange),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use drivers::blkio::common;
    use std::sync::Arc;

    fn rules(codes: Codes, change: impl FnOnce(&mut Properties)) -> Rules {
        let mut p = Properties::new(common("x", true));
        p.put("request-alignment", 512);
        p.put("buf-alignment", 4);
        p.put("max-transfer", 1 << 20);
        change(&mut p);
        Rules::new(&p, codes, Arc::new(|| Ok(8192)))
    }

    #[test]
    fn offsets_and_lengths_are_checked_without_overflow() {
        let rules = rules(Codes::Library, |_| {});
        assert_eq!(rules.check_transfer(Op::Read, 4096, 4096), Ok(()));
        assert_eq!(rules.check_transfer(Op::Read, 4096, 4608), Err(Refusal::OutOfRange));
        assert_eq!(rules.check_transfer(Op::Read, !511, 1024), Err(Refusal::OutOfRange));
        assert_eq!(rules.check_transfer(Op::Read, 100, 512), Err(Refusal::RequestAlignment));
        assert_eq!(rules.check_transfer(Op::Read, 0, 2 << 20), Err(Refusal::TransferTooLong));
        assert_eq!(rules.check_range_op(Op::Discard, 0, !511), Err(Refusal::OutOfRange));
    }

    #[test]
    fn refusals_name_the_limit_and_its_value() {
        let rules = rules(Codes::Library, |p| p.put("read-only", true));
        assert_eq!(
            rules.message(Refusal::RequestAlignment).to_str(),
            Ok("start and length must be multiples of request-alignment (512)")
        );
        assert_eq!(rules.check_transfer(Op::Write, 0, 512), Err(Refusal::ReadOnly));
        assert_eq!(rules.check_range_op(Op::Flush, 0, 0), Ok(()));
        for (index, refusal) in Refusal::ALL.into_iter().enumerate() {
            assert_eq!(refusal as usize, index, "the table of messages is in the order of the enum");
        }
    }

    #[test]
    fn error_codes_are_those_of_libblkio() {
        for (codes, beyond, null) in [
            (Codes::Kernel, libc::EINVAL, libc::EFAULT),
            (Codes::Virtio, libc::EIO, libc::EINVAL),
            (Codes::Library, libc::EINVAL, libc::EINVAL),
        ] {
            let rules = rules(codes, |p| p.put("read-only", true));
            assert_eq!(rules.errno(Refusal::OutOfRange), beyond, "{codes:?}");
            assert_eq!(rules.errno(Refusal::NullMemory), null, "{codes:?}");
            assert_eq!(rules.errno(Refusal::ReadOnly), libc::EBADF, "{codes:?}");
            let is_virtio = codes == Codes::Virtio;
            let unaligned = if is_virtio { Refusal::RequestAlignment } else { Refusal::ReadOnly };
            assert_eq!(rules.check_transfer(Op::Write, 1, 512), Err(unaligned), "{codes:?}");
            assert_eq!(rules.check_transfer(Op::Write, 0, 511), Err(Refusal::ReadOnly), "{codes:?}");
            let is_kernel = codes == Codes::Kernel;
            let beyond = if is_kernel { Refusal::OutOfRange } else { Refusal::ReadOnly };
            assert_eq!(rules.check_range_op(Op::Discard, 1 << 63, 512), Err(beyond), "{codes:?}");
            let nothing = if is_kernel { Refusal::NoLength } else { Refusal::ReadOnly };
            assert_eq!(rules.check_range_op(Op::WriteZeroes, 0, 0), Err(nothing), "{codes:?}");
        }
    }

    #[test]
    fn segment_lists_are_summed_and_each_is_checked() {
        let rules = rules(Codes::Library, |p| p.put("max-segments", 2));
        let base = 0x1000 as *mut u8;
        let list = [Segment { base, len: 8 }, Segment { base, len: 4 }, Segment { base, len: 2 }];
        // SAFETY: the lists can be read; what they point at is not touched.
        let check =
            |from: usize, count| unsafe { rules.check_memory(&Memory::List(list[from..].as_ptr(), count)) };
        assert_eq!(check(0, 2), Ok(12));
        assert_eq!(check(0, 3), Err(Refusal::TooManySegments));
        assert_eq!(check(1, 2), Err(Refusal::BufAlignment));
    }
}
