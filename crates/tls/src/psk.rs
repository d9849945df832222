//! Keys that both sides share beforehand: lines `identity:key in hex`, as GnuTLS's `psktool` writes
//! and nbdkit, libnbd and QEMU read them; and keys of the caller ([`bound`]).

pub(crate) mod bound;

use crate::Error;
use crate::certificates::MAX_FILE;
use openssl::error::ErrorStack;
use openssl::ex_data::Index;
use openssl::ssl::{Ssl, SslContextBuilder, SslRef};
use std::path::Path;
use std::sync::OnceLock;
use zeroize::Zeroizing;

/// Longest identity of a key, in bytes: every TLS library accepts it.
const MAX_IDENTITY: usize = 128;
/// Longest key, in bytes: likewise.
const MAX_KEY: usize = 64;
/// Shortest key, in bytes: shorter keys can be found by trial.
const MIN_KEY: usize = 16;
/// The suites whose hash is the one that keys without a hash of their own are bound to: SHA-256
/// (RFC 8446, 4.2.11).
const SUITES: &str = "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256";
/// Suites of TLS 1.2: only those whose sessions stay secret when the key leaks.
const OLD_SUITES: &str = "ECDHE-PSK-CHACHA20-POLY1305:ECDHE-PSK-AES128-CBC-SHA256";

/// A key and its name.
pub(crate) struct Key {
    pub(crate) identity: String,
    pub(crate) secret: Zeroizing<Vec<u8>>,
}

/// Reads a file of keys.
pub(crate) fn read_keys(path: &Path) -> Result<Vec<Key>, Error> {
    let text = secrets::read_text(path, MAX_FILE)?;
    let mut keys: Vec<Key> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        let fault = |fault: &str| Error::content(path, format!("line {number}: {fault}"));
        let key = parse(line).map_err(|what| fault(&what))?;
        if keys.iter().any(|other| other.identity == key.identity) {
            return Err(fault("an earlier line has the same identity"));
        }
        keys.push(key);
    }
    if keys.is_empty() {
        return Err(Error::content(path, "holds no key: want lines of identity:hexadecimal key"));
    }
    Ok(keys)
}

/// An error quotes no part of the line: in a file of another kind, any part may be a secret.
fn parse(line: &str) -> Result<Key, String> {
    let (identity, hex) = line.trim_end().rsplit_once(':').ok_or("want identity:hexadecimal key")?;
    if identity.is_empty() || identity.len() > MAX_IDENTITY || identity.contains('\0') {
        return Err(format!("an identity of {} bytes: want 1 to {MAX_IDENTITY}", identity.len()));
    }
    let secret = from_hex(hex).ok_or("the key is not hexadecimal")?;
    if !(MIN_KEY..=MAX_KEY).contains(&secret.len()) {
        return Err(format!("a key of {} bytes: want {MIN_KEY} to {MAX_KEY}", secret.len()));
    }
    Ok(Key { identity: identity.into(), secret })
}

fn from_hex(hex: &str) -> Option<Zeroizing<Vec<u8>>> {
    let digit = |byte: &u8| char::from(*byte).to_digit(16).map(|digit| digit as u8);
    let mut bytes = Zeroizing::new(Vec::with_capacity(hex.len() / 2));
    let (pairs, rest) = hex.as_bytes().as_chunks::<2>();
    for [high, low] in pairs {
        bytes.push(digit(high)? << 4 | digit(low)?);
    }
    rest.is_empty().then_some(bytes)
}

/// Accepts clients that have one of the keys.
pub(crate) fn accept(context: &mut SslContextBuilder, keys: Vec<Key>) -> Result<(), Error> {
    suites(context)?;
    context.set_psk_server_callback(move |ssl, identity, to| {
        let found = keys.iter().find(|key| Some(key.identity.as_bytes()) == identity);
        // Zero bytes: no key has this identity, and the handshake fails.
        let Some(key) = found else { return Ok(0) };
        name(ssl, &key.identity);
        Ok(put(&key.secret, to))
    });
    Ok(())
}

