//! Requests on borrowed memory, several in flight: a scope that does not end before they do.

use super::blocking::CloseOnPanic;
use super::slots::{Owner, Token};
use super::{Queue, Request};
use crate::Result;
use block::{Op, Segment};
use std::cell::RefCell;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

impl Queue {
    /// Runs `body` with a scope whose requests may borrow memory from outside of it. All of them
    /// have ended when this function returns or unwinds, whatever has become of their handles.
    /// Other requests of the queue continue.
    ///
    /// Unlike the blocking calls it never copies: a device with `needs-mem-regions` takes only
    /// memory of [`Buffer`](super::Buffer)s.
    ///
    /// ```
    /// # fn main() -> blkio::Result<()> {
    /// # let file = tempfile::NamedTempFile::new().unwrap();
    /// # file.as_file().set_len(1 << 20).unwrap();
    /// # let path = file.path().to_str().unwrap();
    /// let device = blkio::Builder::new("io_uring")?.set("path", path)?.start()?;
    /// let mut queue = device.queue(0)?;
    /// let (mut head, mut tail) = ([1; 512], vec![1; 4096]);
    /// queue.scope(|s| {
    ///     s.read(0, &mut head);
    ///     let tail = s.read(4096, &mut tail).wait()?;
    ///     assert_eq!(tail, [0; 4096]);
    ///     Ok(())
    /// })?;
    /// assert_eq!(head, [0; 512]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Memory that does not live as long as the scope is refused by the compiler:
    ///
    /// ```compile_fail
    /// # fn read(queue: &mut blkio::Queue) -> blkio::Result<()> {
    /// queue.scope(|s| {
    ///     let mut bytes = [0; 512];
    ///     s.read(0, &mut bytes);
    ///     Ok(())
    /// })
    /// # }
    /// ```
    ///
    /// # Errors
    /// That of `body`, or else that of the first request that failed and was not waited for.
    pub fn scope<'env, T>(
        &'env mut self,
        body: impl for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> Result<T>,
    ) -> Result<T> {
        let scope = Scope { queue: RefCell::new(self), scope: PhantomData, env: PhantomData };
        let result = catch_unwind(AssertUnwindSafe(|| body(&scope)));
        let mut queue = scope.queue.borrow_mut();
        let guard = CloseOnPanic(&mut queue);
        guard.0.wait_for_scoped();
        std::mem::forget(guard);
        let requests = queue.slots.end_scope();
        match result {
            Ok(result) => result.and_then(|value| requests.map(|()| value)),
            Err(panic) => resume_unwind(panic),
        }
    }
}

/// Where requests on borrowed memory are made; see [`Queue::scope`].
pub struct Scope<'scope, 'env: 'scope> {
    queue: RefCell<&'env mut Queue>,
    scope: PhantomData<&'scope mut &'scope ()>,
    env: PhantomData<&'env mut &'env ()>,
}

/// A request of a scope. Dropping it changes nothing.
pub struct ScopedRequest<'scope, M> {
    wait: &'scope dyn Wait,
    token: Token,
    memory: Borrowed<M>,
}

/// Borrowed memory during a request: no reference to it exists.
struct Borrowed<M> {
    start: *mut u8,
    len: usize,
    memory: PhantomData<M>,
}

trait Wait {
    fn wait(&self, token: Token) -> Result<()>;
}

impl Wait for Scope<'_, '_> {
    fn wait(&self, token: Token) -> Result<()> {
        let mut queue = self.queue.borrow_mut();
        queue.wait_for(token);
        queue.slots.claim(token).expect("it has ended and no other call has its token").0
    }
}

impl<'scope> Scope<'scope, '_> {
    /// Reads at byte `offset`.
    pub fn read(
        &'scope self,
        offset: u64,
        memory: &'scope mut [u8],
    ) -> ScopedRequest<'scope, &'scope mut [u8]> {
        self.transfer(Op::Read, offset, memory.as_mut_ptr(), memory.len())
    }

    /// Writes at byte `offset`.
    pub fn write(&'scope self, offset: u64, memory: &'scope [u8]) -> ScopedRequest<'scope, &'scope [u8]> {
        self.transfer(Op::Write, offset, memory.as_ptr().cast_mut(), memory.len())
    }

    /// Reads at byte `offset` into several buffers, in their order.
    pub fn read_vectored(
        &'scope self,
        offset: u64,
        memory: impl IntoIterator<Item = &'scope mut [u8]>,
    ) -> ScopedRequest<'scope, ()> {
        let pieces = memory.into_iter().map(|m| Segment { base: m.as_mut_ptr(), len: m.len() });
        self.vectored(Op::Read, offset, pieces.collect())
    }

    /// Writes several buffers at byte `offset`, in their order.
    pub fn write_vectored(
        &'scope self,
        offset: u64,
        memory: impl IntoIterator<Item = &'scope [u8]>,
    ) -> ScopedRequest<'scope, ()> {
        let pieces = memory.into_iter().map(|m| Segment { base: m.as_ptr().cast_mut(), len: m.len() });
        self.vectored(Op::Write, offset, pieces.collect())
    }

    /// Makes a request without memory: flush, write zeroes, discard, a change of zones.
    pub fn submit(&'scope self, request: Request<()>) -> ScopedRequest<'scope, ()> {
        let token = self.queue.borrow_mut().begin(request, Owner::Scope);
        self.request(token, std::ptr::null_mut(), 0)
    }

    fn vectored(&'scope self, op: Op, offset: u64, pieces: Vec<Segment>) -> ScopedRequest<'scope, ()> {
        // SAFETY: as in `transfer`.
        let token = unsafe { self.queue.borrow_mut().begin_borrowed(op, offset, pieces, Owner::Scope) };
        self.request(token, std::ptr::null_mut(), 0)
    }

    fn transfer<M>(&'scope self, op: Op, offset: u64, base: *mut u8, len: usize) -> ScopedRequest<'scope, M> {
        let segment = Segment { base, len };
        // SAFETY: the memory is borrowed for 'scope, which does not end before `Queue::scope` has
        // seen the end of all requests of the scope. It is given back earlier only by
        // `ScopedRequest::wait`, after its request's end.
        let token = unsafe { self.queue.borrow_mut().begin_borrowed(op, offset, [segment], Owner::Scope) };
        self.request(token, base, len)
    }

    fn request<M>(&'scope self, token: Token, start: *mut u8, len: usize) -> ScopedRequest<'scope, M> {
        ScopedRequest { wait: self, token, memory: Borrowed { start, len, memory: PhantomData } }
    }
}

impl<'scope> ScopedRequest<'scope, &'scope mut [u8]> {
    /// Waits for the request's end and gives the memory back.
    ///
    /// # Errors
    /// Why it failed; the memory then stays borrowed until the end of the scope.
    pub fn wait(self) -> Result<&'scope mut [u8]> {
        self.wait.wait(self.token)?;
        // SAFETY: the request has ended, and the memory was lent with it for 'scope.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.memory.start, self.memory.len) })
    }
}

impl<'scope> ScopedRequest<'scope, &'scope [u8]> {
    /// Waits for the request's end and gives the memory back.
    ///
    /// # Errors
    /// Why it failed.
    pub fn wait(self) -> Result<&'scope [u8]> {
        self.wait.wait(self.token)?;
        // SAFETY: as above.
        Ok(unsafe { std::slice::from_raw_parts(self.memory.start, self.memory.len) })
    }
}

impl ScopedRequest<'_, ()> {
    /// Waits for the request's end.
    ///
    /// # Errors
    /// Why it failed.
    pub fn wait(self) -> Result<()> {
        self.wait.wait(self.token)
    }
}
