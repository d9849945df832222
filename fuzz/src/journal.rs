//! Hostile journals of VDUSE exports: journals of a server that died, edited, and its successor.
//!
//! A server creates a journal and takes chains from a ring; it returns some of them. Then it dies,
//! and the input edits the journal or truncates it. A successor, which may serve another disk or
//! another ring configuration, takes over journal and ring. If the journal is refused, it must be
//! unchanged. Otherwise the successor must serve the disk that the journal names and stay inside
//! guest memory. With an unedited journal it must return every chain exactly once.

use crate::chains;
use crate::driver::Driver;
use crate::guest::Guest;
use crate::input::Input;
use crate::rings::device::{Device, Settings};
use exports_virtio::vduse::journal::{self, Served};
use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;

/// The disk of the first server.
const DISK: Served<'static> = Served { name: "mem:a", capacity: 1 << 20 };
const MAX_CHAINS: usize = 12;
const MAX_EDITS: usize = 24;
/// Length of the longest file that an edit makes, in bytes.
const MAX_FILE: u64 = 256 << 10;
/// Offset after the header, where the name begins.
const HEAD: usize = 24;

thread_local! {
    /// Created once: new files and mappings would take most of the time.
    static PLACE: RefCell<(Guest, File)> = RefCell::new((Guest::new(0), file()));
}

fn file() -> File {
    let path = std::env::temp_dir().join(format!("fuzz-journal-{}", std::process::id()));
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path);
    std::fs::remove_file(path).expect("it was made");
    file.expect("a file of ours")
}

/// Runs one input.
///
/// # Panics
/// When the successor violates a requirement.
pub fn run(bytes: &[u8]) {
    PLACE.with_borrow_mut(|(guest, file)| {
        let mappings = crate::guard::live_mappings();
        guest.reset();
        play(guest, file, &mut Input::new(bytes));
        guest.check_untouched();
        assert_eq!(crate::guard::live_mappings(), mappings, "mappings are left");
    });
}

/// Configuration of a server; the two may differ.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Shape {
    queues: u16,
    size: u16,
    is_packed: bool,
}

impl Shape {
    fn new(input: &mut Input<'_>) -> Shape {
        let choices = input.u8();
        let queues = 1 + u16::from(choices >> 1 & 3);
        Shape { queues, size: 1 << (choices >> 4 & 7).min(6), is_packed: choices & 1 != 0 }
    }
}

fn play(guest: &mut Guest, file: &File, input: &mut Input<'_>) {
    let (shape, choices) = (Shape::new(input), input.u8());
    let Shape { queues, size, is_packed } = shape;
    let indirect = choices & 1 != 0;
    let settings = Settings { size, is_packed, event_idx: choices & 2 != 0, indirect, areas: guest.areas() };
    let memory = guest.map(0);
    let region = journal::start(file, DISK, queues, size, is_packed).expect("an ordinary shape");
    let (mut driver, base) = Driver::new(guest, size, is_packed, u16::from(input.u8()));
    let mut device = Device::start(settings, base, memory, Some(region)).expect("a sound ring");
    for _ in 0..input.below(MAX_CHAINS) {
        chains::offer(&mut driver, guest, indirect, input);
        match input.u8() {
            0..=99 => drop(device.pop().expect("a sound chain")),
            100..=149 => device.complete(usize::from(choices), 0),
            150..=189 => device.publish(),
            _ => {}
        }
    }
    let base = device.handover().unwrap_or(0);
    // The server dies.
    drop(device);
    let (served, successor) = match choices >> 4 {
        0..=11 => (DISK, shape),
        12 => (Served { name: "mem:b", ..DISK }, shape),
        13 => (Served { capacity: 1 << 19, ..DISK }, shape),
        14 => (Served { capacity: 1 << 21, ..DISK }, shape),
        _ => (DISK, Shape::new(input)),
    };
    let is_touched = !input.is_empty();
    for _ in 0..MAX_EDITS {
        if input.is_empty() {
            break;
        }
        edit(file, input);
    }
    let is_honest = !is_touched && successor == shape;
    let before = content(file);
    let Shape { queues, size, is_packed } = successor;
    let region = match journal::take_over(file, served, queues, size, is_packed) {
        Ok(region) => region,
        Err(error) => {
            let is_it = served.name == DISK.name && served.capacity >= DISK.capacity;
            assert!(!is_honest || !is_it, "the journal of this disk is refused: {error}");
            assert!(!error.to_string().is_empty());
            assert_eq!(content(file), before, "a journal that was refused has changed");
            return;
        }
    };
    // Independent of the reader: the journal's name must be that of the served disk.
    let capacity = u64::from_le_bytes(std::array::from_fn(|i| before[HEAD - 8 + i]));
    let name = &before[HEAD..HEAD + served.name.len()];
    assert!(name == served.name.as_bytes() && capacity <= served.capacity, "another disk is served");
    assert!((0..queues).all(|queue| region.queue(queue).is_some()) && region.queue(queues).is_none());
    let settings = Settings { size, is_packed, ..settings };
    match Device::start(settings, base, guest.map(0), Some(region)) {
        Ok(device) => serve_all(device, &mut driver, guest, is_honest),
        Err(error) => assert!(!is_honest, "the ring is not taken over: {error:?}"),
    }
}

/// Lets the successor serve all chains.
fn serve_all(mut device: Device, driver: &mut Driver, guest: &Guest, is_honest: bool) {
    for _ in 0..=u16::MAX {
        match device.pop() {
            Ok(Some(_)) => device.complete(0, 0),
            Ok(None) => break,
            Err(error) => {
                assert!(!is_honest, "a sound chain was refused: {error:?}");
                break;
            }
        }
    }
    device.publish();
    if is_honest {
        while driver.poll(guest).is_some() {}
        assert!(driver.in_flight.is_empty(), "chains were lost: {:?}", driver.in_flight.keys());
    }
}

fn content(file: &File) -> Vec<u8> {
    let len = file.metadata().expect("a file of ours").len();
    let mut bytes = vec![0; len as usize];
    file.read_exact_at(&mut bytes, 0).expect("as long as it is");
    bytes
}

/// Edits the journal, or truncates it.
fn edit(file: &File, input: &mut Input<'_>) {
    let action = input.u8();
    let at = match action {
        // The header, the header of the region, and any place.
        0..=79 => u64::from(input.u8() % 32),
        80..=159 => 4096 + u64::from(input.u8()),
        160..=223 => 4096 + u64::from(input.u16()) % 4096,
        _ => u64::from(input.u16()),
    };
    match action {
        240..=255 => file.set_len((at * 8).min(MAX_FILE)).expect("a short file"),
        _ => {
            let len = file.metadata().expect("a file of ours").len();
            let bytes = match input.u8() {
                0 => vec![0; 8],
                1 => vec![0xff; 8],
                width => input.bytes(1 + usize::from(width % 8)).to_vec(),
            };
            let part = &bytes[..bytes.len().min(len.saturating_sub(at) as usize)];
            file.write_all_at(part, at).expect("within the file");
        }
    }
}
