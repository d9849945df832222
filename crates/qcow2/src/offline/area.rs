//! New clusters behind the last used one, with their refcounts.
//!
//! ```text
//!   … used clusters │ parts │ new refcount blocks │ new refcount table │ free …
//! ```
//!
//! The content is durable before the refcounts, and these before the refcount table. A crash leaves
//! clusters that are not free and not used.

use super::Offline;
use crate::error::Problem;
use crate::header::{MAX_REFCOUNT_TABLE_BYTES, at, be_bytes, be64};
use crate::refcount::{BLOCK_OFFSET, Width};
use std::ops::Range;

/// Places of clusters, by number.
struct Plan {
    /// The new parts.
    parts: Range<u64>,
    /// New refcount blocks: place in the refcount table, and cluster.
    blocks: Vec<(u64, u64)>,
    /// A new refcount table; empty if the old one is long enough.
    table: Range<u64>,
}

impl Plan {
    /// Plans `count` clusters from cluster `start` on, and what must be added to count them.
    fn new(start: u64, count: u64, table: &[u64], in_block: u64, size: u64) -> Plan {
        let (mut blocks, mut tables) = (Vec::new(), 0);
        loop {
            let (behind, known) = (start + count, blocks.len() as u64);
            let last = (behind + known + tables - 1) / in_block;
            let missing = (start / in_block..=last)
                .filter(|number| table.get(*number as usize).is_none_or(|at| *at == 0));
            blocks = missing.zip(behind..).collect();
            let has_place = last < table.len() as u64;
            let needed = if has_place { 0 } else { ((last + 1) * 8).div_ceil(size) };
            if (blocks.len() as u64, needed) == (known, tables) {
                let behind = behind + known;
                return Plan { parts: start..start + count, blocks, table: behind..behind + tables };
            }
            tables = needed;
        }
    }

    fn all(&self) -> Range<u64> {
        self.parts.start..self.table.end
    }
}

impl Offline {
    /// Writes parts to new clusters from cluster `start` on, which no other is behind. Returns the
    /// first byte of each.
    pub(super) async fn append(&mut self, start: u64, parts: &[&[u8]]) -> Result<Vec<u64>, Problem> {
        self.begin().await?;
        let size = self.header.cluster_size();
        let width = Width { order: self.header.refcount_order };
        let in_block = width.entries(size);
        let (at, bytes) =
            (self.header.refcount_table_offset, u64::from(self.header.refcount_table_clusters) * size);
        let table = self.reader().read(at, bytes).await;
        let table = table.map_err(|error| Problem::Io { part: "the refcount table", offset: at, error })?;
        let mut table: Vec<u64> = table.chunks_exact(8).map(|entry| be64(entry, 0) & BLOCK_OFFSET).collect();
        let count = parts.iter().map(|part| (part.len() as u64).div_ceil(size)).sum();
        let plan = Plan::new(start, count, &table, in_block, size);
        let table_bytes = (plan.table.end - plan.table.start) * size;
        if table_bytes > MAX_REFCOUNT_TABLE_BYTES {
            let text = format!("a refcount table of {table_bytes} bytes: at most {MAX_REFCOUNT_TABLE_BYTES}");
            return Err(Problem::Refused(text));
        }
        self.make_room(plan.all().end * size)?;
        let mut places = Vec::new();
        let mut next = start * size;
        for part in parts {
            let mut whole = part.to_vec();
            whole.resize(part.len().next_multiple_of(size as usize), 0);
            self.write("a new table", next, &whole).await?;
            places.push(next);
            next += whole.len() as u64;
        }
        for (number, cluster) in &plan.blocks {
            let mut block = vec![0; size as usize];
            set_ones(width, &mut block, number * in_block, plan.all(), in_block);
            self.write("a refcount block", cluster * size, &block).await?;
        }
        self.flush().await?;
        for number in start / in_block..=(plan.all().end - 1) / in_block {
            let Some(block_at) = table.get(number as usize).copied().filter(|at| *at != 0) else { continue };
            let block = self.reader().read_padded(block_at, size).await;
            let failed = |error| Problem::Io { part: "a refcount block", offset: block_at, error };
            let mut block = block.map_err(failed)?;
            set_ones(width, &mut block, number * in_block, plan.all(), in_block);
            self.write("a refcount block", block_at, &block).await?;
        }
        self.flush().await?;
        table.resize(table.len().max((table_bytes / 8) as usize), 0);
        plan.blocks.iter().for_each(|(number, cluster)| table[*number as usize] = cluster * size);
        if plan.table.is_empty() {
            for (number, cluster) in &plan.blocks {
                let entry = (cluster * size).to_be_bytes();
                self.write("the refcount table", at + number * 8, &entry).await?;
            }
            self.flush().await?;
        } else {
            let at = plan.table.start * size;
            self.write("the refcount table", at, &be_bytes(table)).await?;
            let mut fields = at.to_be_bytes().to_vec();
            fields.extend(((table_bytes / size) as u32).to_be_bytes());
            self.write_header(at::REFCOUNT_TABLE, &fields).await?;
        }
        Ok(places)
    }
}

/// Sets the refcount 1 for those clusters that a block counts, whose first one is `first`.
fn set_ones(width: Width, block: &mut [u8], first: u64, clusters: Range<u64>, in_block: u64) {
    for cluster in clusters.start.max(first)..clusters.end.min(first + in_block) {
        width.set(block, (cluster - first) as usize, 1);
    }
}
