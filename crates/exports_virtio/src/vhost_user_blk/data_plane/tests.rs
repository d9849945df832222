//! Messages of a VMM as the kernel gets them: a `/dev/vhost-blk` that only notes calls.

use super::super::kernel::fake::{Fake, Kernel};
use super::super::plane::Plane;
use super::super::session::Session;
use super::super::{Config, DataPlane};
use super::*;
use block::{Channel, Device, DeviceError, KernelBacking, KernelExtent, Limits, MemoryRegion};
use drivers::mem::{MemDevice, Options};
use exports::Stats;
use reactor::{CoreConfig, Cores};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use vhost::vhost_user::VhostUserBackendReqHandlerMut;
use vhost::vhost_user::message::{VhostUserLog, VhostUserMemoryRegion, VhostUserVringAddrFlags};
use virtio::inflight::InflightRegion;

const MIB: u64 = 1 << 20;
/// The front-end's address of guest address 0.
const USER: u64 = 0x7e00_0000_0000;
const DESCRIPTORS: u64 = 0x1000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;

/// A device that claims to be a disk of the host.
struct OnDisk {
    memory: MemDevice,
    disk: Option<Arc<Disk>>,
}

/// That disk: the range on it, and its claim.
struct Disk {
    file: File,
    extent: KernelExtent,
    holder: Mutex<&'static str>,
}

impl KernelBacking for Disk {
    fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn extent(&self) -> KernelExtent {
        self.extent
    }

    fn lend(&self) -> Result<(), DeviceError> {
        assert_eq!(std::mem::replace(&mut *self.holder.lock().unwrap(), "kernel"), "driver");
        Ok(())
    }

    fn take_back(&self) -> Result<(), DeviceError> {
        assert_eq!(std::mem::replace(&mut *self.holder.lock().unwrap(), "driver"), "kernel");
        Ok(())
    }
}

impl Device for OnDisk {
    fn name(&self) -> &str {
        "on-disk"
    }

    fn limits(&self) -> Limits {
        self.memory.limits()
    }

    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        self.memory.open_channel()
    }

    fn refresh(&self) -> Result<Limits, DeviceError> {
        self.memory.refresh()
    }

    fn map_region(&self, _: &MemoryRegion) -> Result<(), DeviceError> {
        Ok(())
    }

    fn unmap_region(&self, _: &MemoryRegion) {}

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        match &self.disk {
            Some(disk) => Ok(disk.clone()),
            None => Err(DeviceError::not_in_kernel("on-disk")),
        }
    }
}

/// A session, its client's memory, and the calls that reach the kernel.
struct Test {
    session: Session,
    memory: File,
    device: Arc<OnDisk>,
    kernel: Arc<Mutex<Kernel>>,
    _cores: Cores,
}

fn memfd(len: u64) -> File {
    // SAFETY: a fresh descriptor.
    let file = unsafe { File::from_raw_fd(libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC)) };
    file.set_len(len).unwrap();
    file
}

fn eventfd() -> File {
    // SAFETY: a fresh descriptor.
    unsafe { File::from_raw_fd(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)) }
}

fn open(
    config: Config,
    extent: Option<KernelExtent>,
    kernel: &Arc<Mutex<Kernel>>,
) -> (Result<Session, Error>, Cores, Arc<OnDisk>) {
    let cores = Cores::start(&[CoreConfig::default()]).unwrap();
    let on = |extent| Arc::new(Disk { file: memfd(MIB), extent, holder: Mutex::new("driver") });
    let memory = MemDevice::new(&Options { max_size: 2 * MIB, ..Options::new(MIB) }).unwrap();
    let device = Arc::new(OnDisk { memory, disk: extent.map(on) });
    let stats = Arc::new(Stats::new(config.num_queues.into()));
    let opener = Fake::opener(kernel.clone());
    (Session::new(device.clone(), cores.all().to_vec(), config, stats, None, opener), cores, device)
}

impl Test {
    fn new(data_plane: DataPlane) -> Test {
        Test::with_queues(data_plane, 1)
    }

    fn with_queues(data_plane: DataPlane, num_queues: u16) -> Test {
        Test::on(KernelExtent::WHOLE, data_plane, num_queues)
    }

    fn on(extent: KernelExtent, data_plane: DataPlane, num_queues: u16) -> Test {
        let kernel = Arc::<Mutex<Kernel>>::default();
        let config = Config { data_plane, num_queues, serial: "s".into(), ..Config::new("socket") };
        let (session, cores, device) = open(config, Some(extent), &kernel);
        let test = Test { session: session.unwrap(), memory: memfd(MIB), device, kernel, _cores: cores };
        test.calls(); // those of the check at the start
        test
    }

