//! The requests of one core to an image that is written.

use super::home::{Change, Clear, Entries, home, is_own};
use super::metadata::Metadata;
use crate::content::{Content, Places};
use crate::entry::{BadEntry, Entry, Geometry, Place};
use crate::lookup::Run;
use crate::mutant::{self, Mutant};
use block::{Channel, Flags, IoError, IoFuture, IoResult, Op, Request, StatusReport};
use reactor::{BufferPool, MAX_BUFFER};
use std::sync::atomic::Ordering;

/// Longest transfer of bytes that are copied.
const PART: u64 = 128 << 10;

/// Where the bytes of the disk are, as the table of the image says now.
pub(super) struct Live(pub Entries);

impl Live {
    fn place(&self, word: u64, at: u64) -> Result<(Place, u64), IoError> {
        let geometry = self.geometry();
        let within = at % geometry.cluster_size();
        let entry = Entry { word, bitmap: 0 };
        geometry.place(entry, at - within, within).map_err(|BadEntry| IoError::Corrupt)
    }

    fn entry(&self, at: u64) -> Option<u64> {
        self.0.entry(at / self.geometry().cluster_size())
    }

    /// The byte of the file, and the length of the run from there, at which the disk's bytes at
    /// `offset` can be written in place. `None` if the first cluster has no place of its own, or
    /// its entry is not here.
    fn own_run(&self, offset: u64, len: u64) -> Option<Result<(u64, u64), IoError>> {
        let word = self.entry(offset).filter(|word| is_own(*word))?;
        let (start, mut run) = match self.place(word, offset) {
            Ok((Place::Data(start), run)) => (start, run),
            Ok(_) => return None,
            Err(error) => return Some(Err(error)),
        };
        while run < len {
            match self
                .entry(offset + run)
                .filter(|word| is_own(*word))
                .map(|word| self.place(word, offset + run))
            {
                Some(Ok((place, more))) if Place::Data(start).continues(run, place) => run += more,
                _ => break,
            }
        }
        Some(Ok((start, run.min(len))))
    }
}

impl Places for Live {
    fn geometry(&self) -> &Geometry {
        &self.0.format().geometry
    }

    fn data_end(&self) -> u64 {
        self.0.format().capacity.load(Ordering::Relaxed)
    }

    #[inline]
    fn try_run(&self, offset: u64, len: u64) -> Option<Result<Run, IoError>> {
        let (place, mut run) = match self.place(self.entry(offset)?, offset) {
            Ok(found) => found,
            Err(error) => return Some(Err(error)),
        };
        while run < len {
            // An entry that is damaged is an error of the requests that reach it.
            match self.entry(offset + run).map(|word| self.place(word, offset + run)) {
                Some(Ok((next, more))) if place.continues(run, next) => run += more,
                _ => break,
            }
        }
        Some(Ok(Run { place, len: run.min(len) }))
    }

    async fn run(&self, offset: u64, len: u64) -> Result<Run, IoError> {
        loop {
            if let Some(run) = self.try_run(offset, len) {
                return run;
            }
            self.0.fetch(offset / self.geometry().cluster_size()).await?;
        }
    }
}

/// See the module.
pub(super) struct LiveChannel {
    content: Content<Live>,
    buffers: BufferPool,
}

impl LiveChannel {
    pub(super) fn new(content: Content<Live>) -> LiveChannel {
        LiveChannel { content, buffers: BufferPool::new(4 * MAX_BUFFER) }
    }

    fn view(&self) -> &Entries {
        &self.content.places.0
    }

    fn metadata(&self) -> &Metadata {
        self.view().format()
    }

