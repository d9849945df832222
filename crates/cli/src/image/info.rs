//! `freestone image info`.

use super::{FileArgs, failed, print_json, readable};
use crate::error::Error;
use qcow2::header::{LAZY_REFCOUNTS, autoclear};
use qcow2::{Bitmap, Image};
use serde_json::{Value, json};
use std::fmt::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Bytes of a block in the allocated size of a file (`stat(2)`).
const STAT_BLOCK: u64 = 512;

pub(super) fn run(file: &FileArgs, is_json: bool) -> Result<(), Error> {
    let image = file.open()?;
    let (image, bitmaps) = reactor::run(async move {
        let bitmaps = image.bitmaps().await;
        (image, bitmaps)
    });
    let bitmaps = bitmaps.map_err(failed)?;
    let disk_bytes = std::fs::metadata(&file.file).map(|file| file.blocks() * STAT_BLOCK);
    let disk_bytes = disk_bytes.map_err(|error| Error::Runtime(format!("{}: {error}", file.name())))?;
    match is_json {
        true => print_json(&as_json(&file.name(), &image, &bitmaps, disk_bytes)),
        false => print!("{}", as_text(&file.name(), &image, &bitmaps, disk_bytes)),
    }
    Ok(())
}

fn is_raw(image: &Image) -> bool {
    image.header.autoclear & autoclear::RAW_DATA != 0
}

fn is_lazy(image: &Image) -> bool {
    image.header.compatible & LAZY_REFCOUNTS != 0
}

fn compat(image: &Image) -> &'static str {
    if image.header.version == 2 { "0.10" } else { "1.1" }
}

fn flags(bitmap: &Bitmap) -> Vec<&'static str> {
    let flags = [(bitmap.is_in_use, "in-use"), (bitmap.is_auto, "auto")];
    flags.into_iter().filter(|(is_set, _)| *is_set).map(|(_, name)| name).collect()
}

/// The name of the backing file seen from the image, as QEMU joins them.
fn full_name(image: &str, backing: &str) -> String {
    let has_protocol = backing.split_once(':').is_some_and(|(protocol, _)| !protocol.contains('/'));
    match image.rsplit_once('/') {
        Some((folder, _)) if !has_protocol && !Path::new(backing).has_root() => format!("{folder}/{backing}"),
        _ => backing.to_owned(),
    }
}

fn as_json(name: &str, image: &Image, bitmaps: &[Bitmap], disk_bytes: u64) -> Value {
    let header = &image.header;
    let mut data = json!({
        "compat": compat(image),
        "compression-type": header.compression.name(),
        "refcount-bits": 1 << header.refcount_order,
    });
    if header.version >= 3 {
        data["lazy-refcounts"] = is_lazy(image).into();
        data["corrupt"] = header.is_corrupt().into();
        data["extended-l2"] = header.has_extended_l2().into();
    }
    if let Some(file) = &header.data_file {
        data["data-file"] = file.as_str().into();
        data["data-file-raw"] = is_raw(image).into();
    }
    if !bitmaps.is_empty() {
        let entry = |bitmap: &Bitmap| json!({ "name": bitmap.name, "granularity": bitmap.granularity, "flags": flags(bitmap) });
        data["bitmaps"] = bitmaps.iter().map(entry).collect();
    }
    let mut info = json!({
        "filename": name,
        "format": "qcow2",
        "virtual-size": header.size,
        "actual-size": disk_bytes,
        "cluster-size": header.cluster_size(),
        "dirty-flag": header.is_dirty(),
        "format-specific": { "type": "qcow2", "data": data },
    });
    if let Some(backing) = &header.backing_file {
        info["backing-filename"] = backing.as_str().into();
        info["full-backing-filename"] = full_name(name, backing).into();
        if let Some(format) = &header.backing_format {
            info["backing-filename-format"] = format.as_str().into();
        }
    }
    if !image.snapshots.is_empty() {
        info["snapshots"] = super::snapshot::list_as_json(&image.snapshots);
    }
    info
}

fn as_text(name: &str, image: &Image, bitmaps: &[Bitmap], disk_bytes: u64) -> String {
    let header = &image.header;
    let size = readable(header.size);
    let mut text =
        format!("image: {name}\nfile format: qcow2\nvirtual size: {size} ({} bytes)\n", header.size);
    let mut line = |args: std::fmt::Arguments<'_>| {
        let _ = writeln!(text, "{args}");
    };
    line(format_args!("disk size: {}", readable(disk_bytes)));
    if header.is_dirty() {
        line(format_args!("cleanly shut down: no"));
    }
    line(format_args!("cluster_size: {}", header.cluster_size()));
    if let Some(backing) = &header.backing_file {
        match full_name(name, backing) {
            full if full == *backing => line(format_args!("backing file: {backing}")),
            full => line(format_args!("backing file: {backing} (actual path: {full})")),
        }
        if let Some(format) = &header.backing_format {
            line(format_args!("backing file format: {format}"));
        }
    }
    if !image.snapshots.is_empty() {
        line(format_args!("{}", super::snapshot::list_as_text(&image.snapshots)));
    }
    line(format_args!("Format specific information:"));
    line(format_args!("    compat: {}", compat(image)));
    line(format_args!("    compression type: {}", header.compression.name()));
    if header.version >= 3 {
        line(format_args!("    lazy refcounts: {}", is_lazy(image)));
    }
    if !bitmaps.is_empty() {
        line(format_args!("    bitmaps:"));
    }
    for (number, bitmap) in bitmaps.iter().enumerate() {
        line(format_args!("        [{number}]:\n            flags:"));
        for (number, flag) in flags(bitmap).into_iter().enumerate() {
            line(format_args!("                [{number}]: {flag}"));
        }
        line(format_args!("            name: {}", bitmap.name));
        line(format_args!("            granularity: {}", bitmap.granularity));
    }
    line(format_args!("    refcount bits: {}", 1 << header.refcount_order));
    if let Some(file) = &header.data_file {
        line(format_args!("    data file: {file}\n    data file raw: {}", is_raw(image)));
    }
    if header.version >= 3 {
        line(format_args!("    corrupt: {}", header.is_corrupt()));
        line(format_args!("    extended l2: {}", header.has_extended_l2()));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backing_file_is_seen_from_the_folder_of_its_image() {
        assert_eq!(full_name("a/b.qcow2", "c.raw"), "a/c.raw");
        assert_eq!(full_name("b.qcow2", "c.raw"), "c.raw");
        assert_eq!(full_name("a/b.qcow2", "/c.raw"), "/c.raw");
        assert_eq!(full_name("a/b.qcow2", "nbd:host"), "nbd:host");
    }
}
