//! Long requests in fragments: their execution while the memory budget for network clients is used
//! up.
//!
//! ```text
//!   read:   for each fragment: wait until the last one was sent ─► device ─► a chunk of the reply
//!   write:  for each fragment: wait until the last one is stored ─► stream ─► device;  one reply at the end
//! ```
//!
//! A connection always has memory for one fragment in each direction, so every request can
//! complete. A read is answered in chunks, so an error can be reported in any of them. A simple
//! reply, and a reply that must not be fragmented, announce all of their data in the header. No
//! other reply may be sent between their fragments. After the first fragment an error can only
//! disconnect the client, as the protocol says.

use crate::long_write::fragment_at;
use crate::request::Rules;
use block::{Flags, IoError, Op};
use exports::stream::{Link, ReplyPart};
use exports::{DataMemory, Target};
use nbd::Replies;
use nbd::error::refusal_of;
use nbd::reply::{Reply, encode};
use nbd::request::{CMD_FLAG_DF, Header};

/// Executes a read and answers it fragment by fragment.
pub(crate) async fn read(header: &Header, rules: &Rules, target: &Target, link: &Link) {
    let is_whole = rules.form == Replies::Simple || header.flags & CMD_FLAG_DF != 0;
    link.begin_fragments(is_whole).await;
    let mut done = 0;
    while done < header.len && !link.is_broken() {
        let offset = header.offset + done;
        let len = (header.len - done).min(fragment_at(offset, rules.limits.block_size));
        let blocks = rules.blocks(&Header { offset, len, ..*header });
        let mut memory = link.fragment_out(blocks.len).await;
        // SAFETY: the memory outlives the transfer, which is awaited here.
        let data = unsafe { memory.data() };
        let result = target.transfer(Op::Read, Flags::NONE, blocks.offset, data).await;
        if let Err(error) = result {
            drop(memory);
            fail(header, rules, error, is_whole && done > 0, link);
            link.end_fragments();
            return;
        }
        memory.cut(blocks.head, len as usize);
        let (is_first, is_last) = (done == 0, done + len == header.len);
        let front = |to: &mut [u8; exports::stream::MAX_FRONT]| match (is_whole, is_first) {
            (true, true) => encode(rules.form, header, Reply::Data { len: header.len as u32 }, to),
            (true, false) => 0,
            (false, _) => {
                let content = Reply::Fragment { at: done, len: len as u32, is_last };
                encode(rules.form, header, content, to)
            }
        };
        let mut reply = ReplyPart::new(Some(memory), front);
        reply.is_last = is_last;
        link.send_fragment(reply);
        done += len;
    }
    if done < header.len {
        link.drop_request();
    }
    link.stats().count_request(Op::Read, header.len);
    link.end_fragments();
}

/// Ends a failed read.
#[cold]
fn fail(header: &Header, rules: &Rules, error: IoError, is_promised: bool, link: &Link) {
    link.stats().count_request(Op::Read, header.len);
    link.stats().count_failure();
    if is_promised {
        link.cut("a read failed after part of its data was sent");
    }
    let content = Reply::Failed(refusal_of(error, false));
    link.send_fragment(ReplyPart::last(None, |to| encode(rules.form, header, content, to)));
}
