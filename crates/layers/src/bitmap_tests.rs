//! Layers that have the dirty bitmaps of their child, and those that do not.

use crate::checker::Checker;
use crate::fault::Fault;
use crate::linear::Partition;
use crate::migrate::Migratable;
use crate::qos::Qos;
use crate::stats::Stats;
use block::{Channel, Device, DeviceError, DirtyBitmap, KernelBacking, Limits, MemoryRegion};
use std::rc::Rc;
use std::sync::Arc;

/// A device with a bitmap.
struct Marked;

impl Device for Marked {
    fn name(&self) -> &str {
        "marked"
    }

    fn limits(&self) -> Limits {
        Limits::new(1 << 20)
    }

    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        Err(DeviceError::new("marked", "no channel"))
    }

    fn refresh(&self) -> Result<Limits, DeviceError> {
        Ok(self.limits())
    }

    fn map_region(&self, _: &MemoryRegion) -> Result<(), DeviceError> {
        Ok(())
    }

    fn unmap_region(&self, _: &MemoryRegion) {}

    fn bitmaps(&self) -> Vec<Arc<dyn DirtyBitmap>> {
        vec![Arc::new(Marked)]
    }

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        Err(DeviceError::not_in_kernel("marked"))
    }
}

impl DirtyBitmap for Marked {
    fn name(&self) -> &str {
        "b"
    }

    fn granularity(&self) -> u64 {
        512
    }

    fn run(&self, _: u64, len: u64) -> (bool, u64) {
        (true, len)
    }
}

#[test]
fn layers_that_change_neither_offsets_nor_content_have_the_bitmaps_of_their_child() {
    let child = || Arc::new(Marked) as Arc<dyn Device>;
    let layers: [Box<dyn Device>; 5] = [
        Box::new(Stats::new(child())),
        Box::new(Qos::new(child(), Vec::new())),
        Box::new(Fault::new(child())),
        Box::new(Checker::new(child())),
        Box::new(Migratable::new(child())),
    ];
    for layer in layers {
        let bitmaps = layer.bitmaps();
        assert_eq!(bitmaps.iter().map(|bitmap| bitmap.name()).collect::<Vec<_>>(), ["b"], "{}", layer.name());
    }
    let partition = Partition::new(child(), 4096, Some(8192)).unwrap();
    assert!(partition.bitmaps().is_empty(), "its offsets are others");
}
