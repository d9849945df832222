//! Lines to attach an export with, from a daemon that is played by the test.

use crate::common::freestone;
use crate::common::played::Played;
use serde_json::json;
use std::process::Command;

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn the_line_for_qemu_is_the_one_that_the_installed_version_takes() {
    let lines = json!({ "lines": { "qemu": "-chardev new", "qemu-before-9.2": "-chardev old", "libvirt": "<disk/>" } });
    let bin = tempfile::tempdir().unwrap();
    let program = bin.path().join(format!("qemu-system-{}", std::env::consts::ARCH));
    let attach = |version: Option<&str>, more: &[&str]| {
        let _ = std::fs::remove_file(&program);
        if let Some(version) = version {
            // By another process: a program that a child of this one has open for writing cannot be
            // started.
            let script =
                "printf '#!/bin/sh\\necho QEMU emulator version %s\\n' \"$2\" >\"$1\" && chmod 755 \"$1\"";
            let mut sh = Command::new("/bin/sh");
            let written =
                sh.args(["-c", script, "sh"]).arg(&program).arg(format!("'{version}'")).status().unwrap();
            assert!(written.success());
        }
        let daemon = Played::new(vec![(200, lines.clone())]);
        let mut command = freestone();
        command.env("PATH", bin.path()).arg("--socket").arg(daemon.socket());
        let output = command.args(["export", "show", "vm1", "--attach"]).args(more).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        (text(&output.stdout), text(&output.stderr))
    };
    assert_eq!(attach(Some("7.2.17 (Debian 1:7.2+dfsg-7)"), &["qemu"]).0, "-chardev old\n");
    assert_eq!(attach(Some("9.1.0"), &["qemu"]).0, "-chardev old\n");
    assert_eq!(attach(Some("10.0.2"), &["qemu"]).0, "-chardev new\n");
    assert_eq!(attach(Some("10.0.2"), &["qemu", "--qemu", "8.2"]).0, "-chardev old\n");
    assert_eq!(attach(Some("7.2.17"), &["libvirt"]).0, "<disk/>\n");
}
