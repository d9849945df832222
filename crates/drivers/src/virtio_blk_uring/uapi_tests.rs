//! The numbers and structures of this driver are those of the module's header.

use super::facts::{GET_INFO, INFO_POLL, INFO_READ_ONLY, INFO_WRITE_CACHE, Info};
use super::queue::{CMD_COMPACT, CMD_COMPACT_VEC};
use std::mem::offset_of;
use std::path::Path;

/// The header, of which this reads what it needs.
struct Header(String);

impl Header {
    fn read() -> Header {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernel/include/uapi/linux/virtio_blk_uring.h");
        Header(std::fs::read_to_string(path).unwrap())
    }

    /// The text behind `#define NAME`.
    fn define(&self, name: &str) -> &str {
        let mut lines = self.0.lines().filter_map(|line| line.strip_prefix("#define "));
        let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix([' ', '\t']));
        value.unwrap_or_else(|| panic!("no {name}")).trim()
    }

    fn number(&self, name: &str) -> u32 {
        let text = self.define(name);
        match text.strip_prefix("0x") {
            Some(digits) => u32::from_str_radix(digits, 16).unwrap(),
            None => text.parse().unwrap(),
        }
    }

    /// Names and offsets of the fields of `struct name`, and its size last.
    fn layout(&self, name: &str) -> Vec<(String, usize)> {
        let start = format!("struct {name} {{\n");
        let (_, rest) = self.0.split_once(&start).unwrap_or_else(|| panic!("no {name}"));
        let (fields, _) = rest.split_once("\n};").unwrap();
        let (mut at, mut widest) = (0usize, 1);
        let mut layout = Vec::new();
        for field in fields.lines() {
            let (kind, name) = field.trim().trim_end_matches(';').split_once(' ').unwrap();
            let size = match kind {
                "__u8" => 1,
                "__u32" => 4,
                "__u64" => 8,
                other => panic!("a field of the type {other}"),
            };
            let (name, count) = match name.split_once('[') {
                Some((name, count)) => (name, count.trim_end_matches(']')),
                None => (name, "1"),
            };
            let count = count.parse().unwrap_or_else(|_| self.number(count) as usize);
            at = at.next_multiple_of(size);
            layout.push((name.to_owned(), at));
            at += size * count;
            widest = widest.max(size);
        }
        layout.push(("size".to_owned(), at.next_multiple_of(widest)));
        layout
    }
}

macro_rules! fields {
    ($structure:ty: $($field:ident)+) => {
        vec![
            $((stringify!($field).to_owned(), offset_of!($structure, $field)),)+
            ("size".to_owned(), size_of::<$structure>()),
        ]
    };
}

#[test]
fn the_properties_of_a_disk_lie_where_the_header_puts_them() {
    let header = Header::read();
    let fields = fields!(Info:
        capacity features flags block_bytes physical_block_bytes optimal_io_bytes buffer_align
        max_bytes max_segments max_segment_bytes max_discard_sectors max_discard_ranges
        discard_align_sectors max_write_zeroes_sectors max_write_zeroes_ranges queues poll_queues
        serial reserved);
    assert_eq!(header.layout("virtblk_info"), fields);
    for (name, flag) in [
        ("VIRTBLK_INFO_READ_ONLY", INFO_READ_ONLY),
        ("VIRTBLK_INFO_WRITE_CACHE", INFO_WRITE_CACHE),
        ("VIRTBLK_INFO_POLL", INFO_POLL),
    ] {
        assert_eq!(header.number(name), flag, "{name}");
    }
    // `_IOR`: read, size, letter, number.
    assert_eq!(header.define("VIRTBLK_GET_INFO"), "_IOR('V', 0xB0, struct virtblk_info)");
    let number = 2 << 30 | (size_of::<Info>() as u64) << 16 | u64::from(b'V') << 8 | 0xb0;
    assert_eq!(GET_INFO, number);
}

#[test]
fn commands_are_the_compact_ones_of_the_header() {
    let header = Header::read();
    assert_eq!(header.number("VIRTBLK_URING_CMD_COMPACT"), CMD_COMPACT);
    assert_eq!(header.number("VIRTBLK_URING_CMD_COMPACT_VEC"), CMD_COMPACT_VEC);
    let layout = header.layout("virtblk_uring_compact");
    let layout: Vec<_> = layout.iter().map(|(name, at)| (name.as_str(), *at)).collect();
    // `queue::encode`
    assert_eq!(layout, [("sector", 0), ("type", 8), ("ioprio", 12), ("size", 16)]);
}
