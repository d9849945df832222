//! x86-64 with AVX-512BW: as [`avx2`](super::avx2), twice as wide, with three-way exclusive or.

use super::super::gf::NIBBLES;
use super::Kernels;
use super::pass::Vector;
use std::arch::x86_64::*;

#[derive(Clone, Copy)]
pub(super) struct Zmm(pub(super) __m512i);

super::kernels!(Zmm, "avx512", "avx512f,avx512bw", step 256, sources 64 / 64: sum 2, powers2 4, powers3 4, products 2);

/// `a ^ b ^ c` for VPTERNLOG.
const XOR3: i32 = 0x96;

impl Vector for Zmm {
    const BYTES: usize = 64;
    type Split = [__m512i; 2];
    type Factor = [__m512i; 2];

    #[inline(always)]
    unsafe fn zero() -> Zmm {
        // SAFETY: here and below, by the contract of `Pass` the processor has AVX-512BW and the
        // bytes are valid.
        Zmm(unsafe { _mm512_setzero_si512() })
    }
    #[inline(always)]
    unsafe fn load(from: *const u8) -> Zmm {
        // SAFETY: see `zero`.
        Zmm(unsafe { _mm512_loadu_si512(from.cast()) })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: see `zero`.
        unsafe { _mm512_storeu_si512(to.cast(), self.0) }
    }
    #[inline(always)]
    unsafe fn stream(self, to: *mut u8) {
        // SAFETY: see `zero`; `fence` follows.
        unsafe { _mm512_stream_si512(to.cast(), self.0) }
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
    unsafe fn xor(self, other: Zmm) -> Zmm {
        // SAFETY: see `zero`.
        Zmm(unsafe { _mm512_xor_si512(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn xor3(self, a: Zmm, b: Zmm) -> Zmm {
        // SAFETY: see `zero`.
        Zmm(unsafe { _mm512_ternarylogic_epi64::<XOR3>(self.0, a.0, b.0) })
    }
    #[inline(always)]
    unsafe fn double_add(self, other: Zmm) -> Zmm {
        // SAFETY: see `zero`.
        unsafe {
            let carry = _mm512_maskz_mov_epi8(_mm512_movepi8_mask(self.0), _mm512_set1_epi8(0x1d));
            Zmm(_mm512_add_epi8(self.0, self.0)).xor3(Zmm(carry), other)
        }
    }
    #[inline(always)]
    unsafe fn quadruple_add(self, other: Zmm) -> Zmm {
        // SAFETY: see `zero`.
        unsafe {
            let carries = _mm512_set1_epi32(i32::from_le_bytes(super::avx2::CARRY));
            let top = _mm512_and_si512(_mm512_srli_epi16(self.0, 6), _mm512_set1_epi8(3));
            let twice = _mm512_add_epi8(self.0, self.0);
            Zmm(_mm512_add_epi8(twice, twice)).xor3(Zmm(_mm512_shuffle_epi8(carries, top)), other)
        }
    }
    #[inline(always)]
    unsafe fn split(self) -> [__m512i; 2] {
        // SAFETY: see `zero`.
        unsafe {
            let low = _mm512_set1_epi8(15);
            [_mm512_and_si512(self.0, low), _mm512_and_si512(_mm512_srli_epi16(self.0, 4), low)]
        }
    }
    #[inline(always)]
    unsafe fn factor(coefficient: u8) -> [__m512i; 2] {
        let table = NIBBLES.0[coefficient as usize].as_ptr();
        // SAFETY: see `zero`; a table has 32 bytes.
        unsafe {
            let (low, high) = (_mm_loadu_si128(table.cast()), _mm_loadu_si128(table.add(16).cast()));
            [_mm512_broadcast_i32x4(low), _mm512_broadcast_i32x4(high)]
        }
    }
    #[inline(always)]
    unsafe fn multiply_add(self, factor: [__m512i; 2], other: [__m512i; 2]) -> Zmm {
        // SAFETY: see `zero`.
        unsafe {
            let low = _mm512_shuffle_epi8(factor[0], other[0]);
            let high = _mm512_shuffle_epi8(factor[1], other[1]);
            self.xor3(Zmm(low), Zmm(high))
        }
    }
}
