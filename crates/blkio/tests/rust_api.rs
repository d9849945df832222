//! The Rust API over the driver io_uring: what is written is read, in every way that there is.

use blkio::{AsyncQueue, Builder, Device, Request, Zone, block_on};
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

/// Most that a busy machine takes for what takes milliseconds.
const LONG: Duration = Duration::from_secs(60);

fn file(len: u64) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    file.as_file().set_len(len).unwrap();
    file
}

fn device(path: &Path) -> Device {
    Builder::new("io_uring").unwrap().set("path", path.to_str().unwrap()).unwrap().start().unwrap()
}

#[test]
fn blocking_calls_transfer_any_memory_and_name_what_is_wrong() {
    let file = file(1 << 20);
    let device = device(file.path());
    let mut queue = device.queue(0).unwrap();
    queue.write_at(100, b"hello").unwrap();
    queue.flush().unwrap();
    let mut memory = [0; 7];
    queue.read_at(99, &mut memory).unwrap();
    assert_eq!(&memory, b"\0hello\0");
    queue.write_zeroes(100, 2).unwrap();
    queue.discard(0, 50).unwrap();
    queue.read_at(99, &mut memory).unwrap();
    assert_eq!(&memory, b"\0\0\0llo\0");
    queue.execute(Request::write_zeroes(4096, 4096).no_unmap().fua()).unwrap();
    let refused = queue.execute(Request::discard(0, 512).fua()).unwrap_err();
    assert_eq!(refused.errno(), libc::EINVAL);
    assert!(refused.message().contains("BLKIO_REQ_FUA"), "{refused}");
    assert_eq!(queue.report_zones(0, 4).unwrap_err().errno(), libc::ENOTSUP);
    let error: std::io::Error = queue.read_at(u64::MAX, &mut memory).unwrap_err().into();
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
    assert!(error.to_string().contains("beyond the end"), "{error}");
}

#[test]
fn properties_are_typed_and_each_is_set_in_its_state() {
    let file = file(8192);
    let path = file.path().to_str().unwrap();
    let new = || Builder::new("io_uring").unwrap().set("path", path).unwrap();
    let connected = new().set("num-queues", "2").unwrap().set("read-only", true).unwrap().connect().unwrap();
    assert_eq!(connected.get::<u64>("capacity"), Ok(8192));
    assert_eq!(connected.get::<i32>("num-queues"), Ok(2));
    assert_eq!(connected.get::<String>("num-queues"), Ok("2".into()));
    assert_eq!(connected.get::<bool>("num-queues").unwrap_err().errno(), libc::ENOTTY);
    let device = connected.set("num-entries", 4).unwrap().start().unwrap();
    assert!(device.queue(1).is_ok());
    let refused = device.queue(0).unwrap().write_at(0, b"x").unwrap_err();
    assert_eq!(refused.errno(), libc::EBADF);
    assert_eq!(new().set("num-queues", true).unwrap_err().errno(), libc::ENOTTY);
    assert_eq!(new().set("nonsense", 1).unwrap_err().errno(), libc::ENOENT);
    assert_eq!(new().set("num-queues", 0).unwrap().start().map(drop), Ok(()));
    assert_eq!(Builder::new("floppy").unwrap_err().errno(), libc::ENOENT);
}

#[test]
fn connecting_to_a_server_that_says_nothing_can_be_cancelled() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string();
    let nbd = Builder::new("nbd").unwrap().set("uri", &*format!("nbd://{address}")).unwrap();
    let nvme = Builder::new("nvme-tcp").unwrap().set("address", &*address).unwrap();
    let nvme = nvme.set("nqn", "nqn.2014-08.org.example:disk").unwrap();
    for builder in [nbd, nvme] {
        let builder = builder.set("connect-timeout-ms", 60_000).unwrap();
        let cancel = builder.canceller().unwrap();
        let connecting = std::thread::spawn(move || builder.connect().map(drop));
        std::thread::sleep(Duration::from_millis(100));
        assert!(!connecting.is_finished());
        let start = Instant::now();
        cancel();
        assert_eq!(connecting.join().unwrap().unwrap_err().errno(), libc::ECANCELED);
        assert!(start.elapsed() < LONG);
    }
}

