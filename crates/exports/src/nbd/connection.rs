//! An NBD connection after its handshake.

use super::blocks::{RangeLock, Writes};
use super::fragments;
use super::job::{Job, Part};
use super::reading::Reader;
use super::request::Rules;
use super::status;
use super::wire::{Command, Content, Header, encode_reply, refusal_of};
use crate::Error;
use crate::stream::{Found, Link, Memory, Protocol, Received, ReplyPart, Wire};
use crate::target::Target;
use block::{Device, IoResult};
use std::cell::RefCell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Maximum unanswered requests of one connection; clients gain nothing from more.
pub(super) const MAX_REQUESTS: usize = 512;

/// The session of one client.
pub(super) struct Session {
    rules: Rules,
    target: Target,
    writes: Writes,
    capacity: Arc<AtomicU64>,
    reader: RefCell<Reader>,
}

impl Session {
    /// Starts a session over `device`, opened on the calling core. `early` holds bytes received
    /// after the handshake.
    pub(super) fn open(
        rules: Rules,
        device: Arc<dyn Device>,
        writes: &Arc<RangeLock>,
        capacity: Arc<AtomicU64>,
        early: &[u8],
    ) -> Result<Session, Error> {
        let target = Target::open(device, rules.is_read_only)?;
        Ok(Session {
            rules,
            target,
            writes: Writes::of(writes),
            capacity,
            reader: RefCell::new(Reader::new(early)),
        })
    }

    #[inline]
    fn answer(&self, header: &Header, content: Content, data: Option<Memory>, link: &Link) {
        let form = self.rules.form;
        link.send(ReplyPart::last(data, |to| encode_reply(form, header, content, to)));
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
            Ok(()) if is_read => (Content::Data { len: header.len as u32 }, memory),
            Ok(()) => (Content::Done, None),
            Err(error) => (Content::Failed(refusal_of(error, !is_read)), None),
        };
        self.answer(&header, content, data, link);
    }

    /// Answers a query of block status.
    async fn report(&self, header: &Header, link: &Link) {
        let extents = match status::extents(header, &self.target).await {
            Ok(extents) => extents,
            Err(error) => {
                link.stats().count_failure();
                return self.answer(header, Content::Failed(refusal_of(error, false)), None, link);
            }
        };
        let descriptors = status::encode(&extents, self.rules.form);
        let mut memory = link.memory(descriptors.len()).await;
        memory.fill(0, &descriptors);
        let content = Content::Status { extents: extents.len() as u32 };
        self.answer(header, content, Some(memory), link);
    }
}

impl Protocol for Session {
    type Job = Job;

    fn receive(&self, wire: &Wire) -> io::Result<Received> {
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
                if let Content::Failed(_) = content {
                    link.stats().count_failure();
                }
                self.answer(&header, content, None, link);
                Found::Done
            }
        }
    }

    #[inline]
    fn weight(job: &Job) -> usize {
        job.memory.as_ref().map_or(0, Memory::len)
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
