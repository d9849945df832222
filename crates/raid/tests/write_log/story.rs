//! The life of an array with logged writes of its members: created, written to, a member failed and
//! replaced, a live member replaced, stopped, started again.

use crate::disk::{Disk, Log, Note, SECTOR};
use block::{Channel, Device, Flags, IoFuture, IoResult, Op, Request, join_all};
use raid::admin::open::{Candidate, Wanted, select};
use raid::array::{Array, Start};
use raid::jobs::Options;
use raid::metadata::create::Identities;
use raid::metadata::intent_bitmap::DIRTY;
use raid::metadata::{CreateOptions, Shape, create};
use raid::{Consistency, Level};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

/// An array.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Its level.
    pub level: Level,
    /// Number of members.
    pub members: usize,
    /// Number of members that may be lost.
    pub redundancy: usize,
    /// Its mechanism of consistency.
    pub consistency: Consistency,
}

const DISK_BYTES: usize = 320 << 10;
const STRIP: u64 = 4096;
/// Nanoseconds since 1970.
pub const WALL_NS: u64 = 1_700_000_000_000_000_000;
/// Sectors that are written: few, so that most are rewritten.
const SECTORS: u64 = 144;
/// Without writes for this time no region is marked as dirty.
const MARKS_GO_NS: u64 = 50_000_000;

impl Plan {
    fn options(&self) -> CreateOptions {
        let shape = Shape {
            strip_bytes: Some(STRIP as u32),
            lanes: (self.consistency == Consistency::Ppl || self.level != Level::Raid1)
                .then_some((2, 32 << 10)),
            region_bytes: Some(16 << 10),
            consistency: Some(self.consistency),
            data: (self.level == Level::NPlusM).then_some(self.members - self.redundancy),
            parity: (self.level == Level::NPlusM).then_some(self.redundancy),
            ..Shape::new("log", self.level)
        };
        let owner = "host".to_owned();
        CreateOptions {
            shape,
            force: true,
            zeroes: true,
            owner,
            now_ns: WALL_NS,
            identities: Identities::Core,
        }
    }
}

/// Starts the array on these disks. All random choices come from the core.
pub async fn start(disks: &[Arc<dyn Device>], force: bool) -> Result<Arc<Array>, String> {
    let candidate = |disk: &Arc<dyn Device>| Candidate {
        name: disk.name().to_owned(),
        device: Ok(disk.clone()),
        is_named: false,
    };
    let wanted = Wanted { run: true, force, ..Wanted::default() };
    let selection = select(disks.iter().map(candidate).collect(), &wanted).await;
    let selection = selection.map_err(|error| error.to_string())?;
    let (assembly, found) = (selection.assembly, selection.found);
    let start = Start::new(assembly, WALL_NS, true, |member| found.get(&member.name).cloned());
    Array::start(start).await.map_err(|error| error.to_string())
}

/// Fills a sector with the content of a tag; tag 0 is zeroes.
pub fn fill(sector: &mut [u8], tag: u64, lba: u64) {
    let mut state = tag;
    for word in sector.chunks_exact_mut(8) {
        word.copy_from_slice(&state.to_le_bytes());
        state = if tag == 0 { 0 } else { state.wrapping_mul(0xd129_0d4b_32ab_9185).wrapping_add(lba | 1) };
    }
}

/// The user of the array.
struct Client {
    channel: Rc<dyn Channel>,
    /// Flags that make a write durable before it is acknowledged.
    flags: Flags,
    log: Log,
    next: Cell<u64>,
}

impl Client {
    fn new(array: &Arc<Array>, log: &Log, first: u64) -> Client {
        let is_plain = array.config().geometry.parity == 0;
        assert!(is_plain || !array.limits().volatile_cache, "arrays with redundancy write through");
        let flags = if is_plain { Flags::FUA } else { Flags::NONE };
        let channel = array.open_channel().expect("a channel");
        Client { channel, flags, log: log.clone(), next: Cell::new(first) }
    }

    fn begin(&self, is_zero: bool, lba: u64, count: u64) -> u64 {
        let write = self.next.replace(self.next.get() + 1);
        let tag = if is_zero { 0 } else { write };
        self.log.note(Note::Begin { write, tag, sectors: lba..lba + count });
        write
    }

    fn end(&self, write: u64, result: IoResult) -> IoResult {
        result.expect("no request fails");
        self.log.note(Note::Acknowledged { write });
        Ok(())
    }

