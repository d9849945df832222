//! Long requests in pieces: their execution while the memory budget for network clients is used up.
//!
//! ```text
//!   read:   for each piece: wait until the last one was sent ─► device ─► a chunk of the reply
//!   write:  for each piece: wait until the last one is stored ─► stream ─► device;  one reply at the end
//! ```
//!
//! A connection always has memory for one piece in each direction, so every request can complete. A
//! read is answered in chunks, so an error can be reported in any of them. A simple reply, and a
//! reply that must not be fragmented, announce all of their data in the header. No other reply may
//! be sent between their pieces. After the first piece an error can only disconnect the client, as
//! the protocol says.

use super::blocks::Writes;
use super::job::Job;
use super::request::Rules;
use super::wire::{CMD_FLAG_DF, Content, Form, Header, encode_reply, refusal_of};
use crate::stream::{Link, PIECE, ReplyPart};
use crate::target::Target;
use block::{Flags, IoError, IoResult, Op};
use std::cell::Cell;
use std::rc::Rc;

/// A long write, received in pieces.
#[derive(Clone)]
pub(super) struct LongWrite {
    /// The whole request.
    pub(super) header: Header,
    /// Bytes of the write that this piece and the earlier ones cover.
    pub(super) end: u64,
    /// The error of the first piece that failed.
    failed: Rc<Cell<Option<IoError>>>,
}

impl LongWrite {
    pub(super) fn new(header: Header) -> LongWrite {
        LongWrite { header, end: 0, failed: Rc::default() }
    }

    /// Bytes that later pieces will cover.
    pub(super) fn left(&self) -> u64 {
        self.header.len - self.end
    }

    /// The next piece: the updated write, and the piece's own header.
    pub(super) fn next(&self, block_size: u32) -> (LongWrite, Header) {
        let offset = self.header.offset + self.end;
        let len = self.left().min(piece_at(offset, block_size));
        let header = Header { offset, len, ..self.header };
        (LongWrite { end: self.end + len, ..self.clone() }, header)
    }

    /// Stores a piece, unless an earlier one has failed. Returns `None` when more pieces follow,
    /// else the result of the whole write.
    pub(super) async fn store(
        &self,
        piece: &Job,
        target: &Target,
        writes: &Writes,
        link: &Link,
    ) -> Option<IoResult> {
        if self.failed.get().is_none() {
            self.failed.set(piece.execute(target, writes, link).await.err());
        }
        (self.left() == 0).then(|| self.failed.get().map_or(Ok(()), Err))
    }
}

/// Length of the longest piece that starts at `offset`: together with all of its first block it
/// fits the memory of one piece.
fn piece_at(offset: u64, block_size: u32) -> u64 {
    PIECE as u64 - offset % u64::from(block_size)
}

/// Executes a read and answers it piece by piece.
pub(super) async fn read(header: &Header, rules: &Rules, target: &Target, link: &Link) {
    let is_whole = rules.form == Form::Simple || header.flags & CMD_FLAG_DF != 0;
    link.begin_pieces(is_whole).await;
    let mut done = 0;
    while done < header.len && !link.is_broken() {
        let offset = header.offset + done;
        let len = (header.len - done).min(piece_at(offset, rules.limits.block_size));
        let blocks = rules.blocks(&Header { offset, len, ..*header });
        let mut memory = link.piece_out(blocks.len).await;
        // SAFETY: the memory outlives the transfer, which is awaited here.
        let data = unsafe { memory.data() };
        let result = target.transfer(Op::Read, Flags::NONE, blocks.offset, data).await;
        if let Err(error) = result {
            drop(memory);
            fail(header, rules, error, is_whole && done > 0, link);
            link.end_pieces();
            return;
        }
        memory.cut(blocks.head, len as usize);
        let (is_first, is_last) = (done == 0, done + len == header.len);
        let front = |to: &mut [u8; crate::stream::MAX_FRONT]| match (is_whole, is_first) {
            (true, true) => encode_reply(rules.form, header, Content::Data { len: header.len as u32 }, to),
            (true, false) => 0,
            (false, _) => {
                let content = Content::Piece { at: done, len: len as u32, is_last };
                encode_reply(rules.form, header, content, to)
            }
        };
        let mut reply = ReplyPart::new(Some(memory), front);
        reply.is_last = is_last;
        link.send_piece(reply);
        done += len;
    }
    if done < header.len {
        link.drop_request();
    }
    link.stats().count_request(Op::Read, header.len);
    link.end_pieces();
}

/// Ends a failed read.
#[cold]
fn fail(header: &Header, rules: &Rules, error: IoError, is_promised: bool, link: &Link) {
    link.stats().count_request(Op::Read, header.len);
    link.stats().count_failure();
    if is_promised {
        link.cut("a read failed after part of its data was sent");
    }
    let content = Content::Failed(refusal_of(error, false));
    link.send_piece(ReplyPart::last(None, |to| encode_reply(rules.form, header, content, to)));
}
