//! Waiting for a file or device whose owner is about to end: the kernel may hold files of a killed
//! process until its last request has ended.

use std::time::{Duration, Instant};

/// How long what is in use is waited for.
const TIMEOUT: Duration = Duration::from_secs(2);
/// How long it takes between two looks.
const PAUSE: Duration = Duration::from_millis(50);

/// Tries again for a moment while something `is_in_use`.
///
/// # Errors
/// Those of the last try.
pub fn retry_while<T, E>(
    is_in_use: impl Fn(&E) -> bool,
    mut attempt: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match attempt() {
            Err(error) if is_in_use(&error) && Instant::now() < deadline => std::thread::sleep(PAUSE),
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_busy_device_is_retried() {
        let tries = |errors: &[&'static str]| {
            let mut left = errors.iter();
            let result =
                retry_while(|error| *error == "in use", || left.next().map_or(Ok(()), |error| Err(*error)));
            (result, left.count())
        };
        assert_eq!(tries(&["in use", "in use"]), (Ok(()), 0));
        assert_eq!(tries(&["in use", "broken", "in use"]), (Err("broken"), 1));
    }
}
