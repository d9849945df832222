//! `freestone image create`, and the options of new images.

use super::{Format, beside, read_header};
use crate::error::Error;
use base::Size;
use drivers::io_uring::ImageFile;
use qcow2::header::Compression;
use qcow2::write::{Options, Output, Writer};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The arguments of `freestone image create`.
#[derive(clap::Args, Debug)]
pub(super) struct CreateArgs {
    /// Format of the image
    #[arg(short, long, value_enum, default_value_t = Format::Raw)]
    format: Format,
    #[command(flatten)]
    new: NewArgs,
    /// Backing file of the image, a name relative to the folder of the image
    #[arg(short, long, value_name = "NAME", requires = "backing_format")]
    backing: Option<String>,
    /// Format of the backing file
    #[arg(short = 'F', long, value_enum, requires = "backing")]
    backing_format: Option<Format>,
    /// The file to create
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Size of the disk, e.g. 10G [default: that of the backing file]
    #[arg(value_name = "SIZE", value_parser = size, required_unless_present = "backing")]
    size: Option<u64>,
}

/// How a new image is made.
#[derive(clap::Args, Debug)]
pub(super) struct NewArgs {
    /// Options of a qcow2 image: compat=0.10|1.1, cluster_size=SIZE, compression_type=zlib|zstd,
    /// extended_l2=on|off, lazy_refcounts=on|off, refcount_bits=N, preallocation=off|metadata
    #[arg(short, long, value_name = "KEY=VALUE,…", value_delimiter = ',')]
    options: Vec<String>,
    /// Replace the file if it exists
    #[arg(long)]
    pub(super) force: bool,
}

fn size(text: &str) -> Result<u64, String> {
    let size = Size::parse(text).ok_or("want a number with K, M, G or T")?.0;
    // The last sector is whole, as with QEMU.
    size.checked_next_multiple_of(512)
        .filter(|size| *size > 0)
        .ok_or_else(|| "want 512 bytes to 16 EiB".into())
}

pub(super) fn run(args: &CreateArgs) -> Result<(), Error> {
    let (options, is_preallocated) = args.new.parse(args.format, args.size.unwrap_or(0))?;
    let backing = args.backing.as_ref().zip(args.backing_format);
    if args.format == Format::Raw && backing.is_some() {
        return Err(Error::Usage("--backing: a raw image has no backing file".into()));
    }
    let backing = backing.map(|(name, format)| (name.clone(), format.name().to_owned()));
    let size = match (args.size, &args.backing, args.backing_format) {
        (Some(size), ..) => size,
        (None, Some(name), Some(format)) => size_of(&beside(&args.file, name), format)?,
        _ => return Err(Error::Usage("SIZE is missing".into())),
    };
    let options = Options { size, backing, ..options };
    let file = NewFile::create(&args.file, args.new.force)?;
    match args.format {
        Format::Raw => file.finish(|file| file.set_len(size)),
        Format::Qcow2 => {
            let output = file.output()?;
            let mut writer = Writer::new(options, output).map_err(|error| file.failed(&error))?;
            file.finish(move |file| {
                let cluster_size = writer.cluster_size();
                let clusters = if is_preallocated { size.div_ceil(cluster_size) } else { 0 };
                for cluster in 0..clusters {
                    writer.reserve(cluster * cluster_size)?;
                }
                file.set_len(writer.finish()?.1)
            })
        }
    }
}

/// Size of the disk of an image.
fn size_of(path: &Path, format: Format) -> Result<u64, Error> {
    let device = super::open_device(path, false)?;
    match format {
        Format::Raw => Ok(device.limits().capacity),
        Format::Qcow2 => Ok(read_header(&device)?.size),
    }
}

impl NewArgs {
    /// The options for a disk of `size` bytes, and whether its clusters get places at once.
    pub(super) fn parse(&self, format: Format, size: u64) -> Result<(Options, bool), Error> {
        let (mut options, mut is_preallocated) = (Options::new(size), false);
        for option in &self.options {
            let wrong = |want: &str| Error::Usage(format!("--options: {option}: {want}"));
            let (key, value) = option.split_once('=').ok_or_else(|| wrong("want KEY=VALUE"))?;
            let switch = || match value {
                "on" => Ok(true),
                "off" => Ok(false),
                _ => Err(wrong("want on or off")),
            };
            if format == Format::Raw {
                return Err(Error::Usage(format!("--options: {option}: a raw image has no options")));
            }
            match key {
                "compat" => {
                    options.version = match value {
                        "0.10" | "v2" => 2,
                        "1.1" | "v3" => 3,
                        _ => return Err(wrong("want 0.10 or 1.1")),
                    }
                }
                "cluster_size" => {
                    let size = Size::parse(value).filter(|size| size.0.is_power_of_two());
                    options.cluster_bits = size.ok_or_else(|| wrong("want a power of two"))?.0.ilog2();
                }
                "compression_type" => {
                    options.compression = match value {
                        "zlib" => Compression::Zlib,
                        "zstd" => Compression::Zstd,
                        _ => return Err(wrong("want zlib or zstd")),
                    }
                }
                "extended_l2" => options.has_extended_l2 = switch()?,
                "lazy_refcounts" => options.has_lazy_refcounts = switch()?,
                "refcount_bits" => {
                    let bits = value.parse().ok().filter(|bits: &u32| bits.is_power_of_two());
                    options.refcount_order =
                        bits.ok_or_else(|| wrong("want a power of two up to 64"))?.ilog2();
                }
                "preallocation" => {
                    is_preallocated = match value {
                        "off" => false,
                        "metadata" => true,
                        _ => return Err(wrong("want off or metadata")),
                    }
                }
                _ => return Err(Error::Usage(format!("--options: no option {key:?}"))),
            }
        }
        Ok((options, is_preallocated))
    }
}

/// A file that is being made. It is removed again unless it is finished.
pub(super) struct NewFile {
    path: PathBuf,
    file: ImageFile,
    is_finished: bool,
}

impl NewFile {
    /// Creates the file, which no other program may open meanwhile; `force` replaces an old one,
    /// unless a program has it open.
    pub(super) fn create(path: &Path, force: bool) -> Result<NewFile, Error> {
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        // The old content may be served, or be the source of the new one: it goes after the claim.
        let opened =
            if force { options.create(true).truncate(false) } else { options.create_new(true) }.open(path);
        let emptied = opened.and_then(ImageFile::claim).and_then(|file| file.set_len(0).map(|()| file));
        let file = emptied.map_err(|error| {
            let hint =
                if error.kind() == io::ErrorKind::AlreadyExists { "; --force replaces it" } else { "" };
            Error::Runtime(format!("{}: cannot create the file: {error}{hint}", path.display()))
        })?;
        Ok(NewFile { path: path.to_owned(), file, is_finished: false })
    }

    /// The file for a writer of images.
    pub(super) fn output(&self) -> Result<FileOutput, Error> {
        self.file.try_clone().map(FileOutput).map_err(|error| self.failed(&error))
    }

    /// An error of this file.
    pub(super) fn failed(&self, error: &dyn std::fmt::Display) -> Error {
        Error::Runtime(format!("{}: {error}", self.path.display()))
    }

    /// Does the last work on the file, and makes it durable.
    pub(super) fn finish(mut self, work: impl FnOnce(&File) -> io::Result<()>) -> Result<(), Error> {
        let result = work(&self.file).and_then(|()| self.file.sync_all());
        result.map_err(|error| self.failed(&error))?;
        self.is_finished = true;
        Ok(())
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.is_finished {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// See [`NewFile::output`].
pub(super) struct FileOutput(File);

impl Output for FileOutput {
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }
}
