//! The file of API tokens: its lines, and the check of a token that a request carries.
//!
//! ```text
//!   ROLE NAME sha256:HASH [expires=TIME]    HASH is the SHA-256 of the token, 64 hex digits
//!   ROLE NAME TOKEN       [expires=TIME]    the token itself: accepted with a warning
//! ```
//!
//! The program keeps digests alone. A token has 256 random bits ([`super::token_file`]), so a
//! plain hash suffices: there is no dictionary to try. No error quotes a line.

use super::connections::Digest;
use super::roles::Role;
use sha2::{Digest as _, Sha256};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use subtle::ConstantTimeEq;
use volume::Name;

/// The shortest token: 128 bits in hexadecimal digits are 32.
const MIN_TOKEN: usize = 24;
/// Longest file of tokens, in bytes.
pub(super) const MAX_FILE_BYTES: u64 = 1 << 20;
/// Lines with a token in clear text that the log names; a warning counts the others.
const MAX_WARNINGS: usize = 16;
/// Text in front of a hash.
pub(super) const HASH: &str = "sha256:";
/// Text in front of a time.
pub(super) const EXPIRES: &str = "expires=";
const TIME_FORM: &str = "a UTC time such as 2027-01-31T00:00:00Z, or a date";

/// Tokens and what they are for.
#[derive(Clone, Debug)]
pub struct Tokens(Arc<[Token]>);

pub(super) struct Token {
    pub(super) role: Role,
    pub(super) name: String,
    pub(super) digest: Digest,
    expires: Option<SystemTime>,
    line: usize,
    is_clear_text: bool,
}

impl Token {
    fn is_expired(&self, now: SystemTime) -> bool {
        self.expires.is_some_and(|at| now >= at)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.role.name(), self.name)
    }
}

/// Why a request with a token is refused. The texts name no secret.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refused {
    #[error("the token is not known")]
    Unknown,
    #[error("token {0}: expired at {time}", time = time_text(*.1))]
    Expired(String, SystemTime),
}

/// Why there are no tokens.
#[derive(Debug, thiserror::Error)]
pub enum TokensError {
    /// The file cannot be read, or other users have access to it.
    #[error("tokens {0}")]
    File(#[from] secrets::Error),
    /// The line with this number is invalid.
    #[error("tokens {}: line {}: {}", .0.display(), .1, .2)]
    Line(PathBuf, usize, String),
}

impl Tokens {
    /// Reads a file of tokens. Empty lines and those that begin with `#` have no meaning.
    ///
    /// # Errors
    /// When the file cannot be read, others may read it, a line is invalid, or there is no token.
    pub fn read(path: &Path) -> Result<Tokens, TokensError> {
        let text = secrets::read_text(path, MAX_FILE_BYTES)?;
        let tokens = parse(&text).map_err(|(line, fault)| TokensError::Line(path.into(), line, fault))?;
        match tokens.is_empty() {
            true => Err(TokensError::Line(path.into(), 1, "no token".into())),
            false => Ok(Tokens(tokens.into())),
        }
    }

    /// Warns of lines that hold a token instead of its hash.
    pub(super) fn warn_of_clear_text(&self, path: &Path) {
        let path = path.display();
        let clear: Vec<usize> =
            self.0.iter().filter(|token| token.is_clear_text).map(|token| token.line).collect();
        for line in clear.iter().take(MAX_WARNINGS) {
            tracing::warn!(
                "tokens {path}: line {line}: API token in clear text: store its hash, sha256:HASH"
            );
        }
        if let Some(more) = clear.len().checked_sub(MAX_WARNINGS).filter(|more| *more > 0) {
            tracing::warn!("tokens {path}: {more} more lines have an API token in clear text");
        }
    }

    /// Whether a token has this digest and is valid at `now`.
    pub(super) fn has(&self, digest: &Digest, now: SystemTime) -> bool {
        self.check_digest(digest, now).is_ok()
    }

    /// Whether a token can become invalid without a change of the file.
    pub(super) fn can_expire(&self) -> bool {
        self.0.iter().any(|token| token.expires.is_some())
    }

    /// The token that a request carries at `now`.
    pub(super) fn check(&self, secret: &str, now: SystemTime) -> Result<&Token, Refused> {
        self.check_digest(&digest(secret), now)
    }

