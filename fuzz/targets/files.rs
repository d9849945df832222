//! See `fuzz::files`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz::files::run(bytes));
