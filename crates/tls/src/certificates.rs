//! Certificates and keys as files: read with limits, and refused with the file's name.
//!
//! Source: the names that nbdkit(1), qemu(1) and libnbd(3) use in a directory of certificates.

use crate::Error;
use crate::error::reasons;
use openssl::pkey::{PKey, Private};
use openssl::ssl::SslContextBuilder;
use openssl::x509::X509;
use openssl::x509::store::X509StoreBuilder;
use std::io;
use std::path::{Path, PathBuf};

/// File name of the trusted authorities' certificates.
pub(crate) const AUTHORITY: &str = "ca-cert.pem";
/// Largest size in bytes of a file of certificates or keys.
pub(crate) const MAX_FILE: u64 = 4 << 20;

/// Returns whether the file exists, or fails with another error than `NotFound` when it is read.
pub(crate) fn exists(path: &Path) -> bool {
    !matches!(std::fs::metadata(path), Err(error) if error.kind() == io::ErrorKind::NotFound)
}

/// Sets the own certificate, its chain from the same file, and its key.
pub(crate) fn identify(
    context: &mut SslContextBuilder,
    certificate: &Path,
    key_path: &Path,
) -> Result<(), Error> {
    let mut chain = parse(certificate)?.into_iter();
    let own = chain.next().ok_or_else(|| Error::content(certificate, "holds no certificate"))?;
    let key = private_key(key_path)?;
    let is_pair = own.public_key().is_ok_and(|public| public.public_eq(&key));
    if !is_pair {
        let fault = format!("is not the key of the certificate in {}", certificate.display());
        return Err(Error::content(key_path, fault));
    }
    let refused = |stack| Error::content(certificate, reasons(&stack));
    context.set_certificate(&own).map_err(refused)?;
    context.set_private_key(&key).map_err(|stack| Error::content(key_path, reasons(&stack)))?;
    chain.try_for_each(|above| context.add_extra_chain_cert(above)).map_err(refused)
}

/// Trusts exactly the peers that the authorities in a file vouch for.
pub(crate) fn trust(context: &mut SslContextBuilder, path: &Path) -> Result<(), Error> {
    let authorities = parse(path)?;
    if authorities.is_empty() {
        return Err(Error::content(path, "holds no certificate"));
    }
    let mut store = X509StoreBuilder::new()?;
    for authority in authorities {
        context.add_client_ca(&authority)?;
        store.add_cert(authority).map_err(|stack| Error::content(path, reasons(&stack)))?;
    }
    context.set_cert_store(store.build());
    Ok(())
}

/// Returns the path of the file `name` in `directory`.
pub(crate) fn within(directory: &Path, name: &str) -> PathBuf {
    directory.join(name)
}

fn parse(path: &Path) -> Result<Vec<X509>, Error> {
    X509::stack_from_pem(&secrets::read_public(path, MAX_FILE)?)
        .map_err(|stack| Error::content(path, format!("no PEM certificate: {}", reasons(&stack))))
}

fn private_key(path: &Path) -> Result<PKey<Private>, Error> {
    let pem = secrets::read(path, MAX_FILE)?;
    let mut is_locked = false;
    // Without a callback the library would prompt for a password on the terminal.
    let key = PKey::private_key_from_pem_callback(&pem, |_| {
        is_locked = true;
        Ok(0)
    });
    key.map_err(|stack| match is_locked {
        true => Error::content(path, "private key is locked with a password"),
        false => Error::content(path, format!("no PEM private key: {}", reasons(&stack))),
    })
}
