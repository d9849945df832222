//! `freestone serve` and its clients, as processes.

use crate::common::{Server, failure, freestone, kill, path_value, run, run_json};
use serde_json::Value;
use std::time::{Duration, Instant};

fn export(socket: &std::path::Path, more: &str) -> String {
    format!("vhost-user-blk:{}{more}", path_value("socket", socket))
}

fn client(socket: &std::path::Path, more: &str) -> String {
    format!("virtio-blk-vhost-user:{}{more}", path_value("path", socket))
}

#[test]
fn a_client_reads_what_it_wrote_and_the_server_ends_cleanly() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("disk, one.sock");
    let export = export(&socket, ",queues=2,serial=S");
    let (server, ready) =
        Server::start(&["--device", "mem:size=16M,id=disk", "--layer", "stats", "--export", &export]);
    let said = &ready["exports"][0];
    assert_eq!((&said["socket"], &said["capacity"]), (&socket.to_str().unwrap().into(), &(16 << 20).into()));
    assert_eq!((&said["device"], &said["serial"]), (&"disk".into(), &"S".into()));
    let quick = ["--time", "0.3", "--ramp", "0"];
    for more in ["", ",packed=on", ",indirect=off,event-idx=off"] {
        let device = client(&socket, more);
        let args = [
            &["bench", "--json", "--device", &device, "--rw", "randall", "--verify", "--queues", "2"][..],
            &quick,
        ];
        let result = run_json(&args.concat()).pop().unwrap();
        assert!(result["verified"].as_u64() > Some(0), "{more}: {result}");
        assert_eq!((&result["mismatches"], &result["failed"]), (&0.into(), &0.into()), "{more}: {result}");
    }
    let (code, said) = server.stop();
    assert_eq!((code, said.as_str()), (0, ""));
    assert!(!socket.exists());
}

#[test]
fn both_engines_and_events_reach_an_export() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let (server, _) = Server::start(&["--device", "null:size=1G", "--export", &export(&socket, "")]);
    let device = client(&socket, "");
    for (engine, more) in [("raw", &[][..]), ("stack", &[]), ("stack", &["--event"])] {
        let args =
            ["bench", "--json", "--device", &device, "--engine", engine, "--time", "0.2", "--ramp", "0"];
        let result = run_json(&[&args[..], more].concat()).pop().unwrap();
        assert!(result["requests"].as_u64() > Some(0), "{result}");
        assert_eq!(&result["engine"], engine);
    }
    assert_eq!(server.stop().0, 0);
}

#[test]
fn several_devices_and_exports_are_served_by_one_process() {
    let dir = tempfile::tempdir().unwrap();
    let sockets = [dir.path().join("a"), dir.path().join("b")];
    let exports = [export(&sockets[0], ",device=big"), export(&sockets[1], ",readonly")];
    let devices = ["mem:size=1M,id=small", "mem:size=2M,id=big"];
    let (server, _) = Server::start(&[
        "--device",
        devices[0],
        "--device",
        devices[1],
        "--export",
        &exports[0],
        "--export",
        &exports[1],
    ]);
    let info = |i: usize| run_json(&["info", "--json", "--device", &client(&sockets[i], "")]).remove(0);
    assert_eq!((&info(0)["capacity"], &info(0)["read_only"]), (&(2 << 20).into(), &false.into()));
    assert_eq!((&info(1)["capacity"], &info(1)["read_only"]), (&(1 << 20).into(), &true.into()));
    assert_eq!(server.stop().0, 0);
    assert!(sockets.iter().all(|socket| !socket.exists()));
}

#[test]
fn a_file_that_grew_is_seen_after_sighup() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, image) = (dir.path().join("s"), dir.path().join("disk.img"));
    std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let device = format!("io_uring:{}", path_value("path", &image));
    let (mut server, _) = Server::start(&["--device", &device, "--export", &export(&socket, "")]);
    std::fs::File::options().write(true).open(&image).unwrap().set_len(2 << 20).unwrap();
    server.signal("HUP");
    let event = server.event("refreshed");
    assert_eq!((&event["before"], &event["capacity"]), (&(1 << 20).into(), &(2 << 20).into()));
    let info = run_json(&["info", "--json", "--device", &client(&socket, "")]);
    assert_eq!(info[0]["capacity"], 2 << 20);
    assert_eq!(server.stop().0, 0);
}

