//! A table of a mapping in memory, and the cost of its entries.

use block::{DeviceError, IoResult};
use mapping::{Config, ENTRIES, Format, Leaf, Table, View};
use reactor::{CoreConfig, Cores};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

/// Entries of the table: 2048 leaves, 8 MiB.
const COUNT: u64 = 1 << 20;
/// Entries that are read in a round.
const ROUND: u64 = 1 << 20;

/// A table whose entries are their own numbers.
struct Numbers;

impl Format for Numbers {
    type Local = ();

    fn open(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    async fn load(_: &Rc<View<Numbers>>, leaf: u64, entries: &Leaf) -> IoResult {
        let first = leaf * ENTRIES as u64;
        (0..ENTRIES).for_each(|slot| entries.set(slot, first + slot as u64));
        Ok(())
    }

    async fn save(_: &Rc<View<Numbers>>, _: u64, _: &Leaf, _: Range<usize>) -> IoResult {
        Ok(())
    }
}

/// Measures a request that reads one entry, on one core: the nanoseconds, in the median of five
/// rounds, and the allocations of a round.
///
/// # Panics
/// If no core starts, or an entry is wrong.
#[must_use]
pub fn measure_entries() -> (f64, u64) {
    let cores = Cores::start(&[CoreConfig::default()]).expect("a core");
    let config = Config { entries: COUNT, cache_bytes: 16 << 20 };
    let table = Table::open(Numbers, cores.all(), config).expect("a table");
    let table = Arc::new(table);
    let warm = table.clone();
    let fetch_all = move |_| async move {
        let view = warm.view().expect("it opens");
        for leaf in 0..COUNT / ENTRIES as u64 {
            let index = leaf * ENTRIES as u64;
            assert_eq!(view.fetch(index).await, Ok(index));
        }
    };
    cores.get(0).block_on(fetch_all).expect("the core runs");
    let measured = cores.get(0).call(move |_| {
        let view = table.view().expect("it opens");
        let round = || {
            let started = Instant::now();
            for number in 0..ROUND {
                let index = number.wrapping_mul(7919 * 512 + 1) % COUNT;
                let running = view.begin();
                assert_eq!(view.entry(index), Some(index));
                drop(running);
            }
            started.elapsed().as_nanos() as f64 / ROUND as f64
        };
        let mut rounds: Vec<f64> = (0..5).map(|_| round()).collect();
        rounds.sort_by(f64::total_cmp);
        let allocations = allocation_counter::measure(|| {
            round();
        });
        (rounds[2], allocations.count_total)
    });
    measured.expect("the core runs")
}