#[test]
fn properties_of_an_nvme_target_that_make_no_sense_are_refused() {
    let refused = |settings: &[(&str, &str)]| {
        let mut builder = Builder::new("nvme-tcp").unwrap();
        for (name, value) in settings {
            builder = builder.set(name, *value).unwrap();
        }
        let error = builder.connect().map(drop).unwrap_err();
        assert_eq!(error.errno(), libc::EINVAL);
        error.message().to_owned()
    };
    assert!(refused(&[("address", "a")]).contains("address and nqn must be set"));
    assert!(refused(&[("address", "a"), ("nqn", "disk")]).contains("starts with"));
    assert!(refused(&[("address", "a:b"), ("nqn", "nqn.a")]).contains("is not an address"));
    assert!(refused(&[("address", "a"), ("nqn", "nqn.a"), ("hostid", "7")]).contains("is no UUID"));
    let keyring = |name| refused(&[("address", "a"), ("nqn", "nqn.a"), ("tls-keyring", name)]);
    assert!(keyring("@x").starts_with("property tls-keyring: keyring \"@x\": want the name"));
    assert!(keyring("freestone-none").starts_with("property tls-keyring: keyring freestone-none: "));
    assert!(Builder::new("nvme-tcp").unwrap().set("io-timeout", 0).is_err());
}

#[test]
fn vectored_transfers_go_through_buffers_in_their_order() {
    let file = file(1 << 20);
    let device = device(file.path());
    let mut queue = device.queue(0).unwrap();
    let buffers = |fill: [u8; 3]| -> Vec<blkio::Buffer> {
        let buffer = |(len, byte)| {
            let mut buffer = device.buffer(len).unwrap();
            buffer.fill(byte);
            buffer
        };
        [512, 1024, 512].into_iter().zip(fill).map(buffer).collect()
    };
    queue.execute(Request::write_vectored(0, buffers([1, 2, 3]))).0.unwrap();
    let token = queue.submit(Request::read_vectored(256, buffers([0; 3])));
    let completion = queue.wait(1).unwrap().next().unwrap();
    assert_eq!((completion.token, &completion.result), (token, &Ok(())));
    let blkio::Memory::Many(read) = completion.memory else { panic!("{:?}", completion.memory) };
    assert_eq!(read.iter().map(|b| (b[0], b[b.len() - 1])).collect::<Vec<_>>(), [(1, 2), (2, 3), (3, 0)]);
}

#[test]
fn many_more_requests_than_entries_are_in_flight() {
    let file = file(4 << 20);
    let path = file.path().to_str().unwrap();
    let builder = Builder::new("io_uring").unwrap().set("path", path).unwrap();
    let device = builder.set("num-entries", 4).unwrap().start().unwrap();
    let mut queue = device.queue(0).unwrap();
    for block in 0..1000u64 {
        let mut buffer = device.buffer(4096).unwrap();
        buffer.fill(block as u8);
        queue.submit(Request::write(block * 4096, buffer));
    }
    assert_eq!(queue.outstanding(), 1000);
    let mut ended = 0;
    while ended < 1000 {
        for completion in queue.wait_timeout(100, LONG).unwrap() {
            completion.result.unwrap();
            ended += 1;
        }
    }
    let bytes = std::fs::read(file.path()).unwrap();
    assert!((0..1000).all(|block| bytes[block * 4096..][..4096].iter().all(|byte| *byte == block as u8)));
}

#[test]
fn futures_work_under_block_on_with_several_queues() {
    let file = file(1 << 20);
    let device = device(file.path());
    let [a, b] = [device.queue(0).unwrap(), device.add_queue().unwrap()].map(|q| q.into_async().unwrap());
    block_on([&a, &b], async {
        for round in 0..100u64 {
            let mut buffer = device.buffer(512).unwrap();
            buffer.fill(round as u8);
            let (result, buffer) = a.write(round * 512, buffer).await;
            result.unwrap();
            let (result, buffer) = b.read(round * 512, buffer).await;
            result.unwrap();
            assert!(buffer.iter().all(|byte| *byte == round as u8));
        }
        a.flush().await.unwrap();
        b.write_zeroes(0, 512).await.unwrap();
        b.discard(512, 512).await.unwrap();
        let (result, _) = b.read(1 << 40, device.buffer(1 << 20).unwrap()).await;
        result.expect("a file can grow, and is zero where it is not yet");
        let zones: blkio::Result<Vec<Zone>> = b.report_zones(0, 1).await;
        assert_eq!(zones.unwrap_err().errno(), libc::ENOTSUP);
    });
}

/// How a program of tokio drives a queue.
async fn drive(queue: AsyncQueue) -> std::io::Result<()> {
    // SAFETY: a queue has the same open descriptor as long as it lives.
    let watched = unsafe { tokio::io::unix::AsyncFd::register(queue) }?;
    loop {
        let mut guard = watched.readable().await?;
        guard.clear_ready();
        watched.get_ref().poll_completions()?;
    }
}