#[test]
fn keys_and_certificates_are_read_again_after_sighup() {
    let [dir, files] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let (socket, keys, all) = (dir.path().join("s"), files.path().join("keys"), dir.path().join("all"));
    let [alice, bob] = ["a", "b"].map(|name| format!("{name}:{}\n", name.repeat(32)));
    secrets::write(&all, format!("{alice}{bob}")).unwrap();
    secrets::write(&keys, &alice).unwrap();
    let export = format!("nbd:{},{}", path_value("socket", &socket), path_value("tls-psk", &keys));
    let (mut server, _) = Server::start(&["--device", "mem:size=1M", "--export", &export]);
    let connects = |name: &str| {
        let (socket, keys) = (path_value("path", &socket), path_value("tls-psk", &all));
        run(&["info", "--device", &format!("nbd:{socket},tls=require,{keys},tls-username={name}")])
            .status
            .success()
    };
    assert!(connects("a") && !connects("b"));
    // Another file takes the place of the first.
    secrets::write(&files.path().join("new"), &bob).unwrap();
    std::fs::rename(files.path().join("new"), &keys).unwrap();
    server.signal("HUP");
    let event = server.event("reloaded");
    assert_eq!(event["export"], format!("nbd:{}", socket.display()));
    assert!(!connects("a") && connects("b"));
    std::fs::remove_file(&keys).unwrap();
    server.signal("HUP");
    server.event("refreshed");
    assert!(connects("b"), "the keys in use stay");
    let (code, said) = server.stop();
    assert!(code == 0 && said.contains("not reloaded") && said.contains("/keys: No such file"), "{said}");
}

#[test]
fn counters_are_printed_on_sigusr1() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let (mut server, _) =
        Server::start(&["--device", "mem:size=1M", "--layer", "stats", "--export", &export(&socket, "")]);
    let device = client(&socket, "");
    let result =
        run_json(&["bench", "--json", "--device", &device, "--time", "0.1", "--ramp", "0"]).remove(0);
    server.signal("USR1");
    let stats = server.event("stats");
    assert!(stats["stats"]["read"]["requests"].as_u64() >= result["requests"].as_u64(), "{stats} {result}");
    let export = server.event("export_stats");
    assert_eq!((&export["stats"]["connections"], &export["stats"]["failed"]), (&1.into(), &0.into()));
    assert_eq!(server.stop().0, 0);
}

#[test]
fn a_fault_on_the_way_reaches_the_client_and_ends_its_benchmark() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let fault = "fault:op=read,error=medium,after=100";
    let export = export(&socket, "");
    let (server, _) = Server::start(&["--device", "mem:size=1M", "--layer", fault, "--export", &export]);
    let device = client(&socket, "");
    for engine in ["raw", "stack"] {
        let output = run(&["bench", "--json", "--device", &device, "--engine", engine, "--time", "20"]);
        let result: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(
            (&result["first_failure"]["op"], output.status.code()),
            (&"read".into(), Some(1)),
            "{result}"
        );
    }
    assert_eq!(server.stop().0, 0);
}

#[test]
fn an_interrupted_benchmark_says_what_it_has_measured() {
    let mut child = freestone()
        .args(["bench", "--json", "--device", "null", "--time", "60", "--ramp", "0"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(500));
    kill("INT", child.id());
    assert!(child.wait().unwrap().success());
    let result: Value = serde_json::from_reader(child.stdout.take().unwrap()).unwrap();
    assert_eq!(result["interrupted"], true);
    assert!(result["requests"].as_u64() > Some(0), "{result}");
}

#[test]
fn a_second_signal_ends_a_server_that_waits_for_its_device() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let (mut server, _) =
        Server::start(&["--device", "null:latency-us=600000000", "--export", &export(&socket, "")]);
    let device = client(&socket, "");
    let mut bench = freestone()
        .args(["bench", "--device", &device, "--ramp", "0"])
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(500));
    server.signal("TERM");
    server.event("stopping");
    let begin = Instant::now();
    assert_eq!(server.stop().0, 1);
    assert!(begin.elapsed() < Duration::from_secs(60));
    assert_eq!(bench.wait().unwrap().code(), Some(1), "its device is gone");
}

#[test]
fn a_socket_that_is_in_use_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let export = export(&socket, "");
    let (server, _) = Server::start(&["--device", "null", "--export", &export]);
    let (said, code) = failure(&["serve", "--log", "off", "--device", "null", "--export", &export]);
    let expected =
        format!("freestone: export vhost-user-blk:{0}: cannot take over socket {0}: ", socket.display());
    assert!(
        said.starts_with(&expected) && said.contains("the socket is in use by another process"),
        "{said}"
    );
    assert_eq!(code, 1);
    assert_eq!(server.stop().0, 0);
}

#[test]
fn systemd_is_told_when_clients_may_connect_and_when_they_may_not() {
    let dir = tempfile::tempdir().unwrap();
    let notify = std::os::unix::net::UnixDatagram::bind(dir.path().join("notify")).unwrap();
    let socket = dir.path().join("s");
    let mut child = freestone()
        .args(["serve", "--log", "warn", "--device", "null", "--export", &export(&socket, "")])
        .env("NOTIFY_SOCKET", dir.path().join("notify"))
        .spawn()
        .unwrap();
    notify.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let next = || {
        let mut message = [0; 64];
        let len = notify.recv(&mut message).unwrap();
        String::from_utf8_lossy(&message[..len]).trim().to_owned()
    };
    assert_eq!(next(), "READY=1");
    assert!(socket.exists());
    kill("TERM", child.id());
    assert_eq!(next(), "STOPPING=1");
    assert!(child.wait().unwrap().success());
}
