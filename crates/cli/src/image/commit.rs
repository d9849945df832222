//! `freestone image commit`.

use super::{Backing, check_may_open, failed, open_writable, read_header};
use crate::error::Error;
use std::path::PathBuf;

/// The arguments of `freestone image commit`.
#[derive(clap::Args, Debug)]
pub(super) struct CommitArgs {
    /// Keep the content of the image
    #[arg(short = 'd', long)]
    keep: bool,
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
    let header = read_header(&device)?;
    check_may_open(device.name(), &header, args.backing, "--backing")?;
    let target = stack::kinds::qcow2::open_target(&args.file, &header, args.image_dir.as_deref())?;
    let none = || Error::Runtime(format!("{}: the image has no backing file", device.name()));
    qcow2::offline::commit::commit(&device, target.ok_or_else(none)?, args.keep).map_err(failed)?;
    println!("Image committed.");
    Ok(())
}
