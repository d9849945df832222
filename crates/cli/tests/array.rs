//! `freestone array` and arrays in `freestone serve`, as processes over files.

use crate::common::{Server, failure_in, freestone, path_value, run_in, run_json_in, wait_for, write};
use serde_json::Value;
use std::path::PathBuf;

const MEMBER_BYTES: u64 = 16 << 20;

/// A directory for members, sockets and control sockets.
struct Bench {
    dir: tempfile::TempDir,
}

impl Bench {
    fn new() -> Bench {
        Bench { dir: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn file(&self, name: &str) -> String {
        std::fs::create_dir_all(self.path("members")).unwrap();
        let path = self.path("members").join(name);
        std::fs::File::create(&path).unwrap().set_len(MEMBER_BYTES).unwrap();
        path.to_str().unwrap().to_owned()
    }

    fn create(&self, level: &str, count: usize) -> Vec<String> {
        let members: Vec<String> = (0..count).map(|i| self.file(&format!("m{i}"))).collect();
        let mut args = vec!["array", "create", "data", "--level", level, "--json"];
        args.extend(members.iter().map(String::as_str));
        let created = run_json_in(self.dir.path(), &args).remove(0);
        assert_eq!(created["event"], "created", "{created}");
        members
    }

    fn json(&self, args: &[&str]) -> Vec<Value> {
        run_json_in(self.dir.path(), args)
    }

    fn failure(&self, args: &[&str]) -> (String, i32) {
        failure_in(self.dir.path(), args)
    }

    fn serve(&self, device: &str) -> (Server, Value, PathBuf) {
        let socket = self.path("vhost.sock");
        let export = format!("vhost-user-blk:{},queues=2", path_value("socket", &socket));
        let (server, ready) = Server::start_in(self.dir.path(), &["--device", device, "--export", &export]);
        (server, ready, socket)
    }

    fn show(&self) -> Value {
        self.json(&["array", "show", "--json", "data"]).remove(0)
    }

    fn wait_until_optimal(&self) {
        self.wait_for(|shown| shown["state"] == "optimal");
    }

    fn wait_for(&self, is_so: impl Fn(&Value) -> bool) {
        wait_for(|| self.show(), is_so);
    }

    fn scan(&self) -> String {
        self.path("members").to_str().unwrap().to_owned()
    }
}

fn members_list(members: &[String]) -> String {
    format!("raid:members={}", members.join("+"))
}

#[test]
fn an_array_is_created_examined_served_written_and_found_clean() {
    let bench = Bench::new();
    for (level, count) in [("6", 5), ("1", 2), ("50", 6), ("0", 3)] {
        let members = bench.create(level, count);
        let examined = bench.json(&["array", "examine", "--json", &members[1]]).remove(0);
        assert_eq!(
            (&examined["slot"], &examined["array"]["level"]),
            (&1.into(), &level.into()),
            "{examined}"
        );
        assert_eq!(examined["array"]["is_clean"], true, "{examined}");
        let (server, ready, socket) = bench.serve(&members_list(&members));
        assert_eq!(ready["devices"][0]["capacity"], examined["array"]["capacity_bytes"]);
        write(&socket);
        let (code, said) = server.stop();
        assert_eq!(code, 0, "{said}");
        let args: Vec<&str> =
            ["array", "check", "--json"].into_iter().chain(members.iter().map(String::as_str)).collect();
        let checked = bench.json(&args).pop().unwrap();
        assert_eq!((&checked["event"], &checked["clean"]), (&"checked".into(), &true.into()), "{checked}");
        assert!(level == "0" || checked["parity"]["stripes_checked"].as_u64() > Some(0), "{checked}");
        members.iter().for_each(|member| std::fs::remove_file(member).unwrap());
    }
}

#[test]
fn an_array_starts_without_a_member_and_remembers_that_it_is_out() {
    let bench = Bench::new();
    let members = bench.create("6", 4);
    std::fs::remove_file(&members[2]).unwrap();
    let (server, _, socket) = bench.serve(&members_list(&members));
    write(&socket);
    let shown = bench.json(&["array", "show", "--json", "data"]).remove(0);
    assert_eq!((&shown["state"], &shown["is_running"]), (&"degraded".into(), &true.into()), "{shown}");
    assert_eq!(shown["members"][2]["state"], "missing");
    assert_eq!(server.stop().0, 0);
    let shown = bench.json(&["array", "show", "--json", "data", "--scan", &bench.scan()]).remove(0);
    assert_eq!((&shown["state"], &shown["is_clean"]), (&"degraded".into(), &true.into()), "{shown}");
    let (server, _, socket) = bench.serve(&format!("raid:name=data,scan={}", bench.scan()));
    write(&socket);
    assert_eq!(server.stop().0, 0);
    let checked = bench.json(&["array", "check", "--json", "--name", "data", "--scan", &bench.scan()]);
    assert_eq!(checked.last().unwrap()["members_missing"], 1);
}

#[test]
fn half_a_mirror_starts_only_when_told_for_the_other_half_may_be_newer() {
    let bench = Bench::new();
    let members = bench.create("1", 2);
    let export = format!("vhost-user-blk:{}", path_value("socket", &bench.path("s")));
    let device = members_list(&members[..1]);
    let (said, code) = bench.failure(&["serve", "--log", "off", "--device", &device, "--export", &export]);
    assert!(said.contains("slot 1") && said.contains("could have continued without the others"), "{said}");
    assert_eq!(code, 1);
    let (server, _, socket) = bench.serve(&format!("{device},run=on"));
    write(&socket);
    assert_eq!(server.stop().0, 0);
    // The other half is stale now: it is left out by name.
    let (server, ..) = bench.serve(&members_list(&members));
    let shown = bench.json(&["array", "show", "--json", "data"]).remove(0);
    assert_eq!(shown["members"][1]["state"], "missing", "{shown}");
    let (code, said) = server.stop();
    assert!(code == 0 && said.contains("the device is stale: slot 1 has failed"), "{said}");
}

#[test]
fn a_killed_server_leaves_an_array_that_is_recovered_at_its_next_start() {
    let bench = Bench::new();
    let members = bench.create("5", 3);
    let (server, _, socket) = bench.serve(&members_list(&members));
    write(&socket);
    server.kill();
    let mut check = vec!["array", "check"];
    check.extend(members.iter().map(String::as_str));
    let (said, code) = bench.failure(&check);
    assert!(said.contains("not stopped") && code == 1, "{said}");
    // Entries to replay are listed, and stay until a start replays them.
    for _ in 0..2 {
        let output = run_in(bench.dir.path(), &[&check[..], &["--json"]].concat());
        let said = String::from_utf8(output.stdout).unwrap();
        let events: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let log = events.iter().find(|event| event["event"] == "log").unwrap();
        let entries: Vec<_> = events.iter().filter(|event| event["event"] == "log_entry").collect();
        assert!(log["to_replay"] == entries.len() && log["entries"].as_u64() > Some(0), "{said}");
        for entry in entries {
            let has = |key: &str| entry[key].is_u64();
            assert!(has("lane") && has("sequence") && has("stripe") && entry["strips"].is_array(), "{said}");
        }
    }
    let assembled = bench.json(&["array", "assemble", "--json", "--name", "data", "--scan", &bench.scan()]);
    assert_eq!(assembled[0]["was_clean"], false);
    check.push("--json");
    assert_eq!(bench.json(&check).pop().unwrap()["clean"], true);
}

#[test]
fn only_a_mirror_does_without_snapshots() {
    let bench = Bench::new();
    let striped = bench.create("5", 3);
    let device = format!("{},snapshot=off", members_list(&striped));
    let (said, code) = bench.failure(&["info", "--device", &device]);
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("snapshot=off is for levels 1 and 10, and data has level 5"), "{said}");
    let bench = Bench::new();
    let device = format!("{},snapshot=off", members_list(&bench.create("1", 2)));
    assert!(bench.json(&["info", "--json", "--device", &device])[0]["capacity"].is_u64());
}

#[test]
fn members_that_do_not_belong_are_refused_by_name() {
    let bench = Bench::new();
    let members = bench.create("5", 3);
    let export = format!("vhost-user-blk:{}", path_value("socket", &bench.path("s")));
    let refusal = |members: &[String]| {
        let (said, code) = bench.failure(&[
            "serve",
            "--log",
            "off",
            "--device",
            &members_list(members),
            "--export",
            &export,
        ]);
        assert_eq!(code, 1, "{said}");
        said
    };
    let empty = bench.file("empty");
    assert!(refusal(&[members[0].clone(), members[1].clone(), empty.clone()]).contains(&empty));
    let copy = bench.file("copy");
    std::fs::copy(&members[1], &copy).unwrap();
    let said = refusal(&[members[0].clone(), members[1].clone(), copy.clone(), members[2].clone()]);
    assert!(said.contains(&copy) || said.contains(&members[1]), "{said}");
    let (said, code) = bench.failure(&["array", "create", "other", "--level", "1", &empty, &members[0]]);
    assert!(
        said.contains(&members[0]) && said.contains("Freestone array") && said.contains("--force"),
        "{said}"
    );
    assert_eq!(code, 1);
}

#[test]
fn a_running_array_is_controlled_through_its_socket_and_its_members_are_not_touched() {
    let bench = Bench::new();
    let members = bench.create("6", 5);
    let (server, _, socket) = bench.serve(&members_list(&members));
    let (said, code) = bench.failure(&["array", "check", &members[0]]);
    assert!(said.contains("open for writing elsewhere"), "{said}");
    assert_eq!(code, 1);
    let failed = bench.json(&["array", "fail", "--json", "data", "3"]).remove(0);
    assert_eq!((&failed["event"], &failed["running"]), (&"failed".into(), &true.into()));
    write(&socket);
    let shown = bench.json(&["array", "show", "--json"]).remove(0);
    assert_eq!((&shown["state"], &shown["members"][3]["state"]), (&"degraded".into(), &"missing".into()));
    let (said, code) = bench.failure(&["array", "fail", "data", "9"]);
    assert!(said.contains("slot 9") && code == 1, "{said}");
    assert_eq!(bench.json(&["array", "stop", "--json", "data"])[0]["event"], "stopped");
    assert_eq!(server.wait(), 0);
    let (said, code) = bench.failure(&["array", "stop", "data"]);
    assert!(said.contains("array data: it does not run") && code == 1, "{said}");
}

#[test]
fn a_failed_member_is_replaced_and_a_former_one_comes_back() {
    let bench = Bench::new();
    let mut members = bench.create("6", 4);
    let (server, _, socket) = bench.serve(&members_list(&members));
    write(&socket);
    bench.json(&["array", "fail", "--json", "data", &members[1]]);
    let fresh = bench.file("fresh");
    bench.json(&["array", "add", "--json", "data", &fresh]);
    bench.wait_until_optimal();
    write(&socket);
    let (said, code) = bench.failure(&["array", "add", "data", "virtio-blk-vhost-user:path=/s"]);
    assert!(code == 1 && said.contains("/s: it can only use registered memory"), "{said}");
    let (said, code) = bench.failure(&["array", "add", "data", &members[2]]);
    assert!(said.contains("open for writing elsewhere") && code == 1, "{said}");
    bench.json(&["array", "fail", "--json", "data", "3"]);
    write(&socket);
    let returned = bench.json(&["array", "re-add", "--json", "data", &members[3]]).remove(0);
    assert!(returned["text"].as_str().unwrap().contains("gets what has changed"), "{returned}");
    bench.wait_until_optimal();
    let other = bench.file("other");
    bench.json(&["array", "replace", "--json", "data", "0", "--with", &other]);
    bench.wait_for(|shown| {
        shown["members"][0]["device"].as_str().is_some_and(|device| device.ends_with("other"))
    });
    bench.json(&["array", "scrub", "--json", "data"]);
    bench.wait_for(|shown| shown["scrub"]["is_complete"] == true);
    assert_eq!(bench.show()["scrub"]["mismatched_rows"], 0);
    assert_eq!(server.stop().0, 0);
    (members[0], members[1]) = (other, fresh);
    let mut check = vec!["array", "check", "--json"];
    check.extend(members.iter().map(String::as_str));
    let checked = bench.json(&check).pop().unwrap();
    assert_eq!((&checked["clean"], &checked["members_missing"]), (&true.into(), &0.into()), "{checked}");
}

#[test]
fn scrubs_and_read_errors_are_chosen_at_creation_while_it_runs_and_while_it_does_not() {
    let bench = Bench::new();
    let members: Vec<String> = (0..3).map(|i| bench.file(&format!("m{i}"))).collect();
    let mut args = vec!["array", "create", "data", "--level", "5", "--json", "--scrub-every", "4w"];
    args.extend(["--scrub-window", "22:00-06:00"]);
    args.extend(members.iter().map(String::as_str));
    bench.json(&args);
    let offline = || bench.json(&["array", "show", "--json", "data", "--scan", &bench.scan()]).remove(0);
    let window = serde_json::json!({ "start_minute": 1320, "end_minute": 360 });
    let maintenance =
        |period_s: u64, window: &Value, budget: u64| [period_s.into(), window.clone(), budget.into()];
    let of =
        |shown: &Value| ["scrub_period_s", "scrub_window", "read_error_budget"].map(|key| shown[key].clone());
    let shown = offline();
    assert_eq!(of(&shown), maintenance(2_419_200, &window, 20));
    assert!(shown["next_scrub_ns"].as_u64() > Some(0) && shown["last_scrub_ns"].is_null(), "{shown}");

    let set = |more: &[&str]| bench.json(&[&["array", "set", "--json", "data"], more].concat()).remove(0);
    let done = set(&["--read-errors", "off", "--scan", &bench.scan()]);
    assert_eq!((&done["event"], &done["running"]), (&"set".into(), &false.into()), "{done}");
    assert_eq!(of(&offline()), maintenance(2_419_200, &window, 0));
    // A member that is not here would keep what was set before.
    std::fs::rename(&members[1], bench.path("elsewhere")).unwrap();
    let (said, code) =
        bench.failure(&["array", "set", "data", "--read-errors", "1", "--scan", &bench.scan()]);
    assert!(said.contains("array data: slots [1]: missing members") && code == 1, "{said}");
    std::fs::rename(bench.path("elsewhere"), &members[1]).unwrap();

    let (server, _, _) = bench.serve(&members_list(&members));
    assert_eq!(of(&bench.show()), maintenance(2_419_200, &window, 0));
    let done = set(&["--scrub-every", "12h", "--scrub-window", "off", "--read-errors", "7"]);
    let text = "scrub every 12h, at most 7 read errors of a member in an hour";
    assert_eq!((&done["running"], &done["text"]), (&true.into(), &text.into()), "{done}");
    let shown = bench.show();
    assert_eq!(of(&shown), maintenance(43_200, &Value::Null, 7));
    let next_ns = shown["next_scrub_ns"].as_u64().unwrap();
    bench.json(&["array", "scrub", "--json", "data"]);
    bench.wait_for(|shown| shown["last_scrub_ns"].as_u64() > Some(0));
    assert!(bench.show()["next_scrub_ns"].as_u64().unwrap() > next_ns, "it counts as a turn");
    let human = run_in(bench.dir.path(), &["array", "show", "data"]);
    let human = String::from_utf8(human.stdout).unwrap();
    assert!(human.contains("scrubs        scrub every 12h, next 20"), "{human}");
    assert!(human.contains("read errors   at most 7 of a member in an hour"), "{human}");
    assert_eq!(server.stop().0, 0);
    let shown = offline();
    assert_eq!(of(&shown), maintenance(43_200, &Value::Null, 7));
    assert!(shown["last_scrub_ns"].as_u64() > Some(0), "{shown}");

    let cases: &[(&[&str], &str)] = &[
        (&["set", "data"], "nothing to set: give --scrub-every, --scrub-window or --read-errors"),
        (
            &["set", "data", "--scrub-every", "30"],
            "expected hours, days or weeks such as 12h, 30d or 4w, or off",
        ),
        (&["set", "data", "--scrub-window", "22-6"], "expected HH:MM-HH:MM in UTC, or off"),
        (&["set", "data", "--read-errors", "0"], "expected 1 or more, or off"),
        (
            &["create", "x", "--level", "0", "--scrub-every", "30d", "/a", "/b"],
            "scrub period of 2592000 s: level 0 has no redundancy to scrub",
        ),
    ];
    for (args, message) in cases {
        let output = freestone().arg("array").args(*args).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains(message) && output.status.code() == Some(2), "{args:?}: {said}");
    }
}

