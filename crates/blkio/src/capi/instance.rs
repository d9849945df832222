//! Instances: `struct blkio *`.

use super::{Blkio, control, report, returned, text, with};
use crate::{Error, Instance, IoQueue, Kind, Region, Result, Value};
use std::ffi::{CString, c_char, c_int};
use std::sync::{Arc, Mutex};

/// `int blkio_create(const char *driver, struct blkio **bp)`
///
/// # Safety
/// `driver` is a C string, `bp` has room for a pointer; either may be null, which is `EINVAL`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkio_create(driver: *const c_char, bp: *mut *mut Blkio) -> c_int {
    if bp.is_null() {
        return report(Error::new(libc::EINVAL, "blkio_create(): bp is a null pointer"));
    }
    // SAFETY: by contract.
    let created = unsafe { text(driver, "the driver name") }.and_then(Instance::create);
    let (pointer, result) = match created {
        Ok(instance) => {
            let instance = Arc::new(Mutex::new(instance));
            (Box::into_raw(Box::new(Blkio { instance, control: control::Control::default() })), 0)
        }
        Err(error) => (std::ptr::null_mut(), report(error)),
    };
    // SAFETY: by contract.
    unsafe { bp.write(pointer) };
    result
}

/// `void blkio_destroy(struct blkio **bp)`: waits for requests in flight, frees everything and sets
/// `*bp` to null.
///
/// # Safety
/// `*bp` is null or came from `blkio_create()`; no other thread uses it or its queues.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkio_destroy(bp: *mut *mut Blkio) {
    // SAFETY: by contract.
    let Some(place) = (unsafe { bp.as_mut() }) else { return };
    let blkio = std::mem::replace(place, std::ptr::null_mut());
    if !blkio.is_null() {
        // SAFETY: it was made by `Box::into_raw` and is given up here.
        let blkio = unsafe { Box::from_raw(blkio) };
        // An operation that still runs keeps the instance until it ends, and then throws it away.
        blkio.control.cancel();
    }
}

/// `int blkio_connect(struct blkio *b)`
///
/// # Safety
/// `b` came from `blkio_create()`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkio_connect(b: *mut Blkio) -> c_int {
    // SAFETY: by contract.
    returned(unsafe { with(b, Instance::connect) })
}

/// `int blkio_start(struct blkio *b)`
///
/// # Safety
/// `b` came from `blkio_create()`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkio_start(b: *mut Blkio) -> c_int {
    // SAFETY: by contract.
    returned(unsafe { with(b, Instance::start) })
}

/// # Safety
/// `b` came from `blkio_create()`, `name` is a C string, `value` has room for a `T`.
unsafe fn get<T>(
    b: *mut Blkio,
    name: *const c_char,
    value: *mut T,
    read: impl FnOnce(&Instance, &str) -> Result<T>,
) -> c_int {
    // SAFETY: by contract.
    let result = unsafe {
        with(b, |instance| {
            let name = text(name, "the property name")?;
            if value.is_null() {
                return Err(Error::new(libc::EINVAL, format!("property {name}: value is a null pointer")));
            }
            read(instance, name)
        })
    };
    match result {
        Ok(read) => {
            // SAFETY: by contract.
            unsafe { value.write(read) };
            0
        }
        Err(errno) => errno,
    }
}

/// `int blkio_get_bool(struct blkio *b, const char *name, bool *value)`
///
/// # Safety
/// `b` came from `blkio_create()`, `name` is a C string, `value` has room for a `bool`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkio_get_bool(b: *mut Blkio, name: *const c_char, value: *mut bool) -> c_int {
    let read = |instance: &Instance, name: &str| Ok(instance.get_as(name, Kind::Bool)? == Value::Bool(true));
    // SAFETY: by contract.
    unsafe { get(b, name, value, read) }
}

/// `int blkio_get_int(struct blkio *b, const char *name, int *value)`
///
/// # Safety
/// `b` came from `blkio_create()`, `name` is a C string, `value` has room for an `int`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkio_get_int(b: *mut Blkio, name: *const c_char, value: *mut c_int) -> c_int {
    let read = |instance: &Instance, name: &str| match instance.get_as(name, Kind::Int)? {
        Value::Int(value) => Ok(value),
        other => unreachable!("{name} is {other:?}"),
    };
    // SAFETY: by contract.
    unsafe { get(b, name, value, read) }
}

