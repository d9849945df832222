//! Attempts to reconnect to a server that was lost.
//!
//! ```text
//!   lost ── pause ─► attempt ── connected ──► done
//!             ▲         ├─ failed ──► the next pause is twice as long
//!             └─────────┘  the reconnect delay has passed ──► late: attempts continue
//!                       └─ the server cannot be used any more ──► dead
//! ```
//!
//! Attempts run on a thread of the driver, so that no core waits for the server.

use super::Cancel;
use super::connect::Deadline;
use std::time::{Duration, Instant};

/// First pause before an attempt; doubles with each attempt.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// Longest pause between two attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// The time without a connection.
pub struct Outage<'a> {
    /// The device's name, for the log.
    pub device: &'a str,
    /// Start of the outage.
    pub since: Instant,
    /// Time that requests wait for a connection.
    pub delay: Duration,
    /// Ends the attempts.
    pub stop: &'a Cancel,
}

/// The reason why an attempt failed.
pub enum Failed {
    /// The attempt was cancelled.
    Cancelled,
    /// A later attempt may succeed.
    Passing(String),
    /// No later attempt can succeed.
    Final(String),
}

/// The reason why attempts ended without a connection.
pub enum End {
    /// [`Outage::stop`] was cancelled.
    Cancelled,
    /// The server cannot be used any more.
    Dead(String),
}

impl Outage<'_> {
    /// Attempts to connect until an attempt succeeds. Each attempt is limited to the given number
    /// of milliseconds: requests do not wait longer because an attempt takes long. Calls `on_late`
    /// once when the delay has passed.
    ///
    /// # Errors
    /// When the attempts are cancelled, or no later attempt can succeed.
    pub fn reconnect<C>(
        &self,
        mut on_late: impl FnMut(),
        mut attempt: impl FnMut(u64) -> Result<C, Failed>,
    ) -> Result<C, End> {
        let (mut pause, mut is_late) = (FIRST_PAUSE, false);
        loop {
            if self.left().is_zero() && !is_late {
                is_late = true;
                on_late();
            }
            let pause_now = if is_late { pause } else { pause.min(self.left()) };
            if Deadline::new(u64::MAX, self.stop).pause(pause_now).is_err() {
                return Err(End::Cancelled);
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
            let left = self.left();
            if left.is_zero() && !is_late {
                continue;
            }
            let device = self.device;
            match attempt(if is_late { u64::MAX } else { left.as_millis() as u64 + 1 }) {
                Ok(connection) => {
                    let after_ms = self.since.elapsed().as_millis() as u64;
                    tracing::info!(device, after_ms, "reconnected");
                    return Ok(connection);
                }
                Err(Failed::Cancelled) => return Err(End::Cancelled),
                Err(Failed::Final(why)) => return Err(End::Dead(why)),
                Err(Failed::Passing(error)) => tracing::debug!(device, %error, "reconnect attempt failed"),
            }
        }
    }

    /// The rest of the delay.
    fn left(&self) -> Duration {
        self.delay.saturating_sub(self.since.elapsed())
    }
}
