//! The program `freestone-csi`.

#![forbid(unsafe_code)]

mod args;

use args::{Args, Attach, Command, Gc, Mode};
use clap::{CommandFactory, Parser};
use csi::controller::Controller;
use csi::node::{Fake, FakeMounts, Kata, LinuxMounts, Mounts, Node, NodeBackend, NvmeTcp, Ublk};
use csi::proto::controller_server::ControllerServer;
use csi::proto::identity_server::IdentityServer;
use csi::proto::node_server::NodeServer;
use csi::service::Service;
use std::error::Error;
use std::io::Write;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio_stream::wrappers::UnixListenerStream;

/// Calls that run at a time; others wait. Each may wait for a daemon or a program.
const MAX_CALLS: usize = 64;

fn main() -> ExitCode {
    let args = Args::parse();
    let outcome = match &args.command {
        None => run(&args),
        Some(command) => run_command(command),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("freestone-csi: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run_command(command: &Command) -> Result<(), Box<dyn Error>> {
    match command {
        Command::Gc(gc) => collect(gc),
        Command::Completion { shell } => {
            clap_complete::generate(*shell, &mut Args::command(), "freestone-csi", &mut std::io::stdout());
            Ok(())
        }
        Command::Man { directory } => {
            let written = std::fs::create_dir_all(directory)
                .and_then(|()| clap_mangen::generate_to(Args::command(), directory));
            written.map_err(|error| format!("{}: {error}", directory.display()).into())
        }
    }
}

/// Lists volumes that no handle names, and deletes those that `--delete` has, too.
fn collect(args: &Gc) -> Result<(), Box<dyn Error>> {
    let text = |path: &Path| {
        let text = match path == Path::new("-") {
            true => std::io::read_to_string(std::io::stdin()),
            false => std::fs::read_to_string(path),
        };
        text.map_err(|error| format!("{}: {error}", path.display()))
    };
    let controller = Controller::new(&args.driver_name, "", csi::config::read(&args.backends)?);
    let earlier = args.delete.as_deref().map(text).transpose()?;
    let earlier = earlier.map(|text| csi::gc::handles(&text)).unwrap_or_default();
    let handles = csi::gc::handles(&text(&args.handles)?);
    let (mut failed, mut output) = (0, std::io::stdout().lock());
    for orphan in csi::gc::orphans(&controller, &handles, args.allow_none)? {
        if !earlier.contains(&orphan.id.to_string()) {
            writeln!(output, "{}", orphan.line())?;
        } else if let Err(fault) = csi::gc::delete(&controller, &orphan) {
            eprintln!("freestone-csi: volume {}: not deleted: {fault}", orphan.id);
            failed += 1;
        } else {
            writeln!(output, "{}\tdeleted", orphan.line())?;
        }
    }
    match failed {
        0 => Ok(()),
        _ => Err(format!("{failed} volumes were not deleted").into()),
    }
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let filter = tracing_subscriber::EnvFilter::builder().parse(&args.log);
    let filter = filter.map_err(|_| format!("--log {}: want a level or a list of them", args.log))?;
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
    let controller = match &args.backends {
        Some(path) if args.mode != Mode::Node => {
            let backends = csi::config::read(path)?;
            Some(Arc::new(Controller::new(&args.driver_name, &args.nqn_prefix, backends)))
        }
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
    let endpoint = args.endpoint.as_deref().ok_or("--endpoint is missing")?;
    runtime.block_on(serve(endpoint, service.clone()))?;
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
    let kata = Kata::new(&args.socket, &args.kata_dir, &args.driver_name)?;
    let node = Node::new(name, args.max_volumes, &args.state_dir, backend, mounts, kata)?;
    Ok(match &args.zone {
        Some(zone) => node.in_zone(csi::topology::of_zone(&args.driver_name, zone)),
        None => node,
    })
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
