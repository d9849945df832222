//! Copies of the table that no commit leaves, partly drawn by proptest: two successive openings
//! must agree.

use super::*;
use crate::extents::Extent;
use crate::table::{RESERVED, Record};
use crate::{Name, Pool};
use block::Device;
use drivers::mem::{MemDevice, Options};
use proptest::prelude::*;
use reactor::{CoreConfig, CoreRef, Cores};
use std::sync::{Arc, OnceLock};

const UNIT: u64 = 1 << 20;
const UNITS: u64 = 3;

/// The core that all tests share.
fn core() -> CoreRef {
    static CORES: OnceLock<Cores> = OnceLock::new();
    CORES.get_or_init(|| Cores::start(&[CoreConfig::default()]).unwrap()).get(0)
}

/// A table with `volumes` volumes of one unit each, 3 at most.
fn table(sequence: u64, volumes: u8, copies: u32) -> Table {
    let name = |text: String| Name::new(&text).unwrap();
    let volume = |number: u8| Record {
        uuid: Uuid([number; 16]),
        name: name(format!("v{number}")),
        size: UNIT,
        extents: vec![Extent { start: u64::from(number), len: 1 }],
    };
    Table {
        pool: Uuid([0xda; 16]),
        name: name("data".into()),
        sequence,
        copies,
        unit: UNIT,
        data_offset: RESERVED,
        units: UNITS,
        volumes: (0..volumes).map(volume).collect(),
    }
}

/// A device with these bytes in the places of the copies, those of set 0 first.
fn device(copies: [Vec<u8>; 4]) -> Arc<dyn Device> {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(&Options::new(RESERVED + UNITS * UNIT)).unwrap());
    let base = device.clone();
    let fill = move |_| async move {
        let channel = base.open_channel().unwrap();
        for (at, bytes) in SETS.into_iter().flatten().zip(&copies) {
            write_padded(&*channel, at, bytes).await.unwrap();
        }
    };
    core().block_on(fill).unwrap();
    device
}

fn inspected(device: &Arc<dyn Device>) -> Vec<Copy> {
    crate::pool::inspect(device, &core()).unwrap()
}

/// Returns the volumes that an opening finds, or the text of its error.
fn opened(device: &Arc<dyn Device>) -> Result<Vec<String>, String> {
    let pool = Pool::open(device.clone(), core()).map_err(|error| error.to_string())?;
    Ok(pool.volumes().into_iter().map(|volume| volume.name.to_string()).collect())
}

/// Opens twice, and once more after a change. A refused opening writes nothing.
fn judge(device: &Arc<dyn Device>) -> Result<Vec<String>, String> {
    let before = inspected(device);
    let first = opened(device);
    let between = inspected(device);
    assert_eq!(
        opened(device),
        first,
        "two openings in a row differ: {}; {}",
        describe(&before),
        describe(&between)
    );
    let Ok(volumes) = &first else {
        assert_eq!(before, inspected(device), "an opening that was refused has written");
        return first;
    };
    let pool = Pool::open(device.clone(), core()).unwrap();
    let changed = match volumes.first() {
        Some(first) => pool.delete_volume(first),
        None => pool.create_volume(Name::new("new").unwrap(), UNIT),
    };
    changed.unwrap_or_else(|error| panic!("{error}: {}", describe(&between)));
    let left: Vec<String> = pool.volumes().into_iter().map(|volume| volume.name.to_string()).collect();
    drop(pool);
    assert_eq!(opened(device), Ok(left), "a change is lost: {}; {}", describe(&before), describe(&between));
    first
}

fn refused(device: &Arc<dyn Device>, said: &[&str]) {
    let error = judge(device).unwrap_err();
    for words in said.iter().chain(&["freestone pool check"]) {
        assert!(error.contains(words), "{words} is not in: {error}");
    }
}

#[test]
fn a_table_in_the_set_of_other_numbers_proves_nothing() {
    let [blank, other] = [Vec::new(), table(25, 1, COPIES).encode().unwrap()];
    // An input that the fuzzer found: the former format, and number 25 in both places.
    let [first, second] = [1, 2].map(|volumes| table(25, volumes, 0).encode().unwrap());
    let device_of = |copies| device(copies);
    let said =
        ["at 65536: sequence 25, which belongs to the other set", "at 2097152: sequence 25, 2 volumes"];
    refused(&device_of([first, blank.clone(), second, blank.clone()]), &said);
    // Both copies of set 0 are damaged, so that table 26 may have been there.
    let newest = table(25, 2, COPIES).encode().unwrap();
    refused(&device_of([other.clone(), blank.clone(), newest.clone(), newest.clone()]), &said);
    // One copy of set 0 is whole; the other is only damaged and is rewritten.
    let older = table(24, 3, COPIES).encode().unwrap();
    let device = device_of([other.clone(), older, newest.clone(), newest]);
    assert_eq!(judge(&device), Ok(vec!["v0".into(), "v1".into()]));
    // No table is in the set of its number.
    refused(&device_of([other.clone(), other, blank.clone(), blank]), &["sequence 25, which belongs"]);
}

#[test]
fn two_newest_tables_with_one_number_leave_no_choice() {
    let [a, b, older] = [table(25, 1, COPIES), table(25, 2, COPIES), table(24, 3, COPIES)];
    let [a, b, older] = [a, b, older].map(|table| table.encode().unwrap());
    let said = ["at 2097152: sequence 25, 1 volumes", "at 1048576: sequence 25, 2 volumes"];
    refused(&device([older.clone(), older, a, b]), &said);
}

/// The content in the place of a copy.
fn place() -> impl Strategy<Value = Vec<u8>> {
    let whole = (0u64..7, 0u8..4, prop::bool::weighted(0.2), prop::bool::weighted(0.1)).prop_map(
        |(sequence, volumes, is_former, is_foreign)| {
            let mut table = table(sequence, volumes, if is_former { 0 } else { COPIES });
            table.pool.0[0] ^= u8::from(is_foreign);
            table.encode().unwrap()
        },
    );
    let spoiled = (0u64..7, 0usize..HEAD).prop_map(|(sequence, at)| {
        let mut bytes = table(sequence, 2, COPIES).encode().unwrap();
        bytes[at] ^= 0x10;
        bytes
    });
    prop_oneof![8 => whole, 1 => spoiled, 1 => Just(Vec::new())]
}

/// Bytes of the header in which proptest spoils one.
const HEAD: usize = crate::table::HEADER_BYTES;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn a_pool_that_opens_opens_again_with_the_same_volumes(
        copies in [place(), place(), place(), place()],
    ) {
        drop(judge(&device(copies)));
    }
}
