//! Keys as long as the hash that they are bound to, for TLS 1.3: OpenSSL gets each as a session to
//! resume.
//!
//! Its callbacks for keys (`psk_server_callback`) bind every key to SHA-256. A session brings the
//! hash of its cipher suite. A server selects the suite before it looks for the key, so the
//! identities of a hello limit its suites first.
//!
//! Several keys may have one identity. [`Session`] tries one after the other.
//!
//! Source: RFC 8446, 4.2.11; the manual page of `SSL_CTX_set_psk_find_session_callback`.
//!
//! [`Session`]: crate::Session

#![allow(unsafe_code)]

use super::{Key, name, once};
use crate::Error;
use foreign_types::{ForeignType, ForeignTypeRef};
use openssl::error::ErrorStack;
use openssl::ex_data::Index;
use openssl::ssl::{ClientHelloResponse, Ssl, SslContext, SslContextBuilder, SslRef, SslSession};
use openssl_sys::{SSL, SSL_CTX, SSL_SESSION, SSL_client_hello_get0_ext, TLS1_3_VERSION};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uchar, c_uint, c_void};
use std::mem::ManuallyDrop;
use std::sync::OnceLock;
use std::{ptr, slice};

/// The extension `pre_shared_key`.
const PRE_SHARED_KEY: c_uint = 41;

/// A cipher of the library.
type Cipher = c_void;
/// A digest of the library.
type Digest = c_void;
/// Finds the session of an identity, or none. Returns zero on failure.
type FindSession = unsafe extern "C" fn(*mut SSL, *const c_uchar, usize, *mut *mut SSL_SESSION) -> c_int;
/// Returns the session to present, and its identity, which the library does not copy.
type UseSession = unsafe extern "C" fn(
    *mut SSL,
    *const Digest,
    *mut *const c_uchar,
    *mut usize,
    *mut *mut SSL_SESSION,
) -> c_int;

// Functions of OpenSSL 1.1.1 that the crate `openssl-sys` does not declare.
unsafe extern "C" {
    fn SSL_CTX_set_psk_find_session_callback(context: *mut SSL_CTX, callback: FindSession);
    fn SSL_CTX_set_psk_use_session_callback(context: *mut SSL_CTX, callback: UseSession);
    fn SSL_CIPHER_find(ssl: *mut SSL, id: *const c_uchar) -> *const Cipher;
    fn SSL_SESSION_new() -> *mut SSL_SESSION;
    fn SSL_SESSION_set1_master_key(session: *mut SSL_SESSION, key: *const c_uchar, len: usize) -> c_int;
    fn SSL_SESSION_set_cipher(session: *mut SSL_SESSION, cipher: *const Cipher) -> c_int;
    fn SSL_SESSION_set_protocol_version(session: *mut SSL_SESSION, version: c_int) -> c_int;
}

/// The hash of a key.
#[derive(Clone, Copy)]
struct Hash {
    /// The suites with this hash.
    suites: &'static str,
    /// The number of one of them.
    suite: [u8; 2],
}

const SHA256: Hash = Hash { suites: super::SUITES, suite: [0x13, 0x01] };
const SHA384: Hash = Hash { suites: "TLS_AES_256_GCM_SHA384", suite: [0x13, 0x02] };
/// Bytes of a key for SHA-384.
const SHA384_BYTES: usize = 48;

impl Key {
    fn hash(&self) -> Hash {
        if self.secret.len() == SHA384_BYTES { SHA384 } else { SHA256 }
    }
}

/// The keys of a context, by identity.
type Keys = BTreeMap<Box<[u8]>, Vec<Key>>;

/// Accepts clients that have one of the keys. Returns the most keys that one identity has.
pub(crate) fn accept(context: &mut SslContextBuilder, keys: Vec<Key>) -> Result<usize, Error> {
    context.set_ciphersuites(&[SHA384.suites, SHA256.suites].join(":"))?;
    let most = store(context, keys)?;
    context.set_client_hello_callback(|ssl, _| {
        let hash = offered(ssl).iter().find_map(|identity| find(ssl, identity)).map(Key::hash);
        if let Some(hash) = hash {
            ssl.set_ciphersuites(hash.suites)?;
        }
        Ok(ClientHelloResponse::SUCCESS)
    });
    // SAFETY: the context is valid, and the callback has the type of the library's.
    unsafe { SSL_CTX_set_psk_find_session_callback(context.as_ptr(), find_session) };
    Ok(most)
}

/// Presents one key to the server.
pub(crate) fn present(context: &mut SslContextBuilder, key: Key) -> Result<(), Error> {
    context.set_ciphersuites(key.hash().suites)?;
    store(context, vec![key])?;
    // SAFETY: as above.
    unsafe { SSL_CTX_set_psk_use_session_callback(context.as_ptr(), use_session) };
    Ok(())
}

/// Has a server's connection try the keys that an identity has from this number on.
pub(crate) fn skip(ssl: &mut Ssl, tried: usize) -> Result<(), ErrorStack> {
    ssl.set_ex_data(indices()?.tried, tried);
    Ok(())
}

fn store(context: &mut SslContextBuilder, keys: Vec<Key>) -> Result<usize, Error> {
    let mut by_identity = Keys::new();
    for key in keys {
        by_identity.entry(key.identity.as_bytes().into()).or_default().push(key);
    }
    let most = by_identity.values().map(Vec::len).max().unwrap_or(0);
    context.set_ex_data(indices()?.keys, by_identity);
    Ok(most)
}

