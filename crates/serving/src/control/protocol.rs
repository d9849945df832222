//! The protocol of a control socket: one JSON object a line.
//!
//! ```text
//!   → {"version":1,"command":"fail","members":["3"]}
//!   ← {"version":1,"ok":{"text":"slot 3 (/dev/sdd) is out"}}
//!   ← {"version":1,"error":"slot 3: there is no such slot in array data (0 to 2)"}
//! ```
//!
//! A server of several arrays may have one socket for all of them: `"array":"data"` says which one
//! is meant, by name or UUID. Without it `show` answers with `"arrays"`.

use raid::admin::report::ArrayReport;
use raid::metadata::MaintenanceChange;
use serde::{Deserialize, Serialize};

/// The version of the protocol. Fields may be added to it; what changes their meaning gets another
/// version.
pub const VERSION: u32 = 1;
/// Longest line: a request with a path for each of 256 members.
pub const MAX_LINE: usize = 2 << 20;

/// A request to a running array.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// [`VERSION`].
    pub version: u32,
    /// The array by name or UUID; not needed where there is only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub array: Option<String>,
    /// The command.
    #[serde(flatten)]
    pub command: Command,
}

/// The commands. Members are named by slot, UUID or device.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case")]
pub enum Command {
    /// Say what the array and its members are.
    Show,
    /// Stop the array cleanly and end the process that serves it.
    Stop,
    /// Take members out: nothing is read from them or written to them any more.
    Fail {
        /// The members.
        members: Vec<String>,
    },
    /// Detach failed members (`failed`: all of them) and spares.
    Remove {
        /// The members.
        members: Vec<String>,
    },
    /// Take devices as spares: empty slots are filled with them at once, others when a member
    /// fails.
    Add {
        /// Paths or device specifications, as the server sees them.
        devices: Vec<String>,
        /// Whatever lies on them may be overwritten.
        force: bool,
        /// They are spares for every array of the server.
        #[serde(default)]
        global: bool,
    },
    /// Take former members back into their slots: what has changed since is copied.
    ReAdd {
        /// Paths or device specifications, as the server sees them.
        devices: Vec<String>,
    },
    /// Copy a member to another device, which takes its place.
    Replace {
        /// The member.
        member: String,
        /// The device.
        device: String,
        /// Whatever lies on the device may be overwritten.
        force: bool,
    },
    /// Use what members have become larger by.
    Grow {
        /// Bytes of each member to use at most; all of the smallest without it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        size: Option<u64>,
    },
    /// Compare parity with data.
    Scrub {
        /// Rewrite wrong strips.
        repair: bool,
    },
    /// Set the scrub schedule and the read-error budget of members. Omitted fields stay unchanged.
    Set(MaintenanceChange),
    /// Let jobs stand still, until the server ends.
    Pause,
    /// Resume jobs.
    Resume,
    /// End the scrub or replacement that runs.
    Cancel,
}

/// An answer: exactly one of the two.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct Reply {
    /// [`VERSION`].
    pub version: u32,
    /// The result.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ok: Option<Done>,
    /// Why nothing was done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The result of a command.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Done {
    /// For people; several lines at most.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub text: String,
    /// The array as it is now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub array: Option<ArrayReport>,
    /// All arrays, when none was named and there are several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub arrays: Vec<ArrayReport>,
    /// The process that serves it.
    #[serde(default)]
    pub pid: u32,
}

impl Reply {
    /// The answer to a request that was carried out, or not.
    pub fn new(result: Result<Done, String>) -> Reply {
        match result {
            Ok(done) => Reply { version: VERSION, ok: Some(done), error: None },
            Err(error) => Reply { version: VERSION, ok: None, error: Some(error) },
        }
    }

    /// The result, or the error text.
    pub fn into_result(self) -> Result<Done, String> {
        match (self.ok, self.error) {
            (Some(done), None) => Ok(done),
            (None, Some(error)) => Err(error),
            _ => Err("the answer is neither a result nor an error".into()),
        }
    }
}

/// Parses a line.
///
/// # Errors
/// With an error text for the sender.
pub fn parse_request(line: &[u8]) -> Result<Request, String> {
    #[derive(Deserialize)]
    struct Versioned {
        version: u32,
    }
    // The version first: a later one may have commands that this one cannot read.
    let found: Versioned =
        serde_json::from_slice(line).map_err(|error| format!("no request of this protocol: {error}"))?;
    if found.version != VERSION {
        return Err(format!("version {} of the protocol: this server speaks {VERSION}", found.version));
    }
    serde_json::from_slice(line).map_err(|error| format!("no request: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_one_line_and_survive_it() {
        for command in [Command::Show, Command::Fail { members: vec!["/dev/a\nb".into()] }, Command::Stop] {
            let array = Some("da\nta".to_owned());
            let line =
                serde_json::to_string(&Request { version: VERSION, array, command }).expect("plain data");
            assert!(!line.contains('\n'));
            assert_eq!(serde_json::to_string(&parse_request(line.as_bytes()).unwrap()).unwrap(), line);
        }
        let text = r#"{"version":1,"command":"fail","members":["3"]}"#;
        let command = Command::Fail { members: vec!["3".into()] };
        assert_eq!(parse_request(text.as_bytes()), Ok(Request { version: 1, array: None, command }));
        let text = r#"{"version":1,"command":"set","read_errors":0}"#;
        let change = MaintenanceChange { read_errors: Some(0), ..MaintenanceChange::default() };
        assert_eq!(parse_request(text.as_bytes()).unwrap().command, Command::Set(change));
        // A request of an older client.
        let text = r#"{"version":1,"command":"add","devices":["/dev/a"],"force":true}"#;
        let command = Command::Add { devices: vec!["/dev/a".into()], force: true, global: false };
        assert_eq!(parse_request(text.as_bytes()).unwrap().command, command);
    }

    #[test]
    fn what_is_no_request_is_answered_with_the_reason() {
        let refusal = |text: &str| parse_request(text.as_bytes()).unwrap_err();
        assert!(refusal("").starts_with("no request of this protocol: EOF"));
        assert!(refusal("[1]").starts_with("no request"));
        assert!(refusal(r#"{"command":"show"}"#).contains("missing field `version`"));
        assert_eq!(
            refusal(r#"{"version":2,"command":"dance"}"#),
            "version 2 of the protocol: this server speaks 1"
        );
        assert!(refusal(r#"{"version":1,"command":"dance"}"#).contains("unknown variant `dance`"));
        assert!(refusal(r#"{"version":1,"command":"fail"}"#).contains("missing field `members`"));
        assert!(parse_request(&[0xff, b'{', b'}']).is_err());
        assert!(parse_request("[".repeat(100_000).as_bytes()).is_err());
    }

    proptest::proptest! {
        #[test]
        fn no_line_makes_the_parser_panic(line in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..200)) {
            let _ = parse_request(&line);
        }
    }
}
