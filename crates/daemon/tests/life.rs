//! The life of a daemon: acknowledged changes survive every end, clean or not.

use crate::common::{Daemon, MIB, names};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use std::time::Duration;

#[test]
fn acknowledged_changes_survive_a_kill_and_a_clean_end() {
    let mut daemon = Daemon::new();
    let members = daemon.array();
    let disk = daemon.file("disk", 16 * MIB);
    daemon.post("/v1/devices", &json!({ "name": "disk", "spec": format!("io_uring:path={disk}") }));
    let volume = daemon.volume("v1", 8 * MIB);
    daemon.volume("v2", 4 * MIB);
    let group = daemon.send(Method::PUT, "/v1/groups/gold", &json!({ "bandwidth": { "per_s": 1 << 20 } }));
    assert_eq!(group.status(), StatusCode::OK);
    daemon.patch(
        "/v1/volumes/v1",
        &json!({ "qos": { "iops": { "per_s": 500, "burst": 50 } }, "group": "gold" }),
    );
    daemon.patch("/v1/volumes/v2", &json!({ "name": "renamed", "size_bytes": 6 * MIB }));
    daemon.post("/v1/exports", &json!({ "name": "e1", "kind": "vhost-user-blk", "volumes": ["v1"] }));
    daemon.post(
        "/v1/exports",
        &json!({ "name": "e2", "kind": "nbd", "volumes": [volume["uuid"]], "read_only": true }),
    );
    daemon.post("/v1/exports", &json!({ "name": "whole", "kind": "nbd", "volumes": ["disk"] }));
    let everything = |daemon: &Daemon| {
        let without_traffic = |mut exports: Value| {
            exports.as_array_mut().unwrap().iter_mut().for_each(|export| export["traffic"] = Value::Null);
            exports
        };
        let mut array = daemon.get("/v1/arrays/data");
        array["jobs"] = Value::Null;
        array["generation"] = Value::Null;
        json!([
            array,
            daemon.get("/v1/devices"),
            daemon.get("/v1/volumes"),
            daemon.get("/v1/groups"),
            without_traffic(daemon.get("/v1/exports")),
        ])
    };
    let before = everything(&daemon);
    assert_eq!(before[2][0]["exports"], json!(["e1", "e2"]));
    assert_eq!(before[2][1]["size_bytes"], 6 * MIB);
    assert_eq!(before[3][0]["volumes"], json!(["v1"]));
    for signal in ["-KILL", "-TERM", "-KILL"] {
        daemon.restart(signal);
        assert_eq!(everything(&daemon), before, "after {signal}");
    }
    assert!(daemon.end("-TERM").success());
    assert!(!daemon.path("d.sock").exists() && !daemon.path("e1.sock").exists(), "sockets are left over");
    assert_eq!(members.len(), 4);
}

#[test]
fn whenever_it_is_killed_what_was_acknowledged_is_there_and_nothing_is_half_done() {
    let mut daemon = Daemon::new();
    let disk = daemon.file("disk", 256 * MIB);
    daemon.post("/v1/devices", &json!({ "name": "disk", "spec": disk }));
    let (mut known, mut number) = (Vec::new(), 0);
    for round in 0..12u64 {
        let pid = daemon.pid().to_string();
        let killer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_micros(3000 + round * round * 900));
            std::process::Command::new("kill").args(["-KILL", &pid]).status().unwrap();
        });
        let asked_for = loop {
            let (name, export) = (format!("v{number}"), format!("e{number}"));
            let new = json!({ "name": name, "backing": "disk", "size_bytes": MIB, "qos": { "iops": { "per_s": number + 1 } } });
            let Ok(made) = daemon.request(Method::POST, "/v1/volumes").json(&new).send() else {
                break Some(name);
            };
            assert_eq!(made.status(), StatusCode::CREATED);
            known.push(name.clone());
            let new = json!({ "name": export, "kind": "nbd", "volumes": [name] });
            number += 1;
            match daemon.request(Method::POST, "/v1/exports").json(&new).send() {
                Ok(made) => assert_eq!(made.status(), StatusCode::CREATED),
                Err(_) => break None,
            }
        };
        killer.join().unwrap();
        daemon.end("-KILL");
        daemon.start();
        let found = names(&daemon.get("/v1/volumes"));
        assert!(known.iter().all(|name| found.contains(name)), "{known:?} {found:?}");
        let extra: Vec<&String> = found.iter().filter(|name| !known.contains(name)).collect();
        assert!(extra.iter().all(|name| Some(*name) == asked_for.as_ref()), "{extra:?}");
        number += 1;
        for export in daemon.get("/v1/exports").as_array().unwrap() {
            assert_eq!(export["state"], "active", "{export}");
        }
        known = found;
        // Room for the next round.
        for export in names(&daemon.get("/v1/exports")) {
            daemon.delete(&format!("/v1/exports/{export}"));
        }
        for name in known.drain(..) {
            daemon.delete(&format!("/v1/volumes/{name}"));
        }
    }
    assert_eq!(daemon.get("/v1/devices/disk")["free_bytes"], 252 * MIB, "nothing is lost");
}

