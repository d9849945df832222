//! The type-erased future of one request: two words, no allocation per I/O.

use crate::{IoError, IoResult};
use std::cell::UnsafeCell;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::ptr::NonNull;
use std::task::{Context, Poll};

/// The target of an [`IoFuture`]: a pooled `async` block, or an op slot inside the reactor.
pub trait Operation {
    /// Polls the request. Not called again after `Ready`.
    fn poll(&self, cx: &mut Context<'_>) -> Poll<IoResult>;
    /// Returns the memory to its owner. Called exactly once, when the future is dropped. If the
    /// device still works on the request, the owner must end the process.
    ///
    /// `memory` is the pointer that the [`IoFuture`] was made from. It may reach more bytes than
    /// `self`, which reaches the operation's own. An owner reuses the memory through `memory` only.
    fn release(&self, memory: NonNull<u8>);
}

/// The result of one request, to be awaited on the core that submitted it.
#[must_use = "a request that was submitted must be awaited"]
pub struct IoFuture<'a> {
    op: NonNull<dyn Operation + 'a>,
    borrows: PhantomData<&'a ()>,
}

impl<'a> IoFuture<'a> {
    /// Wraps a layer's `async` block, in memory from this core's free list. The block starts with
    /// the first poll.
    #[inline]
    pub fn new<F: Future<Output = IoResult> + 'a>(future: F) -> Self {
        let block = pool::take::<Pooled<F>>();
        // SAFETY: `block` is fresh memory of the right size and alignment.
        unsafe { block.write(Pooled(UnsafeCell::new(future))) };
        IoFuture { op: block as NonNull<dyn Operation + 'a>, borrows: PhantomData }
    }

    /// The future of a request that has completed.
    #[inline]
    pub fn ready(result: IoResult) -> Self {
        match result {
            Ok(()) => IoFuture {
                op: NonNull::<ReadyOk>::dangling() as NonNull<dyn Operation + 'a>,
                borrows: PhantomData,
            },
            Err(error) => IoFuture::new(std::future::ready(Err::<(), IoError>(error))),
        }
    }

    /// The future of an operation that lives elsewhere.
    ///
    /// # Safety
    /// `op` stays valid until its `release` has been called, and only this future polls it.
    #[inline]
    pub unsafe fn from_operation(op: NonNull<dyn Operation + 'a>) -> Self {
        IoFuture { op, borrows: PhantomData }
    }
}

impl Future for IoFuture<'_> {
    type Output = IoResult;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<IoResult> {
        // SAFETY: we own the operation until `release`.
        unsafe { self.op.as_ref() }.poll(cx)
    }
}

impl Drop for IoFuture<'_> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: as in `poll`; drop runs once.
        unsafe { self.op.as_ref() }.release(self.op.cast());
    }
}

/// A zero-sized operation: its pointer may dangle.
struct ReadyOk;

impl Operation for ReadyOk {
    fn poll(&self, _: &mut Context<'_>) -> Poll<IoResult> {
        Poll::Ready(Ok(()))
    }
    fn release(&self, _: NonNull<u8>) {}
}

struct Pooled<F>(UnsafeCell<F>);

impl<F: Future<Output = IoResult>> Operation for Pooled<F> {
    #[inline]
    fn poll(&self, cx: &mut Context<'_>) -> Poll<IoResult> {
        // SAFETY: only the one `IoFuture` that owns the block polls it, and it never moves before
        // `release`.
        unsafe { Pin::new_unchecked(&mut *self.0.get()) }.poll(cx)
    }

    #[inline]
    fn release(&self, memory: NonNull<u8>) {
        // SAFETY: `memory` came from `pool::take::<Self>` and may reach the whole block; `self` is
        // not used again.
        unsafe { pool::give(memory.cast::<Self>()) }
    }
}

/// Returns the calling thread's free blocks to the allocator. A reactor calls it when it ends.
pub fn release_pool() {
    pool::release();
}

/// Per-core free lists of future-sized blocks, one list per power of two.
mod pool {
    use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
    use std::cell::Cell;
    use std::ptr::NonNull;

    struct Free {
        next: *mut Free,
    }

    const SMALLEST: usize = 64;
    const CLASSES: usize = 8; // 64 bytes .. 8 KiB; a larger future does not compile

    thread_local! {
        static LISTS: [Cell<*mut Free>; CLASSES] =
            const { [const { Cell::new(std::ptr::null_mut()) }; CLASSES] };
    }

    const fn class<T>() -> usize {
        let size = if size_of::<T>() < SMALLEST { SMALLEST } else { size_of::<T>() };
        let class = (usize::BITS - (size - 1).leading_zeros()) as usize - SMALLEST.trailing_zeros() as usize;
        assert!(class < CLASSES && align_of::<T>() <= SMALLEST);
        class
    }

