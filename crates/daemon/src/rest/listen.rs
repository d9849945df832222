//! Where the API is reached: a Unix socket, and TCP for who wants that.

use super::access;
use super::body::hear_out;
use super::connections::{Connections, Limits};
use super::current::Current;
use super::hosts::{self, Hosts, Names};
use super::keys::{Keys, KeysError};
use super::logins::{self, Logins};
use super::tokens::Tokens;
use super::{TokensError, headers, router, transport};
use crate::engine::Engine;
use axum::Router;
use axum::middleware::{from_fn, from_fn_with_state, map_response};
use exports::stream::SocketPath;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use tokio::runtime::Runtime;
use tokio::time::sleep;

/// Threads of a listener that speak with clients. Work that blocks runs on others.
const THREADS: usize = 2;
/// How long requests have to come to their end when the daemon ends.
const GRACE: Duration = Duration::from_secs(2);
/// Period of the search for connections whose token has expired, in wall-clock time: steps of the
/// clock and a resume from sleep take effect within it.
const EXPIRY_PERIOD: Duration = Duration::from_secs(1);

/// The Unix socket.
#[derive(Clone, Debug)]
pub struct UnixOptions {
    /// Where it is.
    pub path: PathBuf,
    /// Its permission bits: who may write may do everything.
    pub permissions: u32,
    /// The group that it belongs to.
    pub group: Option<u32>,
}

/// TCP.
#[derive(Clone, Debug)]
pub struct TcpOptions {
    /// Where to listen.
    pub address: SocketAddr,
    /// The file of tokens.
    pub tokens: PathBuf,
    /// Has `server-cert.pem` and `server-key.pem`. Not needed on a loopback address.
    pub certificates: Option<PathBuf>,
    /// Names under which clients reach the daemon, in addition to those of the certificate and, on
    /// loopback, `localhost`.
    pub hosts: Vec<String>,
}

/// Why the daemon cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The socket is refused.
    #[error("cannot listen on {place}: {error}")]
    Listen {
        /// The socket.
        place: String,
        /// Why.
        error: io::Error,
    },
    /// Tokens cannot be used.
    #[error(transparent)]
    Tokens(#[from] TokensError),
    /// The records of idempotency keys cannot be used.
    #[error(transparent)]
    Keys(#[from] KeysError),
    /// Tokens would go over the network in the clear.
    #[error("{0}: this is no loopback address, so it takes TLS (--tls-certificates DIR)")]
    Clear(SocketAddr),
    /// Certificate or key cannot be used.
    #[error("certificates {0}")]
    Certificates(tls::Error),
    /// No threads.
    #[error("cannot start the threads of the API: {0}")]
    Threads(io::Error),
}

/// Sockets on which the API is served. Dropping it ends that.
pub struct Listeners {
    /// Threads of the Unix socket, and of TCP: those who flood TCP take no time from the Unix
    /// socket.
    runtimes: Vec<Runtime>,
    /// Absent when the service manager owns it.
    socket: Option<SocketPath>,
    tcp: Option<Tcp>,
    /// Where TCP is served, with the port that was chosen.
    pub address: Option<SocketAddr>,
}

impl Listeners {
    /// Listens on a Unix socket, which may have been `inherited` from the service manager, and on
    /// TCP if asked for.
    ///
    /// # Errors
    /// See [`ListenError`].
    pub fn start(
        engine: &Arc<Engine>,
        unix: &UnixOptions,
        inherited: Option<UnixListener>,
        tcp: Option<&TcpOptions>,
    ) -> Result<Listeners, ListenError> {
        let failed = |error| ListenError::Listen { place: unix.path.display().to_string(), error };
        let (listener, socket) = match inherited {
            Some(listener) => (listener, None),
            None => listen_unix(unix).map(|(listener, path)| (listener, Some(path))).map_err(failed)?,
        };
        listener.set_nonblocking(true).map_err(failed)?;
        let runtime = runtime("api")?;
        let keys = Keys::open(&engine.options().state_dir)?;
        let service = router(engine.clone(), keys.clone());
        let service = service.layer(from_fn(access::over_unix)).layer(from_fn(hear_out));
        {
            let _entered = runtime.enter();
            let listener = tokio::net::UnixListener::from_std(listener).map_err(failed)?;
            let connections = Connections::new(Limits::UNIX.within_process());
            runtime.spawn(transport::serve_unix(listener, finish(service), connections));
        }
        let mut listeners = Listeners { runtimes: vec![runtime], socket, tcp: None, address: None };
        if let Some(options) = tcp {
            let (tcp, runtime, address) = Tcp::start(engine, keys, options)?;
            listeners.runtimes.push(runtime);
            (listeners.tcp, listeners.address) = (Some(tcp), Some(address));
        }
        Ok(listeners)
    }

    /// Reads tokens and certificates of TCP again, and closes connections whose token is gone. The
    /// log names a file that cannot be used; the tokens or certificates in use stay valid then.
    pub fn reload(&self) {
        if let Some(tcp) = &self.tcp {
            tcp.reload();
        }
    }
}

impl Drop for Listeners {
    fn drop(&mut self) {
        self.socket = None;
        let deadline = Instant::now() + GRACE;
        for runtime in self.runtimes.drain(..) {
            runtime.shutdown_timeout(deadline.saturating_duration_since(Instant::now()));
        }
    }
}

fn listen_unix(options: &UnixOptions) -> io::Result<(UnixListener, SocketPath)> {
    let path = &options.path;
    if let Some(directory) = path.parent().filter(|directory| !directory.as_os_str().is_empty()) {
        std::fs::create_dir_all(directory)?;
    }
    SocketPath::free(path)?;
    exports::stream::listen(path, options.permissions, options.group)
}

fn runtime(thread_name: &str) -> Result<Runtime, ListenError> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .thread_name(thread_name)
        .enable_all()
        .build()
        .map_err(ListenError::Threads)
}

