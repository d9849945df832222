//! Whatever happens to handles, memory outlives the device's work on it.
//!
//! AddressSanitizer finds most mistakes with memory on the heap. Some of these tests leak on
//! purpose, so its search for leaks is off:
//!
//! ```text
//! RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address ASAN_OPTIONS=detect_leaks=0 \
//!     cargo test -p freestone-libblkio --lib --target x86_64-unknown-linux-gnu
//! ```

mod fake;

use super::*;
use crate::{Result, Zone};
use fake::{FILL, device, device_with};
use std::mem::forget;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

fn poll_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    std::pin::Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

#[test]
fn queues_and_futures_move_between_threads() {
    fn is_send<T: Send>() {}
    fn is_sync<T: Sync>() {}
    is_send::<Builder>();
    is_send::<Connected>();
    is_send::<Queue>();
    is_send::<Buffer>();
    is_send::<AsyncQueue>();
    is_send::<Pending<Buffer>>();
    is_sync::<Device>();
    is_sync::<Buffer>();
    is_sync::<AsyncQueue>();
}

#[test]
fn the_buffer_of_a_dropped_future_is_not_handed_out_before_its_request_has_ended() {
    let (device, control) = device();
    let queue = device.queue(0).unwrap().into_async().unwrap();
    let buffer = device.buffer(4096).unwrap();
    let address = buffer.as_ptr();
    let mut read = queue.read(0, buffer);
    assert!(poll_once(&mut read).is_pending());
    drop(read);
    let other = device.buffer(4096).unwrap();
    assert_ne!(other.as_ptr(), address);
    control.release(1);
    queue.poll_completions().unwrap();
    assert_eq!(device.buffer(4096).unwrap().as_ptr(), address, "now it is free");
    assert!(other.iter().all(|byte| *byte == 0), "the device wrote elsewhere");
}

#[test]
fn memory_of_forgotten_and_dropped_futures_is_there_until_their_requests_have_ended() {
    let (device, control) = device();
    let queue = device.queue(0).unwrap().into_async().unwrap();
    // More than the device takes at a time, so that some wait in line; and some are never polled.
    let mut reports: Vec<Pending<Vec<Zone>>> = (0..10).map(|_| queue.report_zones(0, 5)).collect();
    assert!(poll_once(&mut reports[0]).is_pending());
    forget(reports.remove(0));
    forget(reports.pop());
    drop(reports);
    assert_eq!(control.ended.load(SeqCst), 0);
    control.release(10);
    while control.ended.load(SeqCst) < 10 {
        queue.poll_completions().unwrap();
    }
}

#[test]
fn the_last_future_closes_the_queue_and_waits() {
    let (device, control) = device();
    let queue = device.queue(0).unwrap().into_async().unwrap();
    let report = queue.report_zones(0, 5);
    drop(queue);
    drop(device);
    assert_eq!(control.ended.load(SeqCst), 0);
    drop(report);
    assert_eq!(control.ended.load(SeqCst), 1);
}

#[test]
fn dropping_a_queue_waits_for_what_is_in_flight_and_gives_it_back() {
    let (device, control) = device();
    let mut queue = device.queue(0).unwrap();
    for _ in 0..9 {
        queue.submit(Request::report_zones(0, 3));
        queue.submit(Request::read(0, device.buffer(512).unwrap()));
    }
    assert_eq!(device.queue(0).unwrap_err().errno(), libc::EBUSY);
    drop(queue);
    assert_eq!(control.ended.load(SeqCst), 18);
    assert!(device.queue(0).is_ok());
    assert_eq!(device.queue(1).unwrap_err().errno(), libc::ENOENT);
    let added = device.add_queue().unwrap();
    drop(added);
    assert_eq!(device.queue(1).unwrap_err().errno(), libc::ENOENT);
}

#[test]
fn a_forgotten_queue_leaks_its_memory_rather_than_giving_it_back() {
    let (device, control) = device();
    let mut queue = device.queue(0).unwrap();
    queue.submit(Request::report_zones(0, 3));
    queue.poll().unwrap();
    forget(queue);
    drop(device);
    assert_eq!(control.ended.load(SeqCst), 0);
}

