//! The senders of requests, and their roles.
//!
//! Access to the Unix socket grants the role admin: its permission bits limit it. Over TCP each
//! request carries a token, which has a role.

use super::answer::Failure;
use super::connections::{Connection, Digest};
use super::current::Current;
use super::page;
use super::roles::{Caller, Role};
use axum::Extension;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::AUTHORIZATION;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use sha2::{Digest as _, Sha256};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use subtle::ConstantTimeEq;
use volume::Name;

/// The shortest token: 128 bits in hexadecimal digits are 32.
const MIN_TOKEN: usize = 24;

/// Longest file of tokens, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Tokens and what they are for.
#[derive(Clone, Debug)]
pub struct Tokens(Arc<[Token]>);

struct Token {
    role: Role,
    name: String,
    secret: String,
}

impl Token {
    fn digest(&self) -> Digest {
        Sha256::digest(self.secret.as_bytes()).into()
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.role.name(), self.name)
    }
}

/// Why there are no tokens.
#[derive(Debug, thiserror::Error)]
pub enum TokensError {
    /// The file cannot be read, or other users have access to it.
    #[error("tokens {0}")]
    File(#[from] secrets::Error),
    /// A line is none.
    #[error("tokens {}: line {}: {}", .0.display(), .1, .2)]
    Line(PathBuf, usize, String),
}

impl Tokens {
    /// Reads lines `ROLE NAME TOKEN`; empty lines and those that begin with `#` are passed over.
    ///
    /// # Errors
    /// When the file cannot be read, others may read it, or a line makes no sense.
    pub fn read(path: &Path) -> Result<Tokens, TokensError> {
        let text = secrets::read_text(path, MAX_FILE_BYTES)?;
        let mut tokens: Vec<Token> = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let refuse = |fault: String| TokensError::Line(path.into(), number + 1, fault);
            let words: Vec<&str> = line.split_whitespace().collect();
            match words[..] {
                [] => {}
                [first, ..] if first.starts_with('#') => {}
                [role, name, secret] => {
                    let role = Role::ALL.into_iter().find(|known| known.name() == role).ok_or_else(|| {
                        let known = Role::ALL.map(Role::name).join(", ");
                        // The word is not repeated: in a file of another kind it may be a secret.
                        refuse(format!("unknown role: want {known}"))
                    })?;
                    if secret.len() < MIN_TOKEN {
                        return Err(refuse(format!("the token has fewer than {MIN_TOKEN} characters")));
                    }
                    // Its objects carry it.
                    if role == Role::Provisioner {
                        let fault = "the name of a provisioner's token is no name of an object";
                        Name::new(name).map_err(|_| refuse(fault.into()))?;
                    }
                    tokens.push(Token { role, name: name.into(), secret: secret.into() });
                }
                _ => return Err(refuse("want ROLE NAME TOKEN".into())),
            }
        }
        match tokens.is_empty() {
            true => Err(TokensError::Line(path.into(), 1, "there is no token".into())),
            false => Ok(Tokens(tokens.into())),
        }
    }

    /// Whether a token has this digest.
    pub(super) fn has(&self, digest: &Digest) -> bool {
        self.0.iter().any(|token| token.digest() == *digest)
    }

    fn find(&self, secret: &str) -> Option<&Token> {
        // All are compared, whichever it is.
        self.0.iter().fold(None, |found, token| {
            let is_it = token.secret.as_bytes().ct_eq(secret.as_bytes()).into();
            if is_it { Some(token) } else { found }
        })
    }
}

/// Requests over the Unix socket: access to it grants everything.
pub async fn over_unix(
    Extension(connection): Extension<Arc<Connection>>,
    mut request: Request,
    next: Next,
) -> Response {
    connection.trust();
    let (who, identity) = (connection.peer.to_string().into(), connection.peer.client().to_string().into());
    request.extensions_mut().insert(Caller { who, identity, role: Role::Admin, label: "".into() });
    next.run(request).await
}

/// Requests over TCP, which take a token.
pub async fn over_tcp(
    State(tokens): State<Current<Tokens>>,
    Extension(connection): Extension<Arc<Connection>>,
    mut request: Request,
    next: Next,
) -> Response {
    if page::has(request.uri().path()) {
        return next.run(request).await;
    }
    let tokens = tokens.get();
    let bearer =
        request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
    match bearer.and_then(|secret| tokens.find(secret.trim())) {
        Some(token) => {
            connection.recognize(token.digest());
            let who = format!("token {}", token.name).into();
            let identity = format!("token {} {}", token.role.name(), token.name).into();
            let caller = Caller { who, identity, role: token.role, label: token.name.as_str().into() };
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        None => {
            let detail =
                if bearer.is_some() { "nobody has this token" } else { "want Authorization: Bearer TOKEN" };
            let failure = Failure::new(StatusCode::UNAUTHORIZED, "unauthorized", "Who are you?", detail);
            ([("www-authenticate", "Bearer")], failure).into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn tokens_are_read_from_a_file_that_is_nobody_elses() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        let write = |text: &str, mode: u32| {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            Tokens::read(&path)
        };
        let (long, other) = ("0123456789abcdef01234567", "fedcba9876543210fedcba98");
        let tokens = write(&format!("# who\n\nadmin me {long}\nread-only page {other}\n"), 0o600).unwrap();
        assert_eq!(tokens.find(long).map(|token| (token.role, &*token.name)), Some((Role::Admin, "me")));
        assert_eq!(tokens.find(other).map(|token| token.role), Some(Role::ReadOnly));
        assert!(tokens.find("").is_none() && tokens.find(&long[1..]).is_none());
        assert!(!format!("{tokens:?}").contains(long));
        let refusal = |text: &str, mode| write(text, mode).unwrap_err().to_string();
        assert!(
            refusal(&format!("admin me {long}"), 0o604)
                .contains("other users have access to this secret file (mode 604)")
        );
        assert!(refusal("admin me short", 0o600).contains("line 1: the token has fewer than 24 characters"));
        assert!(
            refusal(&format!("\nroot me {long}"), 0o600).contains("line 2: unknown role: want read-only, ")
        );
        let refused = refusal(&format!("provisioner a/b {long}"), 0o600);
        assert!(refused.contains("line 1: the name of a provisioner's token") && !refused.contains("a/b"));
        assert!(refusal("", 0o600).contains("there is no token"));
        assert!(refusal(long, 0o600).contains("want ROLE NAME TOKEN"));
    }
}
