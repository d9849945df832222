//! Options that commands share, and parsers of their values. Imports no command.

use reactor::{CoreConfig, PollWindow};
use spec::{CpuList, Value};

/// Options of every command.
#[derive(clap::Args, Debug)]
pub struct CommonArgs {
    /// Print one JSON object per line, and log in JSON
    #[arg(long, global = true)]
    pub json: bool,
    /// Log level on standard error: error, warn, info, debug, trace, off, or a list such as
    /// warn,exports=debug [default: FREESTONE_LOG]
    #[arg(long, global = true, value_name = "LEVEL")]
    pub log: Option<String>,
}

/// A clap parser for one of our value types.
pub fn value<V: Value>(text: &str) -> Result<V, String> {
    V::parse(text).ok_or_else(|| format!("expected {}", V::expected()))
}

/// A clap parser for RAID levels.
pub fn level(text: &str) -> Result<api::Level, String> {
    let known = || api::Level::ALL.iter().map(|level| level.name()).collect::<Vec<_>>().join(", ");
    api::Level::from_name(text).ok_or_else(|| format!("expected {}", known()))
}

/// A clap parser for consistency modes.
pub fn consistency(text: &str) -> Result<api::Consistency, String> {
    api::Consistency::from_name(text).ok_or_else(|| "expected ppl, bitmap or none".into())
}

/// A clap parser for data planes.
pub fn data_plane(text: &str) -> Result<api::DataPlane, String> {
    api::DataPlane::from_name(text).ok_or_else(|| "expected user, kernel or auto".into())
}

/// A clap parser for ANA states.
pub fn ana_state(text: &str) -> Result<api::AnaState, String> {
    let names = || api::AnaState::ALL.iter().map(|state| state.name()).collect::<Vec<_>>().join(", ");
    api::AnaState::from_name(text).ok_or_else(|| format!("expected one of {}", names()))
}

/// A clap parser for a type that parses itself.
pub fn parsed<V: std::str::FromStr<Err = String>>(text: &str) -> Result<V, String> {
    text.parse()
}

/// A clap parser for read-error budgets: 0 stands for off.
pub fn read_errors(text: &str) -> Result<u32, String> {
    match text {
        "off" => Ok(0),
        _ => u32::parse(text).filter(|most| *most > 0).ok_or_else(|| "expected 1 or more, or off".into()),
    }
}

/// How long cores poll without work: `--poll-us`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PollUs(pub PollWindow);

impl Value for PollUs {
    fn expected() -> String {
        "a number of microseconds, always or never".into()
    }

    fn parse(text: &str) -> Option<Self> {
        let max_ns = match text {
            "always" => u64::MAX,
            "never" => 0,
            number => u64::from(u32::parse(number)?) * 1000,
        };
        Some(PollUs(PollWindow::up_to(max_ns)))
    }
}

/// One core for each processor, or a single one that the scheduler places.
pub fn core_configs(cpus: Option<&CpuList>, poll: PollWindow) -> Vec<CoreConfig> {
    match cpus {
        Some(CpuList(cpus)) => {
            cpus.iter().map(|cpu| CoreConfig { cpu: Some(*cpu), poll, ..CoreConfig::default() }).collect()
        }
        None => vec![CoreConfig { poll, ..CoreConfig::default() }],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polling_is_a_time_or_a_word() {
        assert_eq!(PollUs::parse("always").map(|p| p.0.max_ns), Some(u64::MAX));
        assert_eq!(PollUs::parse("never").map(|p| p.0.max_ns), Some(0));
        assert_eq!(PollUs::parse("50").map(|p| p.0.max_ns), Some(50_000));
        assert_eq!(PollUs::parse("often"), None);
    }
}
