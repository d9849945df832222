//! `freestone image commit`.

use super::{Backing, Format, check_may_open, failed, open_writable, read_header};
use crate::error::Error;
use crate::parse::value;
use base::Size;
use qcow2::offline::commit::{Options, commit};
use stack::kinds::qcow2::{CommitFiles, open_for_commit};
use std::cell::Cell;
use std::io::Write;
use std::path::PathBuf;

/// The arguments of `freestone image commit`.
#[derive(clap::Args, Debug)]
pub(super) struct CommitArgs {
    /// Write to this backing file, named relative to the folder of the image over it [default: the
    /// nearest one]; implies --keep, and images between are no longer valid
    #[arg(short, long, value_name = "NAME")]
    base: Option<PathBuf>,
    /// Keep the content of the image
    #[arg(short = 'd', long)]
    keep: bool,
    /// Format of the image
    #[arg(short, long, value_enum, default_value_t = Format::Qcow2)]
    format: Format,
    /// Most bytes to copy in a second
    #[arg(short, long, value_name = "SIZE", value_parser = value::<Size>)]
    rate_limit: Option<Size>,
    /// Print the progress
    #[arg(short, long)]
    progress: bool,
    /// Print nothing
    #[arg(short, long)]
    quiet: bool,
    /// Open the backing files that the image names, which the command needs
    #[arg(long, value_name = "none|auto", default_value = "none")]
    backing: Backing,
    /// Directory that backing files must be in [default: that of the image]
    #[arg(long, value_name = "DIR")]
    image_dir: Option<PathBuf>,
    /// The image, which nothing else may have open
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

pub(super) fn run(args: &CommitArgs) -> Result<(), Error> {
    let device = open_writable(&args.file)?;
    let no_backing = || Error::Runtime(format!("{}: the image has no backing file", device.name()));
    if args.format == Format::Raw {
        return Err(no_backing());
    }
    let header = read_header(&device)?;
    check_may_open(device.name(), &header, args.backing, "--backing")?;
    let base = args.base.as_deref();
    let files = open_for_commit(&args.file, &header, args.image_dir.as_deref(), base)?;
    let CommitFiles { between, target } = files.ok_or_else(|| match base {
        Some(base) if header.backing_file.is_some() => {
            let image = device.name();
            Error::Runtime(format!("{image}: --base {base:?}: no backing file of the image has this name"))
        }
        _ => no_backing(),
    })?;
    let options = Options {
        between,
        // As with QEMU, also when the name is that of the nearest one.
        is_kept: args.keep || base.is_some(),
        bytes_per_second: args.rate_limit.map_or(0, |Size(bytes)| bytes),
        progress: (args.progress && !args.quiet).then(progress),
    };
    commit(&device, target, options).map_err(failed)?;
    if args.progress && !args.quiet {
        println!();
    }
    if !args.quiet {
        println!("Image committed.");
    }
    Ok(())
}

/// Prints the progress, as `qemu-img` does, when it has changed by one hundredth.
fn progress() -> Box<dyn Fn(u64, u64)> {
    let printed = Cell::new(None);
    Box::new(move |done, all| {
        let percent = if done == all { 100.0 } else { done as f64 * 100.0 / all as f64 };
        if printed.get().is_none_or(|before| percent >= before + 1.0 || done == all) {
            printed.set(Some(percent));
            // The command does not depend on its output.
            let mut out = std::io::stdout();
            let _ = write!(out, "    ({percent:.2}/100%)\r").and_then(|()| out.flush());
        }
    })
}
