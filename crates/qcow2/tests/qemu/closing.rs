//! The close of an image that is written: nothing of it is in flight afterwards.

use crate::over::over;
use crate::repair::writable;
use crate::tools::Folder;
use block::{Channel, Device, Flags, IoError, IoFuture, Op, Request, StatusReport};
use qcow2::{Image, LiveImage, Others};
use reactor::{CoreConfig, Cores, current, yield_now};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const DELAY_NS: u64 = 30_000_000;

/// Has discards take long, and flushes fail on request.
#[derive(Default)]
struct Disturbance {
    discarding: AtomicU64,
    is_failing: AtomicBool,
}

struct DisturbedChannel(Rc<dyn Channel>, Arc<Disturbance>);

impl Channel for DisturbedChannel {
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        match req.op {
            Op::Flush if self.1.is_failing.load(Ordering::Relaxed) => {
                IoFuture::ready(Err(IoError::DeviceGone))
            }
            Op::Discard => IoFuture::new(async move {
                self.1.discarding.fetch_add(1, Ordering::Relaxed);
                current().sleep(DELAY_NS).await;
                let result = self.0.submit(req, offset).await;
                self.1.discarding.fetch_sub(1, Ordering::Relaxed);
                result
            }),
            _ => self.0.submit(req, offset),
        }
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        self.0.block_status(report, offset, len)
    }
}

#[test]
fn an_image_that_cannot_be_flushed_closes_after_its_last_request() {
    let folder = Folder::new();
    folder.img("create -f qcow2 -o cluster_size=4k disk 4M");
    let disturbance = Arc::new(Disturbance::default());
    let shared = disturbance.clone();
    let device = over(writable(&folder.path("disk")), false, move |channel| {
        Rc::new(DisturbedChannel(channel, shared.clone()))
    });
    let image = reactor::run(async move { Image::open(device).await.unwrap() });
    // A core of its own outlives the image, and what is left in flight would not end the process.
    let cores = Cores::start(&[CoreConfig::default()]).unwrap();
    let live = LiveImage::open_on(cores.get(0), image, Others::default(), 1 << 20, None).unwrap();
    let live = Arc::new(live);
    let (used, shared) = (live.clone(), disturbance.clone());
    let worked = cores.get(0).block_on(move |_| async move {
        let channel = used.open_channel().unwrap();
        let mut buffer = current().buffers().take(64 << 10).await;
        buffer.as_mut_slice().fill(7);
        buffer.transfer(&*channel, Op::Write, Flags::NONE, 0).await.1.unwrap();
        channel.submit(&Request::discard(64 << 10), 0).await.unwrap();
        channel.submit(&Request::flush(), 0).await.unwrap();
        // The clusters become free in the background.
        while shared.discarding.load(Ordering::Relaxed) == 0 {
            yield_now().await;
        }
        shared.is_failing.store(true, Ordering::Relaxed);
    });
    worked.unwrap();
    drop(live);
    assert_eq!(disturbance.discarding.load(Ordering::Relaxed), 0, "a request is in flight");
    disturbance.is_failing.store(false, Ordering::Relaxed);
    drop(cores);
    folder.img("check -r leaks disk");
}
