//! A queue that is warm allocates nothing for a request.

use allocation_counter::measure;
use blkio::{Buffer, Builder, Device, Memory, Request, block_on};

const LEN: usize = 4096;

fn device(file: &tempfile::NamedTempFile) -> Device {
    file.as_file().set_len(1 << 20).unwrap();
    let path = file.path().to_str().unwrap();
    Builder::new("io_uring").unwrap().set("path", path).unwrap().start().unwrap()
}

#[test]
fn polled_requests_allocate_nothing() {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let device = device(&file);
    let mut queue = device.queue(0).unwrap();
    let mut idle: Vec<Buffer> = (0..8).map(|_| device.buffer(LEN).unwrap()).collect();
    let mut rounds = |count: u64| {
        for round in 0..count {
            while let Some(buffer) = idle.pop() {
                queue.submit(Request::read(round * LEN as u64, buffer));
            }
            for completion in queue.wait(8).unwrap() {
                completion.result.unwrap();
                if let Memory::One(buffer) = completion.memory {
                    idle.push(buffer);
                }
            }
            queue.write_at(0, &[7; 512]).unwrap();
        }
    };
    rounds(3);
    assert_eq!(measure(|| rounds(100)).count_total, 0);
}

#[test]
fn futures_allocate_nothing() {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let device = device(&file);
    let queue = device.queue(0).unwrap().into_async().unwrap();
    let mut spare = Some(device.buffer(LEN).unwrap());
    let mut rounds = |count: u64| {
        block_on([&queue], async {
            for round in 0..count {
                let (result, buffer) = queue.read(round * LEN as u64, spare.take().unwrap()).await;
                result.unwrap();
                spare = Some(buffer);
                queue.flush().await.unwrap();
            }
        });
    };
    rounds(3);
    let [once, often] = [1, 100].map(|count| measure(|| rounds(count)).count_total);
    assert_eq!(once, often, "only block_on() itself allocates");
}