/// Notes the identity of the peer's key. Without memory for that, the peer has none.
fn name(ssl: &mut SslRef, identity: &str) {
    if let Ok(named) = index() {
        ssl.set_ex_data(named, identity.into());
    }
}

/// Returns the identity of the peer's key, once the handshake is over.
pub(crate) fn identity(ssl: &SslRef) -> Option<&str> {
    ssl.ex_data(index().ok()?).map(|identity| &**identity)
}

/// Returns the index under which sessions store the identity.
fn index() -> Result<Index<Ssl, Box<str>>, ErrorStack> {
    static INDEX: OnceLock<Index<Ssl, Box<str>>> = OnceLock::new();
    once(&INDEX, Ssl::new_ex_index)
}

/// Returns what is in `place`, and makes it first if there is nothing. Two concurrent calls may
/// make two, of which one is used.
fn once<T: Copy>(place: &OnceLock<T>, make: impl FnOnce() -> Result<T, ErrorStack>) -> Result<T, ErrorStack> {
    match place.get() {
        Some(made) => Ok(*made),
        None => make().map(|made| *place.get_or_init(|| made)),
    }
}

/// Presents one key to the server. Its identity comes from a file, which bounds it.
pub(crate) fn present(context: &mut SslContextBuilder, key: Key) -> Result<(), Error> {
    suites(context)?;
    context.set_psk_client_callback(move |_, _, identity, secret| {
        // Leaves room for the zero byte after the identity.
        if key.identity.len() >= identity.len() {
            return Ok(0);
        }
        let len = put(key.identity.as_bytes(), identity);
        identity[len] = 0;
        Ok(put(&key.secret, secret))
    });
    Ok(())
}

fn suites(context: &mut SslContextBuilder) -> Result<(), Error> {
    context.set_ciphersuites(SUITES)?;
    Ok(context.set_cipher_list(OLD_SUITES)?)
}

/// Returns the number of bytes copied: zero if they do not fit.
fn put(bytes: &[u8], to: &mut [u8]) -> usize {
    match to.get_mut(..bytes.len()) {
        Some(place) => {
            place.copy_from_slice(bytes);
            bytes.len()
        }
        None => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<Key>, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        read_keys(file.path()).map_err(|error| {
            let text = error.to_string();
            assert!(text.starts_with(file.path().to_str().unwrap()), "{text}");
            text
        })
    }

    #[test]
    fn each_line_is_a_name_and_a_key() {
        let keys =
            read(&format!("# ours\nalice:{}\n\nbob:b:{}\n", "0aF1".repeat(8), "00".repeat(64))).unwrap();
        assert_eq!(keys.len(), 2);
        assert_eq!((keys[0].identity.as_str(), &keys[0].secret[..2]), ("alice", &[0x0a, 0xf1][..]));
        assert_eq!((keys[1].identity.as_str(), keys[1].secret.len()), ("bob:b", 64));
    }

    #[test]
    fn a_line_that_is_no_key_is_named_and_not_quoted() {
        let secret = "5e".repeat(16);
        for (text, said) in [
            (String::new(), "holds no key"),
            ("alice".into(), "line 1: want identity"),
            (format!(":{secret}"), "an identity of 0 bytes"),
            (format!("{}:{secret}", "x".repeat(129)), "an identity of 129 bytes"),
            (format!("a:{secret}\na:{secret}"), "line 2: an earlier line has the same identity"),
            (format!("a:{secret}5"), "not hexadecimal"),
            (format!("a:{secret}zz"), "not hexadecimal"),
            // A line of /etc/shadow.
            (format!("root:$y$j9T${secret}:19000:0:99999:7:::"), "line 1: a key of 0 bytes"),
            (format!("{secret}:x"), "line 1: the key is not hexadecimal"),
            (format!("a:{secret}ää"), "not hexadecimal"),
            ("a:5e5e".into(), "a key of 2 bytes"),
            (format!("a:{}", "5e".repeat(65)), "a key of 65 bytes"),
        ] {
            let error = read(&text).err().expect(&text);
            assert!(error.contains(said), "{text}: {error}");
            assert!(!error.contains("5e5e"), "{error}");
        }
    }
}
