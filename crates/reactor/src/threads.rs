//! Threads that take no signals of the program.
//!
//! A signal handler on a core would delay its requests. A signal meant to interrupt a system call
//! of the program would not do so if one of these threads took it.

use std::io;
use std::mem::zeroed;
use std::ptr::null_mut;
use std::thread::JoinHandle;

/// Signals that a thread causes itself. If blocked, they end the program despite any handler.
const OF_ITS_OWN: [libc::c_int; 6] =
    [libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGSEGV, libc::SIGSYS, libc::SIGTRAP];

/// Starts a thread that takes no signals, with a name of at most 15 bytes.
///
/// # Errors
/// If the operating system cannot start a thread.
pub fn spawn_thread<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let before = block_signals(); // inherited by the thread, so that it takes none from its first step on
    let thread = std::thread::Builder::new().name(name.into()).spawn(work);
    // SAFETY: the mask is what this thread had before.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, null_mut()) };
    thread
}

/// Blocks the calling thread's signals; returns its previous mask.
fn block_signals() -> libc::sigset_t {
    // SAFETY: sets are plain data, valid when zeroed; the calls work on live local variables.
    unsafe {
        let (mut blocked, mut before) = (zeroed::<libc::sigset_t>(), zeroed::<libc::sigset_t>());
        libc::sigfillset(&raw mut blocked);
        for signal in OF_ITS_OWN {
            libc::sigdelset(&raw mut blocked, signal);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const blocked, &raw mut before);
        before
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CoreConfig, Cores};

    fn is_blocked(signal: libc::c_int) -> bool {
        // SAFETY: asks for the mask of this thread.
        unsafe {
            let mut mask = zeroed::<libc::sigset_t>();
            libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &raw mut mask);
            libc::sigismember(&raw const mask, signal) == 1
        }
    }

    #[test]
    fn the_thread_takes_no_signals_and_its_starter_does() {
        let look = || (is_blocked(libc::SIGUSR1), is_blocked(libc::SIGBUS));
        assert_eq!(spawn_thread("test", look).unwrap().join().unwrap(), (true, false));
        let cores = Cores::start(&[CoreConfig::default()]).unwrap();
        assert_eq!(cores.get(0).call(move |_| look()), Ok((true, false)));
        assert_eq!(look(), (false, false));
    }
}