#[test]
fn futures_work_under_tokio_on_many_threads() {
    let file = file(1 << 20);
    let device = device(file.path());
    let queue = device.queue(0).unwrap().into_async().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_io().build().unwrap();
    runtime.block_on(async {
        let driver = tokio::spawn(drive(queue.clone()));
        let tasks: Vec<_> = (0..16u64)
            .map(|task| {
                let (queue, mut buffer) = (queue.clone(), device.buffer(4096).unwrap());
                tokio::spawn(async move {
                    for round in 0..50 {
                        buffer.fill(task as u8 ^ round);
                        let (result, written) = queue.write(task * 4096, buffer).await;
                        result.unwrap();
                        let (result, read) = queue.read(task * 4096, written).await;
                        result.unwrap();
                        assert!(read.iter().all(|byte| *byte == task as u8 ^ round));
                        buffer = read;
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        // Tasks that are aborted leave their requests to the queue.
        let aborted: Vec<_> = (0..16)
            .map(|_| {
                let (queue, buffer) = (queue.clone(), device.buffer(1 << 16).unwrap());
                tokio::spawn(async move { queue.read(0, buffer).await.0 })
            })
            .collect();
        aborted.iter().for_each(tokio::task::JoinHandle::abort);
        for task in aborted {
            let _ = task.await;
        }
        assert!(!driver.is_finished());
        driver.abort();
    });
}

#[test]
fn an_event_loop_watches_the_completion_descriptor() {
    let mut file = file(1 << 20);
    file.write_all(b"seen").unwrap();
    let device = device(file.path());
    let mut queue = device.queue(0).unwrap();
    queue.enable_events(true);
    queue.submit(Request::read(0, device.buffer(4).unwrap()));
    let mut found = queue.poll().unwrap().next();
    while found.is_none() {
        let fd = std::os::fd::AsRawFd::as_raw_fd(&queue.completion_fd().unwrap());
        let mut watched = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one structure of our own.
        assert_eq!(unsafe { libc::poll(&raw mut watched, 1, LONG.as_millis() as i32) }, 1);
        found = queue.poll().unwrap().next();
    }
    assert_eq!(&found.unwrap().into_buffer().unwrap()[..], b"seen");
    queue.submit(Request::flush());
    assert_eq!(queue.wait(1).unwrap().count(), 1);
}

#[test]
fn invalid_properties_of_an_rbd_image_are_refused() {
    let builder = |settings: &[(&str, &str)]| {
        settings
            .iter()
            .try_fold(Builder::new("rbd").unwrap(), |builder, (name, value)| builder.set(name, *value))
    };
    let refused = |settings: &[(&str, &str)]| {
        let error = builder(settings).and_then(|builder| builder.connect().map(drop)).unwrap_err();
        assert_eq!(error.errno(), libc::EINVAL);
        error.message().to_owned()
    };
    assert!(refused(&[("pool", "rbd")]).contains("pool and image must be set"));
    assert!(refused(&[("exclusive", "maybe")]).contains("'maybe' is not auto, on or off"));
    assert!(refused(&[("connect-timeout-ms", "0")]).contains("is not positive"));
    let snapshot = [("pool", "rbd"), ("image", "a"), ("snapshot", "b"), ("exclusive", "on")];
    assert!(refused(&snapshot).contains("rbd:rbd/a@b: exclusive=on: a read-only image"));
}

#[test]
fn a_path_that_is_no_node_of_a_virtio_disk_is_refused_with_its_kind() {
    let connect = |path: &str| {
        let builder = Builder::new("virtio-blk-uring").unwrap().set("path", path).unwrap();
        builder.connect().map(drop).unwrap_err()
    };
    let regular = file(1 << 20);
    for (path, kind) in [
        ("/dev/null", "a different device"),
        ("/dev", "a directory"),
        (regular.path().to_str().unwrap(), "a regular file"),
    ] {
        let error = connect(path);
        assert_eq!(error.errno(), libc::EINVAL);
        let expected = format!("cannot open {path}: the path is {kind}, not the pass-through node");
        assert!(error.message().contains(&expected), "{}", error.message());
    }
    assert_eq!(connect("/nowhere/vdac0").errno(), libc::ENOENT);
    let builder = Builder::new("virtio-blk-uring").unwrap().set("path", "/dev/null").unwrap();
    let error = builder.set("fd", 0).unwrap().connect().map(drop).unwrap_err();
    assert!(error.message().contains("cannot be set at the same time"), "{}", error.message());
}
