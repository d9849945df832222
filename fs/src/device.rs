//! The device: features, configuration space, and virtqueues, each with a thread of its own.

use crate::requests::{Chain, Memory, Requests};
use nix::sched::{CloneFlags, unshare};
use std::cell::RefCell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost_user_backend::bitmap::BitmapMmapRegion;
use vhost_user_backend::{VhostUserBackend, VringMutex, VringState, VringT};
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::{QueueOwnedT, QueueT};
use virtiofsd::filesystem::FileSystem;
use virtiofsd::vhost_user::MAX_TAG_LEN;
use vm_memory::{GuestAddressSpace, GuestMemoryAtomic};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::event::{EventConsumer, EventFlag, EventNotifier, new_event_consumer_and_notifier};

/// Guest memory that the monitor may replace while queues run.
pub type SharedMemory = GuestMemoryAtomic<Memory>;

/// Longest virtqueue, in descriptors: virtio 1.2 section 2.7.
const MAX_QUEUE_SIZE: usize = 32768;

/// Called with the reason when a queue cannot continue.
type Fail = Arc<dyn Fn(String) + Send + Sync>;

thread_local! {
    /// From the first request of a queue until its thread ends.
    static THREAD: RefCell<Option<QueueThread>> = const { RefCell::new(None) };
}

/// A virtio-fs device.
pub struct Device<F: FileSystem + Sync> {
    requests: Requests<F>,
    memory: SharedMemory,
    tag: Option<String>,
    has_event_idx: AtomicBool,
    /// Requests of each queue; the first is the hiprio queue.
    counts: Vec<AtomicU64>,
    fail: Fail,
}

impl<F: FileSystem + Sync> Device<F> {
    /// A device with `queues` request queues.
    pub fn new(
        fs: F,
        memory: SharedMemory,
        queues: u16,
        tag: Option<String>,
        fail: impl Fn(String) + Send + Sync + 'static,
    ) -> Device<F> {
        Device {
            requests: Requests::new(fs),
            memory,
            tag,
            has_event_idx: AtomicBool::new(false),
            counts: (0..=queues).map(|_| AtomicU64::new(0)).collect(),
            fail: Arc::new(fail),
        }
    }

    /// Requests of each queue until now, as a line of the log.
    pub fn counters(&self) -> String {
        let counts: Vec<_> =
            self.counts.iter().map(|count| count.load(Ordering::Relaxed).to_string()).collect();
        format!("requests: hiprio {}, request queues {}", counts[0], counts[1..].join(" "))
    }

    /// Carries out what a queue has, until it is empty.
    ///
    /// The lock of the queue is held while requests run, so that the monitor's message that stops
    /// the queue waits for them. It is free after each round, so that a guest cannot keep the
    /// monitor waiting.
    fn serve(&self, queue: usize, vring: &VringMutex<SharedMemory>) -> Result<(), String> {
        QueueThread::enter(queue, &self.fail)?;
        loop {
            let mut ring = vring.get_mut();
            if !ring.get_queue().ready() || !ring.is_enabled() {
                return Ok(());
            }
            let has_more = self
                .serve_round(queue, &mut ring)
                .map_err(|error| format!("queue {queue}: invalid ring: {error}"))?;
            drop(ring);
            if !has_more {
                return Ok(());
            }
            thread::yield_now();
        }
    }

    /// Carries out what the queue has now; returns whether more has come.
    fn serve_round(
        &self,
        queue: usize,
        ring: &mut VringState<SharedMemory>,
    ) -> Result<bool, virtio_queue::Error> {
        let has_event_idx = self.has_event_idx.load(Ordering::Relaxed);
        if has_event_idx {
            ring.disable_notification()?;
        }
        let memory = self.memory.memory();
        let chains: Vec<Chain> = ring.get_queue_mut().iter(memory.clone())?.collect();
        for chain in chains {
            let head = chain.head_index();
            let len = self.requests.carry_out(queue, &memory, chain);
            self.counts[queue].fetch_add(1, Ordering::Relaxed);
            // The library bounds an answer by the buffers of the chain, and those by 32 bits each.
            ring.add_used(head, len.try_into().unwrap_or(u32::MAX))?;
            if !has_event_idx || ring.needs_notification()? {
                // Fails when the guest has not taken earlier notifications yet.
                let _ = ring.signal_used_queue();
            }
        }
        Ok(has_event_idx && ring.enable_notification()?)
    }
}

/// A thread of the library, which ends when it cannot read the eventfd of its queue, too.
struct QueueThread {
    queue: usize,
    fail: Fail,
}

