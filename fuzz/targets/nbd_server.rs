//! See `fuzz::nbd_server`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz::nbd_server::run(bytes));
