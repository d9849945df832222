//! Log lines about a server's sandbox.

use sandbox::{Mode, Sandbox};

/// Logs what is in force: a warning if the kernel lacks a part of it.
pub fn announce(sandbox: &Sandbox) {
    match (sandbox.mode(), sandbox.in_force()) {
        (Mode::Off, _) => tracing::info!("sandbox: off"),
        (_, in_force) if in_force.is_complete() => tracing::info!("sandbox: {in_force}"),
        (_, in_force) => tracing::warn!("sandbox: {in_force}"),
    }
}

/// Logs how many system calls were refused so far, if any were. The sandbox has named each on
/// standard error.
pub fn announce_refused() {
    let calls = sandbox::refused_calls();
    if calls > 0 {
        tracing::warn!(calls, "the sandbox has refused system calls");
    }
}
