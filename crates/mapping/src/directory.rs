//! The leaves that a core has: two levels of places, found without hashing.

use crate::leaf::{ENTRIES, Leaf};
use std::sync::Arc;

/// Leaves of one page of a directory.
const PAGE: usize = 512;

/// Leaves by number.
pub(crate) struct Directory {
    pages: Vec<Option<Box<Page>>>,
}

struct Page {
    leaves: [Option<Arc<Leaf>>; PAGE],
    /// Number of leaves; an empty page is freed.
    count: usize,
}

impl Directory {
    /// An empty directory of a table with `entries`.
    pub fn new(entries: u64) -> Directory {
        let pages = entries.div_ceil((ENTRIES * PAGE) as u64) as usize;
        Directory { pages: std::iter::repeat_with(|| None).take(pages).collect() }
    }

    /// A leaf, if it is here.
    #[inline]
    pub fn get(&self, leaf: u64) -> Option<&Arc<Leaf>> {
        let (page, place) = split(leaf);
        self.pages.get(page)?.as_ref()?.leaves[place].as_ref()
    }

    /// Adds a leaf, or replaces it.
    pub fn insert(&mut self, leaf: u64, entries: Arc<Leaf>) {
        let (page, place) = split(leaf);
        let page = self.pages[page]
            .get_or_insert_with(|| Box::new(Page { leaves: [const { None }; PAGE], count: 0 }));
        page.count += usize::from(page.leaves[place].replace(entries).is_none());
    }

    /// Removes a leaf, if it is here.
    pub fn remove(&mut self, leaf: u64) {
        let (page, place) = split(leaf);
        let Some(place_of_page) = self.pages.get_mut(page) else { return };
        let Some(page) = place_of_page else { return };
        page.count -= usize::from(page.leaves[place].take().is_some());
        if page.count == 0 {
            *place_of_page = None;
        }
    }
}

#[inline]
fn split(leaf: u64) -> (usize, usize) {
    ((leaf / PAGE as u64) as usize, (leaf % PAGE as u64) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaves_are_found_until_they_are_removed_and_empty_pages_are_freed() {
        let mut directory = Directory::new(1 << 30);
        let last = (1 << 30) / ENTRIES as u64 - 1;
        for leaf in [0, 511, 512, last] {
            assert!(directory.get(leaf).is_none());
            directory.insert(leaf, Arc::new(Leaf::new()));
            directory.insert(leaf, Arc::new(Leaf::new()));
            assert!(directory.get(leaf).is_some());
        }
        for leaf in [0, 511, 512, last, last] {
            directory.remove(leaf);
            assert!(directory.get(leaf).is_none());
        }
        assert!(directory.pages.iter().all(Option::is_none));
        assert!(directory.get(u64::MAX).is_none());
    }
}
