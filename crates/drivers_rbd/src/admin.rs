//! Administration of images: lists, creates and resizes them.

use super::cluster::{ClusterHandle, c_string};
use super::error::{OpenError, check};
use super::image::{ImageHandle, OpenPool};
use super::library::{Library, Pool};
use super::names::names;
use super::on_unbound_thread;
use super::options::{ClusterOptions, Options};
use block::{DeviceError, Limits};
use std::ffi::{c_char, c_int};
use std::sync::Arc;

/// A pool, and the images that a user may see in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundPool {
    /// The pool.
    pub name: String,
    /// Its images by namespace (empty for the default one), or the reason why they cannot be
    /// listed.
    pub images: Result<Vec<FoundImage>, String>,
}

/// An image of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundImage {
    /// The namespace; empty for the default one.
    pub namespace: String,
    /// The image.
    pub name: String,
}

/// Lists the pools of a cluster and their images.
///
/// # Errors
/// When Ceph's libraries are not installed, or the cluster cannot be used.
pub fn list(options: &ClusterOptions) -> Result<Vec<FoundPool>, DeviceError> {
    options.check().map_err(|reason| DeviceError::new(options.name(), reason))?;
    let options = options.clone();
    on_unbound_thread(options.name(), move || {
        let cluster = connect(&options)?;
        let found = |name: String| {
            let images = images(&cluster, &name).map_err(|error| error.to_string());
            FoundPool { name, images }
        };
        Ok(cluster.pools()?.into_iter().map(found).collect())
    })
}

/// Creates the image of the options with `size` bytes and the features that the cluster gives new
/// images.
///
/// # Errors
/// When the size is no multiple of a block, the image exists, or the cluster cannot be used.
pub fn create(options: &Options, size: u64) -> Result<(), DeviceError> {
    let refuse = |reason| Err(DeviceError::new(options.name(), reason));
    if let Err(reason) = options.check() {
        return refuse(reason);
    }
    let block = u64::from(Limits::new(0).block_size);
    if options.is_read_only() {
        return refuse("cannot create a read-only image or a snapshot".into());
    }
    if size == 0 || !size.is_multiple_of(block) {
        return refuse(format!(
            "cannot create the image with {size} bytes: not a positive multiple of {block}"
        ));
    }
    let options = options.clone();
    on_unbound_thread(options.name(), move || {
        let cluster = connect(&options.cluster())?;
        let pool = OpenPool::open(&cluster, &options.pool, &options.namespace)?;
        let (name, mut order) = (c_string(&options.image), 0);
        // SAFETY: an open pool and a C string; order 0 stands for the cluster's own.
        let result = unsafe { (cluster.library.rbd_create)(pool.raw, name.as_ptr(), size, &raw mut order) };
        check(result, || format!("create the image with {size} bytes"))?;
        tracing::info!(device = options.name(), size, "created");
        Ok(())
    })
}

/// Makes the image of the options larger, also while a client has its exclusive lock: that client
/// then does it.
///
/// # Errors
/// When the image is larger than `size`, or the cluster cannot be used.
pub fn grow(options: &Options, size: u64) -> Result<(), DeviceError> {
    // The owner of the lock, perhaps this process, resizes the image.
    let options = Options { exclusive: Some(false), force: false, lock_file: None, ..options.clone() };
    if let Err(reason) = options.check() {
        return Err(DeviceError::new(options.name(), reason));
    }
    on_unbound_thread(options.name(), move || {
        let cluster = connect(&options.cluster())?;
        let image = ImageHandle::open(&cluster, &options)?;
        let before = image.size()?;
        if size < before {
            let reason = format!("cannot resize the image to {size} bytes: it has {before}, and only grows");
            return Err(OpenError::Refused(reason));
        }
        image.resize(size)
    })
}

fn connect(options: &ClusterOptions) -> Result<Arc<ClusterHandle>, OpenError> {
    ClusterHandle::open(Library::get().map_err(OpenError::Refused)?, options, false)
}

/// The images of all namespaces of a pool.
fn images(cluster: &Arc<ClusterHandle>, pool: &str) -> Result<Vec<FoundImage>, OpenError> {
    let library = cluster.library;
    let open = |namespace: &str| OpenPool::open(cluster, pool, namespace);
    let mut found = Vec::new();
    let namespaces = names_of(&open("")?, "namespaces", library.rbd_namespace_list)?;
    for namespace in std::iter::once(String::new()).chain(namespaces) {
        let images = names_of(&open(&namespace)?, "images", library.rbd_list)?;
        found.extend(images.into_iter().map(|name| FoundImage { namespace: namespace.clone(), name }));
    }
    Ok(found)
}

fn names_of(
    pool: &OpenPool,
    kind: &str,
    list: unsafe extern "C" fn(Pool, *mut c_char, *mut usize) -> c_int,
) -> Result<Vec<String>, OpenError> {
    // SAFETY: an open pool, and room for `len` bytes.
    names(kind, |buffer, len| unsafe { list(pool.raw, buffer, len) })
}
