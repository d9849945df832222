//! `freestone image convert`.

use super::create::{FileOutput, NewArgs, NewFile};
use super::{Backing, Format};
use crate::error::Error;
use block::{Channel, Device, Flags, Op, Status, StatusReport};
use qcow2::write::{Output, Writer};
use stack::kinds::member::{is_spec, member};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// Bytes that are read at a time: a whole number of clusters of every size.
const PART: u64 = 2 << 20;
/// Unit in which zeroes of a raw image become holes.
const HOLE: usize = 4096;

/// The arguments of `freestone image convert`.
#[derive(clap::Args, Debug)]
pub(super) struct ConvertArgs {
    /// Format of the source, which is never guessed: a guest can make its raw disk look like an
    /// image
    #[arg(short, long, value_enum)]
    format: Format,
    /// Format of the new image
    #[arg(short = 'O', long, value_enum, default_value_t = Format::Raw)]
    output_format: Format,
    /// Compress the clusters of the new image
    #[arg(short, long)]
    compress: bool,
    #[command(flatten)]
    new: NewArgs,
    /// Copy an internal snapshot of the source, by identifier or name
    #[arg(short = 'l', long, value_name = "NAME")]
    snapshot: Option<String>,
    /// Open backing files that the source names
    #[arg(long, value_name = "none|auto", default_value = "none")]
    backing: Backing,
    /// Directory that backing files must be in [default: that of the source]
    #[arg(long, value_name = "DIR")]
    image_dir: Option<PathBuf>,
    /// External data file of the source
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// The image to copy; with -f raw a device specification, too: nbd:path=SOCKET,export=NAME
    #[arg(value_name = "SOURCE")]
    source: PathBuf,
    /// The file to create
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

pub(super) fn run(args: &ConvertArgs) -> Result<(), Error> {
    let is_qcow2 = args.output_format == Format::Qcow2;
    if args.compress && !is_qcow2 {
        return Err(Error::Usage("--compress: a raw image has no compressed clusters".into()));
    }
    let source = args.open()?;
    let size = source.limits().capacity;
    let (options, is_preallocated) = args.new.parse(args.output_format, size)?;
    if is_preallocated {
        return Err(Error::Usage("--options: preallocation=metadata: not with convert".into()));
    }
    let file = NewFile::create(&args.file, args.new.force)?;
    let is_compressed = args.compress;
    match is_qcow2 {
        true => {
            let writer = Writer::new(options, file.output()?).map_err(|error| file.failed(&error))?;
            let target = copy(&source, Clusters { writer, is_compressed }, &file)?;
            file.finish(|file| file.set_len(target.writer.finish()?.1))
        }
        false => {
            copy(&source, Raw(file.output()?), &file)?;
            file.finish(|file| file.set_len(size))
        }
    }
}

impl ConvertArgs {
    fn open(&self) -> Result<Arc<dyn Device>, Error> {
        if self.format == Format::Raw {
            let unfit = [
                ("--snapshot", self.snapshot.is_some()),
                ("--image-dir", self.image_dir.is_some()),
                ("--data", self.data.is_some()),
            ];
            if let Some((option, _)) = unfit.iter().find(|(_, is_given)| *is_given) {
                return Err(Error::Usage(format!("{option}: the source is a raw image")));
            }
            return match self.source.to_str().filter(|text| is_spec(text)) {
                Some(spec) => Ok(member(spec, false, true)?.open()?),
                None => super::open_device(&self.source, false),
            };
        }
        let options = stack::kinds::qcow2::Options {
            follow: self.backing == Backing::Auto,
            image_dir: self.image_dir.clone(),
            data: self.data.clone(),
            snapshot: self.snapshot.clone(),
            read_only: true,
            ..stack::kinds::qcow2::Options::new(&self.source)
        };
        Ok(options.open_parts()?.device)
    }
}

/// The new image, as the copy writes it: parts in the order of the disk.
trait Target {
    fn write(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()>;
}

/// A raw image, whose zeroes stay holes.
struct Raw(FileOutput);

impl Target for Raw {
    fn write(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let units = bytes.chunks(HOLE).collect::<Vec<_>>();
        let mut at = 0;
        for run in units.chunk_by(|a, b| is_zero(a) == is_zero(b)) {
            let len = run.iter().map(|unit| unit.len()).sum::<usize>();
            if !is_zero(run[0]) {
                self.0.write_at(offset + at as u64, &bytes[at..at + len])?;
            }
            at += len;
        }
        Ok(())
    }
}

/// A qcow2 image, whose zero clusters stay unallocated.
struct Clusters<O> {
    writer: Writer<O>,
    is_compressed: bool,
}

impl<O: Output> Target for Clusters<O> {
    fn write(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let size = self.writer.cluster_size();
        for (number, cluster) in (0u64..).zip(bytes.chunks(size as usize)) {
            let at = offset + number * size;
            match () {
                () if is_zero(cluster) => {}
                () if !self.is_compressed => self.writer.write(at, cluster)?,
                () if cluster.len() as u64 == size => self.writer.write_compressed(at, cluster)?,
                () => {
                    let mut whole = cluster.to_vec();
                    whole.resize(size as usize, 0);
                    self.writer.write_compressed(at, &whole)?;
                }
            }
        }
        Ok(())
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().fold(0, |any, byte| any | byte) == 0
}

/// Why a copy ended early.
enum Failure {
    Source(Error),
    Target(io::Error),
}

/// Copies all data of `source` to `target`. Ranges that are known to be zeroes are not read.
fn copy<T: Target + 'static>(source: &Arc<dyn Device>, target: T, file: &NewFile) -> Result<T, Error> {
    let source = source.clone();
    reactor::run(async move { copy_parts(&*source, target).await }).map_err(|failure| match failure {
        Failure::Source(error) => error,
        Failure::Target(error) => file.failed(&error),
    })
}

async fn copy_parts<T: Target>(source: &dyn Device, mut target: T) -> Result<T, Failure> {
    let channel = source.open_channel().map_err(|error| Failure::Source(error.into()))?;
    let limits = source.limits();
    let longest = PART.min(u64::from(limits.max_transfer)).min(reactor::MAX_BUFFER as u64);
    let mut bytes = Vec::new();
    let mut at = 0;
    while at < limits.capacity {
        let part = PART.min(limits.capacity - at);
        let zeroes = zeroes_at(&*channel, at, limits.capacity - at).await;
        if zeroes >= part {
            // Whole parts, so that the next one begins with a cluster.
            at += if at + zeroes < limits.capacity { zeroes - zeroes % PART } else { zeroes };
            continue;
        }
        bytes.clear();
        while (bytes.len() as u64) < part {
            let place = at + bytes.len() as u64;
            let buffer = reactor::current().buffers().take((at + part - place).min(longest) as usize).await;
            let (buffer, result) = buffer.transfer(&*channel, Op::Read, Flags::NONE, place).await;
            result.map_err(|error| {
                let text = format!("{}: read at byte {place}: {error}", source.name());
                Failure::Source(Error::Runtime(text))
            })?;
            bytes.extend_from_slice(buffer.as_slice());
        }
        target.write(at, &bytes).map_err(Failure::Target)?;
        at += part;
    }
    Ok(target)
}

/// The zeroes that begin at byte `at`, as far as the source knows without reading them.
async fn zeroes_at(channel: &dyn Channel, at: u64, len: u64) -> u64 {
    let report = StatusReport::new();
    // A source that cannot say so is read.
    if channel.block_status(&report, at, len).await.is_err() {
        return 0;
    }
    let zeroes = report.extents().take_while(|extent| extent.status.contains(Status::ZERO));
    zeroes.map(|extent| extent.len).sum()
}
