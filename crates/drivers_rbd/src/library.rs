//! The functions of librbd and librados, which are loaded at first use.
//!
//! A program does not need Ceph to be built or started: the libraries are opened when the first
//! image is. Source: `rados/librados.h` and `rbd/librbd.h` of Ceph 16; later versions kept these
//! functions.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

/// The library that is loaded; librados comes with it.
const LIBRBD: &CStr = c"librbd.so.1";

/// `rados_t`, a handle of a cluster.
pub(super) type Cluster = *mut c_void;
/// `rados_ioctx_t`, a handle of a pool.
pub(super) type Pool = *mut c_void;
/// `rbd_image_t`, an open image.
pub(super) type Image = *mut c_void;
/// `rbd_completion_t`, an operation in flight.
pub(super) type Completion = *mut c_void;
/// `rbd_callback_t`: the operation has ended. Called on a thread of librbd.
pub(super) type Callback = unsafe extern "C" fn(Completion, *mut c_void);
/// `rbd_update_callback_t`: an image has changed. Called on a thread of librbd.
pub(super) type UpdateCallback = unsafe extern "C" fn(*mut c_void);
/// `librbd_progress_fn_t`: called while an image is resized; anything but 0 ends that.
pub(super) type Progress = unsafe extern "C" fn(u64, u64, *mut c_void) -> c_int;
/// `struct iovec`, whose layout [`block::Segment`] has.
pub(super) type Segments = *const block::Segment;

/// `rbd_image_info_t`.
#[repr(C)]
pub(super) struct ImageInfo {
    pub size: u64,
    pub object_size: u64,
    pub object_count: u64,
    pub order: c_int,
    pub block_name_prefix: [c_char; 24],
    pub parent_pool: i64,
    pub parent_name: [c_char; 96],
}

/// `rbd_config_option_t`: an option of an image, as the cluster, the pool or the image sets it.
#[repr(C)]
pub(super) struct ConfigOption {
    pub name: *mut c_char,
    pub value: *mut c_char,
    pub source: c_int,
}

/// `rbd_image_watcher_t`: a client that has the image open for writing.
#[repr(C)]
pub(super) struct ImageWatcher {
    pub address: *mut c_char,
    pub id: i64,
    pub cookie: u64,
}

/// `RBD_FEATURE_EXCLUSIVE_LOCK`.
pub(super) const FEATURE_EXCLUSIVE_LOCK: u64 = 1 << 2;
/// `RBD_LOCK_MODE_EXCLUSIVE`.
pub(super) const LOCK_MODE_EXCLUSIVE: c_int = 0;
/// `RBD_WRITE_ZEROES_FLAG_THICK_PROVISION`.
pub(super) const WRITE_ZEROES_THICK: c_int = 1;