#[test]
fn arrays_and_volumes_are_found_again_without_the_state() {
    let mut daemon = Daemon::prepare(&[]);
    let scan = daemon.path("members");
    std::fs::create_dir(&scan).unwrap();
    daemon.args = ["--member-timeout", "1", "--scan"].map(str::to_owned).into();
    daemon.args.push(scan.to_str().unwrap().into());
    daemon.start();
    let members: Vec<String> =
        (0..3).map(|slot| daemon.file(&format!("members/m{slot}"), 16 * MIB)).collect();
    daemon.post("/v1/arrays", &json!({ "name": "data", "level": "5", "members": members }));
    let volume = daemon.volume("v1", MIB);
    daemon.end("-KILL");
    std::fs::remove_dir_all(daemon.path("state")).unwrap();
    daemon.start();
    assert_eq!(daemon.get("/v1/arrays/data")["state"], "optimal");
    assert_eq!(daemon.get("/v1/volumes"), json!([volume]));
}

#[test]
fn a_missing_member_is_waited_for_and_a_known_loss_is_not() {
    let mut daemon = Daemon::prepare(&["--member-timeout", "3600"]);
    let wait = |daemon: &mut Daemon, seconds: &str| daemon.args[1] = seconds.into();
    daemon.start();
    let members = daemon.array();
    daemon.volume("v1", MIB);
    daemon.post("/v1/exports", &json!({ "name": "e1", "kind": "nbd", "volumes": ["v1"] }));
    daemon.end("-TERM");
    let away = format!("{}.away", members[1]);
    std::fs::rename(&members[1], &away).unwrap();
    daemon.start();
    let array = daemon.get("/v1/arrays/data");
    assert_eq!(array["state"], "offline");
    let error = array["error"].as_str().unwrap();
    assert!(error.contains("slot 1"), "{error}");
    assert_eq!(daemon.get("/v1/exports/e1")["state"], "waiting");
    // The member is re-added in time.
    std::fs::rename(&away, &members[1]).unwrap();
    daemon.wait_for("the export", || daemon.get("/v1/exports/e1")["state"] == "active");
    assert_eq!(daemon.get("/v1/arrays/data")["state"], "optimal");
    // The member stays missing.
    daemon.end("-TERM");
    wait(&mut daemon, "1");
    std::fs::rename(&members[1], &away).unwrap();
    daemon.start();
    daemon.wait_for("the degraded array", || daemon.get("/v1/arrays/data")["state"] == "degraded");
    daemon.wait_for("the export", || daemon.get("/v1/exports/e1")["state"] == "active");
    // Now it is known to be lost.
    daemon.end("-KILL");
    wait(&mut daemon, "3600");
    daemon.start();
    assert_eq!(daemon.get("/v1/exports/e1")["state"], "active");
    assert_eq!(daemon.get("/v1/arrays/data")["state"], "degraded");
}

