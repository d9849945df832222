//! Switching to another user, on all threads.

use crate::Error;
use nix::unistd::{self, Gid, Group, Uid};
use std::ffi::CString;
use std::fmt;
use std::io;

/// A user to switch to, with its groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    name: String,
    uid: Uid,
    gid: Gid,
    groups: Vec<Gid>,
}

impl User {
    /// Finds the user that `text` names: `NAME` or `UID`, followed by `:GROUP` or `:GID` to replace
    /// the user's own group. Reads the system's databases of users and groups.
    ///
    /// # Errors
    /// The user or group does not exist.
    pub fn find(text: &str) -> Result<User, Error> {
        let (name, group) = match text.split_once(':') {
            Some((name, group)) => (name, Some(group)),
            None => (text, None),
        };
        let failed = |message: String| Error::User { user: text.into(), error: io::Error::other(message) };
        let entry = match name.parse() {
            Ok(uid) => unistd::User::from_uid(Uid::from_raw(uid)),
            Err(_) => unistd::User::from_name(name),
        };
        let entry = entry.map_err(|error| failed(error.to_string()))?;
        let uid = match (&entry, name.parse()) {
            (Some(entry), _) => entry.uid,
            (None, Ok(uid)) => Uid::from_raw(uid),
            (None, Err(_)) => return Err(failed("no such user".into())),
        };
        let gid = match (group.map(str::parse), group, &entry) {
            (Some(Ok(gid)), ..) => Gid::from_raw(gid),
            (_, Some(group), _) => match Group::from_name(group) {
                Ok(Some(group)) => group.gid,
                _ => return Err(failed(format!("no such group: {group}"))),
            },
            (_, None, Some(entry)) => entry.gid,
            (_, None, None) => return Err(failed("a UID without a name needs a group: UID:GID".into())),
        };
        let groups = match entry {
            Some(entry) => groups_of(&entry.name, gid).map_err(|error| failed(error.to_string()))?,
            None => vec![gid],
        };
        Ok(User { name: text.into(), uid, gid, groups })
    }

    /// Returns whether the user is root, which keeps privileges.
    pub fn is_root(&self) -> bool {
        self.uid.is_root()
    }

    /// Gives a file or directory to the user.
    pub(crate) fn own(&self, path: &std::path::Path) -> io::Result<()> {
        std::os::unix::fs::chown(path, Some(self.uid.as_raw()), Some(self.gid.as_raw()))
    }

    /// Switches to this user. Does nothing if the process runs as this user already.
    pub(crate) fn switch(&self) -> Result<(), Error> {
        if unistd::getresuid().is_ok_and(|ids| [ids.real, ids.effective, ids.saved] == [self.uid; 3])
            && unistd::getegid() == self.gid
        {
            return Ok(());
        }
        // The user ID is last: only root may change groups. The C library changes each on all
        // threads.
        unistd::setgroups(&self.groups)
            .and_then(|()| unistd::setresgid(self.gid, self.gid, self.gid))
            .and_then(|()| unistd::setresuid(self.uid, self.uid, self.uid))
            .map_err(|error| Error::User { user: self.name.clone(), error: error.into() })
    }
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

fn groups_of(name: &str, gid: Gid) -> nix::Result<Vec<Gid>> {
    let name = CString::new(name).map_err(|_| nix::errno::Errno::EINVAL)?;
    unistd::getgrouplist(&name, gid)
}

/// Returns the effective user ID of the process.
pub fn effective_user() -> u32 {
    unistd::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_named_or_numbered() {
        let root = User::find("root").unwrap();
        assert!(root.is_root() && root.groups.contains(&Gid::from_raw(0)));
        assert_eq!(User::find("0").unwrap().uid, root.uid);
        let other = User::find("54321:12345").unwrap();
        assert_eq!((other.uid.as_raw(), other.gid.as_raw()), (54321, 12345));
        assert_eq!(other.groups, [Gid::from_raw(12345)]);
        assert_eq!(User::find("root:12345").unwrap().gid, Gid::from_raw(12345));
    }

    #[test]
    fn an_unknown_user_is_refused_by_name() {
        let refusal = |text| User::find(text).unwrap_err().to_string();
        assert_eq!(refusal("nobody-at-all"), "user nobody-at-all: no such user");
        assert_eq!(refusal("54321"), "user 54321: a UID without a name needs a group: UID:GID");
        assert_eq!(refusal("root:no-such-group"), "user root:no-such-group: no such group: no-such-group");
    }

    #[test]
    fn becoming_who_one_is_takes_no_privilege() {
        let me = format!("{}:{}", unistd::geteuid(), unistd::getegid());
        User::find(&me).unwrap().switch().unwrap();
    }
}
