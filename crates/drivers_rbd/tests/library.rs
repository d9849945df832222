//! The driver `rbd` over a library that the loader finds: `tests/rbd/stub`, whose cluster is a
//! directory. A process that has the stub in its search path runs each test.

use block::{Device, DeviceError, IoError};
use conformance::Suite;
use drivers::direct::DirectQueue;
use drivers_rbd::{ClusterOptions, FoundImage, Options, RbdDevice, RbdQueue};
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

const SIZE: u64 = 16 << 20;
/// The variable that holds the cluster's directory in a process with the stub.
const CLUSTER: &str = "RBD_STUB_CLUSTER";
/// Most that a busy machine takes for what takes milliseconds.
const LONG: Duration = Duration::from_secs(60);

/// Compiles the stub into a directory.
fn build(directory: &Path, options: &[&str]) {
    let build = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/rbd/stub/build");
    let status = Command::new(&build).arg(directory).args(options).status();
    assert!(status.unwrap_or_else(|error| panic!("{}: {error}", build.display())).success());
}

/// A process that finds the library in `directory` runs this test on its own.
fn command(test: &str, directory: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--include-ignored", "--nocapture"]);
    command.env("LD_LIBRARY_PATH", directory).env(CLUSTER, directory);
    command
}

/// Runs `body` with the stub, compiled with `options`, and the directory of a cluster with the pool
/// `rbd`. `test` is the name of the calling test.
fn with_stub(test: &str, options: &[&str], body: impl FnOnce(&Path)) {
    if let Some(directory) = std::env::var_os(CLUSTER) {
        return body(Path::new(&directory));
    }
    let directory = tempfile::tempdir().unwrap();
    build(directory.path(), options);
    std::fs::create_dir(directory.path().join("rbd")).unwrap();
    std::fs::write(directory.path().join("ceph.conf"), "").unwrap();
    let output = command(test, directory.path()).output().unwrap();
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(output.status.success() && text[0].contains("1 passed"), "{}", text.concat());
}

fn image(cluster: &Path, name: &str) -> Options {
    Options { conf: Some(cluster.join("ceph.conf")), ..Options::new("rbd", name) }
}

fn create(cluster: &Path, name: &str) -> Options {
    std::fs::File::create_new(cluster.join("rbd").join(name)).unwrap().set_len(SIZE).unwrap();
    image(cluster, name)
}

fn refusal(result: Result<RbdDevice, DeviceError>) -> String {
    result.err().expect("refused").to_string()
}

/// Writes 4 KiB of `byte` at the start.
fn write(queue: &mut RbdQueue, byte: u8) -> block::IoResult {
    let bytes = [byte; 4096];
    let list = [block::Segment { base: bytes.as_ptr().cast_mut(), len: bytes.len() }];
    // SAFETY: list and memory live until the request has ended.
    unsafe {
        let request = block::Request::write(block::Data::new(&list), block::Flags::NONE);
        block::Queue::push(queue, 0, &request, 0)?;
    }
    let mut result = None;
    while result.is_none() {
        queue.wait(1, Some(LONG), None).unwrap();
        block::Queue::reap(queue, &mut |_, ended| result = Some(ended));
    }
    result.expect("it has ended")
}

#[test]
fn an_image_behind_the_loader_passes_the_conformance_suite() {
    with_stub("an_image_behind_the_loader_passes_the_conformance_suite", &[], |cluster| {
        let options = create(cluster, "disk");
        let device = RbdDevice::open(&options).unwrap();
        assert_eq!((device.name(), device.limits().capacity), ("rbd:rbd/disk", SIZE));
        Suite::new(Arc::new(device)).run();
    });
}

#[test]
fn a_library_without_a_function_is_too_old() {
    with_stub("a_library_without_a_function_is_too_old", &["-DOLD"], |cluster| {
        let error = refusal(RbdDevice::open(&create(cluster, "disk")));
        let reason = "librbd.so.1 has no rbd_aio_write_zeroes: version 16 of Ceph or a later one is needed";
        assert_eq!(error, format!("rbd:rbd/disk: {reason}"));
    });
}

