//! One request on its way through the device.

use super::request::Rules;
use super::wire::{CMD_FLAG_FAST_ZERO, CMD_FLAG_FUA, CMD_FLAG_NO_HOLE, Command, Header};
use crate::QueueStats;
use crate::stream::Memory;
use crate::target::Target;
use block::{Flags, IoError, IoResult, Op, Request};

/// A request that was judged good, with its memory.
pub(super) struct Job {
    pub(super) header: Header,
    /// Where a read's data goes, or a write's is.
    pub(super) memory: Option<Memory>,
}

impl Job {
    /// Carries the request out.
    #[inline]
    pub(super) async fn execute(&self, target: &Target, rules: &Rules, stats: &QueueStats) -> IoResult {
        let Header { command, flags, len, .. } = self.header;
        let durable = if flags & CMD_FLAG_FUA != 0 { target.durable() } else { Flags::NONE };
        let (op, result) = match command {
            Command::Read => (Op::Read, self.transfer(Op::Read, Flags::NONE, target, rules).await),
            Command::Write => (Op::Write, self.transfer(Op::Write, durable, target, rules).await),
            Command::Flush => (Op::Flush, target.flush().await),
            Command::Trim => (Op::Discard, self.trim(target, rules).await),
            Command::WriteZeroes => (Op::WriteZeroes, self.write_zeroes(durable, target, rules).await),
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
    async fn transfer(&self, op: Op, flags: Flags, target: &Target, rules: &Rules) -> IoResult {
        let Some(memory) = &self.memory else { return Err(IoError::Invalid) };
        // SAFETY: the memory is the job's, which this future borrows; what is awaited below ends before it does.
        let data = unsafe { memory.data() };
        let limits = &rules.limits;
        let longest = (limits.max_transfer & !(limits.block_size - 1)) as usize;
        let mut done = 0;
        loop {
            let len = (data.len() - done).min(longest);
            let part = if len == data.len() { data } else { data.part(done, len) };
            let request = Request { op, flags, len: len as u64, data: part };
            let offset = self.header.offset + done as u64;
            match op {
                Op::Write => target.modify(&request, offset).await?,
                _ => target.submit(&request, offset).await?,
            }
            done += len;
            if done == data.len() {
                return Ok(());
            }
        }
    }

    async fn trim(&self, target: &Target, rules: &Rules) -> IoResult {
        let limits = &rules.limits;
        let unit = u64::from(limits.discard_alignment.max(limits.block_size));
        let longest = longest_of(limits.max_discard, unit, limits.block_size);
        self.in_parts(longest, target, Request::discard).await?;
        // The protocol has it for whatever changes something.
        if self.header.flags & CMD_FLAG_FUA != 0 { target.flush().await } else { Ok(()) }
    }

    async fn write_zeroes(&self, durable: Flags, target: &Target, rules: &Rules) -> IoResult {
        let mut flags = durable;
        for (flag, meaning) in [(CMD_FLAG_NO_HOLE, Flags::NO_UNMAP), (CMD_FLAG_FAST_ZERO, Flags::NO_FALLBACK)]
        {
            if self.header.flags & flag != 0 {
                flags = flags.with(meaning);
            }
        }
        let block = rules.limits.block_size;
        let longest = longest_of(rules.limits.max_write_zeroes, block.into(), block);
        self.in_parts(longest, target, |len| Request::write_zeroes(len, flags)).await
    }

    /// Runs a request without data over the whole range, at most `longest` bytes at a time.
    async fn in_parts(
        &self,
        longest: u64,
        target: &Target,
        request: impl Fn(u64) -> Request<'static>,
    ) -> IoResult {
        let Header { offset, len, .. } = self.header;
        let mut done = 0;
        while done < len {
            let part = (len - done).min(longest);
            target.modify(&request(part), offset + done).await?;
            done += part;
        }
        Ok(())
    }
}

/// The longest part: a multiple of `unit` if that fits, else of the block.
fn longest_of(max: u64, unit: u64, block: u32) -> u64 {
    let whole = max - max % unit.max(1);
    if whole > 0 { whole } else { (max & !u64::from(block - 1)).max(block.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_as_long_as_the_device_takes_and_whole_units_where_they_fit() {
        assert_eq!(longest_of(1 << 40, 4096, 512), 1 << 40);
        assert_eq!(longest_of(10_000, 4096, 512), 8192);
        assert_eq!(longest_of(3000, 4096, 512), 2560);
        assert_eq!(longest_of(1, 512, 512), 512);
    }
}
