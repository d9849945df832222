//! The types that values of a specification have.

use base::{Size, Uuid};
use std::path::PathBuf;

/// A type that a value can have.
pub trait Value: Sized {
    /// Describes valid values, for the message about an invalid one.
    fn expected() -> String;
    /// The value that `text` stands for.
    fn parse(text: &str) -> Option<Self>;
}

impl Value for Size {
    fn expected() -> String {
        "a number of bytes such as 512, 4K, 1M, 20G or 1T".into()
    }

    fn parse(text: &str) -> Option<Self> {
        Size::parse(text)
    }
}

/// `on` or `off`, in all the words that people use for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Switch(pub bool);

impl Value for Switch {
    fn expected() -> String {
        "on or off".into()
    }

    fn parse(text: &str) -> Option<Self> {
        match text {
            "on" | "true" | "yes" | "1" => Some(Switch(true)),
            "off" | "false" | "no" | "0" => Some(Switch(false)),
            _ => None,
        }
    }
}

/// Processors: `0,2`, `0+2` or `0-3` and mixtures. No processor comes twice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuList(pub Vec<usize>);

/// Most processors of a list: more than any machine has, and `0-99999999999` is refused.
const MAX_CPUS: usize = 1024;

impl Value for CpuList {
    fn expected() -> String {
        "processors such as 0, 0+1 or 0-3, each once".into()
    }

    fn parse(text: &str) -> Option<Self> {
        let mut cpus = Vec::new();
        for part in text.split([',', '+']) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (whole_number(first)? as usize, whole_number(last)? as usize);
            if first > last || last >= MAX_CPUS || cpus.iter().any(|cpu| (first..=last).contains(cpu)) {
                return None;
            }
            cpus.extend(first..=last);
        }
        Some(CpuList(cpus))
    }
}

/// A positive number of seconds, in nanoseconds: `5`, `0.5`, `5s`, `20ms`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seconds {
    /// The same in nanoseconds.
    pub ns: u64,
}

impl Value for Seconds {
    fn expected() -> String {
        "a number of seconds such as 5, 0.5 or 200ms".into()
    }

    fn parse(text: &str) -> Option<Self> {
        let (number, unit_ns) = match text.strip_suffix("ms") {
            Some(number) => (number, 1e6),
            None => (text.strip_suffix('s').unwrap_or(text), 1e9),
        };
        let is_plain = number.bytes().all(|b| b.is_ascii_digit() || b == b'.');
        let ns = number.parse::<f64>().ok().filter(|_| is_plain)? * unit_ns;
        // A year: what is longer is a mistake.
        (0.0..=3.2e16).contains(&ns).then_some(Seconds { ns: ns as u64 })
    }
}

impl Value for Uuid {
    fn expected() -> String {
        "a UUID".into()
    }

    fn parse(text: &str) -> Option<Self> {
        Uuid::parse(text)
    }
}

impl Value for String {
    fn expected() -> String {
        "a text".into()
    }

    fn parse(text: &str) -> Option<Self> {
        Some(text.to_owned())
    }
}

impl Value for PathBuf {
    fn expected() -> String {
        "a path".into()
    }

    fn parse(text: &str) -> Option<Self> {
        (!text.is_empty()).then(|| PathBuf::from(text))
    }
}

macro_rules! whole_numbers {
    ($($type:ty),*) => {$(
        impl Value for $type {
            fn expected() -> String {
                match <$type>::MAX as u64 {
                    u64::MAX => "a whole number".into(),
                    max => format!("a whole number from 0 to {max}"),
                }
            }

            fn parse(text: &str) -> Option<Self> {
                whole_number(text)?.try_into().ok()
            }
        }
    )*};
}

whole_numbers!(u16, u32, u64);

/// Decimal digits only: no sign, no space.
fn whole_number(text: &str) -> Option<u64> {
    text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_listed_and_ranged_but_not_repeated() {
        assert_eq!(CpuList::parse("3"), Some(CpuList(vec![3])));
        assert_eq!(CpuList::parse("0,2-4"), Some(CpuList(vec![0, 2, 3, 4])));
        assert_eq!(CpuList::parse("1+0"), Some(CpuList(vec![1, 0])));
        for text in ["", "a", "1,", "3-1", "0,0", "0-2,1", "0-9999999999", "-1", "1024"] {
            assert_eq!(CpuList::parse(text), None, "{text}");
        }
    }

    #[test]
    fn durations_are_seconds_unless_they_say_otherwise() {
        assert_eq!(Seconds::parse("5").map(|s| s.ns), Some(5_000_000_000));
        assert_eq!(Seconds::parse("0.25s").map(|s| s.ns), Some(250_000_000));
        assert_eq!(Seconds::parse("200ms").map(|s| s.ns), Some(200_000_000));
        for text in ["", "s", "-1", "1e3", "nan", "inf", "99999999999", "."] {
            assert_eq!(Seconds::parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_switch_knows_the_usual_words() {
        for (text, is_on) in
            [("on", true), ("yes", true), ("true", true), ("off", false), ("no", false), ("false", false)]
        {
            assert_eq!(Switch::parse(text), Some(Switch(is_on)));
        }
        assert_eq!(Switch::parse("ON"), None);
    }
}
