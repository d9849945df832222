//! Numbers of bytes as people write and read them.

use std::fmt;

/// A number of bytes. It is read as `512`, `4K` or `20G`, and printed as `512 B`, `4 KiB` or
/// `1.5 GiB`: units are powers of 1024.
///
/// ```
/// use base::Size;
///
/// assert_eq!(Size::parse("4K"), Some(Size(4096)));
/// assert_eq!(Size(1536 << 20).to_string(), "1.5 GiB");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Size(pub u64);

impl Size {
    /// Parses decimal digits, and a suffix: none, `B`, `K`, `k` or `KiB`, likewise for M, G and T.
    /// `None`: `text` has another form, or the number has more than 64 bits.
    pub fn parse(text: &str) -> Option<Size> {
        let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
        let shift = match &text[digits.len()..] {
            "" | "B" => 0,
            "K" | "k" | "KiB" => 10,
            "M" | "m" | "MiB" => 20,
            "G" | "g" | "GiB" => 30,
            "T" | "t" | "TiB" => 40,
            _ => return None,
        };
        let is_plain = digits.bytes().all(|byte| byte.is_ascii_digit());
        let number: u64 = digits.parse().ok().filter(|_| is_plain)?;
        number.checked_mul(1 << shift).map(Size)
    }
}

/// With one decimal, if the number of units is not whole.
impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        let decimals = if value.fract() == 0.0 { 0 } else { 1 };
        f.pad(&format!("{value:.decimals$} {}", UNITS[unit]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_binary_suffixes_and_never_overflow() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("4K", 4096),
            ("4k", 4096),
            ("1MiB", 1 << 20),
            ("3T", 3 << 40),
            ("7B", 7),
        ] {
            assert_eq!(Size::parse(text), Some(Size(bytes)), "{text}");
        }
        for text in
            ["", "K", "-1", "+1", "1.5G", "1 K", "1KK", "99999999999999999999", "18446744073709551615K", "4é"]
        {
            assert_eq!(Size::parse(text), None, "{text}");
        }
    }

    #[test]
    fn sizes_are_readable_and_fill_columns() {
        let texts =
            [(0, "0 B"), (512, "512 B"), (4096, "4 KiB"), (1536 << 20, "1.5 GiB"), (u64::MAX, "16384 PiB")];
        for (bytes, text) in texts {
            assert_eq!(Size(bytes).to_string(), text);
        }
        assert_eq!(format!("{:>8}|{:<8}", Size(4096), Size(0)), "   4 KiB|0 B     ");
    }
}
