//! Members of an array whose server is started again.

use crate::common::{Daemon, MIB};
use block::{Flags, Op};
use serde_json::{Value, json};
use stack::kinds::member::member;

const SIZE: u64 = 24 * MIB;

/// Writes every MiB of the export once, and reads it.
fn write(daemon: &Daemon, byte: u8) {
    let export = format!("nbd:path={}", daemon.path("e1.sock").display());
    let device = member(&export, false, false).unwrap().open().unwrap();
    reactor::run(async move {
        let channel = device.open_channel().unwrap();
        for offset in (0..device.limits().capacity - MIB).step_by(MIB as usize) {
            let mut buffer = reactor::current().buffers().take(MIB as usize).await;
            buffer.as_mut_slice().fill(byte);
            let (buffer, written) = buffer.transfer(&*channel, Op::Write, Flags::NONE, offset).await;
            let (buffer, read) = buffer.transfer(&*channel, Op::Read, Flags::NONE, offset).await;
            assert_eq!((written, read), (Ok(()), Ok(())));
            assert!(buffer.as_slice().iter().all(|found| *found == byte));
        }
    });
}

#[test]
fn a_member_over_nbd_survives_a_restart_of_its_server() {
    let daemon = Daemon::new();
    let (local, _) = (daemon.file("m0", SIZE), daemon.file("m1", SIZE));
    let mut served = Some(daemon.served("m1"));
    let remote = format!("{},reconnect-delay=600", served.as_ref().unwrap().spec);
    daemon.post("/v1/arrays", &json!({ "name": "data", "level": "1", "members": [local, remote] }));
    daemon.post("/v1/exports", &json!({ "name": "e1", "kind": "nbd", "volumes": ["data"] }));
    daemon.wait_for("the resync", || daemon.get("/v1/jobs") == json!([]));
    for round in 1..4 {
        served = None;
        std::thread::scope(|scope| {
            let writing = scope.spawn(|| write(&daemon, round));
            daemon.wait_for("a write", || daemon.get("/v1/exports/e1")["traffic"]["clients"] == 1);
            served = Some(daemon.served("m1"));
            writing.join().unwrap();
        });
        let array = daemon.get("/v1/arrays/data");
        let states: Vec<&Value> =
            array["members"].as_array().unwrap().iter().map(|member| &member["state"]).collect();
        assert_eq!(states, [&json!("live"); 2], "{array}");
    }
    // The copies are the same.
    daemon.post("/v1/arrays/data/actions", &json!({ "action": "scrub" }));
    daemon.wait_for("the scrub", || daemon.get("/v1/arrays/data")["scrub"]["is_complete"] == true);
    assert_eq!(daemon.get("/v1/arrays/data")["scrub"]["mismatched_rows"], 0);
}
