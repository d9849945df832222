//! `freestone image`: disk images in QEMU's format qcow2. Output and exit codes are those of
//! `qemu-img`.

mod bitmap;
mod check;
mod commit;
mod convert;
mod create;
mod info;
mod map;
mod rebase;
mod resize;
mod snapshot;

use crate::error::Error;
use crate::parse::CommonArgs;
use block::Device;
use drivers::io_uring::{Options, UringDevice};
use qcow2::{Header, Image};
use snapshot::{SnapshotArgs, SnapshotCommand};
use stack::kinds::restart_log;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

/// The arguments of `freestone image`.
#[derive(clap::Args, Debug)]
pub struct ImageArgs {
    #[command(subcommand)]
    command: ImageCommand,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

#[derive(clap::Subcommand, Debug)]
enum ImageCommand {
    /// Print the properties of an image
    Info(FileArgs),
    /// Check all metadata of an image; exit with 2 for errors, 3 for leaks, 63 for another format
    Check(check::CheckArgs),
    /// Repair the metadata of an image: the same as `check --repair all`
    Repair(FileArgs),
    /// Change the size of the disk of an image
    Resize(resize::ResizeArgs),
    /// List, make, apply and delete internal snapshots
    Snapshot(snapshot::SnapshotArgs),
    /// Add, remove and change a dirty bitmap of an image: the options count in their order
    Bitmap(bitmap::BitmapArgs),
    /// Give an image another backing file; its disk keeps its bytes
    Rebase(rebase::RebaseArgs),
    /// Copy the data of the backing files into an image, which then has none
    Stream(rebase::StreamArgs),
    /// Write the changes in an image to its backing file, and empty the image
    Commit(commit::CommitArgs),
    /// Print where each byte of an image is
    Map(MapArgs),
    /// Create an empty image
    Create(create::CreateArgs),
    /// Copy an image to a new one of another format
    Convert(convert::ConvertArgs),
}

/// An image, and the form of the output.
#[derive(clap::Args, Debug)]
struct FileArgs {
    /// The image
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Form of the output
    #[arg(long, value_enum, default_value_t = Form::Human)]
    output: Form,
    /// Read the image even if another program writes to it; the result may be wrong then
    #[arg(short = 'U', long)]
    force_share: bool,
}

#[derive(clap::Args, Debug)]
struct MapArgs {
    #[command(flatten)]
    file: FileArgs,
    /// Open backing files that the image names
    #[arg(long, value_name = "none|auto", default_value = "none")]
    backing: Backing,
    /// Directory that backing files must be in [default: that of the image]
    #[arg(long, value_name = "DIR")]
    image_dir: Option<PathBuf>,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// Text
    Human,
    /// JSON
    Json,
}

/// The format of an image.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    /// The bytes of the disk
    Raw,
    /// QEMU's qcow2
    Qcow2,
}

impl Format {
    fn name(self) -> &'static str {
        match self {
            Format::Raw => "raw",
            Format::Qcow2 => "qcow2",
        }
    }
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Backing {
    /// Open no backing file
    None,
    /// Open those inside one directory
    Auto,
}

/// Runs a command on an image. The exit code of a check says what it has found.
///
/// # Errors
/// When the image cannot be opened or read.
pub fn run(args: &ImageArgs) -> Result<ExitCode, Error> {
    let is_json = |file: &FileArgs| args.common.json || file.output == Form::Json;
    match &args.command {
        ImageCommand::Info(file) => info::run(file, is_json(file)).map(|()| ExitCode::SUCCESS),
        ImageCommand::Check(check) => check::run(check, is_json(&check.file)),
        ImageCommand::Repair(file) => check::repair(file, is_json(file)),
        ImageCommand::Resize(args) => resize::run(args).map(|()| ExitCode::SUCCESS),
        ImageCommand::Snapshot(args) => run_snapshot(args, is_json).map(|()| ExitCode::SUCCESS),
        ImageCommand::Bitmap(args) => bitmap::run(args).map(|()| ExitCode::SUCCESS),
        ImageCommand::Rebase(args) => rebase::run(args).map(|()| ExitCode::SUCCESS),
        ImageCommand::Stream(args) => rebase::stream(args).map(|()| ExitCode::SUCCESS),
        ImageCommand::Commit(args) => commit::run(args).map(|()| ExitCode::SUCCESS),
        ImageCommand::Map(map) => map::run(map, is_json(&map.file)).map(|()| ExitCode::SUCCESS),
        ImageCommand::Create(create) => create::run(create).map(|()| ExitCode::SUCCESS),
        ImageCommand::Convert(convert) => convert::run(convert).map(|()| ExitCode::SUCCESS),
    }
}

