//! Commands that attach an export.

use crate::state::ExportRecord;
use api::Attach;
use hosting::attach::{Lines, in_qemu, in_uri, in_xml, quoted};
use serde_json::{Map, Value, json};

/// Lines for an export, whose `fields` are as its kind describes them. `is_read_only`: the export,
/// or a device that it serves, refuses writes.
pub fn attach(record: &ExportRecord, fields: &Map<String, Value>, is_read_only: bool) -> Attach {
    let mut lines = Lines::default();
    match &*record.kind {
        "vhost-user-blk" => vhost_user_blk(&mut lines, &record.name, fields),
        "nbd" => nbd(&mut lines, fields, is_read_only),
        "nvme-tcp" => nvme_tcp(&mut lines, fields),
        "ublk" => ublk(&mut lines, &record.name, &text(fields, "path"), is_read_only),
        "vduse" => {
            lines.add("vdpa", [["vdpa", "dev", "add", "name", &text(fields, "name"), "mgmtdev", "vduse"]])
        }
        _ => {}
    }
    lines.finish()
}

fn text(fields: &Map<String, Value>, key: &str) -> String {
    fields.get(key).and_then(Value::as_str).unwrap_or_default().to_owned()
}

/// A disk of libvirt. Its target is the last one, which another disk hardly has.
fn libvirt_disk(kind: &str, driver: &str, source: &str, is_read_only: bool) -> String {
    let access = if is_read_only { "<readonly/>" } else { "" };
    format!(
        "<disk type='{kind}' device='disk'><driver name='qemu' type='raw'{driver}/>{source}\
         <target dev='vdz' bus='virtio'/>{access}</disk>"
    )
}

fn vhost_user_blk(lines: &mut Lines, name: &str, fields: &Map<String, Value>) {
    let socket = text(fields, "socket");
    let queues = fields.get("queues").and_then(Value::as_u64).unwrap_or(1);
    let qemu = |reconnect: &str| {
        [
            "-object".to_owned(),
            "memory-backend-memfd,id=mem,size=MEMORY,share=on".to_owned(),
            "-machine".to_owned(),
            "memory-backend=mem".to_owned(),
            "-chardev".to_owned(),
            format!("socket,id={name},path={},{reconnect}", in_qemu(&socket)),
            "-device".to_owned(),
            format!("vhost-user-blk-pci,chardev={name},num-queues={queues}"),
        ]
    };
    // reconnect is gone from the newest QEMU, and older ones know no reconnect-ms.
    lines.add("qemu", [qemu("reconnect-ms=100")]);
    lines.add(Attach::OLD_QEMU, [qemu("reconnect=1")]);
    lines.add_text("proxmox", format!("args: {}", qemu("reconnect=1").map(|word| quoted(&word)).join(" ")));
    let memory = "<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>";
    lines.add_text("libvirt-domain", memory.to_owned());
    let source = format!(
        "<source type='unix' path='{}'><reconnect enabled='yes' timeout='1'/></source>",
        in_xml(&socket)
    );
    // The guest learns from the server whether it is read-only.
    let disk = libvirt_disk("vhostuser", &format!(" queues='{queues}'"), &source, false);
    lines.add_text("libvirt-disk", disk);
    let disk = format!("vhost_user=on,socket={socket},num_queues={queues}");
    lines.add("cloud-hypervisor", [["--memory", "size=MEMORY,shared=on", "--disk", &disk]]);
    lines.add("crosvm", [["--vhost-user", &format!("type=block,socket={socket}")]]);
    let drive = json!({ "drive_id": name, "is_root_device": false, "socket": socket });
    lines.add_text("firecracker", format!("PUT /drives/{name} {drive}"));
}

