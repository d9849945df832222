//! Idempotency keys and the answers to their requests, one file for each key below `idempotency` in
//! the state directory.
//!
//! ```text
//!   begin: "started", durable ─► the change ─► complete: the answer, durable
//!                              │        └───► forget: no file
//!                              └─ the daemon ends: "started" stays, the outcome is unknown
//! ```
//!
//! A file's name has hashes of the caller and of caller and key, so that no caller finds the
//! answers of another. The oldest keys leave first: those of the same caller when it has its share,
//! those of all when the directory is full.

use atomic_file::{Folder, SystemFolder};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap};
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

/// The directory, in the state directory.
const DIRECTORY: &str = "idempotency";
/// The format that is written.
const VERSION: u32 = 1;
/// Hexadecimal digits of a caller, and of a key, in the name of a file.
const CALLER_DIGITS: usize = 16;
const KEY_DIGITS: usize = 48;
/// The longest answer that is kept, in bytes.
const MAX_ANSWER: usize = 1 << 20;
/// Longer files are not ours: an answer, each byte of which is written as an escape.
const MAX_FILE: u64 = 8 << 20;

/// Bounds of what is kept.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Keys of one caller.
    pub(super) keys_per_caller: usize,
    /// Bytes of one caller.
    pub(super) bytes_per_caller: u64,
    /// Keys in all.
    pub(super) keys: usize,
    /// Bytes in all.
    pub(super) bytes: u64,
    /// Age of a key.
    pub(super) age: Duration,
}

impl Default for Bounds {
    fn default() -> Bounds {
        Bounds {
            keys_per_caller: 1000,
            bytes_per_caller: 8 << 20,
            keys: 8000,
            bytes: 64 << 20,
            age: Duration::from_secs(7 * 24 * 3600),
        }
    }
}

/// Why keys cannot be kept.
#[derive(Debug, thiserror::Error)]
#[error("idempotency keys {}: {error}", .path.display())]
pub struct KeysError {
    path: PathBuf,
    error: io::Error,
}

/// The file name of a key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Name(Arc<str>);

impl Name {
    /// Of a caller's key.
    pub(super) fn new(caller: &str, key: &str) -> Name {
        let of_caller = hex(&Sha256::digest(caller));
        let mut hash = Sha256::new();
        hash.update((caller.len() as u64).to_le_bytes());
        hash.update(caller);
        hash.update(key);
        let of_key = hex(&hash.finalize());
        Name(format!("{}-{}", &of_caller[..CALLER_DIGITS], &of_key[..KEY_DIGITS]).into())
    }

    /// A file name, if it is one of a key.
    fn parse(text: &str) -> Option<Name> {
        let is_hex = |text: &str| text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let (caller, key) = text.split_once('-')?;
        let is_name =
            caller.len() == CALLER_DIGITS && key.len() == KEY_DIGITS && is_hex(caller) && is_hex(key);
        is_name.then(|| Name(text.into()))
    }

    fn caller(&self) -> &str {
        &self.0[..CALLER_DIGITS]
    }
}

/// Bytes in hexadecimal digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// An answer as it is kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Saved {
    pub(super) status: u16,
    pub(super) headers: Vec<(String, String)>,
    pub(super) body: String,
}

/// A file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    version: u32,
    /// The hash of method, path and body.
    request: String,
    /// Absent until the request has been answered.
    answer: Option<Saved>,
}

/// The result of a request with a key.
#[derive(Debug)]
pub(super) enum Begun {
    /// It is the first with this key.
    New(Claim),
    /// The answer to the first.
    Answered(Saved),
}

/// Why a request with a key is not carried out.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refusal {
    #[error("a request with another path or body has this key")]
    OtherRequest,
    #[error("the request with this key is being carried out")]
    InProgress,
    #[error(
        "{0}: look at the object of the request to see whether it was changed, then send what is left under another key"
    )]
    Interrupted(String),
    #[error("the key cannot be recorded, so nothing was changed: {0}")]
    Failed(String),
}

/// All keys. Clones share them.
#[derive(Clone)]
pub(super) struct Keys(Arc<Inner>);

struct Inner {
    path: PathBuf,
    folder: SystemFolder,
    bounds: Bounds,
    book: Mutex<Book>,
}

