//! For every processor: eight bytes in a word, four words at a time.

use super::Kernels;
use super::pass::Vector;

const HIGH_BITS: u64 = 0x8080_8080_8080_8080;

#[derive(Clone, Copy)]
struct Words([u64; 4]);

super::kernels!(Words, "portable", step 32, sources 8 / 6: sum 1, powers2 1, powers3 1, products 1);

/// The products with 2 of the bytes of a word (as Linux's lib/raid6/int.uc does).
#[inline(always)]
fn double(word: u64) -> u64 {
    let high = word & HIGH_BITS;
    let mask = (high << 1).wrapping_sub(high >> 7);
    ((word & !HIGH_BITS) << 1) ^ (mask & 0x1d1d_1d1d_1d1d_1d1d)
}

impl Words {
    #[inline(always)]
    fn zip(self, other: Words, op: impl Fn(u64, u64) -> u64) -> Words {
        Words(std::array::from_fn(|i| op(self.0[i], other.0[i])))
    }
}

impl Vector for Words {
    const BYTES: usize = 32;
    /// The products with 1, 2, 4, … 128.
    type Split = [Words; 8];
    /// All ones where the coefficient has a bit.
    type Factor = [u64; 8];

    #[inline(always)]
    unsafe fn zero() -> Words {
        Words([0; 4])
    }
    #[inline(always)]
    unsafe fn load(from: *const u8) -> Words {
        // SAFETY: by the contract of `Pass` the bytes are valid.
        Words(unsafe { from.cast::<[u64; 4]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: by the contract of `Pass` the bytes are valid.
        unsafe { to.cast::<[u64; 4]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn stream(self, to: *mut u8) {
        // SAFETY: as for `store`.
        unsafe { self.store(to) }
    }
    #[inline(always)]
    unsafe fn fence() {}
    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}
    #[inline(always)]
    unsafe fn xor(self, other: Words) -> Words {
        self.zip(other, |a, b| a ^ b)
    }
    #[inline(always)]
    unsafe fn xor3(self, a: Words, b: Words) -> Words {
        self.zip(a, |a, b| a ^ b).zip(b, |a, b| a ^ b)
    }
    #[inline(always)]
    unsafe fn double_add(self, other: Words) -> Words {
        self.zip(other, |a, b| double(a) ^ b)
    }
    #[inline(always)]
    unsafe fn quadruple_add(self, other: Words) -> Words {
        self.zip(other, |a, b| double(double(a)) ^ b)
    }
    #[inline(always)]
    unsafe fn split(self) -> [Words; 8] {
        let mut products = [self; 8];
        for bit in 1..8 {
            products[bit] = Words(products[bit - 1].0.map(double));
        }
        products
    }
    #[inline(always)]
    unsafe fn factor(coefficient: u8) -> [u64; 8] {
        std::array::from_fn(|bit| 0u64.wrapping_sub(u64::from(coefficient >> bit & 1)))
    }
    #[inline(always)]
    unsafe fn multiply_add(self, factor: [u64; 8], other: [Words; 8]) -> Words {
        (0..8).fold(self, |sum, bit| sum.zip(other[bit], |a, b| a ^ (b & factor[bit])))
    }
}
