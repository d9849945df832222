//! `freestone image rebase` and `stream`.

use super::{
    Backing as Follow, Format, beside, check_may_open, failed, open_device, open_writable, read_header,
};
use crate::error::Error;
use block::Device;
use qcow2::DEFAULT_CACHE_BYTES;
use qcow2::offline::{backing, backing::Backing, rebase::rebase};
use std::path::PathBuf;
use std::sync::Arc;

/// The arguments of `freestone image rebase`.
#[derive(clap::Args, Debug)]
pub(super) struct RebaseArgs {
    /// The new backing file, a name relative to the folder of the image; none: the image gets all
    /// bytes of its disk
    #[arg(short, long, value_name = "NAME|none")]
    backing: String,
    /// Format of the new backing file
    #[arg(short = 'F', long, value_enum)]
    backing_format: Option<Format>,
    /// Only change the name in the image; the disk has other bytes if the content of the two
    /// backing files differs
    #[arg(short, long)]
    r#unsafe: bool,
    /// Open backing files that the images name
    #[arg(long, value_name = "none|auto", default_value = "none")]
    open_backing: Follow,
    /// Directory that these must be in [default: that of the image that names them]
    #[arg(long, value_name = "DIR")]
    image_dir: Option<PathBuf>,
    /// The image, which nothing else may have open
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

/// The arguments of `freestone image stream`.
#[derive(clap::Args, Debug)]
pub(super) struct StreamArgs {
    /// Open the backing files that the image names, which the command needs
    #[arg(long, value_name = "none|auto", default_value = "none")]
    backing: Follow,
    /// Directory that backing files must be in [default: that of the image]
    #[arg(long, value_name = "DIR")]
    image_dir: Option<PathBuf>,
    /// The image, which nothing else may have open
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

pub(super) fn stream(args: &StreamArgs) -> Result<(), Error> {
    let device = open_writable(&args.file)?;
    let header = read_header(&device)?;
    check_may_open(device.name(), &header, args.backing, "--backing")?;
    let image_dir = args.image_dir.as_deref();
    let backing = stack::kinds::qcow2::open_backing(&args.file, &header, image_dir, DEFAULT_CACHE_BYTES)?;
    if backing.is_none() {
        return Err(Error::Runtime(format!("{}: the image has no backing file", device.name())));
    }
    rebase(&device, backing, None).map_err(failed)
}

pub(super) fn run(args: &RebaseArgs) -> Result<(), Error> {
    let new = args.new_backing()?;
    if let Some((Backing { name, .. }, _)) = &new {
        args.check_other(name)?;
    }
    let device = open_writable(&args.file)?;
    if args.r#unsafe {
        let new = new.map(|(backing, _)| backing);
        return reactor::run(async move { backing::set(&device, new.as_ref()).await }).map_err(failed);
    }
    let header = read_header(&device)?;
    check_may_open(device.name(), &header, args.open_backing, "--open-backing")?;
    let image_dir = args.image_dir.as_deref();
    let old = stack::kinds::qcow2::open_backing(&args.file, &header, image_dir, DEFAULT_CACHE_BYTES)?;
    let open = |(backing, format): (Backing, _)| args.open(&backing, format).map(|disk| (backing, disk));
    rebase(&device, old, new.map(open).transpose()?).map_err(failed)
}

impl RebaseArgs {
    /// The new backing file as the image is to name it.
    fn new_backing(&self) -> Result<Option<(Backing, Format)>, Error> {
        // QEMU's name for none is empty.
        let name = Some(&self.backing).filter(|name| !["", "none"].contains(&name.as_str()));
        match (name, self.backing_format) {
            (Some(name), Some(format)) => {
                let backing = Backing { name: name.clone(), format: format.name().to_owned() };
                Ok(Some((backing, format)))
            }
            (Some(_), None) => {
                let text = "--backing-format is missing: a guest can make its raw disk look like an image";
                Err(Error::Usage(text.into()))
            }
            (None, Some(_)) => Err(Error::Usage("--backing-format: there is no backing file".into())),
            (None, None) => Ok(None),
        }
    }

    /// Refuses the image as its own backing file.
    fn check_other(&self, name: &str) -> Result<(), Error> {
        let [image, other] = [&self.file, &beside(&self.file, name)].map(|path| path.canonicalize().ok());
        match image.is_some() && image == other {
            true => {
                let image = self.file.display();
                Err(Error::Runtime(format!("{image}: --backing {name:?}: the file is its own backing file")))
            }
            false => Ok(()),
        }
    }

    /// The disk of the new backing file, which is only read.
    fn open(&self, Backing { name, .. }: &Backing, format: Format) -> Result<Arc<dyn Device>, Error> {
        if let Some(protocol) = stack::kinds::qcow2::protocol(name) {
            let text = format!("--backing {name:?}: names with the protocol {protocol:?} are not opened");
            return Err(Error::Runtime(text));
        }
        let path = beside(&self.file, name);
        if format == Format::Raw {
            return open_device(&path, false);
        }
        let header = read_header(&open_device(&path, false)?)?;
        check_may_open(&path.display().to_string(), &header, self.open_backing, "--open-backing")?;
        let options = stack::kinds::qcow2::Options {
            follow: true,
            image_dir: self.image_dir.clone(),
            read_only: true,
            ..stack::kinds::qcow2::Options::new(&path)
        };
        Ok(options.open_parts()?.device)
    }
}