#[test]
fn a_pulled_member_is_rebuilt_onto_a_spare_and_the_jobs_tell() {
    let daemon = Daemon::new();
    let members: Vec<String> = (0..4).map(|slot| daemon.file(&format!("m{slot}"), 256 * MIB)).collect();
    daemon.post("/v1/arrays", &json!({ "name": "data", "level": "5", "members": members }));
    daemon.volume("v1", 600 * MIB);
    let spare = daemon.file("spare", 256 * MIB);
    let act = |body: Value| daemon.post("/v1/arrays/data/actions", &body);
    assert_eq!(act(json!({ "action": "fail", "members": ["2"] }))["array"]["state"], "degraded");
    let text = act(json!({ "action": "add", "devices": [spare] }))["text"].as_str().unwrap().to_owned();
    assert!(text.contains("is a spare"), "{text}");
    daemon.wait_for("the job", || {
        let runs = !daemon.get("/v1/jobs").as_array().unwrap().is_empty();
        runs && act(json!({ "action": "pause" }))["text"] == "jobs paused"
    });
    let job = daemon.get("/v1/jobs")[0].clone();
    assert_eq!((&job["kind"], &job["slot"], &job["is_paused"]), (&json!("rebuild"), &json!(2), &json!(true)));
    let array = daemon.get("/v1/arrays/data");
    assert_eq!(json!([array["state"], array["redundancy_left"]]), json!(["degraded", 0]), "{array}");
    let path = format!("/v1/jobs/{}", job["id"].as_str().unwrap());
    let refusal =
        daemon.refusal(Method::PATCH, &path, &json!({ "min_bytes_per_s": 2, "max_bytes_per_s": 1 }));
    assert_eq!((refusal.0, &*refusal.1), (422, "invalid"));
    let (status, kind, detail) = daemon.refusal(Method::DELETE, &path, &Value::Null);
    assert!(status == 409 && kind == "in-use" && detail.contains("array data needs its rebuild"), "{detail}");
    daemon.patch(&path, &json!({ "is_paused": false, "max_bytes_per_s": 0 }));
    daemon.wait_for("the rebuild", || daemon.get("/v1/arrays/data")["state"] == "optimal");
    assert_eq!(daemon.get("/v1/arrays/data")["redundancy_left"], 1);
    let device = daemon.get("/v1/arrays/data/members")[2]["device"].as_str().unwrap().to_owned();
    assert!(device.ends_with("/spare"), "{device}");
    // A scrub, however, can be given up.
    daemon.wait_for("a scrub that is given up", || {
        daemon.send(Method::POST, "/v1/arrays/data/actions", &json!({ "action": "scrub" }));
        daemon.send(Method::DELETE, "/v1/jobs/data.check", &Value::Null).status() == StatusCode::NO_CONTENT
    });
    daemon.wait_for("its end", || daemon.get("/v1/jobs") == json!([]));
    let members = daemon.get("/v1/samples")["members"].clone();
    let written = |slot: usize| members[format!("data/{slot}")]["written_bytes"].as_u64().unwrap();
    assert!(written(2) > 0 && written(0) > 0, "{members}");
    let metrics = daemon.metrics();
    let value = |name: &str, more: &str| -> f64 {
        let labels = format!("array=\"data\",slot=\"2\",device=\"{device}\"{more}");
        let sample = format!("freestone_member_{name}{{{labels}}} ");
        let value = metrics.lines().find_map(|line| line.strip_prefix(&sample));
        value.unwrap_or_else(|| panic!("{sample}: {metrics}")).parse().unwrap()
    };
    let [requests, bytes, timed] = [
        value("requests_total", ",op=\"write\""),
        value("bytes_total", ",op=\"write\""),
        value("latency_seconds_bucket", ",op=\"write\",le=\"+Inf\""),
    ];
    assert!(bytes >= 512.0 * requests && (1.0..requests).contains(&timed), "{bytes} {requests} {timed}");
    assert_eq!((value("errors_total", ",op=\"write\""), value("in_flight", "")), (0.0, 0.0));
    assert!(metrics.contains("freestone_array_info{array=\"data\",level=\"5\",consistency=\"ppl\"} 1\n"));
    daemon.wait_for("the events", || {
        let events = daemon.get("/v1/events");
        let words: Vec<&str> =
            events.as_array().unwrap().iter().map(|e| e["what"].as_str().unwrap()).collect();
        ["member failed", "degraded", "device added", "optimal"].iter().all(|word| words.contains(word))
    });
}

