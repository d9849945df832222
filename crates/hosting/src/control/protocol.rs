//! The protocol of a control socket: one JSON object a line.
//!
//! ```text
//!   → {"version":2,"command":"act","action":"fail","members":["3"]}
//!   ← {"version":2,"ok":{"text":"slot 3 failed","array":{"name":"data",…},"pid":77}}
//!   ← {"version":2,"error":"slot 3: there is no such slot in array data (0 to 2)"}
//! ```
//!
//! A server of several arrays may have one socket for all of them: `"array":"data"` says which one
//! is meant, by name or UUID. Without it `show` answers with `"arrays"`. Actions and arrays have
//! the fields of the daemon's API ([`api`]).

use api::{Array, ArrayAction};
use serde::{Deserialize, Serialize};

/// The version of the protocol. Fields may be added to it; what changes their meaning gets another
/// version.
pub const VERSION: u32 = 2;
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

/// The commands. An action is the one of the daemon's API.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case")]
pub enum Command {
    /// Report the array and its members.
    Show,
    /// Stop the array cleanly and end the process that serves it.
    Stop,
    /// Carry an action out.
    Act(ArrayAction),
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
    pub array: Option<Array>,
    /// All arrays, when none was named and there are several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub arrays: Vec<Array>,
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
        let fail = |member: &str| Command::Act(ArrayAction::Fail { members: vec![member.into()] });
        let pause = Command::Act(ArrayAction::Pause);
        for command in [Command::Show, fail("/dev/a\nb"), pause, Command::Stop] {
            let array = Some("da\nta".to_owned());
            let line =
                serde_json::to_string(&Request { version: VERSION, array, command }).expect("plain data");
            assert!(!line.contains('\n'));
            assert_eq!(serde_json::to_string(&parse_request(line.as_bytes()).unwrap()).unwrap(), line);
        }
        let text = r#"{"version":2,"command":"act","action":"fail","members":["3"]}"#;
        assert_eq!(
            parse_request(text.as_bytes()),
            Ok(Request { version: 2, array: None, command: fail("3") })
        );
        let text = r#"{"version":2,"command":"act","action":"set","read_error_budget":0}"#;
        let set = ArrayAction::Set { scrub_period_s: None, scrub_window: None, read_error_budget: Some(0) };
        assert_eq!(parse_request(text.as_bytes()).unwrap().command, Command::Act(set));
        // Omitted fields have defaults.
        let text = r#"{"version":2,"command":"act","action":"add","devices":["/dev/a"]}"#;
        let add = ArrayAction::Add { devices: vec!["/dev/a".into()], force: false, global: false };
        assert_eq!(parse_request(text.as_bytes()).unwrap().command, Command::Act(add));
    }

    #[test]
    fn an_invalid_request_is_answered_with_the_reason() {
        let refusal = |text: &str| parse_request(text.as_bytes()).unwrap_err();
        assert!(refusal("").starts_with("no request of this protocol: EOF"));
        assert!(refusal("[2]").starts_with("no request: "));
        assert!(refusal(r#"{"command":"show"}"#).contains("missing field `version`"));
        assert_eq!(
            refusal(r#"{"version":3,"command":"dance"}"#),
            "version 3 of the protocol: this server speaks 2"
        );
        assert!(refusal(r#"{"version":2,"command":"dance"}"#).contains("unknown variant `dance`"));
        assert!(
            refusal(r#"{"version":2,"command":"act","action":"fail"}"#).contains("missing field `members`")
        );
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
