//! The arguments of `freestone bench`, and what they come to on a given device.

use super::pattern::{Chooser, Mix, Workload, share_of};
use crate::error::Error;
use crate::parse::{self, CommonArgs};
use crate::stack_args::StackArgs;
use base::Size;
use block::{Flags, Limits};
use spec::{CpuList, Seconds, Value};
use std::ops::Range;

/// The arguments of `freestone bench`.
#[derive(clap::Args, Debug)]
pub struct BenchArgs {
    #[command(flatten)]
    pub(super) stack: StackArgs,
    /// Workload: read, write, rw, trim, zero, each also with the prefix rand, or randall (every
    /// operation)
    #[arg(long, value_name = "WORKLOAD", default_value = "randread", value_parser = parse::value::<Workload>)]
    pub(super) rw: Workload,
    /// Percentage of reads in rw and randrw
    #[arg(long, value_name = "N", default_value = "50", value_parser = clap::value_parser!(u8).range(0..=100))]
    pub(super) read_percent: u8,
    /// Bytes of each request
    #[arg(long, value_name = "SIZE", default_value = "4K", value_parser = parse::value::<Size>)]
    pub(super) bs: Size,
    /// Requests in flight on each queue
    #[arg(long, value_name = "N", default_value = "32", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(super) qd: u32,
    /// Duration of the measurement
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = parse::value::<Seconds>)]
    pub(super) time: Seconds,
    /// Duration of the warm-up
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = parse::value::<Seconds>)]
    pub(super) ramp: Seconds,
    /// Offset of the range that is used
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = parse::value::<Size>)]
    pub(super) offset: Size,
    /// Length of the range that is used [default: to the end of the device]
    #[arg(long, value_name = "SIZE", value_parser = parse::value::<Size>)]
    pub(super) size: Option<Size>,
    /// Processors to run on [default: one unbound thread]
    #[arg(long, value_name = "CPUS", value_parser = parse::value::<CpuList>)]
    pub(super) cores: Option<CpuList>,
    /// Total of queues (channels), spread over the processors [default: one each]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(super) queues: Option<u32>,
    /// Wait for events instead of polling
    #[arg(long)]
    pub(super) event: bool,
    /// Pause between a completion and the next request; a long pause models an idle client
    #[arg(long, value_name = "SECONDS", default_value = "0", value_parser = parse::value::<Seconds>)]
    pub(super) think: Seconds,
    /// Engine: channels and tasks as in exports (stack), a bare loop over a virtqueue (raw), or
    /// auto: raw if possible
    #[arg(long, value_name = "ENGINE", default_value = "auto", value_parser = parse::value::<Engine>)]
    pub(super) engine: Engine,
    /// Do not measure latency
    #[arg(long)]
    pub(super) no_latency: bool,
    /// Make every write durable before it completes
    #[arg(long)]
    pub(super) fua: bool,
    /// Flush after each N writes of a queue
    #[arg(long, value_name = "N")]
    pub(super) flush_every: Option<u32>,
    /// Write data that identifies offset and time, verify each read, and verify everything at the
    /// end
    #[arg(long)]
    pub(super) verify: bool,
    /// Write even if the device holds a file system, partitions or a disk image
    #[arg(long)]
    pub(super) force: bool,
    /// Count failed requests instead of stopping at the first
    #[arg(long)]
    pub(super) keep_going: bool,
    /// Seed of random offsets and data
    #[arg(long, value_name = "N", default_value = "1")]
    pub(super) seed: u64,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

/// The engine that drives the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// The fastest engine that supports the request.
    Auto,
    /// Channels and reactor tasks.
    Stack,
    /// A loop over a bare virtqueue.
    Raw,
}

impl Engine {
    /// The engine's name.
    pub fn name(self) -> &'static str {
        match self {
            Engine::Auto => "auto",
            Engine::Stack => "stack",
            Engine::Raw => "raw",
        }
    }
}

impl Value for Engine {
    fn expected() -> String {
        "auto, stack or raw".into()
    }

    fn parse(text: &str) -> Option<Self> {
        [Engine::Auto, Engine::Stack, Engine::Raw].into_iter().find(|engine| engine.name() == text)
    }
}

/// A benchmark that fits its device.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Which operations, in which order of places.
    pub workload: Workload,
    /// Chance of a read in a mixture.
    pub read_percent: u8,
    /// Bytes of each request.
    pub request_bytes: u64,
    /// Requests in flight on each queue.
    pub depth: u32,
    /// Queues in all.
    pub queues: u32,
    /// The part of the device that is used, in requests from its start.
    pub places: Range<u64>,
    /// How long to measure.
    pub time_ns: u64,
    /// How long to run before that.
    pub ramp_ns: u64,
    /// Read the clock.
    pub latency: bool,
    /// Wait for events instead of polling.
    pub event: bool,
    /// How long a request waits after the one before it.
    pub think_ns: u64,
    /// Flags of writes.
    pub write_flags: Flags,
    /// Writes of a queue between flushes; 0 for no flush.
    pub flush_every: u32,
    /// Check what is read.
    pub verify: bool,
    /// Continue after a failed request.
    pub keep_going: bool,
    /// Seed of places and data.
    pub seed: u64,
    /// Limits of the device.
    pub limits: Limits,
}

