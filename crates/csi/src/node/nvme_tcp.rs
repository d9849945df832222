//! The kernel's NVMe/TCP host, by `/dev/nvme-fabrics` and sysfs: no other program is needed.
//!
//! A disk is found by the NQN of its subsystem and the UUID of its namespace. Names of devices
//! change, and other disks appear meanwhile.

use super::backend::{
    Attachment, DISK_TIMEOUT, NodeBackend, block_size, host_nqn, wait_for, wait_for_block_size,
};
use super::mounts::gone;
use super::record::Record;
use crate::fault::{Fault, Result};
use crate::ids::derived_uuid;
use base::Uuid;
use std::fs;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use tonic::Code;

/// Seconds for which requests wait for a target that does not answer, unless the storage class has
/// another number.
const CTRL_LOSS_TMO: &str = "600";
/// Most I/O queues of a connection, unless the storage class has another number.
const MAX_QUEUES: usize = 4;

/// The host of this machine.
pub struct NvmeTcp {
    sys: PathBuf,
    dev: PathBuf,
    host_nqn: String,
    host_id: String,
}

impl NvmeTcp {
    /// The host with this NQN, or that of `/etc/nvme/hostnqn`.
    ///
    /// # Errors
    /// When there is no NQN.
    pub fn new(given: Option<&str>) -> Result<NvmeTcp> {
        let host_nqn = host_nqn(given)?;
        let host_id = host_id(&host_nqn, Path::new("/etc/nvme"));
        Ok(NvmeTcp { sys: "/sys".into(), dev: "/dev".into(), host_nqn, host_id })
    }

    /// The directories of controllers of a subsystem.
    fn controllers(&self, nqn: &str) -> Result<Vec<PathBuf>> {
        let folder = self.sys.join("class/nvme");
        let is_of = |path: &PathBuf| attribute(path, "subsysnqn").as_deref() == Some(nqn);
        Ok(entries(&folder)?.into_iter().filter(is_of).collect())
    }

    fn is_connected(&self, nqn: &str, address: &SocketAddr) -> Result<bool> {
        let traddr = format!("traddr={}", address.ip());
        let trsvcid = format!("trsvcid={}", address.port());
        let has = |path: &PathBuf| {
            let text = attribute(path, "address").unwrap_or_default();
            let parts: Vec<&str> = text.split(',').collect();
            parts.contains(&traddr.as_str()) && parts.contains(&trsvcid.as_str())
        };
        Ok(self.controllers(nqn)?.iter().any(has))
    }

    /// The options of a connection: those it needs, and those that tune it.
    fn options(&self, attachment: &Attachment, address: &SocketAddr) -> (String, String) {
        let mut needed = format!(
            "transport=tcp,traddr={},trsvcid={},nqn={},hostnqn={},hostid={}",
            address.ip(),
            address.port(),
            attachment.nqn,
            self.host_nqn,
            self.host_id
        );
        let secrets = &attachment.secrets;
        for (key, value) in [("dhchap_secret", &secrets.dhchap), ("dhchap_ctrl_secret", &secrets.dhchap_ctrl)]
        {
            if let Some(value) = value {
                needed.push_str(&format!(",{key}={value}"));
            }
        }
        let option = |key: &str| attachment.options.get(key).cloned();
        let cpus = std::thread::available_parallelism().map_or(1, |count| count.get());
        let queues = option("nr-io-queues").unwrap_or_else(|| MAX_QUEUES.min(cpus).to_string());
        let loss = option("ctrl-loss-tmo").unwrap_or_else(|| CTRL_LOSS_TMO.to_owned());
        let mut tuning = format!(",nr_io_queues={queues},ctrl_loss_tmo={loss}");
        if let Some(fail) = option("fast-io-fail-tmo") {
            tuning.push_str(&format!(",fast_io_fail_tmo={fail}"));
        }
        (needed, tuning)
    }

    fn connect(&self, attachment: &Attachment, address: &SocketAddr) -> Result<()> {
        let path = self.dev.join("nvme-fabrics");
        let (needed, tuning) = self.options(attachment, address);
        let connect = |options: &str| {
            // One write is one connection.
            fs::File::options().read(true).write(true).open(&path)?.write_all(options.as_bytes())
        };
        let outcome = match connect(&format!("{needed}{tuning}")) {
            // A kernel that does not know an option that only tunes connects without it.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                tracing::warn!(nqn = attachment.nqn, options = tuning, "connecting without these options");
                connect(&needed)
            }
            outcome => outcome,
        };
        outcome.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Fault::precondition(format!(
                "{}: {error}: the kernel module nvme-tcp is not loaded",
                path.display()
            )),
            _ => Fault::new(
                Code::Unavailable,
                format!("connecting to {} at {address} as {}: {error}", attachment.nqn, self.host_nqn),
            ),
        })
    }

    fn disk(&self, nqn: &str, uuid: &str) -> Result<Option<PathBuf>> {
        for entry in entries(&self.sys.join("block"))? {
            let name = entry.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let is_it = is_namespace(name)
                && attribute(&entry.join("device"), "subsysnqn").as_deref() == Some(nqn)
                && attribute(&entry, "uuid").as_deref() == Some(uuid);
            if is_it {
                return Ok(Some(self.dev.join(name)));
            }
        }
        Ok(None)
    }
}

