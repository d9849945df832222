//! New API tokens: `freestoned token` makes one, and adds the line with its hash to the file.
//!
//! The file is replaced at once: a daemon that reads it meanwhile finds the former lines or the new
//! ones. A lock on its directory has two such programs wait for each other.

use super::keys::hex;
use super::roles::Role;
use super::tokens::{EXPIRES, HASH, MAX_FILE_BYTES, TokensError, digest, parse, time_text};
use atomic_file::SystemFolder;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use volume::Name;
use zeroize::Zeroizing;

/// Random bytes of a token.
const TOKEN_BYTES: usize = 32;
/// Permission bits of a new file.
const MODE: u32 = 0o600;

/// A token that is to be made.
#[derive(Clone, Debug)]
pub struct NewToken {
    /// Its role.
    pub role: Role,
    /// Its name, which no other line of the file has.
    pub name: String,
    /// The time from which it is refused.
    pub expires: Option<SystemTime>,
}

/// Why a token was not made. The file is unchanged.
#[derive(Debug, thiserror::Error)]
pub enum NewTokenError {
    /// The file is invalid or cannot be read.
    #[error(transparent)]
    Tokens(#[from] TokensError),
    /// The name is no name of an object.
    #[error("token name {0}")]
    Name(#[from] volume::NameError),
    /// The name is in use.
    #[error("tokens {}: the token {name} exists already", path.display())]
    Exists {
        /// The file.
        path: PathBuf,
        /// The name.
        name: String,
    },
    /// The time has passed.
    #[error("token {name}: expires {time}: want a time in the future", time = time_text(*time))]
    Past {
        /// The name of the token.
        name: String,
        /// The time.
        time: SystemTime,
    },
    /// The file would become too long.
    #[error("tokens {}: token {name}: the file would have more than {MAX_FILE_BYTES} bytes", path.display())]
    NoRoom {
        /// The file.
        path: PathBuf,
        /// The name of the token.
        name: String,
    },
    /// The file cannot be replaced.
    #[error("tokens {}: {error}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// The system has no random bytes.
    #[error("token {0}: random bytes: {1}")]
    Random(String, getrandom::Error),
}

/// Makes a token of 256 random bits, adds its hash to the file at `path`, and returns the token.
/// The file is made with mode 600 if it does not exist, and keeps owner, group and mode otherwise.
///
/// # Errors
/// See [`NewTokenError`]. Then the file is as it was.
pub fn add_token(path: &Path, new: &NewToken, now: SystemTime) -> Result<String, NewTokenError> {
    let NewToken { role, name, expires } = new;
    Name::new(name)?;
    if let Some(time) = expires.filter(|time| *time <= now) {
        return Err(NewTokenError::Past { name: name.clone(), time });
    }
    // A symbolic link stays: the file behind it is replaced.
    let target = std::fs::canonicalize(path).unwrap_or_else(|_| path.into());
    let failed = |error| NewTokenError::Write { path: path.into(), error };
    let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Until the end of this function no other program replaces the file.
    let lock = File::open(folder).map_err(failed)?;
    lock.lock().map_err(failed)?;

    let text = match secrets::read_text(&target, MAX_FILE_BYTES) {
        Ok(text) => text,
        Err(secrets::Error::Read { source, .. }) if source.kind() == ErrorKind::NotFound => {
            Default::default()
        }
        Err(error) => return Err(TokensError::from(error).into()),
    };
    let known = parse(&text).map_err(|(line, fault)| TokensError::Line(path.into(), line, fault))?;
    if known.iter().any(|token| token.name == *name) {
        return Err(NewTokenError::Exists { path: path.into(), name: name.clone() });
    }
    let token = random_token().map_err(|error| NewTokenError::Random(name.clone(), error))?;
    let break_ = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
    let mut added = format!("{break_}{} {name} {HASH}{}", role.name(), hex(&digest(&token)));
    if let Some(time) = expires {
        added += &format!(" {EXPIRES}{}", time_text(*time));
    }
    added.push('\n');
    if text.len() + added.len() > MAX_FILE_BYTES as usize {
        return Err(NewTokenError::NoRoom { path: path.into(), name: name.clone() });
    }
    // Other lines may hold tokens themselves.
    let text = Zeroizing::new([&**text, &added].concat());
    replace(folder, &target, &text).map_err(failed)?;
    Ok(token)
}

fn random_token() -> Result<String, getrandom::Error> {
    let mut bytes = [0; TOKEN_BYTES];
    getrandom::fill(&mut bytes)?;
    Ok(hex(&bytes))
}

/// Replaces the file in the locked directory durably. It keeps owner, group and mode.
fn replace(directory: &Path, file: &Path, text: &str) -> io::Result<()> {
    let folder = SystemFolder::new(directory, MODE);
    let folder = match std::fs::metadata(file) {
        Ok(former) => folder.like(&former),
        Err(error) if error.kind() == ErrorKind::NotFound => folder,
        Err(error) => return Err(error),
    };
    let name = file.file_name().and_then(OsStr::to_str).ok_or(ErrorKind::InvalidFilename)?;
    // A crash may have left one, with another mode.
    let new = format!("{name}.new");
    atomic_file::remove(&folder, &new)?;
    let replaced = atomic_file::replace(&folder, name, text.as_bytes(), None);
    if replaced.is_err() {
        let _ = atomic_file::remove(&folder, &new);
    }
    replaced
}

#[cfg(test)]
mod tests {
    use super::super::tokens::{Tokens, parse_time};
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::time::{Duration, UNIX_EPOCH};

    const NOW: SystemTime = UNIX_EPOCH;

    fn new(role: Role, name: &str, expires: Option<&str>) -> NewToken {
        NewToken { role, name: name.into(), expires: expires.map(|text| parse_time(text).unwrap()) }
    }

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().mode() & 0o7777
    }

    #[test]
    fn a_new_token_is_accepted_and_the_file_has_only_its_hash() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        std::fs::write(folder.path().join("tokens.new"), "left by a crash").unwrap();
        let alice = add_token(&path, &new(Role::Admin, "alice", None), NOW).unwrap();
        assert_eq!(mode(&path), 0o600);
        std::fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let page = add_token(&link, &new(Role::ReadOnly, "page", Some("2027-01-31")), NOW).unwrap();
        assert_eq!(mode(&path), 0o640, "the mode stays");
        assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!((alice.len(), page.len()), (64, 64));

        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].starts_with("admin alice sha256:") && lines.len() == 2, "{text}");
        assert!(lines[1].ends_with(" expires=2027-01-31T00:00:00Z"), "{text}");
        assert!(!text.contains(&alice) && !text.contains(&page));
        let tokens = Tokens::read(&path).unwrap();
        assert_eq!(tokens.check(&alice, NOW).unwrap().role, Role::Admin);
        assert_eq!(tokens.check(&page, NOW).unwrap().name, "page");
        assert!(tokens.check(&page, parse_time("2027-01-31").unwrap()).is_err());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "no other file stays");
    }

    #[test]
    fn a_last_line_without_an_end_stays_a_line_of_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        secrets::write(&path, "# mine\nadmin me 0123456789abcdef01234567").unwrap();
        let token = add_token(&path, &new(Role::Operator, "ops", None), NOW).unwrap();
        let tokens = Tokens::read(&path).unwrap();
        assert!(tokens.check(&token, NOW).is_ok() && tokens.check("0123456789abcdef01234567", NOW).is_ok());
    }

    #[test]
    fn a_refused_token_names_object_and_value_and_leaves_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        let canary = "0123456789abcdef01234567";
        let refusal = |content: &str, wanted: &NewToken, now: SystemTime| {
            secrets::write(&path, content).unwrap();
            let error = add_token(&path, wanted, now).unwrap_err();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), content);
            let said = error.to_string();
            assert!(!said.contains(canary) && !format!("{error:?}").contains(canary), "{said}");
            said
        };
        let good = format!("admin me {canary}\n");
        let said = refusal(&good, &new(Role::ReadOnly, "me", None), NOW);
        assert!(said.ends_with("/tokens: the token me exists already"), "{said}");
        let said = refusal(&good, &new(Role::Admin, "a b", None), NOW);
        assert!(said.starts_with("token name ") && said.contains("a b"), "{said}");
        let past = new(Role::Admin, "you", Some("2027-01-31"));
        let said = refusal(&good, &past, past.expires.unwrap() + Duration::from_secs(1));
        assert_eq!(said, "token you: expires 2027-01-31T00:00:00Z: want a time in the future");
        let said = refusal(&format!("{good}admin {canary}\n"), &new(Role::Admin, "you", None), NOW);
        assert!(said.contains("/tokens: line 2: want ROLE NAME TOKEN"), "{said}");
        let full = format!("#{}\n", "x".repeat(MAX_FILE_BYTES as usize - 2));
        let said = refusal(&full, &new(Role::Admin, "you", None), NOW);
        assert!(said.contains("token you: the file would have more than 1048576 bytes"), "{said}");
        secrets::write(&path, &good).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        let said = add_token(&path, &new(Role::Admin, "you", None), NOW).unwrap_err().to_string();
        assert!(said.contains("other users have access to this secret file (mode 644)"), "{said}");
        let said = add_token(&folder.path().join("no/file"), &new(Role::Admin, "you", None), NOW);
        assert!(said.unwrap_err().to_string().contains("/no/file: No such file"));
    }
}
