//! Driver `io_uring`: regular files and block devices of this host.

use super::{FileFacts, UringFile, probe};
use crate::blkio::{
    Capacity, Codes, Driver, DriverKind, Error, Properties, Region, Result, Source, Spec, Value,
    check_num_entries, open_ring, source, take_fd,
};
use crate::direct::DirectQueue;
use std::path::Path;
use std::sync::Arc;

/// The driver of the library.
pub static DRIVER: DriverKind = DriverKind { name: "io_uring", create: || Ok(Box::new(IoUring::new()?)) };

struct IoUring {
    file: Option<Arc<UringFile>>,
}

impl IoUring {
    fn new() -> Result<IoUring> {
        probe().map_err(|e| Error::os("io_uring", &e))?;
        Ok(IoUring { file: None })
    }

    fn file(&self) -> &Arc<UringFile> {
        self.file.as_ref().expect("the instance is connected")
    }
}

impl Driver for IoUring {
    fn specs(&self) -> Vec<Spec> {
        vec![
            Spec::setting("direct", false),
            Spec::setting("fd", -1),
            Spec::setting("path", ""),
            Spec::tuning("num-entries", 128),
        ]
    }

    fn can_add_queues(&self) -> bool {
        true
    }

    fn codes(&self) -> Codes {
        Codes::Kernel
    }

    fn check(&self, name: &str, value: &Value) -> Result<()> {
        check_num_entries(name, value)
    }

    fn connect(&mut self, p: &mut Properties) -> Result<()> {
        let file = match source(p)? {
            Source::Path(path) => UringFile::open(Path::new(&path), p.bool("direct"), p.bool("read-only"))
                .map_err(|e| Error::os(&format!("cannot open {path}"), &e))?,
            Source::Fd(fd) => take_fd(fd, |owned| {
                UringFile::from_fd(owned).map_err(|(e, owned)| {
                    (Error::os(&format!("cannot use the file descriptor {fd}"), &e), owned)
                })
            })?,
        };
        state_facts(p, &file);
        self.file = Some(Arc::new(file));
        Ok(())
    }

    fn start(&mut self, _: &Properties) -> Result<()> {
        Ok(())
    }

    fn open_queue(&mut self, p: &Properties, is_poll: bool) -> Result<Box<dyn DirectQueue>> {
        open_ring(p, |entries| self.file().open_queue(entries, is_poll))
    }

    fn capacity(&self) -> Capacity {
        let file = self.file().clone();
        Arc::new(move || file.capacity().map_err(|e| Error::os("cannot learn the size", &e)))
    }

    fn map_region(&mut self, _: &Region) -> Result<()> {
        // Registering buffers would pin them, and a program that gives memory back to the system
        // relies on `may-pin-mem-regions` being false.
        Ok(())
    }

    fn unmap_region(&mut self, _: &Region) {}

    fn canceller(&self) -> Option<Arc<dyn Fn() + Send + Sync>> {
        None
    }
}

fn state_facts(p: &mut Properties, file: &UringFile) {
    let FileFacts { is_block_device, offset_alignment, memory_alignment, .. } = *file.facts();
    let facts = file.facts();
    let optimal = facts.physical_block_size.max(offset_alignment);
    let optimal_size = if facts.optimal_io_size.is_multiple_of(optimal) { facts.optimal_io_size } else { 0 };
    // Offsets of files have no granularity of discard, but a multiple of the request's alignment is
    // promised.
    let discard_alignment = if is_block_device { facts.discard_granularity } else { offset_alignment };
    p.put("fd", file.fd());
    p.put("direct", facts.is_direct);
    p.put("read-only", facts.read_only);
    p.put("can-grow", !is_block_device);
    p.put("supports-poll-queues", facts.can_poll);
    p.put("supports-fua-natively", facts.native_fua);
    p.put("flush-needed", facts.needs_flush);
    p.put("request-alignment", offset_alignment as i32);
    p.put("buf-alignment", memory_alignment as i32);
    p.put("mem-region-alignment", u64::from(memory_alignment));
    p.put("optimal-buf-alignment", 4096.max(memory_alignment) as i32);
    p.put("optimal-io-alignment", optimal as i32);
    p.put("optimal-io-size", optimal_size as i32);
    p.put("max-segments", file.max_segments() as i32);
    p.put("discard-alignment", discard_alignment as i32);
    p.put("discard-alignment-offset", facts.discard_offset as i32);
}
