//! Certificates and keys for tests: a test authority, and files as users have them.

use openssl::asn1::Asn1Time;
use openssl::bn::BigNum;
use openssl::hash::MessageDigest;
use openssl::nid::Nid;
use openssl::pkey::{PKey, Private};
use openssl::x509::extension::{BasicConstraints, SubjectAlternativeName};
use openssl::x509::{X509, X509Builder, X509NameBuilder};
use std::path::Path;

/// A certificate authority that signs other certificates.
pub struct Authority {
    key: PKey<Private>,
    certificate: X509,
}

impl Authority {
    /// Creates an authority with a new key.
    pub fn new() -> Authority {
        let key = PKey::from_ec_key(new_key()).expect("a key is a key");
        let mut builder = certificate("an authority", &key, None);
        builder.append_extension(BasicConstraints::new().critical().ca().build().unwrap()).unwrap();
        builder.sign(&key, MessageDigest::sha256()).unwrap();
        Authority { certificate: builder.build(), key }
    }

    /// Writes `ca-cert.pem` to `directory`.
    pub fn write(&self, directory: &Path) {
        std::fs::write(directory.join("ca-cert.pem"), self.certificate.to_pem().unwrap()).unwrap();
    }

    /// Writes `ROLE-cert.pem` and `ROLE-key.pem` to `directory`; `role` is `server` or `client`.
    /// `names` are host names; the certificate always includes 127.0.0.1 and ::1.
    pub fn vouch(&self, directory: &Path, role: &str, names: &[&str]) {
        let key = PKey::from_ec_key(new_key()).unwrap();
        let mut builder = certificate(role, &key, Some(&self.certificate));
        let mut alternatives = SubjectAlternativeName::new();
        for name in names {
            alternatives.dns(name);
        }
        alternatives.ip("127.0.0.1").ip("::1");
        let extension = alternatives.build(&builder.x509v3_context(Some(&self.certificate), None)).unwrap();
        builder.append_extension(extension).unwrap();
        builder.sign(&self.key, MessageDigest::sha256()).unwrap();
        let file = |what: &str| directory.join(format!("{role}-{what}.pem"));
        std::fs::write(file("cert"), builder.build().to_pem().unwrap()).unwrap();
        secrets::write(&file("key"), key.private_key_to_pem_pkcs8().unwrap()).unwrap();
    }
}

impl Default for Authority {
    fn default() -> Authority {
        Authority::new()
    }
}

/// Writes all files of both sides to `directory`, for a server named `localhost`.
pub fn write_all(directory: &Path) {
    let authority = Authority::new();
    authority.write(directory);
    authority.vouch(directory, "server", &["localhost"]);
    authority.vouch(directory, "client", &[]);
}

fn new_key() -> openssl::ec::EcKey<Private> {
    let group = openssl::ec::EcGroup::from_curve_name(Nid::X9_62_PRIME256V1).unwrap();
    openssl::ec::EcKey::generate(&group).unwrap()
}

fn certificate(name: &str, key: &PKey<Private>, issuer: Option<&X509>) -> X509Builder {
    let mut subject = X509NameBuilder::new().unwrap();
    subject.append_entry_by_text("CN", name).unwrap();
    let subject = subject.build();
    let mut serial = BigNum::new().unwrap();
    serial.rand(64, openssl::bn::MsbOption::ONE, false).unwrap();
    let mut builder = X509::builder().unwrap();
    builder.set_version(2).unwrap();
    builder.set_serial_number(&serial.to_asn1_integer().unwrap()).unwrap();
    builder.set_subject_name(&subject).unwrap();
    builder.set_issuer_name(issuer.map_or(&subject, |issuer| issuer.subject_name())).unwrap();
    builder.set_pubkey(key).unwrap();
    builder.set_not_before(&Asn1Time::from_unix(0).unwrap()).unwrap();
    builder.set_not_after(&Asn1Time::days_from_now(2).unwrap()).unwrap();
    builder
}
