//! An NBD connection after its handshake.

use crate::blocks::{RangeLock, Writes};
use crate::fragments;
use crate::job::{Job, Part};
use crate::reading::Reader;
use crate::request::Rules;
use crate::status;
use ::stream::{Received, Wire};
use block::{Device, DirtyBitmap, IoResult};
use exports::Target;
use exports::stream::{Found, Link, MAX_FRONT, Memory, Protocol, ReplyPart};
use exports::{DataMemory, Error};
use nbd::error::refusal_of;
use nbd::reply::{Reply, encode};
use nbd::request::{Command, Header};
use std::cell::RefCell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Maximum unanswered requests of one connection; clients gain nothing from more.
pub(crate) const MAX_REQUESTS: usize = 512;

/// The session of one client.
pub(crate) struct Session {
    rules: Rules,
    target: Target,
    bitmaps: Arc<[Arc<dyn DirtyBitmap>]>,
    writes: Writes,
    capacity: Arc<AtomicU64>,
    reader: RefCell<Reader>,
}

impl Session {
    /// Starts a session over `device`, opened on the calling core. `early` holds bytes received
    /// after the handshake.
    pub(crate) fn open(
        rules: Rules,
        device: Arc<dyn Device>,
        bitmaps: Arc<[Arc<dyn DirtyBitmap>]>,
        writes: &Arc<RangeLock>,
        capacity: Arc<AtomicU64>,
        early: &[u8],
    ) -> Result<Session, Error> {
        let target = Target::open(device, rules.is_read_only)?;
        Ok(Session {
            rules,
            target,
            bitmaps,
            writes: Writes::of(writes),
            capacity,
            reader: RefCell::new(Reader::new(early)),
        })
    }

    #[inline]
    fn answer(&self, header: &Header, content: Reply, data: Option<Memory>, link: &Link) {
        let form = self.rules.form;
        link.send(ReplyPart::last(data, |to| encode(form, header, content, to)));
    }

    /// Answers a completed request.
    #[inline]
    fn conclude(&self, Job { header, mut memory, .. }: Job, result: IoResult, link: &Link) {
        let is_read = header.command == Command::Read;
        let blocks = self.rules.blocks(&header);
        if let (true, false, Some(memory)) = (is_read, blocks.are_meant(&header), &mut memory) {
            memory.cut(blocks.head, header.len as usize);
        }
        let (content, data) = match result {
            Ok(()) if is_read => (Reply::Data { len: header.len as u32 }, memory),
            Ok(()) => (Reply::Done, None),
            Err(error) => (Reply::Failed(refusal_of(error, !is_read)), None),
        };
        self.answer(&header, content, data, link);
    }

    /// Answers a query of block status.
    async fn report(&self, header: &Header, link: &Link) {
        let mut places = self.rules.selected.places().peekable();
        let (mut first, mut rest) = (None, Vec::new());
        while let Some(place) = places.next() {
            let extents = match place.checked_sub(1) {
                None => status::extents(header, &self.target).await,
                Some(bitmap) => Ok(status::dirty(header, &*self.bitmaps[bitmap])),
            };
            let extents = match extents {
                Ok(extents) => extents,
                Err(error) => {
                    link.stats().count_failure();
                    return self.answer(header, Reply::Failed(refusal_of(error, false)), None, link);
                }
            };
            let (context, is_last) = (crate::offer::context_id(place), places.peek().is_none());
            let content = Reply::Status { context, extents: extents.len() as u32, is_last };
            // The header of the first context is in front of the data.
            if first.is_some() {
                let mut front = [0; MAX_FRONT];
                let len = encode(self.rules.form, header, content, &mut front);
                rest.extend(&front[..len]);
            }
            first.get_or_insert(content);
            status::encode(&extents, self.rules.form, &mut rest);
        }
        let Some(first) = first else { return };
        let mut memory = link.memory(rest.len()).await;
        memory.fill(0, &rest);
        self.answer(header, first, Some(memory), link);
    }
}

impl Protocol for Session {
    type Job = Job;

    fn receive(&self, wire: &mut Wire) -> io::Result<Received> {
        let mut reader = self.reader.borrow_mut();
        let received = reader.with_due(&self.rules, |inbox, due| inbox.receive(wire, due))?;
        if let Received::Bytes { direct, .. } = received {
            reader.note_due(direct);
        }
        Ok(received)
    }

    fn next(&self, link: &Link, is_closing: bool) -> Found<Job> {
        let capacity = self.capacity.load(Ordering::Relaxed);
        let next = self.reader.borrow_mut().next(&self.rules, capacity, is_closing, link);
        match next {
            Ok(found) => found,
            Err((header, content)) => {
                if let Reply::Failed(_) = content {
                    link.stats().count_failure();
                }
                self.answer(&header, content, None, link);
                Found::Done
            }
        }
    }

    #[inline]
    fn weight(job: &Job) -> usize {
        job.memory.as_ref().map_or(0, DataMemory::len)
    }

    #[inline]
    async fn serve(&self, job: Job, link: &Link) {
        match &job.part {
            Part::Whole if job.header.command == Command::BlockStatus => self.report(&job.header, link).await,
            Part::Whole => {
                let result = job.execute(&self.target, &self.writes, link).await;
                self.conclude(job, result, link);
            }
            Part::LongRead => fragments::read(&job.header, &self.rules, &self.target, link).await,
            Part::OfWrite(write) => {
                let result = write.store(job.execute(&self.target, &self.writes, link)).await;
                let header = write.header;
                match result {
                    // The next fragment can be allocated once the memory of this one is free.
                    None => drop(job),
                    Some(result) => self.conclude(Job { header, ..job }, result, link),
                }
                link.look_again();
            }
        }
    }

    fn give_up(&self, link: &Link, is_closing: bool) {
        let given_up = self.reader.borrow_mut().give_up(&self.rules, is_closing);
        if given_up.is_forgotten {
            link.drop_request();
        }
    }

    fn unfinished(&self) -> usize {
        usize::from(self.reader.borrow().is_skipping())
    }
}
