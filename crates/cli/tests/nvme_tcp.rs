//! The host and the target of NVMe/TCP, each in a process of its own.

mod common;

use common::{Server, freestone};
use std::net::TcpListener;
use std::process::Stdio;
use std::time::Duration;

const NQN: &str = "nqn.2014-08.org.example:killed";
const KILLS: usize = 2;

#[test]
fn a_target_that_is_killed_under_load_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk");
    std::fs::File::create(&disk).unwrap().set_len(16 << 20).unwrap();
    // Nobody else takes a port that was given out a moment ago.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let device = format!("io_uring:path={}", disk.display());
    let export = format!("nvme-tcp:listen={address},nqn={NQN}");
    let start = || Server::start(&["--device", &device, "--export", &export]).0;
    let mut server = start();
    let host = format!("nvme-tcp:address={address},nqn={NQN},hdgst=on,ddgst=on");
    let bench =
        ["bench", "--json", "--device", &host, "--rw", "randall", "--verify", "--qd", "16", "--time", "6"];
    let load = freestone().args(bench).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    for _ in 0..KILLS {
        std::thread::sleep(Duration::from_millis(1500));
        server.kill();
        std::thread::sleep(Duration::from_millis(300));
        server = start();
    }
    let output = load.wait_with_output().unwrap();
    let (said, complaints) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}\n{complaints}");
    // On a busy machine the load may end before the last kill.
    let losses = complaints.matches("the connection is lost").count();
    assert!((1..=KILLS).contains(&losses), "{complaints}");
    assert_eq!(server.stop().0, 0);
}
