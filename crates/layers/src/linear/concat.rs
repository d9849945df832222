//! Several devices, one after the other.

use block::{
    Channel, Device, DeviceError, Flags, IoFuture, IoResult, KernelBacking, Limits, MAX_JOINED, MemoryRegion,
    Op, Request, SharedLimits, StatusReport, join_all,
};
use std::rc::Rc;
use std::sync::Arc;

/// Limit of devices in one: a request may touch each, and a flush does.
pub const MAX_CHILDREN: usize = 256;

/// Several devices, one after the other, as one.
pub struct Concat {
    name: String,
    children: Arc<[Arc<dyn Device>]>,
    /// First byte of each child. The end of the last child is not stored, as it may grow.
    starts: Arc<[u64]>,
    limits: Arc<SharedLimits>,
}

impl Concat {
    /// Concatenates `children` in this order.
    ///
    /// # Errors
    /// Without children, with more than [`MAX_CHILDREN`], or if they have more than 2^64 bytes in
    /// total.
    pub fn new(children: Vec<Arc<dyn Device>>) -> Result<Concat, DeviceError> {
        let names: Vec<_> = children.iter().map(|c| c.name()).collect();
        let name = format!("concat({})", names.join(", "));
        if !(1..=MAX_CHILDREN).contains(&children.len()) {
            let message = format!("{} devices: 1 to {MAX_CHILDREN}", children.len());
            return Err(DeviceError::new(name, message));
        }
        let mut limits = children.iter().map(|c| c.limits()).reduce(strictest).expect("there is a child");
        let mut starts = Vec::with_capacity(children.len());
        let mut end = 0u64;
        for child in &children {
            starts.push(end);
            end = end
                .checked_add(whole_blocks(child.limits().capacity, &limits))
                .ok_or_else(|| DeviceError::new(&name, "more than 2^64 bytes in all"))?;
        }
        limits.capacity = end;
        let limits = SharedLimits::new(limits);
        Ok(Concat { name, children: children.into(), starts: starts.into(), limits })
    }
}

fn whole_blocks(capacity: u64, limits: &Limits) -> u64 {
    capacity & !(u64::from(limits.block_size) - 1)
}

/// Limits that both devices support. The capacity has no meaning.
fn strictest(a: Limits, b: Limits) -> Limits {
    let block_size = a.block_size.max(b.block_size);
    Limits {
        capacity: 0,
        block_size,
        physical_block_size: a.physical_block_size.max(b.physical_block_size),
        optimal_io_size: a.optimal_io_size.max(b.optimal_io_size),
        memory_alignment: a.memory_alignment.max(b.memory_alignment),
        max_transfer: (a.max_transfer.min(b.max_transfer) & !(block_size - 1)).max(block_size),
        max_segments: a.max_segments.min(b.max_segments),
        max_discard: a.max_discard.min(b.max_discard),
        discard_alignment: a.discard_alignment.max(b.discard_alignment),
        max_write_zeroes: a.max_write_zeroes.min(b.max_write_zeroes),
        read_only: a.read_only || b.read_only,
        volatile_cache: a.volatile_cache || b.volatile_cache,
        native_fua: a.native_fua && b.native_fua,
        rotational: a.rotational || b.rotational,
    }
}

impl Device for Concat {
    fn name(&self) -> &str {
        &self.name
    }

    fn limits(&self) -> Limits {
        self.limits.get()
    }

    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        let children = self.children.iter().map(|c| c.open_channel()).collect::<Result<_, _>>()?;
        let (starts, limits) = (self.starts.clone(), self.limits.clone());
        Ok(Rc::new(ConcatChannel { children, starts, limits }))
    }

    /// Only the last child may grow. The others must not have shrunk below their part.
    fn refresh(&self) -> Result<Limits, DeviceError> {
        let ends = self.starts[1..].iter().copied().map(Some).chain([None]);
        for ((child, start), end) in self.children.iter().zip(&*self.starts).zip(ends) {
            let capacity = whole_blocks(child.refresh()?.capacity, self.limits.fixed());
            match end {
                Some(end) if capacity < end - start => {
                    let message = format!("{} shrank to {capacity} of {} bytes", child.name(), end - start);
                    return Err(DeviceError::new(&self.name, message));
                }
                Some(_) => {}
                None => self.limits.set_capacity(start.saturating_add(capacity)),
            }
        }
        Ok(self.limits.get())
    }

    fn map_region(&self, region: &MemoryRegion) -> Result<(), DeviceError> {
        for (i, child) in self.children.iter().enumerate() {
            if let Err(error) = child.map_region(region) {
                self.children[..i].iter().for_each(|c| c.unmap_region(region));
                return Err(error);
            }
        }
        Ok(())
    }

    fn unmap_region(&self, region: &MemoryRegion) {
        self.children.iter().for_each(|c| c.unmap_region(region));
    }

    fn takes_registered(&self) -> bool {
        self.children.iter().all(|child| child.takes_registered())
    }

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        match &*self.children {
            [child] => child.kernel_backing(),
            _ => Err(DeviceError::not_in_kernel(&self.name)),
        }
    }
}

struct ConcatChannel {
    children: Vec<Rc<dyn Channel>>,
    starts: Arc<[u64]>,
    limits: Arc<SharedLimits>,
}