    /// The calls since the last look.
    fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.kernel.lock().unwrap().calls)
    }

    fn holder(&self) -> &'static str {
        *self.device.disk.as_ref().unwrap().holder.lock().unwrap()
    }

    fn connect(&mut self) {
        let features = virtio::VIRTIO_F_VERSION_1 | virtio::VHOST_USER_F_PROTOCOL_FEATURES;
        self.session.set_features(features).unwrap();
        self.set_memory();
    }

    fn set_memory(&mut self) {
        let region = VhostUserMemoryRegion::new(0, MIB, USER, 0);
        self.session.set_mem_table(&[region], vec![self.memory.try_clone().unwrap()], None).unwrap();
    }

    /// Sets the first ring up, up to its last message.
    fn set_up(&mut self, base: u32) {
        self.set_up_ring(0, base);
    }

    /// All rings have the same memory: the kernel of these tests serves none.
    fn set_up_ring(&mut self, index: u8, base: u32) {
        let (session, ring) = (&mut self.session, index.into());
        session.set_vring_num(ring, 8).unwrap();
        session.set_vring_base(ring, base).unwrap();
        let flags = VhostUserVringAddrFlags::empty();
        session.set_vring_addr(ring, flags, USER + DESCRIPTORS, USER + USED, USER + AVAILABLE, 0).unwrap();
        session.set_vring_call(index, Some(eventfd())).unwrap();
        session.set_vring_kick(index, Some(eventfd())).unwrap();
    }

    fn boot(&mut self) {
        self.connect();
        self.set_up(0);
        self.session.set_vring_enable(0, true).unwrap();
    }

    fn set_used_index(&self, index: u16) {
        self.memory.write_all_at(&index.to_le_bytes(), USED + 2).unwrap();
    }

    fn used_index(&self) -> u16 {
        let mut index = [0; 2];
        self.memory.read_exact_at(&mut index, USED + 2).unwrap();
        u16::from_le_bytes(index)
    }

    fn is_in_kernel(&self) -> bool {
        matches!(self.session.serving[0], Some(Running::InKernel))
    }

    fn is_on_core(&self) -> bool {
        matches!(self.session.serving[0], Some(Running::OnCore(_)))
    }
}

#[test]
fn the_kernel_gets_a_ring_at_addresses_of_this_process_and_at_its_used_index() {
    let mut test = Test::new(DataPlane::Kernel);
    test.connect();
    test.set_used_index(9);
    test.set_up(7); // older than the last completions
    assert_eq!((test.calls(), test.holder()), (vec![], "driver"), "nothing runs yet");
    test.session.set_vring_enable(0, true).unwrap();
    let at = test.session.memory().translate(0, 1).unwrap().addr() as u64;
    let features = virtio::VIRTIO_F_VERSION_1;
    let calls = [
        "SET_OWNER".into(),
        "SET_DISK".into(),
        format!("SET_MEM_TABLE 0x0+{MIB} at {at:#x}"),
        format!("SET_FEATURES {features:#x}"),
        "SET_CONFIG flags 2, serial s".into(), // no FLUSH: write-through
        "SET_VRING_NUM 0: 8".into(),
        "SET_VRING_BASE 0: 9".into(),
        format!("SET_VRING_ADDR 0: {:#x} {:#x} {:#x}", at + DESCRIPTORS, at + AVAILABLE, at + USED),
        "SET_VRING_CALL 0: some".into(),
        "SET_VRING_ERR 0: none".into(),
        "SET_VRING_KICK 0: some".into(),
        "START_VRING 0".to_owned(),
    ];
    assert_eq!((test.calls(), test.holder()), (calls.to_vec(), "kernel"));

    test.session.set_vring_call(0, None).unwrap();
    assert_eq!(test.calls(), ["SET_VRING_CALL 0: none"], "the ring runs on");
    test.kernel.lock().unwrap().base = 12;
    assert_eq!({ test.session.get_vring_base(0).unwrap().num }, 12);
    assert_eq!(test.calls(), ["STOP_VRING 0"]);
    test.session.end();
    assert_eq!((test.calls(), test.holder()), (vec!["close".to_owned()], "driver"));
}