/// The key of an identity that this connection tries.
fn find<'s>(ssl: &'s SslRef, identity: &[u8]) -> Option<&'s Key> {
    let indices = indices().ok()?;
    let tried = ssl.ex_data(indices.tried).copied().unwrap_or(0);
    let keys = ssl.ssl_context().ex_data(indices.keys)?.get(identity)?;
    keys.get(tried.min(keys.len() - 1))
}

/// Where contexts and connections keep what belongs to them.
#[derive(Clone, Copy)]
struct Indices {
    keys: Index<SslContext, Keys>,
    tried: Index<Ssl, usize>,
}

fn indices() -> Result<Indices, ErrorStack> {
    static INDICES: OnceLock<Indices> = OnceLock::new();
    once(&INDICES, || Ok(Indices { keys: SslContext::new_ex_index()?, tried: Ssl::new_ex_index()? }))
}

/// The identities that a client offers, while its hello is handled.
fn offered(ssl: &SslRef) -> Vec<&[u8]> {
    let (mut start, mut len) = (ptr::null(), 0);
    // SAFETY: the library calls back with a hello, and lends the content of the extension.
    let is_there =
        unsafe { SSL_client_hello_get0_ext(ssl.as_ptr(), PRE_SHARED_KEY, &mut start, &mut len) } == 1;
    if !is_there || start.is_null() {
        return Vec::new();
    }
    // SAFETY: as above; the hello outlives the borrow of the connection in its callback.
    identities(unsafe { slice::from_raw_parts(start, len) })
}

/// The identities of an extension `pre_shared_key`, up to the first that is not whole.
fn identities(extension: &[u8]) -> Vec<&[u8]> {
    fn split(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
        let (len, rest) = bytes.split_first_chunk::<2>()?;
        rest.split_at_checked(usize::from(u16::from_be_bytes(*len)))
    }
    let mut found = Vec::new();
    let mut rest = split(extension).map_or(&[][..], |(all, _)| all);
    // An age of 4 bytes follows each.
    while let Some((identity, after)) = split(rest) {
        found.push(identity);
        rest = after.get(4..).unwrap_or_default();
    }
    found
}

/// A session that stands for a key.
fn session(ssl: &SslRef, key: &Key) -> Option<SslSession> {
    // SAFETY: the pointers are valid during each call, and the library copies the key.
    unsafe {
        let made = SSL_SESSION_new();
        if made.is_null() {
            return None;
        }
        let session = SslSession::from_ptr(made);
        let cipher = SSL_CIPHER_find(ssl.as_ptr(), key.hash().suite.as_ptr());
        let is_whole = !cipher.is_null()
            && SSL_SESSION_set1_master_key(made, key.secret.as_ptr(), key.secret.len()) == 1
            && SSL_SESSION_set_cipher(made, cipher) == 1
            && SSL_SESSION_set_protocol_version(made, TLS1_3_VERSION) == 1;
        is_whole.then_some(session)
    }
}

/// Passes a session on to the library.
fn into_raw(session: Option<SslSession>) -> *mut SSL_SESSION {
    session.map_or(ptr::null_mut(), |session| ManuallyDrop::new(session).as_ptr())
}

/// # Safety
/// The library calls this with valid pointers.
unsafe extern "C" fn find_session(
    ssl: *mut SSL,
    identity: *const c_uchar,
    len: usize,
    found: *mut *mut SSL_SESSION,
) -> c_int {
    // SAFETY: by contract; an identity has at least one byte.
    let (ssl, identity) = unsafe { (SslRef::from_ptr_mut(ssl), slice::from_raw_parts(identity, len)) };
    let key = find(ssl, identity);
    let made = key.and_then(|key| session(ssl, key));
    let is_done = made.is_some() == key.is_some();
    let known = key.map(|key| key.identity.clone());
    // SAFETY: by contract.
    unsafe { *found = into_raw(made) };
    if let Some(known) = known {
        name(ssl, &known);
    }
    c_int::from(is_done)
}

/// # Safety
/// As [`find_session`].
unsafe extern "C" fn use_session(
    ssl: *mut SSL,
    _digest: *const Digest,
    identity: *mut *const c_uchar,
    len: *mut usize,
    used: *mut *mut SSL_SESSION,
) -> c_int {
    // SAFETY: by contract.
    let ssl = unsafe { SslRef::from_ptr_mut(ssl) };
    let keys = indices().ok().and_then(|indices| ssl.ssl_context().ex_data(indices.keys));
    let Some(key) = keys.and_then(|keys| keys.values().flatten().next()) else { return 0 };
    let made = session(ssl, key);
    let is_done = made.is_some();
    // SAFETY: by contract; the identity lives as long as the context, which the connection keeps.
    unsafe {
        *identity = key.identity.as_ptr();
        *len = key.identity.len();
        *used = into_raw(made);
    }
    c_int::from(is_done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_end_where_the_extension_does() {
        let whole = b"\0\x11\0\x03abc\0\0\0\0\0\x02de\xff\xff\xff\xff\0\x21binders";
        assert_eq!(identities(whole), [&b"abc"[..], b"de"]);
        for len in 0..whole.len() {
            let some = identities(&whole[..len]);
            // The list says its length, so that a part of it is none.
            assert_eq!(some.len(), if len < 19 { 0 } else { 2 }, "{len}");
        }
        // A list that is shorter than its entries.
        assert_eq!(identities(b"\0\x0a\0\x03abc\0\0\0\0\0\x02de"), [b"abc"]);
        assert_eq!(identities(b"\0\x05\0\x03abc"), [b"abc"]);
        assert_eq!(identities(b"\0\x05\0\x04abc"), [&[][..]; 0]);
    }
}
