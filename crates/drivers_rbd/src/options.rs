//! Options of an image.

use std::fmt::Write;
use std::path::PathBuf;

/// Maximum requests in flight on one channel.
pub const MAX_QUEUE_DEPTH: u32 = 4096;
/// Longest name of a pool, namespace, image or snapshot: more than Ceph permits.
const MAX_NAME: usize = 4096;

/// Options of a connection to a cluster, as in [`Options`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterOptions {
    /// Ceph's configuration file; `None`: the one that `CEPH_CONF` names, or `/etc/ceph/ceph.conf`.
    pub conf: Option<PathBuf>,
    /// The Ceph user, without `client.`.
    pub user: String,
    /// Timeout of connecting to the monitors, in milliseconds; rounded up to seconds.
    pub timeout_ms: u64,
}

impl Default for ClusterOptions {
    fn default() -> ClusterOptions {
        Options::new("", "").cluster()
    }
}

impl ClusterOptions {
    /// The name of the cluster in errors: `rbd`, with the configuration file if there is one.
    pub(super) fn name(&self) -> String {
        match &self.conf {
            Some(conf) => format!("rbd:conf={}", conf.display()),
            None => "rbd".into(),
        }
    }

    /// Checks what can be checked without the cluster.
    ///
    /// # Errors
    /// A sentence that names the value.
    pub fn check(&self) -> Result<(), String> {
        check_name("user", &self.user)
    }
}

/// Options of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The pool.
    pub pool: String,
    /// The image.
    pub image: String,
    /// The namespace of the image in its pool; empty for the default one.
    pub namespace: String,
    /// The snapshot to read instead of the image.
    pub snapshot: Option<String>,
    /// Ceph's configuration file; `None`: the one that `CEPH_CONF` names, or `/etc/ceph/ceph.conf`.
    pub conf: Option<PathBuf>,
    /// The Ceph user, without `client.`.
    pub user: String,
    /// Hold the image's exclusive lock while it is open. `None`: if the image has this feature.
    /// Read-only images need no lock.
    pub exclusive: Option<bool>,
    /// Break the exclusive lock of another client. The cluster blocklists that client.
    pub force: bool,
    /// A file that remembers this client while it has the lock: a successor of a killed process
    /// then breaks the lock at once.
    pub lock_file: Option<PathBuf>,
    /// If another host has the exclusive lock, wait as its standby, and take over when it ends.
    pub standby: bool,
    /// Cache writes in this process until a flush.
    pub cache: bool,
    /// Refuse writes.
    pub read_only: bool,
    /// Requests in flight on each channel: 1 to [`MAX_QUEUE_DEPTH`].
    pub queue_depth: u32,
    /// Timeout of connecting to the monitors, in milliseconds; rounded up to seconds.
    pub timeout_ms: u64,
}

impl Options {
    /// The defaults for an image of a pool.
    pub fn new(pool: impl Into<String>, image: impl Into<String>) -> Options {
        Options {
            pool: pool.into(),
            image: image.into(),
            namespace: String::new(),
            snapshot: None,
            conf: None,
            user: "admin".into(),
            exclusive: None,
            force: false,
            lock_file: None,
            standby: false,
            cache: false,
            read_only: false,
            queue_depth: 128,
            timeout_ms: 10_000,
        }
    }

    /// The image's name as Ceph's tools print it: `rbd:POOL/[NAMESPACE/]IMAGE[@SNAPSHOT]`.
    pub fn name(&self) -> String {
        let mut name = format!("rbd:{}/", self.pool);
        if !self.namespace.is_empty() {
            let _ = write!(name, "{}/", self.namespace);
        }
        name += &self.image;
        if let Some(snapshot) = &self.snapshot {
            let _ = write!(name, "@{snapshot}");
        }
        name
    }

    /// The cluster of the image.
    pub(super) fn cluster(&self) -> ClusterOptions {
        let Options { conf, user, timeout_ms, .. } = self.clone();
        ClusterOptions { conf, user, timeout_ms }
    }

    /// Whether the image is opened for reading only.
    pub(super) fn is_read_only(&self) -> bool {
        self.read_only || self.snapshot.is_some()
    }

    /// Checks what can be checked without the cluster.
    ///
    /// # Errors
    /// A sentence that names the value.
    pub fn check(&self) -> Result<(), String> {
        let names = [
            ("pool", Some(&self.pool)),
            ("image", Some(&self.image)),
            ("namespace", Some(&self.namespace)),
            ("snapshot", self.snapshot.as_ref()),
            ("user", Some(&self.user)),
        ];
        for (key, value) in names.into_iter().filter_map(|(key, value)| Some((key, value?))) {
            if !(value.is_empty() && key == "namespace") {
                check_name(key, value)?;
            }
        }
        if !(1..=MAX_QUEUE_DEPTH).contains(&self.queue_depth) {
            return Err(format!("queue-depth={}: 1 to {MAX_QUEUE_DEPTH}", self.queue_depth));
        }
        let has_lock = !self.is_read_only() && self.exclusive != Some(false);
        let needs_lock = [
            ("exclusive=on", self.exclusive == Some(true)),
            ("force=on", self.force),
            ("lock-file=", self.lock_file.is_some()),
            ("standby=on", self.standby),
        ];
        if let Some((option, _)) = needs_lock.iter().find(|(_, is_set)| *is_set && !has_lock) {
            return Err(format!("{option}: a read-only image, or one with exclusive=off, has no lock"));
        }
        if self.standby && self.cache {
            return Err("standby=on: not with cache=on, whose writes a takeover would lose".into());
        }
        Ok(())
    }
}

fn check_name(key: &str, value: &str) -> Result<(), String> {
    if value.is_empty() {
        return Err(format!("{key}=: empty"));
    }
    if value.len() > MAX_NAME || value.contains(['\0', '/', '@']) {
        return Err(format!("{key}={value}: at most {MAX_NAME} bytes without / and @"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_is_that_of_cephs_tools() {
        let mut options = Options::new("rbd", "vm1");
        assert_eq!(options.name(), "rbd:rbd/vm1");
        options.namespace = "tenant".into();
        options.snapshot = Some("monday".into());
        assert_eq!(options.name(), "rbd:rbd/tenant/vm1@monday");
    }

    #[test]
    fn invalid_options_are_refused_by_their_value() {
        let good = Options::new("rbd", "vm1");
        assert_eq!(good.check(), Ok(()));
        let refused = |options: Options, reason: &str| {
            assert!(options.check().unwrap_err().contains(reason), "{:?}", options.check());
        };
        refused(Options { image: "a@b".into(), ..good.clone() }, "image=a@b");
        refused(Options { pool: String::new(), ..good.clone() }, "pool=: empty");
        refused(Options { user: "a\0b".into(), ..good.clone() }, "user=");
        refused(Options { queue_depth: 0, ..good.clone() }, "queue-depth=0");
        refused(Options { force: true, read_only: true, ..good.clone() }, "read-only image");
        refused(
            Options { force: true, exclusive: Some(false), ..good.clone() },
            "force=on: a read-only image",
        );
        refused(
            Options { lock_file: Some("f".into()), read_only: true, ..good.clone() },
            "lock-file=: a read",
        );
        refused(Options { standby: true, cache: true, ..good.clone() }, "not with cache=on");
        refused(Options { standby: true, exclusive: Some(false), ..good.clone() }, "standby=on: a read-only");
        refused(Options { snapshot: Some("s".into()), exclusive: Some(true), ..good }, "read-only image");
    }
}
