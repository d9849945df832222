//! Volumes that move while they are in use.

use crate::common::load::{
    BLOCK, Client, Expected, killed_under_load, load, restart, under_load, wait_for_export,
};
use crate::common::{Daemon, MIB, Served, names, read_state};
use crate::waiting_jobs::check_waits;
use block::{IoError, Op};
use layers::fault::{Action, Rule};
use reactor::{CoreConfig, Cores};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use stack::kinds::member::member;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Time of a copying request on a slow device.
const LATE: Duration = Duration::from_millis(500);

/// A daemon with the devices `data` and `fast`, a volume `v1` on the first, and an export of it.
fn with_volume(size: u64) -> Daemon {
    with_volume_on(size, |daemon, name| daemon.path(name).display().to_string())
}

/// The same, with devices that are opened as `spec` says.
fn with_volume_on(size: u64, mut spec: impl FnMut(&Daemon, &str) -> String) -> Daemon {
    let daemon = Daemon::new();
    for name in ["data", "fast"] {
        daemon.file(name, size + 16 * MIB);
        daemon.post("/v1/devices", &json!({ "name": name, "spec": spec(&daemon, name) }));
    }
    daemon.post("/v1/volumes", &json!({ "name": "first", "backing": "fast", "size_bytes": MIB }));
    daemon.delete("/v1/volumes/first"); // it is prepared for volumes, and empty
    daemon.volume("v1", size);
    daemon.post("/v1/exports", &json!({ "name": "e1", "kind": "nbd", "volumes": ["v1"] }));
    daemon
}

/// As [`with_volume`], with one device that this program serves.
fn with_served(size: u64, place: &str) -> (Daemon, Served) {
    let mut served = None;
    let daemon = with_volume_on(size, |daemon, name| match name == place {
        true => served.insert(daemon.served(name)).spec.clone(),
        false => daemon.path(name).display().to_string(),
    });
    (daemon, served.unwrap())
}

/// Begins a move that takes what it can, whatever users want.
fn move_to(daemon: &Daemon, place: &str) -> Value {
    let job = daemon.post("/v1/volumes/v1/move", &json!({ "backing": place }));
    let urgent = json!({ "min_bytes_per_s": u64::MAX });
    let set = daemon.send(Method::PATCH, "/v1/jobs/v1.move", &urgent).status();
    assert!([StatusCode::OK, StatusCode::NOT_FOUND].contains(&set), "{set}");
    job
}

fn wait_until_moved(daemon: &Daemon) {
    daemon.wait_for("a move", || {
        daemon.get("/v1/volumes/v1")["moving_to"].is_null() && daemon.get("/v1/jobs") == json!([])
    });
}

fn is_on(daemon: &Daemon) -> String {
    daemon.get("/v1/volumes/v1")["backing"].as_str().unwrap().to_owned()
}

fn free(daemon: &Daemon) -> [u64; 2] {
    ["data", "fast"].map(|name| daemon.get(&format!("/v1/devices/{name}"))["free_bytes"].as_u64().unwrap())
}

#[test]
fn a_volume_moves_to_and_fro_under_load_and_its_users_do_not_notice() {
    let size = 32 * MIB;
    let daemon = with_volume(size);
    let before = free(&daemon);
    let blocks = size / BLOCK;
    let client = Client::new(&daemon);
    let is_enough = Arc::new(AtomicBool::new(false));
    let log = std::thread::scope(|scope| {
        let loading = scope.spawn(|| client.write(load(blocks, 0, is_enough.clone())));
        for place in ["fast", "data", "fast", "data", "fast"] {
            let job = move_to(&daemon, place);
            assert_eq!(
                (&job["id"], &job["kind"], &job["backing"]),
                (&json!("v1.move"), &json!("move"), &json!(place))
            );
            wait_until_moved(&daemon);
            assert_eq!(is_on(&daemon), place, "{}", daemon.log());
        }
        is_enough.store(true, Ordering::SeqCst);
        loading.join().unwrap()
    });
    assert!(log.len() > 100 && log.iter().all(|(.., is_ok)| *is_ok), "{} writes", log.len());
    let mut expected = Expected { blocks: vec![0; blocks as usize], maybe: None };
    expected.note(&log);
    expected.check(&client.read(blocks));
    assert_eq!(free(&daemon), [before[1], before[0]], "the old place is free");
    let samples = daemon.get("/v1/samples");
    assert!(samples["volumes"]["v1"]["writes"].as_u64().unwrap() >= log.len() as u64, "{samples}");
    // It grows at its new place.
    daemon.patch("/v1/volumes/v1", &json!({ "size_bytes": size + 4 * MIB }));
    assert_eq!(Client::new(&daemon).device.limits().capacity, size + 4 * MIB);
    // The old device is not used any more.
    daemon.delete("/v1/devices/data");
    expected.check(&Client::new(&daemon).read(blocks));
    let events = daemon.get("/v1/events").to_string();
    assert_eq!(events.matches("\"moved\"").count(), 5, "{events}");
}

