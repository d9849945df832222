//! Keys in a keyring of the kernel.
//!
//! ```text
//!   name ── /proc/keys ──► serial number ── list ──► keys ── describe ──► wanted ── read ──► content
//! ```
//!
//! Each look-up begins with the name, so a keyring that was replaced is found, and a key that was
//! added, revoked or has expired counts at once. A look-up takes two system calls a key at most,
//! and none of them waits for another process.
//!
//! As for files, other users must not have access. Keyring and keys belong to root or to the user
//! of this process, and neither their group nor others may change them.
//!
//! During a look-up, the keyring is linked to the keyring of the thread. By default only processes
//! that possess a key may read it, and a service has a session keyring of its own.
//!
//! Source: keyrings(7), keyctl(2), proc_keys(5).

mod calls;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use zeroize::Zeroizing;

/// Most keys of a keyring.
pub const MAX_KEYS: usize = 4096;
/// Longest key, in bytes.
pub const MAX_KEY_BYTES: usize = 256;
/// Limit of bytes of the list of keys that the process may view.
const MAX_LIST: u64 = 4 << 20;
/// Bytes of a serial number.
const SERIAL_BYTES: usize = size_of::<i32>();
/// Permission bits that a keyring must not have: its group and others may neither write it nor
/// change its permissions.
const REFUSED_BITS: u32 = 0x2424;
/// Those that a key must not have: others may not read it, either.
const REFUSED_KEY_BITS: u32 = REFUSED_BITS | 0x02;

/// The keyring with a name, such as `.nvme`; with a serial number; or `@u` or `@s`, that of the
/// user or of the session.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Keyring(String);

/// A key of a keyring that matches a request.
pub struct KeyringKey {
    /// Its description.
    pub description: String,
    /// Its content, or the reason why it cannot be used.
    pub content: Result<Zeroizing<Vec<u8>>, KeyFault>,
}

/// Why a keyring cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("keyring {keyring}: {fault}")]
pub struct Error {
    /// The keyring, as it was named.
    pub keyring: String,
    /// The reason.
    #[source]
    pub fault: KeyringFault,
}

/// Why a keyring cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyringFault {
    /// No keyring has this name.
    #[error("no keyring of root or of this user has this name")]
    Missing,
    /// The name is not unique.
    #[error("{0} keyrings have this name: want the serial number of one")]
    Several(usize),
    /// The text names no keyring.
    #[error("want the name or the serial number of a keyring, @u or @s")]
    Form,
    /// The serial number is that of a key.
    #[error("a key of the type {0}: want a keyring")]
    NotKeyring(String),
    /// Another user owns it.
    #[error("user {0} owns it: want root or the user of this process")]
    Owner(u32),
    /// Other users may change it.
    #[error("permissions {0:08x}: other users may change it")]
    Exposed(u32),
    /// It has too many keys.
    #[error("{0} keys: want at most {MAX_KEYS}")]
    TooMany(usize),
    /// The system refuses access.
    #[error("{0}")]
    System(#[source] io::Error),
}

/// Why a key cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyFault {
    /// Another user owns it.
    #[error("user {0} owns it: want root or the user of this process")]
    Owner(u32),
    /// Other users have access.
    #[error("permissions {0:08x}: other users have access")]
    Exposed(u32),
    /// It is too long.
    #[error("{0} bytes: want at most {MAX_KEY_BYTES}")]
    TooLong(usize),
    /// The system refuses access; it was revoked, for example, or has expired.
    #[error("{0}")]
    System(#[source] io::Error),
}

/// Type, owner, permissions and description of a key.
struct Facts {
    kind: String,
    owner: u32,
    permissions: u32,
    description: String,
}

impl Facts {
    fn of(serial: i32) -> io::Result<Facts> {
        let text = calls::describe(serial)?;
        let mut fields = text.splitn(5, ';');
        let mut field = || fields.next().ok_or(io::ErrorKind::InvalidData);
        let (kind, owner, _, permissions) = (field()?, field()?, field()?, field()?);
        Ok(Facts {
            kind: kind.to_owned(),
            owner: owner.parse().map_err(|_| io::ErrorKind::InvalidData)?,
            permissions: u32::from_str_radix(permissions, 16).map_err(|_| io::ErrorKind::InvalidData)?,
            description: field()?.to_owned(),
        })
    }
}

/// A keyring that the thread possesses until this is dropped.
struct Possessed {
    serial: i32,
    linked: Vec<i32>,
}

