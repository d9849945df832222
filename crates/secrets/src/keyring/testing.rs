//! Keyrings for tests, which leave none behind.

#![allow(unsafe_code)]

use super::{Facts, KeyringFault, Possessed, calls};
use std::ffi::{CString, c_long};
use std::sync::atomic::{AtomicU32, Ordering};

/// A keyring in that of the user, with a name of its own, until it is dropped.
pub struct TestKeyring {
    /// Its name.
    pub name: String,
    /// Its serial number.
    pub serial: i32,
}

impl TestKeyring {
    /// An empty keyring. `None` if the system refuses keyrings, as containers often do. The reason
    /// is printed, and the test ends.
    pub fn new() -> Option<TestKeyring> {
        if let Err(error) = calls::special(libc::KEY_SPEC_USER_KEYRING) {
            eprintln!("the system refuses keyrings: {error}");
            return None;
        }
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("freestone-test-{}-{number}", std::process::id());
        let serial = add("keyring", &name, &[], libc::KEY_SPEC_USER_KEYRING);
        Some(TestKeyring { name, serial })
    }

    /// Adds a key, or replaces the one with this description, and returns its serial number.
    pub fn add(&self, description: &str, content: &[u8]) -> i32 {
        add("user", description, content, self.serial)
    }

    /// Revokes a key.
    pub fn revoke(&self, description: &str) {
        control(libc::KEYCTL_REVOKE, self.key(description), 0);
    }

    /// Removes a key.
    pub fn remove(&self, description: &str) {
        control(libc::KEYCTL_UNLINK, self.key(description), self.serial);
    }

    /// Removes all keys.
    pub fn clear(&self) {
        control(libc::KEYCTL_CLEAR, self.serial, 0);
    }

    /// Sets the permissions of a key, or of the keyring.
    pub fn permit(serial: i32, permissions: u32) {
        control(libc::KEYCTL_SETPERM, serial, permissions as i32);
    }

    fn key(&self, description: &str) -> i32 {
        let is_it = |serial: &i32| Facts::of(*serial).is_ok_and(|facts| facts.description == description);
        let keys = Possessed::new(self.serial).keys().map_err(|fault: KeyringFault| fault.to_string());
        keys.unwrap().into_iter().find(is_it).expect("the key exists")
    }
}

impl Drop for TestKeyring {
    fn drop(&mut self) {
        let own = calls::special(libc::KEY_SPEC_USER_KEYRING).unwrap();
        control(libc::KEYCTL_UNLINK, self.serial, own);
    }
}

/// Gives the thread a session keyring of its own.
pub fn join_new_session() {
    control(libc::KEYCTL_JOIN_SESSION_KEYRING, 0, 0);
}

fn add(kind: &str, description: &str, content: &[u8], keyring: i32) -> i32 {
    let (kind, description) = (CString::new(kind).unwrap(), CString::new(description).unwrap());
    // SAFETY: the texts end with a zero byte, and the content has its length.
    let serial = unsafe {
        let (kind, description) = (kind.as_ptr(), description.as_ptr());
        let (bytes, len) = (content.as_ptr(), content.len());
        libc::syscall(libc::SYS_add_key, kind, description, bytes, len, c_long::from(keyring))
    };
    assert!(serial > 0, "add_key: {}", std::io::Error::last_os_error());
    serial as i32
}

fn control(operation: u32, first: i32, second: i32) {
    let [operation, first, second] = [i64::from(operation), first.into(), second.into()];
    // SAFETY: the operations take numbers only.
    let result = unsafe { libc::syscall(libc::SYS_keyctl, operation, first, second) };
    assert!(result >= 0, "keyctl {operation}: {}", std::io::Error::last_os_error());
}
