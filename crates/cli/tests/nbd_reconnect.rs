//! An NBD client whose server is killed and started again under load.

use crate::common::{Server, path_value};
use block::{Device, Flags, IoError, IoResult, Op, Request};
use reactor::Permits;
use stack::kinds::member::member;
use std::fs::File;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 1024;
/// Writes at a time.
const WRITERS: u64 = 8;
/// Limit of what a test waits for.
const PATIENCE: Duration = Duration::from_secs(60);

fn serve(folder: &Path) -> Server {
    let device = format!("io_uring:{}", path_value("path", &folder.join("disk")));
    let export = format!("nbd:{}", path_value("socket", &folder.join("s")));
    Server::start_in(folder, &["--device", &device, "--export", &export]).0
}

/// Writes all blocks again and again, each time with the number of the round, until `is_enough`.
/// Returns the last round. Counts completed writes.
fn write(folder: &Path, is_enough: &Arc<AtomicBool>, completed: &Arc<AtomicU64>) -> u8 {
    let spec = format!("nbd:{},reconnect-delay=600", path_value("path", &folder.join("s")));
    let device = member(&spec, false, false).unwrap().open().unwrap();
    let (is_enough, completed) = (is_enough.clone(), completed.clone());
    reactor::run(async move {
        let channel = device.open_channel().unwrap();
        let mut round = 0u8;
        while round == 0 || !is_enough.load(Ordering::SeqCst) {
            round = round % 250 + 1;
            let ended = Rc::new(Permits::new(0));
            for writer in 0..WRITERS {
                let (channel, completed, ended) = (channel.clone(), completed.clone(), ended.clone());
                reactor::current().spawn(async move {
                    for number in (writer..BLOCKS).step_by(WRITERS as usize) {
                        let mut buffer = reactor::current().buffers().take(BLOCK as usize).await;
                        buffer.as_mut_slice().fill(round);
                        let written =
                            buffer.transfer(&*channel, Op::Write, Flags::NONE, number * BLOCK).await.1;
                        assert_eq!(written, Ok(()), "block {number}");
                        completed.fetch_add(1, Ordering::SeqCst);
                    }
                    ended.release(1);
                });
            }
            ended.acquire(WRITERS as usize).await;
        }
        channel.submit(&Request::flush(), 0).await.unwrap();
        round
    })
}

#[test]
fn kills_of_its_server_are_only_pauses_for_a_client_with_a_reconnect_delay() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    File::create(folder.join("disk")).unwrap().set_len(BLOCKS * BLOCK).unwrap();
    let (is_enough, completed) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let mut server = serve(folder);
    let (round, server) = std::thread::scope(|scope| {
        let writing = scope.spawn(|| write(folder, &is_enough, &completed));
        for _ in 0..5 {
            let before = completed.load(Ordering::SeqCst);
            while completed.load(Ordering::SeqCst) < before + 500 {
                assert!(!writing.is_finished(), "a write failed");
                std::thread::yield_now();
            }
            server.kill();
            server = serve(folder);
        }
        is_enough.store(true, Ordering::SeqCst);
        (writing.join().unwrap(), server)
    });
    assert_eq!(server.stop().0, 0);
    let bytes = std::fs::read(folder.join("disk")).unwrap();
    let differs = bytes.iter().position(|byte| *byte != round);
    assert_eq!(differs, None, "the first byte that is not of round {round}");
}

/// Reads the first block.
fn read(device: &Arc<dyn Device>) -> IoResult {
    let device = device.clone();
    reactor::run(async move {
        let channel = device.open_channel().map_err(|_| IoError::DeviceGone)?;
        let buffer = reactor::current().buffers().take(BLOCK as usize).await;
        buffer.transfer(&*channel, Op::Read, Flags::NONE, 0).await.1
    })
}

/// Waits until `capacity` says that a device has so many blocks.
fn wait_for_blocks(blocks: u64, capacity: impl Fn() -> u64) {
    let start = Instant::now();
    while capacity() != blocks * BLOCK {
        assert!(start.elapsed() < PATIENCE, "{} bytes, not {blocks} blocks", capacity());
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn an_export_that_has_grown_is_taken_over_and_one_that_has_shrunk_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let disk = File::create(folder.join("disk")).unwrap();
    let grow = |times: u64| disk.set_len(times * BLOCKS * BLOCK).unwrap();
    grow(1);
    let mut server = serve(folder);
    let spec = format!("nbd:{},reconnect-delay=600", path_value("path", &folder.join("s")));
    let device = member(&spec, false, false).unwrap().open().unwrap();
    assert_eq!(device.limits().capacity, BLOCKS * BLOCK);
    grow(2);
    server.signal("HUP");
    wait_for_blocks(2 * BLOCKS, || device.refresh().unwrap().capacity);

    server.kill();
    grow(3);
    server = serve(folder);
    assert_eq!(read(&device), Ok(()));
    wait_for_blocks(3 * BLOCKS, || device.limits().capacity);

    server.kill();
    grow(1);
    server = serve(folder);
    assert_eq!(read(&device), Err(IoError::DeviceGone));
    assert_eq!(server.stop().0, 0);
}
