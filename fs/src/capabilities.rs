//! The capabilities that a server of root keeps: those that acting for the users of a guest takes.

use capng::{Action, Set, Type};
use std::collections::BTreeSet;
use virtiofsd::passthrough::InodeFileHandlesMode;

/// To make files for the users of the guest, and to change their owners and modes.
const ALWAYS: [&str; 8] =
    ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "MKNOD", "SETFCAP", "SETGID", "SETUID"];
/// To open files by handles.
const FILE_HANDLES: &str = "DAC_READ_SEARCH";

/// Drops all capabilities but those needed, as `changes` changes them: `+NAME` and `-NAME`, with
/// `:` between.
///
/// # Errors
/// When `changes` is invalid, or the kernel refuses.
pub fn drop_others(handles: InodeFileHandlesMode, changes: &str) -> Result<(), String> {
    let kept = kept(handles, changes)?;
    let failed = |error| format!("capabilities: cannot be dropped: {error}");
    capng::clear(Set::BOTH);
    let names = kept.iter().map(String::as_str).collect();
    capng::updatev(Action::ADD, Type::PERMITTED | Type::EFFECTIVE, names).map_err(failed)?;
    capng::apply(Set::BOTH).map_err(failed)
}

fn kept(handles: InodeFileHandlesMode, changes: &str) -> Result<BTreeSet<String>, String> {
    let has_handles = handles != InodeFileHandlesMode::Never;
    let mut kept: BTreeSet<String> = ALWAYS.map(str::to_owned).into();
    kept.extend(has_handles.then(|| FILE_HANDLES.to_owned()));
    for change in changes.split(':').filter(|_| !changes.is_empty()) {
        let invalid = |reason: &str| Err(format!("--modcaps {changes}: {change}: {reason}"));
        let name = change.get(1..).unwrap_or_default().to_uppercase();
        if !change.starts_with(['+', '-']) {
            return invalid("want +CAPABILITY or -CAPABILITY");
        }
        if capng::name_to_capability(&name).is_err() {
            return invalid("no such capability");
        }
        match change.starts_with('+') {
            true => drop(kept.insert(name)),
            false if has_handles && name == FILE_HANDLES => {
                return invalid("file handles need it: want --inode-file-handles=never, too");
            }
            false => drop(kept.remove(&name)),
        }
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;
    use InodeFileHandlesMode::{Never, Prefer};

    #[test]
    fn the_list_is_changed_by_the_option() {
        assert_eq!(kept(Never, "").unwrap(), ALWAYS.map(str::to_owned).into());
        assert!(kept(Prefer, "").unwrap().contains(FILE_HANDLES));
        let changed = kept(Prefer, "+sys_admin:-CHOWN").unwrap();
        assert!(changed.contains("SYS_ADMIN") && !changed.contains("CHOWN"), "{changed:?}");
    }

    #[test]
    fn an_invalid_change_is_named() {
        for (changes, reason) in [
            ("chown", "--modcaps chown: chown: want +CAPABILITY or -CAPABILITY"),
            ("+chown:", ": : want +CAPABILITY"),
            ("+fly", "+fly: no such capability"),
            ("é", "é: want +CAPABILITY"),
            ("-dac_read_search", "file handles need it"),
        ] {
            let text = kept(Prefer, changes).unwrap_err();
            assert!(text.contains(reason), "{changes}: {text}");
        }
    }
}