fn nbd(lines: &mut Lines, fields: &Map<String, Value>, is_read_only: bool) {
    let (export, socket, listen) = (text(fields, "name"), text(fields, "socket"), text(fields, "listen"));
    let of_libvirt = |host: String| {
        let source = format!("<source protocol='nbd' name='{}'>{host}</source>", in_xml(&export));
        libvirt_disk("network", "", &source, is_read_only)
    };
    let path = in_uri(&export);
    let uri = if socket.is_empty() {
        format!("nbd://{listen}/{path}")
    } else {
        format!("nbd+unix:///{path}?socket={}", in_uri(&socket))
    };
    // QEMU does not start with a disk to write to that refuses writes.
    let access = if is_read_only { ",readonly=on" } else { "" };
    lines.add("qemu", [["-drive", &format!("if=virtio,format=raw{access},file={}", in_qemu(&uri))]]);
    lines.add("nbdinfo", [["nbdinfo", &uri]]);
    if !socket.is_empty() {
        lines.add("nbd-client", [["nbd-client", "-N", &export, "-unix", &socket, "/dev/nbd0"]]);
        let host = format!("<host transport='unix' socket='{}'/>", in_xml(&socket));
        lines.add_text("libvirt-disk", of_libvirt(host));
    } else if let Some((host, port)) = listen.rsplit_once(':') {
        let host = host.trim_matches(['[', ']']);
        lines.add("nbd-client", [["nbd-client", "-N", &export, host, port, "/dev/nbd0"]]);
        lines.add_text("libvirt-disk", of_libvirt(format!("<host name='{}' port='{port}'/>", in_xml(host))));
    }
}

fn nvme_tcp(lines: &mut Lines, fields: &Map<String, Value>) {
    let nqn = text(fields, "nqn");
    let ports = fields.get("listen").and_then(Value::as_array).cloned().unwrap_or_default();
    let address = |port: &Value| {
        let (host, service) = port.get("address")?.as_str()?.rsplit_once(':')?;
        let host = host.trim_matches(['[', ']']);
        Some(["-t", "tcp", "-a", host, "-s", service].map(str::to_owned))
    };
    let addresses: Vec<[String; 6]> = ports.iter().filter_map(address).collect();
    if addresses.is_empty() {
        return;
    }
    let mut more = vec!["-n".to_owned(), nqn];
    // A host waits that long for a server that restarts.
    more.push("--ctrl-loss-tmo=600".into());
    if text(fields, "tls") != "off" && fields.contains_key("tls") {
        more.push("--tls".into());
    }
    if fields.get("authentication").and_then(Value::as_bool) == Some(true) {
        more.push("--dhchap-secret=SECRET".into());
    }
    let connect = |address: &[String; 6]| {
        let words = ["nvme".to_owned(), "connect".to_owned()].into_iter();
        words.chain(address.iter().cloned()).chain(more.iter().cloned()).collect::<Vec<_>>()
    };
    lines.add("nvme", addresses.iter().map(connect).collect::<Vec<_>>());
    let discovery = addresses.iter().map(|address| address.join(" ")).collect::<Vec<_>>();
    lines.add_text("nvme-discovery.conf", discovery.join("\n"));
}

