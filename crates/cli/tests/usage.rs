//! Errors for invalid command lines and for missing devices.

use crate::common::{failure, run, run_json};

#[test]
fn an_invalid_command_line_is_answered_in_one_line_and_exit_code_2() {
    let export = ["--export", "vhost-user-blk:socket=/tmp/never"];
    let cases: &[(&[&str], &str)] = &[
        (
            &["serve", "--device", "disk:path=x", export[0], export[1]],
            "--device disk:path=x: no such device: \"disk\"; there are io_uring, mem, nbd, null, nvme-tcp, nvme_uring, qcow2, rbd, virtio-blk-vhost-user, virtio-blk-vhost-vdpa, virtio-blk-vfio-pci, virtio-blk-uring, raid",
        ),
        (
            &["info", "--device", "mem:sise=1G"],
            "--device mem:sise=1G: unknown key \"sise\"; mem knows size, block-size, huge-pages, readonly, id",
        ),
        (&["info", "--device", "mem"], "--device mem: size=SIZE is missing"),
        (
            &["info", "--device", "mem:size=many"],
            "--device mem:size=many: size=many: expected a number of bytes such as 512, 4K, 1M, 20G or 1T",
        ),
        (
            &["info", "--device", "io_uring:path=x,direct=perhaps"],
            "--device io_uring:path=x,direct=perhaps: direct=perhaps: expected on or off",
        ),
        (
            &["info", "--device", "nbd:uri=nbd://a/b?tls-psk-file=/k"],
            "--device nbd:uri=nbd://a/b?tls-psk-file=/k: nbd://a/b?tls-psk-file=/k: tls-psk-file is only \
             valid for nbds:// and nbds+unix://",
        ),
        (
            &["info", "--device", "nbd:host=a,path=/b"],
            "--device nbd:host=a,path=/b: one of uri=, path= and host= is needed",
        ),
        (&["info", "--device", "nvme-tcp:address=a"], "--device nvme-tcp:address=a: nqn=NQN is missing"),
        (
            &["info", "--device", "nvme-tcp:address=a:0,nqn=nqn.a"],
            "--device nvme-tcp:address=a:0,nqn=nqn.a: address=a:0: expected HOST, HOST:PORT or [IPV6]:PORT",
        ),
        (
            &["info", "--device", "nbd:path=/b,replies=rich"],
            "--device nbd:path=/b,replies=rich: replies=rich: expected simple, structured or extended",
        ),
        (
            &["info", "--device", "virtio-blk-vhost-user:path=x,packed=maybe"],
            "--device virtio-blk-vhost-user:path=x,packed=maybe: packed=maybe: expected auto, on or off",
        ),
        (
            &["serve", "--device", "null", "--export", "iscsi:socket=x"],
            "--export iscsi:socket=x: no such export: \"iscsi\"; there are vhost-user-blk, ublk, vduse, nbd, nvme-tcp",
        ),
        (
            &["serve", "--device", "null", "--export", "nbd:name=x"],
            "--export nbd:name=x: socket=PATH or listen=ADDR:PORT is required",
        ),
        (
            &["serve", "--device", "null"],
            "the following required arguments were not provided: --export <KIND:KEY=VALUE,…>",
        ),
        (
            &["serve", "--device", "null", export[0], export[1], "--cores", "0,0"],
            "invalid value '0,0' for '--cores <CPUS>': expected processors such as 0, 0+1 or 0-3, each once",
        ),
        (
            &["serve", "--device", "null", "--export", "vhost-user-blk:socket=/tmp/never,queues=65"],
            "export vhost-user-blk:/tmp/never: 65 queues: want 1 to 64",
        ),
        (
            &["serve", "--device", "null", export[0], export[1], "--poll-us", "often"],
            "invalid value 'often' for '--poll-us <N|always|never>': expected a number of microseconds, always or never",
        ),
        (
            &["bench", "--device", "null", "--rw", "readwrite"],
            "invalid value 'readwrite' for '--rw <WORKLOAD>': expected read, write, rw, trim, zero, randread, randwrite, \
          randrw, randtrim, randzero, randall",
        ),
        (&["bench", "--device", "null", "--device", "null"], "2 devices: this takes one"),
        (
            &["bench", "--device", "null", "--engine", "raw"],
            "--engine raw: the device has no queue of its own",
        ),
        (
            &["bench", "--device", "null", "--log", "a=b=c"],
            "--log a=b=c: expected error, warn, info, debug, trace or off, or a list such as warn,exports=debug",
        ),
        (&["frobnicate"], "unrecognized subcommand 'frobnicate'"),
    ];
    for (args, message) in cases {
        let (said, code) = failure(args);
        assert_eq!(said, format!("freestone: {message}\n"), "{args:?}");
        assert_eq!(code, 2, "{args:?}");
    }
}

#[test]
fn a_device_that_cannot_be_opened_is_named_and_ends_the_program_with_1() {
    let (said, code) = failure(&["info", "--device", "io_uring:path=/nowhere/disk.img"]);
    assert!(said.starts_with("freestone: device io_uring:/nowhere/disk.img: cannot open"), "{said}");
    assert!(said.contains("No such file or directory"), "{said}");
    assert_eq!((said.lines().count(), code), (1, 1), "{said}");
    let (said, code) = failure(&["bench", "--device", "virtio-blk-vhost-user:path=/nowhere/s"]);
    assert!(said.contains("/nowhere/s: cannot connect"), "{said}");
    assert_eq!((said.lines().count(), code), (1, 1), "{said}");
}

#[test]
fn nothing_to_do_is_answered_with_the_help() {
    let (said, code) = failure(&[]);
    assert!(said.contains("Usage: freestone") && said.contains("serve"), "{said}");
    assert_eq!(code, 2);
}

#[test]
fn help_and_version_are_no_errors() {
    for args in [&["--help"][..], &["serve", "--help"], &["bench", "--help"], &["info", "-h"], &["--version"]]
    {
        let output = run(args);
        assert!(output.status.success() && output.stderr.is_empty(), "{args:?}");
        assert!(!output.stdout.is_empty(), "{args:?}");
    }
    let help = String::from_utf8(run(&["serve", "--help"]).stdout).unwrap();
    for part in ["Examples:", "SIGHUP", "Exit codes: 0", "vhost-user-blk:", "queue-size=N"] {
        assert!(help.contains(part), "{part}");
    }
}

#[test]
fn info_says_what_a_device_is() {
    let events = run_json(&[
        "info",
        "--json",
        "--device",
        "mem:size=1M,block-size=4K,readonly,id=ro",
        "--device",
        "null",
    ]);
    assert_eq!((events.len(), &events[0]["event"], &events[0]["id"]), (2, &"device".into(), &"ro".into()));
    assert_eq!((&events[0]["capacity"], &events[0]["block_size"]), (&(1 << 20).into(), &4096.into()));
    assert_eq!((&events[0]["read_only"], &events[1]["id"]), (&true.into(), &"device1".into()));
    let text = String::from_utf8(run(&["info", "--device", "mem:size=1M"]).stdout).unwrap();
    assert!(text.contains("capacity              1 MiB (1048576 bytes)"), "{text}");
}
