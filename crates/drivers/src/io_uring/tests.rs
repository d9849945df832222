//! The driver over real files: the conformance suite, and errors that only files have.

use super::*;
use block::{Data, Flags, IoError, IoResult, Op, Queue, Request, Segment, Status, StatusReport};
use conformance::Suite;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

const SIZE: u64 = 64 << 20;

fn image(len: u64) -> tempfile::NamedTempFile {
    image_in(&std::env::temp_dir(), len)
}

fn image_in(directory: &Path, len: u64) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new_in(directory).unwrap();
    file.as_file().set_len(len).unwrap();
    file
}

fn open(options: &Options) -> Arc<UringDevice> {
    Arc::new(UringDevice::open(options).unwrap_or_else(|e| panic!("{e}")))
}

fn refusal(options: &Options) -> String {
    UringDevice::open(options).err().expect("must not open").to_string()
}

/// The suite over a file that can grow.
fn suite(file: &tempfile::NamedTempFile, options: &Options) {
    let backing = file.reopen().unwrap();
    Suite::new(open(options)).on_grow(move || backing.set_len(SIZE + (1 << 20)).unwrap()).run();
}

/// The suite, if the file system supports the options.
fn suite_if_possible(file: &tempfile::NamedTempFile, options: &Options) {
    let refused = UringDevice::open(options).err();
    match refused {
        None => suite(file, options),
        Some(error) => eprintln!("skipped: {error}"),
    }
}

#[test]
fn a_buffered_file_passes_the_suite() {
    let file = image(SIZE);
    suite(&file, &Options::new(file.path()));
}

#[test]
fn a_direct_file_passes_the_suite() {
    let file = image(SIZE);
    let options = Options { direct: true, ..Options::new(file.path()) };
    suite_if_possible(&file, &options);
}

#[test]
fn a_direct_file_with_registered_buffers_and_few_slots_passes_the_suite() {
    let file = image(SIZE);
    let few = Options { queue_depth: 3, fixed_buffers: true, direct: true, ..Options::new(file.path()) };
    suite_if_possible(&file, &few);
}

#[test]
fn a_file_in_memory_passes_the_suite() {
    let directory = Path::new("/dev/shm");
    if !directory.is_dir() {
        return eprintln!("skipped: no /dev/shm");
    }
    for direct in [false, true] {
        let file = image_in(directory, SIZE);
        let options = Options { direct, ..Options::new(file.path()) };
        suite_if_possible(&file, &options);
    }
}

/// The extents of a range of a device.
fn extents(device: &Arc<UringDevice>, offset: u64, len: u64) -> Vec<(u64, Status)> {
    let device = device.clone();
    reactor::run(async move {
        let channel = device.open_channel().unwrap();
        let mut all = Vec::new();
        let mut done = 0;
        while done < len {
            let report = StatusReport::new();
            channel.block_status(&report, offset + done, len - done).await.unwrap();
            all.extend(report.extents().map(|extent| (extent.len, extent.status)));
            done += report.covered();
        }
        all
    })
}

#[test]
fn holes_of_a_file_are_reported_as_far_as_they_are_whole_blocks() {
    let file = image(1 << 40);
    let write = |offset| file.as_file().write_all_at(&[7; 4096], offset).unwrap();
    write(1 << 20);
    write(1 << 39);
    let device = open(&Options { block_size: Some(4096), ..Options::new(file.path()) });
    let (data, hole) = (Status::DATA, Status::ZERO_HOLE);
    let second = (1 << 39) - (1 << 20) - 4096;
    let rest = (1 << 39) - 4096;
    assert_eq!(
        extents(&device, 0, 1 << 40),
        [(1 << 20, hole), (4096, data), (second, hole), (4096, data), (rest, hole)]
    );
    assert_eq!(extents(&device, (1 << 20) + 4096, 8192), [(8192, hole)]);
    assert_eq!(extents(&device, 1 << 20, 4096), [(4096, data)]);
    // Blocks of the device that are longer than those of the file system.
    let coarse = open(&Options { block_size: Some(65536), share: true, ..Options::new(file.path()) });
    assert_eq!(extents(&coarse, 1 << 20, 1 << 20), [(65536, data), ((1 << 20) - 65536, hole)]);
}

