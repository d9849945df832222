//! Internal snapshots: the table of them.
//!
//! Source: QEMU `docs/interop/qcow2.rst`, section *Snapshots*.

use crate::error::{Problem, invalid};
use crate::header::{Header, MAX_L1_BYTES, MAX_SNAPSHOTS, be32, be64};
use crate::reader::Reader;
use std::time::Duration;

/// Length of the fixed part of an entry.
const ENTRY: u64 = 40;
/// Most bytes of extra data in an entry.
const MAX_EXTRA: u64 = 1024;
/// Most bytes of the table.
const MAX_TABLE: u64 = 64 << 20;
/// Longest name of a new snapshot in bytes, as in QEMU.
const MAX_NAME: usize = 255;
/// Most bytes of a new entry.
const MOST_ENTRY: u64 = 512;
/// Bytes of extra data of a new entry: size of the state, size of the disk, instructions.
const EXTRA: u32 = 24;

/// An internal snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Its identifier, a number by convention.
    pub id: String,
    /// Its name.
    pub name: String,
    /// First byte of its L1 table.
    pub l1_offset: u64,
    /// Entries of its L1 table.
    pub l1_entries: u32,
    /// Size of the disk in bytes, if the entry has it; else as the image's.
    pub size: Option<u64>,
    /// Bytes of the virtual machine's state.
    pub vm_state_bytes: u64,
    /// When it was made, in seconds since 1970.
    pub seconds: u32,
    /// Nanoseconds of that second.
    pub nanoseconds: u32,
    /// How long the virtual machine had run, in nanoseconds.
    pub vm_clock_ns: u64,
    /// Instructions that the virtual machine had run, if they were counted.
    pub instructions: Option<u64>,
    /// Bytes of extra data in the entry.
    pub extra_bytes: u32,
}

impl Snapshot {
    /// Checks that the snapshot is a disk of the image with this header. Returns the disk's size in
    /// bytes.
    ///
    /// # Errors
    /// When it is not.
    pub(crate) fn check(&self, header: &Header) -> Result<u64, Problem> {
        if header.has_data_file() {
            return Err(invalid("a snapshot in an image with an external data file"));
        }
        let (bytes, size) = (u64::from(self.l1_entries) * 8, self.size.unwrap_or(header.size));
        header.check_table("the snapshot's L1 table", self.l1_offset, bytes, MAX_L1_BYTES)?;
        let needed = size.div_ceil(header.l2_table_span());
        if needed > u64::from(self.l1_entries) {
            let (name, has) = (&self.name, self.l1_entries);
            return Err(invalid(format!("snapshot {name:?}: L1 table of {has} entries: want {needed}")));
        }
        Ok(size)
    }
}

/// The snapshot with the identifier `wanted` or, if none has it, with that name.
///
/// # Errors
/// When there is none.
pub(crate) fn find<'a>(snapshots: &'a [Snapshot], wanted: &str) -> Result<&'a Snapshot, Problem> {
    let by_id = snapshots.iter().find(|snapshot| snapshot.id == wanted);
    let found = by_id.or_else(|| snapshots.iter().find(|snapshot| snapshot.name == wanted));
    found.ok_or_else(|| {
        let known: Vec<_> = snapshots.iter().map(|snapshot| snapshot.name.as_str()).collect();
        Problem::Refused(format!("no snapshot {wanted:?}: the image has [{}]", known.join(", ")))
    })
}

/// The snapshot table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// The entries in their order.
    pub snapshots: Vec<Snapshot>,
    /// The place of each entry: offset and length in the table.
    pub places: Vec<(u64, u64)>,
    /// Length of the table in bytes.
    pub bytes: u64,
}

impl Table {
    /// The identifier for a new snapshot with this name, of the image with this header.
    ///
    /// # Errors
    /// When the image cannot have it.
    pub(crate) fn check_new(&self, header: &Header, name: &str) -> Result<String, Problem> {
        let refuse = |text: String| Err(Problem::Refused(text));
        if !(1..=MAX_NAME).contains(&name.len()) {
            return refuse(format!("name of {} bytes: want 1 to {MAX_NAME}", name.len()));
        }
        if header.has_data_file() {
            return refuse("an image with an external data file cannot have snapshots".into());
        }
        if self.snapshots.iter().any(|snapshot| snapshot.name == name) {
            return refuse(format!("snapshot {name:?}: the image has one with this name"));
        }
        if header.snapshot_count >= MAX_SNAPSHOTS {
            return refuse(format!("the image has {MAX_SNAPSHOTS} snapshots: no more fit"));
        }
        if self.bytes + MOST_ENTRY > MAX_TABLE {
            return refuse(format!("the snapshot table is longer than {MAX_TABLE} bytes"));
        }
        let number = |snapshot: &Snapshot| snapshot.id.parse::<u64>().unwrap_or(0);
        let last = self.snapshots.iter().map(number).max().unwrap_or(0);
        Ok(last.saturating_add(1).to_string())
    }

    /// The snapshot with the identifier or name `wanted`, and the `bytes` of the table without it.
    ///
    /// # Errors
    /// When there is none.
    pub(crate) fn without(&self, bytes: &[u8], wanted: &str) -> Result<(&Snapshot, Vec<u8>), Problem> {
        let found = find(&self.snapshots, wanted)?;
        let index = self.snapshots.iter().position(|snapshot| std::ptr::eq(snapshot, found));
        let (start, len) = self.places[index.expect("it is in the list")];
        Ok((found, [&bytes[..start as usize], &bytes[(start + len) as usize..]].concat()))
    }
}

