//! `freestoned`: the daemon's command line, its signals, and the service manager.

#![forbid(unsafe_code)]

use base::Size;
use clap::{CommandFactory, Parser, Subcommand};
use daemon::config::{Config, ConfigError};
use daemon::confinement::Confinement;
use daemon::engine::{Engine, Options};
use daemon::rest::{Listeners, NewToken, Role, TcpOptions, UnixOptions, add_token, parse_role, parse_time};
use daemon::workers::{SPAWNER, WORKER, WorkerOptions, process, spawner};
use exports::{MIN_MEMORY, MemoryBudget};
use exports_virtio::contain_truncation;
use hosting::control;
use listenfd::ListenFd;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use reactor::{CoreConfig, PollWindow};
use sandbox::Mode;
use sd_notify::NotifyState;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::iterator::Signals;
use spec::{CpuList, Value};
use std::error::Error;
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant, SystemTime};
use tracing_subscriber::EnvFilter;

/// Microseconds that a core polls without work before it sleeps, at most.
const POLL_US: u64 = 50;
/// Time that a configuration may take before the API starts. Afterwards the service manager is
/// asked for more time at this interval.
const CONFIG_TIME: Duration = Duration::from_secs(1);
/// Time that each request to the service manager adds.
const MORE_TIME: Duration = Duration::from_secs(30);
/// How long changes in flight may take to be answered when the daemon ends.
const GRACE: Duration = Duration::from_secs(2);
/// Memory of one export's process for its network clients, unless --memory says otherwise.
const WORKER_MEMORY: u64 = 256 << 20;
/// Number and size of the members of --demo.
const DEMO_MEMBERS: usize = 5;
const DEMO_MEMBER_BYTES: u64 = 128 << 20;