    /// Asks the home of the image. The work has memory of its own: a request has no room for it.
    async fn ask<R, W>(&self, work: impl FnOnce(Entries) -> W + Send + 'static) -> Result<R, IoError>
    where
        R: Send + 'static,
        W: Future<Output = Result<R, IoError>> + 'static,
    {
        self.view().at_owner(0, |view| Box::pin(work(view))).await?
    }

    async fn read(&self, req: &Request<'_>, offset: u64) -> IoResult {
        let _running = self.view().begin();
        self.content.serve(req, offset).await
    }

    /// Runs a request that changes the disk. When no cluster is free, clusters that wait for the
    /// end of earlier requests may help.
    async fn modify(&self, req: &Request<'_>, offset: u64) -> IoResult {
        let mut has_reclaimed = false;
        loop {
            let running = self.view().begin_change().await;
            let result = match req.op {
                Op::Write => self.write(req, offset).await,
                _ => self.clear(req, offset).await,
            };
            drop(running);
            if result != Err(IoError::NoSpace) || has_reclaimed {
                result?;
                break;
            }
            has_reclaimed = true;
            self.ask(|view| async move { home(&view).reclaim(&view).await }).await?;
        }
        match req.is_fua() && req.op != Op::Discard && !mutant::is(Mutant::FuaWithoutTables) {
            true => self.flush().await,
            false => Ok(()),
        }
    }

    async fn write(&self, req: &Request<'_>, offset: u64) -> IoResult {
        let cluster_size = self.content.places.geometry().cluster_size();
        let mut done = 0;
        while done < req.len {
            // An entry that was loaded meanwhile may have shown it.
            if self.metadata().is_corrupt() {
                return Err(IoError::Corrupt);
            }
            let (at, rest) = (offset + done, req.len - done);
            if let Some(own) = self.content.places.own_run(at, rest) {
                let (place, len) = own?;
                self.check_inside(place, len)?;
                self.content.data.channel.submit(&req.part(done, len), place).await?;
                done += len;
                continue;
            }
            // The entry may have to be loaded first.
            let word = self.view().fetch(at / cluster_size).await?;
            if !is_own(word) {
                done += self.write_elsewhere(&req.part(done, rest), at).await?;
            }
        }
        Ok(())
    }

    /// A cluster behind the end of the file is missing: the file was cut.
    fn check_inside(&self, place: u64, len: u64) -> IoResult {
        let is_inside = place.checked_add(len).is_some_and(|end| end <= self.content.places.data_end());
        if is_inside { Ok(()) } else { Err(IoError::Corrupt) }
    }

    /// Writes the first bytes of a request, at byte `offset` of the disk, to new clusters. Returns
    /// how many: 0 if they can be written in place meanwhile.
    async fn write_elsewhere(&self, req: &Request<'_>, offset: u64) -> Result<u64, IoError> {
        let cluster_size = self.content.places.geometry().cluster_size();
        let (first, within) = (offset / cluster_size, offset % cluster_size);
        let count = (within + req.len).div_ceil(cluster_size);
        let change = self.ask(move |view| async move { home(&view).begin(&view, first, count).await });
        let Some(change) = change.await? else { return Ok(0) };
        let number = change.number;
        let end = change.count * cluster_size;
        let len = req.len.min(end - within);
        match self.fill(&change, req, offset, len).await {
            Ok(()) => {
                let commit = move |view: Entries| async move { home(&view).commit(&view, number).await };
                self.ask(commit).await?;
                Ok(len)
            }
            Err(error) => {
                let abort = move |view: Entries| async move {
                    home(&view).abort(&view, number).await;
                    Ok(())
                };
                self.ask(abort).await?;
                Err(error)
            }
        }
    }

    /// Writes the clusters of a change: `len` bytes of the request, and what the disk has before
    /// and behind them.
    async fn fill(&self, change: &Change, req: &Request<'_>, offset: u64, len: u64) -> IoResult {
        let cluster_size = self.content.places.geometry().cluster_size();
        let (within, end) = (offset % cluster_size, change.count * cluster_size);
        let start = offset - within;
        // Data is durable together with its entry, not before.
        let data = req.part(0, len).with_flags(Flags::NONE);
        self.content.data.channel.submit(&data, change.offset + within).await?;
        self.rest(change, change.old[0], start, 0, within).await?;
        self.rest(change, change.old[1], start, within + len, end).await
    }

    /// Writes the bytes `from` to `to` of the clusters of a change, which begin at byte `start` of
    /// the disk. `old`: their entry.
    async fn rest(&self, change: &Change, old: u64, start: u64, from: u64, to: u64) -> IoResult {
        // Bytes behind the end of the disk are zeroes.
        let inside = to.min((self.content.limits().capacity - start).max(from));
        self.copy(change, old, start, from, inside).await?;
        match change.are_zero || inside == to {
            true => Ok(()),
            false => self.zero(change.offset + inside, to - inside).await,
        }
    }

    /// As [`LiveChannel::rest`], for bytes on the disk.
    async fn copy(&self, change: &Change, old: u64, start: u64, from: u64, to: u64) -> IoResult {
        if from == to {
            return Ok(());
        }
        let (place, _) = self.content.places.place(old, start + from)?;
        if self.content.is_zero(place, start + from) {
            return match change.are_zero || mutant::is(Mutant::RestNotZeroed) {
                true => Ok(()),
                false => self.zero(change.offset + from, to - from).await,
            };
        }
        if mutant::is(Mutant::RestNotCopied) {
            return Ok(());
        }
        let mut at = from;
        while at < to {
            let len = (to - at).min(PART);
            let buffer = self.buffers.take(len as usize).await;
            let (buffer, read) = buffer.transfer(self, Op::Read, Flags::NONE, start + at).await;
            read?;
            let target = &*self.content.data.channel;
            buffer.transfer(target, Op::Write, Flags::NONE, change.offset + at).await.1?;
            at += len;
        }
        Ok(())
    }

    /// Writes zeroes to the file.
    async fn zero(&self, offset: u64, len: u64) -> IoResult {
        let target = &*self.content.data.channel;
        let flags = Flags::NO_FALLBACK;
        let zeroed = target.submit(&Request::write_zeroes(len, flags), offset).await;
        if zeroed != Err(IoError::Unsupported) {
            return zeroed;
        }
        let mut at = 0;
        while at < len {
            let part = (len - at).min(PART);
            let mut buffer = self.buffers.take(part as usize).await;
            buffer.as_mut_slice().fill(0);
            buffer.transfer(target, Op::Write, Flags::NONE, offset + at).await.1?;
            at += part;
        }
        Ok(())
    }

    /// Discards or zeroes: whole clusters by their entries, the parts of others by writing zeroes.
    async fn clear(&self, req: &Request<'_>, offset: u64) -> IoResult {
        let cluster_size = self.content.places.geometry().cluster_size();
        let end = offset + req.len;
        let how = match req.op {
            Op::Discard => Clear::Discard,
            _ if req.flags.contains(Flags::NO_UNMAP) => Clear::ZeroInPlace,
            _ => Clear::Zero,
        };
        // The last cluster of a disk may be incomplete.
        let is_last = end == self.content.limits().capacity;
        let whole_end = if is_last { end.div_ceil(cluster_size) } else { end / cluster_size };
        let whole = offset.div_ceil(cluster_size)..whole_end;
        if whole.is_empty() {
            return self.clear_part(offset, req.len, how).await;
        }
        let (start, stop) = (whole.start * cluster_size, (whole.end * cluster_size).min(end));
        self.clear_part(offset, start - offset, how).await?;
        self.ask(move |view| async move { home(&view).clear(&view, whole, how).await }).await?;
        self.clear_part(stop, end - stop, how).await
    }

    /// Zeroes a part of a cluster, unless it reads as zeroes.
    async fn clear_part(&self, offset: u64, len: u64, how: Clear) -> IoResult {
        if how == Clear::Discard {
            return Ok(());
        }
        let mut done = 0;
        while done < len {
            let at = offset + done;
            let run = self.content.places.run(at, len - done).await?;
            let part = run.len.min(PART);
            if !self.content.is_zero(run.place, at) {
                let mut buffer = self.buffers.take(part as usize).await;
                buffer.as_mut_slice().fill(0);
                buffer.transfer(&Plain(self), Op::Write, Flags::NONE, at).await.1?;
            }
            done += part;
        }
        Ok(())
    }

    async fn flush(&self) -> IoResult {
        if !self.metadata().is_dirty() {
            return self.content.data.channel.submit(&Request::flush(), 0).await;
        }
        self.ask(|view| async move { home(&view).flush(&view).await }).await
    }

    async fn status(&self, report: &StatusReport, offset: u64, len: u64) -> IoResult {
        let _running = self.view().begin();
        self.content.status(report, offset, len).await
    }

    /// A write that goes to its place without any change of the tables.
    #[inline]
    fn in_place<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> Option<IoFuture<'a>> {
        let is_plain = req.op == Op::Write && !(req.is_fua() && self.metadata().is_dirty());
        if !is_plain || self.metadata().is_corrupt() {
            return None;
        }
        let running = self.view().try_begin_change()?;
        let (place, len) = self.content.places.own_run(offset, req.len)?.ok()?;
        if len < req.len || self.check_inside(place, len).is_err() {
            return None;
        }
        Some(IoFuture::new(async move {
            let _running = running;
            self.content.data.channel.submit(req, place).await
        }))
    }
}

