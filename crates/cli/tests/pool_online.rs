//! `freestone pool` against a daemon, which is played by the test.

use crate::common::played::Played;
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Output};

/// Runs the program against a daemon that answers once; the request line, its body, and what the
/// program did.
fn ask(args: &[&str], status: u16, answer: &Value) -> (String, String, Output) {
    let daemon = Played::new(vec![(status, answer.clone())]);
    let output = freestone(args, &daemon.socket());
    let (first, body) = daemon.requests().remove(0);
    (first, body, output)
}

fn freestone(args: &[&str], socket: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_freestone"));
    command.arg("pool").args(args).arg("--socket").arg(socket).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A pool of which the first copy is damaged, or none.
fn pool(is_damaged: bool) -> Value {
    let whole = json!({
        "offset_bytes": 3145728, "sequence": 3, "volumes": ["v1"], "is_damaged": false,
        "state": "at 3145728: sequence 3, 1 volumes",
    });
    let first = match is_damaged {
        false => json!({
            "offset_bytes": 65536, "sequence": 2, "volumes": [], "is_damaged": false,
            "state": "at 65536: sequence 2, 0 volumes",
        }),
        true => json!({
            "offset_bytes": 65536, "sequence": null, "volumes": null, "is_damaged": true,
            "state": "at 65536: the checksum does not match",
        }),
    };
    json!({
        "backing": "data", "uuid": "u", "sequence": 3, "volumes": ["v1"], "copies": [first, whole],
        "damaged": u8::from(is_damaged), "rewritten": 0,
    })
}

#[test]
fn a_check_shows_each_copy_and_fails_when_one_is_damaged() {
    let (request, _, output) = ask(&["check", "data"], 200, &pool(true));
    assert_eq!(request, "GET /v1/pools/data HTTP/1.1");
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        text(&output.stdout),
        "data: copy at 65536: the checksum does not match, damaged\n\
         data: copy at 3145728: sequence 3, 1 volumes\n"
    );
    assert!(text(&output.stderr).contains("1 copies of the table are damaged"), "{}", text(&output.stderr));
    let (.., output) = ask(&["check", "data", "--json"], 200, &pool(false));
    assert!(output.status.success(), "{}", text(&output.stderr));
    let lines: Vec<Value> =
        text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((lines.len(), &lines[0]["offset"], &lines[0]["is_whole"]), (2, &json!(65536), &json!(true)));
}

#[test]
fn a_repair_says_how_many_copies_were_rewritten() {
    let done = json!({ "offsets_bytes": [65536], "pool": pool(false) });
    let (request, body, output) = ask(&["repair", "data"], 200, &done);
    assert_eq!((&*request, &*body), ("POST /v1/pools/data/actions HTTP/1.1", "{\"action\":\"repair\"}"));
    assert_eq!(text(&output.stdout), "data: 1 copies of the table rewritten\n");
    let problem = json!({ "type": "not-found", "title": "x", "status": 404, "detail": "data: it has no pool of volumes" });
    let (.., output) = ask(&["repair", "data"], 404, &problem);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("it has no pool of volumes"), "{}", text(&output.stderr));
}

#[test]
fn a_pool_is_named_or_a_device_given_and_not_both() {
    let nowhere = Path::new("/nowhere/d.sock");
    for args in [
        &["check"][..],
        &["check", "data", "--device", "mem:size=1M"],
        &["repair", "data", "--sequence", "2", "--force"],
    ] {
        assert_eq!(freestone(args, nowhere).status.code(), Some(2), "{args:?}");
    }
    let silent = freestone(&["check", "data"], nowhere);
    assert_eq!(silent.status.code(), Some(1));
    assert!(text(&silent.stderr).contains("does not answer at /nowhere/d.sock"), "{}", text(&silent.stderr));
}