#[test]
fn whenever_the_daemon_is_killed_a_volume_that_moves_has_what_was_acknowledged() {
    let size = 48 * MIB;
    let mut daemon = with_volume(size);
    let (sum, blocks) = (free(&daemon).iter().sum::<u64>(), size / BLOCK);
    let mut expected = Expected { blocks: vec![0; blocks as usize], maybe: None };
    let (mut value, mut places) = (0, Vec::new());
    for round in 0..16u64 {
        let client = Client::new(&daemon);
        let log = killed_under_load(&mut daemon, &client, blocks, value, |daemon| {
            if daemon.get("/v1/volumes/v1")["moving_to"].is_null() {
                let place = if is_on(daemon) == "data" { "fast" } else { "data" };
                move_to(daemon, place);
            }
            std::thread::sleep(Duration::from_millis(round * 11));
        });
        value += log.len() as u64 + 1;
        expected.note(&log);
        drop(client);
        daemon.start();
        daemon.wait_for("the export", || daemon.get("/v1/exports/e1")["state"] == "active");
        assert_eq!(names(&daemon.get("/v1/volumes")), ["v1"]);
        expected.check(&Client::new(&daemon).read(blocks));
        if round % 3 == 2 {
            wait_until_moved(&daemon);
            expected.check(&Client::new(&daemon).read(blocks));
            assert_eq!(free(&daemon).iter().sum::<u64>(), sum, "nothing is left behind");
            places.push(is_on(&daemon));
        }
    }
    assert!(value > 100, "{value} writes");
    assert!(places.contains(&"fast".into()), "it has moved: {places:?}");
}

#[test]
fn a_move_stands_still_goes_on_is_slowed_down_and_given_up() {
    let mut places = Vec::new();
    let mut daemon = with_volume_on(64 * MIB, |daemon, name| {
        places.push(daemon.served(name));
        places.last().unwrap().spec.clone()
    });
    let before = free(&daemon);
    let client = Client::new(&daemon);
    // The move takes as long as that, however fast the machine is: it is not over before it is to
    // stand still.
    let late = Rule::new(Action::Delay(LATE.as_nanos() as u64)).on(&[Op::Write, Op::WriteZeroes]);
    places[1].fault.add(late);
    let mut expected = Expected { blocks: vec![0; 2048], maybe: None };
    let mut numbers = 0..2000;
    expected.note(&client.write(move || numbers.next().map(|number| (number, number + 7))));
    move_to(&daemon, "fast");
    daemon.patch("/v1/jobs/v1.move", &json!({ "is_paused": true }));
    // Requests in flight complete.
    daemon.wait_for("a job that stands still", || {
        let job = daemon.get("/v1/jobs/v1.move");
        assert_eq!((&job["is_paused"], &job["eta_s"]), (&json!(true), &Value::Null));
        std::thread::sleep(4 * LATE);
        daemon.get("/v1/jobs/v1.move") == job
    });
    for (method, path, body, text) in [
        (Method::DELETE, "/v1/volumes/v1", Value::Null, "export e1 serves it"),
        (Method::PATCH, "/v1/volumes/v1", json!({ "size_bytes": 128 * MIB }), "it moves to fast"),
        (Method::PATCH, "/v1/volumes/v1", json!({ "name": "v2" }), "it moves to fast"),
        (Method::POST, "/v1/volumes/v1/move", json!({ "backing": "fast" }), "it moves to fast"),
        (Method::DELETE, "/v1/devices/fast", Value::Null, "volume v1 moves from data to fast"),
    ] {
        let (status, kind, detail) = daemon.refusal(method, path, &body);
        assert!(
            status == 409 && kind == "in-use" && detail.contains(text),
            "{path}: {status} {kind} {detail}"
        );
    }
    // Its limits can be changed, and a new client sees its present content.
    daemon.patch("/v1/volumes/v1", &json!({ "qos": { "iops": { "per_s": 100_000 } } }));
    daemon.post("/v1/exports", &json!({ "name": "e2", "kind": "nbd", "volumes": ["v1"] }));
    expected.check(&Client::new(&daemon).read(2048));
    // A restarted daemon begins the move again, at the recorded pace.
    daemon.restart("-TERM");
    assert_eq!(daemon.get("/v1/volumes/v1")["moving_to"], "fast");
    daemon.patch("/v1/jobs/v1.move", &json!({ "max_bytes_per_s": 4 * MIB }));
    daemon.wait_for("a rate", || daemon.get("/v1/jobs/v1.move")["bytes_per_s"].as_u64() > Some(0));
    let job = daemon.get("/v1/jobs/v1.move");
    assert!(job["bytes_per_s"].as_u64().unwrap() < 64 * MIB, "{job}");
    daemon.delete("/v1/jobs/v1.move");
    assert_eq!((is_on(&daemon), daemon.get("/v1/jobs")), ("data".into(), json!([])));
    assert_eq!((free(&daemon), names(&daemon.get("/v1/volumes"))), (before, vec!["v1".to_owned()]));
    assert_eq!(daemon.get("/v1/devices/fast")["volumes"], json!([]));
    expected.check(&Client::new(&daemon).read(2048));
    daemon.delete("/v1/devices/fast");
}