impl Plan {
    /// The plan of the arguments for a device with these limits.
    ///
    /// # Errors
    /// When the device cannot do that.
    pub fn new(args: &BenchArgs, limits: &Limits) -> Result<Plan, Error> {
        let cores = args.cores.as_ref().map_or(1, |CpuList(cpus)| cpus.len() as u32);
        let plan = Plan {
            workload: args.rw,
            read_percent: args.read_percent,
            request_bytes: args.bs.0,
            depth: args.qd,
            queues: args.queues.unwrap_or(cores),
            places: places(args, limits)?,
            time_ns: args.time.ns,
            ramp_ns: args.ramp.ns,
            latency: !args.no_latency,
            event: args.event,
            think_ns: args.think.ns,
            write_flags: if args.fua { Flags::FUA } else { Flags::NONE },
            flush_every: args.flush_every.unwrap_or(0),
            verify: args.verify,
            keep_going: args.keep_going,
            seed: args.seed,
            limits: limits.clone(),
        };
        plan.check()?;
        Ok(plan)
    }

    fn check(&self) -> Result<(), Error> {
        let limits = &self.limits;
        let name = self.workload.name();
        let share = (self.places.end - self.places.start) / u64::from(self.queues);
        let needed = if self.verify { u64::from(self.depth) } else { 1 };
        let fault = if self.workload.is_modifying() && limits.read_only {
            format!("--rw {name}: the device is read-only")
        } else if self.workload.mix == Mix::Only(block::Op::Discard) && limits.max_discard == 0 {
            format!("--rw {name}: the device has no discard")
        } else if self.workload.mix == Mix::Only(block::Op::WriteZeroes) && limits.max_write_zeroes == 0 {
            format!("--rw {name}: the device has no write zeroes")
        } else if self.time_ns == 0 {
            "--time 0: nothing would be measured".into()
        } else if share < needed {
            let (places, bytes) = (needed * u64::from(self.queues), self.request_bytes);
            format!("too small: {} queue(s) of this kind need {places} places of {bytes} bytes", self.queues)
        } else if self.verify && share.div_ceil(u64::from(self.depth)) > u64::from(u32::MAX) {
            "--verify keeps a note of every place: choose a part with --size".into()
        } else {
            return Ok(());
        };
        Err(Error::Usage(fault))
    }

    /// Chooses the operations of a queue.
    pub fn chooser(&self) -> Chooser {
        Chooser::new(self.workload.mix, self.read_percent, &self.limits)
    }

    /// The places that belong to a queue alone. Queues that need not be apart share all of them.
    pub fn places_of(&self, queue: u32) -> Range<u64> {
        if self.workload.is_random && !self.verify {
            return self.places.clone();
        }
        let all = self.places.end - self.places.start;
        let share = share_of(all, queue.into(), self.queues.into());
        self.places.start + share.start..self.places.start + share.end
    }
}

/// The part of the device that is used, in requests.
fn places(args: &BenchArgs, limits: &Limits) -> Result<Range<u64>, Error> {
    let (Size(bs), Size(offset), block) = (args.bs, args.offset, u64::from(limits.block_size));
    let refuse = |fault: String| Err(Error::Usage(fault));
    if bs == 0 || !bs.is_multiple_of(block) {
        return refuse(format!("--bs {bs}: not a multiple of the device's block size, {block}"));
    }
    if bs > u64::from(limits.max_transfer) {
        return refuse(format!("--bs {bs}: the device's longest transfer is {}", limits.max_transfer));
    }
    if !offset.is_multiple_of(bs) {
        return refuse(format!("--offset {offset}: not a multiple of --bs {bs}"));
    }
    let rest = limits.capacity.saturating_sub(offset);
    let size = args.size.map_or(rest, |Size(size)| size);
    if size > rest || size < bs {
        let capacity = limits.capacity;
        return refuse(format!(
            "--offset {offset} --size {size}: the device has {capacity} bytes, a request {bs}"
        ));
    }
    Ok(offset / bs..(offset + size) / bs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command, command};
    use clap::FromArgMatches;

    fn plan(args: &str, limits: &Limits) -> Result<Plan, String> {
        let words = ["freestone", "bench", "--device", "null"].into_iter().chain(args.split_whitespace());
        let matches = command().try_get_matches_from(words).expect("clap takes it");
        let Ok(Cli { command: Command::Bench(args), .. }) = Cli::from_arg_matches(&matches) else { panic!() };
        Plan::new(&args, limits).map_err(|error| error.to_string())
    }

    #[test]
    fn random_queues_share_the_device_and_others_do_not() {
        let limits = Limits::new(1 << 20);
        let random = plan("--queues 2", &limits).unwrap();
        assert_eq!((random.places_of(0), random.places_of(1)), (0..256, 0..256));
        let sequential = plan("--queues 2 --rw read --offset 4K --size 40K", &limits).unwrap();
        assert_eq!((sequential.places_of(0), sequential.places_of(1)), (1..6, 6..11));
        let verified = plan("--queues 2 --rw randwrite --verify", &limits).unwrap();
        assert_eq!((verified.places_of(0), verified.places_of(1)), (0..128, 128..256));
    }

    #[test]
    fn operations_beyond_the_limits_of_the_device_are_refused() {
        let limits = Limits { block_size: 4096, max_discard: 0, ..Limits::new(1 << 20) };
        let refusal = |args: &str| plan(args, &limits).expect_err("refused");
        assert_eq!(refusal("--bs 512"), "--bs 512: not a multiple of the device's block size, 4096");
        assert_eq!(refusal("--bs 4K --offset 2K"), "--offset 2048: not a multiple of --bs 4096");
        assert_eq!(
            refusal("--offset 1M"),
            "--offset 1048576 --size 0: the device has 1048576 bytes, a request 4096"
        );
        assert_eq!(refusal("--rw trim"), "--rw trim: the device has no discard");
        assert_eq!(
            refusal("--size 16K --queues 8 --rw read"),
            "too small: 8 queue(s) of this kind need 8 places of 4096 bytes"
        );
        let read_only = Limits { read_only: true, ..limits.clone() };
        assert_eq!(plan("--rw randrw", &read_only).unwrap_err(), "--rw randrw: the device is read-only");
    }
}