#[test]
fn absent_clusters_pools_and_images_are_refused_by_the_attempt() {
    with_stub("absent_clusters_pools_and_images_are_refused_by_the_attempt", &[], |cluster| {
        let error = refusal(RbdDevice::open(&image(cluster, "none")));
        assert!(error.starts_with("rbd:rbd/none: cannot open the image: No such file"), "{error}");
        let error = refusal(RbdDevice::open(&Options { pool: "none".into(), ..image(cluster, "disk") }));
        assert!(error.starts_with("rbd:none/disk: cannot open the pool none: No such file"), "{error}");
        let missing = Options { conf: Some("/no/such.conf".into()), ..image(cluster, "disk") };
        let error = refusal(RbdDevice::open(&missing));
        assert!(error.starts_with("rbd:rbd/disk: cannot read /no/such.conf: No such file"), "{error}");
    });
}

#[test]
fn errors_and_delays_of_the_library_reach_the_requests() {
    with_stub("errors_and_delays_of_the_library_reach_the_requests", &[], |cluster| {
        let mut queue = RbdDevice::open(&create(cluster, "disk")).unwrap().open_queue().unwrap();
        let fault = |name: &str, value: i32| std::fs::write(cluster.join(name), value.to_string()).unwrap();
        for (errno, error) in [(libc::ENOSPC, IoError::NoSpace), (libc::ETIMEDOUT, IoError::TimedOut)] {
            fault("errno", errno);
            assert_eq!(write(&mut queue, 1), Err(error));
        }
        fault("errno", 0);
        fault("refuse", libc::ENOMEM);
        assert_eq!(write(&mut queue, 1), Err(IoError::NoMemory));
        fault("refuse", 0);
        fault("delay_us", 50_000);
        let start = Instant::now();
        assert_eq!(write(&mut queue, 1), Ok(()));
        assert!(start.elapsed() >= Duration::from_millis(50));
    });
}

/// Part of the next test: another client takes the lock and writes.
#[test]
#[ignore = "the next test runs it, in a process of its own"]
fn a_thief() {
    let cluster = std::env::var_os(CLUSTER).expect("the stub");
    let options = Options { force: true, ..image(Path::new(&cluster), "disk") };
    let device = RbdDevice::open(&options).unwrap();
    assert_eq!(write(&mut device.open_queue().unwrap(), 2), Ok(()));
}

#[test]
fn no_write_of_a_client_lands_after_its_lock_was_broken() {
    with_stub("no_write_of_a_client_lands_after_its_lock_was_broken", &[], |cluster| {
        let device = RbdDevice::open(&create(cluster, "disk")).unwrap();
        let mut queue = device.open_queue().unwrap();
        assert_eq!(write(&mut queue, 1), Ok(()));
        let output = command("a_thief", cluster).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        assert_eq!(write(&mut queue, 3), Err(IoError::DeviceGone));
        assert_eq!(std::fs::read(cluster.join("rbd/disk")).unwrap()[..4096], [2; 4096]);
    });
}

/// Part of the next test: a client that has the lock until it is killed.
#[test]
#[ignore = "the next test runs it, in a process of its own"]
fn a_predecessor() {
    let cluster = std::env::var_os(CLUSTER).expect("the stub");
    let cluster = Path::new(&cluster);
    let options = Options { lock_file: Some(cluster.join("own.lock")), ..image(cluster, "disk") };
    let _device = RbdDevice::open(&options).unwrap();
    println!("open");
    std::thread::sleep(LONG);
}

