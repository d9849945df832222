//! The buffers of a core for data in transit: bounce buffers, parity, copies.

use crate::arena::{SPREAD, arena};
use crate::permits::Permits;
use block::{Data, Segment};
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::ptr::NonNull;
use std::rc::{Rc, Weak};
use std::task::Context;

/// Longest buffer in bytes; longer transfers are split.
pub const MAX_BUFFER: usize = 1 << 20;
/// Shortest buffer in bytes, and the alignment of all buffers: enough for direct I/O on any drive.
const MIN_BUFFER: usize = 4096;
const CLASSES: usize = (MAX_BUFFER / MIN_BUFFER).trailing_zeros() as usize + 1;
/// Limit of bytes in use; further requests wait. 64 parts of the longest size keep any drive busy.
const POOL_BYTES: usize = 64 * MAX_BUFFER;
/// Free bytes that an idle core keeps.
const STOCK: usize = MAX_BUFFER;
/// Limit of free bytes of a busy core's pool in shared memory, whose addresses are limited.
const SHARED_STOCK: usize = 32 * MAX_BUFFER;
/// Pools of a core: one for its own requests, one for network clients.
const POOLS: usize = 2;

/// Bytes of shared memory for the buffers of `cores` cores, whose network clients use at most
/// `clients` bytes at a time. Pages exist only while buffers use them.
pub fn shared_memory_for(cores: usize, clients: usize) -> usize {
    let pools = cores.saturating_mul(POOL_BYTES + POOLS * SHARED_STOCK);
    clients.saturating_add(pools).saturating_mul(SPREAD)
}

/// The buffers of one core. The pool grows under load up to a limit, at which requests wait. It
/// frees memory when the core is idle.
#[derive(Clone)]
pub struct BufferPool(Rc<Pool>);

struct Pool {
    permits: Permits,
    free: [RefCell<Vec<NonNull<u8>>>; CLASSES],
    /// Bytes of free buffers.
    free_bytes: Cell<usize>,
}

impl Default for BufferPool {
    fn default() -> Self {
        BufferPool::new(POOL_BYTES)
    }
}

impl BufferPool {
    /// A pool with a limit of `bytes` in use, at least [`MAX_BUFFER`].
    pub fn new(bytes: usize) -> BufferPool {
        BufferPool(Rc::new(Pool {
            permits: Permits::new(bytes.max(MAX_BUFFER)),
            free: std::array::from_fn(|_| RefCell::default()),
            free_bytes: Cell::new(0),
        }))
    }

    /// A buffer of `len` bytes, aligned to 4 KiB, with undefined content. Waits while the pool is
    /// exhausted.
    ///
    /// # Panics
    /// If `len` exceeds [`MAX_BUFFER`].
    pub async fn take(&self, len: usize) -> Buffer {
        let class = class_of(len);
        self.0.permits.acquire(size_of_class(class)).await;
        self.take_of(class, len)
    }

    /// As [`BufferPool::take`], but returns `None` if the pool is exhausted or a task waits.
    ///
    /// # Panics
    /// If `len` exceeds [`MAX_BUFFER`].
    pub fn try_take(&self, len: usize) -> Option<Buffer> {
        let class = class_of(len);
        self.0.permits.try_acquire(size_of_class(class)).then(|| self.take_of(class, len))
    }

    fn take_of(&self, class: usize, len: usize) -> Buffer {
        let reused = self.0.free[class].borrow_mut().pop();
        if reused.is_some() {
            self.0.free_bytes.set(self.0.free_bytes.get() - size_of_class(class));
        }
        Buffer { memory: reused.unwrap_or_else(|| allocate(class)), len, class, pool: self.0.clone() }
    }

    /// Returns free buffers to the system; the core calls it before it sleeps. Keeps a small stock,
    /// so that rare requests do not allocate each time.
    pub(crate) fn trim(&self) {
        self.0.trim(STOCK);
    }

    /// Returns free buffers beyond `stock` bytes to the system, also while the core is busy.
    pub fn shrink(&self, stock: usize) {
        self.0.trim(stock);
    }