#[test]
fn scrubs_and_read_errors_of_an_array_are_chosen_shown_and_measured() {
    let daemon = Daemon::new();
    let members: Vec<String> = (0..3).map(|slot| daemon.file(&format!("m{slot}"), 32 * MIB)).collect();
    let window = json!({ "start_minute": 1320, "end_minute": 360 });
    let new = json!({
        "name": "data", "level": "5", "members": members, "scrub_period_s": 864_000, "scrub_window": window,
    });
    let array = daemon.post("/v1/arrays", &new);
    assert_eq!((&array["scrub_period_s"], &array["scrub_window"]), (&json!(864_000), &window));
    assert_eq!((&array["read_error_budget"], &array["last_scrub_ns"]), (&json!(20), &Value::Null));
    assert_eq!(array["members"][2]["read_errors"], 0);
    let next_ns = array["next_scrub_ns"].as_u64().unwrap();
    let act = |body: Value| daemon.post("/v1/arrays/data/actions", &body)["array"].clone();
    let array = act(json!({ "action": "set", "read_error_budget": 0, "scrub_period_s": 43_200 }));
    assert_eq!((&array["read_error_budget"], &array["scrub_window"]), (&json!(0), &window));
    assert!(array["next_scrub_ns"].as_u64().unwrap() < next_ns);
    let any = json!({ "start_minute": 0, "end_minute": 0 });
    assert_eq!(act(json!({ "action": "set", "scrub_window": any }))["scrub_window"], Value::Null);
    for (body, said) in [
        (json!({ "action": "set", "scrub_period_s": 60 }), "scrub period of 60 s"),
        (
            json!({ "action": "set", "scrub_window": { "start_minute": 1440, "end_minute": 0 } }),
            "minute 1440",
        ),
    ] {
        let (status, kind, detail) = daemon.refusal(Method::POST, "/v1/arrays/data/actions", &body);
        assert!((status, &*kind) == (422, "invalid") && detail.contains(said), "{detail}");
    }
    act(json!({ "action": "scrub" }));
    daemon.wait_for("the scrub", || daemon.get("/v1/arrays/data")["last_scrub_ns"].is_u64());
    let metrics = daemon.metrics();
    for name in ["array_last_scrub_timestamp_seconds", "array_next_scrub_timestamp_seconds"] {
        let sample = format!("freestone_{name}{{array=\"data\"}} ");
        let value = metrics.lines().find_map(|line| line.strip_prefix(&sample)).unwrap();
        assert!(value.parse::<f64>().unwrap() > 1e9, "{name} {value}");
    }
    let errors = "freestone_array_member_read_errors_total{array=\"data\",slot=\"2\"} 0\n";
    assert!(metrics.contains(errors), "{metrics}");
}

