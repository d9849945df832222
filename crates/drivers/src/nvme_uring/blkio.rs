//! Driver `nvme-io_uring`: NVMe namespaces by pass-through, zones included.

use super::{NvmeFile, OpenError};
use crate::blkio::{
    Capacity, Driver, DriverKind, Error, Properties, Region, Result, Source, Spec, Value, check_num_entries,
    open_ring, source, state_limits, take_fd,
};
use crate::direct::DirectQueue;
use std::path::Path;
use std::sync::Arc;

/// The driver of the library.
pub static DRIVER: DriverKind = DriverKind { name: "nvme-io_uring", create: || Ok(Box::new(Nvme::new())) };

/// `zoned`: only sequential writes.
const HOST_MANAGED: i32 = 2;

struct Nvme {
    file: Option<NvmeFile>,
}

impl Nvme {
    fn new() -> Nvme {
        Nvme { file: None }
    }

    fn file(&self) -> &NvmeFile {
        self.file.as_ref().expect("the instance is connected")
    }
}

impl Driver for Nvme {
    fn specs(&self) -> Vec<Spec> {
        vec![
            Spec::setting("fd", -1),
            Spec::setting("path", ""),
            Spec::tuning("num-entries", 128),
            Spec::fact("zoned", 0),
            Spec::fact("max-active-zones", 0),
            Spec::fact("max-open-zones", 0),
            Spec::fact("zone-size", 0u64),
            Spec::fact("nr-zones", 0u64),
            Spec::fact("append-support", false),
            Spec::fact("zone-append-max-bytes", 0u64),
        ]
    }

    fn can_add_queues(&self) -> bool {
        true
    }

    fn check(&self, name: &str, value: &Value) -> Result<()> {
        check_num_entries(name, value)
    }

    fn connect(&mut self, p: &mut Properties) -> Result<()> {
        let failed = |what: &str, error: &OpenError| Error::new(error.to_errno(), format!("{what}: {error}"));
        let file = match source(p)? {
            Source::Path(path) => NvmeFile::open(Path::new(&path), p.bool("read-only"))
                .map_err(|e| failed(&format!("cannot open {path}"), &e))?,
            Source::Fd(fd) => take_fd(fd, |owned| {
                NvmeFile::from_fd(owned).map_err(|(e, owned)| {
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

    fn map_region(&mut self, _: &Region) -> Result<()> {
        Ok(())
    }

    fn unmap_region(&mut self, _: &Region) {}

    fn canceller(&self) -> Option<Arc<dyn Fn() + Send + Sync>> {
        None
    }
}

fn state_facts(p: &mut Properties, file: &NvmeFile) {
    let facts = file.facts();
    let limits = facts.limits(p.bool("read-only"));
    let int = |value: u32| i32::try_from(value).unwrap_or(0);
    let optimal = limits.physical_block_size.max(limits.block_size);
    state_limits(p, &limits);
    if !limits.optimal_io_size.is_multiple_of(optimal) {
        p.put("optimal-io-size", 0);
    }
    p.put("fd", file.fd());
    p.put("supports-poll-queues", facts.can_poll);
    p.put("buf-alignment", int(limits.memory_alignment));
    p.put("mem-region-alignment", u64::from(limits.memory_alignment));
    p.put("optimal-io-alignment", int(optimal));
    if let Some(zones) = &facts.zones {
        p.put("zoned", HOST_MANAGED);
        p.put("max-active-zones", int(zones.max_active));
        p.put("max-open-zones", int(zones.max_open));
        p.put("zone-size", zones.zone_size);
        p.put("nr-zones", zones.zones);
        p.put("append-support", zones.max_append.is_some());
        p.put("zone-append-max-bytes", u64::from(zones.max_append.unwrap_or(0)));
    }
}