/// Keeps devices, arrays, volumes and exports, and serves them.
///
/// Its REST API controls it; the program freestone is a client: freestone volume create, freestone
/// export show, …
#[derive(Debug, Parser)]
#[command(name = "freestoned", version, args_conflicts_with_subcommands = true)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// Directory of its state
    #[arg(long, value_name = "DIR", default_value = "/var/lib/freestone")]
    state_dir: PathBuf,
    /// Unix socket of its API; write access to it grants full control
    #[arg(long, value_name = "PATH", default_value = api::DEFAULT_SOCKET, env = api::SOCKET_VARIABLE)]
    socket: PathBuf,
    /// Octal permission bits of the socket
    #[arg(long, value_name = "MODE", default_value = "660", value_parser = permissions)]
    socket_permissions: u32,
    /// Group of the socket, by number [default: the daemon's]
    #[arg(long, value_name = "GID")]
    socket_group: Option<u32>,
    /// Directory for sockets of exports without socket= [default: the directory of --socket]
    #[arg(long, value_name = "DIR")]
    runtime_dir: Option<PathBuf>,
    /// Also serve the API and the page over TCP
    #[arg(long, value_name = "ADDR:PORT", requires = "tokens")]
    listen: Option<SocketAddr>,
    /// Tokens for TCP: lines ROLE NAME sha256:HASH [expires=TIME], with the roles admin, operator,
    /// provisioner and read-only; freestoned token adds one
    #[arg(long, value_name = "FILE")]
    tokens: Option<PathBuf>,
    /// Directory of server-cert.pem and server-key.pem, for TLS; required except on loopback
    /// addresses
    #[arg(long, value_name = "DIR", requires = "listen")]
    tls_certificates: Option<PathBuf>,
    /// Host name of the API over TCP (repeatable), in addition to addresses, the names of the
    /// certificate, and localhost on loopback addresses. Other names are refused
    #[arg(long, value_name = "NAME", requires = "listen", value_parser = host_name)]
    host: Vec<String>,
    /// Processors to serve from, such as 0,1 or 0-3 [default: one unbound thread]
    #[arg(long, value_name = "CPUS", value_parser = cpus)]
    cores: Option<CpuList>,
    /// Memory for data of network clients (NBD, NVMe/TCP), such as 2G [default: a quarter of the
    /// machine's; with --process-per-export 256M for each export]
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    memory: Option<Size>,
    /// Use devices of the kind virtio-blk-vhost-user: their servers map the buffers of the daemon
    #[arg(long)]
    share_buffers: bool,
    /// Configuration to apply: TOML with the names of the API; missing objects are created
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print the steps of --config and exit
    #[arg(long, requires = "config")]
    plan: bool,
    /// Demonstration: create five files in this directory, an array of them, a volume and exports
    /// on loopback addresses
    #[arg(long, value_name = "DIR", conflicts_with = "config")]
    demo: Option<PathBuf>,
    /// Search the files and block devices of this directory for members of arrays
    #[arg(long, value_name = "DIR")]
    scan: Vec<PathBuf>,
    /// Seconds to wait for missing members before an array starts degraded
    #[arg(long, alias = "patience", value_name = "N", default_value_t = 10)]
    member_timeout: u64,
    /// Drop unneeded privileges: as far as the kernel supports it (auto), all or fail (required),
    /// none (off)
    #[arg(long, value_name = "auto|required|off", default_value = "auto", value_parser = mode)]
    sandbox: Mode,
    /// Further directory or file for devices, sockets and keys that are added later. Always open:
    /// /dev, /etc/freestone (keys), the daemon's directories, and paths in its state and in
    /// --config
    #[arg(long, value_name = "PATH")]
    sandbox_path: Vec<PathBuf>,
    /// Serve each export from a process of its own, without access to devices, state and other
    /// exports; not for ublk and VDUSE
    #[arg(long)]
    process_per_export: bool,
    /// Log in JSON, one object per line
    #[arg(long)]
    json: bool,
    /// Log level on standard error: error, warn, info, debug, trace, off, or a list such as
    /// warn,exports=debug
    #[arg(long, value_name = "LEVEL", default_value = "info,drivers=warn", env = "FREESTONE_LOG")]
    log: String,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Make a token for the API over TCP, add its hash to a file of --tokens, and print the token
    ///
    /// The file has the hash alone, so this is the only time that the token is shown. A daemon that
    /// runs reads the file at SIGHUP.
    Token {
        /// File of tokens, which is made with mode 600 if it does not exist
        file: PathBuf,
        /// read-only, provisioner, operator or admin
        #[arg(value_parser = parse_role)]
        role: Role,
        /// Name for logs and labels, which no other token of the file has
        name: String,
        /// Time from which the token is refused: 2027-01-31T00:00:00Z, or a date (0:00 UTC)
        #[arg(long, value_name = "TIME", value_parser = parse_time)]
        expires: Option<SystemTime>,
    },
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

fn permissions(text: &str) -> Result<u32, String> {
    u32::from_str_radix(text, 8)
        .ok()
        .filter(|bits| *bits <= 0o777)
        .ok_or_else(|| "expected bits such as 660".into())
}

fn mode(text: &str) -> Result<Mode, String> {
    Mode::parse(text).ok_or_else(|| format!("expected {}", Mode::ALL.map(Mode::name).join(", ")))
}

fn host_name(text: &str) -> Result<String, String> {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
    let is_name = !text.is_empty() && text.bytes().all(is_allowed);
    if is_name { Ok(text.into()) } else { Err("expected a host name without a port".into()) }
}

fn cpus(text: &str) -> Result<CpuList, String> {
    CpuList::parse(text).ok_or_else(|| format!("expected {}", CpuList::expected()))
}

fn memory(text: &str) -> Result<Size, String> {
    let size = Size::parse(text).ok_or_else(|| format!("expected {}", Size::expected()))?;
    if size.0 < MIN_MEMORY as u64 { Err("want at least 16M".into()) } else { Ok(size) }
}

