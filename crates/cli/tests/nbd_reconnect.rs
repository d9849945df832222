//! An NBD client whose server is killed and started again under load.

use crate::common::{Server, path_value};
use block::{Flags, Op, Request};
use reactor::Permits;
use stack::kinds::member::member;
use std::fs::File;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 1024;
/// Writes at a time.
const WRITERS: u64 = 8;

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
