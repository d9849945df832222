//! The program `freestone-csi`.

#![forbid(unsafe_code)]

use clap::{Parser, ValueEnum};
use csi::controller::Controller;
use csi::locks::Locks;
use csi::node::{Fake, FakeMounts, LinuxMounts, Mounts, Node, NodeBackend, NvmeTcp, Ublk};
use csi::proto::controller_server::ControllerServer;
use csi::proto::identity_server::IdentityServer;
use csi::proto::node_server::NodeServer;
use csi::service::Service;
use std::error::Error;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio_stream::wrappers::UnixListenerStream;

/// Calls that run at a time; others wait. Each may wait for a daemon or a program.
const MAX_CALLS: usize = 64;

/// A driver for container orchestrators (CSI): volumes of freestoned over NVMe/TCP or ublk
#[derive(Parser)]
#[command(name = "freestone-csi", version)]
struct Args {
    /// Services of this process
    #[arg(long, value_enum, default_value_t = Mode::All)]
    mode: Mode,
    /// Socket of the driver, unix:///PATH
    #[arg(long, env = "CSI_ENDPOINT", value_parser = endpoint)]
    endpoint: PathBuf,
    /// Name of the driver
    #[arg(long, value_name = "NAME", default_value = "freestone.csi", value_parser = driver_name)]
    driver_name: String,
    /// File with the storage hosts, for the controller
    #[arg(long, value_name = "FILE", required_if_eq_any([("mode", "controller"), ("mode", "all")]))]
    backends: Option<PathBuf>,
    /// Prefix of the NQNs of subsystems; `:` and the UUID of the volume follow
    #[arg(long, value_name = "NQN", default_value = "nqn.2026-01.io.freestone:csi", value_parser = nqn)]
    nqn_prefix: String,
    /// Name of this machine in the cluster, for the node
    #[arg(long, value_name = "NAME", env = "NODE_NAME", required_if_eq_any([("mode", "node"), ("mode", "all")]))]
    node_id: Option<String>,
    /// The way in which the node attaches volumes
    #[arg(long, value_enum, default_value_t = Attach::NvmeTcp)]
    node_backend: Attach,
    /// NQN of this machine's NVMe host [/etc/nvme/hostnqn]
    #[arg(long, value_name = "NQN", value_parser = nqn)]
    host_nqn: Option<String>,
    /// Most volumes of this machine; 0: the orchestrator decides
    #[arg(long, value_name = "N", default_value_t = 0)]
    max_volumes: u16,
    /// Directory for records of attached volumes
    #[arg(long, value_name = "DIR", default_value = "/run/freestone-csi")]
    state_dir: PathBuf,
    /// Socket of this machine's freestoned, for --node-backend ublk
    #[arg(long, value_name = "PATH", env = api::SOCKET_VARIABLE, default_value = api::DEFAULT_SOCKET)]
    socket: PathBuf,
    /// Log level, error to trace, or a list such as warn,csi=debug
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    log: String,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Mode {
    /// Makes volumes and gives nodes access to them
    Controller,
    /// Attaches volumes to this machine
    Node,
    /// Both
    All,
}

#[derive(Clone, Copy, ValueEnum)]
enum Attach {
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
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || b".-".contains(&byte);
    let edges = [text.bytes().next(), text.bytes().last()];
    let has_edges = edges.iter().flatten().filter(|byte| byte.is_ascii_alphanumeric()).count() == 2;
    match has_edges && text.len() <= 63 && text.bytes().all(is_inner) {
        true => Ok(text.to_owned()),
        false => {
            Err("want at most 63 letters, digits, '-' and '.', with a letter or digit at both ends".into())
        }
    }
}

fn nqn(text: &str) -> Result<String, String> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b',');
    match text.starts_with("nqn.") && text.len() <= 180 && is_plain {
        true => Ok(text.to_owned()),
        false => Err("want an NQN of at most 180 bytes".into()),
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("freestone-csi: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let filter = tracing_subscriber::EnvFilter::builder().parse(&args.log);
    let filter = filter.map_err(|_| format!("--log {}: want a level or a list of them", args.log))?;
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
    let locks = Locks::default();
    let controller = match &args.backends {
        Some(path) if args.mode != Mode::Node => Some(Arc::new(Controller {
            driver: args.driver_name.clone(),
            nqn_prefix: args.nqn_prefix.clone(),
            backends: csi::config::read(path)?,
            locks: locks.clone(),
        })),
        _ => None,
    };
    let node = match &args.node_id {
        Some(name) if args.mode != Mode::Controller => Some(Arc::new(node(args, name)?)),
        _ => None,
    };
    let service = Service { driver: args.driver_name.as_str().into(), controller, node };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(MAX_CALLS)
        .enable_all()
        .build()?;
    runtime.block_on(serve(&args.endpoint, service.clone()))?;
    // The clients end here, outside the runtime.
    drop(service);
    Ok(())
}

fn node(args: &Args, name: &str) -> Result<Node, Box<dyn Error>> {
    let (backend, mounts): (Box<dyn NodeBackend>, Box<dyn Mounts>) = match args.node_backend {
        Attach::NvmeTcp => (Box::new(NvmeTcp::new(args.host_nqn.as_deref())?), Box::new(LinuxMounts)),
        Attach::Ublk => (Box::new(Ublk::new(&args.socket, args.host_nqn.as_deref())?), Box::new(LinuxMounts)),
        Attach::Fake => (
            Box::new(Fake::new(&args.state_dir, name, args.host_nqn.as_deref())?),
            Box::new(FakeMounts::new(&args.state_dir)?),
        ),
    };
    Ok(Node::new(name, args.max_volumes, &args.state_dir, backend, mounts)?)
}

async fn serve(endpoint: &Path, service: Service) -> Result<(), Box<dyn Error>> {
    let listener = listen(endpoint).map_err(|error| format!("--endpoint {}: {error}", endpoint.display()))?;
    let mut server = tonic::transport::Server::builder()
        .concurrency_limit_per_connection(MAX_CALLS)
        .add_service(IdentityServer::new(service.clone()));
    if service.controller.is_some() {
        server = server.add_service(ControllerServer::new(service.clone()));
    }
    if service.node.is_some() {
        server = server.add_service(NodeServer::new(service.clone()));
    }
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let end = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    tracing::info!(endpoint = %endpoint.display(), driver = %service.driver, "ready");
    server.serve_with_incoming_shutdown(UnixListenerStream::new(listener), end).await?;
    // Another process may have the path by now only if it found this socket closed.
    let _ = std::fs::remove_file(endpoint);
    Ok(())
}

/// Listens on a socket, in place of one that no process serves any more.
fn listen(path: &Path) -> Result<UnixListener, Box<dyn Error>> {
    if let Ok(found) = std::fs::symlink_metadata(path) {
        if !found.file_type().is_socket() {
            return Err("the file is no socket".into());
        }
        if UnixStream::connect(path).is_ok() {
            return Err("a process listens at it already".into());
        }
        std::fs::remove_file(path)?;
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o660))?;
    Ok(listener)
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
}
