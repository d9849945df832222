//! Tables of the kinds of a role.

use crate::{Kind, Role, Spec, SpecError};

/// A kind, and the function that reads its specifications: the one line by which a device, layer or
/// export is known. `C` is the configuration that the function returns.
#[derive(Debug)]
pub struct Entry<C: 'static> {
    /// Its name and keys.
    pub kind: &'static Kind,
    /// Makes a configuration of a specification of this kind.
    pub parse: fn(&Spec) -> Result<C, SpecError>,
}

/// The kinds of a table, in its order.
pub const fn kinds<C, const N: usize>(table: &[Entry<C>; N]) -> [&'static Kind; N] {
    let mut kinds = [table[0].kind; N];
    let mut at = 1;
    while at < N {
        kinds[at] = table[at].kind;
        at += 1;
    }
    kinds
}

/// The specification `text`, and the configuration that its kind makes of it.
///
/// # Errors
/// When the table has no such kind, the kind no such key, or a value is invalid.
pub fn parse<C>(role: Role, table: &[Entry<C>], text: &str) -> Result<(Spec, C), SpecError> {
    let kinds: Vec<&'static Kind> = table.iter().map(|entry| entry.kind).collect();
    let spec = Spec::parse(role, &kinds, text)?;
    let entry = table.iter().find(|entry| entry.kind.name == spec.kind());
    let config = (entry.expect("the kind is one of the table").parse)(&spec)?;
    Ok((spec, config))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key;

    static ONE: Kind = Kind { name: "one", about: "1", keys: &[] };
    static TWO: Kind = Kind { name: "two", about: "2", keys: &[key("more", "N", "added")] };
    const TABLE: &[Entry<u32>; 2] = &[
        Entry { kind: &ONE, parse: |_| Ok(1) },
        Entry { kind: &TWO, parse: |spec| Ok(2 + spec.get_or("more", 0u32)?) },
    ];

    #[test]
    fn a_text_is_read_by_its_kind() {
        assert_eq!(kinds(TABLE).map(|kind| kind.name), ["one", "two"]);
        let parse = |text| parse(Role::Device, TABLE, text).map(|(spec, value)| (spec.kind(), value));
        assert_eq!(parse("one").unwrap(), ("one", 1));
        assert_eq!(parse("two:more=40").unwrap(), ("two", 42));
        let refusal = |text| parse(text).unwrap_err().to_string();
        assert_eq!(refusal("three"), "device three: no such device: \"three\"; there are one, two");
        assert!(refusal("one:more=1").contains("unknown key"), "{}", refusal("one:more=1"));
        assert!(refusal("two:more=x").contains("more=x"));
    }
}