#[test]
fn a_configuration_is_planned_applied_and_applied_again_without_effect() {
    let mut daemon = Daemon::prepare(&["--config"]);
    let members: Vec<String> = (0..3).map(|slot| daemon.file(&format!("m{slot}"), 32 * MIB)).collect();
    let path = daemon.path("config.toml");
    let write = |size: u64, iops: u64, more: &str| {
        let text = format!(
            "[[array]]\nname = \"data\"\nlevel = \"5\"\nmembers = {members:?}\n{more}[[group]]\nname = \"g\"\n\
             [[volume]]\nname = \"v1\"\nbacking = \"data\"\nsize_bytes = {size}\ngroup = \"g\"\nqos.iops.per_s = {iops}\n\
             [[export]]\nname = \"e1\"\nkind = \"nbd\"\nvolumes = [\"v1\"]\n"
        );
        std::fs::write(&path, text).unwrap();
    };
    write(MIB, 100, "");
    daemon.args.push(path.to_str().unwrap().into());
    let plan = |daemon: &Daemon| {
        let output = daemon.command().arg("--plan").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let steps = plan(&daemon);
    assert_eq!(steps.lines().count(), 4, "{steps}");
    assert!(steps.contains("make volume v1 of 1048576 bytes on data"), "{steps}");
    daemon.start();
    assert_eq!(daemon.get("/v1/exports/e1")["state"], "active");
    let volume = daemon.get("/v1/volumes/v1");
    daemon.end("-TERM");
    assert_eq!(plan(&daemon), "");
    write(2 * MIB, 200, "scrub_period_s = 864000\nread_error_budget = 20\n");
    assert_eq!(
        plan(&daemon),
        "set scrubs and read errors of array data\ngrow volume v1 to 2097152 bytes\nset the limits of volume v1\n"
    );
    daemon.start();
    let grown = daemon.get("/v1/volumes/v1");
    assert_eq!((&grown["uuid"], &grown["size_bytes"]), (&volume["uuid"], &json!(2 * MIB)));
    assert_eq!(grown["qos"]["iops"]["per_s"], 200);
    assert_eq!(daemon.get("/v1/arrays/data")["scrub_period_s"], 864_000);
    daemon.end("-TERM");
    write(MIB, 200, "");
    assert!(plan(&daemon).starts_with("leave volume v1: it has 2097152 bytes"));
    std::fs::write(&path, "[[volume]]\nnmae = 1\n").unwrap();
    let output = daemon.command().output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && said.contains("config.toml: line 2"), "{said}");
}

#[test]
fn an_array_that_grows_has_more_room_for_volumes() {
    let daemon = Daemon::new();
    let members = daemon.array();
    daemon.volume("v1", MIB);
    let free = daemon.get("/v1/arrays/data")["free_bytes"].as_u64().unwrap();
    for member in &members {
        std::fs::File::options().write(true).open(member).unwrap().set_len(64 * MIB).unwrap();
    }
    daemon.post("/v1/arrays/data/actions", &json!({ "action": "grow" }));
    let more = daemon.get("/v1/arrays/data")["free_bytes"].as_u64().unwrap() - free;
    assert!((90 * MIB..=96 * MIB).contains(&more), "{more}");
}

#[test]
fn an_array_is_deleted_when_nothing_is_on_it_and_its_members_are_free() {
    let daemon = Daemon::new();
    let members = daemon.array();
    daemon.volume("v1", MIB);
    let refusal = daemon.refusal(Method::DELETE, "/v1/arrays/data", &Value::Null);
    assert_eq!((refusal.0, &*refusal.1, &*refusal.2), (409, "in-use", "data: volume v1 is on it"));
    daemon.delete("/v1/volumes/v1");
    daemon.delete("/v1/arrays/data");
    let again = json!({ "name": "other", "level": "6", "members": members });
    assert_eq!(daemon.post("/v1/arrays", &again)["level"], "6");
    daemon.delete("/v1/arrays/other?keep=true");
    let refusal = daemon.refusal(Method::POST, "/v1/arrays", &again);
    assert_eq!((refusal.0, &*refusal.1), (409, "in-use"));
    assert!(refusal.2.contains("m0"), "{}", refusal.2);
}

#[test]
fn lines_for_clients_have_absolute_paths_although_the_daemons_are_relative() {
    let mut daemon = Daemon::prepare(&[]);
    daemon.start_in_its_directory();
    let spec = json!({ "name": "data", "spec": "mem:size=64M" });
    daemon.post("/v1/devices", &spec);
    let place = daemon.dir.path().canonicalize().unwrap();
    daemon.post("/v1/exports", &json!({ "name": "e1", "kind": "vhost-user-blk", "volumes": ["data"] }));
    let line = daemon.get("/v1/exports/e1/attach")["lines"]["qemu"].clone();
    assert!(line.as_str().unwrap().contains(&format!("path={}/e1.sock,", place.display())), "{line}");
    let relative =
        json!({ "name": "e2", "kind": "nbd", "volumes": ["data"], "options": { "socket": "e2.sock" } });
    let (_, kind, detail) = daemon.refusal(Method::POST, "/v1/exports", &relative);
    assert_eq!((&*kind, &*detail), ("invalid", "export e2: socket \"e2.sock\": want an absolute path"));
}

