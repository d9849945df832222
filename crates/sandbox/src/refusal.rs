//! What becomes of a call that is refused: `EPERM`, and a line on standard error, once for each
//! call.
//!
//! The kernel can do the first alone, but then says at best in its own log which call it was, and
//! whoever looks for the reason of an error looks into the server's. So it sends SIGSYS instead,
//! and the handler does both.

#![allow(unsafe_code)]

use seccompiler::SeccompAction;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

/// What filters do with a call that they do not know.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) const ACTION: SeccompAction = SeccompAction::Trap;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(crate) const ACTION: SeccompAction = SeccompAction::Errno(libc::EPERM as u32);

/// `si_code` of a signal that a filter sent.
const SYS_SECCOMP: libc::c_int = 1;
/// Calls have numbers below this one; those beyond share the last place.
const MAX_CALLS: u64 = 1024;

static REFUSED: AtomicU64 = AtomicU64::new(0);
static SAID: [AtomicU64; (MAX_CALLS / 64) as usize] =
    [const { AtomicU64::new(0) }; (MAX_CALLS / 64) as usize];

/// How many system calls were refused so far.
pub fn refused_calls() -> u64 {
    REFUSED.load(Ordering::Relaxed)
}

/// Takes SIGSYS over.
///
/// # Errors
/// When the system refuses.
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

/// Only atomics, and `write`, which is allowed.
extern "C" fn on_sigsys(_: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel hands over a valid structure.
    if unsafe { (*info).si_code } != SYS_SECCOMP {
        return; // somebody sent the signal
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

/// Lets the interrupted call return `EPERM`; its number.
#[cfg(target_arch = "x86_64")]
fn fail(context: &mut libc::ucontext_t) -> u64 {
    let result = &mut context.uc_mcontext.gregs[libc::REG_RAX as usize];
    // The kernel has put the registers back as they were before the call, with its number where its
    // result belongs.
    std::mem::replace(result, -i64::from(libc::EPERM)) as u64
}

#[cfg(target_arch = "aarch64")]
fn fail(context: &mut libc::ucontext_t) -> u64 {
    const NUMBER: usize = 8; // the register that has it
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

/// A line that is put together without allocating.
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
