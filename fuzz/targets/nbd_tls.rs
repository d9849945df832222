//! See `fuzz::nbd_tls`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz::nbd_tls::run(bytes));
