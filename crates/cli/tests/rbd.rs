//! `freestone discover rbd:`, over the stub of librbd (`tests/rbd/stub`), whose cluster is a
//! directory.

use crate::common::{freestone, json_lines};
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

fn discover(cluster: &Path, args: &[&str]) -> Output {
    let mut command = freestone();
    command.env("LD_LIBRARY_PATH", cluster).env("CEPH_CONF", cluster.join("ceph.conf"));
    command.arg("discover").args(args).output().unwrap()
}

#[test]
fn pools_and_images_of_a_cluster_are_listed_as_devices() {
    let cluster = tempfile::tempdir().unwrap();
    let cluster = cluster.path();
    let build = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/rbd/stub/build");
    assert!(Command::new(build).arg(cluster).status().unwrap().success());
    fs::write(cluster.join("ceph.conf"), "").unwrap();
    fs::create_dir_all(cluster.join("vms/tenant")).unwrap();
    for image in ["vms/one", "vms/tenant/two"] {
        fs::write(cluster.join(image), [0; 4096]).unwrap();
    }
    let text = String::from_utf8(discover(cluster, &["rbd:"]).stdout).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let two = "image  rbd:pool=vms,namespace=tenant,image=two";
    assert_eq!(lines, ["pool   vms", "image  rbd:pool=vms,image=one", two]);
    let found = json_lines(&discover(cluster, &["--json", "rbd:user=vms"]));
    assert_eq!(
        (&found[0]["pool"], &found[2]["namespace"], &found[2]["image"]),
        (&"vms".into(), &"tenant".into(), &"two".into())
    );
    let output = discover(cluster, &["rbd:conf=/no/such.conf"]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("cannot read /no/such.conf: No such file"), "{said}");
    assert_eq!(output.status.code(), Some(1));
}
