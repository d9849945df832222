//! Images of a writer that was killed, whose last writes only the restart log has.

use crate::disk::{Disk, try_open_with};
use crate::tools::{Folder, contents};
use block::Device;
use qcow2::RestartLog;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

const SIZE: usize = 3 << 20;

fn log(file: &Path, session: u32) -> RestartLog {
    let file = File::options().read(true).write(true).open(file).unwrap();
    RestartLog::new(file, [1; 16], session, 4096)
}

#[test]
fn a_log_of_a_later_version_is_refused_before_anything_changes() {
    let folder = Folder::new();
    folder.img(&format!("create -f qcow2 disk {SIZE}"));
    let path = |name| folder.path(name);
    File::create(path("log")).unwrap();
    let device = Arc::new(try_open_with(&path("disk"), None, Some(log(&path("log"), 7))).unwrap());
    let mut disk = Disk { bytes: vec![0; SIZE], cluster: 65536, has_zeroes: true, has_discard: false };
    disk.work(&device, 1, 40);
    // The files of a process that was killed here.
    for (file, copy) in [("disk", "killed"), ("log", "log_of_killed")] {
        std::fs::copy(path(file), path(copy)).unwrap();
    }
    drop(device);
    let of_killed = File::options().write(true).open(path("log_of_killed")).unwrap();
    let before = std::fs::read(path("killed")).unwrap();
    of_killed.write_all_at(&[2], 8).unwrap();
    let opened = try_open_with(&path("killed"), None, Some(log(&path("log_of_killed"), 8)));
    let error = opened.err().expect("a refusal").to_string();
    assert!(error.contains("the restart log has version 2; supported is version 1"), "{error}");
    assert!(std::fs::read(path("killed")).unwrap() == before, "the image is as it was");
    of_killed.write_all_at(&[1], 8).unwrap();
    let device = try_open_with(&path("killed"), None, Some(log(&path("log_of_killed"), 8))).unwrap();
    let device: Arc<dyn Device> = Arc::new(device);
    assert!(contents(&device) == disk.bytes, "the log has the writes");
}