fn ublk(lines: &mut Lines, name: &str, path: &str, is_read_only: bool) {
    lines.add_text("path", path.to_owned());
    let source = format!("<source dev='{}'/>", in_xml(path));
    let disk = libvirt_disk("block", " cache='none' io='native'", &source, is_read_only);
    lines.add_text("libvirt-disk", disk);
    lines.add_text(
        "fstab",
        format!("{path} /mnt/{name} FILESYSTEM nofail,x-systemd.requires=freestoned.service 0 2"),
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn lines(kind: &str, fields: Value) -> BTreeMap<String, String> {
        let record = ExportRecord { name: "vm1".into(), kind: kind.into(), ..ExportRecord::default() };
        attach(&record, fields.as_object().unwrap(), false).lines
    }

    #[test]
    fn lines_name_the_place_of_the_export() {
        let vhost = lines("vhost-user-blk", json!({ "socket": "/run/vm1.sock", "queues": 4 }));
        for (program, reconnect) in [("qemu", "reconnect-ms=100"), ("qemu-before-9.2", "reconnect=1")] {
            let end =
                format!("path=/run/vm1.sock,{reconnect} -device vhost-user-blk-pci,chardev=vm1,num-queues=4");
            assert!(vhost[program].ends_with(&end), "{}", vhost[program]);
        }
        assert!(vhost["cloud-hypervisor"].contains("socket=/run/vm1.sock,num_queues=4"));
        let vhost = lines("vhost-user-blk", json!({ "socket": "/run/a,b" }));
        assert!(vhost["qemu"].contains("path=/run/a,,b,reconnect-ms=100"), "{}", vhost["qemu"]);
        let nbd = lines("nbd", json!({ "listen": "127.0.0.1:10809", "name": "vm1" }));
        assert_eq!(nbd["nbd-client"], "nbd-client -N vm1 127.0.0.1 10809 /dev/nbd0");
        let nbd = lines("nbd", json!({ "socket": "/s,t", "name": "vm1" }));
        assert_eq!(nbd["qemu"], "-drive if=virtio,format=raw,file=nbd+unix:///vm1?socket=/s,,t");
        let nbd = lines("nbd", json!({ "socket": "/s", "name": "vm1" }));
        assert_eq!(nbd["nbdinfo"], "nbdinfo nbd+unix:///vm1?socket=/s");
        let ports = json!([{ "address": "[::1]:4420" }, { "address": "10.0.0.1:4420" }]);
        let nvme = lines("nvme-tcp", json!({ "nqn": "nqn.x", "listen": ports }));
        assert_eq!(
            nvme["nvme"],
            "nvme connect -t tcp -a ::1 -s 4420 -n nqn.x --ctrl-loss-tmo=600\n\
             nvme connect -t tcp -a 10.0.0.1 -s 4420 -n nqn.x --ctrl-loss-tmo=600"
        );
        assert_eq!(nvme["nvme-discovery.conf"], "-t tcp -a ::1 -s 4420\n-t tcp -a 10.0.0.1 -s 4420");
        assert_eq!(lines("ublk", json!({ "path": "/dev/ublkb0" }))["path"], "/dev/ublkb0");
    }

    #[test]
    fn arguments_are_those_of_the_line_and_words_are_quoted() {
        let record = ExportRecord { name: "vm1".into(), kind: "nbd".into(), ..ExportRecord::default() };
        let fields = json!({ "socket": "/a b'/s<", "name": "vm1" });
        let Attach { lines, argv } = attach(&record, fields.as_object().unwrap(), false);
        assert_eq!(argv["nbd-client"], [["nbd-client", "-N", "vm1", "-unix", "/a b'/s<", "/dev/nbd0"]]);
        assert_eq!(lines["nbd-client"], r"nbd-client -N vm1 -unix '/a b'\''/s<' /dev/nbd0");
        assert!(lines["libvirt-disk"].contains("socket='/a b&apos;/s&lt;'"), "{}", lines["libvirt-disk"]);
        assert!(!argv.contains_key("libvirt-disk"));
    }

    #[test]
    fn a_uri_has_no_character_that_is_a_delimiter_there() {
        let nbd = lines("nbd", json!({ "socket": "/a b&c?/ü", "name": "50%#1" }));
        assert_eq!(nbd["nbdinfo"], "nbdinfo nbd+unix:///50%25%231?socket=/a%20b%26c%3F/%C3%BC");
    }

    #[test]
    fn a_read_only_disk_is_attached_read_only() {
        let (nbd, ublk) = (json!({ "socket": "/s", "name": "vm1" }), json!({ "path": "/dev/ublkb0" }));
        for (kind, fields) in [("nbd", nbd), ("ublk", ublk)] {
            let record = ExportRecord { name: "vm1".into(), kind: kind.into(), ..ExportRecord::default() };
            for (is_read_only, count) in [(true, 1), (false, 0)] {
                let Attach { lines, .. } = attach(&record, fields.as_object().unwrap(), is_read_only);
                assert_eq!(lines["libvirt-disk"].matches("<readonly/></disk>").count(), count, "{lines:?}");
                let qemu = lines.get("qemu").map(|line| line.matches(",readonly=on,").count());
                assert!(qemu.is_none_or(|found| found == count), "{lines:?}");
            }
        }
    }

    #[test]
    fn secrets_and_tls_of_a_subsystem_are_asked_for() {
        let ports = json!([{ "address": "10.0.0.1:4420" }]);
        let fields = json!({ "nqn": "nqn.x", "listen": ports, "tls": "require", "authentication": true });
        let line = &lines("nvme-tcp", fields)["nvme"];
        assert!(line.ends_with("-n nqn.x --ctrl-loss-tmo=600 --tls --dhchap-secret=SECRET"), "{line}");
        let line = &lines(
            "nvme-tcp",
            json!({ "nqn": "nqn.x", "listen": ports, "tls": "off", "authentication": false }),
        )["nvme"];
        assert!(line.ends_with("--ctrl-loss-tmo=600"), "{line}");
    }
}
