//! The sentence that belongs to the last error of each thread.

use std::cell::UnsafeCell;
use std::ffi::c_char;

/// Room for a sentence and its zero byte; what is longer is cut.
const ROOM: usize = 512;

thread_local! {
    // No destructor: the pointer that a program has is good until its thread is gone.
    static MESSAGE: UnsafeCell<[u8; ROOM]> = const { UnsafeCell::new([0; ROOM]) };
}

/// Remembers a sentence for the calling thread.
pub(super) fn set(message: &str) {
    let mut len = message.len().min(ROOM - 1);
    while !message.is_char_boundary(len) {
        len -= 1;
    }
    set_bytes(&message.as_bytes()[..len]);
}

fn set_bytes(message: &[u8]) {
    let len = message.len().min(ROOM - 1);
    MESSAGE.with(|place| {
        // SAFETY: only this thread uses it, and no reference to it exists.
        let place = unsafe { &mut *place.get() };
        place[..len].copy_from_slice(&message[..len]);
        place[len] = 0;
    });
}

/// `const char *blkio_get_error_msg(void)`: the sentence of the last error of the calling thread;
/// empty before the first. The pointer is always the same, what it points at changes with the
/// thread's next error.
#[unsafe(no_mangle)]
pub extern "C" fn blkio_get_error_msg() -> *const c_char {
    MESSAGE.with(|place| place.get().cast_const().cast())
}

/// [`blkio_get_error_msg`] under a name that libblkio 1.5 exports, too.
#[unsafe(no_mangle)]
pub extern "C" fn blkio_get_error_msg_() -> *const c_char {
    blkio_get_error_msg()
}

/// Sets the sentence of the calling thread:
/// `void blkio_set_error_msg_(const char *msg, size_t len)`, which libblkio 1.5 exports.
///
/// # Safety
/// `message` is null or `len` bytes long.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkio_set_error_msg_(message: *const c_char, len: usize) {
    if !message.is_null() {
        // SAFETY: by contract.
        set_bytes(unsafe { std::slice::from_raw_parts(message.cast(), len) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    fn message() -> String {
        // SAFETY: it always ends with a zero byte.
        unsafe { CStr::from_ptr(blkio_get_error_msg()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn each_thread_has_its_own_sentence_and_long_ones_are_cut_between_characters() {
        assert_eq!(message(), "");
        set("first");
        std::thread::spawn(|| assert_eq!(message(), "")).join().unwrap();
        assert_eq!(message(), "first");
        set(&"ä".repeat(ROOM));
        assert_eq!(message(), "ä".repeat((ROOM - 1) / 2));
    }
}
