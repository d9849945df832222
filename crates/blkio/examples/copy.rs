//! Copies a device to another, with several requests in flight:
//! `copy io_uring:path=a.img io_uring:path=b.img`

mod common;

use blkio::{AsyncQueue, Buffer, Device, Result};

/// Bytes of a request.
const STEP: usize = 256 << 10;

/// Requests in flight at a time.
const DEPTH: usize = 16;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments[..] {
        [source, target] => common::report(open_and_copy(source, target)),
        _ => {
            eprintln!("usage: copy SOURCE TARGET; each is DRIVER:PROPERTY=VALUE,…");
            std::process::exit(2);
        }
    }
}

fn open_and_copy(source: &str, target: &str) -> Result<()> {
    let source = common::device(source)?.set("read-only", true)?.start()?;
    let target = common::device(target)?.start()?;
    let [from, to] = [source.queue(0)?.into_async()?, target.queue(0)?.into_async()?];
    let capacity = source.capacity()?;
    blkio::block_on([&from, &to], copy(&from, &to, buffers(&source)?, buffers(&target)?, capacity))?;
    println!("{capacity} bytes");
    Ok(())
}

fn buffers(device: &Device) -> Result<Vec<Buffer>> {
    (0..DEPTH).map(|_| device.buffer(STEP)).collect()
}

async fn copy(
    from: &AsyncQueue,
    to: &AsyncQueue,
    mut sources: Vec<Buffer>,
    mut targets: Vec<Buffer>,
    capacity: u64,
) -> Result<()> {
    let offsets: Vec<u64> = (0..capacity).step_by(STEP).collect();
    for offsets in offsets.chunks(DEPTH) {
        let reads: Vec<_> = offsets
            .iter()
            .map(|&offset| {
                let mut buffer = sources.pop().expect("one for each request");
                buffer.resize((capacity - offset).min(STEP as u64) as usize);
                (offset, from.read(offset, buffer))
            })
            .collect();
        let mut writes = Vec::new();
        for (offset, read) in reads {
            let (result, source) = read.await;
            result?;
            // A buffer belongs to the device that it was made for.
            let mut target = targets.pop().expect("one for each request");
            target.resize(source.len());
            target.copy_from_slice(&source);
            sources.push(source);
            writes.push(to.write(offset, target));
        }
        for write in writes {
            let (result, target) = write.await;
            result?;
            targets.push(target);
        }
    }
    to.flush().await
}