fn run_snapshot(args: &SnapshotArgs, is_json: impl Fn(&FileArgs) -> bool) -> Result<(), Error> {
    match &args.command {
        SnapshotCommand::List(file) => snapshot::list(file, is_json(file)),
        SnapshotCommand::Create(name) => snapshot::create(name),
        SnapshotCommand::Apply(name) => snapshot::apply(name),
        SnapshotCommand::Delete(name) => snapshot::delete(name),
    }
}

impl FileArgs {
    /// The name of the file as it was given.
    fn name(&self) -> String {
        self.file.display().to_string()
    }

    fn device(&self) -> Result<Arc<dyn Device>, Error> {
        open_device(&self.file, self.force_share)
    }

    /// Opens the file for changes.
    fn writable_device(&self) -> Result<Arc<dyn Device>, Error> {
        if self.force_share {
            return Err(Error::Usage("--force-share: only for reading".into()));
        }
        open_writable(&self.file)
    }

    fn open(&self) -> Result<Image, Error> {
        let device = self.device()?;
        reactor::run(async move { Image::open(device).await }).map_err(failed)
    }
}

/// Opens a file for reading; `force_share`: even if another program writes to it.
fn open_device(path: &Path, force_share: bool) -> Result<Arc<dyn Device>, Error> {
    let options = Options { read_only: true, refuse_writers: !force_share, ..Options::new(path) };
    Ok(Arc::new(UringDevice::open(&options)?))
}

/// Opens an image for changes, which nothing else may have open. It must have all writes that its
/// last server completed.
fn open_writable(path: &Path) -> Result<Arc<dyn Device>, Error> {
    let device: Arc<dyn Device> = Arc::new(UringDevice::open(&Options::new(path))?);
    if let Ok(header) = read_header(&device) {
        restart_log::check_restored(path, &header)?;
    }
    Ok(device)
}

/// The header of the image on `device`.
fn read_header(device: &Arc<dyn Device>) -> Result<Header, Error> {
    let device = device.clone();
    reactor::run(async move { Image::open_header(&*device).await }).map_err(failed)
}

/// The file that the image at `image` calls `name`.
fn beside(image: &Path, name: &str) -> PathBuf {
    image.parent().unwrap_or(Path::new("")).join(name)
}

/// Refuses an image that names a backing file, unless `option` allows to open it.
fn check_may_open(image: &str, header: &Header, backing: Backing, option: &str) -> Result<(), Error> {
    match &header.backing_file {
        Some(name) if backing == Backing::None => {
            let text = format!("{image}: names the backing file {name:?}, which {option} auto would open");
            Err(Error::Runtime(text))
        }
        _ => Ok(()),
    }
}

fn failed(error: qcow2::Error) -> Error {
    Error::Runtime(error.to_string())
}

/// The value as JSON on several lines, as `qemu-img` prints it.
fn print_json(value: &serde_json::Value) {
    println!("{value:#}");
}

/// A number of bytes with three digits, as QEMU writes it.
fn readable(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let decimals = if value >= 100.0 {
        0
    } else if value >= 10.0 {
        1
    } else {
        2
    };
    let text = format!("{value:.decimals$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text} {}B", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_three_digits() {
        let sizes = [0, 512, 1000, 102_400, 1_536_000, 3 << 20, 1023 << 20, 10 << 40];
        let text = ["0 B", "512 B", "0.98 KiB", "100 KiB", "1.46 MiB", "3 MiB", "1 GiB", "10 TiB"];
        assert_eq!(sizes.map(readable), text);
    }
}
