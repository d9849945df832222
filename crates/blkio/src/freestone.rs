//! Driver `freestone`: any device of this project with layers on it, run by threads of the
//! library's own. Driver `qcow2`: a disk image, in the same way.
//!
//! ```text
//!   graph, or properties ─► connect: opens the devices ─► start: engine threads ─► each queue a bridge to one of them
//! ```

use crate::{Error, Region, Result, Value};
use block::{Device, DeviceError};
use drivers::blkio::{Capacity, Driver, DriverKind, Properties, Spec, memory_region};
use drivers::direct::DirectQueue;
use drivers::shared_memory::HUGE_PAGE;
use reactor::bridge::{BridgeOptions, BridgeQueue};
use reactor::{CoreConfig, Cores, PollWindow};
use spec::{CpuList, Value as _};
use stack::kinds::qcow2::{self, DEFAULT_CACHE_BYTES};
use stack::{Base, DevicePlan};
use std::sync::Arc;

/// The driver of devices with layers on them.
pub(crate) static FREESTONE: DriverKind =
    DriverKind { name: "freestone", create: || Ok(Box::new(Freestone::new())) };

/// The driver of disk images.
pub(crate) static QCOW2: DriverKind =
    DriverKind { name: "qcow2", create: || Ok(Box::new(Freestone::qcow2())) };

/// Most engine threads: more than any machine has processors.
const MAX_CORES: i32 = 1024;

/// Longest polling window, in microseconds: what is longer is meant to be for ever.
const MAX_POLL_US: i32 = 1_000_000;

/// The properties name devices and layers, or an image.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    /// Devices and layers, as text.
    Graph,
    /// A disk image.
    Qcow2,
}

struct Freestone {
    source: Source,
    device: Option<Arc<dyn Device>>,
    cores: Option<Arc<Cores>>,
    /// Which core serves the next queue, before it is reduced to their number.
    next_core: usize,
    /// Alignment of memory for the device, in bytes.
    own_alignment: usize,
}

impl Freestone {
    /// The driver `freestone`.
    fn new() -> Freestone {
        Freestone { source: Source::Graph, device: None, cores: None, next_core: 0, own_alignment: 1 }
    }

    /// The driver `qcow2`.
    fn qcow2() -> Freestone {
        Freestone { source: Source::Qcow2, ..Freestone::new() }
    }

    fn device(&self) -> &Arc<dyn Device> {
        self.device.as_ref().expect("the instance is connected")
    }
}

impl Driver for Freestone {
    fn specs(&self) -> Vec<Spec> {
        let BridgeOptions { depth, .. } = BridgeOptions::default();
        let mut specs = match self.source {
            // `path` for programs that set nothing but this before they connect.
            Source::Graph => vec![Spec::setting("graph", ""), Spec::setting("path", "")],
            Source::Qcow2 => vec![
                Spec::setting("path", ""),
                Spec::setting("backing", "none"),
                Spec::setting("image-dir", ""),
                Spec::setting("data", ""),
                Spec::setting("snapshot", ""),
                Spec::setting("cache-size", DEFAULT_CACHE_BYTES),
            ],
        };
        specs.extend([
            Spec::tuning("cpus", ""),
            Spec::tuning("num-cores", 0),
            Spec::tuning("poll-us", 50),
            Spec::tuning("num-entries", depth as i32),
        ]);
        specs
    }

    fn can_add_queues(&self) -> bool {
        true
    }

    fn check(&self, name: &str, value: &Value) -> Result<()> {
        let refuse = |expected: String| {
            Err(Error::new(libc::EINVAL, format!("property {name}: '{value}' is not {expected}")))
        };
        match (name, value) {
            ("graph" | "path", Value::Str(text)) if self.source == Source::Graph && !text.is_empty() => {
                plan(text).map(drop)
            }
            ("backing", Value::Str(text)) if !["none", "auto"].contains(&&**text) => {
                refuse("none or auto".into())
            }
            ("cache-size", Value::Uint64(0)) => refuse("a number of bytes above 0".into()),
            ("cpus", Value::Str(text)) if !text.is_empty() && CpuList::parse(text).is_none() => {
                refuse(format!("a list of {}", CpuList::expected()))
            }
            ("num-cores", Value::Int(count)) if !(0..=MAX_CORES).contains(count) => {
                refuse(format!("a number from 0 (as many as cpus names, or 1) to {MAX_CORES}"))
            }
            ("poll-us", Value::Int(us)) if !(-1..=MAX_POLL_US).contains(us) => {
                refuse(format!("a number from 0 (never) to {MAX_POLL_US}, or -1 (always)"))
            }
            ("num-entries", Value::Int(size)) if !(1..=BridgeOptions::MAX_DEPTH as i32).contains(size) => {
                refuse(format!("a number from 1 to {}", BridgeOptions::MAX_DEPTH))
            }
            _ => Ok(()),
        }
    }

    fn connect(&mut self, p: &mut Properties) -> Result<()> {
        let mut plan = match self.source {
            Source::Graph => graph(p)?,
            Source::Qcow2 => image(p)?,
        };
        if p.bool("read-only") {
            plan.make_read_only();
        }
        plan.drop_restart_logs();
        let device = plan.open().map_err(|e| device_error(&e))?.device;
        state_facts(p, &plan, &*device);
        // Another process maps the memory, and nothing pins it.
        if plan.any_leaf(&|leaf| leaf.needs_regions()) && !plan.any_leaf(&|leaf| leaf.pins_regions()) {
            self.own_alignment = HUGE_PAGE;
        }
        self.device = Some(device);
        Ok(())
    }

