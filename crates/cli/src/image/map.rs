//! `freestone image map`.

use super::{Backing, MapArgs, failed};
use crate::error::Error;
use block::{Channel, Status, StatusReport};
use qcow2::entry::Place;
use qcow2::{Image, Map, Run};
use stack::kinds::qcow2::Link;
use std::fmt::Write;
use std::rc::Rc;

/// A range of the disk with one kind of place.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Extent {
    start: u64,
    len: u64,
    /// How many backing files down the range is.
    depth: usize,
    is_present: bool,
    is_zero: bool,
    is_compressed: bool,
    /// First byte in the file.
    offset: Option<u64>,
}

/// An image, or the raw file below the last one.
enum Layer {
    Image(Box<Map>),
    Raw(Rc<dyn Channel>, u64),
}

pub(super) fn run(args: &MapArgs, is_json: bool) -> Result<(), Error> {
    let image = args.file.open()?;
    let links = match args.backing {
        Backing::Auto => {
            stack::kinds::qcow2::chain(&args.file.file, &image.header, args.image_dir.as_deref())?
        }
        Backing::None => Vec::new(),
    };
    let data_name = image.header.data_file.clone();
    let names = [data_name.unwrap_or_else(|| args.file.name())];
    let names = names.into_iter().chain(links.iter().map(|link| link.path.display().to_string()));
    let names: Vec<String> = names.collect();
    let extents = reactor::run(async move {
        let mut layers = vec![Layer::Image(Box::new(Map::open(&image).map_err(failed)?))];
        for link in links {
            layers.push(open(link).await?);
        }
        extents(&layers, image.name()).await
    })?;
    match is_json {
        true => print!("{}", as_json(&extents)),
        false => print!("{}", as_text(&extents, &names)?),
    }
    Ok(())
}

async fn open(link: Link) -> Result<Layer, Error> {
    let device = super::open_device(&link.path, false)?;
    if link.is_raw {
        return Ok(Layer::Raw(device.open_channel()?, device.limits().capacity));
    }
    let image = Image::open(device).await.map_err(failed)?;
    Ok(Layer::Image(Box::new(Map::open(&image).map_err(failed)?)))
}

impl Layer {
    fn size(&self) -> u64 {
        match self {
            Layer::Image(map) => map.size(),
            Layer::Raw(_, size) => *size,
        }
    }
}

/// Every extent of the disk. Those that continue the one before are joined.
async fn extents(layers: &[Layer], name: &str) -> Result<Vec<Extent>, Error> {
    let mut list: Vec<Extent> = Vec::new();
    let size = layers[0].size() / 512 * 512;
    let mut at = 0;
    while at < size {
        let found = extent(layers, at, size - at).await;
        let extent = found.map_err(|error| Error::Runtime(format!("{name}: byte {at}: {error}")))?;
        at += extent.len;
        match list.last_mut() {
            Some(last) if continues(last, &extent) => last.len += extent.len,
            _ => list.push(extent),
        }
    }
    Ok(list)
}

fn continues(last: &Extent, next: &Extent) -> bool {
    let place = last.offset.map(|offset| offset + last.len);
    *next == Extent { start: next.start, len: next.len, offset: place, ..last.clone() }
}

/// The extent at byte `start`, at most `len` bytes: from the first layer that has it.
async fn extent(layers: &[Layer], start: u64, mut len: u64) -> Result<Extent, block::IoError> {
    let mut depth = 0;
    loop {
        let mut extent = Extent {
            start,
            len,
            depth,
            is_present: true,
            is_zero: false,
            is_compressed: false,
            offset: None,
        };
        match &layers[depth] {
            Layer::Raw(channel, _) => {
                let report = StatusReport::new();
                channel.block_status(&report, start, len).await?;
                let first = report.extents().next().unwrap_or_default();
                extent.len = first.len.min(len).max(1);
                (extent.is_zero, extent.offset) = (first.status.contains(Status::ZERO), Some(start));
                return Ok(extent);
            }
            Layer::Image(map) => {
                let run: Run = map.run(start, len).await?;
                extent.len = run.len;
                match run.place {
                    Place::Data(offset) => extent.offset = Some(offset),
                    Place::Compressed(_) => extent.is_compressed = true,
                    Place::Zero(offset) => (extent.is_zero, extent.offset) = (true, offset),
                    Place::Unallocated => {
                        let below = layers.get(depth + 1).map_or(0, Layer::size);
                        if start < below {
                            len = run.len.min(below - start);
                            depth += 1;
                            continue;
                        }
                        (extent.is_present, extent.is_zero) = (false, true);
                    }
                }
                return Ok(extent);
            }
        }
    }
}

fn as_json(extents: &[Extent]) -> String {
    let mut lines = Vec::new();
    for Extent { start, len, depth, is_present, is_zero, is_compressed, offset } in extents {
        let is_data = *is_present && !is_zero;
        let mut line = format!(r#"{{ "start": {start}, "length": {len}, "depth": {depth}, "#);
        let _ = write!(line, r#""present": {is_present}, "zero": {is_zero}, "data": {is_data}, "#);
        let _ = write!(line, r#""compressed": {is_compressed}"#);
        if let Some(offset) = offset {
            let _ = write!(line, r#", "offset": {offset}"#);
        }
        lines.push(line + "}");
    }
    format!("[{}]\n", lines.join(",\n"))
}

fn as_text(extents: &[Extent], names: &[String]) -> Result<String, Error> {
    let mut text = format!("{:<16}{:<16}{:<16}{}\n", "Offset", "Length", "Mapped to", "File");
    for extent in extents.iter().filter(|extent| extent.is_present && !extent.is_zero) {
        let Some(offset) = extent.offset else {
            return Err(Error::Runtime("File contains external, encrypted or compressed clusters.".into()));
        };
        let [start, len, offset] = [extent.start, extent.len, offset].map(hex);
        let _ = writeln!(text, "{start:<16}{len:<16}{offset:<16}{}", names[extent.depth]);
    }
    Ok(text)
}

/// A number as C's `%#x` writes it.
fn hex(number: u64) -> String {
    if number == 0 { "0".into() } else { format!("{number:#x}") }
}
