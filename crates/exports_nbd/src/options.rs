//! Parsers for the data of options. Pure; no length from the client is trusted.

use nbd::{u16_at, u32_at};

/// Longest name, query or other string that the protocol allows.
pub(crate) const MAX_STRING: usize = 4096;

/// The reason why an option's data is malformed.
pub(crate) type Malformed = &'static str;

/// A cursor over an option's data.
struct Parts<'a>(&'a [u8]);

impl<'a> Parts<'a> {
    fn bytes(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (front, rest) =
            self.0.split_at_checked(len).ok_or("the option's data is shorter than its fields")?;
        self.0 = rest;
        Ok(front)
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        Ok(u32_at(self.bytes(4)?, 0))
    }

    /// A string with its length in front.
    fn string(&mut self) -> Result<&'a [u8], Malformed> {
        let len = self.u32()? as usize;
        if len > MAX_STRING {
            return Err("a string is longer than 4096 bytes");
        }
        self.bytes(len)
    }

    fn end(&self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err("the option's data is longer than its fields") }
    }
}

/// NBD_OPT_INFO, NBD_OPT_GO: the export's name, and the requested information.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Info<'a> {
    pub(crate) name: &'a [u8],
    wanted: &'a [u8],
}

impl<'a> Info<'a> {
    pub(crate) fn parse(data: &'a [u8]) -> Result<Info<'a>, Malformed> {
        let mut parts = Parts(data);
        let name = parts.string()?;
        let count = u16_at(parts.bytes(2)?, 0);
        let wanted = parts.bytes(2 * usize::from(count))?;
        parts.end()?;
        Ok(Info { name, wanted })
    }

    /// Whether the client requested this information.
    pub(crate) fn wants(&self, info: u16) -> bool {
        self.wanted.chunks_exact(2).any(|wanted| u16_at(wanted, 0) == info)
    }
}

/// Queries that list every context which begins so.
const WILDCARDS: [&[u8]; 3] = [b"base:", b"qemu:", b"qemu:dirty-bitmap:"];

/// NBD_OPT_LIST_META_CONTEXT, NBD_OPT_SET_META_CONTEXT: the export's name and the queries.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Contexts<'a> {
    pub(crate) name: &'a [u8],
    queries: Vec<&'a [u8]>,
}

impl<'a> Contexts<'a> {
    pub(crate) fn parse(data: &'a [u8]) -> Result<Contexts<'a>, Malformed> {
        let mut parts = Parts(data);
        let name = parts.string()?;
        let count = parts.u32()?;
        let mut queries = Vec::new();
        // Each query takes at least four bytes, so the data bounds the loop.
        for _ in 0..count {
            queries.push(parts.string()?);
        }
        parts.end()?;
        Ok(Contexts { name, queries })
    }

    /// Whether a query selects the context.
    pub(crate) fn selects(&self, context: &str) -> bool {
        self.queries.contains(&context.as_bytes())
    }

    /// Whether the queries list the context: by its name, by a wildcard, or because there are none.
    pub(crate) fn lists(&self, context: &str) -> bool {
        let is_prefix = |query: &&[u8]| WILDCARDS.contains(query) && context.as_bytes().starts_with(query);
        self.queries.is_empty() || self.selects(context) || self.queries.iter().any(is_prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn string(text: &[u8]) -> Vec<u8> {
        [&(text.len() as u32).to_be_bytes(), text].concat()
    }

    #[test]
    fn requested_information_about_an_export_is_parsed() {
        let data = [string(b"disk"), vec![0, 2, 0, 3, 1, 0]].concat();
        let info = Info::parse(&data).unwrap();
        assert_eq!(info.name, b"disk");
        assert!(info.wants(3) && info.wants(0x100) && !info.wants(0) && !info.wants(1));
        assert!(!Info::parse(&[string(b""), vec![0, 0]].concat()).unwrap().wants(0));
    }

    #[test]
    fn queries_select_a_context_by_name_and_list_those_of_a_wildcard() {
        let found = |queries: &[&str]| {
            let count = (queries.len() as u32).to_be_bytes().to_vec();
            let strings = queries.iter().flat_map(|query| string(query.as_bytes())).collect();
            let data = [string(b"d"), count, strings].concat();
            let contexts = Contexts::parse(&data).unwrap();
            let all = ["base:allocation", "qemu:dirty-bitmap:a:", "qemu:dirty-bitmap:a:b"];
            (all.map(|context| contexts.selects(context)), all.map(|context| contexts.lists(context)))
        };
        assert_eq!(found(&[]), ([false; 3], [true; 3]));
        assert_eq!(found(&["qemu:x", "base:allocation"]), ([true, false, false], [true, false, false]));
        assert_eq!(found(&["base:"]), ([false; 3], [true, false, false]));
        assert_eq!(found(&["qemu:"]), ([false; 3], [false, true, true]));
        assert_eq!(found(&["qemu:dirty-bitmap:"]), ([false; 3], [false, true, true]));
        assert_eq!(found(&["qemu:dirty-bitmap:a:"]), ([false, true, false], [false, true, false]));
        assert_eq!(found(&["base:allocation:depth", "", "qemu"]), ([false; 3], [false; 3]));
    }

    #[test]
    fn every_cut_and_every_surplus_is_refused() {
        let info = [string(b"disk"), vec![0, 1, 0, 3]].concat();
        let contexts = [string(b"disk"), vec![0, 0, 0, 1], string(b"base:")].concat();
        for len in 0..info.len() {
            assert!(Info::parse(&info[..len]).is_err(), "{len}");
        }
        for len in 0..contexts.len() {
            assert!(Contexts::parse(&contexts[..len]).is_err(), "{len}");
        }
        assert!(Info::parse(&[&info[..], b"x"].concat()).is_err());
        assert!(Contexts::parse(&[&contexts[..], b"x"].concat()).is_err());
    }

    #[test]
    fn lengths_that_lie_are_refused() {
        for len in [5u32, 4097, u32::MAX] {
            let data = [&len.to_be_bytes()[..], b"disk"].concat();
            assert!(Info::parse(&data).is_err() && Contexts::parse(&data).is_err(), "{len}");
        }
        let many = [string(b"d"), u32::MAX.to_be_bytes().to_vec(), vec![0; 400]].concat();
        assert!(Contexts::parse(&many).is_err());
        let long = [string(&[b'x'; 4097]), vec![0, 0]].concat();
        assert_eq!(Info::parse(&long), Err("a string is longer than 4096 bytes"));
    }
}
