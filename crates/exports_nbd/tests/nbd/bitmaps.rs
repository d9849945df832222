//! Dirty bitmaps of the device as metadata contexts.

use crate::client::{BLOCK_STATUS, Client, Form, queries};
use crate::server::{MIB, export};
use block::{Channel, Device, DeviceError, DirtyBitmap, KernelBacking, Limits, MemoryRegion};
use conformance::slow::SlowDevice;
use std::rc::Rc;
use std::sync::Arc;

const ALLOCATION: &str = "base:allocation";

/// A bitmap of which every `step`th granule of 64 KiB is dirty.
struct Every {
    name: String,
    step: u64,
}

const GRANULE: u64 = 64 << 10;

impl DirtyBitmap for Every {
    fn name(&self) -> &str {
        &self.name
    }

    fn granularity(&self) -> u64 {
        GRANULE
    }

    fn run(&self, offset: u64, len: u64) -> (bool, u64) {
        ((offset / GRANULE).is_multiple_of(self.step), (GRANULE - offset % GRANULE).min(len))
    }
}

/// A device with bitmaps `b1`, `b2` and so on.
struct Marked(SlowDevice, u64);

impl Device for Marked {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn limits(&self) -> Limits {
        self.0.limits()
    }

    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        self.0.open_channel()
    }

    fn refresh(&self) -> Result<Limits, DeviceError> {
        self.0.refresh()
    }

    fn map_region(&self, region: &MemoryRegion) -> Result<(), DeviceError> {
        self.0.map_region(region)
    }

    fn unmap_region(&self, region: &MemoryRegion) {
        self.0.unmap_region(region);
    }

    fn bitmaps(&self) -> Vec<Arc<dyn DirtyBitmap>> {
        (1..=self.1).map(|step| Arc::new(Every { name: format!("b{step}"), step }) as _).collect()
    }

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        self.0.kernel_backing()
    }
}

fn marked(bitmaps: u64) -> Arc<dyn Device> {
    Arc::new(Marked(SlowDevice::new(16 * MIB), bitmaps))
}

#[test]
fn a_client_gets_the_dirty_extents_of_each_bitmap_that_it_has_selected() {
    let (_export, _cores, socket, _dir) = export(marked(20), 2, |config| config);
    for form in [Form::Structured, Form::Extended] {
        let contexts = [ALLOCATION, "qemu:dirty-bitmap:b2", "qemu:dirty-bitmap:b3"];
        let mut client = Client::with_contexts(&socket, form, &contexts);
        let found = client.status(0, 100, 5 * GRANULE);
        let (first, rest) = (GRANULE - 100, GRANULE);
        let expected = [
            (1, vec![(5 * GRANULE, 0)]),
            (3, vec![(first, 1), (rest, 0), (rest, 1), (rest, 0), (rest, 1), (100, 0)]),
            (4, vec![(first, 1), (2 * rest, 0), (rest, 1), (rest + 100, 0)]),
        ];
        assert_eq!(found, expected, "{form:?}");
        // One extent of each.
        let found = client.status(1 << 3, GRANULE, 15 * MIB);
        assert_eq!(found, [(1, vec![(15 * MIB, 0)]), (3, vec![(rest, 0)]), (4, vec![(2 * rest, 0)])]);
        // Extents that are the same are one.
        let mut client = Client::with_contexts(&socket, form, &["qemu:dirty-bitmap:b1"]);
        assert_eq!(client.status(0, 0, 4 * MIB), [(2, vec![(4 * MIB, 1)])]);
        // Of many extents the reply has the first ones.
        let mut client = Client::with_contexts(&socket, form, &["qemu:dirty-bitmap:b2"]);
        let found = client.status(0, 0, 16 * MIB);
        assert_eq!(found[0].1.len(), 64);
        assert_eq!(client.run(BLOCK_STATUS, 0, 16 * MIB, 512).error, 22);
        assert_eq!(client.read(0, 512).len(), 512);
    }
}

#[test]
fn names_that_are_unknown_select_nothing_and_too_many_are_refused() {
    let (_export, _cores, socket, _dir) = export(marked(100), 1, |config| config);
    let mut client = Client::greeted(&socket);
    assert_eq!(client.option(8, &[]), [(1, Vec::new())]);
    let bad = ["qemu:dirty-bitmap:", "qemu:dirty-bitmap:b0", "qemu:allocation-depth", "b1", ""];
    assert_eq!(client.option(10, &queries(&bad)), [(1, Vec::new())]);
    let names: Vec<String> = (1..18).map(|number| format!("qemu:dirty-bitmap:b{number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let refused = client.option(10, &queries(&names));
    assert_eq!(refused.len(), 1);
    assert!(refused[0].0 >> 31 == 1 && refused[0].1.starts_with(b"more than 16"), "{refused:?}");
    assert_eq!(client.option(10, &queries(&names[1..])).len(), 17);
    // An export offers 63 bitmaps.
    assert_eq!(client.option(9, &queries(&["qemu:"])).len(), 64);
    assert_eq!(client.option(9, &queries(&["qemu:dirty-bitmap:", ALLOCATION])).len(), 65);
    assert_eq!(client.option(10, &queries(&["qemu:dirty-bitmap:b64"])).len(), 1);
    assert_eq!(client.option(10, &queries(&["qemu:dirty-bitmap:b63"])).len(), 2);
}
