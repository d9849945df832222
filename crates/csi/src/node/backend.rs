//! Ways in which a machine attaches volumes.

use super::record::Record;
use crate::capability::Mount;
use crate::fault::{Fault, Result};
use crate::ids::VolumeId;
use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a disk may take to appear, or to have another size.
pub(super) const DISK_TIMEOUT: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(50);

/// A volume to attach.
pub struct Attachment {
    /// The volume.
    pub id: VolumeId,
    /// NQN of its subsystem.
    pub nqn: String,
    /// UUID of its namespace.
    pub uuid: String,
    /// Addresses of its export.
    pub addresses: Vec<SocketAddr>,
    /// Options of the storage class: `nr-io-queues`, `ctrl-loss-tmo`, `fast-io-fail-tmo`.
    pub options: BTreeMap<String, String>,
    /// Secrets of the connection.
    pub secrets: Secrets,
}

/// Secrets, which no record, log or error has.
#[derive(Default)]
pub struct Secrets {
    /// Secret of this host, `DHHC-1:…`.
    pub dhchap: Option<String>,
    /// Secret of the controller, `DHHC-1:…`.
    pub dhchap_ctrl: Option<String>,
}

impl Attachment {
    /// The attachment that a controller's context describes.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` when the context is not one of this driver's.
    pub fn new(
        id: &VolumeId,
        context: &HashMap<String, String>,
        secrets: &HashMap<String, String>,
    ) -> Result<Attachment> {
        let value = |key: &str| {
            let value = context.get(key).filter(|value| is_plain(value));
            value.cloned().ok_or_else(|| Fault::invalid(format!("publish_context has no valid {key:?}")))
        };
        let text = context.get("addresses").map(String::as_str).unwrap_or_default();
        let addresses: Option<Vec<SocketAddr>> =
            text.split(',').map(|address| address.parse().ok()).collect();
        let wrong = || Fault::invalid(format!("publish_context: addresses {text:?}: want ADDR:PORT"));
        let addresses = addresses.ok_or_else(wrong)?;
        let secret = |key: &str| match secrets.get(key) {
            Some(text) if !is_plain(text) => Err(Fault::invalid(format!("secret {key}: want DHHC-1:…"))),
            text => Ok(text.cloned()),
        };
        Ok(Attachment {
            id: id.clone(),
            nqn: value("nqn")?,
            uuid: value("uuid")?,
            addresses,
            options: BTreeMap::new(),
            secrets: Secrets { dhchap: secret("dhchap")?, dhchap_ctrl: secret("dhchap_ctrl")? },
        })
    }

    /// The record of this volume, before it is attached.
    pub(super) fn record(&self, staging: &Path, mount: Option<Mount>) -> Record {
        Record {
            volume: self.id.to_string(),
            nqn: self.nqn.clone(),
            uuid: self.uuid.clone(),
            staging: staging.to_owned(),
            mount,
            targets: BTreeMap::new(),
            direct: None,
        }
    }
}

/// Whether a text can be an option of the kernel's host, which commas separate.
pub(super) fn is_plain(text: &str) -> bool {
    !text.is_empty() && text.len() <= 256 && text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b',')
}

/// A way to attach volumes. Calls for one volume come one at a time, and may be repeated.
pub trait NodeBackend: Send + Sync {
    /// NQN of this machine's host, which the controller gives access.
    fn host_nqn(&self) -> &str;

    /// Attaches a volume, if it is not attached; returns its block device.
    ///
    /// # Errors
    /// When the device does not appear in time.
    fn attach(&self, attachment: &Attachment) -> Result<PathBuf>;

    /// The block device of an attached volume.
    ///
    /// # Errors
    /// When the system cannot be asked.
    fn find(&self, record: &Record) -> Result<Option<PathBuf>>;

    /// Detaches a volume that no mount uses; one that is not attached stays so.
    ///
    /// # Errors
    /// When the system refuses.
    fn detach(&self, record: &Record) -> Result<()>;

