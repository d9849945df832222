//! An image that a command changes while nothing else has it open.

use crate::error::Problem;
use crate::header::{Header, autoclear};
use crate::image::read_header;
use crate::live::file::File;
use crate::reader::Reader;
use block::{Device, Flags};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Places of fields in the header.
pub(crate) const INCOMPATIBLE: usize = 72;
const AUTOCLEAR: usize = 88;

/// See the module.
pub(crate) struct Offline {
    pub file: Rc<File>,
    /// The header as it stands in the file.
    pub header: Header,
}

impl Offline {
    /// Reads the header. Changes nothing.
    ///
    /// # Errors
    /// When it is invalid or cannot be read, or the file is open for reading only.
    pub(crate) async fn open(device: &Arc<dyn Device>) -> Result<Offline, Problem> {
        let limits = device.limits();
        if limits.read_only {
            return Err(Problem::Refused("the file is open for reading only".into()));
        }
        let header = read_header(&crate::image::open_reader(&**device)?).await?;
        let capacity = Arc::new(AtomicU64::new(limits.capacity));
        let file = File::open(device, header.cluster_size(), &capacity);
        let file = file.map_err(|error| Problem::Refused(error.to_string()))?;
        Ok(Offline { file: Rc::new(file), header })
    }

    pub(crate) fn reader(&self) -> &Reader {
        &self.file.reader
    }

    /// Prepares the first write: the file ends with a whole cluster, and features are cleared that
    /// writers must know.
    ///
    /// # Errors
    /// The device's.
    pub(crate) async fn begin(&mut self) -> Result<(), Problem> {
        let end = self.file.capacity().next_multiple_of(self.header.cluster_size());
        if let Err(error) = self.file.resize(end) {
            tracing::debug!(%error, "an image has a fixed size");
        }
        let known = self.header.autoclear & (autoclear::BITMAPS | autoclear::RAW_DATA);
        if known != self.header.autoclear {
            self.write_header(AUTOCLEAR, &known.to_be_bytes()).await?;
            self.header.autoclear = known;
        }
        Ok(())
    }

    /// Replaces bytes of a part of the image.
    ///
    /// # Errors
    /// The device's.
    pub(crate) async fn write(&self, part: &'static str, offset: u64, bytes: &[u8]) -> Result<(), Problem> {
        let written = self.file.patch(offset, bytes, Flags::NONE).await;
        written.map_err(|error| Problem::Write { part, offset, error })
    }

    /// Replaces bytes of the header's first sector, all at once, and makes them durable. Everything
    /// that was written before is durable first.
    ///
    /// # Errors
    /// The device's.
    pub(crate) async fn write_header(&self, at: usize, bytes: &[u8]) -> Result<(), Problem> {
        debug_assert!(at + bytes.len() <= 512, "one sector");
        self.flush().await?;
        let written = self.file.patch(at as u64, bytes, Flags::FUA).await;
        written.map_err(|error| Problem::Write { part: "the header", offset: at as u64, error })
    }

    /// Makes everything durable that was written.
    ///
    /// # Errors
    /// The device's.
    pub(crate) async fn flush(&self) -> Result<(), Problem> {
        let flushed = self.file.flush().await;
        flushed.map_err(|error| Problem::Write { part: "the file's cache", offset: 0, error })
    }
}
