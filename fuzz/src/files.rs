//! Files that an operator writes by hand: tokens, keys of TLS and of NVMe, and the configuration.
//!
//! The input builds a text of nearly valid lines of these files, and every reader gets it, as an
//! operator may name the wrong file. No reader may panic. A second reading must have the same
//! result, and no error may contain a part of a secret.

use crate::input::Input;
use daemon::config::Config;
use daemon::rest::Tokens;
use nvme_auth::{Key, Keys, TlsKeys};
use std::error::Error;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Secrets, each with a part that occurs nowhere else. They have the form of a token, a key in
/// hexadecimal digits, and NVMe's two forms of keys.
const SECRETS: [&str; 6] = [
    "Zk9sEcReTZk9sEcReTZk9sEcReT0",
    "c0ffee99c0ffee99c0ffee99c0ffee99",
    "C0FFEE99C0FFEE99C0FFEE99C0FFEE99",
    "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:",
    "DHHC-1:00:Zk9sEcReTia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:",
    "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:",
];
/// Parts that reveal a secret, in lower case.
const MARKS: [&str; 4] = ["k9secret", "c0ffee99", "zgodor4", "nn9aqb2w"];
/// Words of all files, for correct and wrong places.
const WORDS: [&str; 28] = [
    "admin",
    "operator",
    "read-only",
    "me",
    "alice",
    "nqn.2014-08.org.nvmexpress:uuid:1",
    "nqn.a",
    "[[device]]",
    "[[array]]",
    "[[group]]",
    "[[volume]]",
    "[[export]]",
    "name",
    "spec",
    "level",
    "members",
    "backing",
    "size_bytes",
    "kind",
    "volumes",
    "options",
    "qos",
    "force",
    "min_qos",
    "group",
    "scrub_period_s",
    "{",
    "}",
];
const MAX_LINES: usize = 24;
/// Length of the longest error in bytes: errors are for people.
const MAX_ERROR: usize = 4096;

/// Runs one input.
///
/// # Panics
/// When a reader violates a requirement.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let mut text = Vec::new();
    for _ in 0..MAX_LINES {
        if input.is_empty() {
            break;
        }
        line(&mut text, &mut input);
    }
    let path = path();
    write(&path, &text);
    // Names of tokens are not secret.
    read("tokens", || Tokens::read(&path).map(|_| String::new()));
    read("keys of TLS", || tls::Server::with_keys(&path).map(|server| format!("{server:?}")));
    read("a key of TLS", || tls::Client::with_key(&path, None).map(|_| String::new()));
    read("keys of hosts", || Keys::read(&path).map(|keys| keys.hosts().count().to_string()));
    read("a key of a host", || Key::read(&path).map(|key| format!("{key:?}")));
    read("TLS keys of hosts", || TlsKeys::read(&path).map(|_| String::new()));
    // The content of a configuration is shown to its author; only its errors are checked.
    read("the configuration", || Config::read(&path).map(|_| String::new()));
}

fn path() -> PathBuf {
    std::env::temp_dir().join(format!("fuzz-files-{}", std::process::id()))
}

fn write(path: &Path, text: &[u8]) {
    let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path);
    file.and_then(|mut file| file.write_all(text)).expect("a file of ours");
}

/// Reads twice and checks the result.
fn read<E: Error>(what: &str, reader: impl Fn() -> Result<String, E>) {
    match (reader(), reader()) {
        (Ok(first), Ok(second)) => {
            assert_eq!(first, second, "{what}: read twice");
            check(what, &first);
        }
        (Err(error), Err(_)) => {
            let said = error.to_string();
            assert!(!said.is_empty() && said.len() < MAX_ERROR, "{what}: {} bytes: {said}", said.len());
            check(what, &said);
            check(what, &format!("{error:?}"));
            let mut source = error.source();
            while let Some(cause) = source {
                check(what, &cause.to_string());
                source = cause.source();
            }
        }
        (first, second) => panic!("{what}: read twice: {:?}, {:?}", first.is_ok(), second.is_ok()),
    }
}

fn check(what: &str, said: &str) {
    let said = said.to_lowercase();
    let given_away = MARKS.iter().find(|mark| said.contains(**mark));
    assert!(given_away.is_none(), "{what}: a secret is given away: {said}");
}

/// Appends the next line: of one of the files, or of words in any order.
fn line(text: &mut Vec<u8>, input: &mut Input<'_>) {
    let (choice, which) = (input.u8(), input.u8());
    let secret = SECRETS[usize::from(which) % SECRETS.len()];
    let name = WORDS[3 + usize::from(which / 8) % 4];
    let made = match choice {
        0..=23 => format!("{} {name} {secret}", WORDS[usize::from(choice) % 3]),
        24..=47 => format!("{name}:{secret}"),
        48..=71 => format!("{} {secret}", WORDS[5 + usize::from(choice) % 2]),
        72..=79 => secret.to_owned(),
        80..=95 => WORDS[7 + usize::from(which) % 5].to_owned(),
        96..=143 => format!("{} = {}", WORDS[12 + usize::from(choice) % 14], value(secret, input)),
        144..=151 => format!("# {secret}"),
        152..=215 => {
            let words: Vec<&str> = (0..which % 5).map(|_| word(secret, input)).collect();
            words.join(input.one_of(&[" ", ":", "\t", "=", ", ", "."]))
        }
        216..=223 => String::new(),
        _ => {
            text.extend(input.bytes(48));
            String::new()
        }
    };
    text.extend(made.as_bytes());
    match which {
        0..=239 => text.push(b'\n'),
        240..=243 => text.extend(b"\r\n"),
        244..=247 => text.push(0),
        _ => {}
    }
}

fn word<'a>(secret: &'a str, input: &mut Input<'_>) -> &'a str {
    match input.u8() {
        choice @ 0..=191 => WORDS[usize::from(choice) % WORDS.len()],
        choice => &secret[usize::from(choice - 192) % secret.len() / 2..],
    }
}

/// A valid or nearly valid TOML value.
fn value(secret: &str, input: &mut Input<'_>) -> String {
    match input.below(12) {
        0 => format!("\"{secret}\""),
        1 => "\"data\"".into(),
        2 => format!("[\"m0\", \"{}\"]", word(secret, input)),
        3 => input.u64().to_string(),
        4 => "true".into(),
        5 => format!("{{ iops = {{ per_s = {} }} }}", input.u8()),
        6 => "{ a = \"b\" }".into(),
        7 => format!("'{secret}"),
        8 => "[".repeat(usize::from(input.u8()) * 64),
        9 => "{a=".repeat(usize::from(input.u8()) * 64),
        10 => format!("\"{}\"", "x".repeat(usize::from(input.u8()) * 256)),
        _ => input.u8().to_string(),
    }
}