#[test]
fn a_change_of_memory_stops_the_ring_and_comes_before_its_start() {
    let mut test = Test::new(DataPlane::Kernel);
    test.boot();
    test.calls();
    test.set_memory();
    let calls = test.calls();
    let place = |start: &str| calls.iter().position(|call| call.starts_with(start)).expect(start);
    assert!(place("STOP") < place("SET_MEM_TABLE") && place("SET_MEM_TABLE") < place("START"), "{calls:?}");
}

#[test]
fn a_disk_that_a_predecessor_holds_is_waited_for_and_the_position_is_read_after_that() {
    let mut test = Test::new(DataPlane::Kernel);
    test.kernel.lock().unwrap().busy = 3;
    test.set_used_index(1);
    test.boot();
    assert!(!test.is_in_kernel() && test.session.retry_after().is_some());
    assert_eq!(test.holder(), "driver");
    test.session.retry().unwrap();
    test.session.retry().unwrap();
    test.set_used_index(5); // the predecessor's last completions
    test.calls();
    test.session.retry().unwrap();
    assert!(test.is_in_kernel() && test.session.retry_after().is_none());
    assert!(test.calls().contains(&"SET_VRING_BASE 0: 5".to_owned()));
}

#[test]
fn a_ring_that_waits_for_its_disk_tells_a_position_that_is_exact() {
    let mut test = Test::new(DataPlane::Kernel);
    test.kernel.lock().unwrap().busy = 3;
    test.boot();
    test.set_used_index(4);
    test.session.set_vring_enable(0, false).unwrap();
    assert_eq!({ test.session.get_vring_base(0).unwrap().num }, 4);
}

#[test]
fn rings_that_wait_for_one_disk_start_together_and_each_tells_its_position() {
    let mut test = Test::with_queues(DataPlane::Kernel, 3);
    test.kernel.lock().unwrap().busy = 2;
    test.connect();
    for index in 0..2 {
        test.set_up_ring(index, 0);
        test.session.set_vring_enable(index.into(), true).unwrap();
    }
    test.set_up_ring(2, 0);
    test.set_used_index(4);
    // The message that finds the disk free is not about the rings that wait.
    test.session.set_vring_enable(2, true).unwrap();
    assert!(test.session.serving.iter().all(|running| matches!(running, Some(Running::InKernel))));

    let mut test = Test::with_queues(DataPlane::Kernel, 2);
    test.kernel.lock().unwrap().busy = 4;
    test.connect();
    for index in 0..2 {
        test.set_up_ring(index, 0);
        test.session.set_vring_enable(index.into(), true).unwrap();
    }
    test.set_used_index(4);
    for index in 0..2 {
        test.session.set_vring_enable(index, false).unwrap();
    }
    let positions = [0, 1].map(|index| test.session.get_vring_base(index).unwrap().num);
    assert_eq!(positions, [4, 4]);
}

#[test]
fn a_device_or_module_that_is_missing_is_refused_by_name_and_auto_uses_the_cores() {
    let refusal = |kernel: Kernel, extent, num_queues| {
        let kernel = Arc::new(Mutex::new(kernel));
        let config = |data_plane| Config { data_plane, num_queues, ..Config::new("socket") };
        let (auto, _cores, _) = open(config(DataPlane::Auto), extent, &kernel);
        let auto = auto.unwrap();
        assert!(!auto.plane.is_in_kernel());
        assert_ne!(auto.offered_features() & virtio::VIRTIO_F_RING_PACKED, 0);
        let (forced, _cores, _) = open(config(DataPlane::Kernel), extent, &kernel);
        forced.err().expect("refused").to_string()
    };
    assert_eq!(
        refusal(Kernel::default(), None, 1),
        "data-plane=kernel: on-disk: no block device of this host's kernel"
    );
    let missing = Kernel { refuses_open: Some(libc::ENOENT), ..Kernel::default() };
    let said = refusal(missing, Some(KernelExtent::WHOLE), 1);
    assert!(said.contains("cannot open /dev/vhost-blk (the module vhost_blk is not loaded)"), "{said}");
    let said = refusal(Kernel::default(), Some(KernelExtent::WHOLE), 17);
    assert!(said.contains("fewer rings than the export's 17 queues"), "{said}");
}

#[test]
fn packed_rings_are_not_offered_where_the_kernel_may_serve() {
    let withheld = virtio::VIRTIO_F_RING_PACKED | virtio::VIRTIO_F_IN_ORDER;
    assert_eq!(Test::new(DataPlane::Auto).session.offered_features() & withheld, 0);
    let mut test = Test::new(DataPlane::User);
    let packed = virtio::VIRTIO_F_RING_PACKED | virtio::VIRTIO_F_VERSION_1;
    test.session.set_features(packed).unwrap();
    let refused = test.session.set_data_plane(DataPlane::Kernel).unwrap_err().to_string();
    assert_eq!(refused, "data-plane=kernel: the client uses packed rings, which the kernel does not serve");
    test.session.set_data_plane(DataPlane::Auto).unwrap();
    assert!(!test.session.plane.is_in_kernel());
}

