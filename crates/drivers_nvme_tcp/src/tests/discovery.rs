//! Discovery logs of targets.

use super::*;
use nvme::fabrics::discovery::{DiscoveryHeader, RECORD_BYTES};

/// A log with `records` subsystems.
fn log(generation: u64, records: u16) -> Vec<u8> {
    let header = DiscoveryHeader { generation, records: records.into(), record_format: 0 };
    let mut log = header.encode().to_vec();
    for i in 0..records {
        let name = Nqn::new(&format!("nqn.2014-08.org.example:{generation}-{i}")).unwrap();
        log.extend(DiscoveryEntry::tcp(([10, 0, 0, 1], 4420 + i).into(), name).encode());
    }
    log
}

/// The result of discovery from a target with these logs; the first one changes before it is read
/// completely.
fn found(logs: &[Vec<u8>]) -> Result<Vec<DiscoveryEntry>, OpenError> {
    let target = Target::start(Traits::default());
    target.state.logs.lock().unwrap().extend(std::iter::once(Vec::new()).chain(logs.iter().cloned()));
    discover(&Options { header_digest: true, data_digest: true, ..options(&target) }, &Cancel::never())
}

#[test]
fn a_log_of_any_length_is_read_whole() {
    for records in [0, 1, 4, 5, 11] {
        let entries = found(&[log(1, records)]).unwrap();
        assert_eq!(entries.len(), usize::from(records));
        for (i, entry) in entries.iter().enumerate() {
            assert_eq!(entry.subsystem.as_str(), format!("nqn.2014-08.org.example:1-{i}"));
            assert_eq!((entry.address.as_str(), entry.service.parse()), ("10.0.0.1", Ok(4420 + i)));
        }
    }
}

#[test]
fn a_log_that_changes_while_it_is_read_is_read_again() {
    let entries = found(&[log(1, 2), log(2, 3), log(2, 3), log(3, 1)]).unwrap();
    assert_eq!(entries.len(), 1);
    assert_eq!(entries[0].subsystem.as_str(), "nqn.2014-08.org.example:3-0");
    let restless: Vec<Vec<u8>> = (0..20).map(|generation| log(generation, 1)).collect();
    assert!(found(&restless).unwrap_err().to_string().contains("changes faster"));
}

#[test]
fn a_log_that_makes_no_sense_is_refused_and_a_record_left_out() {
    let mut nameless = log(1, 3);
    nameless[2 * RECORD_BYTES + 256..][..256].fill(b'x');
    let entries = found(&[nameless]).unwrap();
    assert_eq!(entries.iter().map(|entry| entry.service.as_str()).collect::<Vec<_>>(), ["4420", "4422"]);
    let mut endless = log(1, 0);
    endless[8..16].fill(0xff);
    assert!(
        found(&[endless]).unwrap_err().to_string().contains("18446744073709551615 records: at most 4096")
    );
    let mut foreign = log(1, 0);
    foreign[16] = 7;
    assert!(found(&[foreign]).unwrap_err().to_string().contains("unknown format 7"));
}
