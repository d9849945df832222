//! The table on the pool's device: two copies, of which the older is written over. There is always one that is whole.

use crate::table::{ALIGNMENT, DecodeError, MAX_BYTES, Table};
use block::{Channel, Flags, IoError, IoResult, Limits, Op, Request};
use reactor::{BufferPool, MAX_BUFFER};

/// Where the copies begin. What stands before is left alone, so that nobody takes the device for something else.
const COPIES: [u64; 2] = [64 << 10, 2 << 20];
/// Bytes before the first unit, at least.
pub const RESERVED: u64 = 4 << 20;
/// Longest transfer: every device takes it.
const PART: usize = 128 << 10;

const _: () =
    assert!(COPIES[0] + (MAX_BYTES as u64) < COPIES[1] && COPIES[1] + (MAX_BYTES as u64) < RESERVED);

/// Why there is no table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// The device cannot be read.
    #[error("the pool's table cannot be read: {0}")]
    Io(IoError),
    /// What is there is none.
    #[error(transparent)]
    Decode(DecodeError),
}

/// Reads the table: the newer of those that are whole.
///
/// # Errors
/// When there is none, or a later version was here: it may have gone on since.
pub async fn read(channel: &dyn Channel) -> Result<Table, ReadError> {
    let (one, other) = (read_copy(channel, COPIES[0]).await, read_copy(channel, COPIES[1]).await);
    let is_later =
        |copy: &Result<Table, ReadError>| matches!(copy, Err(ReadError::Decode(DecodeError::Version(_))));
    match (one, other) {
        (one, _) if is_later(&one) => one,
        (_, other) if is_later(&other) => other,
        (Ok(one), Ok(other)) => Ok(if one.sequence > other.sequence { one } else { other }),
        (Ok(table), Err(_)) | (Err(_), Ok(table)) => Ok(table),
        // Of two that cannot be read the one that says more.
        (Err(ReadError::Decode(DecodeError::None)), other) => other,
        (one, _) => one,
    }
}

async fn read_copy(channel: &dyn Channel, at: u64) -> Result<Table, ReadError> {
    let first = read_bytes(channel, at, ALIGNMENT as usize).await.map_err(ReadError::Io)?;
    let len = Table::length(&first).map_err(ReadError::Decode)?;
    let bytes =
        read_bytes(channel, at, len.next_multiple_of(ALIGNMENT as usize)).await.map_err(ReadError::Io)?;
    Table::decode(&bytes).map_err(ReadError::Decode)
}

async fn read_bytes(channel: &dyn Channel, offset: u64, len: usize) -> Result<Vec<u8>, IoError> {
    let pool = BufferPool::new(MAX_BUFFER);
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        let buffer = pool.take(PART.min(len - bytes.len())).await;
        let at = offset + bytes.len() as u64;
        let (buffer, result) = buffer.transfer(channel, Op::Read, Flags::NONE, at).await;
        result?;
        bytes.extend_from_slice(buffer.as_slice());
    }
    Ok(bytes)
}

/// Writes a table in the place of the one before the last; durable when it returns.
///
/// # Errors
/// When the device fails. Then the last table is still valid, unless the new one is whole after all.
pub async fn write(channel: &dyn Channel, bytes: &[u8], sequence: u64) -> IoResult {
    let mut bytes = bytes.to_vec();
    bytes.resize(bytes.len().next_multiple_of(ALIGNMENT as usize), 0);
    write_bytes(channel, COPIES[sequence as usize % 2], &bytes).await?;
    channel.submit(&Request::flush(), 0).await
}

async fn write_bytes(channel: &dyn Channel, offset: u64, bytes: &[u8]) -> IoResult {
    let pool = BufferPool::new(MAX_BUFFER);
    for (number, part) in bytes.chunks(PART).enumerate() {
        let mut buffer = pool.take(part.len()).await;
        buffer.as_mut_slice().copy_from_slice(part);
        let at = offset + (number * PART) as u64;
        buffer.transfer(channel, Op::Write, Flags::NONE, at).await.1?;
    }
    Ok(())
}

/// Makes a range read as zeroes, durably with the next flush.
///
/// # Errors
/// When the device fails.
pub async fn zero(channel: &dyn Channel, limits: &Limits, offset: u64, len: u64) -> IoResult {
    let most = limits.max_write_zeroes.min(1 << 30) & !(ALIGNMENT - 1);
    let mut done = 0;
    while done < len {
        let part = if most > 0 { (len - done).min(most) } else { (len - done).min(PART as u64) };
        match most {
            0 => write_bytes(channel, offset + done, &vec![0; part as usize]).await?,
            _ => channel.submit(&Request::write_zeroes(part, Flags::NONE), offset + done).await?,
        }
        done += part;
    }
    Ok(())
}
