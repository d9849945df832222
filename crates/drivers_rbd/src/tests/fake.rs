//! librados and librbd in memory: operations end on threads of an image, in any order.

use super::super::library::{
    Callback, Cluster, Completion, ConfigOption, FEATURE_EXCLUSIVE_LOCK, Image, ImageInfo, ImageWatcher,
    Library, Pool, Progress, Segments, UpdateCallback, WRITE_ZEROES_THICK,
};
use block::{Data, Segment};
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::take;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Condvar, LazyLock, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

/// Address of the client that the tests are.
const OWN_ADDRESS: &str = "127.0.0.1:0/1";
const THREADS: usize = 3;

/// Every cluster by its user, and every image by its name: each test has its own.
static CLUSTERS: LazyLock<Mutex<HashMap<String, Arc<FakeCluster>>>> = LazyLock::new(Default::default);
static IMAGES: LazyLock<Mutex<HashMap<String, Arc<FakeImage>>>> = LazyLock::new(Default::default);

/// A cluster, and what happened to the handles of one of its users.
#[derive(Default)]
pub struct FakeCluster {
    pub connected: AtomicU32,
    pub shut_down: AtomicU32,
    /// Processors that the threads of the latest handle may use.
    pub processors: AtomicU32,
    pub refuse_connect: AtomicI32,
}

/// An image, and the faults that a test wants.
#[derive(Default)]
pub struct FakeImage {
    pub data: Mutex<Vec<u8>>,
    pub features: AtomicU64,
    /// The address of the client that has the lock.
    pub owner: Mutex<Option<String>>,
    /// Whether the cluster knows that this client has ended.
    pub is_owner_dead: AtomicBool,
    /// Errno (positive) of operations that end; 0: success.
    pub fail_with: AtomicI32,
    /// Errno (positive) of operations that do not start; 0: they start.
    pub refuse_with: AtomicI32,
    /// Bytes by which reads are too short.
    pub cut_reads_by: AtomicU32,
    pub flushes: AtomicU32,
    pub thick_zeroes: AtomicU32,
    pub is_open: AtomicBool,
    pub is_read_only: AtomicBool,
    /// Completions that were started or refused, and not yet released.
    pub in_flight: AtomicU32,
    is_held: Mutex<bool>,
    released: Condvar,
    threads: Mutex<Option<Threads>>,
    watch: Mutex<Option<Watch>>,
}

impl FakeCluster {
    pub fn of(user: &str) -> Arc<FakeCluster> {
        CLUSTERS.lock().unwrap().entry(user.into()).or_default().clone()
    }
}

impl FakeImage {
    /// Makes an image with the feature exclusive-lock.
    pub fn create(name: &str, size: usize) -> Arc<FakeImage> {
        let image = Arc::new(FakeImage { data: Mutex::new(vec![0; size]), ..FakeImage::default() });
        image.features.store(FEATURE_EXCLUSIVE_LOCK, SeqCst);
        IMAGES.lock().unwrap().insert(name.into(), image.clone());
        image
    }

    /// Changes the size, as another client does.
    pub fn resize(&self, size: usize) {
        self.data.lock().unwrap().resize(size, 0);
        if let Some(Watch(changed, argument)) = &*self.watch.lock().unwrap() {
            // SAFETY: a watch that has not ended, and does not end while it is locked.
            unsafe { changed(*argument) };
        }
    }

    pub fn is_watched(&self) -> bool {
        self.watch.lock().unwrap().is_some()
    }

    /// Lets no operation end until [`FakeImage::release`].
    pub fn hold(&self) {
        *self.is_held.lock().unwrap() = true;
    }

    pub fn release(&self) {
        *self.is_held.lock().unwrap() = false;
        self.released.notify_all();
    }

    fn start_threads(self: &Arc<Self>) {
        let (jobs, receiver) = mpsc::channel();
        let receiver = Arc::new(Mutex::new(receiver));
        let thread = |_| {
            let (image, receiver) = (self.clone(), receiver.clone());
            std::thread::spawn(move || image.serve(&receiver))
        };
        let handles = (0..THREADS).map(thread).collect();
        *self.threads.lock().unwrap() = Some(Threads { jobs, handles });
    }