fn main() -> ExitCode {
    let arguments = std::env::args_os().skip(1).map(|argument| argument.to_string_lossy().into_owned());
    let arguments: Vec<String> = arguments.collect();
    let ended = match arguments.split_first() {
        Some((first, rest)) if first == SPAWNER => run_spawner(rest),
        Some((first, rest)) if first == WORKER => run_worker(rest),
        _ => run_command(&Args::parse()),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("freestoned: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run_command(args: &Args) -> Result<(), Box<dyn Error>> {
    match &args.command {
        None => run(args),
        Some(Command::Token { file, role, name, expires }) => {
            let new = NewToken { role: *role, name: name.clone(), expires: *expires };
            let token = add_token(file, &new, SystemTime::now())?;
            writeln!(std::io::stdout(), "{token}").map_err(|error| {
                format!("token {name}: added to {}, but not printed: {error}", file.display()).into()
            })
        }
        Some(Command::Completion { shell }) => {
            clap_complete::generate(*shell, &mut Args::command(), "freestoned", &mut std::io::stdout());
            Ok(())
        }
        Some(Command::Man { directory }) => {
            let written = std::fs::create_dir_all(directory)
                .and_then(|()| clap_mangen::generate_to(Args::command(), directory));
            written.map_err(|error| format!("{}: {error}", directory.display()).into())
        }
    }
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    start_logs(&args.log, args.json)?;
    raise_descriptor_limit();
    contain_truncation()?;
    if let Some(Size(bytes)) = args.memory {
        MemoryBudget::set_process(usize::try_from(bytes).unwrap_or(usize::MAX));
    }
    // Asks the system for its memory now: later on that may not be allowed.
    tracing::debug!(bytes = MemoryBudget::process().bytes(), "memory for network clients");
    if args.share_buffers {
        let cores = args.cores.as_ref().map_or(1, |CpuList(cpus)| cpus.len());
        hosting::share_buffers(cores).map_err(|error| format!("--share-buffers: {error}"))?;
    }
    let began = Instant::now();
    let inherited = ListenFd::from_env().take_unix_listener(0)?;
    let config = config(args)?;
    let engine = Engine::start(options(args, &config))?;
    if args.plan {
        config.plan(&engine).iter().for_each(|step| println!("{step}"));
        engine.stop(true);
        return Ok(());
    }
    let mut listeners = None;
    let ended = serve(args, &engine, config, inherited, (began, &mut listeners));
    hosting::sandbox_log::announce_refused();
    notify(&[NotifyState::Stopping]);
    tracing::info!("stopping: finishing what is in flight");
    engine.begin_stop(GRACE);
    // A service manager ends a daemon to start another; a person at the keyboard wants it gone.
    let stopped = engine.stop(!matches!(ended, Ok(SIGINT)));
    // Until here the API answers that the daemon stops.
    drop(listeners);
    drop(stopped);
    ended.map(drop)
}

/// Applies the configuration and serves the API until a signal; returns the signal. The API is
/// served as long as the listeners in `serving` live.
fn serve(
    args: &Args,
    engine: &Arc<Engine>,
    config: Config,
    inherited: Option<UnixListener>,
    (began, serving): (Instant, &mut Option<Listeners>),
) -> Result<i32, Box<dyn Error>> {
    let unix = UnixOptions {
        path: args.socket.clone(),
        permissions: args.socket_permissions,
        group: args.socket_group,
    };
    let tcp = match (args.listen, &args.tokens) {
        (Some(address), Some(tokens)) => {
            let (tokens, certificates) = (tokens.clone(), args.tls_certificates.clone());
            Some(TcpOptions { address, tokens, certificates, hosts: args.host.clone() })
        }
        _ => None,
    };
    let is_stopping = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        // In this order: the first signal finds the flag down and raises it, the second finds it
        // up, and ends the process.
        flag::register_conditional_shutdown(signal, 1, is_stopping.clone())?;
        flag::register(signal, is_stopping.clone())?;
    }
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])?;
    let applied = start_config(config, engine)?;
    let mut is_there = wait_for(&applied)?;
    // A configuration that takes longer is a job, which clients see in the API.
    let listeners = serving.insert(Listeners::start(engine, &unix, inherited, tcp.as_ref())?);
    while !is_there && !is_stopping.load(Ordering::SeqCst) {
        is_there = wait_for(&applied)?;
    }
    if is_there {
        let took_ms = began.elapsed().as_millis() as u64;
        let listen = listeners.address.map(|address| address.to_string());
        engine.set_ready();
        tracing::info!(socket = %args.socket.display(), listen, took_ms, "ready");
        notify(&[NotifyState::Ready, NotifyState::Status("serving")]);
        start_watchdog(engine)?;
    }
    let last = signals.forever().find(|signal| match *signal {
        SIGHUP => {
            listeners.reload();
            engine.reload_keys();
            engine.look_again();
            false
        }
        _ => true,
    });
    Ok(last.unwrap_or(SIGTERM))
}

