//! Hostile members: arrays whose metadata was changed, with valid checksums if the input asks for
//! them.
//!
//! An input takes the members of an array after a crash or a stop (`story`), edits them (`edit`),
//! and uses them as a program does. It assembles the array, reads the log, checks, starts, reads,
//! writes, runs the background jobs, and stops. Each step may be refused. Nothing may panic, wait
//! forever, or use more memory than the members' size accounts for, which libFuzzer's limits
//! detect.

mod disk;
mod edit;
mod story;

use crate::input::Input;
use block::{Channel, Device, Flags, Op, Request};
use disk::Disk;
use raid::admin::check::{check, pending};
use raid::admin::open::{Candidate, Selection, Wanted, select};
use raid::admin::verify::{Difference, Observer};
use raid::array::Array;
use raid::jobs::Options;
use std::sync::{Arc, OnceLock};

/// Nanoseconds since 1970.
const WALL_NS: u64 = 1_700_000_000_000_000_000;
/// Limit of an array's work, on disks without latency.
const HANGS_NS: u64 = 100_000_000_000;
const BUFFER: usize = 8192;

/// Choices of an input apart from the members.
#[derive(Clone, Copy)]
struct Choices {
    run: bool,
    force: bool,
    repair: bool,
    is_read_only: bool,
    /// Offsets that are read and written, in 256ths of the capacity.
    places: [u8; 4],
}

/// Runs one input.
///
/// # Panics
/// When the engine violates a requirement.
pub fn run(bytes: &[u8]) {
    static MEMBERS: OnceLock<Vec<Vec<Vec<u8>>>> = OnceLock::new();
    let bases = MEMBERS.get_or_init(story::all);
    let mut input = Input::new(bytes);
    let (base, flags) = (input.below(bases.len()), input.u8());
    let choices = Choices {
        run: flags & 1 != 0,
        force: flags & 2 != 0,
        repair: flags & 4 != 0,
        is_read_only: flags & 8 != 0,
        places: [input.u8(), input.u8(), input.u8(), input.u8()],
    };
    let mut members = bases[base].clone();
    let is_untouched = input.is_empty();
    while !input.is_empty() {
        edit::edit(&mut members, bases, &mut input);
    }
    if flags & 16 == 0 {
        members.iter_mut().for_each(|member| edit::seal(member));
    }
    reactor::run_simulated(1, move |_| async move {
        let disk = |(i, bytes)| Arc::new(Disk::holding(i, bytes, 0)) as Arc<dyn Device>;
        let disks: Vec<_> = members.into_iter().enumerate().map(disk).collect();
        let is_used = use_members(&disks, choices).await;
        // Members after a crash are not started read-only.
        let must_start = is_untouched && choices.run && !choices.is_read_only;
        assert!(is_used || !must_start, "these members are unedited");
    });
}

async fn open(disks: &[Arc<dyn Device>], choices: Choices) -> Option<Selection> {
    let candidate = |disk: &Arc<dyn Device>| Candidate {
        name: disk.name().to_owned(),
        device: Ok(disk.clone()),
        is_named: false,
    };
    let Choices { run, force, is_read_only: read_only, .. } = choices;
    let wanted = Wanted { array: None, run, force, read_only };
    select(disks.iter().map(candidate).collect(), &wanted).await.ok()
}

/// Returns whether the array could be started.
async fn use_members(disks: &[Arc<dyn Device>], choices: Choices) -> bool {
    let Some(selection) = open(disks, choices).await else { return false };
    let _ = pending(&selection).await;
    let _ = check(&selection, choices.repair, &mut Silent).await;
    // The repair has written, so the earlier selection is outdated.
    let Some(selection) = open(disks, choices).await else { return false };
    let start = match choices.is_read_only {
        true => selection.start_read_only(WALL_NS).await,
        false => selection.start(WALL_NS).await,
    };
    let Ok(array) = start else { return false };
    use_array(&array, choices).await;
    drop(array);
    // The state that the run leaves must be usable too.
    if let Some(selection) = open(disks, choices).await {
        let _ = pending(&selection).await;
    }
    true
}

async fn use_array(array: &Arc<Array>, choices: Choices) {
    let (channel, limits) = (array.open_channel().expect("members are open"), array.limits());
    for place in choices.places {
        let at = limits.capacity / 256 * u64::from(place) / BUFFER as u64 * BUFFER as u64;
        request(&*channel, Op::Read, at).await;
        request(&*channel, Op::Write, at).await;
        request(&*channel, Op::Read, at).await;
    }
    let zeroes = Request::write_zeroes(BUFFER as u64, Flags::FUA);
    let _ = channel.submit(&zeroes, 0).await;
    drop(channel);
    if let Ok(jobs) = array.keep(Options::default()) {
        let idle = std::pin::pin!(jobs.idle());
        let alarm = std::pin::pin!(reactor::current().sleep(HANGS_NS));
        assert!(first(idle, alarm).await, "the keeper hangs: {:?}", jobs.status());
        jobs.stop().await;
    }
    let _ = array.stop().await;
}

async fn request(channel: &dyn Channel, op: Op, at: u64) {
    let mut buffer = reactor::current().buffers().take(BUFFER).await;
    buffer.as_mut_slice().fill(at as u8 | 1);
    let _ = buffer.transfer(channel, op, Flags::NONE, at).await;
}

/// Whether the first of two futures ends first.
async fn first<A: Future + Unpin, B: Future + Unpin>(mut one: A, mut other: B) -> bool {
    use std::pin::Pin;
    use std::task::Poll;
    std::future::poll_fn(|cx| match Pin::new(&mut one).poll(cx) {
        Poll::Ready(_) => Poll::Ready(true),
        Poll::Pending => Pin::new(&mut other).poll(cx).map(|_| false),
    })
    .await
}

struct Silent;

impl Observer for Silent {
    fn progress(&mut self, _: u64, _: u64) {}
    fn difference(&mut self, _: &Difference) {}
}