#[test]
fn a_file_with_more_extents_than_a_report_has_is_reported_in_parts() {
    let file = image(1 << 30);
    for i in 0..200 {
        file.as_file().write_all_at(&[7; 4096], i << 20).unwrap();
    }
    let device = open(&Options::new(file.path()));
    let found = extents(&device, 0, 1 << 30);
    let data = found.iter().filter(|(_, status)| *status == Status::DATA);
    assert_eq!((data.map(|(len, _)| len).sum::<u64>(), found.len()), (200 * 4096, 400));
}

#[test]
fn a_file_that_ends_inside_a_block_has_data_up_to_the_block_boundary() {
    let file = image(0);
    file.as_file().write_all_at(&[7; 5000], 0).unwrap();
    let device = open(&Options { block_size: Some(4096), ..Options::new(file.path()) });
    assert_eq!(extents(&device, 0, 8192), [(8192, Status::DATA)]);
}

#[test]
fn a_device_that_is_closed_while_it_looks_for_holes_frees_its_file() {
    let file = image(1 << 30);
    for _ in 0..50 {
        let device = open(&Options::new(file.path()));
        assert_eq!(extents(&device, 0, 4096).len(), 1);
        // The next one gets the lock of the file.
        drop(device);
    }
}

#[test]
fn a_file_that_is_only_read_passes_the_suite() {
    let file = image(1 << 20);
    Suite::new(open(&Options { read_only: true, ..Options::new(file.path()) })).run();
}

/// A loop device over a file, detached when dropped.
struct Loop {
    path: String,
    _file: tempfile::NamedTempFile,
}

impl Loop {
    /// Needs root, `/dev/loop-control` and losetup(8).
    fn attach() -> Result<Loop, String> {
        let file = image(SIZE);
        let mut command = Command::new("losetup");
        let output =
            command.args(["--find", "--show"]).arg(file.path()).output().map_err(|e| e.to_string())?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).trim().to_owned());
        }
        let path = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        Ok(Loop { path, _file: file })
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.path]).status();
    }
}

#[test]
fn a_block_device_passes_the_suite_and_has_one_writer() {
    let device = match Loop::attach() {
        Ok(device) => device,
        Err(error) => return eprintln!("skipped: no loop device: {error}"),
    };
    for direct in [false, true] {
        let options = Options { direct, ..Options::new(&device.path) };
        let writer = open(&options);
        let second = refusal(&options);
        assert!(second.contains("is in use") && second.contains("share=on"), "{second}");
        UringDevice::open(&Options { read_only: true, ..options.clone() }).unwrap();
        Suite::new(writer).run();
    }
    let limits = open(&Options::new(&device.path)).limits();
    assert!(limits.volatile_cache && limits.capacity == SIZE);
}

#[test]
fn an_error_of_opening_names_the_file_and_the_reason() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("none");
    let error = refusal(&Options::new(&path));
    assert!(error.contains("none") && error.contains("No such file"), "{error}");
    let error = refusal(&Options::new(directory.path()));
    assert!(error.contains("is a directory, not a regular file"), "{error}");
    let error = refusal(&Options::new("/dev/null"));
    assert!(error.contains("/dev/null is a character device"), "{error}");
    let small = image(511);
    let error = refusal(&Options::new(small.path()));
    assert!(error.contains("too small: 511 bytes, a block has 512"), "{error}");
    let file = image(1 << 20);
    let error = refusal(&Options { block_size: Some(1000), ..Options::new(file.path()) });
    assert!(error.contains("block_size=1000"), "{error}");
    let error = refusal(&Options { queue_depth: 0, ..Options::new(file.path()) });
    assert!(error.contains("queue_depth=0"), "{error}");
    let error = refusal(&Options { direct: true, ..Options::new("/proc/version") });
    assert!(error.contains("direct") || error.contains("writing"), "{error}");
}

