//! `freestone bench`: how fast a device is, and whether it keeps what it is given.
//!
//! ```text
//!   plan (arguments on this device) ─► channel_engine (tasks over channels; any device; --verify)  ┐
//!                                   └► bare_engine (a loop over a leaf's queue, no futures)         ├─► tally ─► report
//! ```

mod bare_engine;
mod channel_engine;
mod guard;
mod latencies;
mod pattern;
mod plan;
mod report;
mod stop;
mod tally;
mod verify;

pub use plan::BenchArgs;

use crate::error::{EXIT_FAILURE, Error};
use crate::output::Output;
use crate::parse;
use crate::stack_args;
use block::{Device, DeviceError, Queue};
use clap::ArgMatches;
use drivers::io_uring::{self, UringDevice};
use drivers::shared_buffer::SharedBuffer;
use drivers::shared_memory::SharedMemory;
use drivers_virtio_blk::VirtioBlk;
use plan::{Engine, Plan};
use reactor::{CoreRef, Cores, PollWindow};
use report::Subject;
use signal_hook::consts::{SIGINT, SIGTERM};
use stack::{Base, DevicePlan};
use std::any::Any;
use std::sync::{Arc, mpsc};
use stop::Stop;
use tally::Tally;

/// Runs the benchmark and reports.
///
/// # Errors
/// When the device cannot be opened or does not fit, a request fails, or data is not what it should
/// be.
pub fn run(args: &BenchArgs, matches: &ArgMatches) -> Result<(), Error> {
    let output = Output::new(args.common.json);
    let stack = args.stack.plan(matches)?;
    let target = Target::open(stack_args::only(&stack)?, engine_of(args, stack_args::only(&stack)?)?)?;
    let plan = Arc::new(Plan::new(args, &target.device().limits())?);
    let window = if plan.event { PollWindow::up_to(0) } else { PollWindow::up_to(u64::MAX) };
    let configs = parse::core_configs(args.cores.as_ref(), window);
    let cores = Cores::start(&configs).map_err(|e| Error::Runtime(format!("cannot start cores: {e}")))?;
    if plan.workload.is_modifying() && !args.force {
        guard::refuse_to_destroy(&cores.get(0), target.device())?;
    }
    let stop = Arc::new(Stop::default());
    end_on_signals(&stop)?;
    let tally = measure(&cores, &target, &plan, &stop)?;
    let subject = Subject {
        device: target.device().name(),
        engine: target.engine().name(),
        plan: &plan,
        cpus: &configs.iter().map(|core| core.cpu).collect::<Vec<_>>(),
        is_interrupted: stop.is_interrupted(),
    };
    output.event("result", report::human(&subject, &tally), report::json(&subject, &tally));
    if tally.is_clean() {
        return Ok(());
    }
    let (name, failures, mismatches) = (subject.device, tally.failures, tally.mismatches);
    Err(Error::Runtime(format!("device {name}: {failures} requests failed, {mismatches} blocks are wrong")))
}

/// The engine that does what is asked for.
fn engine_of(args: &BenchArgs, device: &DevicePlan) -> Result<Engine, Error> {
    let is_virtio_blk = leaf::<drivers_virtio_blk::Options>(device).is_some();
    let obstacle = if !device.layers.is_empty() {
        Some("there are layers")
    } else if args.verify {
        Some("it cannot --verify")
    } else if args.event {
        Some("it polls, and --event was asked for")
    } else if args.think.ns > 0 {
        Some("it does not wait, and --think was asked for")
    } else if !(is_virtio_blk || leaf::<io_uring::Options>(device).is_some()) {
        Some("the device has no queue of its own")
    } else {
        None
    };
    match (args.engine, obstacle) {
        (Engine::Raw, Some(why)) => Err(Error::Usage(format!("--engine raw: {why}"))),
        (Engine::Raw, None) => Ok(Engine::Raw),
        // For other leaves the channel is what is of interest, and what fio is compared with.
        (Engine::Auto, None) if is_virtio_blk => Ok(Engine::Raw),
        (Engine::Auto | Engine::Stack, _) => Ok(Engine::Stack),
    }
}

/// The options of the device below the layers, if its kind has options of type `T`.
fn leaf<T: Any>(device: &DevicePlan) -> Option<&T> {
    match &device.base {
        Base::Leaf(config) => config.options(),
        Base::Join(..) | Base::Array(..) => None,
    }
}

/// The measured object, open.
enum Target {
    Stack(Arc<dyn Device>),
    VirtioBlk(Arc<VirtioBlk>, Arc<dyn Device>),
    IoUring(Arc<UringDevice>, Arc<dyn Device>),
}

impl Target {
    fn open(plan: &DevicePlan, engine: Engine) -> Result<Target, Error> {
        if engine == Engine::Raw {
            if let Some(options) = leaf(plan) {
                let device = Arc::new(VirtioBlk::open(options)?);
                return Ok(Target::VirtioBlk(device.clone(), device));
            }
            if let Some(options) = leaf(plan) {
                let device = Arc::new(UringDevice::open(options)?);
                return Ok(Target::IoUring(device.clone(), device));
            }
        }
        Ok(Target::Stack(plan.open()?.device))
    }