    fn check_digest(&self, digest: &Digest, now: SystemTime) -> Result<&Token, Refused> {
        // All digests are compared, whichever is equal. A token that two lines have is valid by
        // either of them.
        let mut found = Err(Refused::Unknown);
        for token in self.0.iter() {
            let is_it: bool = token.digest.ct_eq(digest).into();
            match token.expires.filter(|_| token.is_expired(now)) {
                _ if !is_it => {}
                None => found = Ok(token),
                Some(at) if found.is_err() => found = Err(Refused::Expired(token.name.clone(), at)),
                Some(_) => {}
            }
        }
        found
    }
}

/// The digest by which the file and connections know a token.
pub(super) fn digest(secret: &str) -> Digest {
    Sha256::digest(secret.as_bytes()).into()
}

/// The tokens of a file, or the number of a line and its fault.
pub(super) fn parse(text: &str) -> Result<Vec<Token>, (usize, String)> {
    let mut tokens = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        if line.trim().is_empty() || line.trim_start().starts_with('#') {
            continue;
        }
        tokens.push(parse_line(number, line).map_err(|fault| (number, fault))?);
    }
    Ok(tokens)
}

/// Faults quote no word: in a file of another kind, or out of order, it may be a secret.
fn parse_line(number: usize, line: &str) -> Result<Token, String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let (role, name, secret, expires) = match words[..] {
        [role, name, secret] => (role, name, secret, None),
        [role, name, secret, last] if last.starts_with(EXPIRES) => {
            (role, name, secret, Some(&last[EXPIRES.len()..]))
        }
        _ => return Err("want ROLE NAME TOKEN, or ROLE NAME TOKEN expires=TIME".into()),
    };
    let role = parse_role(role).map_err(|want| format!("unknown role: {want}"))?;
    let (digest, is_clear_text) = match secret.strip_prefix(HASH) {
        Some(digits) => {
            let digest = parse_hash(digits).ok_or("sha256: want 64 hexadecimal digits after the colon")?;
            (digest, false)
        }
        None if secret.len() < MIN_TOKEN => {
            return Err(format!("the token has fewer than {MIN_TOKEN} characters"));
        }
        None => (digest(secret), true),
    };
    // Objects of a provisioner carry the name of its token as label.
    if role == Role::Provisioner && Name::new(name).is_err() {
        return Err("the name of a provisioner's token is no name of an object".into());
    }
    let expires = expires.map(parse_time).transpose().map_err(|want| format!("expires: {want}"))?;
    Ok(Token { role, name: name.into(), digest, expires, line: number, is_clear_text })
}

/// The role of this name.
///
/// # Errors
/// The names of roles, as the end of a message.
pub fn parse_role(text: &str) -> Result<Role, String> {
    Role::from_name(text).ok_or_else(|| {
        let names: Vec<&str> = Role::ALL.iter().map(|role| role.name()).collect();
        format!("want {}", names.join(", "))
    })
}

fn parse_hash(digits: &str) -> Option<Digest> {
    let digits = digits.as_bytes();
    if digits.len() != 64 {
        return None;
    }
    let digit = |digit: u8| char::from(digit).to_digit(16).map(|value| value as u8);
    let mut hash = Digest::default();
    for (byte, pair) in hash.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(hash)
}

/// Time of `2027-01-31T00:00:00Z`, or of the first second of `2027-01-31` in UTC.
///
/// # Errors
/// The expected form, as the end of a message.
pub fn parse_time(text: &str) -> Result<SystemTime, String> {
    let is_date = text.len() == "2027-01-31".len();
    let time = if is_date { format!("{text}T00:00:00Z") } else { text.to_owned() };
    humantime::parse_rfc3339(&time).map_err(|_| format!("want {TIME_FORM}"))
}

/// The time as [`parse_time`] reads it, to the second.
pub(super) fn time_text(time: SystemTime) -> String {
    let whole = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(whole)).to_string()
}

#[cfg(test)]
mod tests {
    use super::super::keys::hex;
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    const LONG: &str = "0123456789abcdef01234567";
    const OTHER: &str = "fedcba9876543210fedcba98";