impl QueueThread {
    /// Gives this thread, at its first request, a working directory and a file mode mask of its
    /// own: the library of virtiofsd changes them for some requests.
    fn enter(queue: usize, fail: &Fail) -> Result<(), String> {
        if THREAD.with_borrow(Option::is_none) {
            unshare(CloneFlags::CLONE_FS)
                .map_err(|error| format!("queue {queue}: unshare(CLONE_FS): {error}"))?;
            THREAD.set(Some(QueueThread { queue, fail: fail.clone() }));
        }
        Ok(())
    }
}

impl Drop for QueueThread {
    fn drop(&mut self) {
        (self.fail)(format!("queue {}: its thread has ended", self.queue));
    }
}

/// The configuration space, virtio 1.2 section 5.11.4: tag and number of request queues.
fn config_space(tag: &str, queues: u32) -> [u8; MAX_TAG_LEN + 4] {
    let mut bytes = [0; MAX_TAG_LEN + 4];
    bytes[..tag.len()].copy_from_slice(tag.as_bytes());
    bytes[MAX_TAG_LEN..].copy_from_slice(&queues.to_le_bytes());
    bytes
}

impl<F: FileSystem + Send + Sync + 'static> VhostUserBackend for Device<F> {
    type Bitmap = BitmapMmapRegion;
    type Vring = VringMutex<SharedMemory>;

    fn num_queues(&self) -> usize {
        self.counts.len()
    }

    fn max_queue_size(&self) -> usize {
        MAX_QUEUE_SIZE
    }

    fn features(&self) -> u64 {
        1 << VIRTIO_F_VERSION_1
            | 1 << VIRTIO_RING_F_INDIRECT_DESC
            | 1 << VIRTIO_RING_F_EVENT_IDX
            | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        use VhostUserProtocolFeatures as Feature;
        let features =
            Feature::MQ | Feature::REPLY_ACK | Feature::CONFIGURE_MEM_SLOTS | Feature::RESET_DEVICE;
        // QEMU 7.1 to 8.0 crash when they are offered a configuration space.
        if self.tag.is_some() { features | Feature::CONFIG } else { features }
    }

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        let queues = self.counts.len() as u32 - 1;
        let space = config_space(self.tag.as_deref().unwrap_or_default(), queues);
        let mut bytes: Vec<u8> = space.into_iter().skip(offset as usize).take(size as usize).collect();
        bytes.resize(size as usize, 0);
        bytes
    }

    fn reset_device(&self) {
        self.requests.reset();
    }

    fn set_event_idx(&self, enabled: bool) {
        self.has_event_idx.store(enabled, Ordering::Relaxed);
    }

    fn update_memory(&self, _memory: SharedMemory) -> io::Result<()> {
        Ok(()) // it is `self.memory`, in which the library has replaced the content
    }

    fn queues_per_thread(&self) -> Vec<u64> {
        (0..self.counts.len()).map(|queue| 1 << queue).collect()
    }

    fn exit_event(&self, _thread: usize) -> Option<(EventConsumer, EventNotifier)> {
        new_event_consumer_and_notifier(EventFlag::NONBLOCK).ok()
    }

    /// Each thread has one queue, so its number is the queue's. After an error the thread of the
    /// library ends, and this program with it.
    fn handle_event(
        &self,
        _event: u16,
        events: EventSet,
        vrings: &[VringMutex<SharedMemory>],
        thread: usize,
    ) -> io::Result<()> {
        let result = match events == EventSet::IN {
            true => catch_unwind(AssertUnwindSafe(|| self.serve(thread, &vrings[0])))
                .unwrap_or_else(|_| Err(format!("queue {thread}: a request has ended with a panic"))),
            false => Err(format!("queue {thread}: its eventfd reports {events:?}")),
        };
        result.map_err(|reason| {
            (self.fail)(reason.clone());
            io::Error::other(reason)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_queue_is_a_failure() {
        let (sender, failures) = std::sync::mpsc::channel();
        let sender = std::sync::Mutex::new(sender);
        let fail: Fail = Arc::new(move |reason| sender.lock().unwrap().send(reason).unwrap());
        thread::spawn(move || (0..2).try_for_each(|_| QueueThread::enter(3, &fail))).join().unwrap().unwrap();
        assert_eq!(failures.try_iter().collect::<Vec<_>>(), ["queue 3: its thread has ended"]);
    }

    #[test]
    fn the_configuration_space_has_the_tag_and_the_number_of_request_queues() {
        let space = config_space("home", 4);
        assert_eq!((&space[..5], &space[36..]), (&b"home\0"[..], &[4, 0, 0, 0][..]));
        let longest = "x".repeat(MAX_TAG_LEN);
        assert_eq!(&config_space(&longest, 63)[35..], b"x\x3f\0\0\0");
    }
}
