//! Standard output of the program: lines for users, or one JSON object a line.

use serde_json::{Value, json};
use std::fmt::Display;
use std::io::Write;

/// Where results and state changes go. Logs go elsewhere: to standard error.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    is_json: bool,
}

impl Output {
    /// An output in JSON, or for people.
    pub fn new(is_json: bool) -> Output {
        Output { is_json }
    }

    /// Says that `event` has happened: `human` to people, and the object `fields` with the event's
    /// name to programs.
    pub fn event(&self, event: &str, human: impl Display, fields: Value) {
        let mut stdout = std::io::stdout().lock();
        // The reader of standard output is gone, which is no reason to stop serving.
        let _ = if self.is_json {
            let mut object = json!({ "event": event });
            if let (Some(object), Value::Object(fields)) = (object.as_object_mut(), fields) {
                object.extend(fields);
            }
            writeln!(stdout, "{object}")
        } else {
            writeln!(stdout, "{human}")
        };
        let _ = stdout.flush();
    }
}

/// A time in nanoseconds since 1970, in UTC to the second.
pub fn time(at_ns: u64) -> String {
    let since = std::time::Duration::from_secs(at_ns / 1_000_000_000);
    humantime::format_rfc3339_seconds(std::time::UNIX_EPOCH + since).to_string()
}