#[test]
fn a_scope_ends_after_its_requests_whatever_happens_to_handles() {
    let (device, control) = device();
    let mut queue = device.queue(0).unwrap();
    let mut memory = vec![0u8; 4096].into_boxed_slice();
    let (a, b) = memory.split_at_mut(2048);
    queue
        .scope(|s| {
            // A handle that is lost, in whatever way, is a handle without a destructor that is not
            // run.
            s.read(0, a);
            s.read_vectored(512, b.chunks_mut(512));
            Ok(())
        })
        .unwrap();
    assert_eq!(control.ended.load(SeqCst), 2);
    assert!(memory.iter().all(|byte| *byte == FILL));
}

#[test]
fn a_panic_in_a_scope_waits_for_its_requests_first() {
    let (device, control) = device();
    let mut queue = device.queue(0).unwrap();
    let mut memory = vec![0u8; 512];
    let panic = catch_unwind(AssertUnwindSafe(|| {
        queue.scope(|s| -> Result<()> {
            s.read(0, &mut memory);
            panic!("in the middle");
        })
    }));
    assert_eq!(panic.unwrap_err().downcast_ref(), Some(&"in the middle"));
    assert_eq!((control.ended.load(SeqCst), memory[511]), (1, FILL));
    drop(memory);
    queue.read_at(0, &mut [0; 16]).unwrap();
}

#[test]
fn a_scope_returns_the_error_of_a_request_without_a_waiter_and_leaves_others_alone() {
    let (device, _control) = device();
    let mut queue = device.queue(0).unwrap();
    let token = queue.submit(Request::read(0, device.buffer(512).unwrap()));
    let mut memory = [0u8; 512];
    let error = queue.scope(|s| {
        s.read(1 << 30, &mut memory);
        Ok(())
    });
    assert_eq!(error.unwrap_err().errno(), libc::EINVAL);
    let claimed = queue.scope(|s| Ok(s.read(1 << 30, &mut memory).wait().is_err()));
    assert_eq!(claimed, Ok(true));
    let mut completions = queue.wait(1).unwrap();
    let completion = completions.next().unwrap();
    assert_eq!((completion.token, completion.result.is_ok()), (token, true));
    assert!(completion.into_buffer().unwrap().iter().all(|byte| *byte == FILL));
}

#[test]
fn a_queue_that_fails_is_closed_before_borrowed_memory_is_given_back() {
    let (device, control) = device();
    let mut queue = device.queue(0).unwrap();
    let pending = queue.submit(Request::read(0, device.buffer(512).unwrap()));
    control.is_broken.store(true, SeqCst);
    let mut memory = vec![0u8; 512];
    assert_eq!(queue.read_at(0, &mut memory).unwrap_err().errno(), libc::ENODEV);
    assert_eq!(memory[0], FILL, "the device had ended when the call returned");
    drop(memory);
    let completion = queue.wait(1).unwrap().next().unwrap();
    assert_eq!((completion.token, completion.result.unwrap_err().errno()), (pending, libc::ENODEV));
    assert_eq!(queue.flush().unwrap_err().errno(), libc::ENODEV);
    drop(queue);
    assert_eq!(device.queue(0).unwrap_err().errno(), libc::ENOENT);
}

#[test]
fn waiting_with_a_timeout_returns_what_there_is() {
    let (device, control) = device();
    control.is_stubborn.store(true, SeqCst);
    let mut queue = device.queue(0).unwrap();
    for _ in 0..3 {
        queue.submit(Request::flush());
    }
    control.release(2);
    let start = Instant::now();
    assert_eq!(queue.wait_timeout(3, Duration::from_millis(30)).unwrap().count(), 2);
    assert!(start.elapsed() >= Duration::from_millis(30));
    assert_eq!((queue.outstanding(), queue.poll().unwrap().count()), (1, 0));
    control.release(1);
    assert_eq!(queue.wait(100).unwrap().count(), 1);
    assert_eq!(queue.wait(1).unwrap().count(), 0, "there is nothing to wait for");
}

