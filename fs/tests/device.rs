//! The device on a file system that tests play.

use crate::common::*;
use freestone_fs::device::{Device, SharedMemory};
use std::ffi::CStr;
use std::io;
use std::os::unix::net::UnixListener;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use vhost::vhost_user::Listener;
use vhost_user_backend::VhostUserDaemon;
use virtiofsd::filesystem::{Context, DirEntry, DirectoryIterator, Entry, FileSystem};
use vm_memory::GuestMemoryMmap;

const ENOTDIR: i32 = 20;

/// Has no files. A search for `together` ends when all queues are at it; one for `panic` panics.
struct Played {
    queues: usize,
    together: Mutex<usize>,
    changed: Condvar,
}

struct Nothing;

impl DirectoryIterator for Nothing {
    fn next(&mut self) -> Option<DirEntry<'_>> {
        None
    }
}

impl FileSystem for Played {
    type Inode = u64;
    type Handle = u64;
    type DirIter = Nothing;

    fn lookup(&self, _: Context, _: u64, name: &CStr) -> io::Result<Entry> {
        assert_ne!(name, c"panic");
        let mut together = self.together.lock().unwrap();
        *together += 1;
        self.changed.notify_all();
        while *together < self.queues {
            let (waited, result) = self.changed.wait_timeout(together, PATIENCE).unwrap();
            together = waited;
            if result.timed_out() {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
        Err(io::Error::from_raw_os_error(ENOTDIR))
    }
}

/// A guest of a device with these request queues, and the failures of the device.
fn guest(queues: usize) -> (Guest, Receiver<String>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let mut listener = Listener::from(UnixListener::bind(&path).unwrap());
    let (sender, failures) = channel();
    let (sender, played) =
        (Mutex::new(sender), Played { queues, together: Mutex::new(0), changed: Condvar::new() });
    let fail = move |reason| drop(sender.lock().unwrap().send(reason));
    let memory = SharedMemory::new(GuestMemoryMmap::new());
    let device = Arc::new(Device::new(played, memory.clone(), queues as u16, None, fail));
    let mut daemon = VhostUserDaemon::new("device".into(), device, memory).unwrap();
    let accepted = thread::spawn(move || {
        daemon.start(&mut listener).unwrap();
        daemon
    });
    let stream = std::os::unix::net::UnixStream::connect(&path).unwrap();
    let mut daemon = accepted.join().unwrap();
    thread::spawn(move || daemon.wait());
    (Guest::connect(stream, queues + 1), failures)
}

#[test]
fn queues_do_not_wait_for_each_other() {
    let (mut guest, failures) = guest(4);
    guest.init(1);
    (1..=4).for_each(|queue| guest.send(queue, LOOKUP, 1, b"together\0"));
    (1..=4).for_each(|queue| guest.kick(queue));
    for queue in 1..=4 {
        assert_eq!(guest.answer(queue), Err(ENOTDIR));
    }
    drop(guest);
    assert!(failures.try_recv().is_err());
}

#[test]
fn a_panic_of_a_request_is_reported() {
    let (mut guest, failures) = guest(3);
    guest.init(1);
    guest.send(3, LOOKUP, 1, b"panic\0");
    guest.kick(3);
    let reason = failures.recv_timeout(PATIENCE).unwrap();
    assert_eq!(reason, "queue 3: a request has ended with a panic");
}
