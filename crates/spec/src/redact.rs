//! Specifications as logs show them: without what may be a secret.
//!
//! No key takes a secret by value; keys name files that hold one. A user can still paste the secret
//! itself. So a log shows values of keys that the kind's table has, and three kinds of text are
//! replaced by [`MASK`]:
//!
//! - values of keys that the table does not have;
//! - values of keys that name a file which is read ([`Key::is_read`]), unless they are absolute
//!   paths;
//! - the part before `@` in the authority of a URI.

use super::{Key, Kind, field, split_at_commas};

/// Replaces a text that may be a secret.
pub const MASK: &str = "***";

/// The specification `text`, redacted. The texts that were replaced are added to `hidden`. A text
/// that does not begin with one of `kinds` and a colon is a path or a URI.
pub fn redact(kinds: &[&'static Kind], text: &str, hidden: &mut Vec<String>) -> String {
    let spec = text.split_once(':').and_then(|(name, rest)| {
        let kind = kinds.iter().find(|kind| kind.name == name)?;
        Some((name, kind, rest))
    });
    let Some((name, kind, rest)) = spec else { return redact_uri(text, hidden) };
    let fields: Vec<String> = split_at_commas(rest)
        .iter()
        .map(|part| {
            let Some((key, value)) = part.split_once('=') else {
                return hide_unless(kind.keys.iter().any(|known| known.name == part), part, hidden);
            };
            match kind.keys.iter().find(|known| known.name == key.replace('_', "-")) {
                Some(known) => field(key, &redact_value(known, value, hidden)),
                None => {
                    hidden.extend([key.to_owned(), value.to_owned()]);
                    format!("{MASK}={MASK}")
                }
            }
        })
        .collect();
    format!("{name}:{}", fields.join(","))
}

/// The value of a key, redacted. The texts that were replaced are added to `hidden`.
pub fn redact_value(key: &Key, value: &str, hidden: &mut Vec<String>) -> String {
    match key.is_read {
        true => hide_unless(value.starts_with('/'), value, hidden),
        false => redact_uri(value, hidden),
    }
}

fn hide_unless(is_shown: bool, text: &str, hidden: &mut Vec<String>) -> String {
    if is_shown {
        return text.to_owned();
    }
    hidden.push(text.to_owned());
    MASK.to_owned()
}

/// A text that may be a URI, without the user and password of its authority.
fn redact_uri(text: &str, hidden: &mut Vec<String>) -> String {
    let Some((scheme, rest)) = text.split_once("://") else { return text.to_owned() };
    let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    match authority.rsplit_once('@') {
        Some((user, host)) => {
            hidden.push(user.to_owned());
            hidden.extend(user.split_once(':').map(|(_, password)| password.to_owned()));
            format!("{scheme}://{MASK}@{host}{path}")
        }
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::key;
    use super::*;

    static REMOTE: Kind = Kind {
        name: "remote",
        about: "a test",
        keys: &[
            key("uri", "URI", "where"),
            key("tls-psk", "FILE", "keys").read(),
            key("path", "PATH", "a socket"),
            key("direct", "on|off", "a switch"),
        ],
    };

    #[test]
    fn only_what_the_table_knows_is_shown() {
        let cases = [
            ("/dev/sda", "/dev/sda", vec![]),
            ("remote", "remote", vec![]),
            ("remote:path=a,,b,direct", "remote:path=a,,b,direct", vec![]),
            ("remote:tls_psk=/etc/keys,path=s", "remote:tls_psk=/etc/keys,path=s", vec![]),
            ("remote:tls-psk=c0ffee", "remote:tls-psk=***", vec!["c0ffee"]),
            ("remote:password=c0ffee,direct=on", "remote:***=***,direct=on", vec!["password", "c0ffee"]),
            ("remote:c0ffee", "remote:***", vec!["c0ffee"]),
            ("remote:uri=x://me:c0ffee@host/y@z", "remote:uri=x://***@host/y@z", vec!["me:c0ffee", "c0ffee"]),
            ("x://me:c0ffee@host?a=b", "x://***@host?a=b", vec!["me:c0ffee", "c0ffee"]),
            ("x://host/y@z", "x://host/y@z", vec![]),
        ];
        for (text, shown, secrets) in cases {
            let mut hidden = Vec::new();
            assert_eq!(redact(&[&REMOTE], text, &mut hidden), shown, "{text}");
            assert_eq!(hidden, secrets, "{text}");
        }
    }
}
