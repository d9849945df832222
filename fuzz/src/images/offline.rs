//! Commands on an image that nothing else has open: repairs, snapshots, another size, bitmaps.
//!
//! No command makes an image worse: one whose metadata has no error has none afterwards, whether
//! the command succeeded or not. On an image that was not edited, commands succeed, and disk and
//! snapshots have the bytes that they must have.

use super::base::Base;
use super::{OTHER_BYTES, PART, ROOM, disk, store};
use ::base::Rng;
use block::{Device, Flags, Op};
use qcow2::offline::bitmaps::{self, Change, Source};
use qcow2::offline::{resize::resize, snapshots};
use qcow2::{Error, Image, Level, Others, Qcow2, Report, repair};
use reactor::{Core, CoreRef};
use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

const COMMANDS: u64 = 4;
/// Longest disk that a command makes, in sectors.
const MOST_SECTORS: u64 = 4096;
/// One image in so many gets another size: the command starts cores of its own.
const RESIZES: u64 = 16;

/// The disk of an image that was not edited, and of its snapshots by their identifiers.
struct Model {
    disk: Vec<u8>,
    snapshots: BTreeMap<String, Vec<u8>>,
}

/// An image, and what is known of it.
struct Subject {
    core: CoreRef,
    device: Arc<dyn Device>,
    /// `None` for an image that was edited.
    model: Option<Model>,
    /// Identifiers and names of snapshots that may exist.
    names: Vec<String>,
}

/// Runs commands on an image. `expected` is what was built.
pub(super) fn run(core: &CoreRef, bytes: Vec<u8>, expected: Option<Base>, seed: u64) {
    let device = core.block_on(move |core| async move { store(&core, &bytes, ROOM).await });
    let device: Arc<dyn Device> = device.expect("the core runs");
    let model = expected.map(|base| Model { disk: base.disk(), snapshots: base.snapshots() });
    let mut subject = Subject { core: core.clone(), device, model, names: vec!["1".into()] };
    let mut rng = Rng::new(seed);
    let resizes = rng.one_in(RESIZES);
    for number in 0..=COMMANDS {
        let before = subject.check();
        let (name, result) = match rng.below(if resizes { 6 } else { 5 }) {
            // Later commands would refuse an image with bitmaps.
            _ if number == COMMANDS => ("bitmaps", subject.add_bitmap()),
            0 => ("repair of leaks", subject.repair(Level::Leaks)),
            1 => ("repair", subject.repair(Level::All)),
            2 => ("snapshot", subject.create(format!("name {number}"))),
            3 => ("apply", subject.apply(&mut rng)),
            4 => ("delete", subject.delete(&mut rng)),
            _ => ("resize", subject.resize(&mut rng)),
        };
        let is_intact = subject.model.is_some();
        assert!(!is_intact || result.is_ok(), "{name} of an intact image: {result:?}");
        let after = subject.check();
        assert!(!is_sound(&before) || is_sound(&after), "{name}: {result:?}, {after:?}");
    }
    if let Some(Model { disk, snapshots }) = subject.model.take() {
        assert!(subject.contents(None) == disk, "the disk has its data");
        for (id, bytes) in snapshots {
            assert!(subject.contents(Some(id)) == bytes, "a snapshot has its data");
        }
    }
}

/// Whether a check found no error. Leaked clusters are none.
fn is_sound(report: &Option<Report>) -> bool {
    report.as_ref().is_some_and(|report| report.corruptions + report.check_errors == 0)
}

impl Subject {
    /// Runs something with the device on the core.
    fn on_core<T: Send + 'static, F: Future<Output = T> + 'static>(
        &self,
        run: impl FnOnce(Core, Arc<dyn Device>) -> F + Send + 'static,
    ) -> T {
        let device = self.device.clone();
        self.core.block_on(move |core| run(core, device)).expect("the core runs")
    }

