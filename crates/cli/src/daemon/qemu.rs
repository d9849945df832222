//! The version of QEMU that a line is printed for.

use std::process::{Command, Stdio};

/// The first version that has `reconnect-ms` on sockets; newer ones drop `reconnect`.
pub const RECONNECT_MS: Version = Version { major: 9, minor: 2 };

/// A version of QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    major: u32,
    minor: u32,
}

impl std::str::FromStr for Version {
    type Err = String;

    /// Reads `7.2` or `7.2.17`; anything may follow the second number.
    fn from_str(text: &str) -> Result<Version, String> {
        let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(str::parse);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(major)), Some(Ok(minor))) => Ok(Version { major, minor }),
            _ => Err("expected a version such as 7.2 or 9.2.1".into()),
        }
    }
}

/// The version of the QEMU of this machine, if there is one.
pub fn installed() -> Option<Version> {
    let names = [
        format!("qemu-system-{}", std::env::consts::ARCH),
        "qemu-kvm".into(),
        "/usr/libexec/qemu-kvm".into(), // where Red Hat has it
        "kvm".into(),
    ];
    names.iter().find_map(|name| {
        let output = Command::new(name).arg("--version").stdin(Stdio::null()).output().ok()?;
        version_in(&String::from_utf8_lossy(&output.stdout))
    })
}

/// The version in what `qemu-system-… --version` prints.
fn version_in(text: &str) -> Option<Version> {
    text.split_once("QEMU emulator version ")?.1.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_read_from_the_words_of_qemu() {
        let debian =
            "QEMU emulator version 7.2.17 (Debian 1:7.2+dfsg-7+deb12u15)\nCopyright (c) 2003-2022 …\n";
        assert_eq!(version_in(debian), Some(Version { major: 7, minor: 2 }));
        assert_eq!(version_in("QEMU emulator version 10.0.2"), Some(Version { major: 10, minor: 0 }));
        assert_eq!(version_in("nbdkit 1.32"), None);
    }

    #[test]
    fn versions_are_compared_by_number() {
        let version = |text: &str| text.parse::<Version>().unwrap();
        assert!(
            version("9.1.2") < RECONNECT_MS
                && version("10.0") > RECONNECT_MS
                && version("9.2") == RECONNECT_MS
        );
        for bad in ["", "9", "x.1", "nine.two"] {
            assert!(bad.parse::<Version>().is_err(), "{bad}");
        }
    }
}