    fn layout(class: usize) -> Layout {
        Layout::from_size_align(SMALLEST << class, SMALLEST).expect("a power of two below isize::MAX")
    }

    #[inline]
    pub fn take<T>() -> NonNull<T> {
        let class = const { class::<T>() };
        LISTS.with(|lists| {
            let Some(head) = NonNull::new(lists[class].get()) else { return grow(class).cast() };
            // SAFETY: blocks on the list are free and hold a valid `Free`.
            lists[class].set(unsafe { head.as_ref().next });
            head.cast()
        })
    }

    /// # Safety
    /// `block` is the pointer that `take::<T>()` returned, not one made from a reference to the
    /// `T`: the next user of the block may be larger. It holds a live `T`, and is not used again.
    #[inline]
    pub unsafe fn give<T>(block: NonNull<T>) {
        let class = const { class::<T>() };
        // SAFETY: by contract.
        unsafe { block.drop_in_place() };
        LISTS.with(|lists| {
            let free = block.cast::<Free>();
            // SAFETY: the block is free now, and large and aligned enough for a `Free`.
            unsafe { free.write(Free { next: lists[class].get() }) };
            lists[class].set(free.as_ptr());
        });
    }

    #[cold]
    #[inline(never)]
    fn grow(class: usize) -> NonNull<u8> {
        let layout = layout(class);
        // SAFETY: the layout is not empty.
        NonNull::new(unsafe { alloc(layout) }).unwrap_or_else(|| handle_alloc_error(layout))
    }

    pub fn release() {
        LISTS.with(|lists| {
            for (class, list) in lists.iter().enumerate() {
                let mut head = list.replace(std::ptr::null_mut());
                while let Some(block) = NonNull::new(head) {
                    // SAFETY: blocks on the list are free, hold a valid `Free` and came from
                    // `grow(class)`.
                    unsafe {
                        head = block.as_ref().next;
                        dealloc(block.as_ptr().cast(), layout(class));
                    }
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::Waker;

    fn poll(future: &mut IoFuture<'_>) -> Poll<IoResult> {
        Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn a_dropped_future_drops_its_captures_and_frees_its_block() {
        let token = std::rc::Rc::new(());
        let first = IoFuture::new({
            let token = token.clone();
            async move {
                let _keep = token;
                Ok(())
            }
        });
        let address = first.op.as_ptr().cast::<u8>();
        assert_eq!(std::rc::Rc::strong_count(&token), 2);
        drop(first);
        assert_eq!(std::rc::Rc::strong_count(&token), 1);
        let second = IoFuture::new(std::future::ready(Ok(())));
        let third = IoFuture::new(std::future::ready(Ok(())));
        assert!([second.op, third.op].iter().any(|op| op.as_ptr().cast::<u8>() == address));
    }

    /// A normal run checks the results and the addresses. Miri also checks that each use of the
    /// block may reach all bytes that it touches, although the previous use was smaller than a link
    /// of the free list.
    #[test]
    fn a_block_that_held_a_small_future_serves_a_larger_one() {
        struct Small(u8);
        impl Future for Small {
            type Output = IoResult;
            fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<IoResult> {
                if self.0 == 7 { Poll::Ready(Ok(())) } else { Poll::Pending }
            }
        }
        let mut small = IoFuture::new(Small(7));
        let address = small.op.as_ptr().cast::<u8>();
        assert_eq!(poll(&mut small), Poll::Ready(Ok(())));
        drop(small);
        let bytes = [5u8; 48];
        let mut large = IoFuture::new(async move {
            std::future::ready(()).await;
            if bytes.iter().all(|byte| *byte == 5) { Ok(()) } else { Err(IoError::Corrupt) }
        });
        assert_eq!(large.op.as_ptr().cast::<u8>(), address);
        assert_eq!(poll(&mut large), Poll::Ready(Ok(())));
        drop(large);
        let none = IoFuture::new(std::future::pending());
        assert_eq!(none.op.as_ptr().cast::<u8>(), address);
        drop(none);
        release_pool();
    }

    #[test]
    fn a_ready_future_says_so_at_once() {
        assert_eq!(poll(&mut IoFuture::ready(Ok(()))), Poll::Ready(Ok(())));
        assert_eq!(poll(&mut IoFuture::ready(Err(IoError::ReadOnly))), Poll::Ready(Err(IoError::ReadOnly)));
    }

    #[test]
    fn the_future_is_two_words() {
        assert_eq!(size_of::<IoFuture<'_>>(), 2 * size_of::<usize>());
        assert_eq!(size_of::<Option<IoFuture<'_>>>(), 2 * size_of::<usize>());
    }
}
