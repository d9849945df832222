//! The header of a reply: everything but data, descriptors and error texts. Source: the NBD
//! protocol, "Transmission", with its extension "extended headers".

mod decode;
mod encode;

pub use decode::{Content, Front, MAX_FRONT, Violation, decode, extent};
pub use encode::{Reply, encode};

const SIMPLE_MAGIC: u32 = 0x6744_6698;
const STRUCTURED_MAGIC: u32 = 0x668e_33ef;
const EXTENDED_MAGIC: u32 = 0x6e8a_278c;

const FLAG_DONE: u16 = 1;

const TYPE_NONE: u16 = 0;
const TYPE_DATA: u16 = 1;
const TYPE_HOLE: u16 = 2;
const TYPE_STATUS: u16 = 5;
const TYPE_STATUS_EXTENDED: u16 = 6;
const TYPE_ERROR: u16 = 0x8001;
const TYPE_ERROR_OFFSET: u16 = 0x8002;
const IS_ERROR: u16 = 0x8000;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Replies;
    use crate::error::Refusal;
    use crate::request::{Command, Header};

    #[test]
    fn a_client_reads_every_header_that_a_server_sends() {
        let header = Header { command: Command::Read, flags: 0, cookie: 7, offset: 4096, len: 1024 };
        let refusal = Refusal::invalid("no");
        let cases = [
            (Reply::Done, Content::Nothing, true),
            (Reply::Data { len: 1024 }, Content::Data { offset: 4096, len: 1024 }, true),
            (
                Reply::Fragment { at: 512, len: 512, is_last: false },
                Content::Data { offset: 4608, len: 512 },
                false,
            ),
            (Reply::Failed(refusal), Content::Error { error: refusal.number, rest: 2 }, true),
        ];
        for replies in [Replies::Structured, Replies::Extended] {
            let status = Reply::Status { context: 3, extents: 2, is_last: true };
            let len = 2 * replies.descriptor_len() as u32;
            let status = (status, Content::Status { context: 3, len }, true);
            for (reply, content, is_last) in cases.into_iter().chain([status]) {
                let mut bytes = [0; 120];
                let sent = encode(replies, &header, reply, &mut bytes);
                let request_offset = (replies == Replies::Extended).then_some(header.offset);
                let (front, read) = decode(&bytes, replies).unwrap().expect("a whole header");
                assert_eq!(front, Front { cookie: 7, is_last, request_offset, content });
                // The text of an error is no part of the header.
                let text = if let Reply::Failed(refusal) = reply { refusal.text.len() } else { 0 };
                assert_eq!(read, sent - text);
            }
        }
        let mut bytes = [0; 16];
        for (reply, error) in [(Reply::Data { len: 9 }, 0), (Reply::Failed(refusal), refusal.number)] {
            assert_eq!(encode(Replies::Simple, &header, reply, &mut bytes), 16);
            let content = Content::Simple { error };
            let front = Front { cookie: 7, is_last: true, request_offset: None, content };
            assert_eq!(decode(&bytes, Replies::Simple), Ok(Some((front, 16))));
        }
    }
}
