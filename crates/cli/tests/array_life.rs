//! The life of an array's members through `freestone array`: spares, removal, commands while no
//! server runs it, and a control socket of its own.

use crate::common::{Server, failure_in, path_value, run_json, run_json_in, wait_for, write};
use serde_json::Value;
use std::path::{Path, PathBuf};

const MEMBER_BYTES: u64 = 16 << 20;

/// A directory for members, sockets and control sockets.
struct Bench {
    dir: tempfile::TempDir,
}

impl Bench {
    fn new() -> Bench {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("members")).unwrap();
        Bench { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn scan(&self) -> String {
        self.path("members").to_str().unwrap().to_owned()
    }

    fn file(&self, name: &str) -> String {
        let path = self.path("members").join(name);
        std::fs::File::create(&path).unwrap().set_len(MEMBER_BYTES).unwrap();
        path.to_str().unwrap().to_owned()
    }

    /// An array `name` at a level, of members called after it.
    fn create(&self, name: &str, level: &str, count: usize, more: &[&str]) -> Vec<String> {
        let members: Vec<String> = (0..count).map(|i| self.file(&format!("{name}{i}"))).collect();
        let mut args = vec!["array", "create", name, "--level", level, "--json"];
        args.extend(members.iter().map(String::as_str));
        args.extend(more);
        assert_eq!(self.json(&args)[0]["event"], "created");
        members
    }

    fn json(&self, args: &[&str]) -> Vec<Value> {
        run_json_in(self.dir.path(), args)
    }

    fn failure(&self, args: &[&str]) -> String {
        let (said, code) = failure_in(self.dir.path(), args);
        assert_eq!(code, 1, "{said}");
        said
    }

    fn serve(&self, more: &[&str]) -> (Server, PathBuf) {
        let socket = self.path("vhost.sock");
        let export = format!("vhost-user-blk:{},queues=2", path_value("socket", &socket));
        let args = [&["--export", &*export], more].concat();
        (Server::start_in(self.dir.path(), &args).0, socket)
    }

    fn serve_found(&self, name: &str) -> (Server, PathBuf) {
        self.serve(&["--device", &format!("raid:name={name},scan={}", self.scan())])
    }

    fn show(&self, name: &str) -> Value {
        self.json(&["array", "show", "--json", name]).remove(0)
    }

    fn wait_for(&self, name: &str, is_so: impl Fn(&Value) -> bool) {
        wait_for(|| self.show(name), is_so);
    }

    fn offline(&self, name: &str) -> Value {
        self.json(&["array", "show", "--json", name, "--scan", &self.scan()]).remove(0)
    }

    fn assert_clean(&self, name: &str, missing: usize) {
        let checked = self.json(&["array", "check", "--json", "--name", name, "--scan", &self.scan()]);
        let checked = checked.last().unwrap();
        assert_eq!(
            (&checked["clean"], &checked["members_missing"]),
            (&true.into(), &missing.into()),
            "{checked}"
        );
    }
}

fn device_of(shown: &Value, slot: usize) -> &str {
    shown["members"][slot]["device"].as_str().unwrap_or_default()
}

#[test]
fn a_dedicated_spare_is_found_when_the_array_is_served_and_takes_the_place_of_a_failed_member() {
    let bench = Bench::new();
    let spare = bench.file("waiting");
    let members = bench.create("data", "6", 4, &["--spare", &spare]);
    let examined = bench.json(&["array", "examine", "--json", &spare]).remove(0);
    assert_eq!((&examined["role"], &examined["array_name"]), (&"spare".into(), &"data".into()));
    assert_eq!(bench.offline("data")["spares"][0]["device"], *spare);
    // Found by --scan, and named in addition to the members.
    let (server, socket) = bench.serve_found("data");
    write(&socket);
    assert!(bench.show("data")["spares"][0]["device"].as_str().unwrap().ends_with("waiting"));
    assert_eq!(server.stop().0, 0);
    let (server, socket) = bench.serve(&["--device", &format!("raid:members={}+{spare}", members.join("+"))]);
    write(&socket);
    bench.json(&["array", "fail", "--json", "data", "1"]);
    bench.wait_for("data", |shown| shown["state"] == "optimal");
    let shown = bench.show("data");
    assert!(device_of(&shown, 1).ends_with("waiting") && shown["spares"] == Value::Array(vec![]), "{shown}");
    write(&socket);
    assert_eq!(server.stop().0, 0);
    bench.assert_clean("data", 0);
}

#[test]
fn a_global_spare_goes_to_whichever_array_needs_it_and_a_slot_that_is_empty_at_start_is_filled() {
    let bench = Bench::new();
    bench.create("one", "5", 3, &[]);
    bench.create("two", "1", 2, &[]);
    let spare = bench.file("global");
    let added = bench.json(&["array", "add", "--json", "--global", "one", &spare]).remove(0);
    assert_eq!((&added["global"], &added["running"]), (&true.into(), &false.into()), "{added}");
    let devices = ["one", "two"].map(|name| format!("raid:name={name},id={name},scan={}", bench.scan()));
    let serve = || bench.serve(&["--device", &devices[0], "--device", &devices[1]]);
    let (server, _) = serve();
    for name in ["one", "two"] {
        assert!(bench.show(name)["spares"][0]["device"].as_str().unwrap().ends_with("global"), "{name}");
    }
    bench.json(&["array", "fail", "--json", "two", "1"]);
    bench.wait_for("two", |shown| shown["state"] == "optimal");
    assert_eq!(bench.show("one")["spares"], Value::Array(vec![]));
    bench.json(&["array", "fail", "--json", "one", "0"]);
    assert_eq!(bench.show("one")["state"], "degraded");
    assert_eq!(server.stop().0, 0);
    // A spare that is added while no server runs the array.
    let late = bench.file("late");
    let place = bench.scan();
    bench.json(&["array", "add", "--json", "one", &late, "--scan", &place]);
    let (server, _) = serve();
    bench.wait_for("one", |shown| shown["state"] == "optimal");
    assert!(device_of(&bench.show("one"), 0).ends_with("late"));
    // And one for the server's pool while it runs.
    let pooled = bench.file("pooled");
    bench.json(&["array", "add", "--json", "--global", "one", &pooled]);
    bench.json(&["array", "fail", "--json", "two", "0"]);
    bench.wait_for("two", |shown| shown["state"] == "optimal");
    assert_eq!(server.stop().0, 0);
    bench.assert_clean("one", 0);
    bench.assert_clean("two", 0);
}

#[test]
fn a_spare_that_another_server_has_does_not_keep_an_array_from_being_served() {
    let bench = Bench::new();
    bench.create("one", "1", 2, &[]);
    bench.create("two", "1", 2, &[]);
    bench.json(&["array", "add", "--json", "--global", "one", &bench.file("global")]);
    let (first, _) = bench.serve_found("one");
    let export = format!("vhost-user-blk:{}", path_value("socket", &bench.path("other.sock")));
    let device = format!("raid:name=two,scan={}", bench.scan());
    let args = ["--export", &export, "--device", &device];
    let (second, _) = Server::start_in(bench.dir.path(), &args);
    assert_eq!(bench.show("two")["spares"], Value::Array(vec![]));
    assert_eq!((first.stop().0, second.stop().0), (0, 0));
}

#[test]
fn only_members_that_are_out_and_spares_can_be_removed_while_the_array_runs() {
    let bench = Bench::new();
    let members = bench.create("data", "6", 4, &[]);
    let (server, socket) = bench.serve_found("data");
    write(&socket);
    let said = bench.failure(&["array", "remove", "data", &members[2]]);
    assert!(said.contains("slot 2: the member is live") && said.contains("fail it first"), "{said}");
    bench.json(&["array", "fail", "--json", "data", &members[2]]);
    // A list with one that cannot be removed removes nothing.
    let said = bench.failure(&["array", "remove", "data", "2", "0"]);
    assert!(said.contains("slot 0: the member is live"), "{said}");
    assert_eq!(bench.show("data")["members"][2]["reason"], "an operator marked it as failed");
    let removed = bench.json(&["array", "remove", "--json", "data", &members[2]]).remove(0);
    assert_eq!((&removed["event"], &removed["running"]), (&"removed".into(), &true.into()));
    assert_eq!(bench.show("data")["members"][2]["reason"], "an operator removed it");
    let said = bench.failure(&["array", "remove", "data", "2"]);
    assert!(said.contains("slot 2: no member to remove"), "{said}");
    // As with mdadm, it can be re-added and gets only the changes.
    let returned = bench.json(&["array", "re-add", "--json", "data", &members[2]]).remove(0);
    assert!(returned["text"].as_str().unwrap().contains("gets what has changed"), "{returned}");
    bench.wait_for("data", |shown| shown["state"] == "optimal");
    let spare = bench.file("spare");
    bench.json(&["array", "add", "--json", "data", &spare]);
    bench.wait_for("data", |shown| !shown["spares"].as_array().unwrap().is_empty());
    let removed = bench.json(&["array", "remove", "--json", "data", &spare]).remove(0);
    assert!(removed["text"].as_str().unwrap().contains("no spare any more"), "{removed}");
    assert!(bench.failure(&["array", "examine", &spare]).contains("no superblock"));
    let said = bench.failure(&["array", "remove", "data", &spare]);
    assert!(said.contains("it is not in the array"), "{said}");
    bench.json(&["array", "fail", "--json", "data", "0", "3"]);
    let removed = bench.json(&["array", "remove", "--json", "data", "failed"]).remove(0);
    assert_eq!(removed["text"], "slot 0 is removed, slot 3 is removed");
    write(&socket);
    assert_eq!(server.stop().0, 0);
    bench.assert_clean("data", 2);
}

#[test]
fn members_of_an_array_that_does_not_run_are_failed_removed_added_and_come_back() {
    let bench = Bench::new();
    let members = bench.create("data", "6", 4, &[]);
    let (server, socket) = bench.serve_found("data");
    write(&socket);
    assert_eq!(server.stop().0, 0);
    let place = bench.scan();
    let offline = |words: &[&str]| bench.json(&[&["array"], words, &["--json", "--scan", &place]].concat());
    let refused = |words: &[&str]| bench.failure(&[&["array"], words, &["--scan", &place]].concat());
    assert!(bench.failure(&["array", "remove", "data", "1"]).contains("its members are needed"));
    assert!(refused(&["remove", "data", "1"]).contains("slot 1: the member is live: only failed members"));
    offline(&["fail", "data", &members[1]]);
    let removed = offline(&["remove", "data", &members[1]]);
    let removed = removed.last().unwrap();
    assert_eq!((&removed["slots"][0], &removed["running"]), (&1.into(), &false.into()), "{removed}");
    assert_eq!(bench.offline("data")["members"][1]["reason"], "an operator removed it");
    // Back, without a server.
    let returned = offline(&["re-add", "data", &members[1]]);
    assert_eq!(returned.last().unwrap()["event"], "re-added");
    assert_eq!(bench.offline("data")["state"], "optimal");
    bench.assert_clean("data", 0);
    // A spare, and away with it.
    let spare = bench.file("spare");
    std::fs::write(&spare, vec![0xeb; 1 << 20]).unwrap();
    assert!(refused(&["add", "data", &spare]).contains("1048576 bytes: at least"), "too small");
    let spare = bench.file("spare");
    offline(&["add", "data", &spare]);
    assert!(refused(&["add", "data", &spare]).contains("it is the array's already, or a spare"));
    assert!(refused(&["add", "data", &members[0]]).contains("it is the array's already, or a spare"));
    let removed = offline(&["remove", "data", &spare]);
    assert_eq!(removed.last().unwrap()["spares"][0], *spare);
    assert!(bench.failure(&["array", "examine", &spare]).contains("no superblock"));
    assert!(refused(&["remove", "data", &spare]).contains("it is not in the array"));
}

#[test]
fn a_member_of_an_array_that_does_not_run_is_replaced_by_a_copy() {
    let bench = Bench::new();
    let members = bench.create("data", "5", 3, &[]);
    let (server, socket) = bench.serve_found("data");
    write(&socket);
    assert_eq!(server.stop().0, 0);
    let place = bench.scan();
    let fresh = bench.file("fresh");
    let said = bench.failure(&["array", "replace", "data", "7", "--with", &fresh, "--scan", &place]);
    assert!(said.contains("member 7: it is not in the array"), "{said}");
    let args = ["array", "replace", "--json", "data", "0", "--with", &fresh, "--scan", &place];
    let replaced = bench.json(&args);
    let replaced = replaced.last().unwrap();
    assert_eq!((&replaced["event"], &replaced["slot"]), (&"replaced".into(), &0.into()), "{replaced}");
    assert_eq!(bench.offline("data")["members"][0]["device"], *fresh);
    // The old one belongs to no array any more.
    let checked = bench.json(&["array", "check", "--json", &members[0], &members[1], &members[2]]);
    assert!(
        checked[0]["warning"].as_str().unwrap().contains("slot 0 now belongs to another member"),
        "{checked:?}"
    );
    assert_eq!(checked.last().unwrap()["members_missing"], 1);
    bench.assert_clean("data", 0);
}

/// Reads everywhere.
fn read(socket: &Path) {
    let device = format!("virtio-blk-vhost-user:{}", path_value("path", socket));
    let args = ["bench", "--json", "--device", &device, "--rw", "randread", "--time", "0.3", "--ramp", "0"];
    let result = run_json(&args).pop().unwrap();
    assert_eq!(result["failed"], 0, "{result}");
}

#[test]
fn an_array_that_is_served_read_only_leaves_every_byte_of_its_members_alone() {
    let bench = Bench::new();
    for (level, consistency) in [("6", "ppl"), ("5", "bitmap"), ("1", "bitmap")] {
        let members = bench.create("data", level, 4, &["--consistency", consistency]);
        let bytes = || members.iter().map(|member| std::fs::read(member).ok()).collect::<Vec<_>>();
        let (server, socket) = bench.serve_found("data");
        write(&socket);
        assert_eq!(server.stop().0, 0);
        let before = bytes();
        let named = format!("raid:members={},readonly=on", members.join("+"));
        let found = format!("raid:name=data,scan={},readonly=on", bench.scan());
        for device in [&named, &found] {
            let (server, socket) = bench.serve(&["--device", device]);
            read(&socket);
            let said = bench.failure(&["array", "fail", "data", "0"]);
            assert!(said.contains("the array is served read-only"), "{said}");
            assert_eq!(server.stop().0, 0);
            assert!(before == bytes(), "level {level}: members have changed");
        }
        // Without a member it is read from the others.
        std::fs::remove_file(&members[1]).unwrap();
        let before = bytes();
        // Of a mirror the missing one could be newer.
        let found = format!("{found},run=on");
        let (server, socket) = bench.serve(&["--device", &found]);
        read(&socket);
        assert_eq!(bench.show("data")["state"], "degraded");
        assert_eq!(server.stop().0, 0);
        assert!(before == bytes(), "level {level}: members have changed");
        // The state after a crash is not recovered.
        let (server, socket) =
            bench.serve(&["--device", &format!("raid:name=data,scan={},run=on", bench.scan())]);
        write(&socket);
        server.kill();
        let before = bytes();
        let export = format!("vhost-user-blk:{}", path_value("socket", &bench.path("s")));
        let said = bench.failure(&["serve", "--log", "off", "--device", &found, "--export", &export]);
        assert!(said.contains("read-only start refused: the array was not stopped cleanly"), "{said}");
        assert!(before == bytes(), "level {level}: members have changed");
        members.iter().for_each(|member| drop(std::fs::remove_file(member)));
    }
}

#[test]
fn one_control_socket_reaches_all_arrays_of_a_server_and_is_the_only_way_to_them() {
    let bench = Bench::new();
    bench.create("one", "5", 3, &[]);
    bench.create("two", "1", 2, &[]);
    let devices = ["one", "two"].map(|name| format!("raid:name={name},id={name},scan={}", bench.scan()));
    let control = bench.path("control.sock").to_str().unwrap().to_owned();
    let (server, socket) =
        bench.serve(&["--device", &devices[0], "--device", &devices[1], "--control", &control]);
    write(&socket);
    let array = |words: &[&str]| bench.json(&[&["array", "--json", "--control", &control], words].concat());
    let names: Vec<Value> = array(&["show"]).into_iter().map(|shown| shown["name"].clone()).collect();
    assert_eq!(names, ["one", "two"]);
    assert_eq!(array(&["show", "two"])[0]["level"], "1");
    assert!(array(&["fail", "two", "1"])[0]["text"].as_str().unwrap().contains("slot 1 failed"));
    assert_eq!(array(&["show", "two"])[0]["state"], "degraded");
    array(&["add", "two", &bench.file("fresh")]);
    array(&["scrub", "one"]);
    let said = bench.failure(&["array", "--control", &control, "fail", "three", "0"]);
    assert!(said.contains("array three: not served here; there are one, two"), "{said}");
    assert!(bench.failure(&["array", "show", "two"]).contains("it does not run"));
    let said = bench.failure(&["array", "--control", "/nowhere/s", "show"]);
    assert!(said.contains("control socket /nowhere/s"), "{said}");
    assert_eq!(server.stop().0, 0);
    assert!(!Path::new(&control).exists());
}
