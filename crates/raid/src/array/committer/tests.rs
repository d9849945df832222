//! Power loss inside the commit that exchanges a live member for its copy.

use crate::admin::open::{Candidate, Selection, Wanted, select};
use crate::array::members::Attached;
use crate::array::tests::{read, write};
use crate::array::{Array, Start};
use crate::metadata::{Label, Layout, Spare, Store, Target, read_superblock, testing, write_label};
use crate::{ArrayConfig, Uuid};
use block::{
    Channel, Device, DeviceError, IoError, IoFuture, KernelBacking, Limits, MemoryRegion, Op, Request,
    StatusReport,
};
use reactor::run_simulated;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

const MEMBER_BYTES: usize = 1 << 20;
/// The identity of the copy.
const COPY: Uuid = Uuid([77; 16]);

/// A write that became durable: disk, offset, bytes.
type Written = (usize, usize, Vec<u8>);

/// Memory whose requests take a random time. All disks share a list of their writes.
#[derive(Clone)]
struct Disk {
    number: usize,
    name: String,
    bytes: Arc<Mutex<Vec<u8>>>,
    log: Arc<Mutex<Vec<Written>>>,
}

impl Disk {
    fn new(number: usize, bytes: Vec<u8>, log: &Arc<Mutex<Vec<Written>>>) -> Disk {
        Disk { number, name: format!("disk{number}"), bytes: Arc::new(Mutex::new(bytes)), log: log.clone() }
    }

    fn bytes(&self) -> Vec<u8> {
        self.bytes.lock().unwrap().clone()
    }

    fn edit(&self, offset: usize, new: &[u8]) {
        self.bytes.lock().unwrap()[offset..offset + new.len()].copy_from_slice(new);
    }

    async fn serve(&self, req: &Request<'_>, offset: usize) -> Result<(), IoError> {
        let core = reactor::current();
        core.sleep(core.random_u64() % 1000).await;
        let mut new = vec![0; req.len as usize];
        match req.op {
            Op::Flush | Op::Discard => return Ok(()),
            Op::Read => {
                req.data.copy_from(&self.bytes.lock().unwrap()[offset..][..req.len as usize]);
                return Ok(());
            }
            Op::Write => _ = req.data.copy_to(&mut new),
            Op::WriteZeroes => {}
        }
        self.edit(offset, &new);
        self.log.lock().unwrap().push((self.number, offset, new));
        Ok(())
    }
}

impl Channel for Disk {
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        IoFuture::new(self.serve(req, offset as usize))
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, _: u64, len: u64) -> IoFuture<'a> {
        report.answer_data(len)
    }
}

impl Device for Disk {
    fn name(&self) -> &str {
        &self.name
    }
    fn limits(&self) -> Limits {
        Limits::new(MEMBER_BYTES as u64)
    }
    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        Ok(Rc::new(self.clone()))
    }
    fn refresh(&self) -> Result<Limits, DeviceError> {
        Ok(self.limits())
    }
    fn map_region(&self, _: &MemoryRegion) -> Result<(), DeviceError> {
        Ok(())
    }
    fn unmap_region(&self, _: &MemoryRegion) {}

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        Err(DeviceError::not_in_kernel(self.name()))
    }
}

/// The commit of a replacement, from the moment at which its copy is complete.
struct Replacement {
    slot: usize,
    /// Contents of the disks at that moment. The last one is the copy.
    before: Vec<Vec<u8>>,
    /// The writes of the commit.
    writes: Vec<Written>,
    /// Contents of the array.
    data: Vec<u8>,
}

/// Fills an array, copies the live member of a slot onto a spare, and exchanges the two.
async fn replace(config: &ArrayConfig, slot: usize) -> Replacement {
    let count = config.geometry.members();
    let log = Arc::default();
    let disks: Vec<Disk> = (0..=count).map(|number| Disk::new(number, vec![0; MEMBER_BYTES], &log)).collect();
    let layout = Layout::new(MEMBER_BYTES as u64, config).unwrap();
    let target = |disk: &Disk| Target { slot: disk.number, channel: disk.open_channel().unwrap(), layout };
    let targets: Vec<Target> = disks[..count].iter().map(target).collect();
    Store::new(count).commit(&targets, &testing::table(config)).await;
    let spare = Label::Spare(Spare {
        member: COPY,
        array: None,
        array_name: String::new(),
        member_bytes: MEMBER_BYTES as u64,
        created_ns: 0,
        owner: String::new(),
    });
    write_label(&disks[count], MEMBER_BYTES as u64, &spare).await.unwrap();
    let array = start(&assemble(&disks).await).await;
    let channel = array.open_channel().unwrap();
    for (i, at) in (0..config.geometry.capacity()).step_by(4096).enumerate() {
        write(&*channel, at, i as u8 | 1, 4096).await.unwrap();
    }
    let incoming = Attached { device: Arc::new(disks[count].clone()), layout };
    array.start_filling(slot, COPY, incoming).await.unwrap();
    for stripe in 0..config.geometry.stripes() {
        array.fill_stripe(slot, stripe).await.unwrap();
    }
    array.advance(slot, config.geometry.stripes());
    let before = disks.iter().map(Disk::bytes).collect();
    log.lock().unwrap().clear();
    array.finish_filling(slot, COPY).await.unwrap();
    let writes = log.lock().unwrap().clone();
    let data = read(&*channel, 0, config.geometry.capacity() as usize).await.unwrap();
    Replacement { slot, before, writes, data }
}

