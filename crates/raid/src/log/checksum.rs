//! The checksum that the log uses for payloads and for the new data of full stripes.
//!
//! ```text
//!   content ─► rows of 4096 bytes (the last may be shorter), in each eight columns of 64-bit words
//!              column ─► Σ (low half + key) · (high half + key) mod 2^64 ─► 64 bytes a row ─► CRC32C of all rows
//! ```
//!
//! The slowest pass over a full stripe limits its speed, and a CRC of its data would be the
//! slowest. A sum of keyed products runs as fast as memory in every set of vector instructions; the
//! CRC covers only a 64th of the bytes. The sum is the NH of UMAC: Black et al., "UMAC: Fast and
//! Secure Message Authentication", 1999. Two different contents of one length have the same sums
//! for one key in 2^32, and the CRC adds as much. The key is derived from the nonce, which is
//! random for every assembly and secret. So no guest can write data that passes for an entry.

use super::entry::Nonce;
use base::mix;
use std::sync::OnceLock;

/// Bytes of a row, the range of one key.
pub const ROW: usize = 4096;
/// Bytes of one word of every column.
const LINE: usize = 64;
/// Rows whose sums are collected before the CRC takes them together.
const KEPT: usize = 8;

/// The words that are added to the words of a row.
#[repr(align(64))]
pub struct Key([u64; ROW / 8]);

impl Key {
    /// The key of an assembly.
    pub fn new(nonce: &Nonce) -> Key {
        let half = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| nonce.0[at + i]));
        let (low, high) = (half(0), half(8));
        let step = |i: usize| (i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        Key(std::array::from_fn(|i| {
            mix(low.wrapping_add(step(i))) ^ mix(high.wrapping_add(step(i)).rotate_left(32))
        }))
    }
}

/// A checksum in progress. Contents are added in parts, each a multiple of 64 bytes.
#[derive(Clone)]
pub struct Checksum<'k> {
    key: &'k Key,
    crc: u32,
    /// Bytes of the content in the collected rows.
    at: usize,
    sums: [[u64; LINE / 8]; KEPT],
}

impl<'k> Checksum<'k> {
    /// The checksum of no content yet.
    pub fn new(key: &'k Key) -> Checksum<'k> {
        Checksum { key, crc: 0, at: 0, sums: [[0; LINE / 8]; KEPT] }
    }

    /// The checksum of one content.
    pub fn of(key: &Key, content: &[u8]) -> u32 {
        let mut checksum = Checksum::new(key);
        checksum.add(content);
        checksum.finish()
    }

    /// Adds the next part of the content.
    ///
    /// # Panics
    /// If its length is no multiple of 64.
    pub fn add(&mut self, part: &[u8]) {
        // SAFETY: the slice is valid, and nothing is copied.
        unsafe { self.run(part.as_ptr(), std::ptr::null_mut(), part.len(), loops().add) }
    }

    /// Copies the next part of the content to `target`, and adds the bytes that arrive there.
    ///
    /// # Safety
    /// `source` is valid for as many bytes as `target` has and does not overlap it. It may change
    /// meanwhile, as memory of a guest may.
    ///
    /// # Panics
    /// If the length is no multiple of 64.
    pub unsafe fn copy(&mut self, source: *const u8, target: &mut [u8]) {
        // SAFETY: by contract.
        unsafe { self.run(source, target.as_mut_ptr(), target.len(), loops().copy) }
    }

    /// Ends the content. The next content begins with a row of its own.
    pub fn end(&mut self) {
        let rows = self.at.div_ceil(ROW);
        let mut bytes = [0; KEPT * LINE];
        let words = self.sums[..rows].as_flattened_mut();
        for (bytes, word) in bytes.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&std::mem::take(word).to_le_bytes());
        }
        self.crc = crc32c::crc32c_append(self.crc, &bytes[..rows * LINE]);
        self.at = 0;
    }

    /// The checksum of all contents.
    pub fn finish(mut self) -> u32 {
        self.end();
        self.crc
    }

    /// # Safety
    /// The conditions of [`Loop`], except for the key and the sums.
    #[inline]
    unsafe fn run(&mut self, mut from: *const u8, mut to: *mut u8, mut left: usize, run: Loop) {
        assert!(left.is_multiple_of(LINE), "a checksum of {left} bytes");
        while left > 0 {
            if self.at == KEPT * ROW {
                self.end();
            }
            let within = self.at % ROW;
            let len = left.min(ROW - within);
            let (key, sums) = (&self.key.0[within / 8..], &mut self.sums[self.at / ROW]);
            // SAFETY: by contract; the key has as many bytes as are left of the row.
            unsafe { run(from, to, len, key.as_ptr(), sums) };
            from = from.wrapping_add(len);
            to = to.wrapping_add(len);
            left -= len;
            self.at += len;
        }
    }
}

