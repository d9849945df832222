//! Features of the vhost-user protocol and transport that the export offers.

use vhost::vhost_user::VhostUserProtocolFeatures as Protocol;

/// Transport feature bits offered to drivers and VMMs.
pub(super) const TRANSPORT_FEATURES: u64 = virtio::VHOST_F_LOG_ALL | virtio::VHOST_USER_F_PROTOCOL_FEATURES;

/// Protocol features offered to VMMs.
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