/// Reads the snapshot table, also as its bytes.
pub(crate) async fn read_bytes(reader: &Reader, header: &Header) -> Result<(Table, Vec<u8>), Problem> {
    let list = read(reader, header).await?;
    let offset = header.snapshots_offset;
    let bytes = reader.read(offset, list.bytes).await;
    Ok((list, bytes.map_err(|error| Problem::Io { part: "the snapshot table", offset, error })?))
}

/// Reads the snapshot table. Bytes behind the end of the file are zeroes.
pub(crate) async fn read(reader: &Reader, header: &Header) -> Result<Table, Problem> {
    header.check_snapshot_table()?;
    let mut table = Table::default();
    let mut bytes = Bytes { reader, at: header.snapshots_offset, window: Vec::new(), start: 0 };
    for number in 0..header.snapshot_count {
        // Entries behind the file would be empty; QEMU reads them so. They need no memory here.
        if bytes.at >= reader.capacity() {
            let rest = u64::from(header.snapshot_count - number);
            table.bytes = bytes.at + rest * ENTRY - header.snapshots_offset;
            return Ok(table);
        }
        let start = bytes.at;
        table.snapshots.push(read_entry(&mut bytes, number).await?);
        table.places.push((start - header.snapshots_offset, bytes.at - start));
        table.bytes = bytes.at - header.snapshots_offset;
        if table.bytes > MAX_TABLE {
            return Err(invalid(format!("snapshot table: more than {MAX_TABLE} bytes")));
        }
    }
    Ok(table)
}

async fn read_entry(bytes: &mut Bytes<'_>, number: u32) -> Result<Snapshot, Problem> {
    let fixed = bytes.take(ENTRY).await?.to_vec();
    let extra_bytes = be32(&fixed, 36);
    if u64::from(extra_bytes) > MAX_EXTRA {
        let text = format!("snapshot {number}: {extra_bytes} bytes of extra data: at most {MAX_EXTRA}");
        return Err(invalid(text));
    }
    let extra = bytes.take(u64::from(extra_bytes)).await?.to_vec();
    let number_at = |at: usize| extra.get(at..at + 8).map(|field| be64(field, 0));
    let [id_len, name_len] = [12, 14].map(|at| u64::from(u16::from_be_bytes([fixed[at], fixed[at + 1]])));
    let id = String::from_utf8_lossy(bytes.take(id_len).await?).into_owned();
    let name = String::from_utf8_lossy(bytes.take(name_len).await?).into_owned();
    bytes.at = bytes.at.next_multiple_of(8);
    Ok(Snapshot {
        id,
        name,
        l1_offset: be64(&fixed, 0),
        l1_entries: be32(&fixed, 8),
        size: number_at(8),
        vm_state_bytes: number_at(0).unwrap_or_else(|| u64::from(be32(&fixed, 32))),
        seconds: be32(&fixed, 16),
        nanoseconds: be32(&fixed, 20),
        vm_clock_ns: be64(&fixed, 24),
        instructions: number_at(16).filter(|count| *count != u64::MAX),
        extra_bytes,
    })
}

/// The table entry of a new snapshot of a disk of `size` bytes. `now` is the time since 1970.
pub(crate) fn entry(
    l1_offset: u64,
    l1_entries: u32,
    id: &str,
    name: &str,
    now: Duration,
    size: u64,
) -> Vec<u8> {
    let mut bytes = l1_offset.to_be_bytes().to_vec();
    bytes.extend(l1_entries.to_be_bytes());
    bytes.extend((id.len() as u16).to_be_bytes());
    bytes.extend((name.len() as u16).to_be_bytes());
    bytes.extend((now.as_secs() as u32).to_be_bytes());
    bytes.extend(now.subsec_nanos().to_be_bytes());
    bytes.extend([0; 12]); // no virtual machine: no clock, no state
    bytes.extend(EXTRA.to_be_bytes());
    bytes.extend(0u64.to_be_bytes());
    bytes.extend(size.to_be_bytes());
    bytes.extend(u64::MAX.to_be_bytes()); // instructions were not counted
    bytes.extend(id.as_bytes());
    bytes.extend(name.as_bytes());
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    bytes
}

/// The bytes of the file from a place on, read in windows.
struct Bytes<'a> {
    reader: &'a Reader,
    at: u64,
    window: Vec<u8>,
    start: u64,
}

impl Bytes<'_> {
    const WINDOW: u64 = 256 << 10;

    /// The next `len` bytes, which are less than a window.
    async fn take(&mut self, len: u64) -> Result<&[u8], Problem> {
        let is_inside = self.at >= self.start && self.at + len <= self.start + self.window.len() as u64;
        if !is_inside {
            self.start = self.at;
            let window = self.reader.read_padded(self.at, Self::WINDOW).await;
            let part = "the snapshot table";
            self.window = window.map_err(|error| Problem::Io { part, offset: self.at, error })?;
        }
        let from = (self.at - self.start) as usize;
        self.at += len;
        Ok(&self.window[from..from + len as usize])
    }
}
