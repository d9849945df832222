//! Content of a simulated disk: sparse pages.

use block::Data;

const PAGE: usize = 4096;

/// Bytes, which are zero until written.
pub(crate) struct Medium {
    pages: Vec<Option<Box<[u8; PAGE]>>>,
}

impl Medium {
    pub(crate) fn new(capacity: u64) -> Medium {
        Medium { pages: vec![None; capacity.div_ceil(PAGE as u64) as usize] }
    }

    /// Changes the length. New bytes are zero.
    pub(crate) fn resize(&mut self, capacity: u64) {
        let page = PAGE as u64;
        if let Some(Some(last)) = self.pages.get_mut((capacity / page) as usize) {
            last[(capacity % page) as usize..].fill(0);
        }
        self.pages.resize(capacity.div_ceil(page) as usize, None);
    }

    /// Calls `part` for each page of a range: page number, offset in the page, offset in the range,
    /// length.
    fn parts(offset: u64, len: usize, mut part: impl FnMut(usize, usize, usize, usize)) {
        let mut done = 0;
        while done < len {
            let at = offset as usize + done;
            let inside = at % PAGE;
            let n = (PAGE - inside).min(len - done);
            part(at / PAGE, inside, done, n);
            done += n;
        }
    }

    pub(crate) fn read(&self, offset: u64, bytes: &mut [u8]) {
        Medium::parts(offset, bytes.len(), |page, inside, at, n| match &self.pages[page] {
            Some(page) => bytes[at..at + n].copy_from_slice(&page[inside..inside + n]),
            None => bytes[at..at + n].fill(0),
        });
    }

    pub(crate) fn read_into(&self, offset: u64, data: &Data<'_>) {
        Medium::parts(offset, data.len(), |page, inside, at, n| match &self.pages[page] {
            Some(page) => drop(data.part(at, n).copy_from(&page[inside..inside + n])),
            None => data.part(at, n).fill(0),
        });
    }

    fn page(&mut self, page: usize) -> &mut [u8; PAGE] {
        self.pages[page].get_or_insert_with(|| Box::new([0; PAGE]))
    }

    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8]) {
        Medium::parts(offset, bytes.len(), |page, inside, at, n| {
            self.page(page)[inside..inside + n].copy_from_slice(&bytes[at..at + n]);
        });
    }

    pub(crate) fn write_from(&mut self, offset: u64, data: &Data<'_>) {
        Medium::parts(offset, data.len(), |page, inside, at, n| {
            data.part(at, n).copy_to(&mut self.page(page)[inside..inside + n]);
        });
    }

    pub(crate) fn zero(&mut self, offset: u64, len: u64) {
        Medium::parts(offset, len as usize, |page, inside, _, n| {
            if n == PAGE {
                self.pages[page] = None;
            } else if self.pages[page].is_some() {
                self.page(page)[inside..inside + n].fill(0);
            }
        });
    }
}
