//! Checks drivers on real devices, whose data it destroys; `tests/lab` runs it in guests, and
//! `tests/rbd` on a cluster. `driver_check DRIVER` without more prints what the driver's checks
//! need.

mod direct;
mod driver;
mod fixed;
mod nvme;
mod rbd;
mod virtio_blk;
mod virtio_blk_uring;
mod zones;

use std::error::Error;
use std::process::ExitCode;

const DRIVERS: &str = "nvme, rbd, virtio-blk or virtio-blk-uring";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match run(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("driver_check: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(words: &[&str]) -> Result<(), Box<dyn Error>> {
    match words {
        ["nvme", words @ ..] => nvme::run(words),
        ["rbd", words @ ..] => rbd::run(words),
        ["virtio-blk", words @ ..] => virtio_blk::run(words),
        ["virtio-blk-uring", words @ ..] => virtio_blk_uring::run(words),
        [other, ..] => Err(format!("no driver {other}: want {DRIVERS}").into()),
        [] => Err(format!("usage: driver_check DRIVER …, with a driver {DRIVERS}").into()),
    }
}
