//! The programs virtiofsd and freestone-fs: where they are, and whether their versions have the
//! flags of the profiles.

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
/// The version of this program.
const OWN_VERSION: &str = env!("CARGO_PKG_VERSION");
const INSTALL: &str =
    "want 1.11 or newer: install the package virtiofsd (Debian 13 has it), or give --virtiofsd PATH";

/// A server that can be started.
#[derive(Debug)]
pub struct Program {
    /// Its name in messages.
    pub name: &'static str,
    /// Where it is.
    pub path: PathBuf,
    /// As it prints it.
    pub version: String,
}

/// The two servers.
#[derive(Clone, Copy)]
enum Kind {
    /// One request queue.
    Virtiofsd,
    /// Several: a program of this release, since its flags are no interface for others.
    FreestoneFs,
}

impl Program {
    /// The program for this number of request queues: at `chosen`, or the first of the usual places
    /// and of PATH that is new enough.
    ///
    /// # Errors
    /// When there is none, or only other ones, which are named.
    pub fn find(chosen: Option<&Path>, queues: u16) -> Result<Program, Error> {
        let kind = if queues > 1 { Kind::FreestoneFs } else { Kind::Virtiofsd };
        let (name, wanted) = (kind.name(), kind.wanted());
        if let Some(path) = chosen {
            return Program::at(path, kind).map_err(|found| Error::Runtime(format!("{found}; {wanted}")));
        }
        let path = std::env::var_os("PATH").unwrap_or_default();
        let own = kind.directories();
        let directories = own.iter().cloned().chain(std::env::split_paths(&path));
        let mut found = Vec::new();
        for path in directories.map(|directory| directory.join(name)).filter(|path| path.is_file()) {
            match Program::at(&path, kind) {
                Ok(program) => return Ok(program),
                Err(other) if found.contains(&other) => {}
                Err(other) => found.push(other),
            }
        }
        if found.is_empty() {
            let own: Vec<_> = own.iter().map(|directory| directory.display().to_string()).collect();
            found.push(format!("{name}: not found in {} and PATH", own.join(", ")));
        }
        Err(Error::Runtime(format!("{}; {wanted}", found.join("; "))))
    }

    /// The program at `path`; the error says what is there instead.
    fn at(path: &Path, kind: Kind) -> Result<Program, String> {
        let name = kind.name();
        let failed = |error: String| format!("{name} {}: {error}", path.display());
        let version = version_text(path).and_then(|text| kind.version(&text)).map_err(failed)?;
        Ok(Program { name, path: path.into(), version })
    }
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Virtiofsd => "virtiofsd",
            Kind::FreestoneFs => "freestone-fs",
        }
    }

    /// The places before those of PATH.
    fn directories(self) -> Vec<PathBuf> {
        match self {
            Kind::Virtiofsd => DIRECTORIES.map(PathBuf::from).into(),
            Kind::FreestoneFs => {
                let own = std::env::current_exe().unwrap_or_default();
                let bin = own.parent().unwrap_or(Path::new("/usr/bin"));
                vec![bin.into(), bin.parent().unwrap_or(bin).join("libexec")]
            }
        }
    }

    fn wanted(self) -> String {
        match self {
            Kind::Virtiofsd => INSTALL.into(),
            Kind::FreestoneFs => {
                format!("want {OWN_VERSION}: install the package freestone-fs, or give --virtiofsd PATH")
            }
        }
    }

    /// The version of the output of `--version`, if it will do; the error says why not.
    fn version(self, text: &str) -> Result<String, String> {
        match self {
            Kind::Virtiofsd => match Version::parse(text) {
                Some(Version::Rust(version, numbers)) if numbers >= MIN_VERSION => Ok(version),
                Some(Version::Rust(version, _)) => Err(format!("version {version} is too old")),
                Some(Version::Qemu(version)) => {
                    Err(format!("version {version} is of QEMU's former program of this name"))
                }
                None => Err("--version does not print a version of virtiofsd".into()),
            },
            Kind::FreestoneFs => {
                let mut words = text.split_whitespace();
                match (words.next(), words.next()) {
                    (Some("freestone-fs"), Some(OWN_VERSION)) => Ok(OWN_VERSION.into()),
                    (Some("freestone-fs"), Some(version)) => {
                        Err(format!("version {version} is of another release than this program"))
                    }
                    _ => Err("--version does not print a version of freestone-fs".into()),
                }
            }
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
    fn freestone_fs_is_of_the_same_release() {
        let version = |text: &str| Kind::FreestoneFs.version(text);
        assert_eq!(version(&format!("freestone-fs {OWN_VERSION} (library x 1)\n")), Ok(OWN_VERSION.into()));
        let other = version("freestone-fs 0.0.9").unwrap_err();
        assert_eq!(other, "version 0.0.9 is of another release than this program");
        for text in ["", "freestone-fs", "virtiofsd 1.13.2"] {
            assert!(
                version(text).unwrap_err().contains("does not print a version of freestone-fs"),
                "{text}"
            );
        }
    }

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