/// Makes what there is to be, on a thread of its own.
fn start_config(
    config: Config,
    engine: &Arc<Engine>,
) -> Result<Receiver<Result<(), ConfigError>>, Box<dyn Error>> {
    let ((sender, applied), engine) = (channel(), engine.clone());
    reactor::spawn_thread("configuration", move || sender.send(config.apply(&engine)))?;
    Ok(applied)
}

/// Waits for the configuration for a while; returns whether it is applied.
fn wait_for(applied: &Receiver<Result<(), ConfigError>>) -> Result<bool, Box<dyn Error>> {
    match applied.recv_timeout(CONFIG_TIME) {
        Ok(result) => Ok(result.map(|()| true)?),
        Err(RecvTimeoutError::Timeout) => {
            let more = NotifyState::ExtendTimeoutUsec(MORE_TIME.as_micros() as u32);
            notify(&[more, NotifyState::Status("making what the configuration wants")]);
            Ok(false)
        }
        Err(RecvTimeoutError::Disconnected) => Err("the configuration could not be made".into()),
    }
}

fn options(args: &Args, config: &Config) -> Options {
    let poll = PollWindow::up_to(POLL_US * 1000);
    let core = |cpu: Option<usize>| CoreConfig { cpu, poll, ..CoreConfig::default() };
    let cores = match &args.cores {
        Some(CpuList(cpus)) => cpus.iter().map(|cpu| core(Some(*cpu))).collect(),
        None => vec![core(None)],
    };
    let beside = || {
        let socket = std::path::absolute(&args.socket).unwrap_or_default();
        socket.parent().map(PathBuf::from).unwrap_or_default()
    };
    Options {
        state_dir: args.state_dir.clone(),
        runtime_dir: std::path::absolute(args.runtime_dir.clone().unwrap_or_else(beside)).unwrap_or_default(),
        cores,
        scan: args.scan.clone(),
        member_timeout: Duration::from_secs(args.member_timeout),
        has_array_sockets: true,
        confinement: confinement(args, config),
        workers: args.process_per_export.then(|| worker_options(args)),
    }
}

/// Rights that the daemon keeps in its sandbox, in addition to the needs of its state.
fn confinement(args: &Args, config: &Config) -> Confinement {
    let mut confinement = Confinement::new(args.sandbox);
    config.keep(&mut confinement);
    args.sandbox_path.iter().for_each(|path| confinement.keep_path(path));
    control::keep(&args.socket, &mut confinement.profile);
    let settings = args.tokens.iter().chain(&args.tls_certificates);
    settings.for_each(|path| confinement.profile.allow_settings(path));
    if args.socket_group.is_some() {
        confinement.profile.change_groups();
    }
    confinement
}