    fn start(&mut self, p: &Properties) -> Result<()> {
        let configs = core_configs(p)?;
        let cores = Cores::start(&configs).map_err(|e| Error::os("cannot start an engine thread", &e))?;
        self.cores = Some(Arc::new(cores));
        Ok(())
    }

    fn open_queue(&mut self, p: &Properties, is_poll: bool) -> Result<Box<dyn DirectQueue>> {
        let cores = self.cores.as_ref().expect("the instance is started");
        let core = self.next_core % cores.len();
        let depth = p.int("num-entries") as u32;
        let options = BridgeOptions { depth, is_polled: is_poll, ..BridgeOptions::default() };
        let queue = BridgeQueue::open(cores, core, self.device().clone(), &options);
        let queue = queue.map_err(|e| device_error(&e))?;
        self.next_core += 1;
        Ok(Box::new(queue))
    }

    fn capacity(&self) -> Capacity {
        let device = self.device().clone();
        Arc::new(move || Ok(device.refresh().map_err(|e| device_error(&e))?.capacity))
    }

    fn own_alignment(&self) -> usize {
        self.own_alignment
    }

    fn map_region(&mut self, region: &Region) -> Result<()> {
        self.device().map_region(&memory_region(region)).map_err(|e| device_error(&e))
    }

    fn unmap_region(&mut self, region: &Region) {
        self.device().unmap_region(&memory_region(region));
    }

    fn canceller(&self) -> Option<Arc<dyn Fn() + Send + Sync>> {
        None
    }
}

/// The devices and layers that `graph` or `path` has.
fn graph(p: &Properties) -> Result<DevicePlan> {
    match (p.str("graph"), p.str("path")) {
        (text, "") | ("", text) => plan(text),
        (graph, path) => {
            let message = format!("graph ({graph}) and path ({path}) cannot be set at the same time");
            Err(Error::new(libc::EINVAL, message))
        }
    }
}

/// The image that the properties describe.
fn image(p: &Properties) -> Result<DevicePlan> {
    let invalid = |message: &str| Error::new(libc::EINVAL, message.to_owned());
    let given = |property: &str| Some(p.str(property)).filter(|text| !text.is_empty());
    let options = qcow2::Options {
        follow: p.str("backing") == "auto",
        image_dir: given("image-dir").map(Into::into),
        data: given("data").map(Into::into),
        snapshot: given("snapshot").map(Into::into),
        cache_bytes: p.uint64("cache-size"),
        ..qcow2::Options::new(given("path").ok_or_else(|| invalid("the property path must be set"))?)
    };
    options.check().map_err(|_| invalid("the property image-dir belongs to backing auto"))?;
    let base = Base::Leaf(Box::new(options));
    Ok(DevicePlan { id: "image".into(), base, layers: Vec::new() })
}

fn plan(text: &str) -> Result<DevicePlan> {
    stack::parse(text).map_err(|e| Error::new(libc::EINVAL, e.to_string()))
}

/// The error of a device of the graph: `EINVAL` if no system call caused it, as then the graph
/// itself is wrong.
fn device_error(error: &DeviceError) -> Error {
    Error::device(error, libc::EINVAL)
}

/// One thread for each processor that is named, or as many as are asked for, wherever the scheduler
/// puts them.
fn core_configs(p: &Properties) -> Result<Vec<CoreConfig>> {
    let poll = match p.int("poll-us") {
        -1 => PollWindow::up_to(u64::MAX),
        us => PollWindow::up_to(us as u64 * 1000),
    };
    let count = p.int("num-cores") as usize;
    let core = |cpu| CoreConfig { cpu, poll, ..CoreConfig::default() };
    let Some(CpuList(cpus)) = CpuList::parse(p.str("cpus")) else {
        return Ok(vec![core(None); count.max(1)]);
    };
    if count != 0 && count != cpus.len() {
        let message = format!("num-cores is {count}, but cpus ({}) names {}", p.str("cpus"), cpus.len());
        return Err(Error::new(libc::EINVAL, message));
    }
    Ok(cpus.into_iter().map(|cpu| core(Some(cpu))).collect())
}

fn state_facts(p: &mut Properties, plan: &DevicePlan, device: &dyn Device) {
    let limits = device.limits();
    let int = |value: u32| i32::try_from(value).unwrap_or(i32::MAX);
    let needs_regions = plan.any_leaf(&|leaf| leaf.needs_regions());
    let region_alignment = if needs_regions { 4096 } else { 1 }; // the other process maps pages
    let optimal = limits.physical_block_size.max(limits.block_size);
    let optimal_size =
        if limits.optimal_io_size.is_multiple_of(optimal) { limits.optimal_io_size } else { 0 };
    p.put("read-only", p.bool("read-only") || limits.read_only);
    p.put("supports-poll-queues", true);
    p.put("supports-fua-natively", limits.native_fua);
    p.put("flush-needed", limits.volatile_cache);
    p.put("request-alignment", int(limits.block_size));
    p.put("buf-alignment", int(limits.memory_alignment));
    p.put("optimal-buf-alignment", int(limits.memory_alignment.max(4096)));
    p.put("optimal-io-alignment", int(optimal));
    p.put("optimal-io-size", int(optimal_size));
    p.put("max-segments", i32::from(limits.max_segments));
    p.put("max-transfer", int(limits.max_transfer));
    p.put("max-discard-len", limits.max_discard);
    p.put("max-write-zeroes-len", limits.max_write_zeroes);
    p.put("discard-alignment", int(limits.discard_alignment));
    p.put("needs-mem-regions", needs_regions);
    p.put("needs-mem-region-fd", needs_regions);
    p.put("may-pin-mem-regions", plan.any_leaf(&|leaf| leaf.pins_regions()));
    p.put("mem-region-alignment", u64::from(limits.memory_alignment.max(region_alignment)));
}