impl ConcatChannel {
    /// The child that holds byte `offset`, its first byte, and the first byte of the next child.
    #[inline]
    fn locate(&self, offset: u64) -> (usize, u64, u64) {
        let next = self.starts.partition_point(|start| *start <= offset);
        (next - 1, self.starts[next - 1], self.starts.get(next).copied().unwrap_or(u64::MAX))
    }

    /// Splits a request into a part for each child, and runs the parts in groups.
    async fn split(&self, req: &Request<'_>, offset: u64) -> IoResult {
        let mut done = 0;
        while done < req.len {
            let mut parts = [None; MAX_JOINED];
            for part in &mut parts {
                if done == req.len {
                    break;
                }
                let (child, start, end) = self.locate(offset + done);
                let len = (req.len - done).min(end - offset - done);
                *part = Some((child, offset + done - start, req.part(done, len)));
                done += len;
            }
            let parts = parts.iter().flatten();
            join_all(parts.map(|(child, at, req)| self.children[*child].submit(req, *at))).await?;
        }
        Ok(())
    }

    /// Flushes every child, even after one has failed.
    async fn flush(&self) -> IoResult {
        let req = Request::flush().with_flags(Flags::NONE);
        let mut result = Ok(());
        for group in self.children.chunks(MAX_JOINED) {
            result = result.and(join_all(group.iter().map(|child| child.submit(&req, 0))).await);
        }
        result
    }
}

impl Channel for ConcatChannel {
    #[inline]
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        if let Err(error) = self.limits.check(req, offset) {
            return IoFuture::ready(Err(error));
        }
        if req.op == Op::Flush {
            return IoFuture::new(self.flush());
        }
        if req.len == 0 {
            return IoFuture::ready(Ok(()));
        }
        let (child, start, end) = self.locate(offset);
        if req.len <= end - offset {
            return self.children[child].submit(req, offset - start);
        }
        IoFuture::new(self.split(req, offset))
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        if let Err(error) = self.limits.check_range(offset, len) {
            return IoFuture::ready(Err(error));
        }
        let (child, start, end) = self.locate(offset);
        self.children[child].block_status(report, offset - start, len.min(end - offset))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::Status;
    use conformance::Suite;
    use drivers::mem::{MemDevice, Options};

    fn disk(options: Options) -> Arc<MemDevice> {
        Arc::new(MemDevice::new(&options).unwrap())
    }

    #[test]
    fn it_passes_the_suite_and_grows_with_its_last_child() {
        let last = disk(Options { max_size: 64 << 20, ..Options::new(32 << 20) });
        let children: Vec<Arc<dyn Device>> =
            vec![disk(Options::new(1 << 20)), disk(Options::new(5 << 20)), last.clone()];
        let concat = Concat::new(children).unwrap();
        assert_eq!(concat.limits().capacity, 38 << 20);
        Suite::new(Arc::new(concat)).on_grow(move || last.resize(64 << 20).unwrap()).run();
    }

    #[test]
    fn a_request_over_more_children_than_run_at_once_passes_the_suite() {
        let children = (0..MAX_CHILDREN as u64).map(|_| disk(Options::new(128 << 10)) as Arc<dyn Device>);
        let mut children: Vec<_> = children.collect();
        children[9] = disk(Options { block_size: 4096, ..Options::new(1 << 20) });
        let concat = Concat::new(children).unwrap();
        assert_eq!(concat.limits().block_size, 4096);
        Suite::new(Arc::new(concat)).run();
    }

    #[test]
    fn each_child_answers_for_its_part_of_a_range() {
        let zeroes = |size| {
            let options = drivers::null::Options { zero: true, ..drivers::null::Options::new(size) };
            Arc::new(drivers::null::NullDevice::new(&options).unwrap()) as Arc<dyn Device>
        };
        let children = vec![zeroes(1 << 20), disk(Options::new(1 << 20)), zeroes(2 << 20)];
        let concat = Concat::new(children).unwrap();
        let part = crate::linear::Partition::new(Arc::new(concat), 1 << 19, None).unwrap();
        reactor::run(async move {
            let channel = part.open_channel().unwrap();
            let (report, mut calls) = (StatusReport::new(), 0);
            while report.covered() < 3 << 20 {
                let done = report.covered();
                channel.block_status(&report, done, (3 << 20) - done).await.unwrap();
                calls += 1;
            }
            let found: Vec<_> = report.extents().map(|extent| (extent.len, extent.status)).collect();
            let (hole, data) = (Status::ZERO_HOLE, Status::DATA);
            assert_eq!((calls, found), (3, vec![(1 << 19, hole), (1 << 20, data), (3 << 19, hole)]));
        });
    }

    #[test]
    fn a_child_that_shrank_is_named() {
        let first = disk(Options::new(1 << 20));
        let concat = Concat::new(vec![first.clone(), disk(Options::new(1 << 20))]).unwrap();
        first.resize(1 << 19).unwrap();
        assert!(concat.refresh().unwrap_err().to_string().contains("mem shrank to 524288 of 1048576 bytes"));
    }

    #[test]
    fn it_needs_a_child_and_no_more_than_the_limit() {
        assert!(Concat::new(Vec::new()).is_err());
        let many = (0..=MAX_CHILDREN).map(|_| disk(Options::new(4096)) as Arc<dyn Device>).collect();
        assert!(Concat::new(many).is_err());
    }
}
