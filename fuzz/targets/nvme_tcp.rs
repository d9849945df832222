//! See `fuzz::nvme_tcp`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz::nvme_tcp::run(bytes));
