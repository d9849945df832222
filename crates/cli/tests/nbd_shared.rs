//! NBD exports that share a listener, where clients choose one by its name.

use crate::common::{Server, failure, freestone};
use std::fs::{self, Permissions};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

const DEVICES: [&str; 6] =
    ["--device", "mem:size=4M,id=a", "--device", "mem:size=8M,id=b", "--device", "mem:size=2M,id=c"];

/// The capacity of an export.
fn capacity(device: &str) -> u64 {
    let output = freestone().args(["info", "--json", "--device", device]).output().unwrap();
    assert!(output.status.success(), "{device}: {}", String::from_utf8_lossy(&output.stderr));
    let info: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    info["capacity"].as_u64().unwrap_or_else(|| panic!("{info}"))
}

#[test]
fn exports_with_the_same_address_share_a_listener() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let export = |device: &str| format!("nbd:listen={address},device={device}");
    let [a, b, c] = ["a", "b", "c"].map(export);
    let exports = ["--export", &a, "--export", &b, "--export", &c];
    let (server, ready) = Server::start(&[&DEVICES[..], &exports[..]].concat());
    let listens: Vec<_> =
        ready["exports"].as_array().unwrap().iter().map(|export| &export["listen"]).collect();
    assert_eq!(listens, [&address.to_string(); 3]);
    let uri = |name: &str| format!("nbd:uri=nbd://{address}/{name}");
    assert_eq!(["a", "b", "c"].map(|name| capacity(&uri(name))), [4 << 20, 8 << 20, 2 << 20]);
    for name in ["d", ""] {
        let (said, code) = failure(&["info", "--device", &uri(name)]);
        assert!(code == 1 && said.contains("the server has no export"), "{said}");
    }
    assert_eq!(server.stop().0, 0);
}

fn write_key(file: &Path, key: &str) {
    fs::write(file, format!("vm:{}\n", key.repeat(16))).unwrap();
    fs::set_permissions(file, Permissions::from_mode(0o600)).unwrap();
}

#[test]
fn keys_of_a_shared_listener_are_reloaded_for_all_of_its_exports() {
    let dir = tempfile::tempdir().unwrap();
    let [socket, keys, old, new] = ["s", "keys", "old", "new"].map(|name| dir.path().join(name));
    for (file, key) in [(&keys, "5e"), (&old, "5e"), (&new, "7a")] {
        write_key(file, key);
    }
    let export =
        |device: &str| format!("nbd:socket={},tls-psk={},device={device}", socket.display(), keys.display());
    let (a, b) = (export("a"), export("b"));
    let (mut server, ready) = Server::start(&[&DEVICES[..], &["--export", &a, "--export", &b]].concat());
    assert_eq!(
        (&ready["exports"][0]["tls"], &ready["exports"][1]["tls"]),
        (&"require".into(), &"require".into())
    );
    let client = |name: &str, keys: &Path| {
        format!("nbd:path={},export={name},tls-psk={},tls-username=vm", socket.display(), keys.display())
    };
    let sizes = |keys: &Path| ["a", "b"].map(|name| capacity(&client(name, keys)));
    assert_eq!(sizes(&old), [4 << 20, 8 << 20]);
    write_key(&keys, "7a");
    server.signal("HUP");
    for _ in 0..2 {
        server.event("reloaded");
    }
    assert_eq!(sizes(&new), [4 << 20, 8 << 20]);
    let (said, code) = failure(&["info", "--device", &client("a", &old)]);
    assert!(code == 1 && said.contains("TLS"), "{said}");
    assert_eq!(server.stop().0, 0);
}
