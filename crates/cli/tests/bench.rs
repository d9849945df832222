//! `freestone bench` on devices of this process.

use crate::common::{failure, path_value, run_json};

const QUICK: [&str; 4] = ["--time", "0.2", "--ramp", "0.05"];

fn bench(args: &[&str]) -> serde_json::Value {
    let all = [&["bench", "--json"][..], &QUICK, args].concat();
    run_json(&all).pop().expect("a result")
}

#[test]
fn a_run_counts_requests_and_how_long_they_took() {
    let result = bench(&["--device", "null:latency-us=200", "--qd", "4"]);
    assert_eq!((&result["event"], &result["engine"]), (&"result".into(), &"stack".into()));
    let read = &result["ops"]["read"];
    let p50 = read["latency_ns"]["p50"].as_u64().unwrap();
    assert!((200_000..20_000_000).contains(&p50), "{result}");
    let iops = result["iops"].as_f64().unwrap();
    assert!(iops > 50.0 && iops < 4.0 / 200e-6 * 1.1, "depth over latency bounds the rate: {result}");
}

#[test]
fn every_operation_at_random_places_is_verified() {
    let result =
        bench(&["--device", "mem:size=8M", "--rw", "randall", "--verify", "--queues", "3", "--bs", "8K"]);
    for op in ["read", "write", "write_zeroes", "discard", "flush"] {
        assert!(result["ops"][op]["requests"].as_u64() > Some(0), "{op}: {result}");
    }
    assert!(result["verified"].as_u64() > Some(0), "{result}");
    assert_eq!((&result["failed"], &result["mismatches"]), (&0.into(), &0.into()));
}

#[test]
fn a_device_that_forgets_what_was_written_is_caught() {
    let args =
        [&["bench", "--json", "--device", "null:size=1M", "--rw", "randwrite", "--verify"][..], &QUICK]
            .concat();
    let (said, code) = failure(&args);
    assert!(
        said.starts_with("freestone: device null: 0 requests failed, ") && said.contains("blocks are wrong"),
        "{said}"
    );
    assert_eq!(code, 1);
}

#[test]
fn both_engines_read_a_file_and_neither_needs_latency() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let device = format!("io_uring:{}", path_value("path", file.path()));
    for (engine, more) in
        [("raw", &[][..]), ("raw", &["--no-latency"]), ("stack", &["--no-latency"]), ("stack", &["--event"])]
    {
        let args =
            [&["--device", &device, "--engine", engine, "--rw", "read", "--bs", "16K", "--qd", "3"], more]
                .concat();
        let result = bench(&args);
        assert!(result["requests"].as_u64() > Some(0), "{result}");
        assert_eq!((&result["engine"], &result["failed"]), (&engine.into(), &0.into()));
        assert_eq!(result["ops"]["read"]["latency_ns"].is_null(), more == ["--no-latency"], "{result}");
    }
}

#[test]
fn a_file_system_is_not_overwritten_unless_forced() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut bytes = vec![0u8; 1 << 20];
    bytes[1024 + 56..1024 + 58].copy_from_slice(&[0x53, 0xef]);
    std::fs::write(file.path(), &bytes).unwrap();
    let device = format!("io_uring:{}", path_value("path", file.path()));
    let args = [&["bench", "--device", &device, "--rw", "write"][..], &QUICK].concat();
    let (said, code) = failure(&args);
    assert!(said.ends_with("holds ext2/3/4 at byte 1080: writing needs --force\n"), "{said}");
    assert_eq!(code, 1);
    assert_eq!(std::fs::read(file.path()).unwrap(), bytes);
    bench(&["--device", &device, "--rw", "write", "--force"]);
    assert_ne!(std::fs::read(file.path()).unwrap(), bytes);
}

#[test]
fn the_smallest_device_can_be_written() {
    let result =
        bench(&["--device", "mem:size=512", "--bs", "512", "--rw", "randwrite", "--qd", "1", "--verify"]);
    assert!(result["verified"].as_u64() > Some(0), "{result}");
}
