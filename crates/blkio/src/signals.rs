//! Threads of the library take no signals of the program.

/// Runs `work` with the calling thread's signals blocked: threads that it starts inherit that. Signals that are a
/// thread's own doing stay as they are; blocked, they would end the program.
pub(crate) fn start_threads_without<R>(work: impl FnOnce() -> R) -> R {
    const OF_ITS_OWN: [libc::c_int; 6] =
        [libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGSEGV, libc::SIGSYS, libc::SIGTRAP];
    // SAFETY: sets are plain data, valid when zeroed; the calls work on live local variables.
    let before = unsafe {
        let mut blocked: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut blocked);
        for signal in OF_ITS_OWN {
            libc::sigdelset(&raw mut blocked, signal);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const blocked, &raw mut before);
        before
    };
    let result = work();
    // SAFETY: as above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut()) };
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_blocked(signal: libc::c_int) -> bool {
        // SAFETY: asks for the mask of this thread.
        unsafe {
            let mut mask: libc::sigset_t = std::mem::zeroed();
            libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &raw mut mask);
            libc::sigismember(&raw const mask, signal) == 1
        }
    }

    #[test]
    fn only_threads_that_are_started_meanwhile_take_no_signals() {
        let seen = start_threads_without(|| {
            std::thread::spawn(|| (is_blocked(libc::SIGUSR1), is_blocked(libc::SIGBUS))).join().unwrap()
        });
        assert_eq!((seen, is_blocked(libc::SIGUSR1)), ((true, false), false));
    }
}
