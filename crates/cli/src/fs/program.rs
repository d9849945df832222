//! The program virtiofsd: where it is, and whether its version has the flags of the profiles.

use crate::error::Error;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// Directories that distributions put it into, before those of PATH.
const DIRECTORIES: [&str; 2] = ["/usr/libexec", "/usr/lib/qemu"];
/// The first version whose flags the profiles can rely on.
const MIN_VERSION: (u32, u32) = (1, 11);
/// Longest wait for the version. It bounds a program that prints none.
const VERSION_TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes of a version's text that are read.
const MAX_OUTPUT: u64 = 4096;
const INSTALL: &str =
    "want 1.11 or newer: install the package virtiofsd (Debian 13 has it), or give --virtiofsd PATH";

/// A virtiofsd that is new enough.
#[derive(Debug)]
pub struct Program {
    /// Where it is.
    pub path: PathBuf,
    /// As it prints it.
    pub version: String,
}

impl Program {
    /// The program at `chosen`, or the first of the usual places and of PATH that is new enough.
    ///
    /// # Errors
    /// When there is none, or only older ones, which are named.
    pub fn find(chosen: Option<&Path>) -> Result<Program, Error> {
        if let Some(path) = chosen {
            return Program::at(path).map_err(|found| Error::Runtime(format!("{found}; {INSTALL}")));
        }
        let path = std::env::var_os("PATH").unwrap_or_default();
        let directories = DIRECTORIES.iter().map(PathBuf::from).chain(std::env::split_paths(&path));
        let mut found = Vec::new();
        for path in directories.map(|directory| directory.join("virtiofsd")).filter(|path| path.is_file()) {
            match Program::at(&path) {
                Ok(program) => return Ok(program),
                Err(other) if found.contains(&other) => {}
                Err(other) => found.push(other),
            }
        }
        if found.is_empty() {
            found.push(format!("virtiofsd: not found in {} and PATH", DIRECTORIES.join(", ")));
        }
        Err(Error::Runtime(format!("{}; {INSTALL}", found.join("; "))))
    }

    /// The program at `path`; the error says what is there instead.
    fn at(path: &Path) -> Result<Program, String> {
        let name = path.display();
        let text = version_text(path).map_err(|error| format!("virtiofsd {name}: {error}"))?;
        match Version::parse(&text) {
            Some(Version::Rust(version, numbers)) if numbers >= MIN_VERSION => {
                Ok(Program { path: path.into(), version })
            }
            Some(Version::Rust(version, _)) => Err(format!("virtiofsd {name}: version {version} is too old")),
            Some(Version::Qemu(version)) => Err(format!(
                "virtiofsd {name}: it is the one of QEMU {version}, which the program of the same name replaced"
            )),
            None => Err(format!("virtiofsd {name}: --version does not print a version of virtiofsd")),
        }
    }
}

/// A version of one of the two programs of this name.
#[derive(Debug, PartialEq, Eq)]
enum Version {
    /// The one in Rust, with its first two numbers.
    Rust(String, (u32, u32)),
    /// The one in C that QEMU had up to 7.2. Its numbers are larger.
    Qemu(String),
}

impl Version {
    /// `virtiofsd 1.13.2`, `virtiofsd backend 1.10.0`, or `virtiofsd version 7.2.17 (Debian …)`.
    fn parse(text: &str) -> Option<Version> {
        let mut words = text.lines().next()?.split_whitespace();
        let (name, second) = (words.next()?, words.next()?);
        if name != "virtiofsd" {
            return None;
        }
        match second {
            "version" => Some(Version::Qemu(words.next()?.to_owned())),
            "backend" => Version::of_rust(words.next()?),
            version => Version::of_rust(version),
        }
    }

    fn of_rust(text: &str) -> Option<Version> {
        let mut numbers = text.split('.').map(|number| number.parse().ok());
        let pair = (numbers.next()??, numbers.next()??);
        Some(Version::Rust(text.to_owned(), pair))
    }
}

/// The output of `PATH --version`. Ends a program that runs longer, or prints more.
fn version_text(path: &Path) -> Result<String, String> {
    let mut command = Command::new(path);
    command.arg("--version").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|error| format!("cannot be started: {error}"))?;
    let stdout = child.stdout.take().expect("piped");
    let (sender, receiver) = mpsc::channel();
    let read = move || {
        let mut text = Vec::new();
        let result = stdout.take(MAX_OUTPUT).read_to_end(&mut text);
        let _ = sender.send(result.map(|_| text)); // fails where the wait was too long
    };
    let started = reactor::spawn_thread("fs-version", read);
    let text = started.map(|_| receiver.recv_timeout(VERSION_TIMEOUT));
    let _ = child.kill(); // fails where it has ended
    let _ = child.wait();
    match text {
        Ok(Ok(Ok(bytes))) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Ok(Ok(Err(error))) | Err(error) => Err(format!("cannot read its version: {error}")),
        Ok(Err(_)) => Err(format!("--version has not ended after {} s", VERSION_TIMEOUT.as_secs())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_programs_of_this_name_are_told_apart() {
        let rust = |text: &str, numbers| Some(Version::Rust(text.into(), numbers));
        assert_eq!(Version::parse("virtiofsd 1.13.2\n"), rust("1.13.2", (1, 13)));
        assert_eq!(Version::parse("virtiofsd backend 1.10.0\n"), rust("1.10.0", (1, 10)));
        assert_eq!(Version::parse("virtiofsd 2.0.0-dev"), rust("2.0.0-dev", (2, 0)));
        let c = "virtiofsd version 7.2.17 (Debian 1:7.2+dfsg-7)\nusing FUSE kernel interface version 7.36\n";
        assert_eq!(Version::parse(c), Some(Version::Qemu("7.2.17".into())));
        for text in ["", "virtiofsd", "virtiofsd x.y", "virtiofsd 1", "qemu 1.13.2", "virtiofsd version"] {
            assert_eq!(Version::parse(text), None, "{text}");
        }
    }
}