impl Possessed {
    /// Keyrings of the user are possessed with the user's keyring. Links that fail are no error:
    /// the permissions of keyring and keys may suffice without possession.
    fn new(serial: i32) -> Possessed {
        let own = calls::special(libc::KEY_SPEC_USER_KEYRING).ok();
        let wanted = own.into_iter().chain([serial]);
        let linked = wanted.filter(|serial| calls::link(*serial).is_ok()).collect();
        Possessed { serial, linked }
    }

    fn keys(&self) -> Result<Vec<i32>, KeyringFault> {
        let (bytes, len) = calls::read(self.serial, MAX_KEYS * SERIAL_BYTES).map_err(KeyringFault::System)?;
        if len > MAX_KEYS * SERIAL_BYTES {
            return Err(KeyringFault::TooMany(len / SERIAL_BYTES));
        }
        Ok(bytes.as_chunks().0.iter().map(|serial| i32::from_ne_bytes(*serial)).collect())
    }

    /// The keys that can be described, and may be read by their type.
    fn described(&self) -> Result<Vec<(i32, Facts)>, KeyringFault> {
        let described = |serial: i32| Some((serial, Facts::of(serial).ok()?));
        let keys = self.keys()?.into_iter().filter_map(described);
        Ok(keys.filter(|(_, facts)| matches!(&*facts.kind, "psk" | "user")).collect())
    }
}

impl Drop for Possessed {
    fn drop(&mut self) {
        for serial in self.linked.drain(..) {
            // The link may be gone already, with its keyring.
            let _ = calls::unlink(serial);
        }
    }
}

impl Keyring {
    /// The keyring that a text names. It need not exist yet.
    ///
    /// # Errors
    /// When the text names no keyring.
    pub fn new(text: &str) -> Result<Keyring, Error> {
        let is_special = matches!(text, "@u" | "@s");
        let is_wrong = text.is_empty() || text.starts_with('@') && !is_special;
        if is_wrong || text.chars().any(char::is_control) {
            return Err(Error { keyring: format!("{text:?}"), fault: KeyringFault::Form });
        }
        Ok(Keyring(text.to_owned()))
    }

    /// Checks that the keyring exists, and that its keys may be listed.
    ///
    /// # Errors
    /// When it cannot be used.
    pub fn check(&self) -> Result<(), Error> {
        let check = || Possessed::new(self.serial()?).keys();
        check().map(drop).map_err(|fault| self.error(fault))
    }

    /// The descriptions of its keys. Those of subordinate keyrings do not count.
    ///
    /// # Errors
    /// When the keyring cannot be used.
    pub fn descriptions(&self) -> Result<Vec<String>, Error> {
        let find = || {
            let found = Possessed::new(self.serial()?);
            Ok(found.described()?.into_iter().map(|(_, facts)| facts.description).collect())
        };
        find().map_err(|fault| self.error(fault))
    }

    /// The keys with the wanted descriptions, those of the type `psk` first.
    ///
    /// # Errors
    /// When the keyring cannot be used.
    pub fn keys(&self, wanted: impl Fn(&str) -> bool) -> Result<Vec<KeyringKey>, Error> {
        let find = || {
            let found = Possessed::new(self.serial()?);
            let mut keys = found.described()?;
            keys.retain(|(_, facts)| wanted(&facts.description));
            keys.sort_by(|(_, a), (_, b)| (&a.kind, &a.description).cmp(&(&b.kind, &b.description)));
            let key = |(serial, facts)| {
                let content = content(serial, &facts);
                KeyringKey { description: facts.description, content }
            };
            Ok(keys.into_iter().map(key).collect())
        };
        find().map_err(|fault| self.error(fault))
    }

    fn error(&self, fault: KeyringFault) -> Error {
        Error { keyring: self.0.clone(), fault }
    }

    /// The serial number at present, if other users may not change the keyring.
    fn serial(&self) -> Result<i32, KeyringFault> {
        let number = || self.0.parse().ok().filter(|serial: &i32| *serial > 0);
        let serial = match &*self.0 {
            "@u" => calls::special(libc::KEY_SPEC_USER_KEYRING).map_err(KeyringFault::System)?,
            "@s" => calls::special(libc::KEY_SPEC_SESSION_KEYRING).map_err(KeyringFault::System)?,
            name => match number() {
                Some(serial) => serial,
                None => only(listed(name).map_err(KeyringFault::System)?)?,
            },
        };
        let facts = Facts::of(serial).map_err(KeyringFault::System)?;
        match facts {
            Facts { kind, .. } if kind != "keyring" => Err(KeyringFault::NotKeyring(kind)),
            Facts { owner, .. } if !is_trusted(owner) => Err(KeyringFault::Owner(owner)),
            Facts { permissions, .. } if permissions & REFUSED_BITS != 0 => {
                Err(KeyringFault::Exposed(permissions))
            }
            _ => Ok(serial),
        }
    }
}

