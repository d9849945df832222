//! Connections of the API from their acceptance to their end: TLS over TCP, then HTTP/1.1, within
//! the limits of [`super::connections`].
//!
//! HTTP/2 is not served: its preface is no request, and is answered with an error and the end of
//! the connection.

use super::connections::{Connection, Connections, Limits, Peer, Place};
use super::current::Current;
use axum::Router;
use axum::http::Request;
use axum::response::Response;
use hyper::body::Incoming;
use hyper::server::conn::http1::Builder;
use hyper::service::Service;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use socket2::{SockRef, TcpKeepalive};
use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::time::{sleep, timeout};
use tokio_openssl::SslStream;

/// Pause after an accept that failed: most likely the process has no descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Longest head of a request, and size of the buffer of a connection, in bytes.
const MAX_HEAD: usize = 64 << 10;
/// Descriptors that are kept for connections over the Unix socket.
const RESERVE: usize = 16;
/// Silence after which the system probes the host at the other end, and the pause between probes.
const KEEPALIVE: Duration = Duration::from_secs(15);

/// Accepts connections over TCP, and serves each. Without `tls` they are not encrypted.
pub(super) async fn serve_tcp(
    listener: TcpListener,
    tls: Option<Current<tls::Server>>,
    router: Router,
    connections: Arc<Connections>,
) {
    loop {
        let (stream, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                refused(&connections, &error).await;
                continue;
            }
        };
        let peer = Peer::Address(address.ip());
        let Some(place) = connections.admit(peer).await else {
            connections.warn(Some(peer), "a limit is reached");
            continue;
        };
        if let Err(error) = set_up(&stream, place.connection.limits) {
            tracing::debug!(%error, "API connection: cannot set its options");
        }
        let tls = tls.as_ref().map(Current::get);
        tokio::spawn(run(stream, tls, router.clone(), place));
    }
}

/// Accepts connections over the Unix socket, and serves each.
pub(super) async fn serve_unix(listener: UnixListener, router: Router, connections: Arc<Connections>) {
    let reserve = Arc::new(Reserve::new());
    loop {
        let stream = match poll_fn(|context| accept(&listener, &reserve, context)).await {
            Ok(stream) => stream,
            Err(error) => {
                refused(&connections, &error).await;
                continue;
            }
        };
        let peer = stream
            .peer_cred()
            .map_or(Peer::Unknown, |peer| Peer::Process { user: peer.uid(), process: peer.pid() });
        let Some(place) = connections.admit(peer).await else {
            connections.warn(Some(peer), "a limit is reached");
            continue;
        };
        let (router, reserve) = (router.clone(), reserve.clone());
        tokio::spawn(async move {
            run(stream, None, router, place).await;
            reserve.fill();
        });
    }
}

/// After an accept that failed.
async fn refused(connections: &Connections, error: &io::Error) {
    if error.kind() != io::ErrorKind::ConnectionAborted {
        connections.warn(None, &error.to_string());
        sleep(ACCEPT_PAUSE).await;
    }
}

/// Accepts a connection with a descriptor of the reserve where no other is left.
fn accept(
    listener: &UnixListener,
    reserve: &Reserve,
    context: &mut Context<'_>,
) -> Poll<io::Result<UnixStream>> {
    loop {
        match listener.poll_accept(context) {
            Poll::Ready(Ok((stream, _))) => return Poll::Ready(Ok(stream)),
            Poll::Ready(Err(error)) if is_out_of_descriptors(&error) && reserve.release() => {}
            Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
            // The kernel takes a descriptor before it looks for a connection, so one may have been
            // released for none.
            Poll::Pending => {
                reserve.fill();
                return Poll::Pending;
            }
        }
    }
}

fn is_out_of_descriptors(error: &io::Error) -> bool {
    const EMFILE: i32 = nix::errno::Errno::EMFILE as i32;
    const ENFILE: i32 = nix::errno::Errno::ENFILE as i32;
    matches!(error.raw_os_error(), Some(EMFILE | ENFILE))
}

/// Descriptors that nothing uses. One is closed when the process has no other left for a
/// connection.
struct Reserve {
    spare: Mutex<Vec<OwnedFd>>,
}

impl Reserve {
    fn new() -> Reserve {
        let reserve = Reserve { spare: Mutex::default() };
        reserve.fill();
        reserve
    }

    /// Takes what is missing, as far as the process has descriptors.
    fn fill(&self) {
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        while spare.len() < RESERVE
            && let Ok(socket) = UnixDatagram::unbound()
        {
            spare.push(socket.into());
        }
    }

    /// Closes one. Whether there was one.
    fn release(&self) -> bool {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner).pop().is_some()
    }
}

/// Ends connections whose host is gone, or takes no data.
fn set_up(stream: &TcpStream, limits: Limits) -> io::Result<()> {
    let socket = SockRef::from(stream);
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE))?;
    socket.set_tcp_user_timeout(Some(limits.unacknowledged))
}

/// Serves a connection until the client or a limit ends it.
async fn run(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    tls: Option<tls::Server>,
    router: Router,
    place: Place,
) {
    let limits = place.connection.limits;
    let service = Requests { router: TowerToHyperService::new(router), connection: place.connection.clone() };
    let served = async {
        match tls {
            None => serve_http(stream, service).await,
            Some(server) => match timeout(limits.handshake, handshake(stream, &server)).await {
                Ok(Ok(stream)) => serve_http(stream, service).await,
                Ok(Err(error)) => tracing::debug!(error, "API connection: TLS handshake failed"),
                Err(_) => tracing::debug!("API connection: TLS handshake timed out"),
            },
        }
    };
    let (mut served, mut ended) = (pin!(served), pin!(place.connection.ended()));
    poll_fn(|context| {
        let is_over = served.as_mut().poll(context).is_ready() || ended.as_mut().poll(context).is_ready();
        if is_over { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

async fn handshake<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    server: &tls::Server,
) -> Result<SslStream<S>, String> {
    let ssl = server.ssl().map_err(|error| error.to_string())?;
    let mut stream = SslStream::new(ssl, stream).map_err(|error| error.to_string())?;
    Pin::new(&mut stream).accept().await.map_err(|error| error.to_string())?;
    Ok(stream)
}

async fn serve_http(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static, service: Requests) {
    let mut http = Builder::new();
    http.max_buf_size(MAX_HEAD);
    // The timer runs from the start of the connection, and from the end of a request, until the
    // next head is complete.
    http.timer(TokioTimer::new()).header_read_timeout(service.connection.limits.head);
    if let Err(error) = http.serve_connection(TokioIo::new(stream), service).await {
        tracing::debug!(%error, "API connection ended");
    }
}

/// The requests of a connection, each with its [`Connection`] as an extension.
struct Requests {
    router: TowerToHyperService<Router>,
    connection: Arc<Connection>,
}

impl Service<Request<Incoming>> for Requests {
    type Response = Response;
    type Error = Infallible;
    type Future = <TowerToHyperService<Router> as Service<Request<Incoming>>>::Future;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        request.extensions_mut().insert(self.connection.clone());
        self.router.call(request)
    }
}

#[cfg(test)]
mod tests;
