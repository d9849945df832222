//! Where the API is reached: a Unix socket, and TCP for who wants that.

use super::access::{self, Peer, Tokens};
use super::request::hear_out;
use super::{TokensError, router};
use crate::engine::Engine;
use axum::middleware::{from_fn, from_fn_with_state};
use axum_server::tls_rustls::RustlsConfig;
use exports::stream::SocketPath;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;

/// Threads that speak with clients. What they wait for runs on others.
const THREADS: usize = 2;
/// How long who has connected over TCP may take to say what is asked for.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long requests have to come to their end when the daemon ends.
const GRACE: Duration = Duration::from_secs(2);

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
    /// Who may come.
    pub tokens: PathBuf,
    /// Has `server-cert.pem` and `server-key.pem`. Not needed on a loopback address.
    pub certificates: Option<PathBuf>,
}

/// Why nobody listens.
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
    /// Tokens would go over the network in the clear.
    #[error("{0}: this is no loopback address, so it takes TLS (--tls-certificates DIR)")]
    Clear(SocketAddr),
    /// Certificate or key cannot be used.
    #[error("certificates {}: {error}", .path.display())]
    Certificates {
        /// The directory.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// No threads.
    #[error("cannot start the threads of the API: {0}")]
    Threads(io::Error),
}

/// Sockets on which the API is served. Dropping it ends that.
pub struct Listeners {
    runtime: Option<Runtime>,
    /// Absent when the service manager owns it.
    socket: Option<SocketPath>,
    /// Where TCP is served, with the port that was chosen.
    pub address: Option<SocketAddr>,
}

impl Listeners {
    /// Listens on a Unix socket, which may have been `inherited` from the service manager, and on TCP if asked for.
    ///
    /// # Errors
    /// See [`ListenError`].
    pub fn start(
        engine: &Arc<Engine>,
        unix: &UnixOptions,
        inherited: Option<UnixListener>,
        tcp: Option<&TcpOptions>,
    ) -> Result<Listeners, ListenError> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("api")
            .enable_all()
            .build()
            .map_err(ListenError::Threads)?;
        let failed = |error| ListenError::Listen { place: unix.path.display().to_string(), error };
        let (listener, socket) = match inherited {
            Some(listener) => (listener, None),
            None => listen_unix(unix).map(|(listener, path)| (listener, Some(path))).map_err(failed)?,
        };
        listener.set_nonblocking(true).map_err(failed)?;
        let _entered = runtime.enter();
        let listener = tokio::net::UnixListener::from_std(listener).map_err(failed)?;
        let service = router(engine.clone()).layer(from_fn(access::over_unix)).layer(from_fn(hear_out));
        let service = service.into_make_service_with_connect_info::<Peer>();
        runtime.spawn(async move { axum::serve(listener, service).await });
        let address = tcp.map(|tcp| serve_tcp(&runtime, engine, tcp)).transpose()?;
        Ok(Listeners { runtime: Some(runtime), socket, address })
    }
}

impl Drop for Listeners {
    fn drop(&mut self) {
        self.socket = None;
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(GRACE);
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

fn serve_tcp(
    runtime: &Runtime,
    engine: &Arc<Engine>,
    options: &TcpOptions,
) -> Result<SocketAddr, ListenError> {
    let address = options.address;
    let tokens = Tokens::read(&options.tokens)?;
    let tls = match &options.certificates {
        Some(directory) => Some(certificates(runtime, directory)?),
        None if address.ip().is_loopback() => None,
        None => return Err(ListenError::Clear(address)),
    };
    let failed = |error| ListenError::Listen { place: address.to_string(), error };
    let listener = TcpListener::bind(address).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let service = router(engine.clone())
        .layer(from_fn_with_state(tokens, access::over_tcp))
        .layer(from_fn(hear_out))
        .into_make_service();
    // Who connects and says nothing is hung up on; the handshake of TLS has such a limit of its own.
    let patient = |http: &mut Builder<TokioExecutor>| {
        http.http1().timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
    };
    match tls {
        Some(tls) => {
            let mut server = axum_server::from_tcp_rustls(listener, tls).map_err(failed)?;
            patient(server.http_builder());
            runtime.spawn(server.serve(service));
        }
        None => {
            let mut server = axum_server::from_tcp(listener).map_err(failed)?;
            patient(server.http_builder());
            runtime.spawn(server.serve(service));
        }
    }
    Ok(address)
}

fn certificates(runtime: &Runtime, directory: &Path) -> Result<RustlsConfig, ListenError> {
    // Another part of the process may have chosen already, and then it is the same one.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (certificate, key) = (directory.join("server-cert.pem"), directory.join("server-key.pem"));
    runtime
        .block_on(RustlsConfig::from_pem_file(certificate, key))
        .map_err(|error| ListenError::Certificates { path: directory.into(), error })
}
