//! Many requests on one channel, and one device on two cores.

use crate::client::{Client, pattern};
use crate::{Subject, check};
use block::{Flags, Op};
use reactor::CoreRef;

/// Far beyond any queue's depth.
const MANY: usize = 3000;

pub(crate) fn run(first: &CoreRef, second: &CoreRef, subject: &Subject) {
    check(first, subject, "more writes at once than any queue holds", many_writes);
    check(first, subject, "reads that overlap", overlapping_reads);
    check(first, subject, "every operation at once", mixed);
    two_cores(first, second, subject);
}

async fn many_writes(client: Client) {
    let block = client.block_size();
    client
        .all_at_once(MANY, move |i, client| async move {
            let offset = i as u64 * block;
            client.write(offset, &pattern(offset, block as usize, i as u8)).await;
        })
        .await;
    client
        .all_at_once(MANY, move |i, client| async move {
            let offset = i as u64 * block;
            client.expect(offset, &pattern(offset, block as usize, i as u8), "among many").await;
        })
        .await;
}

async fn overlapping_reads(client: Client) {
    let block = client.block_size();
    let bytes = pattern(0, 64 * block as usize, 77);
    client.write(0, &bytes).await;
    client
        .all_at_once(200, move |i, client| {
            let bytes = bytes.clone();
            async move {
                let (from, blocks) = (i as u64 % 32, 1 + i as u64 % 31);
                let range = (from * block) as usize..((from + blocks) * block) as usize;
                client.expect(from * block, &bytes[range], "while others read it too").await;
            }
        })
        .await;
}

/// Each task works in an area of its own, so everything stays predictable.
async fn mixed(client: Client) {
    const AREA: u64 = 64 << 10;
    client
        .all_at_once(64, |i, client| async move {
            let start = i as u64 * AREA;
            let len = client.transfer_len(AREA as usize);
            for version in 0..8u8 {
                let bytes = pattern(start, len, version);
                client.write(start, &bytes).await;
                client.flush().await;
                client.expect(start, &bytes, "after a flush among many").await;
                let flags = if version % 2 == 0 { Flags::NONE } else { Flags::FUA };
                if client.command(Op::WriteZeroes, flags, start, AREA).await.is_ok() {
                    client.expect(start, &vec![0; len], "after zeroes among many").await;
                }
                let _ = client.command(Op::Discard, Flags::NONE, start, AREA).await;
            }
        })
        .await;
}

fn two_cores(first: &CoreRef, second: &CoreRef, subject: &Subject) {
    const ROUNDS: u8 = 30;
    let len = 64 << 10;
    for round in 0..ROUNDS {
        let (writer, reader) = if round % 2 == 0 { (first, second) } else { (second, first) };
        let offset = u64::from(round) * len as u64;
        check(writer, subject, "a write on one core", move |client| async move {
            client.write(offset, &pattern(offset, client.transfer_len(len), round)).await;
        });
        check(reader, subject, "its read on another core", move |client| async move {
            let bytes = pattern(offset, client.transfer_len(len), round);
            client.expect(offset, &bytes, "written on another core").await;
        });
    }
    both_at_once(first, second, subject);
}

/// Both cores write every other block of one area, then each reads all of it.
fn both_at_once(first: &CoreRef, second: &CoreRef, subject: &Subject) {
    const BLOCKS: usize = 512;
    let write = |core: &CoreRef, half: usize| {
        let (core, subject) = (core.clone(), subject.clone());
        std::thread::spawn(move || {
            check(&core, &subject, "interleaved writes of two cores", move |client| async move {
                let block = client.block_size();
                client
                    .all_at_once(BLOCKS, move |i, client| async move {
                        let offset = (2 * i + half) as u64 * block;
                        client.write(offset, &pattern(offset, block as usize, 55)).await;
                    })
                    .await;
            });
        })
    };
    for writer in [write(first, 0), write(second, 1)] {
        writer.join().unwrap_or_else(|e| std::panic::resume_unwind(e));
    }
    for core in [first, second] {
        check(core, subject, "data written by two cores", |client| async move {
            let block = client.block_size();
            for i in 0..2 * BLOCKS as u64 {
                let bytes = pattern(i * block, block as usize, 55);
                client.expect(i * block, &bytes, "after two cores wrote side by side").await;
            }
        });
    }
}