impl fmt::Display for Keyring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The content of a key, if other users have no access.
fn content(serial: i32, facts: &Facts) -> Result<Zeroizing<Vec<u8>>, KeyFault> {
    if !is_trusted(facts.owner) {
        return Err(KeyFault::Owner(facts.owner));
    }
    if facts.permissions & REFUSED_KEY_BITS != 0 {
        return Err(KeyFault::Exposed(facts.permissions));
    }
    match calls::read(serial, MAX_KEY_BYTES).map_err(KeyFault::System)? {
        (_, len) if len > MAX_KEY_BYTES => Err(KeyFault::TooLong(len)),
        (content, _) => Ok(content),
    }
}

/// Whether a user may own keys: root, or the user of this process.
fn is_trusted(owner: u32) -> bool {
    owner == 0 || owner == calls::user()
}

/// The only keyring of a list. Of several, those that can be reached count: a keyring that was
/// removed stays in the list for a moment.
fn only(mut serials: Vec<i32>) -> Result<i32, KeyringFault> {
    if serials.len() > 1 {
        serials.retain(|serial| Possessed::new(*serial).keys().is_ok());
    }
    match serials[..] {
        [] => Err(KeyringFault::Missing),
        [serial] => Ok(serial),
        _ => Err(KeyringFault::Several(serials.len())),
    }
}

/// The keyrings with a name among the keys that the process may view.
fn listed(name: &str) -> io::Result<Vec<i32>> {
    let mut text = String::new();
    File::open("/proc/keys")?.take(MAX_LIST).read_to_string(&mut text)?;
    Ok(text.lines().filter_map(|line| keyring_of(line, name)).collect())
}

/// The serial number in a line of `/proc/keys`, if it is that of a usable keyring with this name
/// and a trusted owner. Every user may make a keyring of any name that does not begin with a dot.
fn keyring_of(line: &str, name: &str) -> Option<i32> {
    let mut rest = line;
    let mut fields = [""; 8];
    for field in &mut fields {
        (*field, rest) = rest.trim_start().split_once(' ')?;
    }
    let [serial, flags, _, _, _, owner, _, kind] = fields;
    // Of the text that follows a description, `: ` begins the last part.
    let (description, _) = rest.trim_start().rsplit_once(": ")?;
    let is_usable = flags.starts_with('I') && !flags.contains(['R', 'D', 'i']);
    let is_it = is_usable && kind == "keyring" && description == name;
    let serial = i32::from_str_radix(serial, 16).ok()?;
    (is_it && is_trusted(owner.parse().ok()?)).then_some(serial)
}

#[cfg(test)]
mod tests {
    use super::testing::TestKeyring;
    use super::*;

    fn found(keyring: &Keyring) -> Vec<(String, Vec<u8>)> {
        let keys = keyring.keys(|description| description.starts_with("wanted")).unwrap();
        keys.into_iter().map(|key| (key.description, key.content.unwrap().to_vec())).collect()
    }

    fn refusal<T>(result: Result<T, Error>) -> String {
        result.err().expect("the keyring was used").to_string()
    }

    #[test]
    fn keys_are_found_by_the_name_and_the_number_of_their_keyring() {
        let Some(ring) = TestKeyring::new() else { return };
        let (name, number) =
            (Keyring::new(&ring.name).unwrap(), Keyring::new(&ring.serial.to_string()).unwrap());
        ring.add("wanted one", b"a");
        ring.add("other", b"b");
        for keyring in [&name, &number] {
            keyring.check().unwrap();
            assert_eq!(found(keyring), [("wanted one".to_owned(), b"a".to_vec())]);
        }
        ring.add("wanted one", b"c");
        ring.add("wanted two", &[7; MAX_KEY_BYTES]);
        let both = [("wanted one".to_owned(), b"c".to_vec()), ("wanted two".into(), vec![7; MAX_KEY_BYTES])];
        assert_eq!(found(&name), both);
        ring.remove("wanted one");
        assert_eq!(found(&name), both[1..]);
        let mut descriptions = name.descriptions().unwrap();
        descriptions.sort();
        assert_eq!(descriptions, ["other", "wanted two"]);
        drop(ring);
        // The kernel removes it from its list a moment later.
        let said = refusal(name.check());
        assert!(said.ends_with(" has this name") || said.contains("Permission denied"), "{said}");
        let said = refusal(Keyring::new("freestone-none").unwrap().check());
        assert_eq!(said, "keyring freestone-none: no keyring of root or of this user has this name");
    }

