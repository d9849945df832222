//! The field GF(2^8) with the polynomial x^8 + x^4 + x^3 + x^2 + 1 (0x11d), which RAID 6 uses (H.
//! P. Anvin, "The mathematics of RAID-6").
//!
//! A multiplication by a constant is linear in the bits of a byte. So kernels need only a table of
//! the products of the two nibbles ([`NIBBLES`]), or the 8 × 8 bit matrix ([`AFFINE`]).

/// The reduction of `x^8`.
pub(crate) const POLYNOMIAL: u8 = 0x1d;

/// `[c][n]`: `c · n` for n below 16; `[c][16 + n]`: `c · 16n`.
#[repr(C, align(64))]
pub(crate) struct Nibbles(pub [[u8; 32]; 256]);

/// The nibble products of every coefficient.
pub(crate) static NIBBLES: Nibbles = nibbles();

/// The bit matrix of every coefficient, in the format of x86's `gf2p8affineqb`: byte `7 - i`
/// selects the bits of the source that are summed into bit `i` of the product.
#[cfg(any(test, target_arch = "x86_64"))]
pub(crate) static AFFINE: [u64; 256] = affine();

/// The product with 2.
#[inline]
pub(crate) const fn double(a: u8) -> u8 {
    (a << 1) ^ if a & 0x80 != 0 { POLYNOMIAL } else { 0 }
}

/// The product of `a` and `b`.
pub(crate) const fn multiply(mut a: u8, mut b: u8) -> u8 {
    let mut product = 0;
    while b != 0 {
        if b & 1 != 0 {
            product ^= a;
        }
        a = double(a);
        b >>= 1;
    }
    product
}

/// `base` to the power `exponent`; `0^0` is 1.
pub(crate) fn power(base: u8, exponent: u32) -> u8 {
    (0..exponent % 255).fold(1, |product, _| multiply(product, base))
}

/// The multiplicative inverse of `a`.
///
/// # Panics
/// For 0, which has no inverse.
pub(crate) fn inverse(a: u8) -> u8 {
    assert_ne!(a, 0, "0 has no inverse");
    // a^254 = a^2 · a^4 · … · a^128.
    let squares = std::iter::successors(Some(multiply(a, a)), |square| Some(multiply(*square, *square)));
    squares.take(7).fold(1, multiply)
}

const fn nibbles() -> Nibbles {
    let mut table = [[0; 32]; 256];
    let mut c = 0;
    while c < 256 {
        let mut n = 0;
        while n < 16 {
            table[c][n] = multiply(c as u8, n as u8);
            table[c][16 + n] = multiply(c as u8, (n << 4) as u8);
            n += 1;
        }
        c += 1;
    }
    Nibbles(table)
}

#[cfg(any(test, target_arch = "x86_64"))]
const fn affine() -> [u64; 256] {
    let mut table = [0; 256];
    let mut c = 0;
    while c < 256 {
        let mut source_bit = 0;
        while source_bit < 8 {
            let product = multiply(c as u8, 1 << source_bit);
            let mut bit = 0;
            while bit < 8 {
                if product >> bit & 1 != 0 {
                    table[c] |= 1 << (8 * (7 - bit) + source_bit);
                }
                bit += 1;
            }
            source_bit += 1;
        }
        c += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The instruction `gf2p8affineqb` on one byte, by Intel's pseudocode.
    fn affine_byte(matrix: u64, source: u8) -> u8 {
        let parity = |row: u8| (row & source).count_ones() as u8 & 1;
        (0..8).map(|bit| parity(matrix.to_le_bytes()[7 - bit]) << bit).sum()
    }

    #[test]
    fn the_field_is_a_field() {
        for a in 0..=255u8 {
            assert_eq!(multiply(a, 1), a);
            assert_eq!(multiply(a, 2), double(a));
            if a != 0 {
                assert_eq!(multiply(a, inverse(a)), 1);
            }
            for b in 0..=255 {
                assert_eq!(multiply(a, b), multiply(b, a));
                assert_eq!(multiply(a, b ^ 0x53), multiply(a, b) ^ multiply(a, 0x53));
            }
        }
        let powers: std::collections::HashSet<u8> = (0..255).map(|e| power(2, e)).collect();
        assert_eq!(powers.len(), 255, "2 generates the field");
        assert_eq!(multiply(0x80, 2), 0x1d);
    }

    #[test]
    fn tables_give_the_product_of_every_two_bytes() {
        for c in 0..=255u8 {
            for a in 0..=255u8 {
                let table = &NIBBLES.0[c as usize];
                let product = multiply(c, a);
                assert_eq!(table[a as usize & 15] ^ table[16 + (a as usize >> 4)], product);
                assert_eq!(affine_byte(AFFINE[c as usize], a), product);
            }
        }
    }

    #[test]
    fn the_bit_matrix_of_one_is_the_identity_of_the_instruction() {
        assert_eq!(AFFINE[1], 0x0102_0408_1020_4080);
    }
}