/// `int blkio_get_uint64(struct blkio *b, const char *name, uint64_t *value)`
///
/// # Safety
/// `b` came from `blkio_create()`, `name` is a C string, `value` has room for an `uint64_t`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkio_get_uint64(b: *mut Blkio, name: *const c_char, value: *mut u64) -> c_int {
    let read = |instance: &Instance, name: &str| match instance.get_as(name, Kind::Uint64)? {
        Value::Uint64(value) => Ok(value),
        other => unreachable!("{name} is {other:?}"),
    };
    // SAFETY: by contract.
    unsafe { get(b, name, value, read) }
}

/// `int blkio_get_str(struct blkio *b, const char *name, char **value)`: any property as text,
/// which the caller frees with `free(3)`.
///
/// # Safety
/// `b` came from `blkio_create()`, `name` is a C string, `value` has room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkio_get_str(b: *mut Blkio, name: *const c_char, value: *mut *mut c_char) -> c_int {
    let read = |instance: &Instance, name: &str| {
        let text = CString::new(instance.get(name)?.to_string()).unwrap_or_default();
        // SAFETY: it is a C string.
        let copy = unsafe { libc::strdup(text.as_ptr()) };
        if copy.is_null() {
            return Err(Error::new(libc::ENOMEM, format!("no memory for the value of property {name}")));
        }
        Ok(copy)
    };
    // SAFETY: by contract.
    unsafe { get(b, name, value, read) }
}

/// # Safety
/// `b` came from `blkio_create()`, `name` is a C string.
unsafe fn set(b: *mut Blkio, name: *const c_char, value: Value) -> c_int {
    // SAFETY: by contract.
    returned(unsafe { with(b, |instance| instance.set(text(name, "the property name")?, value)) })
}

/// `int blkio_set_bool(struct blkio *b, const char *name, bool value)`
///
/// # Safety
/// `b` came from `blkio_create()`, `name` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkio_set_bool(b: *mut Blkio, name: *const c_char, value: bool) -> c_int {
    // SAFETY: by contract.
    unsafe { set(b, name, value.into()) }
}

/// `int blkio_set_int(struct blkio *b, const char *name, int value)`
///
/// # Safety
/// `b` came from `blkio_create()`, `name` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkio_set_int(b: *mut Blkio, name: *const c_char, value: c_int) -> c_int {
    // SAFETY: by contract.
    unsafe { set(b, name, value.into()) }
}

/// `int blkio_set_uint64(struct blkio *b, const char *name, uint64_t value)`
///
/// # Safety
/// `b` came from `blkio_create()`, `name` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkio_set_uint64(b: *mut Blkio, name: *const c_char, value: u64) -> c_int {
    // SAFETY: by contract.
    unsafe { set(b, name, value.into()) }
}

/// `int blkio_set_str(struct blkio *b, const char *name, const char *value)`: any property from
/// text.
///
/// # Safety
/// `b` came from `blkio_create()`, `name` and `value` are C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkio_set_str(b: *mut Blkio, name: *const c_char, value: *const c_char) -> c_int {
    // SAFETY: by contract.
    match unsafe { text(value, "the property value") } {
        // SAFETY: by contract.
        Ok(value) => unsafe { set(b, name, value.into()) },
        Err(error) => report(error),
    }
}

/// # Safety
/// `region` is null or can be read.
unsafe fn region<'a>(region: *const Region) -> Result<&'a Region> {
    // SAFETY: by contract.
    unsafe { region.as_ref() }.ok_or_else(|| Error::new(libc::EINVAL, "the memory region is a null pointer"))
}

/// `int blkio_alloc_mem_region(struct blkio *b, struct blkio_mem_region *region, size_t len)`
///
/// # Safety
/// `b` came from `blkio_create()`, `place` has room for a region.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkio_alloc_mem_region(b: *mut Blkio, place: *mut Region, len: usize) -> c_int {
    if place.is_null() {
        return report(Error::new(libc::EINVAL, "the memory region is a null pointer"));
    }
    // SAFETY: by contract.
    match unsafe { with(b, |instance| instance.alloc_region(len)) } {
        Ok(region) => {
            // SAFETY: by contract.
            unsafe { place.write(region) };
            0
        }
        Err(errno) => errno,
    }
}