#[test]
fn every_task_is_woken_when_its_request_ends_whoever_looks() {
    struct Count(AtomicUsize);
    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, SeqCst);
        }
    }
    let (device, control) = device();
    let queue = device.queue(0).unwrap().into_async().unwrap();
    let count = Arc::new(Count(AtomicUsize::new(0)));
    let waker = Waker::from(count.clone());
    let mut flushes: Vec<Pending<()>> = (0..3).map(|_| queue.flush()).collect();
    for flush in &mut flushes {
        assert!(std::pin::Pin::new(flush).poll(&mut Context::from_waker(&waker)).is_pending());
    }
    control.release(3);
    let mut other = queue.flush();
    assert!(poll_once(&mut other).is_pending(), "it is polled, submits, and finds the others' completions");
    assert_eq!(count.0.load(SeqCst), 3);
    assert!(flushes.iter_mut().all(|flush| poll_once(flush) == Poll::Ready(Ok(()))));
}

#[test]
fn block_on_sleeps_until_a_queue_or_another_thread_wakes_it() {
    let (device, control) = device();
    control.is_stubborn.store(true, SeqCst);
    let queue = device.queue(0).unwrap().into_async().unwrap();
    let other_thread = std::thread::spawn({
        let control = control.clone();
        move || {
            for _ in 0..20 {
                std::thread::sleep(Duration::from_millis(1));
                control.release(1);
            }
        }
    });
    block_on([&queue], async {
        for _ in 0..20 {
            queue.flush().await.unwrap();
        }
    });
    other_thread.join().unwrap();
    let mut is_first = true;
    block_on(
        [],
        std::future::poll_fn(|cx| {
            let waker = cx.waker().clone();
            std::thread::spawn(move || waker.wake());
            if std::mem::take(&mut is_first) { Poll::Pending } else { Poll::Ready(()) }
        }),
    );
}

#[test]
fn memory_that_the_device_does_not_know_is_copied_by_blocking_calls_only() {
    let (device, _control) = device_with(|p| {
        p.put("needs-mem-regions", true);
        p.put("buf-alignment", 4);
    });
    let mut queue = device.queue(0).unwrap();
    let mut memory = [0u8; 68];
    let start = memory.as_ptr().align_offset(4);
    let memory = &mut memory[start..][..64];
    queue.read_at(0, &mut memory[4..64]).unwrap();
    assert!(memory[4..].iter().all(|byte| *byte == FILL) && memory[..4] == [0; 4]);
    assert_eq!(queue.read_at(0, &mut memory[..3]).unwrap_err().errno(), libc::EINVAL);
    let mut known = device.buffer(64).unwrap();
    queue.read_at(0, &mut known).unwrap();
    assert_eq!(known[63], FILL);
}

#[test]
fn buffers_are_reused_and_never_overlap() {
    let (device, _control) = device();
    let mut buffers: Vec<Buffer> =
        [1, 4096, 5000, 1 << 20, 3 << 20, 0].map(|len| device.buffer(len).unwrap()).into();
    let mut ranges: Vec<(usize, usize)> = buffers.iter().map(|b| (b.as_ptr().addr(), b.capacity())).collect();
    ranges.sort_unstable();
    assert!(ranges.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
    assert!(ranges.iter().all(|(start, _)| start.is_multiple_of(4096)));
    buffers[0].resize(4096);
    assert!(catch_unwind(AssertUnwindSafe(|| buffers[1].resize(4097))).is_err());
    buffers.clear();
    let again = device.buffer(3 << 20).unwrap();
    assert!(ranges.contains(&(again.as_ptr().addr(), 4 << 20)));
    assert_eq!(device.buffer(1 << 40).unwrap_err().errno(), libc::EINVAL);
}

#[test]
fn a_report_has_as_many_zones_as_the_device_described() {
    let (device, _control) = device();
    let zones = device.queue(0).unwrap().report_zones(0, 9).unwrap();
    assert_eq!((zones.len(), zones[0].start), (1, 7));
}