/// The configuration of the arguments: a file, the demo, or none.
fn config(args: &Args) -> Result<Config, Box<dyn Error>> {
    match (&args.config, &args.demo) {
        (Some(path), _) => Ok(Config::read(path)?),
        (None, Some(directory)) => {
            let directory = std::path::absolute(directory)?;
            std::fs::create_dir_all(&directory)?;
            for number in 0..DEMO_MEMBERS {
                let path = directory.join(format!("disk{number}"));
                let file = std::fs::File::options().write(true).create(true).truncate(false).open(path)?;
                if file.metadata()?.len() == 0 {
                    file.set_len(DEMO_MEMBER_BYTES)?;
                }
            }
            let directory = directory.to_str().ok_or("--demo: the directory has a name that is no text")?;
            Ok(Config::parse(&include_str!("demo.toml").replace("DIR", directory), "--demo".as_ref())?)
        }
        (None, None) => Ok(Config::default()),
    }
}

/// Arguments of the spawner and workers: logs, memory and sandbox as the daemon has them.
fn worker_options(args: &Args) -> WorkerOptions {
    let format = if args.json { "json" } else { "text" };
    let memory =
        args.memory.map_or(WORKER_MEMORY.min(MemoryBudget::process().bytes() as u64), |Size(bytes)| bytes);
    let memory = memory.to_string();
    let arguments = [&args.log, format, &memory, args.sandbox.name()].map(str::to_owned).to_vec();
    WorkerOptions { program: "/proc/self/exe".into(), arguments }
}

/// Starts workers for the daemon. It ends with the daemon, and signals that a service manager sends
/// to all processes do not end it before.
fn run_spawner(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let Ok([log, format, _, mode]) = <&[String; 4]>::try_from(arguments) else {
        return Err(format!("{SPAWNER} is for freestoned alone").into());
    };
    sandbox::close_inherited()?;
    start_logs(log, format == "json")?;
    ignore_signals()?;
    sandbox::drop_privileges(self::mode(mode)?)?;
    Ok(spawner::run(arguments)?)
}

/// Serves an export for the daemon.
fn run_worker(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let Ok([log, format, memory, mode, _name]) = <&[String; 5]>::try_from(arguments) else {
        return Err(format!("{WORKER} is for freestoned alone").into());
    };
    start_logs(log, format == "json")?;
    ignore_signals()?;
    MemoryBudget::set_process(memory.parse()?);
    Ok(process::run(self::mode(mode)?)?)
}

/// A signal only raises a flag that nothing reads.
fn ignore_signals() -> std::io::Result<()> {
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        flag::register(signal, Arc::new(AtomicBool::new(false)))?;
    }
    Ok(())
}

fn start_logs(log: &str, is_json: bool) -> Result<(), Box<dyn Error>> {
    let filter = EnvFilter::builder().parse(log).map_err(|_| {
        let expected = "error, warn, info, debug, trace or off, or a list such as warn,exports=debug";
        format!("--log {log}: expected {expected}")
    })?;
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match is_json {
        true => logs.json().flatten_event(true).init(),
        false => logs.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).init(),
    }
    Ok(())
}

/// Takes as many descriptors as the system allows: every client and device has some.
fn raise_descriptor_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!(%error, "cannot raise the limit of open descriptors");
    }
}

/// Tells systemd, if it is the one who started us.
fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "cannot notify the service manager");
    }
}

/// Tells systemd's watchdog that the cores answer, as long as they do.
fn start_watchdog(engine: &Arc<Engine>) -> Result<(), Box<dyn Error>> {
    let Some(period) = sd_notify::watchdog_enabled() else { return Ok(()) };
    let engine = Arc::downgrade(engine);
    reactor::spawn_thread("watchdog", move || {
        while let Some(engine) = engine.upgrade() {
            if engine.is_responsive() {
                notify(&[NotifyState::Watchdog]);
            }
            drop(engine);
            std::thread::sleep(period / 3);
        }
    })?;
    Ok(())
}
