//! CRC-32C and GF(2^8), by tables: chapters "Stripes and parity" and the introduction of the format
//! document.

/// CRC-32C (Castagnoli) of some parts, one behind the other.
pub fn crc32c(parts: &[&[u8]]) -> u32 {
    static TABLE: [u32; 256] = crc_table();
    let step = |crc: u32, byte: &u8| crc >> 8 ^ TABLE[usize::from(crc as u8 ^ byte)];
    !parts.iter().copied().flatten().fold(!0, step)
}

/// CRC-32C of `bytes`, with the four bytes at `at` taken as zero.
pub fn crc32c_without(bytes: &[u8], at: usize) -> u32 {
    crc32c(&[&bytes[..at], &[0; 4], &bytes[at + 4..]])
}

const fn crc_table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut i = 0;
    while i < 256 {
        let mut crc = i as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = crc >> 1 ^ if crc & 1 != 0 { 0x82f6_3b78 } else { 0 };
            bit += 1;
        }
        table[i] = crc;
        i += 1;
    }
    table
}

/// Products and inverses of GF(2^8) with the polynomial 0x11d.
pub struct Field {
    exp: [u8; 510],
    log: [usize; 256],
}

impl Field {
    /// The tables.
    pub fn new() -> Field {
        let mut field = Field { exp: [0; 510], log: [0; 256] };
        let mut value = 1u16;
        for i in 0..255 {
            (field.exp[i], field.exp[i + 255], field.log[usize::from(value)]) = (value as u8, value as u8, i);
            value = value << 1 ^ if value & 0x80 != 0 { 0x11d } else { 0 };
        }
        field
    }

    /// a · b
    pub fn multiply(&self, a: u8, b: u8) -> u8 {
        match (a, b) {
            (0, _) | (_, 0) => 0,
            _ => self.exp[self.log[usize::from(a)] + self.log[usize::from(b)]],
        }
    }

    /// 1 / a; `a` is not 0.
    pub fn inverse(&self, a: u8) -> u8 {
        self.exp[255 - self.log[usize::from(a)]]
    }

    /// The coefficient of data strip `i` of `k` in parity `j`.
    pub fn coefficient(&self, matrix: u8, k: usize, j: usize, i: usize) -> u8 {
        match matrix {
            0 => 1,
            1 => self.exp[i * j % 255],
            _ => self.multiply((k ^ i) as u8, self.inverse(((k + j) ^ i) as u8)),
        }
    }

    /// Adds c · source to target.
    pub fn add(&self, c: u8, source: &[u8], target: &mut [u8]) {
        let products: [u8; 256] = std::array::from_fn(|x| self.multiply(c, x as u8));
        target.iter_mut().zip(source).for_each(|(t, s)| *t ^= products[usize::from(*s)]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_rfc_3720() {
        assert_eq!(crc32c(&[&[0; 32]]), 0x8a91_36aa);
        assert_eq!(crc32c(&[b"1234", b"56789"]), 0xe306_9283);
        assert_eq!(crc32c_without(b"1234abcd56789", 4), crc32c(&[b"1234", &[0; 4], b"56789"]));
    }

    #[test]
    fn every_number_but_0_has_an_inverse_and_products_are_bitwise() {
        let field = Field::new();
        for a in 1..=255 {
            assert_eq!(field.multiply(a, field.inverse(a)), 1);
        }
        assert_eq!(field.multiply(0x80, 2), 0x1d);
        assert_eq!(field.coefficient(1, 4, 2, 3), 64);
        assert!((0..4).all(|i| field.coefficient(2, 4, 0, i) == 1));
    }
}
