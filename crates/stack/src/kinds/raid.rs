//! The array: a device over members, which are devices given before it, paths, or whatever a
//! directory holds. How it is opened stands in [`crate::array`].

use raid::array::{Deadlines, Soft};
use spec::{ID, Kind, READ_ONLY, Role, Spec, SpecError, Switch, Value, key};
use std::path::PathBuf;

/// The kind.
pub static RAID: Kind = Kind {
    name: "raid",
    about: "a RAID array made by freestone array create",
    keys: &[
        key("members", "LIST", "ids of devices given before, or paths, joined by +"),
        key("scan", "DIR", "directory whose files and block devices are searched for members; needs name="),
        key("name", "NAME", "the array's name or UUID: members of others are refused, or ignored in scan="),
        key("run", "on|off", "start although the missing members may hold newer data [off]"),
        key("force", "on|off", "start although data may be lost; the log reports the loss [off]"),
        key(
            "soft-deadline-ms",
            "N|auto|off",
            "time after which a read is also computed from the other members; auto: 16 times the median [off]",
        ),
        key(
            "hard-deadline-ms",
            "N",
            "read timeout after which a member is failed, if the array can do without it [30000]",
        ),
        key(
            "snapshot",
            "on|off",
            "copy data that a client may change meanwhile before it is written; off: levels 1 and 10 only [on]",
        ),
        key("direct", "on|off", "bypass the page cache of members given by path [on]"),
        READ_ONLY,
        ID,
    ],
};

/// An array to be assembled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RaidConfig {
    /// Its name or UUID, if it was given.
    pub name: Option<String>,
    /// A directory to look for members in.
    pub scan: Option<PathBuf>,
    /// Start although members are missing that could have gone on without these.
    pub run: bool,
    /// Start although data may be lost.
    pub force: bool,
    /// Bypass the page cache of members given by path.
    pub direct: bool,
    /// Refuse writes.
    pub read_only: bool,
    /// How long members are waited for.
    pub deadlines: Deadlines,
    /// Copy data that a client may change meanwhile; see
    /// [`Array::set_snapshot`](raid::array::Array::set_snapshot).
    pub snapshot: bool,
}

/// A parsed `raid` specification.
pub(crate) struct RaidSpec {
    pub config: RaidConfig,
    /// Ids or paths.
    pub members: Vec<String>,
    pub id: Option<String>,
}

impl RaidSpec {
    /// Parses `text`.
    pub fn parse(text: &str) -> Result<RaidSpec, SpecError> {
        let spec = Spec::parse(Role::Device, &[&RAID], text)?;
        let is_on = |key, default| spec.get_or(key, Switch(default)).map(|Switch(on)| on);
        let config = RaidConfig {
            name: spec.get("name")?,
            scan: spec.get("scan")?,
            run: is_on("run", false)?,
            force: is_on("force", false)?,
            direct: is_on("direct", true)?,
            read_only: is_on("readonly", false)?,
            deadlines: deadlines(&spec)?,
            snapshot: is_on("snapshot", true)?,
        };
        let members = spec.get("members")?.map(|Members(members)| members);
        match (&members, &config.scan, &config.name) {
            (Some(_), None, _) | (None, Some(_), Some(_)) => {}
            (Some(_), Some(_), _) => {
                return Err(spec.refuse("members= and scan= both say what the members are"));
            }
            (None, Some(_), None) => return Err(spec.refuse("scan= needs name=NAME")),
            (None, None, _) => return Err(spec.refuse("one of members= and scan= is needed")),
        }
        Ok(RaidSpec { config, members: members.unwrap_or_default(), id: spec.get("id")? })
    }
}

/// How long members are waited for.
fn deadlines(spec: &Spec) -> Result<Deadlines, SpecError> {
    let Deadline(soft) = spec.get_or("soft-deadline-ms", Deadline(Soft::Never))?;
    let hard_ms: u64 = spec.get_or("hard-deadline-ms", Deadlines::HARD_NS / NS_PER_MS)?;
    match (soft, hard_ms) {
        (_, 0) => Err(spec.refuse("hard-deadline-ms= is at least 1")),
        (Soft::After(soft_ns), _) if soft_ns / NS_PER_MS >= hard_ms => {
            Err(spec.refuse("soft-deadline-ms= is less than hard-deadline-ms="))
        }
        _ => Ok(Deadlines { soft, hard_ns: hard_ms.saturating_mul(NS_PER_MS) }),
    }
}

const NS_PER_MS: u64 = 1_000_000;

/// `auto`, `off` or milliseconds.
struct Deadline(Soft);

impl Value for Deadline {
    fn expected() -> String {
        "auto, off or milliseconds from 1 on".into()
    }

    fn parse(text: &str) -> Option<Self> {
        Some(Deadline(match text {
            "auto" => Soft::Adaptive,
            "off" => Soft::Never,
            number => {
                let ms: u64 = number.parse().ok().filter(|ms| *ms > 0)?;
                Soft::After(ms.saturating_mul(NS_PER_MS))
            }
        }))
    }
}

/// Ids and paths joined by `+`.
struct Members(Vec<String>);

impl Value for Members {
    fn expected() -> String {
        "ids or paths joined by +, each once".into()
    }

    fn parse(text: &str) -> Option<Self> {
        let names: Vec<String> = text.split('+').map(str::to_owned).collect();
        let is_new = |(i, name): (usize, &String)| !name.is_empty() && !names[..i].contains(name);
        names.iter().enumerate().all(is_new).then_some(Members(names))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlines_are_off_unless_asked_for_and_in_order() {
        let parse = |more: &str| RaidSpec::parse(&format!("raid:members=a+b{more}"));
        let deadlines = |more: &str| parse(more).map_err(|e| e.to_string()).unwrap().config.deadlines;
        assert_eq!(deadlines(""), Deadlines::default());
        assert_eq!(deadlines(",soft-deadline-ms=auto").soft, Soft::Adaptive);
        let both = deadlines(",soft-deadline-ms=20,hard-deadline-ms=5000");
        assert_eq!(both, Deadlines { soft: Soft::After(20_000_000), hard_ns: 5_000_000_000 });
        let refusal = |more: &str| parse(more).err().expect("a refusal").to_string();
        assert!(refusal(",soft-deadline-ms=0").contains("expected auto, off or milliseconds from 1 on"));
        assert!(refusal(",hard-deadline-ms=0").contains("hard-deadline-ms= is at least 1"));
        let message = refusal(",soft-deadline-ms=50,hard-deadline-ms=50");
        assert!(message.contains("soft-deadline-ms= is less than hard-deadline-ms="), "{message}");
    }
}
