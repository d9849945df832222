//! AArch64, which always has NEON: products by TBL on nibbles, powers by doubling.

use super::super::gf::{NIBBLES, POLYNOMIAL};
use super::Kernels;
use super::pass::Vector;
use std::arch::aarch64::*;

#[derive(Clone, Copy)]
struct Q(uint8x16_t);

super::kernels!(Q, "neon", "neon", step 64, sources 8 / 6: sum 4, powers2 4, powers3 4, products 4);

impl Vector for Q {
    const BYTES: usize = 16;
    type Split = [uint8x16_t; 2];
    type Factor = [uint8x16_t; 2];

    #[inline(always)]
    unsafe fn zero() -> Q {
        // SAFETY: here and below, AArch64 has NEON, and by the contract of `Pass` the bytes are
        // valid.
        Q(unsafe { vdupq_n_u8(0) })
    }
    #[inline(always)]
    unsafe fn load(from: *const u8) -> Q {
        // SAFETY: see `zero`.
        Q(unsafe { vld1q_u8(from) })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: see `zero`.
        unsafe { vst1q_u8(to, self.0) }
    }
    #[inline(always)]
    unsafe fn stream(self, to: *mut u8) {
        // SAFETY: see `zero`.
        unsafe { self.store(to) }
    }
    #[inline(always)]
    unsafe fn fence() {}
    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}
    #[inline(always)]
    unsafe fn xor(self, other: Q) -> Q {
        // SAFETY: see `zero`.
        Q(unsafe { veorq_u8(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn xor3(self, a: Q, b: Q) -> Q {
        // SAFETY: see `zero`.
        unsafe { self.xor(a).xor(b) }
    }
    #[inline(always)]
    unsafe fn double_add(self, other: Q) -> Q {
        // SAFETY: see `zero`.
        unsafe {
            let is_carried = vcltzq_s8(vreinterpretq_s8_u8(self.0));
            let carry = Q(vandq_u8(is_carried, vdupq_n_u8(POLYNOMIAL)));
            Q(vshlq_n_u8::<1>(self.0)).xor3(carry, other)
        }
    }
    #[inline(always)]
    unsafe fn quadruple_add(self, other: Q) -> Q {
        // SAFETY: see `zero`.
        unsafe { Q(vdupq_n_u8(0)).multiply_add(Q::factor(4), self.split()).xor(other) }
    }
    #[inline(always)]
    unsafe fn split(self) -> [uint8x16_t; 2] {
        // SAFETY: see `zero`.
        unsafe { [vandq_u8(self.0, vdupq_n_u8(15)), vshrq_n_u8::<4>(self.0)] }
    }
    #[inline(always)]
    unsafe fn factor(coefficient: u8) -> [uint8x16_t; 2] {
        let table = NIBBLES.0[coefficient as usize].as_ptr();
        // SAFETY: see `zero`; a table has 32 bytes.
        unsafe { [vld1q_u8(table), vld1q_u8(table.add(16))] }
    }
    #[inline(always)]
    unsafe fn multiply_add(self, factor: [uint8x16_t; 2], other: [uint8x16_t; 2]) -> Q {
        // SAFETY: see `zero`.
        unsafe { self.xor3(Q(vqtbl1q_u8(factor[0], other[0])), Q(vqtbl1q_u8(factor[1], other[1]))) }
    }
}
