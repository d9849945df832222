//! x86-64 with AVX-512 and GFNI: a product is one instruction, GF2P8AFFINEQB with the coefficient's
//! bit matrix. (GF2P8MULB has another polynomial.)

use super::super::gf::AFFINE;
use super::Kernels;
use super::avx512::Zmm;
use super::pass::Vector;
use std::arch::x86_64::*;

#[derive(Clone, Copy)]
struct Gfni(Zmm);

super::kernels!(Gfni, "avx512+gfni", "avx512f,avx512bw,gfni", step 256, sources 64 / 64: sum 2, powers2 4, powers3 4, products 2);

impl Gfni {
    #[inline(always)]
    unsafe fn multiplied<const COEFFICIENT: usize>(self) -> Zmm {
        // SAFETY: by the contract of `Pass` the processor has the instructions.
        Zmm(unsafe {
            _mm512_gf2p8affine_epi64_epi8::<0>(self.0.0, _mm512_set1_epi64(AFFINE[COEFFICIENT] as i64))
        })
    }
}

impl Vector for Gfni {
    const BYTES: usize = 64;
    type Split = __m512i;
    type Factor = __m512i;

    #[inline(always)]
    unsafe fn zero() -> Gfni {
        // SAFETY: here and below, by the contract of `Pass` the processor has the instructions and
        // the bytes are valid.
        Gfni(unsafe { Zmm::zero() })
    }
    #[inline(always)]
    unsafe fn load(from: *const u8) -> Gfni {
        // SAFETY: see `zero`.
        Gfni(unsafe { Zmm::load(from) })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: see `zero`.
        unsafe { self.0.store(to) }
    }
    #[inline(always)]
    unsafe fn stream(self, to: *mut u8) {
        // SAFETY: see `zero`.
        unsafe { self.0.stream(to) }
    }
    #[inline(always)]
    unsafe fn fence() {
        // SAFETY: see `zero`.
        unsafe { Zmm::fence() }
    }
    #[inline(always)]
    unsafe fn prefetch(from: *const u8) {
        // SAFETY: see `zero`; a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) }
    }
    #[inline(always)]
    unsafe fn xor(self, other: Gfni) -> Gfni {
        // SAFETY: see `zero`.
        Gfni(unsafe { self.0.xor(other.0) })
    }
    #[inline(always)]
    unsafe fn xor3(self, a: Gfni, b: Gfni) -> Gfni {
        // SAFETY: see `zero`.
        Gfni(unsafe { self.0.xor3(a.0, b.0) })
    }
    #[inline(always)]
    unsafe fn double_add(self, other: Gfni) -> Gfni {
        // SAFETY: see `zero`.
        Gfni(unsafe { self.multiplied::<2>().xor(other.0) })
    }
    #[inline(always)]
    unsafe fn quadruple_add(self, other: Gfni) -> Gfni {
        // SAFETY: see `zero`.
        Gfni(unsafe { self.multiplied::<4>().xor(other.0) })
    }
    #[inline(always)]
    unsafe fn split(self) -> __m512i {
        self.0.0
    }
    #[inline(always)]
    unsafe fn factor(coefficient: u8) -> __m512i {
        // SAFETY: see `zero`.
        unsafe { _mm512_set1_epi64(AFFINE[coefficient as usize] as i64) }
    }
    #[inline(always)]
    unsafe fn multiply_add(self, factor: __m512i, other: __m512i) -> Gfni {
        // SAFETY: see `zero`.
        Gfni(unsafe { self.0.xor(Zmm(_mm512_gf2p8affine_epi64_epi8::<0>(other, factor))) })
    }
}