    /// A reference that does not keep the pool alive; see
    /// [`Core::trim_when_idle`](crate::Core::trim_when_idle).
    pub(crate) fn downgrade(&self) -> WeakPool {
        WeakPool(Rc::downgrade(&self.0))
    }
}

/// A reference to a pool that does not keep it alive.
pub(crate) struct WeakPool(Weak<Pool>);

impl WeakPool {
    /// Frees buffers beyond `stock` bytes; returns `false` if the pool was dropped.
    pub fn trim(&self, stock: usize) -> bool {
        self.0.upgrade().inspect(|pool| pool.trim(stock)).is_some()
    }
}

impl Pool {
    fn trim(&self, stock: usize) {
        for class in (0..CLASSES).rev() {
            while self.free_bytes.get() > stock {
                let Some(memory) = self.free[class].borrow_mut().pop() else { break };
                self.free_bytes.set(self.free_bytes.get() - size_of_class(class));
                // SAFETY: free buffers came from `allocate` with this class.
                unsafe { release(memory, class) };
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        for (class, list) in self.free.iter().enumerate() {
            for memory in list.take() {
                // SAFETY: as in `trim`.
                unsafe { release(memory, class) };
            }
        }
    }
}

/// A buffer that returns to its pool when dropped.
pub struct Buffer {
    memory: NonNull<u8>,
    len: usize,
    class: usize,
    pool: Rc<Pool>,
}

impl Buffer {
    /// The buffer as one segment.
    pub fn segment(&self) -> Segment {
        Segment { base: self.memory.as_ptr(), len: self.len }
    }

    /// The bytes. Must not be called while a request uses the buffer.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: ours and initialised (`allocate` zeroes).
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr(), self.len) }
    }

    /// The bytes, writable. Must not be called while a request uses the buffer.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr(), self.len) }
    }

    /// Runs a request on `channel` with this buffer as its memory. The future owns the buffer and
    /// returns it with the result, so that the caller cannot access it meanwhile: the memory is
    /// stable ([`Data::stable`]).
    pub async fn transfer(
        self,
        channel: &dyn block::Channel,
        op: block::Op,
        flags: block::Flags,
        offset: u64,
    ) -> (Buffer, block::IoResult) {
        let segments = [self.segment()];
        // SAFETY: the buffer is owned by this future, which holds it until the request has
        // completed and accesses it afterwards only.
        let data = unsafe { Data::new(&segments).stable() };
        let req = block::Request { op, flags, len: self.len as u64, data };
        let result = channel.submit(&req, offset).await;
        (self, result)
    }

    /// [`Buffer::transfer`] for a caller that changes its memory during the request, as a guest
    /// may. Tests use it. `change` is called with the memory each time the request's task runs and
    /// the request has not completed; it may wake the task.
    pub async fn transfer_changing(
        self,
        channel: &dyn block::Channel,
        op: block::Op,
        flags: block::Flags,
        offset: u64,
        mut change: impl FnMut(&mut Context<'_>, Data<'_>),
    ) -> (Buffer, block::IoResult) {
        let segments = [self.segment()];
        // SAFETY: as in `transfer`; no reference to the memory exists, `change` writes through the
        // same window.
        let data = unsafe { Data::new(&segments) };
        let req = block::Request { op, flags, len: self.len as u64, data };
        let mut request = channel.submit(&req, offset);
        let result = std::future::poll_fn(|cx| {
            let state = Pin::new(&mut request).poll(cx);
            if state.is_pending() {
                change(cx, data);
            }
            state
        })
        .await;
        drop(request);
        (self, result)
    }

    /// [`Buffer::transfer`] of the part that starts `skip` bytes into the buffer, in segments of
    /// `lens` bytes. Tests use it for scattered and misaligned memory.
    ///
    /// # Panics
    /// If the part does not lie inside the buffer.
    pub async fn transfer_in_segments(
        self,
        channel: &dyn block::Channel,
        op: block::Op,
        flags: block::Flags,
        offset: u64,
        skip: usize,
        lens: &[usize],
    ) -> (Buffer, block::IoResult) {
        assert!(lens.iter().sum::<usize>() <= self.len.saturating_sub(skip), "segments exceed the buffer");
        let mut at = skip;
        let mut next = |len: usize| {
            at += len;
            Segment { base: self.memory.as_ptr().wrapping_add(at - len), len }
        };
        let segments: Vec<Segment> = lens.iter().map(|len| next(*len)).collect();
        // SAFETY: as in `transfer`; the segments lie inside the buffer, as just asserted.
        let data = unsafe { Data::new(&segments).stable() };
        let req = block::Request { op, flags, len: data.len() as u64, data };
        let result = channel.submit(&req, offset).await;
        drop(segments);
        (self, result)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.pool.free[self.class].borrow_mut().push(self.memory);
        self.pool.free_bytes.set(self.pool.free_bytes.get() + size_of_class(self.class));
        if self.pool.free_bytes.get() > SHARED_STOCK && arena().is_some() {
            self.pool.trim(SHARED_STOCK);
        }
        self.pool.permits.release(size_of_class(self.class));
    }
}