impl Replacement {
    /// The disks after the first writes of the commit, and `torn` bytes of the next one.
    fn disks(&self, writes: usize, torn: usize) -> Vec<Disk> {
        let log = Arc::default();
        let disk = |(number, bytes): (usize, &Vec<u8>)| Disk::new(number, bytes.clone(), &log);
        let disks: Vec<Disk> = self.before.iter().enumerate().map(disk).collect();
        for (i, (disk, offset, bytes)) in self.writes.iter().take(writes + 1).enumerate() {
            let len = if i < writes { bytes.len() } else { torn.min(bytes.len()) };
            disks[*disk].edit(*offset, &bytes[..len]);
        }
        disks
    }
}

/// Assembles the array from all of the disks that have a superblock.
async fn assemble(disks: &[Disk]) -> Selection {
    let candidate = |disk: &Disk| {
        let device: Arc<dyn Device> = Arc::new(disk.clone());
        Candidate { name: disk.name.clone(), device: Ok(device), is_named: false }
    };
    select(disks.iter().map(candidate).collect(), &Wanted::default()).await.unwrap()
}

async fn start(selection: &Selection) -> Arc<Array> {
    let device = |found: &crate::metadata::Found| selection.found.get(&found.name).cloned();
    Array::start(Start::new(selection.assembly.clone(), 1, true, device)).await.unwrap()
}

fn configs() -> [ArrayConfig; 2] {
    let mirror = ArrayConfig {
        matrix: crate::Matrix::Copies,
        consistency: crate::Consistency::Bitmap,
        ..testing::config(1, 2)
    };
    [testing::config(2, 1), mirror]
}

#[test]
fn power_may_go_at_any_write_of_a_replacement_and_the_slot_keeps_its_redundancy() {
    let mut by_copy = [0; 2];
    for (seed, config) in (0..4).flat_map(|seed| configs().map(|config| (seed, config))) {
        for slot in 0..3 {
            let (sender, receiver) = std::sync::mpsc::channel();
            let config = config.clone();
            run_simulated(seed, move |_| async move {
                let replacement = replace(&config, slot).await;
                for writes in 0..=replacement.writes.len() {
                    for torn in [0, 512, 1024] {
                        let disks = replacement.disks(writes, torn);
                        let is_copy = check(&config, &replacement, &disks).await;
                        sender.send((is_copy, format!("seed {seed}, slot {slot}, {writes} writes"))).unwrap();
                    }
                }
            });
            let cuts: Vec<(bool, String)> = receiver.iter().collect();
            assert!(!cuts[0].0 && cuts[cuts.len() - 1].0);
            assert!(cuts.is_sorted_by_key(|(is_copy, _)| *is_copy), "{cuts:?}");
            cuts.iter().for_each(|(is_copy, _)| by_copy[usize::from(*is_copy)] += 1);
        }
    }
    assert!(by_copy.iter().all(|count| *count > 100), "{by_copy:?}");
}

/// Checks what is durable. Returns whether the copy is the slot's member.
async fn check(config: &ArrayConfig, replacement: &Replacement, disks: &[Disk]) -> bool {
    let (slot, copy) = (replacement.slot, disks.last().unwrap());
    let selection = assemble(disks).await;
    let assembly = &selection.assembly;
    assert!(assembly.missing.is_empty() && assembly.returning.is_empty(), "{:?}", selection.warnings);
    assert!(!assembly.table.is_degraded() && !assembly.table.is_creating);
    let name = |slot: usize| assembly.members[slot].as_ref().unwrap().name.clone();
    let is_copy = name(slot) == copy.name;
    assert!(is_copy || name(slot) == disks[slot].name);
    assert_eq!(assembly.table.members[slot].uuid == COPY, is_copy);
    // The other of the two disks is no member. The copy is a spare as before.
    let spares: Vec<&str> = assembly.spares.iter().map(|spare| spare.name.as_str()).collect();
    let left_out: Vec<&str> = assembly.rejected.iter().map(|rejected| rejected.name.as_str()).collect();
    match is_copy {
        true => assert_eq!((spares, left_out), (vec![], vec![disks[slot].name.as_str()])),
        false => assert_eq!((spares, left_out), (vec![copy.name.as_str()], vec![])),
    }
    let array = start(&selection).await;
    let channel = array.open_channel().unwrap();
    assert!(array.members().is_healthy());
    assert!(read(&*channel, 0, replacement.data.len()).await.unwrap() == replacement.data);
    for stripe in 0..config.geometry.stripes() {
        assert_eq!(array.scrub_stripe(stripe, true).await.unwrap().mismatches, 0, "stripe {stripe}");
    }
    // All of it can be read without another member.
    array.fail((slot + 1) % config.geometry.members()).await.unwrap();
    assert!(read(&*channel, 0, replacement.data.len()).await.unwrap() == replacement.data);
    is_copy
}

