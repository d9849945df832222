//! The effect of each operation alone.

use crate::client::{Client, pattern};
use crate::{Layout, Subject, check};
use base::Rng;
use block::{Flags, IoError, Op, Status};
use reactor::CoreRef;

pub(crate) fn run(core: &CoreRef, subject: &Subject) {
    check(core, subject, "written data is read back", write_read);
    check(core, subject, "the first and last blocks", borders);
    check(core, subject, "scattered memory", scattered);
    check(core, subject, "durable writes and flushes", durable);
    check(core, subject, "write zeroes", write_zeroes);
    check(core, subject, "discard", discard);
    check(core, subject, "block status", status);
}

async fn write_read(client: Client) {
    let block = client.block_size();
    let longest = client.transfer_len(512 << 10) as u64;
    for (version, len) in [block, 2 * block, 7 * block, 64 << 10, longest].into_iter().enumerate() {
        let len = len.min(longest).next_multiple_of(block) as usize;
        for offset in [0, block, 5 * block, 1 << 20] {
            let bytes = pattern(offset, len, version as u8);
            client.write(offset, &bytes).await;
            client.expect(offset, &bytes, "after it was written").await;
        }
    }
}

async fn borders(client: Client) {
    let (block, end) = (client.block_size(), client.limits.capacity);
    for offset in [0, end - block] {
        let bytes = pattern(offset, block as usize, 3);
        client.write(offset, &bytes).await;
        client.flush().await;
        client.expect(offset, &bytes, "at the border of the device").await;
    }
}

/// Cuts `len` bytes into segments in ways that drives do not like.
fn layouts(len: usize) -> Vec<Layout> {
    let cut = |skip, pattern: &[usize]| {
        let mut lens = Vec::new();
        let mut left = len;
        for part in pattern.iter().cycle() {
            lens.push((*part).min(left));
            left -= (*part).min(left);
            if left == 0 {
                break;
            }
        }
        Layout { skip, lens }
    };
    let mut all = vec![
        cut(0, &[512]),
        cut(0, &[1, 511]),
        cut(0, &[4096, 512, 512]),
        cut(1, &[len]),
        cut(3, &[7, 13, 1021]),
        cut(512, &[len]),
        cut(512, &[0, 512, 0, 0, 1024]),
        cut(0, &[1]),
    ];
    let last = cut(0, &[len - 1, 1]);
    all.push(last);
    all
}

async fn scattered(client: Client) {
    let block = client.block_size();
    let len = (8 * block).max(16 << 10) as usize;
    let offset = 2 << 20;
    for (version, layout) in layouts(len).into_iter().enumerate() {
        let bytes = pattern(offset, len, version as u8 + 100);
        let what = || {
            format!("with memory {:?}… skipping {}", &layout.lens[..layout.lens.len().min(4)], layout.skip)
        };
        assert_eq!(client.write_as(offset, &bytes, Flags::NONE, &layout).await, Ok(()), "write {}", what());
        client.expect(offset, &bytes, &format!("after a write {}", what())).await;
        let (read, result) = client.read_as(offset, &layout).await;
        assert_eq!(result, Ok(()), "read {}", what());
        client.compare(offset, &read, &bytes, &what());
    }
}

async fn durable(client: Client) {
    let block = client.block_size() as usize;
    for (flags, version) in [(Flags::FUA, 1), (Flags::NONE, 2), (Flags::FUA, 3)] {
        let bytes = pattern(0, 4 * block, version);
        let layout = Layout { skip: 0, lens: vec![block, 3 * block] };
        assert_eq!(client.write_as(0, &bytes, flags, &layout).await, Ok(()), "write {flags:?}");
        client.flush().await;
        client.expect(0, &bytes, "after a flush").await;
    }
}

/// Fills 1 MiB, runs `op` on ranges inside and hands each to `after`; what is outside must stay.
async fn on_ranges<F: AsyncFn(&Client, u64, u64) -> Option<u8>>(client: &Client, name: &str, op: F) {
    const START: u64 = 4 << 20;
    let block = client.block_size();
    let area = client.transfer_len(1 << 20) as u64;
    let last = area - block;
    let ranges = [
        (0, block),
        (block, block),
        (3 * block, 17 * block),
        (0, area),
        (last, block),
        (block, area - 2 * block),
    ];
    for (version, (from, len)) in ranges.into_iter().enumerate() {
        let mut expected = pattern(START, area as usize, version as u8);
        client.write(START, &expected).await;
        let inside = from as usize..(from + len) as usize;
        if let Some(byte) = op(client, START + from, len).await {
            expected[inside].fill(byte);
            client.expect(START, &expected, &format!("after {name} {from}+{len}")).await;
            continue;
        }
        let now = client.read(START, area as usize).await;
        expected[inside.clone()].copy_from_slice(&now[inside]);
        client.compare(START, &now, &expected, &format!("after {name} {from}+{len}"));
    }
}

async fn write_zeroes(client: Client) {
    let kinds =
        [Flags::NONE, Flags::FUA, Flags::NO_UNMAP, Flags::NO_UNMAP.with(Flags::FUA), Flags::NO_FALLBACK];
    for flags in kinds {
        let name = format!("write zeroes {flags:?}");
        on_ranges(&client, &name, async |client: &Client, offset, len| {
            let result = client.command(Op::WriteZeroes, flags, offset, len).await;
            if result == Err(IoError::Unsupported) {
                let is_allowed = client.limits.max_write_zeroes == 0 || flags.contains(Flags::NO_FALLBACK);
                assert!(is_allowed, "{name} {offset}+{len} is not supported");
                return None;
            }
            assert_eq!(result, Ok(()), "{name} {offset}+{len}");
            Some(0)
        })
        .await;
    }
    // More than any buffer of zeroes holds.
    if client.limits.max_write_zeroes >= 4 << 20 {
        let block = client.block_size();
        client.write((8 << 20) - block, &pattern(0, 2 * block as usize, 1)).await;
        let len = (3 << 20) + block;
        assert_eq!(client.command(Op::WriteZeroes, Flags::NO_UNMAP, 8 << 20, len).await, Ok(()));
        let expected = [pattern(0, block as usize, 1), vec![0; block as usize]].concat();
        client.expect((8 << 20) - block, &expected, "around the start of long zeroes").await;
        client.expect((8 << 20) + len - block, &vec![0; block as usize], "at the end of long zeroes").await;
    }
}

async fn discard(client: Client) {
    on_ranges(&client, "discard", async |client: &Client, offset, len| {
        let result = client.command(Op::Discard, Flags::NONE, offset, len).await;
        let expected = if client.limits.max_discard == 0 { Err(IoError::Unsupported) } else { Ok(()) };
        assert_eq!(result, expected, "discard {offset}+{len}");
        None
    })
    .await;
    // Discarded blocks can be written again.
    let mut rng = Rng::new(client.seed);
    let bytes: Vec<u8> = (0..client.block_size()).map(|_| rng.draw() as u8).collect();
    client.write(4 << 20, &bytes).await;
    client.expect(4 << 20, &bytes, "written after a discard").await;
}

/// The whole device has a status, and written data is never reported as zeroes.
async fn status(client: Client) {
    let block = client.block_size();
    client.write(block, &pattern(block, block as usize, 9)).await;
    let extents = client.status(0, client.limits.capacity).await;
    assert_eq!(extents.iter().map(|extent| extent.len).sum::<u64>(), client.limits.capacity);
    let found = client.status(block, block).await;
    let is_zero = found[0].status.contains(Status::ZERO);
    assert!(!is_zero || !client.keeps_data, "written data counts as {:?}", found[0].status);
}
