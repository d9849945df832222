//! What a VMM is told about this export beyond the disk itself: features of the protocol and of its transport.

use vhost::vhost_user::VhostUserProtocolFeatures as Protocol;

/// Feature bits of the transport that a driver or VMM may choose from.
pub(super) const TRANSPORT_FEATURES: u64 = virtio::VHOST_F_LOG_ALL | virtio::VHOST_USER_F_PROTOCOL_FEATURES;

/// Protocol features that a VMM may choose from.
pub(super) fn protocol_features() -> Protocol {
    Protocol::MQ
        | Protocol::LOG_SHMFD
        | Protocol::REPLY_ACK
        | Protocol::BACKEND_REQ
        | Protocol::CONFIG
        | Protocol::INFLIGHT_SHMFD
        | Protocol::RESET_DEVICE
        | Protocol::CONFIGURE_MEM_SLOTS
}