#[test]
fn a_place_that_does_not_do_is_refused_by_name_and_changes_nothing() {
    let daemon = with_volume(8 * MIB);
    let small = daemon.file("small", 8 * MIB);
    daemon.post("/v1/devices", &json!({ "name": "small", "spec": small }));
    daemon.post("/v1/devices", &json!({ "name": "big-blocks", "spec": "mem:size=64M,block-size=4096" }));
    let generation = daemon.get("/v1/system")["generation"].clone();
    for (to, status, text) in [
        ("data", 422, "volume v1: it is on data already"),
        ("nope", 404, "no array or device \"nope\""),
        ("small", 409, "small: 8388608 bytes"),
        ("big-blocks", 422, "in blocks of 4096"),
    ] {
        let refused = daemon.refusal(Method::POST, "/v1/volumes/v1/move", &json!({ "backing": to }));
        assert!(refused.0 == status && refused.2.contains(text), "{to}: {refused:?}");
    }
    let refused = daemon.refusal(Method::POST, "/v1/volumes/nope/move", &json!({ "backing": "fast" }));
    assert_eq!(refused.0, 404);
    assert_eq!(daemon.refusal(Method::DELETE, "/v1/jobs/v1.move", &Value::Null).0, 404);
    assert_eq!(daemon.get("/v1/system")["generation"], generation);
}

/// The state as it was before a move was remembered as done: what counts when `state.json` is
/// damaged right afterwards.
fn forget_that_it_moved(daemon: &Daemon, uuid: &str) {
    let path = daemon.path("state/state.json");
    let mut state: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let copy = "0f0e0d0c-0b0a-4908-8706-050403020100";
    state["moves"] = json!({ uuid: { "from": "data", "to": "fast", "copy": copy, "is_done": false } });
    std::fs::write(daemon.path("state/state.json.previous"), state.to_string()).unwrap();
    std::fs::write(&path, "{ damaged").unwrap();
}

#[test]
fn an_older_state_never_deletes_the_newer_place_of_a_volume() {
    let mut daemon = with_volume(8 * MIB);
    let blocks = 8 * MIB / BLOCK;
    let uuid = daemon.get("/v1/volumes/v1")["uuid"].as_str().unwrap().to_owned();
    move_to(&daemon, "fast");
    wait_until_moved(&daemon);
    let mut left = (0..blocks).map(|number| (number, number + 7));
    Client::new(&daemon).write(move || left.next());
    let written = Client::new(&daemon).read(blocks);
    daemon.end("-KILL");
    forget_that_it_moved(&daemon, &uuid);
    daemon.start();
    daemon.wait_for("the export", || daemon.get("/v1/exports/e1")["state"] == "active");
    assert_eq!(
        (names(&daemon.get("/v1/volumes")), is_on(&daemon)),
        (vec!["v1".to_owned()], "fast".to_owned())
    );
    assert_eq!(Client::new(&daemon).read(blocks), written);
    wait_until_moved(&daemon);
    assert!(daemon.log().contains("the new place counts"), "{}", daemon.log());
}

#[test]
fn a_copy_that_a_failed_move_has_left_is_never_shown_and_goes() {
    let mut daemon = with_volume(8 * MIB);
    let before = free(&daemon);
    daemon.end("-TERM");
    let device = member(&daemon.path("fast").display().to_string(), false, false).unwrap().open().unwrap();
    let cores = Cores::start(&[CoreConfig::default()]).unwrap();
    let pool = volume::Pool::open(device, cores.get(0)).unwrap();
    let copy = volume::Uuid::random().unwrap();
    pool.create_copy(copy, volume::Name::new(&format!("moving-{copy}")).unwrap(), 4 * MIB).unwrap();
    drop((pool, cores));
    daemon.start();
    assert_eq!(names(&daemon.get("/v1/volumes")), ["v1"]);
    daemon.wait_for("its room", || free(&daemon) == before);
    assert_eq!(names(&daemon.get("/v1/volumes")), ["v1"]);
}

