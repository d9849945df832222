//! Requests that a device must refuse. Any offset and length may arrive; the error names the
//! reason.

use crate::client::{Client, pattern};
use crate::{Subject, check};
use block::{Flags, IoError, Op};
use reactor::CoreRef;

pub(crate) fn run(core: &CoreRef, subject: &Subject) {
    check(core, subject, "requests that are not aligned", misaligned);
    check(core, subject, "requests beyond the end", out_of_range);
    check(core, subject, "transfers without memory", without_memory);
    check(core, subject, "requests without length", without_length);
    check(core, subject, "flushes take any offset", flush_anywhere);
}

pub(crate) fn run_read_only(core: &CoreRef, subject: &Subject) {
    check(core, subject, "writes to a read-only device", read_only);
}

async fn misaligned(client: Client) {
    let block = client.block_size();
    for (offset, len) in [(1, block), (block / 2, block), (0, block - 1), (0, block + block / 2), (7, 9)] {
        assert_eq!(
            client.try_read(offset, len as usize).await,
            Err(IoError::Misaligned),
            "read {offset}+{len}"
        );
        assert_eq!(client.try_status(offset, len).await, Err(IoError::Misaligned), "status {offset}+{len}");
        if client.limits.read_only {
            continue;
        }
        let written = client.try_write(offset, len as usize).await;
        assert_eq!(written, Err(IoError::Misaligned), "write {offset}+{len}");
        for op in [Op::WriteZeroes, Op::Discard] {
            let result = client.command(op, Flags::NONE, offset, len).await;
            let expected = [Err(IoError::Misaligned), Err(IoError::Unsupported)];
            assert!(expected.contains(&result), "{} {offset}+{len}: {result:?}", op.name());
        }
    }
}

async fn out_of_range(client: Client) {
    let (block, end) = (client.block_size(), client.limits.capacity);
    let last = u64::MAX - (block - 1);
    for (offset, len) in [(end, block), (end - block, 2 * block), (end + block, block), (last, block)] {
        let result = client.try_read(offset, len as usize).await;
        assert_eq!(result, Err(IoError::OutOfRange), "read {offset}+{len} of {end}");
        let result = client.try_status(offset, len).await;
        assert_eq!(result, Err(IoError::OutOfRange), "status {offset}+{len} of {end}");
        if !client.limits.read_only {
            let result = client.try_write(offset, len as usize).await;
            assert_eq!(result, Err(IoError::OutOfRange), "write {offset}+{len} of {end}");
        }
    }
    if client.limits.read_only {
        return;
    }
    for (offset, len) in [(end, block), (0, end + block), (block, last), (last, block), (last, last)] {
        for op in [Op::WriteZeroes, Op::Discard] {
            let result = client.command(op, Flags::NONE, offset, len).await;
            assert_eq!(result, Err(IoError::OutOfRange), "{} {offset}+{len} of {end}", op.name());
        }
    }
}

async fn without_memory(client: Client) {
    let result = client.command(Op::Read, Flags::NONE, 0, client.block_size()).await;
    assert_eq!(result, Err(IoError::Invalid), "a read of one block into no memory");
    if !client.limits.read_only {
        let result = client.command(Op::Write, Flags::NONE, 0, client.block_size()).await;
        assert_eq!(result, Err(IoError::Invalid), "a write of one block from no memory");
    }
}

async fn without_length(client: Client) {
    let ops = if client.limits.read_only { &Op::ALL[..1] } else { &Op::ALL[..4] };
    for op in ops.iter().copied() {
        for offset in [0, client.block_size(), client.limits.capacity] {
            let result = client.command(op, Flags::NONE, offset, 0).await;
            assert_eq!(result, Ok(()), "{} {offset}+0", op.name());
        }
        let beyond = client.limits.capacity + client.block_size();
        let result = client.command(op, Flags::NONE, beyond, 0).await;
        assert_eq!(result, Err(IoError::OutOfRange), "{} {beyond}+0", op.name());
    }
}

async fn flush_anywhere(client: Client) {
    for offset in [0, 1, client.limits.capacity, u64::MAX] {
        assert_eq!(client.command(Op::Flush, Flags::NONE, offset, 0).await, Ok(()), "flush at {offset}");
    }
}

async fn read_only(client: Client) {
    let len = client.transfer_len(64 << 10).min(client.limits.capacity as usize);
    let before = client.read(0, len).await;
    let block = client.block_size();
    let bytes = pattern(0, block as usize, 99);
    for flags in [Flags::NONE, Flags::FUA] {
        let layout = crate::Layout::whole(bytes.len());
        assert_eq!(client.write_as(0, &bytes, flags, &layout).await, Err(IoError::ReadOnly), "write");
        for op in [Op::WriteZeroes, Op::Discard] {
            let result = client.command(op, flags, 0, block).await;
            assert_eq!(result, Err(IoError::ReadOnly), "{}", op.name());
        }
    }
    client.flush().await;
    client.expect(0, &before, "after writes that were refused").await;
}