/// A qemu-io process with an open image; it ends when its standard input closes.
struct QemuIo(std::process::Child);

impl QemuIo {
    fn open(arguments: &[&str], path: &std::path::Path) -> QemuIo {
        use std::process::Stdio;
        let mut command = Command::new("qemu-io");
        command.args(arguments).args(["-f", "raw"]).arg(path);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        // Its prompt appears once the image is open; otherwise it exits.
        let mut byte = [0];
        let read = std::io::Read::read(child.stdout.as_mut().unwrap(), &mut byte).unwrap();
        assert_eq!(read, 1, "qemu-io {arguments:?} does not open the image");
        QemuIo(child)
    }
}

impl Drop for QemuIo {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

#[test]
fn tools_of_qemu_read_an_image_beside_its_writer_and_write_to_none_that_has_one() {
    if let Err(error) = Command::new("qemu-io").arg("--version").output() {
        return eprintln!("skipped: no qemu-io: {error}");
    }
    let (file, copy) = (image(1 << 20), image(1 << 20));
    let options = Options::new(file.path());
    let qemu = |program: &str, arguments: &[&str]| {
        let output = Command::new(program).args(arguments).output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (path, other) = (file.path().to_str().unwrap(), copy.path().to_str().unwrap());
    let writer = open(&options);
    let readers = [
        ("qemu-img", vec!["compare", "-U", "-f", "raw", "-F", "raw", path, other]),
        ("qemu-img", vec!["convert", "-U", "-f", "raw", "-O", "raw", path, other]),
        ("qemu-img", vec!["info", "-U", path]),
        ("qemu-io", vec!["-r", "-U", "-f", "raw", "-c", "read 0 4k", path]),
    ];
    for (program, arguments) in &readers {
        let (is_ok, said) = qemu(program, arguments);
        assert!(is_ok, "{program} {arguments:?}: {said}");
    }
    let others = [
        ("qemu-io", vec!["-f", "raw", "-c", "write 0 4k", path]),
        ("qemu-img", vec!["convert", "-n", "-f", "raw", "-O", "raw", other, path]),
    ];
    for (program, arguments) in &others {
        let (is_ok, said) = qemu(program, arguments);
        assert!(!is_ok && said.contains("lock"), "{program} {arguments:?}: {said}");
    }
    drop(writer);
    let guest = QemuIo::open(&[], file.path());
    assert!(refusal(&options).contains("open for writing elsewhere"));
    drop(guest);
    let _reader = QemuIo::open(&["-r", "-U"], file.path());
    open(&options);
}

#[test]
fn an_image_has_one_writer_and_any_number_of_readers() {
    let file = image(1 << 20);
    let options = Options::new(file.path());
    let writer = open(&options);
    let error = refusal(&options);
    assert!(error.contains("open for writing elsewhere") && error.contains("share=on"), "{error}");
    let reader = open(&Options { read_only: true, ..options.clone() });
    assert!(reader.limits().read_only);
    open(&Options { share: true, ..options.clone() });
    drop(writer);
    open(&options);
}

#[test]
fn polling_without_poll_queues_uses_interrupts() {
    let file = image(1 << 20);
    let device = open(&Options { iopoll: true, ..Options::new(file.path()) });
    assert!(!device.is_polled);
}

#[test]
fn a_file_that_ends_inside_a_block_has_the_whole_block() {
    let file = image(10_000);
    assert_eq!(open(&Options::new(file.path())).limits().capacity, 10_240);
    let large = Options { block_size: Some(4096), ..Options::new(file.path()) };
    let device = open(&large);
    assert_eq!((device.limits().capacity, device.limits().block_size), (12_288, 4096));
    file.as_file().set_len(12_289).unwrap();
    assert_eq!(device.refresh().unwrap().capacity, 16_384);
}

#[test]
fn a_file_grows_and_shrinks_on_request() {
    let file = image(8192);
    let device = open(&Options::new(file.path()));
    let len = || std::fs::metadata(file.path()).unwrap().len();
    for bytes in [16_384, 4096] {
        assert_eq!(device.resize(bytes).unwrap().capacity, bytes);
        assert_eq!((device.limits().capacity, len()), (bytes, bytes));
    }
    let refusal = device.resize(1000).unwrap_err().to_string();
    assert!(refusal.ends_with("size 1000: no multiple of the block size 512"), "{refusal}");
    drop(device);
    let device = open(&Options { read_only: true, ..Options::new(file.path()) });
    let refusal = device.resize(8192).unwrap_err().to_string();
    assert!(refusal.ends_with("the size is fixed"), "{refusal}");
    assert_eq!(len(), 4096);
}

#[test]
fn the_last_block_of_a_file_reads_with_zeroes_and_the_file_never_grows() {
    for directory in [std::env::temp_dir(), "/dev/shm".into()].iter().filter(|path| path.is_dir()) {
        for direct in [false, true] {
            let file = image_in(directory, 0);
            file.as_file().write_all_at(&[7; 8192 + 123], 0).unwrap();
            let options = Options { direct, block_size: Some(4096), ..Options::new(file.path()) };
            let Ok(device) = UringDevice::open(&options) else { continue };
            assert_eq!(device.limits().capacity, 12_288);
            let mut memory = [1u8; 3 * 4096];
            let skip = memory.as_ptr().align_offset(4096);
            let list = [Segment { base: memory[skip..].as_mut_ptr(), len: 4096 }];
            // SAFETY: the memory outlives the requests.
            let data = unsafe { Data::new(&list) };
            let mut driver = Driver::new(&device);
            assert_eq!(driver.run(&Request::read(data), 8192), Ok(()));
            let expected = [[7; 123].as_slice(), &[0; 4096 - 123]].concat();
            assert!(memory[skip..skip + 4096] == expected, "direct: {direct}");
            // Only zeroes may be written beyond the end.
            for flags in [Flags::NONE, Flags::FUA, Flags::NO_UNMAP] {
                assert_eq!(driver.run(&Request::write_zeroes(4096, flags), 8192), Ok(()));
            }
            assert_eq!(driver.run(&Request::discard(4096), 8192), Ok(()));
            assert_eq!(driver.run(&Request::write(data, Flags::FUA), 4096), Ok(()));
            assert_eq!(driver.run(&Request::write(data, Flags::FUA), 8192), Ok(()));
            memory[skip + 123] = 1;
            assert_eq!(driver.run(&Request::write(data, Flags::FUA), 8192), Err(IoError::Medium));
            let content = std::fs::read(file.path()).unwrap();
            assert!(content == [&[7; 4096], &expected[..], &[7; 123]].concat(), "direct: {direct}");
            memory[skip..skip + 123].fill(5);
            memory[skip + 123] = 0;
            assert_eq!(driver.run(&Request::write(data, Flags::NONE), 8192), Ok(()));
            assert_eq!(driver.run(&Request::flush(), 0), Ok(()));
            memory[skip..skip + 4096].fill(1);
            assert_eq!(driver.run(&Request::read(data), 8192), Ok(()));
            let expected = [[5; 123].as_slice(), &[0; 4096 - 123]].concat();
            assert!(memory[skip..skip + 4096] == expected, "direct: {direct}");
            assert_eq!(std::fs::read(file.path()).unwrap()[8192..], [5; 123], "direct: {direct}");
            assert_eq!(device.refresh().unwrap().capacity, 12_288);
            // The end of a file that was extended is elsewhere.
            file.as_file().set_len(12_288).unwrap();
            assert_eq!(device.refresh().unwrap().capacity, 12_288);
            memory[skip..skip + 4096].fill(6);
            assert_eq!(driver.run(&Request::write(data, Flags::FUA), 8192), Ok(()));
            assert_eq!(std::fs::read(file.path()).unwrap()[8192..], [6; 4096]);
        }
    }
}

#[test]
fn zeroes_that_are_written_out_end_with_the_file() {
    for direct in [false, true] {
        let file = image(0);
        file.as_file().write_all_at(&[7; 4096 + 123], 0).unwrap();
        let options = Options { direct, block_size: Some(4096), ..Options::new(file.path()) };
        let Ok(device) = UringDevice::open(&options) else { continue };
        let mut driver = Driver::new(&device);
        driver.queue.refuse_holes();
        assert_eq!(driver.run(&Request::write_zeroes(8192, Flags::FUA), 0), Ok(()));
        assert!(std::fs::read(file.path()).unwrap() == [0; 4096 + 123], "direct: {direct}");
    }
}

/// Drives a queue without a reactor, as the C API does.
struct Driver {
    queue: UringQueue,
}

impl Driver {
    fn new(device: &UringDevice) -> Driver {
        Driver { queue: device.open_queue().unwrap() }
    }

    fn run(&mut self, req: &Request<'_>, offset: u64) -> IoResult {
        // SAFETY: the memory outlives this function, which waits for the completion.
        unsafe { self.queue.push(0, req, offset) }?;
        self.queue.kick();
        let mut results = Vec::new();
        while results.is_empty() {
            self.queue.reap(&mut |slot, result| {
                assert_eq!(slot, 0);
                results.push(result);
            });
        }
        results[0]
    }
}

#[test]
fn the_lost_end_of_a_shrunk_file_reads_as_zeroes() {
    for direct in [false, true] {
        let file = image(1 << 20);
        file.as_file().write_all_at(&[7; 8192], 0).unwrap();
        let Ok(device) = UringDevice::open(&Options { direct, ..Options::new(file.path()) }) else {
            continue;
        };
        file.as_file().set_len(4096 + 100).unwrap();
        let mut memory = [1u8; 3 * 8192];
        let skip = memory.as_ptr().align_offset(4096);
        let list = [Segment { base: memory[skip..].as_mut_ptr(), len: 8192 }];
        // SAFETY: the memory outlives the request.
        let req = Request::read(unsafe { Data::new(&list) });
        assert_eq!(Driver::new(&device).run(&req, 0), Ok(()));
        let expected = [[7; 4196].as_slice(), &[0; 8192 - 4196]].concat();
        assert!(memory[skip..skip + 8192] == expected, "direct: {direct}");
    }
}

#[test]
fn every_operation_is_seen_by_the_file() {
    let file = image(1 << 20);
    let device = open(&Options::new(file.path()));
    let mut driver = Driver::new(&device);
    let mut memory = [5u8; 4096];
    let list = [
        Segment { base: memory.as_mut_ptr(), len: 1024 },
        Segment { base: memory[1024..].as_mut_ptr(), len: 3072 },
    ];
    // SAFETY: the memory outlives the request.
    let data = unsafe { Data::new(&list) };
    assert_eq!(driver.run(&Request::write(data, Flags::FUA), 8192), Ok(()));
    assert_eq!(driver.run(&Request::write(data.part(512, 1024), Flags::NONE), 512), Ok(()));
    assert_eq!(driver.run(&Request::flush(), 0), Ok(()));
    assert_eq!(driver.run(&Request::write_zeroes(512, Flags::FUA), 8192), Ok(()));
    assert_eq!(driver.run(&Request::write_zeroes(0, Flags::NONE), 0), Ok(()));
    let mut content = vec![0; 16384];
    file.as_file().read_exact_at(&mut content, 0).unwrap();
    let mut expected = vec![0; 16384];
    expected[512..1536].fill(5);
    expected[8192 + 512..8192 + 4096].fill(5);
    assert!(content == expected);
}

#[test]
fn nothing_happens_before_a_kick_and_an_armed_queue_raises_an_event() {
    let file = image(1 << 20);
    let device = open(&Options::new(file.path()));
    let mut queue = device.open_queue().unwrap();
    assert!(queue.arm(), "nothing is in flight");
    let req = Request::flush();
    for slot in 0..queue.depth() {
        // SAFETY: a flush carries no memory.
        unsafe { queue.push(slot, &req, 0) }.unwrap();
    }
    assert!(!queue.arm(), "pushed but not submitted");
    queue.kick();
    let mut is_done = vec![false; queue.depth() as usize];
    while !is_done.iter().all(|d| *d) {
        if queue.arm() {
            let fd = queue.event_fd().unwrap();
            let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            let mut count = [0u8; 8];
            // SAFETY: one valid entry, and memory for the event's count.
            unsafe {
                assert_eq!(libc::poll(&raw mut poll, 1, 10_000), 1, "no event");
                libc::read(fd, count.as_mut_ptr().cast(), 8);
            }
        }
        queue.disarm();
        queue.reap(&mut |slot, result| {
            assert_eq!(result, Ok(()));
            assert!(!std::mem::replace(&mut is_done[slot as usize], true), "slot {slot} completed twice");
        });
    }
}

#[test]
fn a_queue_that_is_dropped_waits_for_what_is_in_flight() {
    let file = image(1 << 20);
    let device = open(&Options::new(file.path()));
    let mut memory = vec![9u8; 1 << 20];
    let list = [Segment { base: memory.as_mut_ptr(), len: memory.len() }];
    let mut queue = device.open_queue().unwrap();
    // SAFETY: the memory outlives the queue, whose drop waits.
    unsafe { queue.push(0, &Request::write(Data::new(&list), Flags::NONE), 0) }.unwrap();
    queue.kick();
    drop(queue);
    let mut content = vec![0; 1 << 20];
    file.as_file().read_exact_at(&mut content, 0).unwrap();
    assert!(content == memory);
}

#[test]
fn a_lost_write_fails_every_later_flush_but_no_read() {
    let file = image(1 << 20);
    let device = open(&Options::new(file.path()));
    device.shared.has_lost_writes.store(true, std::sync::atomic::Ordering::Relaxed);
    let mut driver = Driver::new(&device);
    assert_eq!(driver.run(&Request::flush(), 0), Err(IoError::Medium));
    let mut memory = [0u8; 512];
    let list = [Segment { base: memory.as_mut_ptr(), len: 512 }];
    // SAFETY: the memory outlives the request.
    let data = unsafe { Data::new(&list) };
    assert_eq!(driver.run(&Request::read(data), 0), Ok(()));
    assert_eq!(driver.run(&Request::write(data, Flags::NONE), 0), Ok(()));
    assert_eq!(driver.run(&Request::write(data, Flags::FUA), 0), Err(IoError::Medium));
}

#[test]
fn a_registered_region_is_used_and_its_data_arrives() {
    let file = image(1 << 20);
    file.as_file().write_all_at(&[3; 4096], 4096).unwrap();
    let options = Options { fixed_buffers: true, ..Options::new(file.path()) };
    let device = open(&options);
    let mut memory = vec![0u8; 64 << 10];
    let region = MemoryRegion { addr: memory.as_ptr().addr(), len: memory.len(), fd: None, fd_offset: 0 };
    device.map_region(&region).unwrap();
    let mut driver = Driver::new(&device);
    for _ in 0..2 {
        memory[1000..1000 + 4096].fill(0);
        let list = [Segment { base: memory[1000..].as_mut_ptr(), len: 4096 }];
        // SAFETY: the memory outlives the request.
        let req = Request::read(unsafe { Data::new(&list) });
        assert_eq!(driver.run(&req, 4096), Ok(()));
        assert!(memory[1000..1000 + 4096].iter().all(|b| *b == 3));
        assert_eq!(driver.run(&req.with_op(Op::Write), 0), Ok(()));
        device.unmap_region(&region);
    }
}
