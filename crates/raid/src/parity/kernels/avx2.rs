//! x86-64 with AVX2: products by PSHUFB on nibbles, powers by doubling.

use super::super::gf::NIBBLES;
use super::Kernels;
use super::pass::Vector;
use std::arch::x86_64::*;

#[derive(Clone, Copy)]
struct Ymm(__m256i);

super::kernels!(Ymm, "avx2", "avx2", step 128, sources 8 / 6: sum 4, powers2 4, powers3 2, products 2);

/// The reduction of the bits that `4 ·` shifts out: the products of 0, 1, 2 and 3 with x^8.
pub(super) const CARRY: [u8; 4] = [0, 0x1d, 0x3a, 0x27];

impl Vector for Ymm {
    const BYTES: usize = 32;
    type Split = [__m256i; 2];
    type Factor = [__m256i; 2];

    #[inline(always)]
    unsafe fn zero() -> Ymm {
        // SAFETY: here and below, by the contract of `Pass` the processor has AVX2 and the bytes
        // are valid.
        Ymm(unsafe { _mm256_setzero_si256() })
    }
    #[inline(always)]
    unsafe fn load(from: *const u8) -> Ymm {
        // SAFETY: see `zero`.
        Ymm(unsafe { _mm256_loadu_si256(from.cast()) })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: see `zero`.
        unsafe { _mm256_storeu_si256(to.cast(), self.0) }
    }
    #[inline(always)]
    unsafe fn stream(self, to: *mut u8) {
        // SAFETY: see `zero`; `fence` follows.
        unsafe { _mm256_stream_si256(to.cast(), self.0) }
    }
    #[inline(always)]
    unsafe fn fence() {
        // SAFETY: see `zero`.
        unsafe { _mm_sfence() }
    }
    #[inline(always)]
    unsafe fn prefetch(from: *const u8) {
        // SAFETY: see `zero`; a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) }
    }
    #[inline(always)]
    unsafe fn xor(self, other: Ymm) -> Ymm {
        // SAFETY: see `zero`.
        Ymm(unsafe { _mm256_xor_si256(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn xor3(self, a: Ymm, b: Ymm) -> Ymm {
        // SAFETY: see `zero`.
        unsafe { self.xor(a).xor(b) }
    }
    #[inline(always)]
    unsafe fn double_add(self, other: Ymm) -> Ymm {
        // SAFETY: see `zero`.
        unsafe {
            let is_carried = _mm256_cmpgt_epi8(_mm256_setzero_si256(), self.0);
            let carry = _mm256_and_si256(is_carried, _mm256_set1_epi8(0x1d));
            Ymm(_mm256_xor_si256(_mm256_xor_si256(_mm256_add_epi8(self.0, self.0), other.0), carry))
        }
    }
    #[inline(always)]
    unsafe fn quadruple_add(self, other: Ymm) -> Ymm {
        // SAFETY: see `zero`.
        unsafe {
            let carries = _mm256_set1_epi32(i32::from_le_bytes(CARRY));
            let top = _mm256_and_si256(_mm256_srli_epi16(self.0, 6), _mm256_set1_epi8(3));
            let carry = _mm256_shuffle_epi8(carries, top);
            let twice = _mm256_add_epi8(self.0, self.0);
            Ymm(_mm256_xor_si256(_mm256_xor_si256(_mm256_add_epi8(twice, twice), other.0), carry))
        }
    }
    #[inline(always)]
    unsafe fn split(self) -> [__m256i; 2] {
        // SAFETY: see `zero`.
        unsafe {
            let low = _mm256_set1_epi8(15);
            [_mm256_and_si256(self.0, low), _mm256_and_si256(_mm256_srli_epi16(self.0, 4), low)]
        }
    }
    #[inline(always)]
    unsafe fn factor(coefficient: u8) -> [__m256i; 2] {
        let table = NIBBLES.0[coefficient as usize].as_ptr();
        // SAFETY: see `zero`; a table has 32 bytes.
        unsafe {
            let (low, high) = (_mm_loadu_si128(table.cast()), _mm_loadu_si128(table.add(16).cast()));
            [_mm256_broadcastsi128_si256(low), _mm256_broadcastsi128_si256(high)]
        }
    }
    #[inline(always)]
    unsafe fn multiply_add(self, factor: [__m256i; 2], other: [__m256i; 2]) -> Ymm {
        // SAFETY: see `zero`.
        unsafe {
            let low = _mm256_shuffle_epi8(factor[0], other[0]);
            let high = _mm256_shuffle_epi8(factor[1], other[1]);
            Ymm(_mm256_xor_si256(self.0, _mm256_xor_si256(low, high)))
        }
    }
}