/// The identifier of a host, always the same one.
/// The kernel refuses one NQN with two identifiers, and two NQNs with one.
/// The files of nvme-cli in `folder` have the identifier if they are about this host.
/// Otherwise the NQN has it, or it is made of the NQN.
fn host_id(nqn: &str, folder: &Path) -> String {
    let file = |name: &str| attribute(folder, name);
    let of_file = || file("hostnqn").filter(|other| other == nqn).and_then(|_| file("hostid"));
    let of_nqn = || nqn.rsplit_once("uuid:").map(|(_, uuid)| uuid.to_owned());
    let mut ids = [of_file(), of_nqn()].into_iter().flatten();
    let id = ids.find_map(|id| Uuid::parse_hyphenated(&id));
    id.map_or_else(|| derived_uuid(nqn), |id| id.to_string())
}

impl NodeBackend for NvmeTcp {
    fn host_nqn(&self) -> &str {
        &self.host_nqn
    }

    fn attach(&self, attachment: &Attachment) -> Result<PathBuf> {
        let mut refusal = None;
        for address in &attachment.addresses {
            if self.is_connected(&attachment.nqn, address)? {
                continue;
            }
            if let Err(fault) = self.connect(attachment, address) {
                tracing::warn!(volume = %attachment.id, "{fault}");
                refusal = Some(fault);
            }
        }
        // Another address may do.
        if let Some(fault) =
            refusal.filter(|_| self.controllers(&attachment.nqn).is_ok_and(|all| all.is_empty()))
        {
            return Err(fault);
        }
        let disk = wait_for(DISK_TIMEOUT, || self.disk(&attachment.nqn, &attachment.uuid))?;
        disk.ok_or_else(|| {
            let (nqn, uuid) = (&attachment.nqn, &attachment.uuid);
            Fault::new(Code::DeadlineExceeded, format!("subsystem {nqn}: no namespace {uuid} has appeared"))
        })
    }

    fn find(&self, record: &Record) -> Result<Option<PathBuf>> {
        self.disk(&record.nqn, &record.uuid)
    }

    fn detach(&self, record: &Record) -> Result<()> {
        for controller in self.controllers(&record.nqn)? {
            let path = controller.join("delete_controller");
            // It may have ended meanwhile.
            gone(&path, fs::write(&path, "1"))?;
        }
        Ok(())
    }

    fn size(&self, device: &Path) -> Result<u64> {
        block_size(&self.sys, device)
    }

    fn wait_for_size(&self, device: &Path, required: u64) -> Result<u64> {
        wait_for_block_size(&self.sys, device, required)
    }
}

/// Whether a name is that of a disk: `nvme0n1`, and not the path `nvme0c1n1` or the partition
/// `nvme0n1p1`.
fn is_namespace(name: &str) -> bool {
    let numbers = name.strip_prefix("nvme").and_then(|rest| rest.split_once('n'));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    numbers.is_some_and(|(subsystem, namespace)| is_number(subsystem) && is_number(namespace))
}

/// An attribute of an object of sysfs; nothing when the object is gone.
fn attribute(object: &Path, name: &str) -> Option<String> {
    fs::read_to_string(object.join(name)).ok().map(|text| text.trim().to_owned())
}

