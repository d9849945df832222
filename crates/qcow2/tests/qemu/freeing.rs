//! Clusters that become free: requests do not wait for that, the close of the image does.

use crate::over::over;
use crate::repair::writable;
use crate::tools::{self, Folder};
use block::{Channel, Device, IoError, IoFuture, Op, Request, StatusReport};
use qcow2::{Image, LiveImage, Others};
use reactor::{CoreConfig, Cores, current, yield_now};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Bytes of a request, many clusters.
const PART: u64 = 64 << 10;
const DELAY_NS: u64 = 30_000_000;
/// A test that waits for a discard that is held fails after these delays.
const MOST_DELAYS: usize = 1000;

/// Has discards take long, or as long as they are held, and flushes fail on request.
#[derive(Default)]
struct Disturbance {
    discards: AtomicU64,
    discarding: AtomicU64,
    is_holding: AtomicBool,
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
                self.1.discards.fetch_add(1, Ordering::Relaxed);
                self.1.discarding.fetch_add(1, Ordering::Relaxed);
                for _ in 0..MOST_DELAYS {
                    current().sleep(DELAY_NS).await;
                    if !self.1.is_holding.load(Ordering::Relaxed) {
                        break;
                    }
                }
                self.1.is_holding.store(false, Ordering::Relaxed);
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

/// Runs `work` with the only channel of an image of 8 MiB, and closes the image. Its core outlives
/// it: a request that is left in flight does not end the process.
fn with_image<F>(work: impl FnOnce(Rc<dyn Channel>, Arc<Disturbance>) -> F + Send + 'static) -> Closed
where
    F: Future<Output = ()> + 'static,
{
    let folder = Folder::new();
    folder.img("create -f qcow2 -o cluster_size=4k disk 8M");
    let disturbance = Arc::new(Disturbance::default());
    let shared = disturbance.clone();
    let device = over(writable(&folder.path("disk")), false, move |channel| {
        Rc::new(DisturbedChannel(channel, shared.clone()))
    });
    let image = reactor::run(async move { Image::open(device).await.unwrap() });
    let cores = Cores::start(&[CoreConfig::default()]).unwrap();
    let live = LiveImage::open_on(cores.get(0), image, Others::default(), 1 << 20, None).unwrap();
    let live = Arc::new(live);
    let (used, shared) = (live.clone(), disturbance.clone());
    let worked =
        cores.get(0).block_on(move |_| async move { work(used.open_channel().unwrap(), shared).await });
    worked.unwrap();
    drop(live);
    Closed { cores, disturbance, folder }
}

/// An image that was closed, and its core.
struct Closed {
    cores: Cores,
    disturbance: Arc<Disturbance>,
    folder: Folder,
}

async fn write(channel: &dyn Channel, parts: std::ops::Range<u64>) {
    for part in parts {
        tools::write(channel, part * PART, PART, 7).await.unwrap();
    }
}

/// Discards the first part of the disk, and waits until the file's clusters are being discarded.
async fn discard_first(channel: &dyn Channel, disturbance: &Disturbance) {
    channel.submit(&Request::discard(PART), 0).await.unwrap();
    channel.submit(&Request::flush(), 0).await.unwrap();
    while disturbance.discarding.load(Ordering::Relaxed) == 0 {
        yield_now().await;
    }
}

#[test]
fn clusters_are_taken_while_others_are_discarded() {
    let Closed { cores, folder, .. } = with_image(|channel, disturbance| async move {
        write(&*channel, 0..1).await;
        disturbance.is_holding.store(true, Ordering::Relaxed);
        discard_first(&*channel, &disturbance).await;
        // More than a core has in stock.
        write(&*channel, 1..100).await;
        channel.submit(&Request::flush(), 0).await.unwrap();
        let (discards, discarding) = (&disturbance.discards, &disturbance.discarding);
        assert_eq!(discarding.load(Ordering::Relaxed), 1, "a write has waited for the discard");
        assert_eq!(discards.load(Ordering::Relaxed), 1, "neighbours are discarded together");
        disturbance.is_holding.store(false, Ordering::Relaxed);
    });
    drop(cores);
    folder.img("check disk");
}

#[test]
fn an_image_that_cannot_be_flushed_closes_after_its_last_request() {
    let Closed { cores, disturbance, folder } = with_image(|channel, disturbance| async move {
        write(&*channel, 0..1).await;
        // The clusters become free in the background.
        discard_first(&*channel, &disturbance).await;
        disturbance.is_failing.store(true, Ordering::Relaxed);
    });
    assert_eq!(disturbance.discarding.load(Ordering::Relaxed), 0, "a request is in flight");
    disturbance.is_failing.store(false, Ordering::Relaxed);
    drop(cores);
    folder.img("check -r leaks disk");
}