    /// Size of a block device, in bytes.
    ///
    /// # Errors
    /// When the device is gone.
    fn size(&self, device: &Path) -> Result<u64>;

    /// Waits until a block device has this size, in bytes; returns its size.
    ///
    /// # Errors
    /// `UNAVAILABLE` when it has not in time.
    fn wait_for_size(&self, device: &Path, required: u64) -> Result<u64>;
}

/// Waits until `found` returns something.
pub(super) fn wait_for<T>(
    limit: Duration,
    mut found: impl FnMut() -> Result<Option<T>>,
) -> Result<Option<T>> {
    let deadline = Instant::now() + limit;
    loop {
        match found()? {
            None if Instant::now() < deadline => std::thread::sleep(POLL),
            outcome => return Ok(outcome),
        }
    }
}

/// Size of a block device by its entry in sysfs, in bytes.
pub(super) fn block_size(sys: &Path, device: &Path) -> Result<u64> {
    let name = device.file_name().unwrap_or_default();
    let path = sys.join("class/block").join(name).join("size");
    let text = std::fs::read_to_string(&path).map_err(|error| Fault::of_file(&path, error))?;
    // The kernel counts in units of 512 bytes, whatever the block size.
    let sectors: Option<u64> = text.trim().parse().ok();
    let size = sectors.and_then(|sectors| sectors.checked_mul(512));
    size.ok_or_else(|| Fault::internal(format!("{}: {text:?} is no size", path.display())))
}

/// As [`NodeBackend::wait_for_size`], by the entry in sysfs.
pub(super) fn wait_for_block_size(sys: &Path, device: &Path, required: u64) -> Result<u64> {
    let large = || Ok(Some(block_size(sys, device)?).filter(|size| *size >= required));
    wait_for(DISK_TIMEOUT, large)?.ok_or_else(|| {
        let detail = format!("{}: smaller than {required} bytes", device.display());
        Fault::new(tonic::Code::Unavailable, detail)
    })
}

/// The NQN of this machine's NVMe host: `given`, or that of nvme-cli's file.
///
/// # Errors
/// When there is none.
pub(super) fn host_nqn(given: Option<&str>) -> Result<String> {
    if let Some(given) = given {
        return Ok(given.to_owned());
    }
    const FILE: &str = "/etc/nvme/hostnqn";
    let text = std::fs::read_to_string(FILE).map_err(|error| {
        Fault::precondition(format!("{FILE}: {error}; --host-nqn names the host otherwise"))
    })?;
    let nqn = text.trim();
    match nqn.starts_with("nqn.") && is_plain(nqn) {
        true => Ok(nqn.to_owned()),
        false => Err(Fault::precondition(format!("{FILE}: {nqn:?} is no NQN"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context(of: &[(&str, &str)]) -> HashMap<String, String> {
        of.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn values_that_could_add_options_of_the_kernel_are_refused() {
        let id = VolumeId::parse("a/00112233-4455-6677-8899-aabbccddeeff").unwrap();
        let good = [("nqn", "nqn.a:1"), ("uuid", "u"), ("addresses", "10.0.0.1:4420,[::1]:4420")];
        assert_eq!(Attachment::new(&id, &context(&good), &context(&[])).unwrap().addresses.len(), 2);
        for (place, wrong) in [(0, "nqn.a,hostnqn=b"), (1, "u\n"), (2, "10.0.0.1"), (2, "")] {
            let mut bad = good;
            bad[place].1 = wrong;
            assert!(Attachment::new(&id, &context(&bad), &context(&[])).is_err(), "{wrong}");
        }
        let fault =
            Attachment::new(&id, &context(&good), &context(&[("dhchap", "s3cret,x")])).map(drop).unwrap_err();
        assert!(fault.message.contains("dhchap") && !fault.message.contains("s3cret"), "{fault}");
    }
}
