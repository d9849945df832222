//! See `fuzz::rest`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz::rest::run(bytes));
