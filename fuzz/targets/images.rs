//! See `fuzz::images`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz::images::run(bytes));
