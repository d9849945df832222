//! One request on its way through the device.

use super::pieces::LongWrite;
use super::wire::{CMD_FLAG_FAST_ZERO, CMD_FLAG_FUA, CMD_FLAG_NO_HOLE, Command, Header};
use crate::QueueStats;
use crate::stream::Memory;
use crate::target::Target;
use block::{Flags, IoError, IoResult, Op};

/// A request that was judged good, with its memory.
pub(super) struct Job {
    pub(super) header: Header,
    /// Where a read's data goes, or a write's is.
    pub(super) memory: Option<Memory>,
    pub(super) part: Part,
}

/// How much of a request a job is.
pub(super) enum Part {
    /// All of it.
    Whole,
    /// All of a read, whose memory it takes piece by piece.
    LongRead,
    /// A piece of a write.
    OfWrite(LongWrite),
}

impl Job {
    /// Carries the request out.
    #[inline]
    pub(super) async fn execute(&self, target: &Target, stats: &QueueStats) -> IoResult {
        let Header { command, flags, offset, len, .. } = self.header;
        let is_durable = flags & CMD_FLAG_FUA != 0;
        let durable = if is_durable { target.durable() } else { Flags::NONE };
        let (op, result) = match command {
            Command::Read => (Op::Read, self.transfer(Op::Read, Flags::NONE, target).await),
            Command::Write => (Op::Write, self.transfer(Op::Write, durable, target).await),
            Command::Flush => (Op::Flush, target.flush().await),
            Command::Trim => {
                let mut result = target.discard(offset, len).await;
                // The protocol has it for whatever changes something.
                if result.is_ok() && is_durable {
                    result = target.flush().await;
                }
                (Op::Discard, result)
            }
            Command::WriteZeroes => {
                (Op::WriteZeroes, target.write_zeroes(offset, len, durable.with(zeroing(flags))).await)
            }
            Command::Disconnect | Command::Cache | Command::BlockStatus | Command::Unknown(_) => {
                return Err(IoError::Invalid); // answered without the device
            }
        };
        stats.count_request(op, len);
        if result.is_err() {
            stats.count_failure();
        }
        result
    }

    #[inline]
    async fn transfer(&self, op: Op, flags: Flags, target: &Target) -> IoResult {
        let Some(memory) = &self.memory else { return Err(IoError::Invalid) };
        // SAFETY: the memory is the job's, which this future borrows; what is awaited below ends before it does.
        let data = unsafe { memory.data() };
        target.transfer(op, flags, self.header.offset, data).await
    }
}

/// How zeroes are to be written.
fn zeroing(flags: u16) -> Flags {
    [(CMD_FLAG_NO_HOLE, Flags::NO_UNMAP), (CMD_FLAG_FAST_ZERO, Flags::NO_FALLBACK)]
        .into_iter()
        .filter(|(flag, _)| flags & flag != 0)
        .fold(Flags::NONE, |all, (_, meaning)| all.with(meaning))
}
