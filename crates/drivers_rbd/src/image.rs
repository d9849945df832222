//! An open image: its properties, and the start of its operations.

use super::cluster::{ClusterHandle, c_string};
use super::error::{OpenError, check};
use super::library::{
    Callback, ConfigOption, Image, ImageInfo, Library, Pool, UpdateCallback, WRITE_ZEROES_THICK,
};
use super::lock_record::LockRecord;
use super::options::Options;
use block::Segment;
use std::ffi::{CStr, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::{from_ref, null, null_mut};
use std::sync::{Arc, Mutex};

/// Maximum options of an image that the driver reads; librbd has about 60.
const MAX_CONFIG_OPTIONS: usize = 1024;

/// An operation on a range of bytes.
#[derive(Clone, Copy)]
pub(super) enum Operation<'a> {
    Read(&'a [Segment], u64),
    Write(&'a [Segment], u64),
    Discard {
        offset: u64,
        len: u64,
    },
    /// `is_thick`: the range keeps its space, and zeroes are written.
    WriteZeroes {
        offset: u64,
        len: u64,
        is_thick: bool,
    },
    Flush,
}

/// An open image. Dropping it waits for the end of its operations.
pub(super) struct ImageHandle {
    pub(super) raw: Image,
    pool: OpenPool,
    /// The record of the exclusive lock, kept until the image is closed.
    pub(super) record: Mutex<Option<LockRecord>>,
}

// SAFETY: librbd's images may be used from all threads at once.
unsafe impl Send for ImageHandle {}
// SAFETY: likewise.
unsafe impl Sync for ImageHandle {}

/// An open pool. Its images end before it.
pub(super) struct OpenPool {
    pub(super) raw: Pool,
    cluster: Arc<ClusterHandle>,
}

impl OpenPool {
    /// Opens a pool and namespace of the cluster.
    ///
    /// # Errors
    /// When the pool does not exist.
    pub(super) fn open(
        cluster: &Arc<ClusterHandle>,
        pool: &str,
        namespace: &str,
    ) -> Result<OpenPool, OpenError> {
        Ok(OpenPool { raw: cluster.open_pool(pool, namespace)?, cluster: cluster.clone() })
    }
}

impl Drop for OpenPool {
    fn drop(&mut self) {
        // SAFETY: an open pool, without an open image.
        unsafe { (self.cluster.library.rados_ioctx_destroy)(self.raw) };
    }
}

impl ImageHandle {
    /// Opens the image, without its lock.
    ///
    /// # Errors
    /// When it does not exist, or the user may not open it.
    pub(super) fn open(cluster: &Arc<ClusterHandle>, options: &Options) -> Result<ImageHandle, OpenError> {
        let library = cluster.library;
        let pool = OpenPool::open(cluster, &options.pool, &options.namespace)?;
        let name = c_string(&options.image);
        let snapshot = options.snapshot.as_deref().map(c_string);
        let snapshot = snapshot.as_ref().map_or(null(), |snapshot| snapshot.as_ptr());
        let open = if options.is_read_only() { library.rbd_open_read_only } else { library.rbd_open };
        let mut raw = null_mut();
        // SAFETY: an open pool and C strings; the image is written before the call returns.
        check(unsafe { open(pool.raw, name.as_ptr(), &raw mut raw, snapshot) }, || "open the image".into())?;
        Ok(ImageHandle { raw, pool, record: Mutex::default() })
    }

    pub(super) fn library(&self) -> &'static Library {
        self.pool.cluster.library
    }

    /// The size in bytes at present.
    ///
    /// # Errors
    /// When the cluster does not answer, or the image was removed.
    pub(super) fn size(&self) -> Result<u64, OpenError> {
        let mut size = 0;
        // SAFETY: an open image; the size is ours.
        let result = unsafe { (self.library().rbd_get_size)(self.raw, &raw mut size) };
        check(result, || "read the size of the image".into()).map(|()| size)
    }

    /// Makes the image larger.
    ///
    /// # Errors
    /// As [`ImageHandle::size`].
    pub(super) fn resize(&self, size: u64) -> Result<(), OpenError> {
        unsafe extern "C" fn continues(_: u64, _: u64, _: *mut c_void) -> c_int {
            0
        }
        // SAFETY: an open image; the callback uses no argument.
        let result = unsafe { (self.library().rbd_resize2)(self.raw, size, false, continues, null_mut()) };
        check(result, || format!("resize the image to {size} bytes"))
    }

    /// The size of the objects that hold the image, in bytes.
    ///
    /// # Errors
    /// As [`ImageHandle::size`].
    pub(super) fn object_size(&self) -> Result<u64, OpenError> {
        let mut info = MaybeUninit::<ImageInfo>::zeroed();
        // SAFETY: an open image, and a structure of its length.
        let result =
            unsafe { (self.library().rbd_stat)(self.raw, info.as_mut_ptr(), size_of::<ImageInfo>()) };
        check(result, || "read the properties of the image".into())?;
        // SAFETY: the structure consists of integers, for which zero is valid.
        Ok(unsafe { info.assume_init() }.object_size)
    }

    /// Whether writes are cached in this process. Options that are stored with an image or its pool
    /// take precedence over this process's own.
    ///
    /// # Errors
    /// As [`ImageHandle::size`].
    pub(super) fn is_cached(&self) -> Result<bool, OpenError> {
        let library = self.library();
        let empty = || ConfigOption { name: null_mut(), value: null_mut(), source: 0 };
        let mut list: Vec<_> = (0..MAX_CONFIG_OPTIONS).map(|_| empty()).collect();
        let mut count = MAX_CONFIG_OPTIONS as c_int;
        // SAFETY: an open image, and a list of `count` options.
        let result = unsafe { (library.rbd_config_image_list)(self.raw, list.as_mut_ptr(), &raw mut count) };
        check(result, || "read the options of the image".into())?;
        let options = &list[..usize::try_from(count).unwrap_or(0).min(list.len())];
        // SAFETY: the library has filled in `count` options with C strings.
        let is_cached = options.iter().any(|option| unsafe {
            CStr::from_ptr(option.name) == c"rbd_cache" && CStr::from_ptr(option.value) == c"true"
        });
        // SAFETY: the list as the library returned it.
        unsafe { (library.rbd_config_image_list_cleanup)(list.as_mut_ptr(), count) };
        Ok(is_cached)
    }

    /// Has `changed` called with `argument` whenever the image has changed. Returns the watch.
    ///
    /// # Errors
    /// As [`ImageHandle::size`].
    ///
    /// # Safety
    /// `changed` may be called with `argument` on any thread until [`ImageHandle::unwatch`] has
    /// returned.
    pub(super) unsafe fn watch(
        &self,
        changed: UpdateCallback,
        argument: *mut c_void,
    ) -> Result<u64, OpenError> {
        let mut watch = 0;
        // SAFETY: an open image; the callback by this function's contract.
        let result =
            unsafe { (self.library().rbd_update_watch)(self.raw, &raw mut watch, changed, argument) };
        check(result, || "watch the image".into()).map(|()| watch)
    }

    /// Ends a watch, after its callbacks have ended.
    pub(super) fn unwatch(&self, watch: u64) {
        // SAFETY: an open image. The call fails only for a watch that does not exist.
        unsafe { (self.library().rbd_update_unwatch)(self.raw, watch) };
    }

    /// Starts an operation. `ended` is called once with `argument`, on a thread of librbd, perhaps
    /// before this call returns. It releases the completion with [`take_result`].
    ///
    /// # Errors
    /// The errno (positive) of an operation that did not start: `ended` is not called.
    ///
    /// # Safety
    /// The memory of the segments, and for a read their list, stays valid until `ended` is called;
    /// `ended` may be called with `argument` on any thread.
    pub(super) unsafe fn start(
        &self,
        operation: Operation<'_>,
        ended: Callback,
        argument: *mut c_void,
    ) -> Result<(), i32> {
        let (library, raw) = (self.library(), self.raw);
        let mut completion = null_mut();
        // SAFETY: the completion is written before the call returns.
        let created = unsafe { (library.rbd_aio_create_completion)(argument, ended, &raw mut completion) };
        if created < 0 {
            return Err(created.saturating_neg());
        }
        // SAFETY: an open image and a new completion; memory and list by this function's contract.
        let result = unsafe {
            match operation {
                Operation::Read(list, offset) => {
                    (library.rbd_aio_readv)(raw, list.as_ptr(), list.len() as c_int, offset, completion)
                }
                Operation::Write(list, offset) => {
                    (library.rbd_aio_writev)(raw, list.as_ptr(), list.len() as c_int, offset, completion)
                }
                Operation::Discard { offset, len } => (library.rbd_aio_discard)(raw, offset, len, completion),
                Operation::WriteZeroes { offset, len, is_thick } => {
                    let flags = if is_thick { WRITE_ZEROES_THICK } else { 0 };
                    (library.rbd_aio_write_zeroes)(raw, offset, len as usize, completion, flags, 0)
                }
                Operation::Flush => (library.rbd_aio_flush)(raw, completion),
            }
        };
        if result < 0 {
            // SAFETY: a completion whose operation did not start.
            unsafe { (library.rbd_aio_release)(completion) };
            return Err(result.saturating_neg());
        }
        Ok(())
    }

    /// The table of functions, for callbacks.
    pub(super) fn table(&self) -> *const Library {
        from_ref(self.library())
    }
}

impl Drop for ImageHandle {
    fn drop(&mut self) {
        // SAFETY: an open image that no channel uses any more. Its lock is released with it.
        let result = unsafe { (self.library().rbd_close)(self.raw) };
        if result < 0 {
            let error = std::io::Error::from_raw_os_error(result.saturating_neg());
            tracing::warn!(%error, "an RBD image was not closed cleanly");
        }
    }
}