    fn serve(&self, jobs: &Mutex<mpsc::Receiver<Job>>) {
        for round in 0u64.. {
            let Ok(job) = jobs.lock().unwrap().recv() else { return };
            let mut is_held = self.is_held.lock().unwrap();
            while *is_held {
                is_held = self.released.wait(is_held).unwrap();
            }
            drop(is_held);
            if round.is_multiple_of(7) {
                std::thread::sleep(Duration::from_micros(round % 50)); // others overtake it
            }
            let value = match self.fail_with.load(SeqCst) {
                0 => self.carry_out(&job.operation),
                errno => -i64::from(errno),
            };
            job.completion.end(value);
        }
    }

    fn carry_out(&self, operation: &Operation) -> i64 {
        let mut data = self.data.lock().unwrap();
        let place = |offset: u64, len: usize| offset as usize..offset as usize + len;
        match operation {
            Operation::Read(segments, offset) => {
                // SAFETY: list and memory are valid until the callback.
                let window = unsafe { Data::new(std::slice::from_raw_parts(segments.0, segments.1)) };
                let bytes = &data[place(*offset, window.len())];
                window.copy_from(bytes);
                return bytes.len() as i64 - i64::from(self.cut_reads_by.load(SeqCst));
            }
            Operation::Write(bytes, offset) => data[place(*offset, bytes.len())].copy_from_slice(bytes),
            Operation::Zero(offset, len) => data[place(*offset, *len)].fill(0),
            Operation::Flush => drop(self.flushes.fetch_add(1, SeqCst)),
        }
        0
    }
}

/// The callback of a watch, and its argument.
struct Watch(UpdateCallback, *mut c_void);

// SAFETY: the callback may be called on any thread.
unsafe impl Send for Watch {}

/// The threads of an open image, and the way to give them work.
struct Threads {
    jobs: mpsc::Sender<Job>,
    handles: Vec<JoinHandle<()>>,
}

struct Job {
    operation: Operation,
    completion: Pointer,
}

enum Operation {
    Read(List, u64),
    Write(Vec<u8>, u64),
    Zero(u64, usize),
    Flush,
}

/// The caller's own list of a read, as librbd keeps it.
struct List(*const Segment, usize);

// SAFETY: by the contract of the calls, any thread may use it.
unsafe impl Send for List {}

struct FakeCompletion {
    argument: *mut c_void,
    callback: Callback,
    value: i64,
    image: Option<Arc<FakeImage>>,
}

struct Pointer(*mut FakeCompletion);

// SAFETY: the completion belongs to the thread that ends it.
unsafe impl Send for Pointer {}

impl Pointer {
    fn end(self, value: i64) {
        // SAFETY: a completion that is not released; the callback releases it.
        unsafe {
            (*self.0).value = value;
            let (callback, argument) = ((*self.0).callback, (*self.0).argument);
            callback(self.0.cast(), argument);
        }
    }
}

/// The table of the fake's functions.
pub fn library() -> Result<&'static Library, String> {
    static LIBRARY: Library = Library {
        rados_create2,
        rados_conf_read_file,
        rados_conf_set,
        rados_connect,
        rados_shutdown,
        rados_pool_list,
        rados_ioctx_create,
        rados_ioctx_set_namespace,
        rados_ioctx_destroy,
        rbd_namespace_list,
        rbd_list,
        rbd_create,
        rbd_open,
        rbd_open_read_only,
        rbd_close,
        rbd_stat,
        rbd_get_size,
        rbd_resize2,
        rbd_get_features,
        rbd_config_image_list,
        rbd_config_image_list_cleanup,
        rbd_update_watch,
        rbd_update_unwatch,
        rbd_watchers_list,
        rbd_watchers_list_cleanup,
        rbd_lock_acquire,
        rbd_lock_get_owners,
        rbd_lock_get_owners_cleanup,
        rbd_lock_break,
        rbd_aio_create_completion,
        rbd_aio_get_return_value,
        rbd_aio_release,
        rbd_aio_readv,
        rbd_aio_writev,
        rbd_aio_discard,
        rbd_aio_write_zeroes,
        rbd_aio_flush,
    };
    Ok(&LIBRARY)
}

/// A handle of a cluster, as the driver has it.
struct Handle {
    cluster: Arc<FakeCluster>,
    is_cached: bool,
}

/// An open image, as the driver has it.
struct OpenImage {
    image: Arc<FakeImage>,
    is_cached: bool,
}

unsafe fn text<'a>(text: *const c_char) -> &'a str {
    // SAFETY: the driver passes C strings.
    unsafe { CStr::from_ptr(text) }.to_str().unwrap()
}

unsafe fn handle<'a>(cluster: Cluster) -> &'a mut Handle {
    // SAFETY: made by `rados_create2`.
    unsafe { &mut *cluster.cast() }
}