/// The index of the directory.
#[derive(Default)]
struct Book {
    entries: HashMap<Name, Entry>,
    /// From the oldest to the newest.
    order: BTreeMap<u64, Name>,
    next: u64,
    total: Usage,
    callers: HashMap<String, Usage>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Usage {
    keys: usize,
    bytes: u64,
}

struct Entry {
    place: u64,
    bytes: u64,
    since: SystemTime,
    /// The hash of the request while it is being carried out.
    running: Option<String>,
}

impl Book {
    fn insert(&mut self, name: Name, bytes: u64, since: SystemTime, running: Option<String>) {
        let place = self.next;
        self.next += 1;
        self.order.insert(place, name.clone());
        for usage in [&mut self.total, self.callers.entry(name.caller().to_owned()).or_default()] {
            usage.keys += 1;
            usage.bytes += bytes;
        }
        self.entries.insert(name, Entry { place, bytes, since, running });
    }

    fn remove(&mut self, name: &Name) {
        let Some(entry) = self.entries.remove(name) else { return };
        self.order.remove(&entry.place);
        self.total.keys -= 1;
        self.total.bytes -= entry.bytes;
        if let Some(usage) = self.callers.get_mut(name.caller()) {
            usage.keys -= 1;
            usage.bytes -= entry.bytes;
            if usage.keys == 0 {
                self.callers.remove(name.caller());
            }
        }
    }

    /// Notes the length of a key's file, and whether its request runs.
    fn update(&mut self, name: &Name, bytes: u64, running: Option<String>) {
        let Some(entry) = self.entries.get_mut(name) else { return };
        let before = std::mem::replace(&mut entry.bytes, bytes);
        entry.running = running;
        for usage in [&mut self.total, self.callers.entry(name.caller().to_owned()).or_default()] {
            usage.bytes = usage.bytes - before + bytes;
        }
    }

    fn oldest(&self, is_candidate: impl Fn(&Name) -> bool) -> Option<Name> {
        let is_idle = |name: &&Name| self.entries[*name].running.is_none() && is_candidate(name);
        self.order.values().find(is_idle).cloned()
    }

    /// A key that has to leave, because it is old or because `caller` or all have too many.
    fn surplus(&self, bounds: &Bounds, caller: &str, now: SystemTime) -> Option<Name> {
        let is_over = |usage: Usage, keys: usize, bytes: u64| usage.keys > keys || usage.bytes > bytes;
        let is_old =
            |name: &Name| now.duration_since(self.entries[name].since).is_ok_and(|age| age > bounds.age);
        let of_caller = self.callers.get(caller).copied().unwrap_or_default();
        if let Some(oldest) = self.oldest(|_| true).filter(is_old) {
            return Some(oldest);
        }
        if is_over(of_caller, bounds.keys_per_caller, bounds.bytes_per_caller) {
            return self.oldest(|name| name.caller() == caller);
        }
        if is_over(self.total, bounds.keys, bounds.bytes) { self.oldest(|_| true) } else { None }
    }
}

impl Keys {
    /// The keys in a state directory.
    ///
    /// # Errors
    /// When the system refuses the directory.
    pub(super) fn open(state_dir: &Path) -> Result<Keys, KeysError> {
        Keys::with_bounds(state_dir, Bounds::default())
    }

    fn with_bounds(state_dir: &Path, bounds: Bounds) -> Result<Keys, KeysError> {
        let path = state_dir.join(DIRECTORY);
        let failed = |error| KeysError { path: path.clone(), error };
        DirBuilder::new().recursive(true).mode(0o700).create(&path).map_err(failed)?;
        let mut found = Vec::new();
        for file in path.read_dir().map_err(failed)? {
            let file = file.map_err(failed)?;
            let Some(text) = file.file_name().to_str().map(str::to_owned) else { continue };
            if text.strip_suffix(".new").and_then(Name::parse).is_some() {
                std::fs::remove_file(file.path()).map_err(failed)?; // left over
            } else if let Some(name) = Name::parse(&text) {
                let metadata = file.metadata().map_err(failed)?;
                found.push((metadata.modified().map_err(failed)?, name, metadata.len()));
            }
        }
        found.sort_by_key(|(since, ..)| *since);
        let mut book = Book::default();
        for (since, name, bytes) in found {
            book.insert(name, bytes, since, None);
        }
        let folder = SystemFolder::new(&path, 0o600);
        let keys = Keys(Arc::new(Inner { path: path.clone(), folder, bounds, book: Mutex::new(book) }));
        keys.trim(&mut keys.book(), "").map_err(failed)?;
        Ok(keys)
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.0.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes keys until all bounds hold. The names are durable with the next file that is
    /// written; until then a crash may bring a key back, which does no harm.
    fn trim(&self, book: &mut Book, caller: &str) -> io::Result<()> {
        while let Some(name) = book.surplus(&self.0.bounds, caller, SystemTime::now()) {
            match self.0.folder.remove(&name.0) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => book.remove(&name),
            }
        }
        Ok(())
    }

