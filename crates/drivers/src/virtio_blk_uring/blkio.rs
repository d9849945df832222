//! Driver `virtio-blk-uring`: disks of the kernel's virtio-blk driver by pass-through.

use super::{OpenError, VirtioBlkUringFile};
use crate::blkio::{
    Capacity, Codes, Driver, DriverKind, Error, Properties, Region, Result, Source, Spec, Value,
    check_num_entries, memory_region, open_ring, source, state_limits, take_fd,
};
use crate::direct::DirectQueue;
use std::path::Path;
use std::sync::Arc;

/// The driver of the library.
pub static DRIVER: DriverKind =
    DriverKind { name: "virtio-blk-uring", create: || Ok(Box::new(VirtioBlkUring::new())) };

struct VirtioBlkUring {
    file: Option<VirtioBlkUringFile>,
}

impl VirtioBlkUring {
    fn new() -> VirtioBlkUring {
        VirtioBlkUring { file: None }
    }

    fn file(&self) -> &VirtioBlkUringFile {
        self.file.as_ref().expect("the instance is connected")
    }
}

impl Driver for VirtioBlkUring {
    fn specs(&self) -> Vec<Spec> {
        vec![Spec::setting("fd", -1), Spec::setting("path", ""), Spec::tuning("num-entries", 128)]
    }

    fn can_add_queues(&self) -> bool {
        true
    }

    fn codes(&self) -> Codes {
        Codes::Virtio
    }

    fn check(&self, name: &str, value: &Value) -> Result<()> {
        check_num_entries(name, value)
    }

    fn connect(&mut self, p: &mut Properties) -> Result<()> {
        let failed = |what: &str, error: &OpenError| Error::new(error.to_errno(), format!("{what}: {error}"));
        let file = match source(p)? {
            Source::Path(path) => VirtioBlkUringFile::open(Path::new(&path), p.bool("read-only"), true)
                .map_err(|e| failed(&format!("cannot open {path}"), &e))?,
            Source::Fd(fd) => take_fd(fd, |owned| {
                VirtioBlkUringFile::from_fd(owned, true).map_err(|(e, owned)| {
                    (failed(&format!("cannot use the file descriptor {fd}"), &e), owned)
                })
            })?,
        };
        state_facts(p, &file);
        self.file = Some(file);
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
        Arc::new(move || {
            file.capacity().map_err(|e| Error::new(e.to_errno(), format!("cannot learn the size: {e}")))
        })
    }

    fn map_region(&mut self, region: &Region) -> Result<()> {
        self.file().map_region(&memory_region(region));
        Ok(())
    }

    fn unmap_region(&mut self, region: &Region) {
        self.file().unmap_region(&memory_region(region));
    }

    fn canceller(&self) -> Option<Arc<dyn Fn() + Send + Sync>> {
        None
    }
}

fn state_facts(p: &mut Properties, file: &VirtioBlkUringFile) {
    let limits = file.limits();
    state_limits(p, &limits);
    let optimal = limits.physical_block_size.max(limits.block_size);
    if !limits.optimal_io_size.is_multiple_of(optimal) {
        p.put("optimal-io-size", 0);
    }
    p.put("fd", file.fd());
    p.put("supports-poll-queues", file.facts().can_poll);
    p.put("may-pin-mem-regions", true);
    p.put("buf-alignment", limits.memory_alignment as i32);
    p.put("mem-region-alignment", u64::from(limits.memory_alignment));
    p.put("optimal-buf-alignment", 4096.max(limits.memory_alignment) as i32);
}