#[test]
fn a_ring_that_the_kernel_refuses_ends_the_client_or_runs_on_a_core() {
    let mut test = Test::new(DataPlane::Kernel);
    test.kernel.lock().unwrap().refuses = Some(("START_VRING", libc::EINVAL));
    test.connect();
    test.set_up(0);
    let refused = test.session.set_vring_enable(0, true).unwrap_err().to_string();
    assert!(refused.contains("/dev/vhost-blk refuses START_VRING"), "{refused}");
    test.session.end();
    assert_eq!(test.holder(), "driver");

    let mut test = Test::new(DataPlane::Auto);
    test.kernel.lock().unwrap().refuses = Some(("START_VRING", libc::EINVAL));
    test.boot();
    assert!(test.is_on_core());
    assert_eq!(test.holder(), "driver");
}

#[test]
fn a_ring_without_a_kick_event_is_polled_by_a_core_or_refused() {
    let mut test = Test::new(DataPlane::Auto);
    test.connect();
    test.set_up(0);
    test.session.set_vring_kick(0, None).unwrap();
    test.session.set_vring_enable(0, true).unwrap();
    assert!(test.is_on_core());

    let mut test = Test::new(DataPlane::Kernel);
    test.connect();
    test.set_up(0);
    test.session.set_vring_kick(0, None).unwrap();
    let refused = test.session.set_vring_enable(0, true).unwrap_err().to_string();
    assert!(refused.contains("queue 0 has no kick event"), "{refused}");
}

#[test]
fn the_data_plane_switches_while_a_ring_runs() {
    let mut test = Test::new(DataPlane::Kernel);
    test.boot();
    test.calls();
    test.kernel.lock().unwrap().base = 6;
    test.set_used_index(6);
    test.session.set_data_plane(DataPlane::User).unwrap();
    assert!(test.is_on_core());
    assert_eq!((test.calls(), test.holder()), (vec!["STOP_VRING 0".to_owned(), "close".into()], "driver"));
    test.session.set_data_plane(DataPlane::User).unwrap();
    assert!(test.is_on_core() && test.calls().is_empty());
    test.session.set_data_plane(DataPlane::Auto).unwrap();
    assert!(test.is_in_kernel());
    assert!(test.calls().contains(&"SET_VRING_BASE 0: 6".to_owned()));
}

#[test]
fn a_switch_that_fails_changes_nothing() {
    let mut test = Test::new(DataPlane::User);
    test.boot();
    test.kernel.lock().unwrap().refuses = Some(("SET_MEM_TABLE", libc::E2BIG));
    let refused = test.session.set_data_plane(DataPlane::Kernel).unwrap_err().to_string();
    assert!(refused.starts_with("data-plane=kernel: /dev/vhost-blk refuses SET_MEM_TABLE"), "{refused}");
    assert!(test.is_on_core());
    assert_eq!((test.session.config.data_plane, test.holder()), (DataPlane::User, "driver"));
    test.kernel.lock().unwrap().refuses_open = Some(libc::ENOENT);
    assert!(test.session.set_data_plane(DataPlane::Kernel).is_err());
    assert!(test.is_on_core());
}

#[test]
fn the_write_cache_reaches_the_kernel_while_a_ring_runs() {
    let mut test = Test::new(DataPlane::Kernel);
    let cache = virtio::blk::VIRTIO_BLK_F_FLUSH | virtio::blk::VIRTIO_BLK_F_CONFIG_WCE;
    let features = virtio::VIRTIO_F_VERSION_1 | virtio::VHOST_USER_F_PROTOCOL_FEATURES | cache;
    test.session.set_features(features).unwrap();
    test.set_memory();
    test.set_up(0);
    test.session.set_vring_enable(0, true).unwrap();
    assert!(test.calls().contains(&"SET_CONFIG flags 0, serial s".to_owned()));
    test.session.write_config(32, &[0]).unwrap();
    assert_eq!(test.calls(), ["SET_CONFIG flags 2, serial s"]);
}

