//! `freestone image resize`.

use super::{Backing, Format, check_may_open, failed, open_writable, read_header};
use crate::error::Error;
use base::Size;
use block::Device;
use qcow2::DEFAULT_CACHE_BYTES;
use std::path::PathBuf;
use std::sync::Arc;

/// The arguments of `freestone image resize`.
#[derive(clap::Args, Debug)]
pub(super) struct ResizeArgs {
    /// Format of the image
    #[arg(short, long, value_enum, default_value_t = Format::Qcow2)]
    format: Format,
    /// Let the disk shrink: the data behind its new end is lost
    #[arg(long)]
    shrink: bool,
    /// Open backing files that the image names, which it needs to grow
    #[arg(long, value_name = "none|auto", default_value = "none")]
    backing: Backing,
    /// Directory that backing files must be in [default: that of the image]
    #[arg(long, value_name = "DIR")]
    image_dir: Option<PathBuf>,
    /// The image, which nothing else may have open
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Size of the disk, e.g. 10G, or by how much it changes: +10G or -10G
    #[arg(value_name = "[+|-]SIZE", value_parser = NewSize::parse, allow_hyphen_values = true)]
    size: NewSize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NewSize {
    To(u64),
    By(i64),
}

impl NewSize {
    fn parse(text: &str) -> Result<NewSize, String> {
        let (sign, number) = match text.split_at_checked(1) {
            Some(("+", number)) => (1, number),
            Some(("-", number)) => (-1, number),
            _ => (0, text),
        };
        let bytes = Size::parse(number).ok_or("want a number with K, M, G or T")?.0;
        match (sign, i64::try_from(bytes)) {
            (_, Err(_)) => Err("want at most 8 EiB".into()),
            (0, _) => Ok(NewSize::To(bytes)),
            (sign, Ok(bytes)) => Ok(NewSize::By(sign * bytes)),
        }
    }

    /// The size of a disk that has `old` bytes.
    fn of(self, old: u64) -> Result<u64, Error> {
        let (new, why) = match self {
            NewSize::To(size) => (Some(size), format!("SIZE: a disk of {size} bytes is impossible")),
            NewSize::By(change) => (
                old.checked_add_signed(change),
                format!("SIZE: a disk of {old} bytes cannot change by {change} bytes"),
            ),
        };
        new.filter(|new| *new > 0).ok_or(Error::Usage(why))
    }
}

pub(super) fn run(args: &ResizeArgs) -> Result<(), Error> {
    let device = open_writable(&args.file)?;
    match args.format {
        Format::Raw => args.resize_raw(&device)?,
        Format::Qcow2 => args.resize_qcow2(&device)?,
    }
    println!("Image resized.");
    Ok(())
}

impl ResizeArgs {
    fn resize_raw(&self, device: &Arc<dyn Device>) -> Result<(), Error> {
        let old = device.limits().capacity;
        let size = self.size.of(old)?;
        if size < old && !self.shrink {
            let text = format!("{}: size {size}: less than {old} (--shrink allows that)", device.name());
            return Err(Error::Runtime(text));
        }
        device.resize(size)?;
        Ok(())
    }

    fn resize_qcow2(&self, device: &Arc<dyn Device>) -> Result<(), Error> {
        let header = read_header(device)?;
        let size = self.size.of(header.size)?;
        let backing = match size > header.size {
            true => {
                check_may_open(device.name(), &header, self.backing, "--backing")?;
                let image_dir = self.image_dir.as_deref();
                stack::kinds::qcow2::open_backing(&self.file, &header, image_dir, DEFAULT_CACHE_BYTES)?
            }
            false => None,
        };
        qcow2::offline::resize::resize(device, backing, size, self.shrink).map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_absolute_or_a_change() {
        assert_eq!(NewSize::parse("10G"), Ok(NewSize::To(10 << 30)));
        assert_eq!(NewSize::parse("+1K"), Ok(NewSize::By(1024)));
        assert_eq!(NewSize::parse("-512"), Ok(NewSize::By(-512)));
        for text in ["", "+", "G", "+-1", "é", "9E30"] {
            assert!(NewSize::parse(text).is_err(), "{text}");
        }
        assert_eq!(NewSize::By(-512).of(1024).ok(), Some(512));
        for (size, old) in
            [(NewSize::By(-512), 512), (NewSize::To(0), 512), (NewSize::By(i64::MAX), u64::MAX)]
        {
            assert!(size.of(old).is_err(), "{size:?}");
        }
    }
}
