//! Handling of refused calls: `EPERM`, and a line on standard error, once for each call.
//!
//! The kernel alone can return `EPERM`, but then names the call at most in its own log. Operators
//! look into the server's log. So the kernel sends SIGSYS instead, and the handler does both.

#![allow(unsafe_code)]

use seccompiler::SeccompAction;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

/// The filters' action for a call that is not allowed.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) const ACTION: SeccompAction = SeccompAction::Trap;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(crate) const ACTION: SeccompAction = SeccompAction::Errno(libc::EPERM as u32);

/// `si_code` of a signal that a filter sends.
const SYS_SECCOMP: libc::c_int = 1;
/// System call numbers are below this one; others share the last bit.
const MAX_CALLS: u64 = 1024;

static REFUSED: AtomicU64 = AtomicU64::new(0);
static SAID: [AtomicU64; (MAX_CALLS / 64) as usize] =
    [const { AtomicU64::new(0) }; (MAX_CALLS / 64) as usize];

/// Returns the number of system calls refused so far.
pub fn refused_calls() -> u64 {
    REFUSED.load(Ordering::Relaxed)
}

/// Installs the handler of SIGSYS.
///
/// # Errors
/// The kernel refuses.
pub(crate) fn handle() -> io::Result<()> {
    // SAFETY: all-zero is a valid `sigaction`.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_sigsys as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler has the signature that SA_SIGINFO asks for and does only what a handler
    // may.
    match unsafe { libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Uses only atomics and `write`, which the filters allow.
extern "C" fn on_sigsys(_: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel hands over a valid structure.
    if unsafe { (*info).si_code } != SYS_SECCOMP {
        return; // another process sent the signal
    }
    // SAFETY: with SA_SIGINFO the third argument is the interrupted thread's context, which is ours
    // until we return.
    let call = fail(unsafe { &mut *context.cast::<libc::ucontext_t>() });
    REFUSED.fetch_add(1, Ordering::Relaxed);
    let call = call.min(MAX_CALLS - 1);
    let bit = 1 << (call % 64);
    if SAID[(call / 64) as usize].fetch_or(bit, Ordering::Relaxed) & bit == 0 {
        say(call);
    }
}

/// Makes the interrupted call return `EPERM`; returns its number.
#[cfg(target_arch = "x86_64")]
fn fail(context: &mut libc::ucontext_t) -> u64 {
    let result = &mut context.uc_mcontext.gregs[libc::REG_RAX as usize];
    // The kernel has restored the registers of the call, with the call's number in the result
    // register.
    std::mem::replace(result, -i64::from(libc::EPERM)) as u64
}

#[cfg(target_arch = "aarch64")]
fn fail(context: &mut libc::ucontext_t) -> u64 {
    const NUMBER: usize = 8; // the register with the call's number
    context.uc_mcontext.regs[0] = -i64::from(libc::EPERM) as u64;
    context.uc_mcontext.regs[NUMBER]
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn fail(_: &mut libc::ucontext_t) -> u64 {
    unreachable!("filters send no signal here")
}

fn say(call: u64) {
    let mut line = Line { text: [0; 128], len: 0 };
    line.add(b"freestone: the sandbox refused system call ");
    line.add_number(call);
    line.add(b" (EPERM): please report this; --sandbox off goes without\n");
    // SAFETY: writes bytes of the line.
    unsafe { libc::write(libc::STDERR_FILENO, line.text.as_ptr().cast(), line.len) };
}

/// A line that is composed without allocation.
struct Line {
    text: [u8; 128],
    len: usize,
}

impl Line {
    fn add(&mut self, bytes: &[u8]) {
        let room = &mut self.text[self.len..];
        let len = bytes.len().min(room.len());
        room[..len].copy_from_slice(&bytes[..len]);
        self.len += len;
    }

    fn add_number(&mut self, number: u64) {
        if number >= 10 {
            self.add_number(number / 10);
        }
        self.add(&[b'0' + (number % 10) as u8]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_put_together_and_cut_where_it_is_full() {
        let mut line = Line { text: [0; 128], len: 0 };
        line.add_number(0);
        line.add_number(1023);
        assert_eq!(&line.text[..line.len], b"01023");
        line.add(&[b'x'; 200]);
        assert_eq!(line.len, 128);
    }
}
