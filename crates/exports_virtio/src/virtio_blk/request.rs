//! One request of a guest: parsing, execution, status.

use block::{Device, Flags, IoError, IoFuture, IoResult, Op, Request};
use exports::{Error, QueueStats, Target};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use virtio::blk::{self, Command, ID_BYTES, ParseError, RANGE_F_UNMAP, Range, SECTOR_BYTES};
use virtio::device::Chain;

/// The parameters of a disk, as the control thread hands them over.
pub(crate) struct DiskConfig {
    pub(crate) device: Arc<dyn Device>,
    /// The reply to GET_ID.
    pub(crate) id: [u8; ID_BYTES],
    pub(crate) is_read_only: bool,
    /// Whether writes must be durable when they complete; may change at any time.
    pub(crate) is_write_through: Arc<AtomicBool>,
}

/// The disk of a queue, on the queue's core.
pub(super) struct Disk {
    target: Target,
    id: [u8; ID_BYTES],
    is_write_through: Arc<AtomicBool>,
}

impl Disk {
    /// Opens the device on the calling core, or shares an open channel.
    pub(super) fn open(config: DiskConfig) -> Result<Disk, Error> {
        let DiskConfig { device, id, is_read_only, is_write_through } = config;
        Ok(Disk { target: Target::open(device, is_read_only)?, id, is_write_through })
    }

    /// Executes the request in `chain` and writes its status. Returns the number of bytes written
    /// for the guest.
    ///
    /// # Errors
    /// When the request has no space for a status.
    #[inline]
    pub(super) async fn execute(&self, chain: &Chain, stats: &QueueStats) -> Result<u32, ParseError> {
        let request = blk::parse(chain)?;
        let result = match request.command {
            Command::Read { sector, data } => {
                let result = self.submit(&Request::read(data), sector).await;
                stats.count_request(Op::Read, data.len() as u64);
                result
            }
            Command::Write { sector, data } => {
                let result = self.modify(&Request::write(data, self.durability()), sector).await;
                stats.count_request(Op::Write, data.len() as u64);
                result
            }
            command => self.execute_rare(command, stats).await,
        };
        if result.is_err() {
            stats.count_failure();
        }
        request.status.set(blk::status(result));
        // A guest may rely only on the status of a failed request. Its buffers may be longer than
        // the used ring can count.
        Ok(if result.is_ok() { request.writable_len.saturating_add(1) } else { 1 })
    }

    async fn execute_rare(&self, command: Command<'_>, stats: &QueueStats) -> IoResult {
        match command {
            Command::Read { .. } | Command::Write { .. } => Err(IoError::Invalid), // handled by the caller
            Command::Flush => {
                let result = self.target.flush().await;
                stats.count_request(Op::Flush, 0);
                result
            }
            Command::GetId(data) => {
                data.copy_from(&self.id);
                Ok(())
            }
            Command::Discard(ranges) => {
                let result = self.run_ranges(ranges, |range| match range.flags {
                    0 => Ok(Request::discard(range_bytes(range))),
                    _ => Err(IoError::Unsupported),
                });
                let result = result.await;
                stats.count_request(Op::Discard, 0);
                result
            }
            Command::WriteZeroes(ranges) => {
                let flags = self.durability();
                let result = self.run_ranges(ranges, |range| match range.flags {
                    0 => Ok(Request::write_zeroes(range_bytes(range), flags.with(Flags::NO_UNMAP))),
                    RANGE_F_UNMAP => Ok(Request::write_zeroes(range_bytes(range), flags)),
                    _ => Err(IoError::Unsupported),
                });
                let result = result.await;
                stats.count_request(Op::WriteZeroes, 0);
                result
            }
            Command::Unknown(_) => Err(IoError::Unsupported),
            Command::Malformed(error) => Err(error),
        }
    }

    /// Executes every range, even after an error. Returns the first error.
    async fn run_ranges(
        &self,
        ranges: blk::Ranges<'_>,
        request: impl Fn(&Range) -> Result<Request<'static>, IoError>,
    ) -> IoResult {
        let mut result = Ok(());
        for range in ranges {
            let ended = match request(&range) {
                Ok(request) => self.modify(&request, range.sector).await,
                Err(error) => Err(error),
            };
            result = result.and(ended);
        }
        result
    }

    #[inline]
    fn modify<'a>(&'a self, request: &'a Request<'a>, sector: u64) -> IoFuture<'a> {
        match sector.checked_mul(SECTOR_BYTES) {
            Some(offset) => self.target.modify(request, offset),
            None => IoFuture::ready(Err(IoError::OutOfRange)),
        }
    }

    #[inline]
    fn submit<'a>(&'a self, request: &'a Request<'a>, sector: u64) -> IoFuture<'a> {
        match sector.checked_mul(SECTOR_BYTES) {
            Some(offset) => self.target.submit(request, offset),
            None => IoFuture::ready(Err(IoError::OutOfRange)),
        }
    }

    /// The durability flags of a write.
    #[inline]
    fn durability(&self) -> Flags {
        if self.is_write_through.load(Ordering::Relaxed) { self.target.durable() } else { Flags::NONE }
    }
}

fn range_bytes(range: &Range) -> u64 {
    u64::from(range.num_sectors) * SECTOR_BYTES
}
