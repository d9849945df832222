//! Writes that use the same subcluster of the file at the same time.

use crate::disk::try_open;
use crate::over::over;
use crate::repair::writable;
use crate::tools::{Folder, file, read, write};
use block::{Channel, Device, IoError, IoFuture, Op, Request, StatusReport};
use qcow2::{Image, LiveImage, Others};
use reactor::{current, yield_now};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Bytes of a subcluster.
const UNIT: u64 = 2 << 10;
/// The subcluster that is written.
const PLACE: u64 = 3 * UNIT;

/// The order of the data writes to the file. The first one, of a whole subcluster, waits until the
/// second one begins, which waits until the first one has ended. The fourth one fails.
#[derive(Default)]
struct Script {
    is_on: AtomicBool,
    begun: AtomicU64,
    ended: AtomicU64,
}

struct ScriptedChannel(Rc<dyn Channel>, Arc<Script>);

impl Channel for ScriptedChannel {
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        // Metadata is written by flushes only.
        let Self(child, script) = self;
        if req.op != Op::Write || !script.is_on.load(Ordering::Relaxed) {
            return child.submit(req, offset);
        }
        IoFuture::new(async move {
            match script.begun.fetch_add(1, Ordering::Relaxed) {
                0 => wait_for(&script.begun, 2).await,
                1 => wait_for(&script.ended, 1).await,
                3 => return Err(IoError::Medium),
                _ => {}
            }
            let result = child.submit(req, offset).await;
            script.ended.fetch_add(1, Ordering::Relaxed);
            result
        })
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        self.0.block_status(report, offset, len)
    }
}

async fn wait_for(count: &AtomicU64, wanted: u64) {
    while count.load(Ordering::Relaxed) < wanted {
        yield_now().await;
    }
}

/// The write of a part of a subcluster copies the rest from the backing file. When it fails in
/// between, a write of the whole subcluster that has not ended keeps its data.
#[test]
fn a_failed_write_of_a_part_takes_nothing_from_one_of_the_whole_subcluster() {
    let folder = Folder::new();
    std::fs::write(folder.path("base.raw"), vec![9; 1 << 20]).unwrap();
    folder.img("create -f qcow2 -o extended_l2=on,cluster_size=64K -F raw -b base.raw disk.qcow2 1M");
    // The cluster gets its place.
    let first = try_open(&folder.path("disk.qcow2"), Some(file(&folder.path("base.raw")))).unwrap();
    reactor::run(async move {
        write(&*first.open_channel().unwrap(), 0, UNIT, 1).await.unwrap();
        drop(first);
    });

    let script = Arc::new(Script::default());
    let scripted = script.clone();
    let device = over(writable(&folder.path("disk.qcow2")), false, move |channel| {
        Rc::new(ScriptedChannel(channel, scripted.clone()))
    });
    let others = Others { backing: Some(file(&folder.path("base.raw"))), ..Others::default() };
    let image = reactor::run(async move { Image::open(device).await.unwrap() });
    let live = Arc::new(LiveImage::open(image, others, 1 << 20, None).unwrap());
    reactor::run(async move {
        let channel = live.open_channel().unwrap();
        script.is_on.store(true, Ordering::Relaxed);
        let failed = Rc::new(Cell::new(None));
        let (result, other) = (failed.clone(), live.open_channel().unwrap());
        current().spawn(async move {
            // It locks the entry while the other one writes.
            wait_for(&script.begun, 1).await;
            result.set(Some(write(&*other, PLACE + 512, 512, 8).await));
        });
        write(&*channel, PLACE, UNIT, 7).await.unwrap();
        while failed.get().is_none() {
            yield_now().await;
        }
        assert_eq!(failed.get(), Some(Err(IoError::Medium)));
        let (found, result) = read(&*channel, PLACE, UNIT).await;
        assert_eq!(result, Ok(()));
        assert!(found[..512].iter().all(|byte| *byte == 7), "{:?}", &found[..4]);
        assert!(found[1024..].iter().all(|byte| *byte == 7), "{:?}", &found[1024..1028]);
        drop(channel);
        drop(live);
    });
}