unsafe fn open_image<'a>(image: Image) -> &'a OpenImage {
    // SAFETY: made by `rbd_open`.
    unsafe { &*image.cast() }
}

unsafe extern "C" fn rados_create2(
    cluster: *mut Cluster,
    _: *const c_char,
    user: *const c_char,
    _: u64,
) -> c_int {
    // SAFETY: arguments as the header demands.
    unsafe {
        let cluster_of_user = FakeCluster::of(text(user).strip_prefix("client.").unwrap());
        *cluster = Box::into_raw(Box::new(Handle { cluster: cluster_of_user, is_cached: true })).cast();
    }
    0
}

unsafe extern "C" fn rados_conf_read_file(_: Cluster, path: *const c_char) -> c_int {
    // SAFETY: a C string or null.
    let is_missing = !path.is_null() && unsafe { text(path) }.contains("missing");
    if is_missing { -libc::ENOENT } else { 0 }
}

unsafe extern "C" fn rados_conf_set(cluster: Cluster, name: *const c_char, value: *const c_char) -> c_int {
    // SAFETY: arguments as the header demands.
    unsafe {
        if text(name) == "rbd_cache" {
            handle(cluster).is_cached = text(value) == "true";
        }
    }
    0
}

unsafe extern "C" fn rados_connect(cluster: Cluster) -> c_int {
    // SAFETY: made by `rados_create2`; the set is ours.
    unsafe {
        let cluster = &handle(cluster).cluster;
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set);
        cluster.processors.store(libc::CPU_COUNT(&set) as u32, SeqCst);
        cluster.connected.fetch_add(1, SeqCst);
        -cluster.refuse_connect.load(SeqCst)
    }
}

unsafe extern "C" fn rados_shutdown(cluster: Cluster) {
    // SAFETY: made by `rados_create2`, and not used any more.
    let handle = unsafe { Box::from_raw(cluster.cast::<Handle>()) };
    handle.cluster.shut_down.fetch_add(1, SeqCst);
}

unsafe extern "C" fn rados_ioctx_create(cluster: Cluster, name: *const c_char, pool: *mut Pool) -> c_int {
    // SAFETY: arguments as the header demands.
    unsafe {
        if text(name) == "missing" {
            return -libc::ENOENT;
        }
        *pool = cluster;
    }
    0
}

unsafe extern "C" fn rados_ioctx_set_namespace(_: Pool, _: *const c_char) {}

unsafe extern "C" fn rados_ioctx_destroy(_: Pool) {}

// Administration is tested with the stub (tests/rbd_library.rs).

unsafe extern "C" fn rados_pool_list(_: Cluster, _: *mut c_char, _: usize) -> c_int {
    -libc::ENOSYS
}

unsafe extern "C" fn rbd_namespace_list(_: Pool, _: *mut c_char, _: *mut usize) -> c_int {
    -libc::ENOSYS
}

unsafe extern "C" fn rbd_list(_: Pool, _: *mut c_char, _: *mut usize) -> c_int {
    -libc::ENOSYS
}

unsafe extern "C" fn rbd_create(_: Pool, _: *const c_char, _: u64, _: *mut c_int) -> c_int {
    -libc::ENOSYS
}

unsafe extern "C" fn rbd_resize2(_: Image, _: u64, _: bool, _: Progress, _: *mut c_void) -> c_int {
    -libc::ENOSYS
}

unsafe extern "C" fn rbd_open(pool: Pool, name: *const c_char, image: *mut Image, _: *const c_char) -> c_int {
    // SAFETY: arguments as the header demands.
    unsafe {
        let Some(found) = IMAGES.lock().unwrap().get(text(name)).cloned() else { return -libc::ENOENT };
        assert!(!found.is_open.swap(true, SeqCst), "opened twice");
        found.start_threads();
        let open = OpenImage { image: found, is_cached: handle(pool).is_cached };
        *image = Box::into_raw(Box::new(open)).cast();
    }
    0
}

unsafe extern "C" fn rbd_open_read_only(
    pool: Pool,
    name: *const c_char,
    image: *mut Image,
    snapshot: *const c_char,
) -> c_int {
    // SAFETY: as in `rbd_open`.
    unsafe {
        let result = rbd_open(pool, name, image, snapshot);
        if result == 0 {
            open_image(*image).image.is_read_only.store(true, SeqCst);
        }
        result
    }
}

