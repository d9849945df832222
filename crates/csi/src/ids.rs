//! Identities: of volumes, nodes and zones for the orchestrator, and of subsystems and namespaces
//! for hosts.

use crate::fault::{Fault, Result};
use base::Uuid;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fmt;

/// The longest identity of a node, in bytes (CSI, "Size Limits").
const MAX_NODE_ID: usize = 256;
/// The longest name of a volume of the daemon, of a driver and of a zone, in bytes.
const MAX_NAME: usize = 63;

/// The label that all volumes and exports of a driver have: its name.
pub const DRIVER_LABEL: &str = "csi.driver";

/// Identity of a volume: `BACKEND/UUID`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeId {
    /// Name of the backend.
    pub backend: String,
    /// The volume's UUID, which a rename or move keeps.
    pub uuid: String,
}

impl VolumeId {
    /// Parses an identity; nothing for texts that this driver does not make.
    pub fn parse(text: &str) -> Option<VolumeId> {
        let (backend, uuid) = text.split_once('/')?;
        let uuid = Uuid::parse_hyphenated(uuid)?.to_string();
        (!backend.is_empty()).then(|| VolumeId { backend: backend.to_owned(), uuid })
    }

    /// Parses the identity in a call.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` when it is missing, `NOT_FOUND` when this driver makes no such identity.
    pub fn find(text: &str) -> Result<VolumeId> {
        require("volume_id", text)?;
        VolumeId::parse(text).ok_or_else(|| Fault::not_found(format!("volume {text:?} does not exist")))
    }

    /// Name of the export of the volume.
    pub fn export(&self) -> String {
        format!("csi-{}", self.uuid)
    }
}

impl fmt::Display for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.backend, self.uuid)
    }
}

/// Refuses a call without a required text.
///
/// # Errors
/// `INVALID_ARGUMENT` that names the field.
pub fn require(field: &str, text: &str) -> Result<()> {
    match text.is_empty() {
        true => Err(Fault::invalid(format!("{field} is missing"))),
        false => Ok(()),
    }
}

/// Identity of a node: its name, and the NQN of its NVMe host. The controller needs no other
/// knowledge of nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeId {
    /// Name of the node, for people.
    #[serde(rename = "n")]
    pub name: String,
    /// NQN of its host.
    #[serde(rename = "q")]
    pub nqn: String,
}

impl NodeId {
    /// Parses an identity; nothing for texts that no node of this driver has.
    pub fn parse(text: &str) -> Option<NodeId> {
        let node: NodeId = serde_json::from_str(text).ok()?;
        (text.len() <= MAX_NODE_ID && node.nqn.starts_with("nqn.")).then_some(node)
    }

    /// The text that the orchestrator keeps.
    ///
    /// # Errors
    /// When it is too long.
    pub fn text(&self) -> Result<String> {
        let text = serde_json::to_string(self).expect("plain data");
        match text.len() <= MAX_NODE_ID {
            true => Ok(text),
            false => Err(Fault::internal(format!(
                "node {}: its identity has {} bytes, at most {MAX_NODE_ID}: shorten --node-id",
                self.name,
                text.len()
            ))),
        }
    }
}

/// The daemon's name for a volume: the orchestrator's, if the daemon permits it, else one derived
/// from it. The label `csi.name` has the orchestrator's name in any case.
pub fn volume_name(name: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let begins = name.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    match begins && name.len() <= MAX_NAME && name.bytes().all(is_plain) {
        true => name.to_owned(),
        false => format!("csi-{}", &fingerprint(name)[..32]),
    }
}

/// Whether a text can be a zone: a value of a label of Kubernetes, and not empty.
pub fn is_zone(text: &str) -> bool {
    is_name(text, b"._-")
}

/// Whether a text has at most 63 letters, digits and bytes of `others`, and a letter or digit at
/// both ends.
pub fn is_name(text: &str, others: &[u8]) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || others.contains(&byte);
    let edges = [text.bytes().next(), text.bytes().last()];
    let has_edges = edges.iter().flatten().filter(|byte| byte.is_ascii_alphanumeric()).count() == 2;
    has_edges && text.len() <= MAX_NAME && text.bytes().all(is_inner)
}

/// SHA-256 of a text, in 64 hexadecimal digits.
pub fn fingerprint(text: &str) -> String {
    Sha256::digest(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A UUID made of a NQN, always the same one: that of a subsystem's namespace, or of a host. A
/// namespace does not have the volume's: hosts refuse two namespaces with one UUID, and the volume
/// may have other exports.
pub fn derived_uuid(nqn: &str) -> String {
    let digest = Sha256::digest(nqn.as_bytes());
    let mut bits = [0; 16];
    bits.copy_from_slice(&digest[..16]);
    Uuid::from_random(bits).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tonic::Code;

    const UUID: &str = "00112233-4455-6677-8899-aabbccddeeff";

    #[test]
    fn a_volume_id_has_a_backend_and_a_uuid() {
        let id = VolumeId::parse(&format!("rack1/{UUID}")).unwrap();
        assert_eq!((id.backend.as_str(), id.uuid.as_str()), ("rack1", UUID));
        assert_eq!(VolumeId::parse(&id.to_string()), Some(id));
        for other in ["", "x", "rack1/", "rack1/x", &format!("/{UUID}"), &format!("a/../{UUID}")] {
            assert_eq!(VolumeId::parse(other), None, "{other}");
        }
        assert_eq!(VolumeId::find("").unwrap_err().code, Code::InvalidArgument);
        assert_eq!(VolumeId::find("fake").unwrap_err().code, Code::NotFound);
    }

    #[test]
    fn a_node_id_is_read_as_it_was_written() {
        let node = NodeId { name: "worker-1".into(), nqn: "nqn.2014-08.org.example:w1".into() };
        assert_eq!(NodeId::parse(&node.text().unwrap()), Some(node));
        assert_eq!(NodeId::parse("some-fake-node-id"), None);
        assert_eq!(NodeId::parse(r#"{"n":"a","q":"no NQN"}"#), None);
        let long = NodeId { name: "w".repeat(300), nqn: "nqn.a".into() };
        assert!(long.text().unwrap_err().message.contains("--node-id"));
    }

    #[test]
    fn names_that_the_daemon_refuses_are_replaced() {
        assert_eq!(volume_name("pvc-1"), "pvc-1");
        for name in [&"n".repeat(64), "ä", "a/b", ".a", "-a"] {
            let replaced = volume_name(name);
            assert!(replaced.starts_with("csi-") && replaced.len() == 36, "{replaced}");
            assert_eq!(replaced, volume_name(name));
        }
    }

    #[test]
    fn a_namespace_has_one_uuid_for_each_subsystem() {
        assert_eq!(derived_uuid("nqn.a"), derived_uuid("nqn.a"));
        assert_ne!(derived_uuid("nqn.a"), derived_uuid("nqn.b"));
        assert!(Uuid::parse_hyphenated(&derived_uuid("nqn.a")).is_some());
    }

    #[test]
    fn a_zone_is_a_value_of_a_label() {
        assert!(is_zone("a") && is_zone("eu-1.a_b"));
        for text in ["", "-a", "a/", "ä", &"z".repeat(64)] {
            assert!(!is_zone(text), "{text}");
        }
    }
}
