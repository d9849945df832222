//! How to open a vhost-user device.

use std::path::PathBuf;
use virtio::blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY,
    VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio::{
    VHOST_USER_F_PROTOCOL_FEATURES, VIRTIO_F_EVENT_IDX, VIRTIO_F_INDIRECT_DESC, VIRTIO_F_RING_PACKED,
    VIRTIO_F_VERSION_1,
};

/// What is taken of a server whenever it has it.
const WELCOME: u64 = VIRTIO_F_VERSION_1
    | VHOST_USER_F_PROTOCOL_FEATURES
    | VIRTIO_BLK_F_SIZE_MAX
    | VIRTIO_BLK_F_SEG_MAX
    | VIRTIO_BLK_F_RO
    | VIRTIO_BLK_F_BLK_SIZE
    | VIRTIO_BLK_F_FLUSH
    | VIRTIO_BLK_F_TOPOLOGY
    | VIRTIO_BLK_F_MQ
    | VIRTIO_BLK_F_DISCARD
    | VIRTIO_BLK_F_WRITE_ZEROES;

/// Whether to use something that the server may or may not have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// What is best, if the server has it.
    #[default]
    Auto,
    /// Use it; a server without it is an error.
    On,
    /// Do not use it.
    Off,
}

/// How to open a vhost-user device.
#[derive(Clone, Debug)]
pub struct Options {
    /// The server's socket.
    pub path: PathBuf,
    /// How many virtqueues to use; 0: all that the server has.
    pub queues: u16,
    /// Entries of each virtqueue: a power of two, as many as the server takes.
    pub queue_size: u16,
    /// Packed rings instead of split ones.
    pub packed: Choice,
    /// Exact notification suppression.
    pub event_idx: Choice,
    /// Indirect descriptors.
    pub indirect: Choice,
    /// Believe the server when it says that its cache is off. Without, a server that knows flush is taken to have
    /// a cache, which is always safe: `qemu-storage-daemon` says that it is off and leaves it on.
    pub config_wce: Choice,
    /// Memory in which the server notes what is in flight, so that it can be restarted.
    pub inflight: Choice,
    /// How long the server may take to answer a control message.
    pub timeout_ms: u64,
}

impl Options {
    /// The defaults for the server at `path`.
    pub fn new(path: impl Into<PathBuf>) -> Options {
        Options {
            path: path.into(),
            queues: 0,
            queue_size: 128,
            packed: Choice::Auto,
            event_idx: Choice::Auto,
            indirect: Choice::Auto,
            config_wce: Choice::Auto,
            inflight: Choice::Auto,
            timeout_ms: 10_000,
        }
    }

    /// The features to use of those `offered`; an error says what is missing.
    pub(super) fn choose(&self, offered: u64) -> Result<u64, String> {
        for (feature, name) in [
            (VIRTIO_F_VERSION_1, "virtio 1.0"),
            (VHOST_USER_F_PROTOCOL_FEATURES, "vhost-user protocol features"),
        ] {
            if offered & feature == 0 {
                return Err(format!("the server does not know {name} (features {offered:#x})"));
            }
        }
        let mut features = WELCOME & offered;
        for (choice, feature, name, is_best) in [
            (self.packed, VIRTIO_F_RING_PACKED, "packed rings", false),
            (self.event_idx, VIRTIO_F_EVENT_IDX, "event indexes", true),
            (self.indirect, VIRTIO_F_INDIRECT_DESC, "indirect descriptors", true),
            (self.config_wce, VIRTIO_BLK_F_CONFIG_WCE, "switch for its cache", false),
        ] {
            features |= match choice {
                Choice::On if offered & feature == 0 => return Err(format!("the server has no {name}")),
                Choice::On => feature,
                Choice::Auto if is_best => offered & feature,
                Choice::Auto | Choice::Off => 0,
            };
        }
        Ok(features)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_feature_that_must_be_there_and_is_not_is_an_error() {
        let base = VIRTIO_F_VERSION_1 | VHOST_USER_F_PROTOCOL_FEATURES;
        let options = Options::new("/x");
        assert_eq!(options.choose(base), Ok(base));
        assert_eq!(options.choose(base | 1 << 63), Ok(base), "unknown features are left alone");
        assert!(options.choose(VIRTIO_F_VERSION_1).is_err());
        let packed = Options { packed: Choice::On, ..options.clone() };
        assert_eq!(packed.choose(base), Err("the server has no packed rings".into()));
        assert_eq!(packed.choose(base | VIRTIO_F_RING_PACKED), Ok(base | VIRTIO_F_RING_PACKED));
        let off = Options { indirect: Choice::Off, ..options };
        assert_eq!(
            off.choose(base | VIRTIO_F_INDIRECT_DESC | VIRTIO_F_EVENT_IDX),
            Ok(base | VIRTIO_F_EVENT_IDX)
        );
    }
}