/// Adds lines of one row to its sums, and copies them. The caller ensures: `len` is a multiple of
/// [`LINE`]; source, target (if it copies) and key are valid for `len` bytes; and the processor has
/// the instructions.
type Loop = unsafe fn(*const u8, *mut u8, usize, *const u64, &mut [u64; LINE / 8]);

/// The loops in one set of instructions.
#[derive(Clone, Copy)]
struct Loops {
    add: Loop,
    copy: Loop,
}

/// The best loops that this processor has.
#[inline]
fn loops() -> Loops {
    static CHOSEN: OnceLock<Loops> = OnceLock::new();
    *CHOSEN.get_or_init(|| available()[0])
}

/// All loops that this processor has, best first.
fn available() -> Vec<Loops> {
    let mut found = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            found.push(Loops { add: x86::avx512::<false>, copy: x86::avx512::<true> });
        }
        if is_x86_feature_detected!("avx2") {
            found.push(Loops { add: x86::avx2::<false>, copy: x86::avx2::<true> });
        }
    }
    #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
    found.push(Loops { add: aarch64::neon::<false>, copy: aarch64::neon::<true> });
    found.push(Loops { add: plain::<false>, copy: plain::<true> });
    found
}

/// See [`Loop`]; for any processor.
unsafe fn plain<const IS_COPY: bool>(
    from: *const u8,
    to: *mut u8,
    len: usize,
    key: *const u64,
    sums: &mut [u64; LINE / 8],
) {
    for at in (0..len).step_by(LINE) {
        // SAFETY: by contract.
        let (line, key) = unsafe {
            let line = from.add(at).cast::<[u64; LINE / 8]>().read_unaligned();
            if IS_COPY {
                to.add(at).cast::<[u64; LINE / 8]>().write_unaligned(line);
            }
            (line, key.add(at / 8).cast::<[u64; LINE / 8]>().read())
        };
        for ((sum, word), key) in sums.iter_mut().zip(line).zip(key) {
            let word = u64::from_le(word);
            let low = (word as u32).wrapping_add(key as u32);
            let high = ((word >> 32) as u32).wrapping_add((key >> 32) as u32);
            *sum = sum.wrapping_add(u64::from(low) * u64::from(high));
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::LINE;
    use std::arch::x86_64::*;

    /// See [`super::Loop`].
    #[target_feature(enable = "avx512f")]
    pub unsafe fn avx512<const IS_COPY: bool>(
        from: *const u8,
        to: *mut u8,
        len: usize,
        key: *const u64,
        sums: &mut [u64; LINE / 8],
    ) {
        let step = |at: usize, sum: __m512i| {
            // SAFETY: by contract.
            unsafe {
                let line = _mm512_loadu_si512(from.add(at).cast());
                if IS_COPY {
                    _mm512_storeu_si512(to.add(at).cast(), line);
                }
                let mixed = _mm512_add_epi32(line, _mm512_loadu_si512(key.add(at / 8).cast()));
                _mm512_add_epi64(sum, _mm512_mul_epu32(mixed, _mm512_srli_epi64::<32>(mixed)))
            }
        };
        // SAFETY: the sums are as long as a vector.
        let mut even = unsafe { _mm512_loadu_si512(sums.as_ptr().cast()) };
        let mut odd = _mm512_setzero_si512();
        let pairs = len / (2 * LINE) * 2 * LINE;
        for at in (0..pairs).step_by(2 * LINE) {
            even = step(at, even);
            odd = step(at + LINE, odd);
        }
        if pairs < len {
            odd = step(pairs, odd);
        }
        // SAFETY: as above.
        unsafe { _mm512_storeu_si512(sums.as_mut_ptr().cast(), _mm512_add_epi64(even, odd)) }
    }

    /// See [`super::Loop`].
    #[target_feature(enable = "avx2")]
    pub unsafe fn avx2<const IS_COPY: bool>(
        from: *const u8,
        to: *mut u8,
        len: usize,
        key: *const u64,
        sums: &mut [u64; LINE / 8],
    ) {
        const HALF: usize = LINE / 2;
        let step = |at: usize, sum: __m256i| {
            // SAFETY: by contract.
            unsafe {
                let line = _mm256_loadu_si256(from.add(at).cast());
                if IS_COPY {
                    _mm256_storeu_si256(to.add(at).cast(), line);
                }
                let mixed = _mm256_add_epi32(line, _mm256_loadu_si256(key.add(at / 8).cast()));
                _mm256_add_epi64(sum, _mm256_mul_epu32(mixed, _mm256_srli_epi64::<32>(mixed)))
            }
        };
        let (first, second) = sums.split_at_mut(4);
        // SAFETY: each half of the sums is as long as a vector.
        let mut low = unsafe { _mm256_loadu_si256(first.as_ptr().cast()) };
        // SAFETY: as above.
        let mut high = unsafe { _mm256_loadu_si256(second.as_ptr().cast()) };
        for at in (0..len).step_by(LINE) {
            low = step(at, low);
            high = step(at + HALF, high);
        }
        // SAFETY: as above.
        unsafe {
            _mm256_storeu_si256(first.as_mut_ptr().cast(), low);
            _mm256_storeu_si256(second.as_mut_ptr().cast(), high);
        }
    }
}

#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod aarch64 {
    use super::LINE;
    use std::arch::aarch64::*;

    /// See [`super::Loop`]. Every AArch64 processor has these instructions.
    #[target_feature(enable = "neon")]
    pub unsafe fn neon<const IS_COPY: bool>(
        from: *const u8,
        to: *mut u8,
        len: usize,
        key: *const u64,
        sums: &mut [u64; LINE / 8],
    ) {
        const BYTES: usize = 16;
        let sums = sums.as_mut_ptr();
        // SAFETY: here and below by contract; the sums are as long as four vectors.
        let mut all: [uint64x2_t; LINE / BYTES] =
            std::array::from_fn(|i| unsafe { vld1q_u64(sums.add(2 * i)) });
        for at in (0..len).step_by(LINE) {
            for (i, sum) in all.iter_mut().enumerate() {
                let at = at + BYTES * i;
                // SAFETY: as above.
                unsafe {
                    let bytes = vld1q_u8(from.add(at));
                    if IS_COPY {
                        vst1q_u8(to.add(at), bytes);
                    }
                    let key = vreinterpretq_u32_u64(vld1q_u64(key.add(at / 8)));
                    let mixed = vreinterpretq_u64_u32(vaddq_u32(vreinterpretq_u32_u8(bytes), key));
                    *sum = vmlal_u32(*sum, vmovn_u64(mixed), vshrn_n_u64::<32>(mixed));
                }
            }
        }
        for (i, sum) in all.into_iter().enumerate() {
            // SAFETY: as above.
            unsafe { vst1q_u64(sums.add(2 * i), sum) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(seed: u8) -> Key {
        Key::new(&Nonce(std::array::from_fn(|i| seed ^ (i as u8).wrapping_mul(37))))
    }

    fn noise(len: usize) -> Vec<u8> {
        (0..len as u64).map(|i| (mix(i / 8) >> (8 * (i % 8))) as u8).collect()
    }

    /// The definition, word by word.
    fn by_definition(key: &Key, content: &[u8]) -> u32 {
        let mut sums = Vec::new();
        for row in content.chunks(ROW) {
            let mut row_sums = [0u64; 8];
            for (i, word) in row.chunks_exact(8).enumerate() {
                let word = u64::from_le_bytes(word.try_into().unwrap());
                let add = |half: u64, key: u64| (half + key) & 0xffff_ffff;
                let low = add(word & 0xffff_ffff, key.0[i] & 0xffff_ffff);
                let high = add(word >> 32, key.0[i] >> 32);
                row_sums[i % 8] = row_sums[i % 8].wrapping_add(low.wrapping_mul(high));
            }
            sums.extend(row_sums.iter().flat_map(|sum| sum.to_le_bytes()));
        }
        crc32c::crc32c(&sums)
    }

    #[test]
    fn a_checksum_stays_what_it_is_on_members_in_use() {
        let key = Key::new(&Nonce([7; 16]));
        assert_eq!(Checksum::of(&key, &[]), 0);
        assert_eq!(Checksum::of(&key, &noise(512)), 0x2cec_c70f);
        assert_eq!(Checksum::of(&key, &noise(10 * ROW + 512)), 0x32f2_b437);
    }

    #[test]
    fn every_set_of_instructions_sums_and_copies_alike() {
        let key = key(1);
        for len in [64, 128, 192, 512, 4032, 4096] {
            for from in [0, 1, 8] {
                let content = &noise(len + from)[from..];
                let mut expected = [5; 8];
                // SAFETY: content and key are long enough, and nothing is copied.
                unsafe {
                    plain::<false>(content.as_ptr(), std::ptr::null_mut(), len, key.0.as_ptr(), &mut expected)
                };
                for loops in available() {
                    let (mut added, mut copied, mut copy) = ([5; 8], [5; 8], vec![0; len]);
                    // SAFETY: content, key and copy are long enough.
                    unsafe {
                        (loops.add)(content.as_ptr(), std::ptr::null_mut(), len, key.0.as_ptr(), &mut added);
                        (loops.copy)(content.as_ptr(), copy.as_mut_ptr(), len, key.0.as_ptr(), &mut copied);
                    }
                    assert_eq!((added, copied, &copy[..]), (expected, expected, content));
                }
            }
        }
    }

    proptest! {
        #[test]
        fn parts_give_the_checksum_of_the_whole(
            len in 0usize..KEPT * ROW / 64 * 3,
            cuts in prop::collection::vec(0usize..KEPT * ROW / 64 * 3, 0..6),
        ) {
            let (key, content) = (key(2), noise(len * 64));
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.min(&len) * 64).collect();
            cuts.extend([0, len * 64]);
            cuts.sort();
            let mut checksum = Checksum::new(&key);
            for (i, part) in cuts.windows(2).enumerate() {
                let part = &content[part[0]..part[1]];
                if i % 2 == 0 {
                    checksum.add(part);
                } else {
                    let mut copy = vec![0; part.len()];
                    // SAFETY: both have the same length.
                    unsafe { checksum.copy(part.as_ptr(), &mut copy) };
                    prop_assert_eq!(&copy[..], part);
                }
            }
            prop_assert_eq!(checksum.finish(), by_definition(&key, &content));
        }

        #[test]
        fn a_changed_bit_a_moved_sector_and_another_key_are_noticed(
            bit in 0usize..8 * 4 * ROW,
            (a, b) in (0usize..32, 0usize..32),
        ) {
            let content = noise(4 * ROW);
            let sum = Checksum::of(&key(3), &content);
            let mut changed = content.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            prop_assert_ne!(Checksum::of(&key(3), &changed), sum);
            prop_assert_ne!(Checksum::of(&key(4), &content), sum);
            let mut moved = content.clone();
            moved.copy_within(a * 512..(a + 1) * 512, b * 512);
            prop_assert_eq!(Checksum::of(&key(3), &moved) == sum, a == b);
        }
    }

    #[test]
    fn zeroes_of_different_lengths_and_contents_in_another_order_differ() {
        let key = key(5);
        let zeroes = vec![0; 4 * ROW];
        let mut sums: Vec<u32> =
            (1..=64).map(|sectors| Checksum::of(&key, &zeroes[..sectors * 256])).collect();
        sums.sort();
        sums.dedup();
        assert_eq!(sums.len(), 64);
        let of_two = |first: &[u8], second: &[u8]| {
            let mut checksum = Checksum::new(&key);
            checksum.add(first);
            checksum.end();
            checksum.add(second);
            checksum.finish()
        };
        let content = noise(1024);
        assert_ne!(of_two(&content[..512], &content[512..]), of_two(&content[512..], &content[..512]));
        assert_ne!(of_two(&content[..512], &content[512..]), Checksum::of(&key, &content));
    }
}
