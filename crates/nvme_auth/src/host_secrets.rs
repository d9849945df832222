//! The secrets of one host as text, as a management interface takes them and a file keeps them.

use crate::keys::{Fault, HostKeys};
use crate::tls_key::{TlsKey, TlsKeyError};
use nvme::fabrics::{Nqn, NqnError};
use serde::{Deserialize, Serialize};
use std::fmt;
use zeroize::Zeroizing;

/// The text of a secret. Debug output and messages do not show it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub struct SecretText(Zeroizing<String>);

impl SecretText {
    /// The text itself.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl From<String> for SecretText {
    fn from(text: String) -> SecretText {
        SecretText(Zeroizing::new(text))
    }
}

impl From<SecretText> for String {
    fn from(SecretText(text): SecretText) -> String {
        text.to_string()
    }
}

impl fmt::Debug for SecretText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretText(…)")
    }
}

/// A host and its secrets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostSecrets {
    /// The host's NQN.
    pub nqn: String,
    /// Proves the identity of the host (`DHHC-1:…`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dhchap: Option<SecretText>,
    /// Proves the identity of the controller to a host that requires that (`DHHC-1:…`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dhchap_ctrl: Option<SecretText>,
    /// The pre-shared key of TLS (`NVMeTLSkey-1:…`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls_psk: Option<SecretText>,
}

/// Why secrets of a host are invalid. Messages do not repeat a secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SecretsError {
    /// The name of the host is invalid.
    #[error("{0:?}: {1}")]
    Name(String, NqnError),
    /// A secret for authentication is invalid.
    #[error("{0}: {1}")]
    Auth(String, Fault),
    /// There is a secret of the controller, but none of the host.
    #[error("{0}: the controller's secret (dhchap_ctrl) takes a secret of the host (dhchap)")]
    OnlyController(String),
    /// The key of TLS is invalid.
    #[error("{0}: the TLS key: {1}")]
    Tls(String, TlsKeyError),
}

impl HostSecrets {
    /// Whether there is no secret.
    pub fn is_empty(&self) -> bool {
        self.dhchap.is_none() && self.dhchap_ctrl.is_none() && self.tls_psk.is_none()
    }

    /// The host, its secrets for authentication, and its key for TLS.
    ///
    /// # Errors
    /// If the name or a secret is invalid.
    pub fn parse(&self) -> Result<(Nqn, Option<HostKeys>, Option<TlsKey>), SecretsError> {
        let nqn = &self.nqn;
        let host = Nqn::new(nqn).map_err(|error| SecretsError::Name(nqn.clone(), error))?;
        let controller = self.dhchap_ctrl.as_ref().map(SecretText::reveal);
        let keys = match &self.dhchap {
            Some(secret) => HostKeys::parse(secret.reveal(), controller).map(Some),
            None if controller.is_some() => return Err(SecretsError::OnlyController(nqn.clone())),
            None => Ok(None),
        };
        let keys = keys.map_err(|fault| SecretsError::Auth(nqn.clone(), fault))?;
        let tls_key = self.tls_psk.as_ref().map(|text| TlsKey::parse(text.reveal())).transpose();
        Ok((host, keys, tls_key.map_err(|error| SecretsError::Tls(nqn.clone(), error))?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
    const TLS: &str = "NVMeTLSkey-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";

    fn secrets(text: &str) -> HostSecrets {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn a_host_has_any_of_the_secrets_and_debug_output_shows_none() {
        let text = format!(r#"{{"nqn":"nqn.a","dhchap":"{ONE}","tls_psk":"{TLS}"}}"#);
        let all = secrets(&text);
        let (host, keys, tls_key) = all.parse().unwrap();
        assert!(host.as_str() == "nqn.a" && keys.unwrap().controller.is_none() && tls_key.is_some());
        assert!(!all.is_empty() && !format!("{all:?}").contains("AAEC"));
        assert_eq!(serde_json::to_string(&all).unwrap(), text);
        assert!(secrets(r#"{"nqn":"nqn.a"}"#).is_empty());
    }

    #[test]
    fn an_invalid_secret_is_named_and_not_repeated() {
        for (fields, fault) in [
            (format!(r#""dhchap_ctrl":"{ONE}""#), "nqn.a: the controller's secret (dhchap_ctrl) takes a"),
            (format!(r#""dhchap":"{TLS}""#), "nqn.a: the host's secret: a secret looks like"),
            (
                format!(r#""dhchap":"{ONE}","dhchap_ctrl":"{ONE}""#),
                "nqn.a: host and controller have the same",
            ),
            (format!(r#""tls_psk":"{ONE}""#), "nqn.a: the TLS key: a key looks like"),
        ] {
            let error = secrets(&format!(r#"{{"nqn":"nqn.a",{fields}}}"#)).parse().unwrap_err().to_string();
            assert!(error.starts_with(fault) && !error.contains("AAEC"), "{error}");
        }
        let error = secrets(r#"{"nqn":"host"}"#).parse().unwrap_err().to_string();
        assert!(error.starts_with("\"host\": "), "{error}");
    }
}