    fn device(&self) -> &Arc<dyn Device> {
        match self {
            Target::Stack(device) | Target::VirtioBlk(_, device) | Target::IoUring(_, device) => device,
        }
    }

    fn engine(&self) -> Engine {
        match self {
            Target::Stack(_) => Engine::Stack,
            Target::VirtioBlk(..) | Target::IoUring(..) => Engine::Raw,
        }
    }
}

/// Memory that a device has been told about, until this is dropped.
struct Mapped {
    device: Arc<dyn Device>,
    memory: Arc<SharedMemory>,
}

impl Mapped {
    fn new(device: &Arc<dyn Device>, memory: Arc<SharedMemory>) -> Result<Mapped, DeviceError> {
        device.map_region(&memory.region())?;
        Ok(Mapped { device: device.clone(), memory })
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        self.device.unmap_region(&self.memory.region());
    }
}

/// A queue's number and its buffers.
type QueueShare = (u32, Vec<SharedBuffer>);

/// Runs every queue on its core and adds up what they counted.
fn measure(cores: &Cores, target: &Target, plan: &Arc<Plan>, stop: &Arc<Stop>) -> Result<Tally, Error> {
    let count = plan.depth as usize * plan.queues as usize;
    let (memory, mut buffers) = SharedBuffer::allocate(count, plan.request_bytes as usize)
        .map_err(|e| Error::Runtime(format!("cannot allocate {count} buffers: {e}")))?;
    let _mapped = Mapped::new(target.device(), memory)?;
    let mut shares: Vec<Vec<QueueShare>> = (0..cores.len()).map(|_| Vec::new()).collect();
    for queue in 0..plan.queues {
        let own = buffers.split_off(buffers.len() - plan.depth as usize);
        shares[queue as usize % cores.len()].push((queue, own));
    }
    let (sender, results) = mpsc::channel();
    for (core, share) in cores.all().iter().zip(shares).filter(|(_, share)| !share.is_empty()) {
        let (plan, stop, sender) = (plan.clone(), stop.clone(), sender.clone());
        let name = target.device().name().to_owned();
        match target {
            Target::Stack(device) => start_channels(core, device, &plan, share, &stop, &sender)?,
            Target::VirtioBlk(device, _) => {
                let device = device.clone();
                let open = move || device.session().start_queue();
                start_bare(core, open, name, plan, share, stop, sender)?;
            }
            Target::IoUring(device, _) => {
                let device = device.clone();
                start_bare(core, move || device.open_queue(), name, plan, share, stop, sender)?;
            }
        }
    }
    drop(sender);
    add_up(&results)
}

type Sender = mpsc::Sender<Result<Tally, DeviceError>>;

fn start_channels(
    core: &CoreRef,
    device: &Arc<dyn Device>,
    plan: &Arc<Plan>,
    share: Vec<QueueShare>,
    stop: &Arc<Stop>,
    sender: &Sender,
) -> Result<(), Error> {
    for (queue, buffers) in share {
        let (device, plan, stop, sender) = (device.clone(), plan.clone(), stop.clone(), sender.clone());
        core.run(move |core| {
            let here = core.clone();
            core.spawn(async move {
                let result =
                    channel_engine::run_queue(here, device, plan, queue, buffers, stop.clone()).await;
                report_result(result, &stop, &sender);
            });
        })?;
    }
    Ok(())
}

fn start_bare<Q: Queue + 'static>(
    core: &CoreRef,
    open: impl Fn() -> Result<Q, DeviceError> + Send + 'static,
    name: String,
    plan: Arc<Plan>,
    share: Vec<QueueShare>,
    stop: Arc<Stop>,
    sender: Sender,
) -> Result<(), Error> {
    core.run(move |core| {
        let result = bare_engine::run_queues(core, open, &name, &plan, share, &stop);
        report_result(result, &stop, &sender);
    })?;
    Ok(())
}

fn report_result(result: Result<Tally, DeviceError>, stop: &Stop, sender: &Sender) {
    if result.is_err() {
        stop.fail();
    }
    let _ = sender.send(result); // the receiver has given up
}

/// Waits for every queue, even when one could not run.
fn add_up(results: &mpsc::Receiver<Result<Tally, DeviceError>>) -> Result<Tally, Error> {
    let mut total = Tally::default();
    let mut failed = None;
    for result in results {
        match result {
            Ok(tally) => total.merge(&tally),
            Err(error) => drop(failed.get_or_insert(error)),
        }
    }
    failed.map_or(Ok(total), |error| Err(error.into()))
}

/// Ctrl-C ends the measurement, a second one the program.
fn end_on_signals(stop: &Stop) -> Result<(), Error> {
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register_conditional_shutdown(signal, EXIT_FAILURE.into(), stop.interrupt_flag())
            .and_then(|_| signal_hook::flag::register(signal, stop.interrupt_flag()))
            .map_err(|error| Error::Runtime(format!("cannot handle signals: {error}")))?;
    }
    Ok(())
}