/// The devices `data` and `fast`. The volume has moved to `fast`, its old place is not deleted yet,
/// and the daemon was killed. Its state files are those of the moment at which the pool on `fast`
/// got the volume.
fn killed_after_the_switch(expected: &mut Expected) -> Daemon {
    let (mut daemon, data) = with_served(8 * MIB, "data");
    let client = Client::new(&daemon);
    expected.note(&under_load(&client, expected.blocks.len() as u64, 0, || ()));
    data.fault
        .add(Rule::new(Action::Error(IoError::Medium)).on(&[Op::Write]).within(0..volume::store::RESERVED));
    move_to(&daemon, "fast");
    daemon.wait_for("the switch", || is_on(&daemon) == "fast");
    expected.note(&under_load(&client, expected.blocks.len() as u64, 1 << 40, || ()));
    daemon.end("-KILL");
    drop(data);
    let spec = daemon.path("data").display().to_string();
    for name in ["state/state.json", "state/state.json.previous"] {
        let mut state = read_state(&daemon.path(name)).unwrap();
        state["devices"][0]["spec"] = json!(spec);
        for record in state["moves"].as_object_mut().unwrap().values_mut() {
            (record["is_due"], record["is_done"]) = (json!(true), json!(false));
        }
        std::fs::write(daemon.path(name), state.to_string()).unwrap();
    }
    daemon
}

#[test]
fn until_the_new_place_is_there_no_start_uses_the_old_one() {
    let blocks = 8 * MIB / BLOCK;
    let mut expected = Expected { blocks: vec![0; blocks as usize], maybe: None };
    let mut daemon = killed_after_the_switch(&mut expected);
    // Only the pool of the new place knows which counts.
    let (fast, away) = (daemon.path("fast"), daemon.path("away"));
    std::fs::rename(&fast, &away).unwrap();
    daemon.start();
    let text = "volume v1: it may have moved from data to fast: fast says that when it is open, or job v1.move is cancelled and the volume stays on data";
    let export = daemon.get("/v1/exports/e1");
    assert_eq!((&export["state"], &export["error"]), (&json!("waiting"), &json!(text)));
    let volume = daemon.get("/v1/volumes/v1");
    assert_eq!((&volume["moving_to"], &volume["error"]), (&json!("fast"), &json!(text)));
    let problem = daemon.get("/v1/health")[0].clone();
    let described = [&problem["code"], &problem["object"]].map(|field| field.as_str().unwrap());
    assert_eq!(described, ["device-not-open", "fast"], "{problem}");
    let problem = daemon.get("/v1/health")[1].clone();
    assert_eq!(
        (&problem["code"], &problem["severity"]),
        (&json!("volume-not-available"), &json!("critical"))
    );
    check_waits(&daemon, "v1.move", "fast");
    let copy = json!({ "name": "v2", "backing": "data", "from": "v1" });
    for (method, path, body, kind) in [
        (
            Method::POST,
            "/v1/exports",
            json!({ "name": "e2", "kind": "nbd", "volumes": ["v1"] }),
            "unavailable",
        ),
        (Method::POST, "/v1/volumes", copy, "in-use"),
        (Method::DELETE, "/v1/volumes/v1", Value::Null, "in-use"),
        (Method::DELETE, "/v1/devices/fast", Value::Null, "in-use"),
    ] {
        let refused = daemon.refusal(method, path, &body);
        assert_eq!(refused.1, kind, "{path}: {refused:?}");
    }
    std::fs::rename(&away, &fast).unwrap();
    wait_for_export(&daemon);
    expected.check(&Client::new(&daemon).read(blocks));
    assert_eq!(is_on(&daemon), "fast");
    wait_until_moved(&daemon);
    assert_eq!(daemon.get("/v1/devices/data")["volumes"], json!([]));
    restart(&mut daemon, "-KILL");
    expected.check(&Client::new(&daemon).read(blocks));
}