#[test]
fn health_lists_problems_until_they_have_ended() {
    let mut daemon = Daemon::new();
    daemon.array();
    daemon.post("/v1/devices", &json!({ "name": "d", "spec": daemon.file("d", 16 * MIB) }));
    daemon.post("/v1/exports", &json!({ "name": "e", "kind": "nbd", "volumes": ["d"] }));
    assert_eq!(daemon.get("/v1/health"), json!([]));
    daemon.post("/v1/arrays/data/actions", &json!({ "action": "fail", "members": ["1"] }));
    std::fs::rename(daemon.path("d"), daemon.path("away")).unwrap();
    daemon.restart("-TERM");
    let problems = daemon.get("/v1/health");
    let named =
        |field: &str| problems.as_array().unwrap().iter().map(|problem| problem[field].clone()).collect();
    let expected: Vec<Value> =
        ["array-degraded", "device-not-open", "export-waiting"].map(Value::from).to_vec();
    let codes: Vec<Value> = named("code");
    assert_eq!(codes, expected, "{problems}");
    let severities: Vec<Value> = named("severity");
    assert_eq!(json!(severities), json!(["critical", "critical", "warning"]));
    let objects: Vec<Value> = named("object");
    assert_eq!(json!(objects), json!(["data", "d", "e"]));
    let texts: Vec<Value> = named("text");
    let array = texts[0].as_str().unwrap();
    assert!(array.starts_with("Array data is degraded: slot 1 "), "{array}");
    assert!(array.ends_with("; no redundancy is left"), "{array}");
    assert!(texts[1].as_str().unwrap().starts_with("Device d is not open: "), "{texts:?}");
    let times: Vec<Value> = named("since_ns");
    let again = daemon.get("/v1/health");
    assert_eq!(again, problems, "since {times:?}");
    let metrics = daemon.metrics();
    let line =
        "freestone_health{code=\"array-degraded\",severity=\"critical\",kind=\"array\",object=\"data\"} 1";
    assert!(metrics.lines().any(|found| found == line), "{metrics}");
    std::fs::rename(daemon.path("away"), daemon.path("d")).unwrap();
    daemon.wait_for("a device that is back", || daemon.get("/v1/health").as_array().unwrap().len() == 1);
}

#[test]
fn a_degraded_array_is_critical_only_without_redundancy_left() {
    let daemon = Daemon::new();
    let members: Vec<String> = (0..5).map(|slot| daemon.file(&format!("m{slot}"), 32 * MIB)).collect();
    daemon.post("/v1/arrays", &json!({ "name": "data", "level": "6", "members": members }));
    let stripes: Vec<String> = (0..2).map(|slot| daemon.file(&format!("s{slot}"), 32 * MIB)).collect();
    daemon.post("/v1/arrays", &json!({ "name": "fast", "level": "0", "members": stripes }));
    let left = |array: &str| daemon.get(&format!("/v1/arrays/{array}"))["redundancy_left"].clone();
    assert_eq!([left("data"), left("fast")], [json!(2), json!(0)]);
    assert_eq!(daemon.get("/v1/health"), json!([]), "level 0 never has redundancy");
    for (slot, redundancy, severity) in [("0", 1, "warning"), ("3", 0, "critical")] {
        daemon.post("/v1/arrays/data/actions", &json!({ "action": "fail", "members": [slot] }));
        let problem = daemon.get("/v1/health")[0].clone();
        assert_eq!(json!([problem["code"], problem["severity"]]), json!(["array-degraded", severity]));
        assert_eq!(left("data"), redundancy);
        let line = format!("freestone_array_redundancy_left{{array=\"data\"}} {redundancy}");
        assert!(daemon.metrics().lines().any(|found| found == line), "{line}");
    }
}