    /// Begins a request with this key, durably, unless there was one before.
    ///
    /// # Errors
    /// See [`Refusal`].
    pub(super) fn begin(&self, name: Name, request: String) -> Result<Begun, Refusal> {
        loop {
            {
                let mut book = self.book();
                match book.entries.get(&name).map(|entry| entry.running.as_ref()) {
                    Some(Some(running)) if *running != request => return Err(Refusal::OtherRequest),
                    Some(Some(_)) => return Err(Refusal::InProgress),
                    Some(None) => {}
                    None => {
                        book.insert(name.clone(), 0, SystemTime::now(), Some(request.clone()));
                        let trimmed = self.trim(&mut book, name.caller());
                        drop(book);
                        return self.start(name, request, trimmed).map(Begun::New);
                    }
                }
            }
            if let Some(answered) = self.look_up(&name, &request)? {
                return Ok(Begun::Answered(answered));
            }
            // The file is gone. Nothing is known of the key any more.
            let mut book = self.book();
            if book.entries.get(&name).is_some_and(|entry| entry.running.is_none()) {
                book.remove(&name);
            }
        }
    }

    /// Makes the file of a key that is in the book.
    fn start(&self, name: Name, request: String, trimmed: io::Result<()>) -> Result<Claim, Refusal> {
        let claim = Claim { keys: self.clone(), name, request, is_settled: false };
        match trimmed.and_then(|()| claim.write(None)) {
            Ok(bytes) => {
                self.book().update(&claim.name, bytes, Some(claim.request.clone()));
                Ok(claim)
            }
            Err(error) => {
                let failed = format!("{}: {error}", self.0.path.display());
                claim.forget();
                Err(Refusal::Failed(failed))
            }
        }
    }

    /// The answer to a key whose request is not running. None: the key has no file.
    fn look_up(&self, name: &Name, request: &str) -> Result<Option<Saved>, Refusal> {
        let unreadable = |error: String| {
            let file = self.0.path.join(&*name.0);
            Refusal::Interrupted(format!("the record {} cannot be read: {error}", file.display()))
        };
        let bytes = self.0.folder.read(&name.0, MAX_FILE).map_err(|error| unreadable(error.to_string()))?;
        let Some(bytes) = bytes else { return Ok(None) };
        let record: Record = serde_json::from_slice(&bytes).map_err(|error| unreadable(error.to_string()))?;
        if record.version != VERSION {
            return Err(unreadable(format!("format {}: want {VERSION}", record.version)));
        }
        match record.answer {
            _ if record.request != request => Err(Refusal::OtherRequest),
            Some(answer) => Ok(Some(answer)),
            None => Err(Refusal::Interrupted(
                "the daemon ended before it had recorded the outcome of the request".into(),
            )),
        }
    }
}

/// A key whose request is being carried out. Dropped without an outcome, the key stays interrupted.
pub(super) struct Claim {
    keys: Keys,
    name: Name,
    request: String,
    is_settled: bool,
}

impl std::fmt::Debug for Claim {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Claim").field(&self.name).finish()
    }
}

impl Claim {
    /// Records the answer, durably. A failure is logged; the key is interrupted then.
    pub(super) fn complete(mut self, answer: Saved) {
        let (key, bytes) = (self.name.0.clone(), answer.body.len());
        if bytes > MAX_ANSWER {
            tracing::warn!(%key, bytes, "idempotency key: the answer is too long to be recorded");
            return;
        }
        match self.write(Some(answer)) {
            Ok(bytes) => {
                let mut book = self.keys.book();
                book.update(&self.name, bytes, None);
                if let Err(error) = self.keys.trim(&mut book, self.name.caller()) {
                    tracing::warn!(%error, "idempotency keys: the oldest cannot be removed");
                }
                drop(book);
                self.is_settled = true;
            }
            Err(error) => tracing::error!(%key, %error, "idempotency key: the answer cannot be recorded"),
        }
    }

