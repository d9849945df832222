//! `freestone status` against a daemon, which is played by the test.

use crate::common::freestone;
use crate::common::played::Played;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Output;

fn status(socket: &Path, args: &[&str]) -> Output {
    freestone().arg("status").arg("--socket").arg(socket).args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn system(state: &str, start: &Value) -> (u16, Value) {
    let system = json!({
        "version": "0.1.0", "state": state, "start": start, "pid": 77, "started_ns": 1, "user": 0, "capabilities": [],
        "state_dir": "/s", "generation": 3, "cores": [],
    });
    (200, system)
}

fn step(done_bytes: u64) -> Value {
    json!({
        "step": "make volume v1 of 4194304 bytes on data", "done_steps": 1, "total_steps": 5,
        "done_bytes": done_bytes, "total_bytes": 4 << 20,
    })
}

#[test]
fn wait_asks_until_the_daemon_is_ready() {
    let answers =
        [system("starting", &Value::Null), system("starting", &step(1 << 20)), system("ready", &Value::Null)];
    let daemon = Played::new(answers.to_vec());
    let output = status(&daemon.socket(), &["--wait"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).starts_with("state       ready\n"), "{}", text(&output.stdout));
    assert!(text(&output.stderr).starts_with("starting\n"), "{}", text(&output.stderr));
    assert_eq!(daemon.requests().len(), 3);
}

#[test]
fn without_wait_the_state_is_printed_as_it_is() {
    let daemon = Played::new(vec![system("starting", &step(1 << 20))]);
    let output = status(&daemon.socket(), &[]);
    assert!(output.status.success());
    let line =
        "state       starting: step 2 of 5, make volume v1 of 4194304 bytes on data: 1 MiB of 4 MiB zeroed\n";
    assert!(text(&output.stdout).starts_with(line), "{}", text(&output.stdout));
}

#[test]
fn a_wait_ends_when_its_time_is_up() {
    let silent = status(Path::new("/nowhere/d.sock"), &["--wait=0"]);
    assert_eq!(silent.status.code(), Some(1));
    let said = text(&silent.stderr);
    assert!(said.contains("not ready within 0 s: freestoned does not answer at /nowhere/d.sock"), "{said}");
    let daemon = Played::new(vec![system("starting", &step(0))]);
    let late = status(&daemon.socket(), &["--wait=0"]);
    assert_eq!(late.status.code(), Some(1));
    assert!(
        text(&late.stderr).contains("not ready within 0 s: starting: step 2 of 5"),
        "{}",
        text(&late.stderr)
    );
}

fn problem(severity: &str, text: &str) -> Value {
    json!({
        "code": "array-degraded", "severity": severity, "kind": "array", "object": "data", "text": text, "since_ns": 1,
    })
}

#[test]
fn a_check_exits_as_monitoring_plugins_do() {
    let (warning, critical) = (problem("warning", "Array data is degraded"), problem("critical", "gone"));
    for (problems, code, said) in [
        (json!([]), 0, "no problems\n"),
        (json!([warning]), 1, "warning: Array data is degraded\n"),
        (json!([critical, warning]), 2, "critical: gone\nwarning: Array data is degraded\n"),
    ] {
        let daemon = Played::new(vec![system("ready", &Value::Null), (200, problems)]);
        let output = status(&daemon.socket(), &["--check"]);
        assert_eq!((output.status.code(), text(&output.stdout)), (Some(code), said.to_owned()));
    }
    let silent = status(Path::new("/nowhere/d.sock"), &["--check"]);
    assert_eq!(silent.status.code(), Some(3));
    assert!(text(&silent.stderr).contains("freestoned does not answer at /nowhere/d.sock"));
}