#[test]
fn a_successor_of_a_killed_process_has_the_lock_at_once() {
    with_stub("a_successor_of_a_killed_process_has_the_lock_at_once", &[], |cluster| {
        let options = create(cluster, "disk");
        let mut predecessor = command("a_predecessor", cluster).stdout(Stdio::piped()).spawn().unwrap();
        let (mut text, mut output) = (String::new(), predecessor.stdout.take().unwrap());
        while !text.contains("open") {
            let mut bytes = [0; 256];
            let len = output.read(&mut bytes).unwrap();
            assert!(len > 0, "{text}");
            text += &String::from_utf8_lossy(&bytes[..len]);
        }
        let with_lock_file = Options { lock_file: Some(cluster.join("own.lock")), ..options.clone() };
        let error = refusal(RbdDevice::open(&with_lock_file));
        assert!(error.contains("in use by another open image"), "{error}");
        predecessor.kill().unwrap();
        predecessor.wait().unwrap();
        let error = refusal(RbdDevice::open(&options));
        assert!(error.contains("has it; force=on breaks its lock"), "{error}");
        let device = RbdDevice::open(&with_lock_file).unwrap();
        assert_eq!(write(&mut device.open_queue().unwrap(), 1), Ok(()));
    });
}

#[test]
fn pools_and_images_are_listed_by_namespace() {
    with_stub("pools_and_images_are_listed_by_namespace", &[], |cluster| {
        let options = ClusterOptions { conf: Some(cluster.join("ceph.conf")), ..ClusterOptions::default() };
        std::fs::create_dir_all(cluster.join("rbd/tenant")).unwrap();
        for name in ["one", "two"] {
            drivers_rbd::create(&image(cluster, name), SIZE).unwrap();
        }
        let tenants = Options { namespace: "tenant".into(), ..image(cluster, "disk") };
        drivers_rbd::create(&tenants, SIZE).unwrap();
        let pools = drivers_rbd::list(&options).unwrap();
        assert_eq!(pools.iter().map(|pool| &*pool.name).collect::<Vec<_>>(), ["rbd"]);
        let mut found = pools[0].images.clone().unwrap();
        found.sort_by(|a, b| a.name.cmp(&b.name));
        let image =
            |namespace: &str, name: &str| FoundImage { namespace: namespace.into(), name: name.into() };
        assert_eq!(found, [image("tenant", "disk"), image("", "one"), image("", "two")]);
        let absent = ClusterOptions { conf: Some("/no/such.conf".into()), ..options };
        let error = drivers_rbd::list(&absent).unwrap_err().to_string();
        assert!(error.starts_with("rbd:conf=/no/such.conf: cannot read /no/such.conf: No such"), "{error}");
    });
}

#[test]
fn an_image_is_created_once_and_grows_while_it_is_open() {
    with_stub("an_image_is_created_once_and_grows_while_it_is_open", &[], |cluster| {
        let options = image(cluster, "disk");
        let refused = |result: Result<(), DeviceError>| result.unwrap_err().to_string();
        assert!(
            refused(drivers_rbd::create(&options, 1000))
                .contains("1000 bytes: not a positive multiple of 512")
        );
        let snapshot = Options { snapshot: Some("monday".into()), ..options.clone() };
        assert!(refused(drivers_rbd::create(&snapshot, SIZE)).contains("a read-only image or a snapshot"));
        drivers_rbd::create(&options, SIZE).unwrap();
        let error = refused(drivers_rbd::create(&options, SIZE));
        assert!(error.contains("cannot create the image with 16777216 bytes: File exists"), "{error}");
        let device = RbdDevice::open(&options).unwrap();
        drivers_rbd::grow(&options, 2 * SIZE).unwrap();
        let start = Instant::now();
        while device.limits().capacity != 2 * SIZE {
            assert!(start.elapsed() < LONG);
            std::thread::sleep(Duration::from_millis(1));
        }
        let error = refused(drivers_rbd::grow(&options, SIZE));
        assert!(error.contains("it has 33554432, and only grows"), "{error}");
    });
}
