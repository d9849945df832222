//! The hosts that may connect to an export.

use serde::{Deserialize, Serialize};
use std::fmt;
use utoipa::ToSchema;

/// Changes of the hosts that may connect to an export, made together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HostsChange {
    /// Hosts that may connect from now on. The first host of an export that any host may use ends
    /// the access of all others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub add: Vec<NewHost>,
    /// NQNs of hosts that may not connect any more; their secrets are deleted. The answer comes
    /// when their controllers are gone and no write of them is in flight. After the last host none
    /// may connect.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub remove: Vec<String>,
}

/// A host that may connect. A host that is listed already gets the given secrets and keeps the
/// others; its connections stay. The daemon does not show secrets.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewHost {
    /// NQN.
    pub nqn: String,
    /// Secret of the host, `DHHC-1:…`. The host must authenticate then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(format = Password, write_only)]
    pub dhchap: Option<String>,
    /// Secret of the controller for this host, `DHHC-1:…`. Hosts may then demand that the
    /// controller authenticates, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(format = Password, write_only)]
    pub dhchap_ctrl: Option<String>,
    /// Pre-shared key of TLS, `NVMeTLSkey-1:…`. The host must use TLS then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(format = Password, write_only)]
    pub tls_psk: Option<String>,
}

/// Without the secrets.
impl fmt::Debug for NewHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewHost").field("nqn", &self.nqn).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_output_shows_no_secret() {
        let secret = || Some("c0ffee".to_owned());
        let host =
            NewHost { nqn: "nqn.a".into(), dhchap: secret(), dhchap_ctrl: secret(), tls_psk: secret() };
        let shown = format!("{:?}", HostsChange { add: vec![host], remove: Vec::new() });
        assert!(shown.contains("nqn.a") && !shown.contains("c0ffee"), "{shown}");
    }
}
