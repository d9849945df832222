//! Random requests to an image that is open for reading and writing.

use crate::tools::{self, PART};
use base::Rng;
use block::{Channel, Device, Flags, Op, Request};
use drivers::io_uring::{Options, UringDevice};
use qcow2::{Error, Image, LiveImage, Others, RestartLog};
use reactor::{CoreConfig, Cores};
use std::path::Path;
use std::sync::Arc;

/// Opens an image for reading and writing, with little memory for tables.
pub fn try_open(path: &Path, backing: Option<Arc<dyn Device>>) -> Result<LiveImage, Error> {
    try_open_with(path, backing, None)
}

/// As [`try_open`], with a restart log.
pub fn try_open_with(
    path: &Path,
    backing: Option<Arc<dyn Device>>,
    log: Option<RestartLog>,
) -> Result<LiveImage, Error> {
    let device: Arc<dyn Device> = Arc::new(UringDevice::open(&Options::new(path)).unwrap());
    let image = reactor::run(async move { Image::open(device).await })?;
    LiveImage::open(image, Others { backing, data_file: None }, 16 << 10, log)
}

/// A model of a disk, and random requests to both.
pub struct Disk {
    pub bytes: Vec<u8>,
    pub cluster: u64,
    pub has_zeroes: bool,
    pub has_discard: bool,
}

impl Disk {
    /// Makes requests on a core of its own, and compares what is read.
    pub fn work(&mut self, device: &Arc<LiveImage>, seed: u64, requests: u64) {
        let cores = Cores::start(&[CoreConfig::default()]).unwrap();
        let mut disk = std::mem::replace(self, Disk { bytes: Vec::new(), ..*self });
        let device = device.clone();
        let worked = cores.get(0).block_on(move |_| async move {
            let channel = device.open_channel().unwrap();
            let mut rng = Rng::new(seed);
            for _ in 0..requests {
                disk.request(&*channel, &mut rng).await;
            }
            disk
        });
        *self = worked.unwrap();
    }

    async fn request(&mut self, channel: &dyn Channel, rng: &mut Rng) {
        let blocks = self.bytes.len() as u64 / 512;
        let at = rng.below(blocks) * 512;
        let most = (5 * self.cluster).min(PART).min(self.bytes.len() as u64 - at) / 512;
        let len = (1 + rng.log_uniform(most - 1)).min(most) * 512;
        let range = at as usize..(at + len) as usize;
        match rng.below(16) {
            0..8 => {
                let mut buffer = reactor::current().buffers().take(len as usize).await;
                buffer.as_mut_slice().fill_with(|| 1 + rng.draw() as u8 % 255);
                self.bytes[range].copy_from_slice(buffer.as_slice());
                let flags = if rng.one_in(4) { Flags::FUA } else { Flags::NONE };
                assert_eq!(buffer.transfer(channel, Op::Write, flags, at).await.1, Ok(()), "{at}+{len}");
            }
            8 | 9 if self.has_zeroes => {
                let flags = if rng.one_in(2) { Flags::NO_UNMAP } else { Flags::NONE };
                assert_eq!(
                    channel.submit(&Request::write_zeroes(len, flags), at).await,
                    Ok(()),
                    "{at}+{len}"
                );
                self.bytes[range].fill(0);
            }
            10 if self.has_discard => {
                assert_eq!(channel.submit(&Request::discard(len), at).await, Ok(()), "{at}+{len}");
                // Clusters without a backing file read as zeroes then, and all others as before.
                let (read, _) = tools::read(channel, at, len).await;
                for (was, is) in self.bytes[range].iter_mut().zip(read) {
                    assert!(is == *was || is == 0, "{at}+{len}");
                    *was = is;
                }
            }
            11 => assert_eq!(channel.submit(&Request::flush(), 0).await, Ok(())),
            _ => {
                let (read, result) = tools::read(channel, at, len).await;
                assert_eq!(result, Ok(()), "{at}+{len}");
                assert!(read == self.bytes[range], "a read of {at}+{len}");
            }
        }
    }
}