/// The writes of a request that has begun already.
struct Plain<'c>(&'c LiveChannel);

impl Channel for Plain<'_> {
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        IoFuture::new(self.0.write(req, offset))
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        self.0.block_status(report, offset, len)
    }
}

impl Channel for LiveChannel {
    #[inline]
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        if let Err(error) = self.content.limits().check(req, offset) {
            return IoFuture::ready(Err(error));
        }
        match req.op {
            Op::Flush => IoFuture::new(self.flush()),
            _ if req.len == 0 => IoFuture::ready(Ok(())),
            Op::Read => {
                let running = self.view().begin();
                if let Some(Ok(run)) = self.content.places.try_run(offset, req.len)
                    && let Some(at) = self.content.in_place(run, req)
                {
                    return IoFuture::new(async move {
                        let _running = running;
                        self.content.data.channel.submit(req, at).await
                    });
                }
                drop(running);
                IoFuture::new(self.read(req, offset))
            }
            _ => match self.in_place(req, offset) {
                Some(future) => future,
                None if self.metadata().is_corrupt() => IoFuture::ready(Err(IoError::Corrupt)),
                None => IoFuture::new(self.modify(req, offset)),
            },
        }
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        match self.content.limits().check_range(offset, len) {
            Ok(()) => IoFuture::new(self.status(report, offset, len)),
            Err(error) => IoFuture::ready(Err(error)),
        }
    }
}