    async fn write(&self, lba: u64, count: u64) -> IoResult {
        let write = self.begin(false, lba, count);
        let mut buffer = reactor::current().buffers().take(count as usize * SECTOR).await;
        let sectors = buffer.as_mut_slice().chunks_exact_mut(SECTOR);
        (lba..).zip(sectors).for_each(|(lba, sector)| fill(sector, write, lba));
        let (_, result) = buffer.transfer(&*self.channel, Op::Write, self.flags, lba * SECTOR as u64).await;
        self.end(write, result)
    }

    async fn zero(&self, lba: u64, count: u64) -> IoResult {
        let write = self.begin(true, lba, count);
        let req = Request::write_zeroes(count * SECTOR as u64, self.flags);
        let result = self.channel.submit(&req, lba * SECTOR as u64).await;
        self.end(write, result)
    }

    /// Some writes, in sequence or several at once: within a strip, over several, whole stripes.
    async fn work(&self, rounds: u64) {
        let core = reactor::current();
        for _ in 0..rounds {
            let third = SECTORS / 3;
            let lens = [1, 3, 8, 11, 24, 30];
            let places = [0, 1, 2].map(|part| {
                let len = lens[(core.random_u64() % 6) as usize];
                let at = core.random_u64() % (third - len + 1);
                (part * third + if len == 24 { at / 24 * 24 } else { at }, len)
            });
            let at_once = 1 + (core.random_u64() % 3) as usize;
            let writes = places[..at_once].iter().map(|(at, len)| IoFuture::new(self.write(*at, *len)));
            join_all(writes).await.expect("no request fails");
        }
        self.zero(core.random_u64() % (SECTORS - 20), 20).await.expect("no request fails");
    }
}

/// Fails a member while the array is used, and replaces it with a new disk.
async fn lose_and_replace(plan: Plan, array: &Arc<Array>, client: &Client, new: Arc<dyn Device>) {
    client.log.note(Note::Redundancy(plan.redundancy - 1));
    let is_exposed =
        plan.consistency == Consistency::Bitmap && !matches!(plan.level, Level::Raid1 | Level::Raid10);
    client.log.note(Note::Exposed(is_exposed));
    array.fail(1).await.expect("parity stands for it");
    if is_exposed {
        reactor::current().sleep(MARKS_GO_NS).await;
        assert_eq!(array.count_regions(DIRTY), 0);
        client.log.note(Note::Exposed(false));
    }
    client.work(6).await;

    let options = Options { checkpoint_bytes: 32 << 10, ..Options::default() };
    let jobs = array.keep(options).expect("a keeper");
    jobs.add(new).await.expect("it fits");
    client.work(4).await;
    jobs.idle().await;
    assert!(!array.table().is_degraded(), "{:?}", jobs.status());
    client.log.note(Note::Redundancy(plan.redundancy));
    jobs.stop().await;
}

/// A live member is copied to a new disk while the array is used, and gives its slot to the copy.
async fn replace_live(array: &Arc<Array>, client: &Client, new: Arc<dyn Device>) {
    let jobs = array.keep(Options::default()).expect("a keeper");
    jobs.replace(0, new.clone()).await.expect("it fits");
    client.work(2).await;
    jobs.idle().await;
    let own = array.members().attached(0)[0].clone().expect("a member");
    assert!(Arc::ptr_eq(&own.device, &new) && !array.table().is_degraded(), "{:?}", jobs.status());
    jobs.stop().await;
}

/// Runs the whole life; returns the disks' size and number.
pub async fn live(plan: Plan, log: Log) -> (usize, usize) {
    let new_disk = |index| -> Arc<dyn Device> { Arc::new(Disk::logged(index, DISK_BYTES, &log)) };
    let mut disks: Vec<Arc<dyn Device>> = (0..plan.members).map(new_disk).collect();
    create(&disks, &plan.options()).await.expect("it is made");
    log.note(Note::Created);
    log.note(Note::Redundancy(plan.redundancy));
    let array = start(&disks, false).await.expect("it starts");
    let client = Client::new(&array, &log, 1);
    client.work(8).await;

    if plan.redundancy > 0 {
        let new = new_disk(plan.members);
        disks.push(new.clone());
        lose_and_replace(plan, &array, &client, new).await;
        let new = new_disk(plan.members + 1);
        disks.push(new.clone());
        replace_live(&array, &client, new).await;
    }
    client.work(3).await;
    let next = client.next.get();
    drop(client);
    array.stop().await.expect("it stops");
    drop(array);

    let array = start(&disks, false).await.expect("it starts again");
    let client = Client::new(&array, &log, next);
    client.work(3).await;
    drop(client);
    array.stop().await.expect("it stops again");
    (DISK_BYTES, disks.len())
}