    fn check(&self) -> Option<Report> {
        self.on_core(|_, device| async move { qcow2::check(&*device).await.ok() })
    }

    fn repair(&self, level: Level) -> Result<(), Error> {
        let repaired = self.on_core(move |_, device| async move { repair(&device, level).await })?;
        assert_eq!(self.check(), Some(repaired.after), "a repair reports what a check finds");
        Ok(())
    }

    fn create(&mut self, name: String) -> Result<(), Error> {
        let id = self.on_core(move |_, device| async move {
            snapshots::create(&device, &name, Duration::from_secs(1)).await
        })?;
        if let Some(model) = &mut self.model {
            model.snapshots.insert(id.clone(), model.disk.clone());
        }
        self.names.push(id);
        Ok(())
    }

    /// A snapshot that exists; any name on an image that was edited.
    fn snapshot(&self, rng: &mut Rng) -> Option<String> {
        let known: Vec<&String> = match &self.model {
            Some(model) => model.snapshots.keys().collect(),
            None => self.names.iter().collect(),
        };
        let index = rng.below(known.len().max(1) as u64) as usize;
        known.get(index).map(|name| (*name).clone())
    }

    fn apply(&mut self, rng: &mut Rng) -> Result<(), Error> {
        let Some(id) = self.snapshot(rng) else { return Ok(()) };
        if let Some(Model { disk, snapshots }) = &mut self.model {
            disk.clone_from(&snapshots[&id]);
        }
        self.on_core(move |_, device| async move { snapshots::apply(&device, &id).await })
    }

    fn delete(&mut self, rng: &mut Rng) -> Result<(), Error> {
        let Some(id) = self.snapshot(rng) else { return Ok(()) };
        if let Some(model) = &mut self.model {
            model.snapshots.remove(&id);
        }
        self.on_core(move |_, device| async move { snapshots::delete(&device, &id).await })
    }

    fn add_bitmap(&mut self) -> Result<(), Error> {
        let changes = [Change::Add(None), Change::Merge(Source::Own("b".into())), Change::Disable];
        self.on_core(move |_, device| async move { bitmaps::change(&device, "b", &changes).await })
    }

    fn resize(&mut self, rng: &mut Rng) -> Result<(), Error> {
        let sectors = 1 + rng.below(MOST_SECTORS);
        let header = self.on_core(|_, device| async move { Image::open_header(&*device).await })?;
        let backing = header.backing_file.is_some().then(|| disk(OTHER_BYTES) as Arc<dyn Device>);
        let shrinks = sectors * 512 < header.size;
        let result = resize(&self.device, backing, sectors * 512, true);
        match &mut self.model {
            // An image with snapshots keeps the size of its disk.
            Some(model) if result.is_err() && !model.snapshots.is_empty() && shrinks => Ok(()),
            Some(model) if result.is_ok() => {
                model.disk.resize(sectors as usize * 512, 0);
                result
            }
            _ => result,
        }
    }

    /// Every byte of the disk, or of a snapshot.
    fn contents(&self, snapshot: Option<String>) -> Vec<u8> {
        self.on_core(|core, device| async move {
            let mut image = Image::open(device).await.expect("an intact image is opened");
            if let Some(id) = snapshot {
                image = image.at_snapshot(&id).await.expect("the snapshot exists");
            }
            let disk = Qcow2::new(image, Others::default(), 1 << 16).expect("an intact disk is opened");
            let (channel, capacity) = (disk.open_channel().expect("a channel"), disk.limits().capacity);
            let mut bytes = Vec::new();
            while (bytes.len() as u64) < capacity {
                let at = bytes.len() as u64;
                let buffer = core.buffers().take(PART.min(capacity - at) as usize).await;
                let (buffer, result) = buffer.transfer(&*channel, Op::Read, Flags::NONE, at).await;
                assert_eq!(result, Ok(()), "an intact disk is read");
                bytes.extend_from_slice(buffer.as_slice());
            }
            bytes
        })
    }
}
