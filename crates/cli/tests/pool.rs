//! `freestone pool`: damaged tables are shown, repaired where no volume is lost, and otherwise only
//! by `--force`.

use block::Device;
use drivers::io_uring::{Options, UringDevice};
use reactor::{CoreConfig, Cores};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;
use volume::{Name, Pool};

const MIB: u64 = 1 << 20;
/// Where the copies of a table with an odd sequence number lie.
const ODD: [u64; 2] = [2 * MIB, MIB];

fn freestone(args: &[&str], image: &Path) -> Output {
    let device = format!("io_uring:path={}", image.display());
    let mut command = Command::new(env!("CARGO_BIN_EXE_freestone"));
    command.arg("pool").args(args).args(["--device", &device]).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn damage(image: &Path, at: u64) {
    let file = std::fs::OpenOptions::new().write(true).open(image).unwrap();
    file.write_all_at(&[0xa5; 512], at).unwrap();
}

/// A pool with the volume `one`, whose table has sequence number 3.
fn pool(image: &Path) {
    std::fs::File::create(image).unwrap().set_len(16 * MIB).unwrap();
    let device: Arc<dyn Device> = Arc::new(UringDevice::open(&Options::new(image)).unwrap());
    let cores = Cores::start(&[CoreConfig::default()]).unwrap();
    let pool = Pool::create(device, Name::new("data").unwrap(), cores.get(0)).unwrap();
    pool.create_volume(Name::new("one").unwrap(), MIB).unwrap();
}

#[test]
fn one_damaged_copy_is_shown_and_repaired() {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("disk");
    pool(&image);
    let whole = freestone(&["check"], &image);
    assert!(whole.status.success(), "{}", text(&whole.stderr));
    assert_eq!(text(&whole.stdout).matches("sequence 3, 1 volumes").count(), 2, "{}", text(&whole.stdout));
    damage(&image, ODD[0]);
    let damaged = freestone(&["check"], &image);
    assert_eq!(damaged.status.code(), Some(1));
    assert!(text(&damaged.stderr).contains("1 copies of the table are damaged"), "{}", text(&damaged.stderr));
    let repaired = freestone(&["repair"], &image);
    assert!(text(&repaired.stdout).contains("1 copies of the table rewritten"), "{}", text(&repaired.stderr));
    assert!(freestone(&["check"], &image).status.success());
}

#[test]
fn an_older_table_becomes_current_only_by_name_and_force() {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("disk");
    pool(&image);
    ODD.into_iter().for_each(|at| damage(&image, at));
    for command in ["check", "repair"] {
        let refused = freestone(&[command], &image);
        assert_eq!(refused.status.code(), Some(1));
        let said = text(&refused.stderr);
        assert!(
            said.contains("the newest may be among them") && said.contains("at 65536: sequence 2"),
            "{said}"
        );
    }
    let unforced = freestone(&["repair", "--sequence", "2"], &image);
    assert_eq!(unforced.status.code(), Some(2), "{}", text(&unforced.stderr));
    let wrong = freestone(&["repair", "--sequence", "7", "--force"], &image);
    assert!(text(&wrong.stderr).contains("no whole copy has sequence 7: 2, 2"), "{}", text(&wrong.stderr));
    let forced = freestone(&["repair", "--sequence", "2", "--force"], &image);
    assert!(forced.status.success(), "{}", text(&forced.stderr));
    let checked = freestone(&["check", "--json"], &image);
    assert!(checked.status.success());
    assert_eq!(text(&checked.stdout).matches("\"is_whole\":true").count(), 4, "{}", text(&checked.stdout));
}

#[test]
fn a_device_without_a_pool_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("disk");
    std::fs::File::create(&image).unwrap().set_len(16 * MIB).unwrap();
    let none = freestone(&["check"], &image);
    assert_eq!(none.status.code(), Some(1));
    let said = text(&none.stderr);
    assert!(said.contains("no pool found") && said.contains("disk"), "{said}");
}
