//! Simulated disks, power and time, and the oracle that knows what must be on them.
#![forbid(unsafe_code)]
