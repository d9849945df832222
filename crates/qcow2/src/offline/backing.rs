//! The name of the backing file in the header, and its format.
//!
//! ```text
//!   first sector: fields │ extensions, the format first ┊ extensions, end mark │ old name │ new name
//!                 └─────────── one write ─────────────┘ ┊ └── bytes that the old header uses stay ──┘
//! ```
//!
//! Everything behind the first sector is written first, and changes no byte that the old header
//! uses. So a crash leaves the old name with the old format, or the new ones.

use super::{Offline, refuse_first};
use crate::error::{Error, Problem};
use crate::header::{
    BACKING_FORMAT, FEATURE_NAMES, Header, MAX_FORMAT_NAME, MAX_NAME, RawExtension, at, autoclear, be32,
    be64, extensions,
};
use block::Device;
use std::ops::Range;
use std::sync::Arc;

/// Bytes that are written at once.
const SECTOR: usize = super::SECTOR as usize;

/// A backing file as a header names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backing {
    /// The name.
    pub name: String,
    /// The format.
    pub format: String,
}

/// Has the header of the image on `device` name another backing file, or none. The clusters of the
/// image stay as they are.
///
/// # Errors
/// When the image is marked as corrupt, or its header has no room for the name; the device's.
pub async fn set(device: &Arc<dyn Device>, backing: Option<&Backing>) -> Result<(), Error> {
    let run = async {
        let mut image = Offline::open(device).await?;
        image.check_backing(backing).await?;
        image.set_backing(backing).await
    };
    run.await.map_err(|problem| Error::new(device.name(), problem))
}

impl Offline {
    /// Refuses a backing file that the header cannot name. Changes nothing.
    pub(super) async fn check_backing(&self, backing: Option<&Backing>) -> Result<(), Problem> {
        self.check_not_corrupt()?;
        if backing.is_some() && self.header.autoclear & autoclear::RAW_DATA != 0 {
            let text = "an image with a raw external data file has no backing file";
            return Err(Problem::Refused(text.into()));
        }
        new_cluster(&self.first_cluster().await?, &self.header, backing).map(drop)
    }

    /// Refuses an image whose content would not stay the same with another backing file. `change`:
    /// the command as a participle.
    pub(super) fn check_overlay(&self, change: &str) -> Result<(), Problem> {
        self.check_plain(change)?;
        let (size, snapshots) = (self.header.size, self.header.snapshot_count);
        let refusals = [
            (!size.is_multiple_of(super::SECTOR), format!("size {size}: want a multiple of {SECTOR} bytes")),
            (
                snapshots > 0,
                format!("{snapshots} internal snapshots, whose content may change with the backing file"),
            ),
        ];
        refuse_first(change, refusals)
    }

    pub(super) async fn set_backing(&mut self, backing: Option<&Backing>) -> Result<(), Problem> {
        self.begin().await?;
        let old = self.first_cluster().await?;
        let new = new_cluster(&old, &self.header, backing)?;
        self.write_first_cluster(&old, &new).await
    }

    /// Replaces the first cluster. Bytes behind the first sector that the old header uses are the
    /// same.
    pub(super) async fn write_first_cluster(&mut self, old: &[u8], new: &[u8]) -> Result<(), Problem> {
        let (behind, sector) = in_two_writes(old, new);
        if let Some((at, bytes)) = behind {
            self.write("the header", at, bytes).await?;
        }
        self.write_header(0, sector).await
    }

    pub(super) async fn first_cluster(&self) -> Result<Vec<u8>, Problem> {
        let cluster = self.reader().read_padded(0, self.header.cluster_size()).await;
        cluster.map_err(|error| Problem::Io { part: "the header", offset: 0, error })
    }
}