/// `void blkio_free_mem_region(struct blkio *b, const struct blkio_mem_region *region)`
///
/// # Safety
/// `b` came from `blkio_create()`; no request uses the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkio_free_mem_region(b: *mut Blkio, freed: *const Region) {
    // SAFETY: by contract.
    let _ = unsafe { with(b, |instance| instance.free_region(region(freed)?)) };
}

/// `int blkio_map_mem_region(struct blkio *b, const struct blkio_mem_region *region)`
///
/// # Safety
/// `b` came from `blkio_create()`; the region is memory that stays mapped in this process until it
/// is unmapped here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkio_map_mem_region(b: *mut Blkio, mapped: *const Region) -> c_int {
    // SAFETY: by contract.
    returned(unsafe { with(b, |instance| instance.map_region(region(mapped)?)) })
}

/// `void blkio_unmap_mem_region(struct blkio *b, const struct blkio_mem_region *region)`
///
/// # Safety
/// `b` came from `blkio_create()`; no request uses the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkio_unmap_mem_region(b: *mut Blkio, unmapped: *const Region) {
    let unmap = |instance: &mut Instance| {
        // SAFETY: by contract.
        instance.unmap_region(unsafe { region(unmapped) }?);
        Ok(())
    };
    // SAFETY: by contract.
    let _ = unsafe { with(b, unmap) };
}

/// # Safety
/// `b` came from `blkio_create()`.
unsafe fn queue(b: *mut Blkio, index: c_int, is_poll: bool) -> *mut IoQueue {
    // SAFETY: by contract.
    let found = unsafe { with(b, |instance| instance.queue(index, is_poll).map(|queue| &raw mut *queue)) };
    found.unwrap_or(std::ptr::null_mut())
}

/// `struct blkioq *blkio_get_queue(struct blkio *b, int index)`: null when there is none.
///
/// # Safety
/// `b` came from `blkio_create()`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkio_get_queue(b: *mut Blkio, index: c_int) -> *mut IoQueue {
    // SAFETY: by contract.
    unsafe { queue(b, index, false) }
}

/// `struct blkioq *blkio_get_poll_queue(struct blkio *b, int index)`: null when there is none.
///
/// # Safety
/// `b` came from `blkio_create()`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkio_get_poll_queue(b: *mut Blkio, index: c_int) -> *mut IoQueue {
    // SAFETY: by contract.
    unsafe { queue(b, index, true) }
}

/// `int blkio_add_queue(struct blkio *b)`: the new queue's index.
///
/// # Safety
/// `b` came from `blkio_create()`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkio_add_queue(b: *mut Blkio) -> c_int {
    // SAFETY: by contract.
    unsafe { with(b, |instance| instance.add_queue(false)) }.unwrap_or_else(|errno| errno)
}

/// `int blkio_add_poll_queue(struct blkio *b)`: the new poll queue's index.
///
/// # Safety
/// `b` came from `blkio_create()`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkio_add_poll_queue(b: *mut Blkio) -> c_int {
    // SAFETY: by contract.
    unsafe { with(b, |instance| instance.add_queue(true)) }.unwrap_or_else(|errno| errno)
}

/// `int blkio_remove_queue(struct blkio *b, int index)`
///
/// # Safety
/// `b` came from `blkio_create()`; no thread uses the queue.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkio_remove_queue(b: *mut Blkio, index: c_int) -> c_int {
    // SAFETY: by contract.
    returned(unsafe { with(b, |instance| instance.remove_queue(index, false)) })
}

/// `int blkio_remove_poll_queue(struct blkio *b, int index)`
///
/// # Safety
/// `b` came from `blkio_create()`; no thread uses the queue.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkio_remove_poll_queue(b: *mut Blkio, index: c_int) -> c_int {
    // SAFETY: by contract.
    returned(unsafe { with(b, |instance| instance.remove_queue(index, true)) })
}