unsafe extern "C" fn rbd_close(image: Image) -> c_int {
    // SAFETY: made by `rbd_open`, and not used any more.
    let open = unsafe { Box::from_raw(image.cast::<OpenImage>()) };
    let Threads { jobs, handles } = open.image.threads.lock().unwrap().take().unwrap();
    drop(jobs);
    handles.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(open.image.in_flight.load(SeqCst), 0, "completions that were not released");
    assert!(!open.image.is_watched(), "a watch that has not ended");
    open.image.is_open.store(false, SeqCst);
    let mut owner = open.image.owner.lock().unwrap();
    if owner.as_deref() == Some(OWN_ADDRESS) {
        *owner = None;
    }
    0
}

unsafe extern "C" fn rbd_stat(image: Image, info: *mut ImageInfo, len: usize) -> c_int {
    assert_eq!(len, size_of::<ImageInfo>());
    // SAFETY: arguments as the header demands.
    unsafe {
        (*info).size = open_image(image).image.data.lock().unwrap().len() as u64;
        (*info).object_size = 4 << 20;
    }
    0
}

unsafe extern "C" fn rbd_get_size(image: Image, size: *mut u64) -> c_int {
    // SAFETY: arguments as the header demands.
    unsafe { *size = open_image(image).image.data.lock().unwrap().len() as u64 };
    0
}

unsafe extern "C" fn rbd_get_features(image: Image, features: *mut u64) -> c_int {
    // SAFETY: arguments as the header demands.
    unsafe { *features = open_image(image).image.features.load(SeqCst) };
    0
}

unsafe extern "C" fn rbd_config_image_list(
    image: Image,
    list: *mut ConfigOption,
    count: *mut c_int,
) -> c_int {
    // SAFETY: arguments as the header demands.
    unsafe {
        let value = if open_image(image).is_cached { c"true" } else { c"false" };
        let options = [(c"rbd_cache_size", c"true"), (c"rbd_cache", value)];
        assert!(*count >= options.len() as c_int);
        for (i, (name, value)) in options.into_iter().enumerate() {
            let [name, value] = [name, value].map(|text| CString::from(text).into_raw());
            *list.add(i) = ConfigOption { name, value, source: 0 };
        }
        *count = options.len() as c_int;
    }
    0
}

unsafe extern "C" fn rbd_config_image_list_cleanup(list: *mut ConfigOption, count: c_int) {
    for i in 0..count as usize {
        // SAFETY: made by `rbd_config_image_list`.
        unsafe {
            drop(CString::from_raw((*list.add(i)).name));
            drop(CString::from_raw((*list.add(i)).value));
        }
    }
}

unsafe extern "C" fn rbd_update_watch(
    image: Image,
    handle: *mut u64,
    changed: UpdateCallback,
    argument: *mut c_void,
) -> c_int {
    // SAFETY: arguments as the header demands.
    unsafe {
        *open_image(image).image.watch.lock().unwrap() = Some(Watch(changed, argument));
        *handle = 7;
    }
    0
}

unsafe extern "C" fn rbd_update_unwatch(image: Image, handle: u64) -> c_int {
    assert_eq!(handle, 7);
    // SAFETY: an open image.
    unsafe { open_image(image) }.image.watch.lock().unwrap().take().expect("a watch");
    0
}

unsafe extern "C" fn rbd_watchers_list(image: Image, list: *mut ImageWatcher, count: *mut usize) -> c_int {
    // SAFETY: arguments as the header demands.
    unsafe {
        let image = &open_image(image).image;
        let other = image.owner.lock().unwrap().clone().filter(|_| !image.is_owner_dead.load(SeqCst));
        let watchers: Vec<String> = other.into_iter().chain([OWN_ADDRESS.into()]).collect();
        assert!(*count >= watchers.len());
        *count = watchers.len();
        for (i, address) in watchers.into_iter().enumerate() {
            let address = CString::new(address).unwrap().into_raw();
            *list.add(i) = ImageWatcher { address, id: 0, cookie: i as u64 };
        }
    }
    0
}

unsafe extern "C" fn rbd_watchers_list_cleanup(list: *mut ImageWatcher, count: usize) {
    for i in 0..count {
        // SAFETY: made by `rbd_watchers_list`.
        unsafe { drop(CString::from_raw((*list.add(i)).address)) };
    }
}

unsafe extern "C" fn rbd_lock_acquire(image: Image, _: c_int) -> c_int {
    // SAFETY: an open image.
    let image = unsafe { &open_image(image).image };
    let mut owner = image.owner.lock().unwrap();
    match owner.as_deref() {
        Some(other) if other != OWN_ADDRESS && !image.is_owner_dead.load(SeqCst) => -libc::EROFS,
        _ => {
            *owner = Some(OWN_ADDRESS.into());
            0
        }
    }
}

