//! Driver `rbd`: an image of a Ceph cluster, over the system's librbd.

use super::{MAX_QUEUE_DEPTH, Options, RbdDevice};
use block::{Device, DeviceError};
use drivers::blkio::{
    Capacity, Driver, DriverKind, Error, Properties, Region, Result, Spec, Value, state_limits,
};
use drivers::direct::DirectQueue;
use std::sync::Arc;

/// The driver of the library.
pub static DRIVER: DriverKind = DriverKind { name: "rbd", create: || Ok(Box::new(Rbd::new())) };

struct Rbd {
    device: Option<Arc<RbdDevice>>,
}

impl Rbd {
    fn new() -> Rbd {
        Rbd { device: None }
    }

    fn device(&self) -> &Arc<RbdDevice> {
        self.device.as_ref().expect("the instance is connected")
    }
}

impl Driver for Rbd {
    fn specs(&self) -> Vec<Spec> {
        let Options { user, .. } = Options::new("", "");
        vec![
            Spec::setting("pool", ""),
            Spec::setting("image", ""),
            Spec::setting("namespace", ""),
            Spec::setting("snapshot", ""),
            Spec::setting("conf", ""),
            Spec::setting("user", &*user),
            Spec::setting("exclusive", "auto"),
            Spec::setting("force", false),
            Spec::setting("lock-file", ""),
            Spec::setting("cache", false),
            Spec::setting("connect-timeout-ms", 10_000),
            Spec::tuning("num-entries", 128),
        ]
    }

    fn can_add_queues(&self) -> bool {
        true
    }

    fn check(&self, name: &str, value: &Value) -> Result<()> {
        let refuse = |expected: &str| {
            Err(Error::new(libc::EINVAL, format!("property {name}: '{value}' is not {expected}")))
        };
        match (name, value) {
            ("connect-timeout-ms", Value::Int(number)) if *number <= 0 => refuse("positive"),
            ("num-entries", Value::Int(number)) if !(1..=MAX_QUEUE_DEPTH as i32).contains(number) => {
                refuse(&format!("a number from 1 to {MAX_QUEUE_DEPTH}"))
            }
            ("exclusive", Value::Str(text)) if !["auto", "on", "off"].contains(&&**text) => {
                refuse("auto, on or off")
            }
            _ => Ok(()),
        }
    }

    fn connect(&mut self, p: &mut Properties) -> Result<()> {
        let device = RbdDevice::open(&options(p)?).map_err(|e| device_error(&e))?;
        state_limits(p, &device.limits());
        self.device = Some(Arc::new(device));
        Ok(())
    }

    fn start(&mut self, _: &Properties) -> Result<()> {
        Ok(())
    }

    fn open_queue(&mut self, p: &Properties, _: bool) -> Result<Box<dyn DirectQueue>> {
        let queue = self.device().open_queue_of(p.int("num-entries") as u32);
        Ok(Box::new(queue.map_err(|e| device_error(&e))?))
    }

    fn capacity(&self) -> Capacity {
        let device = self.device().clone();
        Arc::new(move || Ok(device.refresh().map_err(|e| device_error(&e))?.capacity))
    }

    fn map_region(&mut self, _: &Region) -> Result<()> {
        Ok(())
    }

    fn unmap_region(&mut self, _: &Region) {}

    fn canceller(&self) -> Option<Arc<dyn Fn() + Send + Sync>> {
        // librados gives its attempt up only after its timeout.
        None
    }
}

/// `EINVAL` if neither librbd nor the system caused the error: an option is wrong.
fn device_error(error: &DeviceError) -> Error {
    Error::device(error, libc::EINVAL)
}

fn options(p: &Properties) -> Result<Options> {
    let (pool, image) = (p.str("pool"), p.str("image"));
    if pool.is_empty() || image.is_empty() {
        return Err(Error::new(libc::EINVAL, "the properties pool and image must be set"));
    }
    let given = |property: &str| Some(p.str(property)).filter(|text| !text.is_empty());
    Ok(Options {
        namespace: p.str("namespace").to_owned(),
        snapshot: given("snapshot").map(Into::into),
        conf: given("conf").map(Into::into),
        user: p.str("user").to_owned(),
        exclusive: match p.str("exclusive") {
            "on" => Some(true),
            "off" => Some(false),
            _ => None,
        },
        force: p.bool("force"),
        lock_file: given("lock-file").map(Into::into),
        cache: p.bool("cache"),
        read_only: p.bool("read-only"),
        timeout_ms: p.int("connect-timeout-ms") as u64,
        ..Options::new(pool, image)
    })
}
