//! Memory costs of the server: nothing per request once it is warm.

use crate::client::*;
use crate::server::{MIB, export};
use drivers::mem::{MemDevice, Options as MemOptions};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts what the threads of cores allocate that a test looks at.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static IS_COUNTED: Cell<bool> = const { Cell::new(false) };
}

// SAFETY: hands everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if IS_COUNTED.get() {
            ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: by the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: by the caller's contract.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn work(client: &mut Client, rounds: usize) {
    for _ in 0..rounds {
        for cookie in 0..16 {
            client.send(READ, 0, cookie, cookie * 4096, 4096);
            client.send_write(0, 100 + cookie, cookie * 4096, &[cookie as u8; 4096]);
        }
        client.send(READ, 0, 200, 0, MIB + 4096);
        client.send(FLUSH, 0, 201, 0, 0);
        (0..34).for_each(|_| assert_eq!(client.reply().error, 0));
    }
}

/// Has more requests come at once than the server takes, as may happen later to a server that is
/// held up.
fn crowd(client: &mut Client) {
    let all: Vec<u8> = (0..1000).flat_map(|cookie| client.request(FLUSH, 0, cookie, 0, 0)).collect();
    client.stream.write_all(&all).unwrap();
    (0..1000).for_each(|_| assert_eq!(client.reply().error, 0));
}

#[test]
fn a_warm_connection_allocates_nothing() {
    let device = MemDevice::new(&MemOptions::new(4 * MIB)).unwrap();
    let (export, cores, socket, _dir) = export(Arc::new(device), 1, |config| config);
    for form in FORMS {
        let mut client = Client::connect(&socket, form);
        crowd(&mut client);
        work(&mut client, 20);
        let core = cores.get(0);
        core.call(|_| IS_COUNTED.set(true)).unwrap();
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        work(&mut client, 20);
        let after = ALLOCATIONS.load(Ordering::Relaxed);
        core.call(|_| IS_COUNTED.set(false)).unwrap();
        assert_eq!(after - before, 0, "allocations in {} requests, {form:?}", 20 * 34);
    }
    drop(export);
}
