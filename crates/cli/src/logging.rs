//! Logs, on standard error.

use crate::error::Error;
use tracing_subscriber::EnvFilter;

/// The variable that sets the log level where `--log` does not.
const VARIABLE: &str = "FREESTONE_LOG";

/// Starts logging. `level` is a level (`error` to `trace`, `off`) or a list such as
/// `warn,exports=debug`.
///
/// # Errors
/// When the level is invalid.
pub fn start(level: Option<&str>, default: &str, is_json: bool) -> Result<(), Error> {
    let from_environment = std::env::var(VARIABLE).ok().filter(|text| !text.is_empty());
    let (name, text) = match (level, &from_environment) {
        (Some(text), _) => ("--log", text),
        (None, Some(text)) => (VARIABLE, text.as_str()),
        (None, None) => ("--log", default),
    };
    let filter = EnvFilter::builder().parse(text).map_err(|_| {
        let expected = "error, warn, info, debug, trace or off, or a list such as warn,exports=debug";
        Error::Usage(format!("{name} {text}: expected {expected}"))
    })?;
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    if is_json {
        logs.json().flatten_event(true).init();
    } else {
        let is_terminal = std::io::IsTerminal::is_terminal(&std::io::stderr());
        logs.with_ansi(is_terminal).with_target(false).init();
    }
    Ok(())
}