/// The two writes by which a new first cluster replaces the old one. The first is of bytes that
/// change behind the first sector, with their place in the file; the second is of that sector.
pub(crate) fn in_two_writes<'a>(old: &[u8], new: &'a [u8]) -> (Option<(u64, &'a [u8])>, &'a [u8]) {
    let mut changed = (SECTOR..new.len()).filter(|at| old[*at] != new[*at]);
    let behind = changed.next().map(|first| {
        let last = changed.next_back().unwrap_or(first);
        (first as u64, &new[first..=last])
    });
    (behind, &new[..SECTOR])
}

/// The first cluster with another backing file. Bytes behind the first sector that the old header
/// uses are the same.
pub(crate) fn new_cluster(
    old: &[u8],
    header: &Header,
    backing: Option<&Backing>,
) -> Result<Vec<u8>, Problem> {
    if let Some(Backing { name, format }) = backing {
        let (len, most) = (name.len(), MAX_NAME);
        if !(1..=most).contains(&len) {
            return Err(Problem::Refused(format!("backing file name of {len} bytes: want 1 to {most}")));
        }
        let (len, most) = (format.len(), MAX_FORMAT_NAME);
        if !(1..=most).contains(&len) {
            return Err(Problem::Refused(format!("backing format of {len} bytes: want 1 to {most}")));
        }
    }
    let name = backing.map_or("", |backing| &backing.name);
    let format = backing.map(|backing| backing.format.clone().into_bytes());
    let (len, size) = (name.len(), old.len());
    let no_room = || {
        Problem::Refused(format!("backing file name of {len} bytes: no room in the header of {size} bytes"))
    };
    with_extension(old, header, BACKING_FORMAT, format, Some(name.as_bytes()))?.ok_or_else(no_room)
}

/// The first cluster with other bytes of an extension, or without it, and with another name of the
/// backing file; `name`: `None` keeps it. Bytes behind the first sector that the old header uses
/// are the same. Returns `None` if there is no room.
pub(super) fn with_extension(
    old: &[u8],
    header: &Header,
    kind: u32,
    bytes: Option<Vec<u8>>,
    name: Option<&[u8]>,
) -> Result<Option<Vec<u8>>, Problem> {
    let start = header.header_length as usize;
    let (name_at, name_len) = (be64(old, at::BACKING) as usize, be32(old, at::BACKING + 8) as usize);
    let end = if name_at == 0 { old.len() } else { name_at.max(start) };
    let (mut list, len) = extensions(&old[start..end], (end - start) as u64)?;
    let used = [start..start + len, name_at..if name_at == 0 { 0 } else { name_at + name_len }];
    let name = name.unwrap_or(&old[used[1].clone()]);
    list.retain(|extension| extension.kind != kind);
    list.splice(0..0, bytes.map(|bytes| RawExtension { kind, bytes }));
    // Names of features are only for programs that do not know a feature.
    let fewer: Vec<_> = list.iter().filter(|extension| extension.kind != FEATURE_NAMES).cloned().collect();
    for list in [list, fewer] {
        for behind in [0, used[0].end, used[1].end] {
            if let Some(new) = with_name(old, start, &list, name, behind)
                && is_safe(old, &new, &used)
            {
                return Ok(Some(new));
            }
        }
    }
    Ok(None)
}

/// The first cluster with these extensions, and behind them and the byte `behind` the name of the
/// backing file, if it is not empty.
fn with_name(old: &[u8], start: usize, list: &[RawExtension], name: &[u8], behind: usize) -> Option<Vec<u8>> {
    let mut area = Vec::new();
    list.iter().for_each(|extension| extension.append_to(&mut area));
    area.extend([0; 8]);
    let mut new = old.to_vec();
    new.get_mut(start..start + area.len())?.copy_from_slice(&area);
    let name_at = if name.is_empty() { 0 } else { (start + area.len()).max(behind) };
    new[at::BACKING..at::BACKING + 8].copy_from_slice(&(name_at as u64).to_be_bytes());
    new[at::BACKING + 8..at::BACKING + 12].copy_from_slice(&(name.len() as u32).to_be_bytes());
    if !name.is_empty() {
        new.get_mut(name_at..name_at + name.len())?.copy_from_slice(name);
    }
    Some(new)
}

/// Whether the bytes behind the first sector can be written while the old header is valid.
fn is_safe(old: &[u8], new: &[u8], used: &[Range<usize>]) -> bool {
    let is_same = |range: &Range<usize>| {
        let behind = range.start.max(SECTOR)..range.end.max(SECTOR);
        old[behind.clone()] == new[behind]
    };
    used.iter().all(is_same)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::header::V2_LENGTH;
    use crate::write::{Options, Output, Writer};
    use base::Rng;
    use std::io;

    struct Bytes(Vec<u8>);

    impl Output for Bytes {
        fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
            let end = offset as usize + bytes.len();
            self.0.resize(self.0.len().max(end), 0);
            self.0[offset as usize..end].copy_from_slice(bytes);
            Ok(())
        }
    }

    fn backing(random: &mut Rng) -> Option<Backing> {
        let most = if random.one_in(4) { 900 } else { 60 };
        let (name, format) = (random.below(most) as usize, random.below(3));
        let format = ["raw", "qcow2", "another-format"][format as usize].to_owned();
        (name > 0).then(|| Backing { name: "name".repeat(256)[..name].to_owned(), format })
    }

    /// The first cluster of an image with random extensions, as QEMU arranges it.
    fn cluster(random: &mut Rng, backing: Option<&Backing>) -> Option<Vec<u8>> {
        let version = 2 + random.below(2) as u32;
        let cluster_bits = [9, 10, 12, 16][random.below(4) as usize];
        let options = Options { version, cluster_bits, ..Options::new(1 << 20) };
        let bytes = Writer::new(options, Bytes(Vec::new())).unwrap().finish().unwrap().0.0;
        let mut old = bytes[..1 << cluster_bits].to_vec();
        let start = if version == 2 { V2_LENGTH } else { 112 };
        old[start..].fill(0);
        let kinds = [(FEATURE_NAMES, 384), (0x1234_5678, random.below(200)), (0x2345_6789, random.below(9))];
        let mut list: Vec<RawExtension> = Vec::new();
        for (kind, len) in kinds.into_iter().filter(|_| random.one_in(2)) {
            list.push(RawExtension { kind, bytes: vec![kind as u8; len as usize] });
        }
        // Older versions of QEMU wrote no format.
        if let Some(backing) = backing.filter(|_| random.one_in(2)) {
            let format = backing.format.clone().into_bytes();
            let at = random.below(list.len() as u64 + 1) as usize;
            list.insert(at, RawExtension { kind: BACKING_FORMAT, bytes: format });
        }
        with_name(&old, start, &list, backing.map_or(b"", |backing| backing.name.as_bytes()), 0)
    }

    fn parts(cluster: &[u8]) -> (Option<String>, Option<String>, Vec<RawExtension>) {
        let mut header = Header::parse(cluster).unwrap();
        header.unknown.retain(|extension| extension.kind != FEATURE_NAMES);
        (header.backing_file, header.backing_format, header.unknown)
    }

    #[test]
    fn a_new_name_leaves_the_old_one_until_the_first_sector_is_written() {
        let mut random = Rng::new(1);
        let (mut done, mut refused, mut without_names) = (0, 0, 0);
        while done < 3000 {
            let (before, after) = (backing(&mut random), backing(&mut random));
            let Some(old) = cluster(&mut random, before.as_ref()) else { continue };
            let header = Header::parse(&old).unwrap();
            let Ok(new) = new_cluster(&old, &header, after.as_ref()) else {
                refused += 1;
                assert!(old.len() < 4096, "{after:?}, not after {before:?} in {} bytes", old.len());
                continue;
            };
            done += 1;
            let torn = [&old[..SECTOR], &new[SECTOR..]].concat();
            let has_names = |cluster: &[u8]| {
                let unknown = Header::parse(cluster).unwrap().unknown;
                unknown.iter().any(|extension| extension.kind == FEATURE_NAMES)
            };
            assert_eq!(Header::parse(&torn).unwrap(), header);
            let (name, format, rest) = parts(&new);
            let wanted = after.map(|after| (after.name, after.format)).unzip();
            assert_eq!(((name, format), rest), (wanted, parts(&old).2));
            without_names += u32::from(has_names(&old) && !has_names(&new));
        }
        assert!(refused < done / 4 && without_names > 0, "{refused} {without_names}");
    }
}
