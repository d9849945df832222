//! System calls of a sealed process: those that work, and those that end it. Each test runs itself
//! again in a process of its own.

use sandbox::{Mode, Profile, Sandbox, refused_calls};
use std::io::ErrorKind;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc;

const INNER: &str = "FREESTONE_SEALED";

/// Runs the test called `name` again, sealed, with `inner`; returns its output. Returns `None` in
/// that process, and without seccomp.
fn sealed(name: &str, inner: impl FnOnce()) -> Option<Output> {
    if std::env::var_os(INNER).is_some() {
        let (go, wait) = mpsc::channel::<()>();
        // This thread exists before the restrictions, and receives them with the others.
        let other = std::thread::spawn(move || wait.recv().map(|()| mkfifo()));
        let mut sandbox = Sandbox::new(Mode::Required, Profile::default(), None);
        sandbox.confine().unwrap();
        sandbox.seal().unwrap();
        assert!(sandbox.in_force().is_complete(), "{}", sandbox.in_force());
        go.send(()).unwrap();
        assert_eq!(other.join().unwrap(), Ok(Some(libc::EPERM)));
        inner();
        println!("sealed");
        return None;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .env(INNER, "1")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    if said.contains("NoLandlock") || said.contains("Seccomp(") {
        eprintln!("skipped: this kernel cannot do it");
        return None;
    }
    Some(output)
}

/// Makes a call that no server makes; returns its error.
fn mkfifo() -> Option<i32> {
    let result = nix::unistd::mkfifo("/tmp/no-such-directory/fifo", nix::sys::stat::Mode::S_IRUSR);
    result.err().map(|error| error as i32)
}

#[test]
fn a_refused_call_fails_and_says_so_once() {
    let Some(output) = sealed("a_refused_call_fails_and_says_so_once", || {
        assert_eq!([mkfifo(), mkfifo()], [Some(libc::EPERM); 2]);
        assert_eq!(refused_calls(), 3);
        let threads =
            std::thread::spawn(|| std::fs::read_dir("/sys").map(|_| ()).map_err(|error| error.kind()));
        assert_eq!(threads.join().unwrap(), Ok(()));
        let closed = std::fs::read_dir("/tmp").err().map(|error| error.kind());
        assert_eq!(closed, Some(ErrorKind::PermissionDenied));
    }) else {
        return;
    };
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(said.matches("the sandbox refused system call").count(), 1, "{said}");
}

#[test]
fn a_program_cannot_be_executed() {
    let Some(output) = sealed("a_program_cannot_be_executed", || {
        use std::os::unix::process::CommandExt;
        let error = Command::new("/bin/true").exec();
        panic!("still there: {error}");
    }) else {
        return;
    };
    assert_eq!(output.status.signal(), Some(libc::SIGSYS), "{output:?}");
}

#[test]
fn memory_is_written_or_executed_but_not_both() {
    let Some(output) = sealed("memory_is_written_or_executed_but_not_both", || {
        use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous};
        let map = |protection| {
            let len = std::num::NonZeroUsize::new(4096).unwrap();
            // SAFETY: a new mapping, which nothing uses.
            unsafe { mmap_anonymous(None, len, protection, MapFlags::MAP_PRIVATE) }
                .err()
                .map(|error| error as i32)
        };
        assert_eq!(map(ProtFlags::PROT_READ | ProtFlags::PROT_WRITE), None);
        assert_eq!(map(ProtFlags::PROT_READ | ProtFlags::PROT_EXEC), None);
        assert_eq!(map(ProtFlags::PROT_WRITE | ProtFlags::PROT_EXEC), Some(libc::EPERM));
    }) else {
        return;
    };
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn a_panic_is_told_as_ever() {
    let Some(output) = sealed("a_panic_is_told_as_ever", || panic!("on purpose")) else { return };
    let said = String::from_utf8_lossy(&output.stderr) + String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("on purpose"), "{said}");
    assert_eq!(said.matches("refused").count(), 1, "only what the test does itself: {said}");
}