macro_rules! library {
    ($($name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// Every function that the driver uses, by its C name.
        pub(super) struct Library {
            $(pub $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Library {
            /// Takes every function from `find`.
            ///
            /// # Safety
            /// `find` returns functions of librados and librbd.
            unsafe fn resolve(
                find: impl Fn(&CStr) -> Result<*mut c_void, String>,
            ) -> Result<Library, String> {
                Ok(Library {
                    $($name: {
                        let name = concat!(stringify!($name), "\0").as_bytes();
                        let function = find(CStr::from_bytes_with_nul(name).expect("one zero at the end"))?;
                        // SAFETY: by the contract, the function has the type of its header.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($argument),*) $(-> $result)?,
                            >(function)
                        }
                    },)*
                })
            }
        }
    };
}

library! {
    rados_create2(*mut Cluster, *const c_char, *const c_char, u64) -> c_int;
    rados_conf_read_file(Cluster, *const c_char) -> c_int;
    rados_conf_set(Cluster, *const c_char, *const c_char) -> c_int;
    rados_connect(Cluster) -> c_int;
    rados_shutdown(Cluster);
    rados_pool_list(Cluster, *mut c_char, usize) -> c_int;
    rados_ioctx_create(Cluster, *const c_char, *mut Pool) -> c_int;
    rados_ioctx_set_namespace(Pool, *const c_char);
    rados_ioctx_destroy(Pool);

    rbd_namespace_list(Pool, *mut c_char, *mut usize) -> c_int;
    rbd_list(Pool, *mut c_char, *mut usize) -> c_int;
    rbd_create(Pool, *const c_char, u64, *mut c_int) -> c_int;
    rbd_open(Pool, *const c_char, *mut Image, *const c_char) -> c_int;
    rbd_open_read_only(Pool, *const c_char, *mut Image, *const c_char) -> c_int;
    rbd_close(Image) -> c_int;
    rbd_stat(Image, *mut ImageInfo, usize) -> c_int;
    rbd_get_size(Image, *mut u64) -> c_int;
    rbd_resize2(Image, u64, bool, Progress, *mut c_void) -> c_int;
    rbd_get_features(Image, *mut u64) -> c_int;
    rbd_config_image_list(Image, *mut ConfigOption, *mut c_int) -> c_int;
    rbd_config_image_list_cleanup(*mut ConfigOption, c_int);

    rbd_update_watch(Image, *mut u64, UpdateCallback, *mut c_void) -> c_int;
    rbd_update_unwatch(Image, u64) -> c_int;

    rbd_watchers_list(Image, *mut ImageWatcher, *mut usize) -> c_int;
    rbd_watchers_list_cleanup(*mut ImageWatcher, usize);

    rbd_lock_acquire(Image, c_int) -> c_int;
    rbd_lock_get_owners(Image, *mut c_int, *mut *mut c_char, *mut usize) -> c_int;
    rbd_lock_get_owners_cleanup(*mut *mut c_char, usize);
    rbd_lock_break(Image, c_int, *const c_char) -> c_int;

    rbd_aio_create_completion(*mut c_void, Callback, *mut Completion) -> c_int;
    rbd_aio_get_return_value(Completion) -> isize;
    rbd_aio_release(Completion);
    rbd_aio_readv(Image, Segments, c_int, u64, Completion) -> c_int;
    rbd_aio_writev(Image, Segments, c_int, u64, Completion) -> c_int;
    rbd_aio_discard(Image, u64, u64, Completion) -> c_int;
    rbd_aio_write_zeroes(Image, u64, usize, Completion, c_int, c_int) -> c_int;
    rbd_aio_flush(Image, Completion) -> c_int;
}

impl Library {
    /// The libraries of this machine. They are loaded at the first call, and remain loaded.
    ///
    /// # Errors
    /// A sentence that names the package which is missing or too old.
    pub(super) fn get() -> Result<&'static Library, String> {
        static LIBRARY: OnceLock<Library> = OnceLock::new();
        if let Some(library) = LIBRARY.get() {
            return Ok(library);
        }
        let library = load(LIBRBD)?;
        Ok(LIBRARY.get_or_init(|| library))
    }
}

fn load(name: &CStr) -> Result<Library, String> {
    // SAFETY: the name is a C string. The libraries' constructors need nothing of this program.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        return Err(not_loaded(&name.to_string_lossy(), &last_error()));
    }
    let find = |symbol: &CStr| {
        // SAFETY: the handle is never closed, and the symbol is a C string. The search includes
        // the libraries that librbd needs, and so librados.
        let found = unsafe { libc::dlsym(handle, symbol.as_ptr()) };
        if found.is_null() {
            let symbol = symbol.to_string_lossy();
            return Err(format!(
                "{} has no {symbol}: version 16 of Ceph or a later one is needed",
                name.to_string_lossy()
            ));
        }
        Ok(found)
    };
    // SAFETY: the functions come from librbd and librados.
    unsafe { Library::resolve(find) }
}

/// The reason why a library could not be loaded. `error` is the loader's message, which begins with
/// the name of the missing file.
fn not_loaded(name: &str, error: &str) -> String {
    if error.starts_with(&format!("{name}: cannot open shared object file: No such file")) {
        return format!("{name} is not installed (package librbd1)");
    }
    format!("cannot load {name}: {error}")
}

fn last_error() -> String {
    // SAFETY: the message is a C string of this thread, valid until the next call of the loader.
    unsafe {
        let message = libc::dlerror();
        if message.is_null() { String::new() } else { CStr::from_ptr(message).to_string_lossy().into_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_the_library_gets_the_name_of_its_package() {
        let missing = c"librbd-of-no-machine.so.1";
        let error = load(missing).err().expect("no such library");
        assert_eq!(error, "librbd-of-no-machine.so.1 is not installed (package librbd1)");
    }

    #[test]
    fn a_library_whose_own_library_is_missing_is_reported_as_the_loader_does() {
        let error = "librados.so.2: cannot open shared object file: No such file or directory";
        assert_eq!(not_loaded("librbd.so.1", error), format!("cannot load librbd.so.1: {error}"));
    }

    #[test]
    fn a_library_that_lacks_a_function_is_refused_by_the_functions_name() {
        let error = load(c"libc.so.6").err().expect("not librbd");
        assert!(error.starts_with("libc.so.6 has no rados_create2: version 16"), "{error}");
    }
}