/// The objects of a class, of which there are none before its module is loaded.
fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let fault = |error: io::Error| Fault::of_file(folder, error);
    match fs::read_dir(folder) {
        Ok(entries) => {
            entries.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<PathBuf>>>().map_err(fault)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(fault(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::backend::Secrets;
    use super::*;
    use crate::ids::VolumeId;
    use std::collections::BTreeMap;

    /// A host whose sysfs and devices are files.
    fn host(folder: &Path) -> NvmeTcp {
        let host_nqn = "nqn.2014-08.org.example:h".to_owned();
        fs::create_dir(folder.join("dev")).unwrap();
        NvmeTcp { sys: folder.join("sys"), dev: folder.join("dev"), host_nqn, host_id: "i".into() }
    }

    fn add(host: &NvmeTcp, path: &str, value: &str) {
        let path = host.sys.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{value}\n")).unwrap();
    }

    fn attachment(options: &[(&str, &str)]) -> Attachment {
        Attachment {
            id: VolumeId::parse("a/00112233-4455-6677-8899-aabbccddeeff").unwrap(),
            nqn: "nqn.a".into(),
            uuid: "u1".into(),
            addresses: vec!["10.0.0.1:4420".parse().unwrap()],
            options: options
                .iter()
                .map(|(key, value)| ((*key).into(), (*value).into()))
                .collect::<BTreeMap<_, _>>(),
            secrets: Secrets { dhchap: Some("DHHC-1:00:s3cret:".into()), dhchap_ctrl: None },
        }
    }

    fn record() -> Record {
        attachment(&[]).record(Path::new("/s"), None)
    }

    #[test]
    fn a_disk_is_found_by_subsystem_and_uuid_alone() {
        let folder = tempfile::tempdir().unwrap();
        let host = host(folder.path());
        assert_eq!(host.find(&record()).unwrap(), None);
        let disks = [("nvme0n1", "nqn.b", "u1"), ("nvme1n1", "nqn.a", "u2"), ("nvme2c0n1", "nqn.a", "u1")];
        for (name, nqn, uuid) in disks {
            add(&host, &format!("block/{name}/device/subsysnqn"), nqn);
            add(&host, &format!("block/{name}/uuid"), uuid);
        }
        assert_eq!(host.find(&record()).unwrap(), None);
        add(&host, "block/nvme3n1/device/subsysnqn", "nqn.a");
        add(&host, "block/nvme3n1/uuid", "u1");
        assert_eq!(host.find(&record()).unwrap(), Some(host.dev.join("nvme3n1")));
        add(&host, "class/block/nvme3n1/size", "2048");
        assert_eq!(host.size(&host.dev.join("nvme3n1")), Ok(1 << 20));
    }

    #[test]
    fn a_host_has_one_identifier() {
        let folder = tempfile::tempdir().unwrap();
        let other = derived_uuid("other");
        let with_uuid = format!("nqn.2014-08.org.nvmexpress:uuid:{}", derived_uuid("a"));
        assert_eq!(host_id("nqn.a", folder.path()), derived_uuid("nqn.a"));
        assert_eq!(host_id(&with_uuid, folder.path()), derived_uuid("a"));
        fs::write(folder.path().join("hostnqn"), format!("{with_uuid}\n")).unwrap();
        fs::write(folder.path().join("hostid"), format!("{other}\n")).unwrap();
        assert_eq!(host_id(&with_uuid, folder.path()), other);
        assert_eq!(host_id("nqn.a", folder.path()), derived_uuid("nqn.a"));
    }

    #[test]
    fn a_connected_address_is_not_connected_again() {
        let folder = tempfile::tempdir().unwrap();
        let host = host(folder.path());
        add(&host, "class/nvme/nvme0/subsysnqn", "nqn.a");
        add(&host, "class/nvme/nvme0/address", "traddr=10.0.0.1,trsvcid=4420,src_addr=10.0.0.9");
        let connected = |address: &str| host.is_connected("nqn.a", &address.parse().unwrap()).unwrap();
        assert!(connected("10.0.0.1:4420"));
        assert!(!connected("10.0.0.1:442") && !connected("10.0.0.10:4420"));
        assert!(!host.is_connected("nqn.b", &"10.0.0.1:4420".parse().unwrap()).unwrap());
        add(&host, "class/nvme/nvme0/delete_controller", "");
        host.detach(&record()).unwrap();
        assert_eq!(fs::read_to_string(host.sys.join("class/nvme/nvme0/delete_controller")).unwrap(), "1");
    }

    #[test]
    fn options_of_the_storage_class_replace_the_defaults() {
        let folder = tempfile::tempdir().unwrap();
        let host = host(folder.path());
        let address = "[fd00::1]:4420".parse().unwrap();
        let (needed, tuning) =
            host.options(&attachment(&[("nr-io-queues", "2"), ("fast-io-fail-tmo", "5")]), &address);
        assert!(
            needed.starts_with("transport=tcp,traddr=fd00::1,trsvcid=4420,nqn=nqn.a,hostnqn="),
            "{needed}"
        );
        assert!(needed.ends_with(",dhchap_secret=DHHC-1:00:s3cret:"), "{needed}");
        assert!(needed.contains(",hostid=i,"), "{needed}");
        assert_eq!(tuning, ",nr_io_queues=2,ctrl_loss_tmo=600,fast_io_fail_tmo=5");
    }

    #[test]
    fn without_the_module_the_error_names_it_and_no_secret() {
        let folder = tempfile::tempdir().unwrap();
        let fault = host(folder.path()).attach(&attachment(&[])).unwrap_err();
        assert_eq!(fault.code, Code::FailedPrecondition);
        assert!(fault.message.contains("nvme-tcp") && !fault.message.contains("s3cret"), "{fault}");
    }

    #[test]
    fn paths_and_partitions_are_no_disks() {
        assert!(is_namespace("nvme10n2"));
        for name in ["nvme0c0n1", "nvme0n1p1", "nvme0", "sda", "nvmen1", "nvme0n"] {
            assert!(!is_namespace(name), "{name}");
        }
    }
}
