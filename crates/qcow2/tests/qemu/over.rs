//! A device over another one: a test decides about each request.

use block::{Channel, Device, DeviceError, KernelBacking, Limits, MemoryRegion};
use std::rc::Rc;
use std::sync::Arc;

type Wrap = Box<dyn Fn(Rc<dyn Channel>) -> Rc<dyn Channel> + Send + Sync>;

struct Over {
    child: Arc<dyn Device>,
    is_fixed: bool,
    wrap: Wrap,
}

/// A device with channels that `wrap` makes of those of `child`. `is_fixed`: it cannot grow, as a
/// block device.
pub fn over(
    child: Arc<dyn Device>,
    is_fixed: bool,
    wrap: impl Fn(Rc<dyn Channel>) -> Rc<dyn Channel> + Send + Sync + 'static,
) -> Arc<dyn Device> {
    Arc::new(Over { child, is_fixed, wrap: Box::new(wrap) })
}

impl Device for Over {
    fn name(&self) -> &str {
        self.child.name()
    }

    fn limits(&self) -> Limits {
        self.child.limits()
    }

    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        Ok((self.wrap)(self.child.open_channel()?))
    }

    fn refresh(&self) -> Result<Limits, DeviceError> {
        self.child.refresh()
    }

    fn resize(&self, bytes: u64) -> Result<Limits, DeviceError> {
        if self.is_fixed {
            return Err(DeviceError::new(self.name(), "the size is fixed"));
        }
        self.child.resize(bytes)
    }

    fn map_region(&self, region: &MemoryRegion) -> Result<(), DeviceError> {
        self.child.map_region(region)
    }

    fn unmap_region(&self, region: &MemoryRegion) {
        self.child.unmap_region(region);
    }

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        self.child.kernel_backing()
    }
}