unsafe extern "C" fn rbd_lock_get_owners(
    image: Image,
    _: *mut c_int,
    owners: *mut *mut c_char,
    count: *mut usize,
) -> c_int {
    // SAFETY: arguments as the header demands.
    unsafe {
        let Some(owner) = open_image(image).image.owner.lock().unwrap().clone() else {
            return -libc::ENOENT;
        };
        *owners = CString::new(owner).unwrap().into_raw();
        *count = 1;
    }
    0
}

unsafe extern "C" fn rbd_lock_get_owners_cleanup(owners: *mut *mut c_char, count: usize) {
    assert_eq!(count, 1);
    // SAFETY: made by `rbd_lock_get_owners`.
    unsafe { drop(CString::from_raw(*owners)) };
}

unsafe extern "C" fn rbd_lock_break(image: Image, _: c_int, owner: *const c_char) -> c_int {
    // SAFETY: arguments as the header demands.
    unsafe {
        let broken = take(&mut *open_image(image).image.owner.lock().unwrap());
        assert_eq!(broken.as_deref(), Some(text(owner)));
    }
    0
}

unsafe extern "C" fn rbd_aio_create_completion(
    argument: *mut c_void,
    callback: Callback,
    completion: *mut Completion,
) -> c_int {
    let new = Box::new(FakeCompletion { argument, callback, value: 0, image: None });
    // SAFETY: the driver's own variable.
    unsafe { *completion = Box::into_raw(new).cast() };
    0
}

unsafe extern "C" fn rbd_aio_get_return_value(completion: Completion) -> isize {
    // SAFETY: a completion that has ended.
    unsafe { (*completion.cast::<FakeCompletion>()).value as isize }
}

unsafe extern "C" fn rbd_aio_release(completion: Completion) {
    // SAFETY: a completion that is not used any more.
    let completion = unsafe { Box::from_raw(completion.cast::<FakeCompletion>()) };
    if let Some(image) = &completion.image {
        image.in_flight.fetch_sub(1, SeqCst);
    }
}

unsafe fn start(image: Image, completion: Completion, operation: Operation) -> c_int {
    let completion = completion.cast::<FakeCompletion>();
    // SAFETY: an open image and a new completion.
    let image = unsafe { &open_image(image).image };
    image.in_flight.fetch_add(1, SeqCst);
    // SAFETY: likewise.
    unsafe { (*completion).image = Some(image.clone()) };
    let errno = image.refuse_with.load(SeqCst);
    if errno == 0 {
        let job = Job { operation, completion: Pointer(completion) };
        image.threads.lock().unwrap().as_ref().unwrap().jobs.send(job).unwrap();
    }
    -errno
}

unsafe extern "C" fn rbd_aio_readv(
    image: Image,
    list: Segments,
    count: c_int,
    offset: u64,
    completion: Completion,
) -> c_int {
    // SAFETY: as in `start`.
    unsafe { start(image, completion, Operation::Read(List(list, count as usize), offset)) }
}

unsafe extern "C" fn rbd_aio_writev(
    image: Image,
    list: Segments,
    count: c_int,
    offset: u64,
    completion: Completion,
) -> c_int {
    // SAFETY: a list of the driver, whose data is copied now; the rest as in `start`.
    unsafe {
        let window = Data::new(std::slice::from_raw_parts(list, count as usize));
        let mut bytes = vec![0; window.len()];
        window.copy_to(&mut bytes);
        start(image, completion, Operation::Write(bytes, offset))
    }
}

unsafe extern "C" fn rbd_aio_discard(image: Image, offset: u64, len: u64, completion: Completion) -> c_int {
    // SAFETY: as in `start`.
    unsafe { start(image, completion, Operation::Zero(offset, len as usize)) }
}

unsafe extern "C" fn rbd_aio_write_zeroes(
    image: Image,
    offset: u64,
    len: usize,
    completion: Completion,
    flags: c_int,
    _: c_int,
) -> c_int {
    // SAFETY: as in `start`.
    unsafe {
        if flags & WRITE_ZEROES_THICK != 0 {
            open_image(image).image.thick_zeroes.fetch_add(1, SeqCst);
        }
        start(image, completion, Operation::Zero(offset, len))
    }
}

unsafe extern "C" fn rbd_aio_flush(image: Image, completion: Completion) -> c_int {
    // SAFETY: as in `start`.
    unsafe { start(image, completion, Operation::Flush) }
}