#[test]
fn a_copy_that_was_introduced_and_lost_power_is_introduced_again() {
    run_simulated(3, |_| async {
        let [config, _] = configs();
        let replacement = replace(&config, 1).await;
        let of_copy = |(disk, ..): &Written| *disk == config.geometry.members();
        // Both copies of its superblock, and nothing else.
        let mut disks = replacement.disks(0, 0);
        for (disk, offset, bytes) in replacement.writes.iter().filter(|write| of_copy(write)).take(2) {
            disks[*disk].edit(*offset, bytes);
        }
        let selection = assemble(&disks).await;
        let spare = &selection.assembly.spares[0];
        let Label::Spare(label) = &spare.label else { panic!("{spare:?}") };
        assert_eq!((label.member, label.array), (COPY, Some(config.uuid)));
        let copy = disks.pop().unwrap();
        let found = read_superblock("copy", &copy, MEMBER_BYTES as u64).await.unwrap();
        assert!(matches!(&found.label, Label::Member(superblock) if superblock.table.is_creating));
        // The array runs without it, and with it once more: the second time as the member.
        drop(start(&assemble(&disks).await).await);
        disks.push(copy.clone());
        let array = start(&assemble(&disks).await).await;
        let layout = Layout::new(MEMBER_BYTES as u64, &config).unwrap();
        array.start_filling(2, COPY, Attached { device: Arc::new(copy), layout }).await.unwrap();
        for stripe in 0..config.geometry.stripes() {
            array.fill_stripe(2, stripe).await.unwrap();
        }
        array.finish_filling(2, COPY).await.unwrap();
        drop(array);
        let selection = assemble(&disks).await;
        assert_eq!(selection.assembly.members[2].as_ref().unwrap().name, "disk3");
        assert!(selection.assembly.missing.is_empty() && selection.assembly.spares.is_empty());
        let left_out: Vec<_> = selection.assembly.rejected.iter().map(|left| left.name.as_str()).collect();
        assert_eq!(left_out, ["disk2"]);
    });
}

#[test]
fn a_copy_that_cannot_be_introduced_leaves_the_member_in_its_slot() {
    use layers::fault::{Action, Fault, Rule};
    run_simulated(4, |_| async {
        let [config, _] = configs();
        let log = Arc::default();
        let disks: Vec<Disk> = (0..3).map(|number| Disk::new(number, vec![0; MEMBER_BYTES], &log)).collect();
        let layout = Layout::new(MEMBER_BYTES as u64, &config).unwrap();
        let target =
            |disk: &Disk| Target { slot: disk.number, channel: disk.open_channel().unwrap(), layout };
        let targets: Vec<Target> = disks.iter().map(target).collect();
        Store::new(3).commit(&targets, &testing::table(&config)).await;
        let array = start(&assemble(&disks).await).await;
        let member = array.table().members[1];
        let copy = Arc::new(Fault::new(Arc::new(Disk::new(3, vec![0; MEMBER_BYTES], &log))));
        array.start_filling(1, COPY, Attached { device: copy.clone(), layout }).await.unwrap();
        for stripe in 0..config.geometry.stripes() {
            array.fill_stripe(1, stripe).await.unwrap();
        }
        let places = layout.superblocks();
        let rule = Rule::new(Action::Error(IoError::Medium)).on(&[Op::Write]);
        copy.add(rule.within(places[2]..places[2] + 4096));
        assert_eq!(array.finish_filling(1, COPY).await, Err(IoError::Medium));
        assert!(array.members().is_healthy() && array.slots()[1].filled.is_none());
        assert_eq!(array.table().members[1], member);
        let channel = array.open_channel().unwrap();
        write(&*channel, 0, 9, 4096).await.unwrap();
        array.note(|table| table.is_clean = false).await.unwrap();
        let selection = assemble(&disks).await;
        assert!(selection.assembly.missing.is_empty() && selection.assembly.spares.is_empty());
    });
}

#[test]
fn a_member_that_fails_while_its_copy_takes_the_slot_leaves_memory_and_superblocks_in_agreement() {
    for seed in 0..40 {
        run_simulated(seed, move |_| async move {
            let [_, config] = configs();
            let disks = replace(&config, 0).await.disks(0, 0);
            let copy = Arc::new(disks[3].clone());
            let array = start(&assemble(&disks).await).await;
            let layout = Layout::new(MEMBER_BYTES as u64, &config).unwrap();
            array.start_filling(0, COPY, Attached { device: copy, layout }).await.unwrap();
            for stripe in 0..config.geometry.stripes() {
                array.fill_stripe(0, stripe).await.unwrap();
            }
            let failing = array.clone();
            let core = reactor::current();
            core.spawn(async move {
                reactor::current().sleep(100 * seed).await;
                failing.fail(0).await.unwrap();
            });
            let _ = array.finish_filling(0, COPY).await; // the slot may have become empty
            core.sleep(1_000_000).await;
            assert_eq!(array.table().members[0].is_live(), array.members().is_live(0), "seed {seed}");
        });
    }
}
