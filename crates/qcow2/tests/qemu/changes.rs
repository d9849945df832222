//! Changes of images that are damaged in several places: each ends, and none makes matters worse.

use crate::damage::{check, damage_part, images, metadata};
use crate::repair::{too_low, writable};
use crate::tools::{Folder, file, write};
use block::Device;
use drivers::mem::{MemDevice, Options};
use qcow2::offline::{backing::Backing, rebase::rebase, resize::resize, snapshots};
use qcow2::{Error, Level};
use std::sync::Arc;
use std::time::Duration;

type Step = fn(Arc<dyn Device>) -> Result<(), Error>;

/// Writes data to every second part of a device.
fn fill(device: &Arc<dyn Device>) {
    let device = device.clone();
    reactor::run(async move {
        let channel = device.open_channel().unwrap();
        for at in (0..device.limits().capacity).step_by(128 << 10) {
            write(&*channel, at, 64 << 10, 9).await.unwrap();
        }
    });
}

#[test]
fn every_change_of_a_damaged_image_ends_and_a_completed_one_leaves_no_error() {
    let steps: [(&str, Step); 7] = [
        ("create", |device| {
            reactor::run(async move { snapshots::create(&device, "new", Duration::ZERO).await.map(drop) })
        }),
        ("apply", |device| reactor::run(async move { snapshots::apply(&device, "1").await })),
        ("delete", |device| reactor::run(async move { snapshots::delete(&device, "1").await })),
        ("leaks", |device| reactor::run(async move { qcow2::repair(&device, Level::Leaks).await.map(drop) })),
        ("grow", |device| resize(&device, None, 9 << 20, false)),
        ("rebase", |device| {
            let new: Arc<dyn Device> = Arc::new(MemDevice::new(&Options::new(2 << 20)).unwrap());
            fill(&new);
            let backing = Backing { name: "new".into(), format: "raw".into() };
            rebase(&device, None, Some((backing, new)))
        }),
        ("shrink", |device| resize(&device, None, 100 << 10, true)),
    ];
    let folder = Folder::new();
    let path = folder.path("damaged");
    let (mut done, mut refused) = (0, 0);
    for name in images(&folder) {
        let intact = std::fs::read(folder.path(&name)).unwrap();
        let parts = metadata(&intact);
        for seed in 0..40 {
            let mut bytes = intact.clone();
            let seeds = (0..1 + seed % 4).map(|number| seed * 1000 + number * 7);
            let what: Vec<String> = seeds.map(|seed| damage_part(&parts, &mut bytes, seed)).collect();
            std::fs::write(&path, &bytes).unwrap();
            let [first, second] = [(); 2].map(|()| {
                let device = writable(&path);
                reactor::run(async move { qcow2::repair(&device, Level::All).await })
            });
            if let Ok(first) = first {
                let second = second.unwrap_or_else(|error| panic!("{name}, {what:?}: {error}"));
                assert_eq!(second.before, first.after, "{name}, {what:?}");
                assert!(second.after.corruptions <= first.after.corruptions, "{name}, {what:?}");
            }
            for (step, change) in steps {
                std::fs::write(&path, &bytes).unwrap();
                let before = check(file(&path));
                let result = change(writable(&path));
                let after = check(file(&path));
                let when = format!("{name}, {what:?}, {step}: {result:?}");
                let (Ok(before), Ok(after)) = (before, after) else { continue };
                if result.is_ok() && ["create", "apply", "delete", "rebase"].contains(&step) {
                    assert_eq!(after.corruptions, 0, "{when}: {after:?}");
                }
                *(if result.is_ok() { &mut done } else { &mut refused }) += 1;
                // An L1 entry may take the header, whose size changes, for an L2 table.
                let is_other_table = what.iter().any(|what| what.contains(": L1,"));
                if !(is_other_table && ["grow", "shrink"].contains(&step)) {
                    let more: Vec<_> = too_low(&after).difference(&too_low(&before)).cloned().collect();
                    assert_eq!(more, [""; 0], "{when}: {before:?} {after:?}");
                }
            }
        }
    }
    assert!(done > 500 && refused > 500, "{done} {refused}");
}
