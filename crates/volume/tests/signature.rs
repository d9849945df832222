//! The table of signatures finds a pool from any remaining copy of the pool's table.

use block::{Device, IoError};
use drivers::io_uring::{Options, UringDevice};
use reactor::{CoreConfig, Cores};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use volume::{Name, Pool};

#[test]
fn every_copy_of_a_pools_table_is_a_signature() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(16 << 20).unwrap();
    let cores = Cores::start(&[CoreConfig::default()]).unwrap();
    let device: Arc<dyn Device> = Arc::new(UringDevice::open(&Options::new(file.path())).unwrap());
    drop(Pool::create(device.clone(), Name::new("data").unwrap(), cores.get(0)).unwrap());
    let mut bytes = std::fs::read(file.path()).unwrap();
    let mut found = Vec::new();
    // Each round finds one copy and destroys it.
    while let Some(offset) = probe(bytes.clone(), &cores) {
        bytes[offset as usize..][..8].fill(0);
        file.as_file().write_all_at(&bytes, 0).unwrap();
        found.push(offset);
        let is_left = Pool::open(device.clone(), cores.get(0)).is_ok();
        assert!(
            !is_left || probe(bytes.clone(), &cores).is_some(),
            "a pool without a signature after {found:?}"
        );
    }
    assert!(found.len() >= 2, "{found:?}");
}

/// Returns the offset at which the table of signatures finds a pool.
fn probe(bytes: Vec<u8>, cores: &Cores) -> Option<u64> {
    let read = async move |at: u64, len: usize| Ok::<_, IoError>(bytes[at as usize..][..len].to_vec());
    let findings =
        cores.get(0).block_on(move |_| async move { signatures::probe(16 << 20, 512, read).await });
    let signatures = findings.unwrap().unwrap().signatures;
    signatures.iter().find(|signature| signature.kind == "Freestone pool").map(|signature| signature.offset)
}