/// The API over TCP: the parts that SIGHUP replaces.
struct Tcp {
    options: TcpOptions,
    tokens: Current<Tokens>,
    /// None: without TLS.
    tls: Option<Current<tls::Server>>,
    /// Names of the certificate.
    names: Current<Names>,
    connections: Arc<Connections>,
}

impl Tcp {
    /// Listens. Returns the threads that serve, and the address with the port that was chosen.
    fn start(
        engine: &Arc<Engine>,
        keys: Keys,
        options: &TcpOptions,
    ) -> Result<(Tcp, Runtime, SocketAddr), ListenError> {
        let address = options.address;
        let read = Tokens::read(&options.tokens)?;
        read.warn_of_clear_text(&options.tokens);
        let tokens = Current::new(read);
        let tls = match options.certificates() {
            Some(server) => Some(Current::new(server?)),
            None if address.ip().is_loopback() => None,
            None => return Err(ListenError::Clear(address)),
        };
        let failed = |error| ListenError::Listen { place: address.to_string(), error };
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let names = Current::new(tls.as_ref().map(|tls| names_of(&tls.get())).unwrap_or_default());
        let hosts = Hosts::new(address.ip(), &options.hosts, names.clone());
        let service = router(engine.clone(), keys)
            .layer(from_fn_with_state(tokens.clone(), access::over_tcp))
            .layer(from_fn_with_state(Logins::default(), logins::watch))
            .layer(from_fn(hear_out))
            .layer(from_fn_with_state(hosts, hosts::check));
        let connections = Connections::new(Limits::TCP.within_process());
        let runtime = runtime("api-tcp")?;
        {
            let _entered = runtime.enter();
            let listener = tokio::net::TcpListener::from_std(listener).map_err(failed)?;
            runtime.spawn(transport::serve_tcp(listener, tls.clone(), finish(service), connections.clone()));
            runtime.spawn(close_expired(tokens.clone(), connections.clone()));
        }
        let tcp = Tcp { options: options.clone(), tokens, tls, names, connections };
        Ok((tcp, runtime, address))
    }

    fn reload(&self) {
        let path = self.options.tokens.display();
        match Tokens::read(&self.options.tokens) {
            Ok(tokens) => {
                tokens.warn_of_clear_text(&self.options.tokens);
                self.tokens.set(tokens.clone());
                let now = SystemTime::now();
                self.connections.close_unless(|digest| tokens.has(digest, now));
                tracing::info!(%path, "API tokens reloaded");
            }
            Err(error) => tracing::error!(%error, "API tokens not reloaded; the tokens in use stay valid"),
        }
        match (&self.tls, self.options.certificates()) {
            (Some(tls), Some(Ok(server))) => {
                self.names.set(names_of(&server));
                tls.set(server);
                tracing::info!("API certificates reloaded");
            }
            (_, Some(Err(error))) => {
                tracing::error!(%error, "API certificates not reloaded; the certificate in use stays");
            }
            (_, None) | (None, _) => {}
        }
    }
}

/// Closes connections, streams of events among them, when their token expires.
async fn close_expired(tokens: Current<Tokens>, connections: Arc<Connections>) {
    loop {
        sleep(EXPIRY_PERIOD).await;
        let (tokens, now) = (tokens.get(), SystemTime::now());
        if tokens.can_expire() {
            connections.close_unless(|digest| tokens.has(digest, now));
        }
    }
}

impl TcpOptions {
    fn certificates(&self) -> Option<Result<tls::Server, ListenError>> {
        let directory = self.certificates.as_ref()?;
        Some(tls::Server::with_certificates(directory, false).map_err(ListenError::Certificates))
    }
}

fn names_of(server: &tls::Server) -> Names {
    hosts::names(server.host_names())
}

/// Adds what the answers of all listeners have.
fn finish(service: Router) -> Router {
    service.layer(map_response(headers::complete))
}