    fn read(text: &str, mode: u32) -> Result<Tokens, TokensError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        Tokens::read(&path)
    }

    fn hashed(secret: &str) -> String {
        format!("{HASH}{}", hex(&digest(secret)))
    }

    fn at(text: &str) -> SystemTime {
        parse_time(text).unwrap()
    }

    #[test]
    fn the_hash_of_a_token_is_its_sha_256() {
        // The first example of FIPS 180-2.
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(hex(&digest("abc")), abc);
        assert_eq!(parse_hash(abc), Some(digest("abc")));
        assert_eq!(parse_hash(&abc.to_uppercase()), Some(digest("abc")));
    }

    #[test]
    fn tokens_and_hashes_are_read_from_a_file_that_other_users_cannot_read() {
        let text = format!("# who\n\nadmin me {LONG}\nread-only page {}\n", hashed(OTHER));
        let tokens = read(&text, 0o600).unwrap();
        let now = at("2026-11-25");
        let found = |secret: &str| tokens.check(secret, now).map(|token| (token.role, token.name.clone()));
        assert_eq!(found(LONG), Ok((Role::Admin, "me".into())));
        assert_eq!(found(OTHER), Ok((Role::ReadOnly, "page".into())));
        for wrong in ["", &LONG[1..], &hashed(OTHER), &hex(&digest(OTHER))] {
            assert_eq!(found(wrong), Err(Refused::Unknown), "{wrong}");
        }
        assert_eq!(tokens.0.iter().map(|token| token.is_clear_text).collect::<Vec<_>>(), [true, false]);
        assert!(!tokens.can_expire() && !format!("{tokens:?}").contains(LONG));
        let exposed = read(&text, 0o604).unwrap_err().to_string();
        assert!(exposed.contains("other users have access to this secret file (mode 604)"), "{exposed}");
    }

    #[test]
    fn a_token_is_valid_until_its_time_and_refused_by_name_from_then_on() {
        let (hash, end) = (hashed(LONG), "2027-01-31T12:00:00Z");
        let tokens =
            read(&format!("admin me {hash} expires={end}\noperator ops {OTHER} expires=2028-01-01\n"), 0o600)
                .unwrap();
        let second = Duration::from_secs(1);
        assert!(tokens.can_expire());
        assert!(tokens.check(LONG, at(end) - second).is_ok() && tokens.has(&digest(LONG), at(end) - second));
        for now in [at(end), at("2030-01-01")] {
            let refused = tokens.check(LONG, now).unwrap_err();
            assert_eq!(refused.to_string(), "token me: expired at 2027-01-31T12:00:00Z");
            assert!(!tokens.has(&digest(LONG), now));
        }
        assert!(tokens.check(OTHER, at("2028-01-01") - second).is_ok());
        assert_eq!(
            tokens.check(OTHER, at("2028-01-01")).unwrap_err().to_string(),
            "token ops: expired at 2028-01-01T00:00:00Z"
        );
        assert_eq!(tokens.check("another", at("2030-01-01")).unwrap_err(), Refused::Unknown);
    }

    #[test]
    fn a_token_that_two_lines_have_is_valid_by_either() {
        let (old, new) = (format!("admin a {LONG} expires=2020-01-01"), format!("operator b {LONG}"));
        for text in [format!("{old}\n{new}\n"), format!("{new}\n{old}\n")] {
            let tokens = read(&text, 0o600).unwrap();
            assert_eq!(tokens.check(LONG, at("2026-01-01")).unwrap().name, "b");
            assert_eq!(tokens.check(LONG, at("2019-01-01")).unwrap().digest, digest(LONG));
        }
    }

    #[test]
    fn a_bad_line_is_refused_by_file_line_and_problem_and_quotes_nothing() {
        let (hash, c) = (hashed(LONG), "c0ffee5ec2e7c0ffee");
        for (line, problem) in [
            (format!("admin {c} {c}"), "the token has fewer than 24 characters"),
            (format!("{c} me {hash}"), "unknown role: want read-only, provisioner, operator, admin"),
            (format!("provisioner a/{c} {hash}"), "the name of a provisioner's token"),
            (format!("{c}{c}"), "want ROLE NAME TOKEN"),
            (format!("admin me {hash} {c}"), "want ROLE NAME TOKEN"),
            (format!("admin me {hash} expires=2027-01-31 {c}"), "want ROLE NAME TOKEN"),
            (format!("admin me sha256:{c}"), "sha256: want 64 hexadecimal digits"),
            (format!("admin me {hash}{c}"), "sha256: want 64 hexadecimal digits"),
            (format!("admin me sha256:{c}{}", "é".repeat(23)), "sha256: want 64 hexadecimal digits"),
            (format!("admin me sha256:+{}", &hash[8..]), "sha256: want 64 hexadecimal digits"),
            (format!("admin me {hash} expires="), "expires: want a UTC time"),
            (format!("admin me {hash} expires={c}"), "expires: want a UTC time"),
            (format!("admin me {hash} expires=2027-02-31"), "expires: want a UTC time"),
            (format!("admin me {hash} expires=2027-01-31T00:00:00"), "expires: want a UTC time"),
            (format!("admin me {hash} expires=2027-01-31T00:00:00+01:00"), "expires: want a UTC time"),
            (format!("admin me {hash} expires=éééééé"), "expires: want a UTC time"),
        ] {
            let error = read(&format!("admin you {hash}\n\n{line}\n"), 0o600).unwrap_err();
            let said = error.to_string();
            assert!(said.contains("/tokens: line 3: ") && said.contains(problem), "{line}: {said}");
            for text in [said, format!("{error:?}")] {
                assert!(!text.contains(c) && !text.contains(&hash), "{line}: {text}");
            }
        }
        assert!(read("", 0o600).unwrap_err().to_string().contains("line 1: no token"));
    }
}
