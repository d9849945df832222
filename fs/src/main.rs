//! The program.

#![forbid(unsafe_code)]

use clap::Parser;
use freestone_fs::args::Args;
use freestone_fs::serve;
use std::process::exit;

fn main() {
    let args = Args::parse();
    env_logger::Builder::new().filter_level(args.log_level).init();
    // The usual report has a backtrace, for which the filter of system calls kills the process.
    std::panic::set_hook(Box::new(|panic| log::error!("{panic}")));
    // The threads of the queues may wait for storage: nothing joins them.
    match serve::run(args) {
        Ok(()) => exit(0),
        Err(text) => {
            log::error!("{text}");
            exit(1)
        }
    }
}
