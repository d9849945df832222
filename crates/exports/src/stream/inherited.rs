//! Sockets passed by systemd's socket activation.
//!
//! Source: sd_listen_fds(3). `LISTEN_PID` names the receiving process and `LISTEN_FDS` the number
//! of sockets, from descriptor 3 on. `LISTEN_FDNAMES` has their names, separated by colons.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The first descriptor that is passed.
const FIRST: RawFd = 3;
/// More than any unit has: a larger value is treated as invalid.
const MOST: usize = 1024;

/// A passed descriptor: its name, and the descriptor until it is taken.
type Passed = (String, Option<OwnedFd>);

/// Takes the socket called `name`, or the first one that is left.
///
/// # Errors
/// When no matching socket is left; the message lists the free ones.
pub(super) fn take(name: Option<&str>) -> io::Result<OwnedFd> {
    static PASSED: OnceLock<Mutex<Vec<Passed>>> = OnceLock::new();
    let passed = PASSED.get_or_init(|| Mutex::new(adopt()));
    pick(&mut passed.lock().unwrap_or_else(PoisonError::into_inner), name)
}

fn pick<T>(passed: &mut [(String, Option<T>)], name: Option<&str>) -> io::Result<T> {
    let is_wanted =
        |entry: &&mut (String, Option<T>)| entry.1.is_some() && name.is_none_or(|name| entry.0 == name);
    if let Some(socket) = passed.iter_mut().find(is_wanted).and_then(|entry| entry.1.take()) {
        return Ok(socket);
    }
    let left: Vec<&str> =
        passed.iter().filter(|entry| entry.1.is_some()).map(|entry| entry.0.as_str()).collect();
    let message = match (name, passed.len()) {
        (_, 0) => "systemd passed no socket to this process (LISTEN_FDS)".into(),
        (None, _) => "all sockets that systemd passed are in use".into(),
        (Some(name), _) => format!("systemd passed no socket named {name:?} that is free; free: {left:?}"),
    };
    Err(io::Error::new(io::ErrorKind::NotFound, message))
}

/// Reads from the environment which sockets were passed to this process.
fn adopt() -> Vec<Passed> {
    let variable = |name| std::env::var(name).ok();
    let names = names(
        std::process::id(),
        variable("LISTEN_PID").as_deref(),
        variable("LISTEN_FDS").as_deref(),
        variable("LISTEN_FDNAMES").as_deref(),
    );
    let adopt = |(fd, name)| {
        // SAFETY: the parent process passed this descriptor; no other code in this process takes
        // it, since this runs once. One that is not open is found here, and not taken.
        let socket = unsafe {
            let flags = libc::fcntl(fd, libc::F_GETFD);
            if flags < 0 {
                return (name, None);
            }
            libc::fcntl(fd, libc::F_SETFD, flags | libc::FD_CLOEXEC);
            OwnedFd::from_raw_fd(fd)
        };
        (name, Some(socket))
    };
    (FIRST..).zip(names).map(adopt).collect()
}

fn names(own: u32, pid: Option<&str>, count: Option<&str>, names: Option<&str>) -> Vec<String> {
    if pid.and_then(|pid| pid.parse().ok()) != Some(own) {
        return Vec::new();
    }
    let count = count.and_then(|count| count.parse().ok()).filter(|count| *count <= MOST).unwrap_or(0);
    let mut names = names.unwrap_or_default().split(':');
    (0..count).map(|_| names.next().unwrap_or_default().to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_counts_only_for_the_process_it_names() {
        assert_eq!(names(7, Some("7"), Some("2"), Some("a:b:c")), ["a", "b"]);
        assert_eq!(names(7, Some("7"), Some("2"), None), ["", ""]);
        for (pid, count) in [("8", "2"), ("x", "2"), ("7", "-1"), ("7", "99999"), ("7", "")] {
            assert!(names(7, Some(pid), Some(count), Some("a:b")).is_empty(), "{pid} {count}");
        }
        assert!(names(7, None, Some("2"), None).is_empty());
    }

    #[test]
    fn a_socket_is_taken_once_by_name_or_in_turn() {
        let mut passed = [("a".into(), Some(1)), ("b".into(), Some(2)), ("c".into(), Some(3))];
        assert_eq!(pick(&mut passed, Some("b")).unwrap(), 2);
        let error = pick(&mut passed, Some("b")).unwrap_err().to_string();
        assert!(error.contains("\"b\"") && error.contains("[\"a\", \"c\"]"), "{error}");
        assert_eq!((pick(&mut passed, None).unwrap(), pick(&mut passed, None).unwrap()), (1, 3));
        assert!(pick(&mut passed, None).unwrap_err().to_string().contains("in use"));
        assert!(pick::<i32>(&mut [], None).unwrap_err().to_string().contains("LISTEN_FDS"));
    }
}
