//! Commands that attach an export.

use crate::state::ExportRecord;
use api::Attach;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Lines for an export, whose `fields` are as its kind describes them.
pub fn attach(record: &ExportRecord, fields: &Map<String, Value>) -> Attach {
    let text = |key: &str| fields.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    let name = &record.name;
    let mut lines = BTreeMap::new();
    let mut add = |program: &str, line: String| drop(lines.insert(program.to_owned(), line));
    match &*record.kind {
        "vhost-user-blk" => {
            let socket = text("socket");
            let queues = fields.get("queues").and_then(Value::as_u64).unwrap_or(1);
            // reconnect is gone from the newest QEMU, and older ones know no reconnect-ms.
            for (program, reconnect) in [("qemu", "reconnect-ms=100"), (Attach::OLD_QEMU, "reconnect=1")] {
                add(
                    program,
                    format!(
                        "-object memory-backend-memfd,id=mem,size=MEMORY,share=on -machine memory-backend=mem \
                         -chardev socket,id={name},path={socket},{reconnect} \
                         -device vhost-user-blk-pci,chardev={name},num-queues={queues}"
                    ),
                );
            }
            add(
                "libvirt",
                format!(
                    "<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>\n\
                     <disk type='vhostuser' device='disk'><driver name='qemu' type='raw' queues='{queues}'/>\
                     <source type='unix' path='{socket}'><reconnect enabled='yes' timeout='1'/></source>\
                     <target dev='vda' bus='virtio'/></disk>"
                ),
            );
            add(
                "cloud-hypervisor",
                format!(
                    "--memory size=MEMORY,shared=on --disk vhost_user=on,socket={socket},num_queues={queues}"
                ),
            );
        }
        "nbd" => {
            let export = text("name");
            let uri = match (text("socket"), text("listen")) {
                (socket, _) if !socket.is_empty() => format!("nbd+unix:///{export}?socket={socket}"),
                (_, address) => format!("nbd://{address}/{export}"),
            };
            add("qemu", format!("-drive if=virtio,format=raw,file={uri}"));
            add("nbdinfo", format!("nbdinfo {uri}"));
            let client = match (text("socket"), text("listen").rsplit_once(':')) {
                (socket, _) if !socket.is_empty() => {
                    format!("nbd-client -N {export} -unix {socket} /dev/nbd0")
                }
                (_, Some((host, port))) => format!("nbd-client -N {export} {host} {port} /dev/nbd0"),
                _ => String::new(),
            };
            if !client.is_empty() {
                add("nbd-client", client);
            }
        }
        "nvme-tcp" => {
            let nqn = text("nqn");
            let ports = fields.get("listen").and_then(Value::as_array).cloned().unwrap_or_default();
            let connect = |port: &Value| {
                let (host, service) = port.get("address")?.as_str()?.rsplit_once(':')?;
                let host = host.trim_matches(['[', ']']);
                Some(format!("nvme connect -t tcp -a {host} -s {service} -n {nqn}"))
            };
            let lines: Vec<String> = ports.iter().filter_map(connect).collect();
            if !lines.is_empty() {
                add("nvme", lines.join("\n"));
            }
        }
        "ublk" => add("path", text("path")),
        "vduse" => add("vdpa", format!("vdpa dev add name {0} mgmtdev vduse", text("name"))),
        _ => {}
    }
    Attach { lines }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn lines(kind: &str, fields: Value) -> BTreeMap<String, String> {
        let record = ExportRecord { name: "vm1".into(), kind: kind.into(), ..ExportRecord::default() };
        attach(&record, fields.as_object().unwrap()).lines
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
        let nbd = lines("nbd", json!({ "listen": "127.0.0.1:10809", "name": "vm1" }));
        assert_eq!(nbd["nbd-client"], "nbd-client -N vm1 127.0.0.1 10809 /dev/nbd0");
        let nbd = lines("nbd", json!({ "socket": "/s", "name": "vm1" }));
        assert_eq!(nbd["nbdinfo"], "nbdinfo nbd+unix:///vm1?socket=/s");
        let ports = json!([{ "address": "[::1]:4420" }, { "address": "10.0.0.1:4420" }]);
        let nvme = lines("nvme-tcp", json!({ "nqn": "nqn.x", "listen": ports }));
        assert_eq!(
            nvme["nvme"],
            "nvme connect -t tcp -a ::1 -s 4420 -n nqn.x\nnvme connect -t tcp -a 10.0.0.1 -s 4420 -n nqn.x"
        );
        assert_eq!(lines("ublk", json!({ "path": "/dev/ublkb0" }))["path"], "/dev/ublkb0");
    }
}
