//! See `fuzz::nvme_tcp_target`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz::nvme_tcp_target::run(bytes));