fn class_of(len: usize) -> usize {
    assert!(len <= MAX_BUFFER, "a buffer of {len} bytes");
    (len.max(MIN_BUFFER).next_power_of_two() / MIN_BUFFER).trailing_zeros() as usize
}

fn size_of_class(class: usize) -> usize {
    MIN_BUFFER << class
}

fn layout(class: usize) -> Layout {
    Layout::from_size_align(size_of_class(class), MIN_BUFFER).expect("a power of two up to MAX_BUFFER")
}

/// Returns memory to the arena or the allocator.
///
/// # Safety
/// It came from [`allocate`] with this class, and nothing uses it.
unsafe fn release(memory: NonNull<u8>, class: usize) {
    if arena().is_some_and(|arena| arena.give_back(memory, size_of_class(class), MAX_BUFFER)) {
        return;
    }
    // SAFETY: by contract, and it does not lie in the arena.
    unsafe { dealloc(memory.as_ptr(), layout(class)) };
}

#[cold]
fn allocate(class: usize) -> NonNull<u8> {
    if let Some(arena) = arena() {
        let memory = arena.take(size_of_class(class), MAX_BUFFER);
        return memory.unwrap_or_else(|| handle_alloc_error(layout(class)));
    }
    // SAFETY: the layout is not empty.
    let memory = unsafe { alloc(layout(class)) };
    let memory = NonNull::new(memory).unwrap_or_else(|| handle_alloc_error(layout(class)));
    // SAFETY: fresh memory of that size. Zeroed, so that `as_slice` never shows what the process
    // held before.
    unsafe { memory.write_bytes(0, size_of_class(class)) };
    memory
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::task::{Poll, Waker};

    fn poll<F: Future>(future: std::pin::Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn an_exhausted_pool_lets_the_next_wait_until_memory_is_freed() {
        let pool = BufferPool::new(MAX_BUFFER);
        let Poll::Ready(first) = poll(pin!(pool.take(MAX_BUFFER / 2 + 1))) else { panic!() };
        assert_eq!(first.segment().len, MAX_BUFFER / 2 + 1);
        assert!(pool.try_take(1).is_none());
        let mut second = pin!(pool.take(1));
        assert!(poll(second.as_mut()).is_pending());
        drop(first);
        let Poll::Ready(second) = poll(second.as_mut()) else { panic!() };
        assert_eq!(second.segment().base.addr() % MIN_BUFFER, 0);
        assert_eq!(pool.try_take(5000).map(|third| third.segment().len), Some(5000));
    }

    #[test]
    fn an_idle_pool_keeps_only_its_stock() {
        let pool = BufferPool::default();
        let held: Vec<_> = (0..4)
            .map(|_| match poll(pin!(pool.take(MAX_BUFFER))) {
                Poll::Ready(buffer) => buffer,
                Poll::Pending => panic!(),
            })
            .collect();
        drop(held);
        assert_eq!(pool.0.free_bytes.get(), 4 * MAX_BUFFER);
        pool.trim();
        assert_eq!(pool.0.free_bytes.get(), MAX_BUFFER);
        let weak = pool.downgrade();
        assert!(weak.trim(0));
        assert_eq!(pool.0.free_bytes.get(), 0);
        drop(pool);
        assert!(!weak.trim(0));
    }
}
