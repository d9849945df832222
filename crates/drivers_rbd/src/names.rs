//! Lists of names, as librados and librbd return them.

use super::error::{OpenError, check};
use std::ffi::{c_char, c_int};

/// Most bytes of a list that the driver reads: a million images of a pool.
const MAX_BYTES: usize = 64 << 20;

/// Reads a list of names, each with a zero after it. `read` gets a buffer and its length. It
/// returns the bytes in use, or `-ERANGE` after it has stored the length that it needs.
pub(super) fn names(
    kind: &str,
    mut read: impl FnMut(*mut c_char, &mut usize) -> c_int,
) -> Result<Vec<String>, OpenError> {
    let mut buffer = vec![0u8; 4096];
    loop {
        let mut len = buffer.len();
        let result = read(buffer.as_mut_ptr().cast(), &mut len);
        if result == -libc::ERANGE && (buffer.len() + 1..=MAX_BYTES).contains(&len) {
            buffer.resize(len, 0);
            continue;
        }
        check(result, || format!("list the {kind}"))?;
        let used = usize::try_from(result).unwrap_or(0).min(buffer.len());
        let texts = buffer[..used].split(|byte| *byte == 0).filter(|text| !text.is_empty());
        return Ok(texts.map(|text| String::from_utf8_lossy(text).into_owned()).collect());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plays a list of `names` that is read into buffers of any length.
    fn play(text: &[u8]) -> impl FnMut(*mut c_char, &mut usize) -> c_int {
        move |buffer, len| {
            if std::mem::replace(len, text.len()) < text.len() {
                return -libc::ERANGE;
            }
            // SAFETY: the buffer has room for the text.
            unsafe { buffer.copy_from_nonoverlapping(text.as_ptr().cast(), text.len()) };
            text.len() as c_int
        }
    }

    #[test]
    fn lists_of_names_of_any_length_are_read() {
        assert_eq!(names("images", play(b"")).unwrap(), Vec::<String>::new());
        assert_eq!(names("images", play(b"a\0bc\0\0")).unwrap(), ["a", "bc"]);
        let long: String = (0..3000).map(|number| format!("image-{number}\0")).collect();
        let found = names("images", play(long.as_bytes())).unwrap();
        assert_eq!((found.len(), &*found[2999]), (3000, "image-2999"));
    }

    #[test]
    fn a_list_that_always_needs_more_room_is_refused() {
        let error = names("images", |_, len| {
            *len += 1 << 20;
            -libc::ERANGE
        });
        assert!(error.unwrap_err().to_string().starts_with("cannot list the images: "));
    }
}