#[test]
fn damage_is_found_named_and_repaired() {
    use std::os::unix::fs::FileExt;
    let bench = Bench::new();
    let members = bench.create("6", 4);
    let (server, _, socket) = bench.serve(&members_list(&members));
    write(&socket);
    assert_eq!(server.stop().0, 0);
    let examined = bench.json(&["array", "examine", "--json", &members[1]]).remove(0);
    let data = examined["layout"]["data_offset"].as_u64().unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&members[1]).unwrap();
    file.write_all_at(&[0xa5; 4096], data + 8192).unwrap();
    let mut args = vec!["array", "check", "--json"];
    args.extend(members.iter().map(String::as_str));
    let output = run_in(bench.dir.path(), &args);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = String::from_utf8(output.stdout).unwrap();
    let difference: Value = said
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .find(|e| e["event"] == "difference")
        .unwrap();
    assert_eq!(difference["slot"], 1, "{said}");
    args.push("--repair");
    assert_eq!(bench.json(&args).pop().unwrap()["parity"]["rows_repaired"], 1);
    args.pop();
    assert_eq!(bench.json(&args).pop().unwrap()["clean"], true);
}

#[test]
fn command_lines_that_make_no_sense_are_refused_before_anything_is_written() {
    let cases: &[(&[&str], &str)] = &[
        (
            &["array", "create", "x", "--level", "9", "/a"],
            "invalid value '9' for '--level <LEVEL>': expected 0, 1, 10, 5",
        ),
        (
            &["array", "create", "x", "--level", "6", "/a", "/b", "/c"],
            "level 6: at least 4 members in a group are needed, 3 were given",
        ),
        (
            &["array", "create", "x", "--level", "5", "--groups", "2", "/a", "/b", "/c"],
            "level 5 takes no --groups",
        ),
        (&["array", "check"], "members are needed, or --scan DIR with --name ARRAY"),
        (&["array", "assemble", "--scan", "/nowhere"], "--scan needs --name ARRAY"),
    ];
    for (args, message) in cases {
        let output = freestone().args(*args).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains(message), "{args:?}: {said}");
        assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
    }
}
