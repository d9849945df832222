//! Pools after creations, changes and a crash.

use super::CAPACITY;
use super::disk::Image;
use volume::extents::Extent;
use volume::store::{RESERVED, SETS};
use volume::table::{COPIES, Record, Table};
use volume::{Name, Uuid};

/// Bytes of a unit.
pub const UNIT: u64 = 1 << 20;

/// A disk, and the names of the volumes that an opening finds; `None` without a pool.
pub struct Base {
    /// Content of the disk.
    pub image: Image,
    /// The volumes in their order.
    pub volumes: Option<Vec<String>>,
}

/// A volume of `size` bytes in these extents (start and length, in units).
pub fn volume(number: u8, size: u64, extents: &[(u64, u64)]) -> Record {
    let extents = extents.iter().map(|(start, len)| Extent { start: *start, len: *len }).collect();
    Record { uuid: Uuid([number; 16]), name: name(number), size, extents }
}

/// A name of a volume.
///
/// # Panics
/// Never: every name is allowed.
pub fn name(number: u8) -> Name {
    Name::new(&format!("v{number}")).expect("letters and digits")
}

fn table(sequence: u64, volumes: Vec<Record>) -> Table {
    let name = Name::new("data").expect("letters");
    let units = (CAPACITY - RESERVED) / UNIT;
    let pool = Uuid([0xda; 16]);
    Table { pool, name, sequence, copies: COPIES, unit: UNIT, data_offset: RESERVED, units, volumes }
}

/// A disk with these tables, each at the given places of its set.
fn base(tables: &[(&Table, &[usize])]) -> Base {
    let mut image = Image::default();
    for (table, places) in tables {
        let bytes = table.encode().expect("it fits");
        for place in *places {
            image.put(SETS[table.sequence as usize % 2][*place], &bytes);
        }
    }
    let newest = tables.iter().map(|(table, _)| table).max_by_key(|table| table.sequence);
    let volumes = newest.map(|table| table.volumes.iter().map(|volume| volume.name.to_string()).collect());
    Base { image, volumes }
}

/// All bases.
pub fn all() -> Vec<Base> {
    let both = &[0, 1][..];
    let (first, second) = (table(1, Vec::new()), table(2, Vec::new()));
    let three = vec![
        volume(1, 3 * UNIT, &[(0, 1), (4, 2)]),
        volume(2, UNIT + 512, &[(1, 2)]),
        volume(3, 4096, &[(9, 1)]),
    ];
    let (older, newer) = (table(6, three[..2].to_vec()), table(7, three.clone()));
    let oldest = table(5, three[..1].to_vec());
    let former = |table: &Table| Table { copies: 0, ..table.clone() };
    let (former_older, former_newer) = (former(&older), former(&newer));
    let many = (0..50).map(|number| volume(100 + number, 512, &[(u64::from(number), 1)])).collect();
    let (fewer, many) = (table(60, three), table(61, many));
    vec![
        base(&[(&first, both), (&second, both)]),
        base(&[(&older, both), (&newer, both)]),
        // A crash between the two copies of a change.
        base(&[(&older, both), (&newer, &[1]), (&oldest, &[0])]),
        base(&[(&former_older, &[0]), (&former_newer, &[0])]),
        base(&[(&fewer, both), (&many, both)]),
        base(&[]),
    ]
}
