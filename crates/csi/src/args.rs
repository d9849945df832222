//! The command line of `freestone-csi`.

use clap::{Parser, Subcommand, ValueEnum};
use std::path::PathBuf;

/// A driver for container orchestrators (CSI): volumes of freestoned over NVMe/TCP or ublk
#[derive(Parser)]
#[command(
    name = "freestone-csi",
    version,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true
)]
pub struct Args {
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Services of this process
    #[arg(long, value_enum, default_value_t = Mode::All)]
    pub mode: Mode,
    /// Socket of the driver, unix:///PATH
    #[arg(long, env = "CSI_ENDPOINT", value_parser = endpoint, required = true)]
    pub endpoint: Option<PathBuf>,
    /// Name of the driver
    #[arg(long, value_name = "NAME", default_value = "freestone.csi", value_parser = driver_name)]
    pub driver_name: String,
    /// File with the storage hosts, for the controller
    #[arg(long, value_name = "FILE", required_if_eq_any([("mode", "controller"), ("mode", "all")]))]
    pub backends: Option<PathBuf>,
    /// Prefix of the NQNs of subsystems; `:` and the UUID of the volume follow
    #[arg(long, value_name = "NQN", default_value = "nqn.2026-01.io.freestone:csi", value_parser = nqn)]
    pub nqn_prefix: String,
    /// Name of this machine in the cluster, for the node
    #[arg(long, value_name = "NAME", env = "NODE_NAME", required_if_eq_any([("mode", "node"), ("mode", "all")]))]
    pub node_id: Option<String>,
    /// The way in which the node attaches volumes
    #[arg(long, value_enum, default_value_t = Attach::NvmeTcp)]
    pub node_backend: Attach,
    /// NQN of this machine's NVMe host [/etc/nvme/hostnqn]
    #[arg(long, value_name = "NQN", value_parser = nqn)]
    pub host_nqn: Option<String>,
    /// Zone of this machine: it reaches the backends of the same zone, and those without one
    #[arg(long, value_name = "ZONE", value_parser = zone)]
    pub zone: Option<String>,
    /// Most volumes of this machine; 0: the orchestrator decides
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub max_volumes: u16,
    /// Directory for records of attached volumes
    #[arg(long, value_name = "DIR", default_value = "/run/freestone-csi")]
    pub state_dir: PathBuf,
    /// Socket of this machine's freestoned, for --node-backend ublk and direct volumes of Kata
    #[arg(long, value_name = "PATH", env = api::SOCKET_VARIABLE, default_value = api::DEFAULT_SOCKET)]
    pub socket: PathBuf,
    /// Kata's directory of direct volumes, for classes with node-backend=kata
    #[arg(long, value_name = "DIR", default_value = "/run/kata-containers/shared/direct-volumes")]
    pub kata_dir: PathBuf,
    /// Log level, error to trace, or a list such as warn,csi=debug
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log: String,
}

#[derive(Subcommand)]
pub enum Command {
    /// List the volumes of this driver that no handle of a persistent volume names, and delete some
    ///
    /// A line has the volume's identity, its size in bytes, its name, and NAMESPACE/CLAIM.
    Gc(Gc),
    /// Print the completion script of a shell
    Completion {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Write manual pages
    Man {
        /// The directory to write to
        directory: PathBuf,
    },
}

#[derive(clap::Args)]
pub struct Gc {
    /// File with the storage hosts
    #[arg(long, value_name = "FILE")]
    pub backends: PathBuf,
    /// Name of the driver
    #[arg(long, value_name = "NAME", default_value = "freestone.csi", value_parser = driver_name)]
    pub driver_name: String,
    /// File with the handles of all persistent volumes, one a line; -: standard input
    #[arg(long, value_name = "FILE")]
    pub handles: PathBuf,
    /// Delete the listed volumes that this list of an earlier run has, too
    #[arg(long, value_name = "FILE")]
    pub delete: Option<PathBuf>,
    /// Accept handles of which none is of this driver: all volumes are listed then
    #[arg(long)]
    pub allow_none: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// Makes volumes and gives nodes access to them
    Controller,
    /// Attaches volumes to this machine
    Node,
    /// Both
    All,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum Attach {
    /// The kernel's NVMe/TCP host
    NvmeTcp,
    /// Disks of this machine's freestoned
    Ublk,
    /// Files and directories, for tests
    Fake,
}

fn endpoint(text: &str) -> Result<PathBuf, String> {
    let path = text.strip_prefix("unix://").unwrap_or(text);
    match path.starts_with('/') {
        true => Ok(path.into()),
        false => Err("want unix:///PATH".into()),
    }
}

/// A domain name, as CSI has it.
fn driver_name(text: &str) -> Result<String, String> {
    match csi::ids::is_name(text, b".-") {
        true => Ok(text.to_owned()),
        false => {
            Err("want at most 63 letters, digits, '-' and '.', with a letter or digit at both ends".into())
        }
    }
}

fn zone(text: &str) -> Result<String, String> {
    match csi::ids::is_zone(text) {
        true => Ok(text.to_owned()),
        false => Err("want a value of a label of Kubernetes".into()),
    }
}

fn nqn(text: &str) -> Result<String, String> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b',');
    match text.starts_with("nqn.") && text.len() <= 180 && is_plain {
        true => Ok(text.to_owned()),
        false => Err("want an NQN of at most 180 bytes".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_checked() {
        assert_eq!(endpoint("unix:///csi/csi.sock"), Ok("/csi/csi.sock".into()));
        assert!(endpoint("tcp://127.0.0.1:1").is_err());
        assert!(driver_name("freestone.csi").is_ok() && driver_name("a").is_ok());
        assert!(driver_name("").is_err() && driver_name("-a").is_err() && driver_name("a/b").is_err());
        assert!(zone("eu-1").is_ok() && zone("a b").is_err());
        assert!(nqn("nqn.2014-08.org.example:h").is_ok());
        assert!(nqn("nqn.a,hostnqn=b").is_err() && nqn("x").is_err());
    }

    #[test]
    fn a_mode_needs_its_options() {
        let parse =
            |words: &[&str]| Args::try_parse_from([&["freestone-csi", "--endpoint", "/s"], words].concat());
        assert!(parse(&["--mode", "node", "--node-id", "a"]).is_ok());
        assert!(parse(&["--mode", "controller", "--backends", "f"]).is_ok());
        assert!(parse(&["--mode", "node"]).is_err());
        assert!(parse(&["--mode", "all", "--node-id", "a"]).is_err());
    }

    #[test]
    fn a_command_needs_no_options_of_the_driver() {
        let parse = |words: &[&str]| Args::try_parse_from([&["freestone-csi"], words].concat());
        assert!(parse(&["man", "/d"]).is_ok() && parse(&["completion", "bash"]).is_ok());
        assert!(parse(&[]).is_err());
        assert!(parse(&["--mode", "node", "man", "/d"]).is_err());
    }
}