    /// A service has a session of its own, from which the user's keyring cannot be reached.
    #[test]
    fn a_thread_with_a_session_of_its_own_reads_the_users_keys() {
        let Some(ring) = TestKeyring::new() else { return };
        ring.add("wanted", b"a");
        std::thread::spawn(move || {
            testing::join_new_session();
            assert_eq!(found(&Keyring::new(&ring.name).unwrap()).len(), 1);
            ring
        })
        .join()
        .unwrap();
    }

    #[test]
    fn the_keyrings_of_user_and_session_have_names() {
        for name in ["@u", "@s"].into_iter().filter(|_| TestKeyring::new().is_some()) {
            Keyring::new(name).unwrap().check().unwrap();
        }
        for text in ["", "@g", "@", "a\nb", "a\0"] {
            let said = refusal(Keyring::new(text));
            assert_eq!(
                said,
                format!("keyring {text:?}: want the name or the serial number of a keyring, @u or @s")
            );
        }
    }

    #[test]
    fn a_key_that_cannot_be_used_is_named_with_the_reason() {
        let Some(ring) = TestKeyring::new() else { return };
        let keyring = Keyring::new(&ring.name).unwrap();
        ring.add("long", &[1; MAX_KEY_BYTES + 1]);
        ring.add("revoked", b"canary");
        ring.revoke("revoked");
        TestKeyring::permit(ring.add("exposed", b"canary"), 0x3f01_0003);
        let fault = |name: &str| {
            let mut keys = keyring.keys(|description| description == name).unwrap();
            keys.pop().map(|key| key.content.unwrap_err().to_string())
        };
        assert_eq!(fault("long").unwrap(), "257 bytes: want at most 256");
        // The kernel removes it at some time.
        assert!(fault("revoked").is_none_or(|said| said.starts_with("Key has been revoked")));
        assert_eq!(fault("exposed").unwrap(), "permissions 3f010003: other users have access");
    }

    #[test]
    fn a_keyring_that_other_users_may_change_is_refused() {
        let Some(ring) = TestKeyring::new() else { return };
        let keyring = Keyring::new(&ring.name).unwrap();
        TestKeyring::permit(ring.serial, 0x3f3f_0004);
        let said = refusal(keyring.keys(|_| true));
        assert!(said.ends_with(": permissions 3f3f0004: other users may change it"), "{said}");
        TestKeyring::permit(ring.serial, 0x3f3f_0000);
        let key = ring.add("key", b"a").to_string();
        let said = refusal(Keyring::new(&key).unwrap().check());
        assert_eq!(said, format!("keyring {key}: a key of the type user: want a keyring"));
        // Nothing has this number: serial numbers are random.
        let said = refusal(Keyring::new("1").unwrap().check());
        assert!(said.starts_with("keyring 1: Required key not available"), "{said}");
    }

    #[test]
    fn a_name_is_that_of_usable_keyrings_of_root_and_this_user_alone() {
        let own = calls::user();
        let line = |flags: &str, owner: u32, kind: &str, text: &str| {
            format!("0a1b2c3d {flags}     2 perm 3f3f0000 {owner:5}     0 {kind:<9} {text}")
        };
        let of = |line: String| keyring_of(&line, "a b");
        assert_eq!(of(line("I--Q---", own, "keyring", "a b: 3")), Some(0x0a1b_2c3d));
        assert_eq!(of(line("I------", 0, "keyring", "a b: empty")), Some(0x0a1b_2c3d));
        for other in [
            line("IR-Q---", own, "keyring", "a b: 3"),
            line("I-D----", own, "keyring", "a b: 3"),
            line("I-----i", own, "keyring", "a b: 3"),
            line("-------", own, "keyring", "a b: 3"),
            line("I--Q---", own + 1, "keyring", "a b: 3"),
            line("I--Q---", own, "user", "a b: 3"),
            line("I--Q---", own, "keyring", "a: b: 3"),
            line("I--Q---", own, "keyring", "a b"),
            String::new(),
            "x".into(),
        ] {
            assert_eq!(of(other.clone()), None, "{other}");
        }
    }

    #[test]
    fn several_keyrings_with_one_name_are_refused() {
        let (Some(one), Some(other)) = (TestKeyring::new(), TestKeyring::new()) else { return };
        assert!(matches!(only(vec![one.serial, other.serial]), Err(KeyringFault::Several(2))));
        assert!(matches!(only(vec![one.serial, 1]), Ok(serial) if serial == one.serial));
        assert!(matches!(only(vec![]), Err(KeyringFault::Missing)));
    }
}