    /// Removes the key. A failure is logged; the key is interrupted then.
    pub(super) fn forget(mut self) {
        match atomic_file::remove(&self.keys.0.folder, &self.name.0) {
            Ok(()) => {
                self.keys.book().remove(&self.name);
                self.is_settled = true;
            }
            Err(error) => {
                tracing::error!(key = %self.name.0, %error, "idempotency key: it cannot be removed");
            }
        }
    }

    /// Writes the file; its length.
    fn write(&self, answer: Option<Saved>) -> io::Result<u64> {
        let record = Record { version: VERSION, request: self.request.clone(), answer };
        let bytes = serde_json::to_vec(&record)?;
        atomic_file::replace(&self.keys.0.folder, &self.name.0, &bytes, None)?;
        Ok(bytes.len() as u64)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.is_settled {
            return;
        }
        if let Some(entry) = self.keys.book().entries.get_mut(&self.name) {
            entry.running = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    fn saved(body: &str) -> Saved {
        Saved { status: 201, headers: vec![("etag".into(), "\"1\"".into())], body: body.into() }
    }

    fn begin(keys: &Keys, caller: &str, key: &str, request: &str) -> Result<Begun, Refusal> {
        keys.begin(Name::new(caller, key), request.into())
    }

    fn claim(keys: &Keys, caller: &str, key: &str) -> Claim {
        match begin(keys, caller, key, "r") {
            Ok(Begun::New(claim)) => claim,
            other => panic!("{caller}, {key}: {other:?}"),
        }
    }

    fn answer(keys: &Keys, caller: &str, key: &str) -> Option<String> {
        match begin(keys, caller, key, "r") {
            Ok(Begun::New(claim)) => {
                claim.forget();
                None
            }
            Ok(Begun::Answered(saved)) => Some(saved.body),
            Err(refusal) => panic!("{caller}, {key}: {refusal}"),
        }
    }

    fn files(directory: &Path) -> Vec<String> {
        let files = directory.join(DIRECTORY).read_dir().unwrap();
        files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn a_key_answers_its_caller_alone_and_outlives_the_daemon() {
        let directory = tempfile::tempdir().unwrap();
        let keys = Keys::open(directory.path()).unwrap();
        let running = claim(&keys, "a", "k");
        assert_eq!(begin(&keys, "a", "k", "r").unwrap_err(), Refusal::InProgress);
        assert_eq!(begin(&keys, "a", "k", "other").unwrap_err(), Refusal::OtherRequest);
        claim(&keys, "b", "k").complete(saved("of b"));
        running.complete(saved("of a"));
        claim(&keys, "a", "failed").forget();
        for keys in [keys, Keys::open(directory.path()).unwrap()] {
            assert_eq!(answer(&keys, "a", "k").as_deref(), Some("of a"));
            assert_eq!(answer(&keys, "b", "k").as_deref(), Some("of b"));
            assert_eq!(answer(&keys, "a", "failed"), None);
            assert_eq!(begin(&keys, "a", "k", "other").unwrap_err(), Refusal::OtherRequest);
        }
        assert_eq!(files(directory.path()).len(), 2);
        let caller_with_key = [Name::new("a", "bk"), Name::new("ab", "k")];
        assert_ne!(caller_with_key[0].0[CALLER_DIGITS..], caller_with_key[1].0[CALLER_DIGITS..]);
    }

    #[test]
    fn a_key_without_an_outcome_says_so_in_this_daemon_and_the_next() {
        let directory = tempfile::tempdir().unwrap();
        let keys = Keys::open(directory.path()).unwrap();
        let claim = claim(&keys, "a", "k");
        // As a daemon that is killed leaves it, with a file of the way to it.
        File::create(directory.path().join(DIRECTORY).join(format!("{}.new", claim.name.0))).unwrap();
        let next = Keys::open(directory.path()).unwrap();
        drop(claim);
        for keys in [keys, next] {
            let refusal = begin(&keys, "a", "k", "r").unwrap_err();
            assert!(matches!(refusal, Refusal::Interrupted(_)), "{refusal}");
            assert!(refusal.to_string().contains("look at the object"), "{refusal}");
        }
        assert_eq!(files(directory.path()).len(), 1);
    }

    #[test]
    fn a_damaged_or_later_record_is_no_answer_and_no_new_request() {
        let directory = tempfile::tempdir().unwrap();
        let keys = Keys::open(directory.path()).unwrap();
        claim(&keys, "a", "k").complete(saved("answer"));
        let path = directory.path().join(DIRECTORY).join(&*Name::new("a", "k").0);
        let whole = std::fs::read_to_string(&path).unwrap();
        for text in ["", &whole[..whole.len() / 2], &whole.replace("\"version\":1", "\"version\":2")] {
            std::fs::write(&path, text).unwrap();
            let refusal = begin(&Keys::open(directory.path()).unwrap(), "a", "k", "r").unwrap_err();
            assert!(matches!(refusal, Refusal::Interrupted(_)), "{text}: {refusal}");
        }
        // Without its file a key is a new one.
        std::fs::remove_file(&path).unwrap();
        assert_eq!(answer(&keys, "a", "k"), None);
    }

    #[test]
    fn the_oldest_keys_of_a_caller_leave_first_and_none_that_runs() {
        let directory = tempfile::tempdir().unwrap();
        let bounds = Bounds { keys_per_caller: 3, keys: 5, ..Bounds::default() };
        let keys = Keys::with_bounds(directory.path(), bounds).unwrap();
        claim(&keys, "b", "k").complete(saved("b"));
        let running = claim(&keys, "a", "running");
        for number in 0..6 {
            claim(&keys, "a", &number.to_string()).complete(saved("a"));
        }
        assert_eq!(begin(&keys, "a", "running", "r").unwrap_err(), Refusal::InProgress);
        running.complete(saved("a"));
        let kept = |key: &str| keys.book().entries.contains_key(&Name::new("a", key));
        assert!(kept("running") && kept("4") && kept("5") && !kept("3"));
        assert_eq!(answer(&keys, "b", "k").as_deref(), Some("b"), "another caller's keys are not a's");
        for caller in ["c", "d", "e"] {
            claim(&keys, caller, "k").complete(saved(caller));
        }
        assert_eq!(files(directory.path()).len(), 5);
        assert!(!keys.book().entries.contains_key(&Name::new("b", "k")), "the oldest of all");
        assert_eq!(keys.book().total, Keys::with_bounds(directory.path(), bounds).unwrap().book().total);
    }

    #[test]
    fn answers_are_bounded_in_bytes_and_age() {
        let directory = tempfile::tempdir().unwrap();
        let bounds = Bounds { bytes_per_caller: 5000, ..Bounds::default() };
        let keys = Keys::with_bounds(directory.path(), bounds).unwrap();
        for key in ["1", "2", "3", "4"] {
            claim(&keys, "a", key).complete(saved(&"x".repeat(2000)));
        }
        assert_eq!(files(directory.path()).len(), 2);
        assert_eq!(answer(&keys, "a", "1"), None);
        claim(&keys, "a", "long").complete(saved(&"x".repeat(MAX_ANSWER + 1)));
        assert!(matches!(begin(&keys, "a", "long", "r"), Err(Refusal::Interrupted(_))));
        // A file with another name stays.
        File::create(directory.path().join(DIRECTORY).join("readme")).unwrap();
        let old = SystemTime::now() - bounds.age - Duration::from_secs(60);
        for name in files(directory.path()) {
            let file = File::options().write(true).open(directory.path().join(DIRECTORY).join(name)).unwrap();
            file.set_modified(old).unwrap();
        }
        Keys::with_bounds(directory.path(), bounds).unwrap();
        assert_eq!(files(directory.path()), ["readme"]);
    }

    #[test]
    fn a_key_that_cannot_be_recorded_lets_nothing_begin() {
        let directory = tempfile::tempdir().unwrap();
        let keys = Keys::open(directory.path()).unwrap();
        std::fs::remove_dir(directory.path().join(DIRECTORY)).unwrap();
        assert!(matches!(begin(&keys, "a", "k", "r"), Err(Refusal::Failed(_))));
        std::fs::create_dir(directory.path().join(DIRECTORY)).unwrap();
        claim(&keys, "a", "k").complete(saved("a"));
    }
}
