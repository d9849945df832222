//! The expected content of blocks that a benchmark wrote, against which it compares reads.
//!
//! Every 8 bytes depend on the seed, the block and how often the block was written, so that data in
//! the wrong place and old data are detected. One task alone reads and writes a block, so its
//! content is always known.

use super::tally::Mismatch;
use base::Rng;

/// Content of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Unknown: not written yet, or discarded, or a write failed.
    Unknown,
    /// Zeroes.
    Zeroes,
    /// The data of the write with this number.
    Written(u32),
}

/// Contents of some blocks; grows with the accessed blocks only.
#[derive(Default)]
pub struct Ledger {
    /// By index: 0 unknown, 1 zeroes, else the write's number and 1.
    entries: Vec<u32>,
    writes: u32,
}

impl Ledger {
    /// Content of the block with this index.
    pub fn content(&self, index: u64) -> Content {
        match self.entries.get(index as usize) {
            None | Some(0) => Content::Unknown,
            Some(1) => Content::Zeroes,
            Some(entry) => Content::Written(entry - 1),
        }
    }

    /// Says what the block with this index holds from now on.
    pub fn set(&mut self, index: u64, content: Content) {
        let index = index as usize;
        if index >= self.entries.len() {
            self.entries.resize(index + 1, 0);
        }
        self.entries[index] = match content {
            Content::Unknown => 0,
            Content::Zeroes => 1,
            Content::Written(number) => number + 1,
        };
    }

    /// A new write's content.
    pub fn next_write(&mut self) -> Content {
        self.writes = self.writes % (u32::MAX - 1) + 1;
        Content::Written(self.writes)
    }

    /// Indexes of blocks whose content is known.
    pub fn known(&self) -> impl Iterator<Item = u64> {
        self.entries.iter().enumerate().filter(|(_, entry)| **entry != 0).map(|(index, _)| index as u64)
    }
}

/// Fills `buffer` with what the block at byte `offset` holds.
///
/// # Panics
/// When that is unknown.
pub fn fill(buffer: &mut [u8], seed: u64, offset: u64, content: Content) {
    let mut words = words(seed, offset, content);
    for word in buffer.chunks_mut(8) {
        word.copy_from_slice(&words().to_le_bytes()[..word.len()]);
    }
}

/// Compares `buffer` with what the block at byte `offset` holds.
///
/// # Panics
/// When that is unknown.
pub fn compare(buffer: &[u8], seed: u64, offset: u64, content: Content) -> Option<Mismatch> {
    let mut words = words(seed, offset, content);
    for (i, word) in buffer.chunks_exact(8).enumerate() {
        let (expected, found) = (words(), u64::from_le_bytes(word.try_into().expect("eight bytes")));
        if expected != found {
            return Some(Mismatch { offset: offset + i as u64 * 8, expected, found });
        }
    }
    None
}

fn words(seed: u64, offset: u64, content: Content) -> impl FnMut() -> u64 {
    let number = match content {
        Content::Unknown => panic!("the content at {offset} is unknown"),
        Content::Zeroes => None,
        Content::Written(number) => Some(number),
    };
    let mut rng = Rng::new(seed ^ offset.rotate_left(32) ^ u64::from(number.unwrap_or(0)));
    move || if number.is_some() { rng.draw() } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_told_from_others_and_from_what_it_held_before() {
        let mut ledger = Ledger::default();
        let first = ledger.next_write();
        let second = ledger.next_write();
        let mut block = vec![0; 4096];
        fill(&mut block, 1, 8192, first);
        assert_eq!(compare(&block, 1, 8192, first), None);
        for (seed, offset, content) in
            [(2, 8192, first), (1, 4096, first), (1, 8192, second), (1, 8192, Content::Zeroes)]
        {
            let mismatch = compare(&block, seed, offset, content).expect("something else");
            assert_eq!(mismatch.offset, offset);
        }
        block[4088] ^= 1;
        assert_eq!(compare(&block, 1, 8192, first).map(|m| m.offset), Some(8192 + 4088));
    }

    #[test]
    fn the_ledger_knows_what_was_touched() {
        let mut ledger = Ledger::default();
        let written = ledger.next_write();
        ledger.set(5, written);
        ledger.set(2, Content::Zeroes);
        ledger.set(7, Content::Zeroes);
        ledger.set(7, Content::Unknown);
        assert_eq!(ledger.content(5), written);
        assert_eq!(ledger.content(1 << 40), Content::Unknown);
        assert_eq!(ledger.known().collect::<Vec<_>>(), [2, 5]);
    }
}
