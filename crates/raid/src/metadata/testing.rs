//! What the tests of this module share.

use super::layout::Layout;
use super::superblock::{EpochId, Member, Superblock, Table};
use crate::{ArrayConfig, Consistency, Geometry, Level, Matrix, Uuid};

/// A small array of one group.
pub(crate) fn config(data: usize, parity: usize) -> ArrayConfig {
    ArrayConfig {
        uuid: Uuid([1; 16]),
        name: "vm".into(),
        level: Level::NPlusM,
        geometry: Geometry { groups: 1, data, parity, strip_bytes: 4096, group_stripes: 16 },
        matrix: match parity {
            0 => Matrix::Copies,
            1..=3 => Matrix::Powers,
            _ => Matrix::Cauchy,
        },
        consistency: if parity == 0 { Consistency::None } else { Consistency::Ppl },
        block_size: 512,
        region_bytes: 16 << 10,
        lanes: 2,
        lane_bytes: 16 << 10,
    }
}

/// The identity of a slot's member.
pub(crate) fn member_uuid(slot: usize) -> Uuid {
    Uuid([(slot as u8).wrapping_add(100); 16])
}

/// The first table of an array.
pub(crate) fn table(config: &ArrayConfig) -> Table {
    Table {
        config: config.clone(),
        generation: 1,
        settled: 0,
        epoch: 1,
        history: vec![EpochId { epoch: 1, id: 4711 }],
        nonce: [7; 16],
        is_clean: false,
        is_creating: false,
        is_logging: config.consistency == Consistency::Ppl,
        initial_region: 0,
        members: (0..config.geometry.members()).map(|slot| Member::live(member_uuid(slot))).collect(),
        resync_cursor: None,
        scrub_cursor: None,
        scrubbed_ns: 0,
        reshape: None,
        owner: "host".into(),
        created_ns: 1,
        updated_ns: 1,
    }
}

/// A member's superblock of the first table.
pub(crate) fn superblock(config: &ArrayConfig, slot: usize) -> Superblock {
    Superblock {
        member: member_uuid(slot),
        slot: slot as u16,
        layout: Layout::new(1 << 20, config).unwrap(),
        unknown_ro_compat: 0,
        table: table(config),
    }
}
