//! The examples do what they say.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// `cargo test` builds the examples next to the tests.
fn run(example: &str, arguments: &[&str]) -> Output {
    let test = std::env::current_exe().unwrap();
    let program: PathBuf = test.parent().and_then(Path::parent).unwrap().join("examples").join(example);
    let output = Command::new(&program).args(arguments).output();
    output.unwrap_or_else(|e| {
        panic!("{}: {e}; cargo build -p freestone-libblkio --examples", program.display())
    })
}

fn ok(example: &str, arguments: &[&str]) -> String {
    let output = run(example, arguments);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{example}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn info_copy_and_bench_work_on_files() {
    let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let [source, target] = ["a", "b"].map(|name| directory.path().join(name));
    // More than one round of requests, and an odd end.
    let bytes: Vec<u8> = (0..(5 << 20) + 777u32).map(|i| (i % 251) as u8).collect();
    std::fs::write(&source, &bytes).unwrap();
    std::fs::write(&target, b"").unwrap();
    let [from, to] = [&source, &target].map(|path| format!("io_uring:path={}", path.display()));

    let info = ok("info", &[&from]);
    assert!(info.contains(&format!("capacity = {}\n", bytes.len())), "{info}");
    assert!(info.contains("driver = io_uring\n"), "{info}");

    assert_eq!(ok("copy", &[&from, &to]), format!("{} bytes\n", bytes.len()));
    assert!(std::fs::read(&target).unwrap() == bytes);

    let bench = ok("bench", &[&from, "8", "1"]);
    let rate: f64 = bench.strip_suffix(" reads/s\n").unwrap().parse().unwrap();
    assert!(rate > 0.0);
}

#[test]
fn mistakes_are_named() {
    let error = |example, arguments: &[&str]| {
        let output = run(example, arguments);
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(error("info", &[]).contains("usage"));
    assert!(error("info", &["nonsense"]).contains("nonsense"));
    assert!(error("info", &["io_uring:path=/does/not/exist"]).contains("/does/not/exist"));
    assert!(error("copy", &["io_uring:pfad=x", "io_uring:path=y"]).contains("pfad"));
    assert!(error("bench", &["io_uring:path=x", "many", "1"]).contains("usage"));
}
