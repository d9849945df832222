//! The restrictions in force, for reports.

use std::fmt;

/// The restrictions of a process, and its remaining capabilities.
#[derive(Clone, Debug)]
pub struct InForce {
    /// The version of Landlock's interface, or why it is not in force.
    pub landlock: Result<i32, String>,
    /// Whether system calls are filtered, or why not.
    pub seccomp: Result<(), String>,
    /// Set when executed programs cannot gain privileges.
    pub no_new_privs: bool,
    /// Names of the remaining capabilities.
    pub capabilities: Vec<String>,
    /// The user ID.
    pub user: u32,
}

impl Default for InForce {
    fn default() -> Self {
        let why = || "not asked for".to_owned();
        InForce {
            landlock: Err(why()),
            seccomp: Err(why()),
            no_new_privs: false,
            capabilities: Vec::new(),
            user: 0,
        }
    }
}

impl InForce {
    /// Returns whether all restrictions are in force.
    pub fn is_complete(&self) -> bool {
        self.landlock.is_ok() && self.seccomp.is_ok() && self.no_new_privs
    }
}

impl fmt::Display for InForce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.landlock {
            Ok(version) => write!(f, "landlock (version {version})")?,
            Err(error) => write!(f, "no landlock ({error})")?,
        }
        match &self.seccomp {
            Ok(()) => write!(f, ", seccomp")?,
            Err(error) => write!(f, ", no seccomp ({error})")?,
        }
        write!(f, ", user {}, ", self.user)?;
        match &self.capabilities[..] {
            [] => f.write_str("no capabilities"),
            capabilities => f.write_str(&capabilities.join(" ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_one_line_whatever_is_missing() {
        let whole = InForce {
            landlock: Ok(6),
            seccomp: Ok(()),
            no_new_privs: true,
            capabilities: vec!["CAP_SYS_ADMIN".into()],
            user: 0,
        };
        assert_eq!(whole.to_string(), "landlock (version 6), seccomp, user 0, CAP_SYS_ADMIN");
        assert!(whole.is_complete());
        let less = InForce { landlock: Err("why".into()), capabilities: vec![], ..whole };
        assert!(
            less.to_string().starts_with("no landlock (why), ")
                && less.to_string().ends_with(", no capabilities")
        );
        assert!(!less.is_complete());
    }
}