#[test]
fn a_move_to_a_device_that_is_dead_for_good_is_cancelled() {
    let blocks = 8 * MIB / BLOCK;
    let (mut daemon, fast) = with_served(8 * MIB, "fast");
    let client = Client::new(&daemon);
    let mut expected = Expected { blocks: vec![0; blocks as usize], maybe: None };
    // The table that makes the copy is on time; the one that gives it the identity is not.
    let late = Rule::new(Action::Delay(10_000_000_000)).on(&[Op::Write]).within(0..volume::store::RESERVED);
    fast.fault.add(Rule { after: 2, ..late });
    expected.note(&under_load(&client, blocks, 0, || ()));
    move_to(&daemon, "fast");
    daemon.wait_for("the identity on its way", || fast.fault.rules().iter().any(|(.., hits)| *hits > 0));
    drop(client);
    daemon.end("-KILL");
    for name in ["state/state.json", "state/state.json.previous"] {
        let state = read_state(&daemon.path(name)).unwrap();
        let record = state["moves"].as_object().unwrap().values().next().unwrap();
        assert_eq!((&record["is_due"], &record["is_done"]), (&json!(true), &json!(false)), "{name}: {state}");
    }
    drop(fast); // and never opened again
    daemon.start();
    assert_eq!(daemon.get("/v1/exports/e1")["state"], "waiting");
    daemon.delete("/v1/jobs/v1.move");
    wait_for_export(&daemon);
    let refused = daemon.refusal(Method::DELETE, "/v1/jobs/v1.move", &Value::Null);
    assert_eq!(
        refused,
        (412, "stale".into(), "job v1.move: it has ended already, the volume is on data".into())
    );
    let client = Client::new(&daemon);
    expected.check(&client.read(blocks));
    expected.note(&under_load(&client, blocks, 1 << 40, || ()));
    drop(client);
    // Both state files say that the volume stays.
    daemon.end("-KILL");
    let previous = read_state(&daemon.path("state/state.json.previous")).unwrap();
    assert!(previous["moves"].to_string().contains("\"stays\":true"), "{previous}");
    daemon.start();
    wait_for_export(&daemon);
    expected.check(&Client::new(&daemon).read(blocks));
    // Room with the identity of the volume may be left there. It is forgotten with its device.
    assert_eq!(
        daemon.refusal(Method::POST, "/v1/volumes/v1/move", &json!({ "backing": "data" })).1,
        "in-use"
    );
    daemon.delete("/v1/devices/fast");
    assert_eq!(daemon.get("/v1/volumes/v1")["moving_to"], Value::Null);
    let other = daemon.file("other", 24 * MIB);
    daemon.post("/v1/devices", &json!({ "name": "other", "spec": other }));
    move_to(&daemon, "other");
    wait_until_moved(&daemon);
    assert_eq!(is_on(&daemon), "other");
    expected.check(&Client::new(&daemon).read(blocks));
}

#[test]
fn a_device_with_a_volume_that_another_has_too_is_refused() {
    let mut daemon = with_volume(8 * MIB);
    daemon.end("-TERM");
    std::fs::copy(daemon.path("data"), daemon.path("twin")).unwrap();
    daemon.start();
    let uuid = daemon.get("/v1/volumes/v1")["uuid"].as_str().unwrap().to_owned();
    let twin = json!({ "name": "twin", "spec": daemon.path("twin") });
    let (status, kind, detail) = daemon.refusal(Method::POST, "/v1/devices", &twin);
    let text = format!("twin: its volume v1 ({uuid}) is on data, too");
    assert_eq!((status, &*kind, &*detail), (409, "in-use", &*text));
    assert_eq!(daemon.refusal(Method::GET, "/v1/devices/twin", &Value::Null).0, 404);
}

#[test]
fn a_move_whose_old_place_is_free_is_not_cancelled() {
    let mut daemon = with_volume(8 * MIB);
    let uuid = daemon.get("/v1/volumes/v1")["uuid"].as_str().unwrap().to_owned();
    move_to(&daemon, "fast");
    wait_until_moved(&daemon);
    daemon.end("-KILL");
    forget_that_it_moved(&daemon, &uuid);
    let previous = daemon.path("state/state.json.previous");
    let mut state = read_state(&previous).unwrap();
    state["moves"][&uuid]["is_due"] = json!(true);
    std::fs::write(previous, state.to_string()).unwrap();
    let (fast, away) = (daemon.path("fast"), daemon.path("away"));
    std::fs::rename(&fast, &away).unwrap();
    daemon.start();
    let (status, _, detail) = daemon.refusal(Method::DELETE, &format!("/v1/jobs/{uuid}.move"), &Value::Null);
    let text = format!("job {uuid}.move: the volume cannot stay on data: ");
    assert!(status == 404 && detail.starts_with(&text), "{status} {detail}");
    std::fs::rename(&away, &fast).unwrap();
    wait_for_export(&daemon);
    assert_eq!(is_on(&daemon), "fast");
}
