//! See `fuzz::members`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz::members::run(bytes));
