//! Connections to clusters, shared by the images of this process.
//!
//! A handle costs several threads and a connection to each OSD, so images share one. Images with a
//! cache have another handle than those without, because the handle has this option.

use super::error::{OpenError, check};
use super::library::{Cluster, Library, Pool};
use super::names::names;
use super::options::ClusterOptions;
use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The properties that images of one handle have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Key {
    /// Address of the table of functions: tests have their own.
    library: usize,
    conf: Option<PathBuf>,
    user: String,
    cache: bool,
}

type Place = Arc<Mutex<Weak<ClusterHandle>>>;

/// The handles of this process. A place remains after its handle; there are as many as
/// configurations.
static HANDLES: Mutex<Vec<(Key, Place)>> = Mutex::new(Vec::new());

/// A connection to a cluster.
pub(super) struct ClusterHandle {
    pub(super) library: &'static Library,
    raw: Cluster,
}

// SAFETY: librados' handles may be used from all threads at once.
unsafe impl Send for ClusterHandle {}
// SAFETY: likewise.
unsafe impl Sync for ClusterHandle {}

impl ClusterHandle {
    /// The connection that `options` describe: an open one, or a new one. `cache` is whether its
    /// images cache writes.
    ///
    /// # Errors
    /// When the configuration cannot be read, or the monitors do not answer or refuse the user.
    pub(super) fn open(
        library: &'static Library,
        options: &ClusterOptions,
        cache: bool,
    ) -> Result<Arc<Self>, OpenError> {
        let key = Key {
            library: std::ptr::from_ref(library).addr(),
            conf: options.conf.clone(),
            user: options.user.clone(),
            cache,
        };
        let place = place_of(key);
        // Held while it connects: images that are opened at the same time share the handle.
        let mut shared = place.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(handle) = shared.upgrade() {
            return Ok(handle);
        }
        let handle = Arc::new(ClusterHandle::connect(library, options, cache)?);
        *shared = Arc::downgrade(&handle);
        Ok(handle)
    }

    fn connect(library: &'static Library, options: &ClusterOptions, cache: bool) -> Result<Self, OpenError> {
        let user = c_string(&format!("client.{}", options.user));
        let mut raw = std::ptr::null_mut();
        // SAFETY: live C strings; the handle is written before the call returns.
        let result = unsafe { (library.rados_create2)(&raw mut raw, c"ceph".as_ptr(), user.as_ptr(), 0) };
        check(result, || "create a handle of the cluster".into())?;
        let handle = ClusterHandle { library, raw };
        let conf = options.conf.as_ref().map(|path| c_string_of(path.as_os_str().as_bytes()));
        let path = conf.as_ref().map_or(std::ptr::null(), |path| path.as_ptr());
        // SAFETY: an open handle, and a C string or null for the default files.
        let result = unsafe { (library.rados_conf_read_file)(raw, path) };
        check(result, || match &options.conf {
            Some(path) => format!("read {}", path.display()),
            None => "read Ceph's configuration (CEPH_CONF, /etc/ceph/ceph.conf; conf= names another)".into(),
        })?;
        handle.set(c"rbd_cache", if cache { "true" } else { "false" })?;
        let timeout_s = options.timeout_ms.div_ceil(1000).max(1).to_string();
        handle.set(c"client_mount_timeout", &timeout_s)?;
        // SAFETY: an open handle.
        let result = unsafe { (library.rados_connect)(raw) };
        check(result, || format!("connect to the cluster as client.{}", options.user))?;
        tracing::info!(user = options.user, conf = ?options.conf, "Ceph cluster connected");
        Ok(handle)
    }

    fn set(&self, option: &CStr, value: &str) -> Result<(), OpenError> {
        let text = c_string(value);
        // SAFETY: an open handle and C strings.
        let result = unsafe { (self.library.rados_conf_set)(self.raw, option.as_ptr(), text.as_ptr()) };
        check(result, || format!("set {}={value}", option.to_string_lossy()))
    }

    /// The names of the pools.
    ///
    /// # Errors
    /// When the cluster does not answer.
    pub(super) fn pools(&self) -> Result<Vec<String>, OpenError> {
        names("pools", |buffer, len| {
            // SAFETY: an open handle, and room for `len` bytes.
            let needed = unsafe { (self.library.rados_pool_list)(self.raw, buffer, *len) };
            match usize::try_from(needed) {
                Ok(needed) if needed > *len => {
                    *len = needed;
                    -libc::ERANGE
                }
                _ => needed,
            }
        })
    }

    /// Opens a pool and namespace. The caller destroys the pool before this handle ends.
    ///
    /// # Errors
    /// When the pool does not exist.
    pub(super) fn open_pool(&self, pool: &str, namespace: &str) -> Result<Pool, OpenError> {
        let (name, namespace) = (c_string(pool), c_string(namespace));
        let mut raw = std::ptr::null_mut();
        // SAFETY: an open handle and a C string; the pool is written before the call returns.
        let result = unsafe { (self.library.rados_ioctx_create)(self.raw, name.as_ptr(), &raw mut raw) };
        check(result, || format!("open the pool {pool}"))?;
        // SAFETY: an open pool and a C string.
        unsafe { (self.library.rados_ioctx_set_namespace)(raw, namespace.as_ptr()) };
        Ok(raw)
    }
}

impl Drop for ClusterHandle {
    fn drop(&mut self) {
        // SAFETY: images hold this handle, so none is open.
        unsafe { (self.library.rados_shutdown)(self.raw) };
    }
}

fn place_of(key: Key) -> Place {
    let mut handles = HANDLES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, place)) = handles.iter().find(|(present, _)| *present == key) {
        return place.clone();
    }
    let place = Place::default();
    handles.push((key, place.clone()));
    place
}

/// A C string of a text without zeroes, as [`Options::check`] assures.
pub(super) fn c_string(text: &str) -> CString {
    c_string_of(text.as_bytes())
}

/// A C string that ends at the first zero.
fn c_string_of(bytes: &[u8]) -> CString {
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    CString::new(text).expect("no zero before the first zero")
}
