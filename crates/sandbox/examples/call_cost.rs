//! Measures the cost of a system call with and without filters: for a call that is always allowed,
//! as on the data path, and for one whose arguments are checked.
//!
//! ```text
//! cargo run --release -p freestone-sandbox --example call_cost
//! ```

use sandbox::{Mode, Profile, Sandbox};
use std::time::Instant;

const CALLS: u32 = 200_000;
const ROUNDS: usize = 15;

fn main() {
    let before = measure();
    let mut sandbox = Sandbox::new(Mode::Auto, Profile::default(), None);
    sandbox.confine().expect("paths and capabilities are given up");
    sandbox.seal().expect("system calls are given up");
    let after = measure();
    println!("{}; the median of {ROUNDS} rounds of {CALLS} calls, least and most", sandbox.in_force());
    for (i, name) in ["io_uring_enter", "ioctl"].into_iter().enumerate() {
        println!("{name}: {} ns before, {} ns after", text(&before[i]), text(&after[i]));
    }
}

/// Returns nanoseconds per call of each round, sorted.
fn measure() -> [Vec<f64>; 2] {
    let rounds = |call: &dyn Fn() -> i64| {
        let mut rounds: Vec<f64> = (0..ROUNDS).map(|_| round(call)).collect();
        rounds.sort_by(f64::total_cmp);
        rounds
    };
    // The descriptor is invalid: the measurement covers the way into the kernel and back.
    // SAFETY: no memory is passed.
    let enter = || unsafe { libc::syscall(libc::SYS_io_uring_enter, -1, 0, 0, 0, 0, 0) };
    // SAFETY: as above.
    let ioctl = || unsafe { libc::syscall(libc::SYS_ioctl, -1, 0, 0) };
    [rounds(&enter), rounds(&ioctl)]
}

fn round(call: &dyn Fn() -> i64) -> f64 {
    let start = Instant::now();
    for _ in 0..CALLS {
        call();
    }
    start.elapsed().as_nanos() as f64 / f64::from(CALLS)
}

fn text(rounds: &[f64]) -> String {
    format!("{:.0} ({:.0} to {:.0})", rounds[ROUNDS / 2], rounds[0], rounds[ROUNDS - 1])
}