#[test]
fn the_kernel_serves_a_part_of_a_disk_at_its_offset_and_learns_that_it_grows() {
    let mut test = Test::on(KernelExtent { start: MIB, len: None }, DataPlane::Kernel, 1);
    test.boot();
    let calls = test.calls();
    let at = |name: &str| calls.iter().position(|call| call.starts_with(name)).unwrap();
    assert_eq!(calls[at("SET_MAP")], "SET_MAP 0+2048 at 2048, rights 3");
    assert!(at("SET_DISK") < at("SET_MAP") && at("SET_MAP") < at("START_VRING"));
    test.device.memory.resize(2 * MIB).unwrap();
    assert_eq!(test.session.notify_resize().capacity, 2 * MIB);
    assert_eq!(test.calls(), ["SET_MAP 0+4096 at 2048, rights 3"]);
}

#[test]
fn a_part_of_a_disk_that_is_only_read_has_no_right_to_write() {
    let kernel = Arc::<Mutex<Kernel>>::default();
    let config = Config { data_plane: DataPlane::Kernel, read_only: true, ..Config::new("socket") };
    let extent = KernelExtent { start: 512, len: Some(MIB) };
    let (session, cores, device) = open(config, Some(extent), &kernel);
    let mut test = Test { session: session.unwrap(), memory: memfd(MIB), device, kernel, _cores: cores };
    test.boot();
    assert!(test.calls().contains(&"SET_MAP 0+2048 at 1, rights 1".to_owned()));
}

#[test]
fn the_kernel_marks_pages_inside_the_dirty_log_only() {
    let mut test = Test::new(DataPlane::Kernel);
    test.boot();
    test.calls();
    let log = |bytes| VhostUserLog { mmap_size: bytes, mmap_offset: 0 };
    test.session.set_log_base(&log(32), memfd(4096)).unwrap();
    let features = test.session.features | virtio::VHOST_F_LOG_ALL;
    test.calls();
    Session::set_features(&mut test.session, features).unwrap();
    let calls = test.calls();
    assert!(calls.iter().any(|call| call.starts_with("SET_LOG_BASE")), "{calls:?}");
    assert!(
        calls.contains(&format!("SET_FEATURES {:#x}", virtio::VIRTIO_F_VERSION_1 | virtio::VHOST_F_LOG_ALL))
    );
    let refused = test.session.set_log_base(&log(31), memfd(4096)).unwrap_err().to_string();
    assert!(refused.contains("the dirty log does not cover guest memory up to 0x100000"), "{refused}");
}

#[test]
fn cores_complete_what_a_predecessor_has_left_in_flight_before_the_kernel_serves() {
    let mut test = Test::new(DataPlane::Kernel);
    // A flush, whose chain starts with descriptor 0 and has been popped.
    let descriptor = |addr: u64, len: u32, flags: u16, next: u16| {
        let mut bytes = addr.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        bytes
    };
    let header = [4u32, 0, 0, 0].map(u32::to_le_bytes).concat();
    test.memory.write_all_at(&header, 0x8000).unwrap();
    test.memory.write_all_at(&descriptor(0x8000, 16, 1, 1), DESCRIPTORS).unwrap();
    test.memory.write_all_at(&descriptor(0x9000, 1, 2, 0), DESCRIPTORS + 16).unwrap();
    test.memory.write_all_at(&1u16.to_le_bytes(), AVAILABLE + 2).unwrap();
    let region = InflightRegion::create(1, 8, false).unwrap();
    let file = File::from(region.fd().try_clone_to_owned().unwrap());
    for (offset, value) in [(8, 1u16), (10, 8), (16, 1)] {
        file.write_all_at(&value.to_le_bytes(), offset).unwrap();
    }
    test.session.set_inflight(region).unwrap();
    test.boot();
    assert!(test.is_on_core() && test.session.retry_after().is_some());
    let start = Instant::now();
    while !test.is_in_kernel() {
        assert!(start.elapsed() < Duration::from_secs(60), "the request is not completed");
        test.session.retry().unwrap();
    }
    assert_eq!((test.used_index(), test.session.retry_after()), (1, None));
    assert!(test.calls().contains(&"SET_VRING_BASE 0: 1".to_owned()));
}

#[test]
fn an_export_with_a_process_of_its_own_is_served_by_its_cores() {
    let kernel = Arc::<Mutex<Kernel>>::default();
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(&Options::new(MIB)).unwrap());
    let config = Config { data_plane: DataPlane::Auto, ..Config::new("socket") };
    let plane = Plane::choose(&device, &config, true, Fake::opener(kernel.clone())).unwrap();
    assert!(!plane.is_in_kernel() && kernel.lock().unwrap().calls.is_empty());
}
