//! Limits of time are tested with a clock that stands still while anything runs, and jumps when all
//! tasks wait.

use super::*;
use crate::rest::body::hear_out;
use axum::Extension;
use axum::middleware::from_fn;
use axum::response::sse::{Event, Sse};
use axum::routing::{get, post};
use std::net::SocketAddr;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::net::TcpSocket;
use tokio::time::Instant;
use tokio_stream::StreamExt;

/// The clock counts milliseconds.
const TICK: Duration = Duration::from_millis(5);
const EVENT_PERIOD: Duration = Duration::from_secs(300);
const HOUR: Duration = Duration::from_secs(3600);
const LIMITS: Limits = Limits::TCP;

fn test<F: Future>(is_paused: bool, test: F) -> F::Output {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().start_paused(is_paused).build().unwrap().block_on(test)
}

/// Answers `/stranger` to every client; `/known` and the rest as to a client with a token.
fn router() -> Router {
    type Known = Extension<Arc<Connection>>;
    let known = |Extension(connection): Known| async move {
        connection.recognize([1; 32]);
        "known"
    };
    let events = |Extension(connection): Known| async move {
        connection.recognize([1; 32]);
        let ticks = tokio_stream::iter(0..).then(|number: u64| async move {
            sleep(EVENT_PERIOD).await;
            Ok::<_, Infallible>(Event::default().data(number.to_string()))
        });
        Sse::new(ticks)
    };
    let poll = |Extension(connection): Known| async move {
        connection.recognize([1; 32]);
        sleep(HOUR).await;
        "after an hour"
    };
    Router::new()
        .route("/stranger", get(async || "stranger"))
        .route("/known", get(known))
        .route("/events", get(events))
        .route("/poll", get(poll))
        .route("/body", post(async |body: String| body))
        .layer(from_fn(hear_out))
}

struct Client {
    stream: DuplexStream,
    began: Instant,
}

impl Client {
    /// A connection that is served with the limits of TCP.
    async fn connect(tls: Option<tls::Server>) -> Client {
        let connections = Connections::new(LIMITS);
        let place = connections.admit(Peer::Address([127, 0, 0, 1].into())).await.unwrap();
        let (stream, server) = duplex(1 << 16);
        tokio::spawn(run(server, tls, router(), place));
        Client { stream, began: Instant::now() }
    }

    async fn send(&mut self, text: &str) {
        self.stream.write_all(text.as_bytes()).await.unwrap();
    }

    /// Sends a request, and reads until the answer contains `wanted`.
    async fn ask(&mut self, request: &str, wanted: &str) {
        self.send(&format!("{request} HTTP/1.1\r\nHost: x\r\n\r\n")).await;
        self.read_until(wanted).await;
    }

    async fn read_until(&mut self, wanted: &str) {
        let mut said = String::new();
        while !said.contains(wanted) {
            let mut part = [0; 4096];
            let length = self.stream.read(&mut part).await.unwrap();
            assert!(length > 0, "the connection was closed after {:?}: {said}", self.began.elapsed());
            said.push_str(std::str::from_utf8(&part[..length]).unwrap());
        }
    }

    /// Everything until the server closes the connection, which it does `after` this time.
    #[track_caller]
    fn closed(&mut self, after: Duration) -> impl Future<Output = String> {
        let caller = std::panic::Location::caller();
        async move {
            let mut said = Vec::new();
            let ended = self.stream.read_to_end(&mut said).await;
            let (took, said) = (self.began.elapsed(), String::from_utf8_lossy(&said).into_owned());
            assert!(
                ended.is_ok() && after <= took && took < after + TICK,
                "{caller}: after {took:?}: {said}"
            );
            said
        }
    }
}

#[test]
fn a_connection_without_a_complete_head_is_closed() {
    test(true, async {
        for begin in ["", "G", "GET /known HTTP/1.1\r\n", "GET /known HTTP/1.1\r\nHost: x\r\nX-Y: "] {
            let mut client = Client::connect(None).await;
            client.send(begin).await;
            let said = client.closed(LIMITS.head).await;
            assert!(said.is_empty() || said.starts_with("HTTP/1.1 408"), "{begin:?}: {said}");
        }
    });
}

#[test]
fn a_client_that_sends_a_head_byte_by_byte_gains_no_time() {
    test(true, async {
        let mut client = Client::connect(None).await;
        client.send("GET /known HTTP/1.1\r\nX-Y: ").await;
        while client.stream.write_all(b"y").await.is_ok() {
            sleep(Duration::from_millis(500)).await;
        }
        assert!(
            client.began.elapsed() <= LIMITS.head + Duration::from_secs(1),
            "{:?}",
            client.began.elapsed()
        );
    });
}

#[test]
fn a_preface_of_http_2_is_refused_at_once() {
    test(true, async {
        let mut client = Client::connect(None).await;
        client.send("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await;
        let said = client.closed(Duration::ZERO).await;
        assert!(
            said.is_empty() || said.starts_with("HTTP/1.1 4") || said.starts_with("HTTP/1.1 505"),
            "{said}"
        );
    });
}

#[test]
fn a_tls_handshake_that_does_not_end_is_closed() {
    let directory = tempfile::tempdir().unwrap();
    tls::authority::write_all(directory.path());
    let server = tls::Server::with_certificates(directory.path(), false).unwrap();
    test(true, async {
        // Nothing, and the begin of a ClientHello of 512 bytes.
        for begin in ["", "\x16\x03\x01\x02\0\x01\0\x01\u{7c}\x03\x03"] {
            let mut client = Client::connect(Some(server.clone())).await;
            client.send(begin).await;
            client.closed(LIMITS.handshake).await;
        }
        let mut client = Client::connect(Some(server)).await;
        client.send("GET /known HTTP/1.1\r\nHost: x\r\n\r\n").await;
        client.closed(Duration::ZERO).await;
    });
}

#[test]
fn an_idle_connection_is_closed_even_if_its_client_is_known() {
    test(true, async {
        let mut client = Client::connect(None).await;
        client.ask("GET /known", "known").await;
        client.closed(LIMITS.head).await;
    });
}

#[test]
fn a_connection_that_shows_no_token_is_closed_however_busy_it_is() {
    test(true, async {
        let mut client = Client::connect(None).await;
        for _ in 0..LIMITS.stranger.as_secs() / 5 {
            client.ask("GET /stranger", "stranger").await;
            sleep(Duration::from_secs(5) - TICK).await;
        }
        client.closed(LIMITS.stranger).await;
    });
}

#[test]
fn a_known_client_keeps_its_connection_as_long_as_it_asks() {
    test(true, async {
        let mut client = Client::connect(None).await;
        while client.began.elapsed() < HOUR {
            client.ask("GET /known", "known").await;
            sleep(LIMITS.head - TICK).await;
        }
    });
}

#[test]
fn streams_of_events_and_long_polls_of_known_clients_have_no_limit() {
    test(true, async {
        let mut client = Client::connect(None).await;
        client.ask("GET /events", "data: 20\n").await;
        assert!(client.began.elapsed() > HOUR);
        let mut client = Client::connect(None).await;
        client.ask("GET /poll", "after an hour").await;
    });
}

#[test]
fn a_body_that_does_not_come_is_answered_and_its_connection_closed() {
    test(true, async {
        for expect in ["", "Expect: 100-continue\r\n"] {
            let mut client = Client::connect(None).await;
            client
                .send(&format!("POST /body HTTP/1.1\r\nHost: x\r\n{expect}Content-Length: 9\r\n\r\nhalf"))
                .await;
            let said = client.closed(LIMITS.body).await;
            assert!(said.contains("HTTP/1.1 408 ") && said.contains("not complete within 30 s"), "{said}");
        }
    });
}

#[test]
fn a_slow_body_within_its_time_is_taken() {
    test(true, async {
        let mut client = Client::connect(None).await;
        client.send("POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n").await;
        for byte in "slowly...!".chars() {
            sleep((LIMITS.body - Duration::from_secs(1)) / 10).await;
            client.send(&byte.to_string()).await;
        }
        client.read_until("slowly...!").await;
    });
}

/// A listener for TCP, and where.
async fn listen(limits: Limits) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(serve_tcp(listener, None, router(), Connections::new(limits)));
    address
}

async fn connect(server: SocketAddr, from: [u8; 4]) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((from, 0).into()).unwrap();
    socket.connect(server).await.unwrap()
}

/// The answer to a request, up to its end; none when the connection is closed first.
async fn ask(stream: &mut TcpStream, path: &str) -> Option<String> {
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n");
    stream.write_all(request.as_bytes()).await.ok()?;
    let mut said = String::new();
    while !said.ends_with(path.trim_start_matches('/')) {
        let mut part = [0; 4096];
        let length = stream.read(&mut part).await.ok().filter(|length| *length > 0)?;
        said.push_str(std::str::from_utf8(&part[..length]).unwrap());
    }
    Some(said)
}

/// Waits until the server closes a connection.
async fn wait_for_end(stream: &mut TcpStream) {
    let mut byte = [0];
    assert!(matches!(stream.read(&mut byte).await, Ok(0) | Err(_)));
}

#[test]
fn silent_connections_of_one_address_neither_keep_others_out_nor_their_own_address() {
    const HOSTILE: [u8; 4] = [127, 0, 0, 2];
    const HONEST: [u8; 4] = [127, 0, 0, 3];
    test(false, async {
        let server = listen(Limits { connections: 8, per_client: 4, ..LIMITS }).await;
        let mut known = connect(server, HOSTILE).await;
        assert!(ask(&mut known, "/known").await.is_some());
        let mut silent = Vec::new();
        for _ in 0..3 {
            silent.push(connect(server, HOSTILE).await);
        }
        let mut honest = connect(server, HONEST).await;
        assert!(ask(&mut honest, "/known").await.is_some());
        // The fifth of an address takes the place of its oldest unknown one.
        let mut fifth = connect(server, HOSTILE).await;
        wait_for_end(&mut silent[0]).await;
        assert!(ask(&mut fifth, "/known").await.is_some());
        for _ in 0..20 {
            silent.push(connect(server, HOSTILE).await);
        }
        for stream in [&mut known, &mut honest, &mut fifth] {
            assert!(ask(stream, "/known").await.is_some());
        }
    });
}

#[test]
fn at_the_limit_of_all_known_clients_stay_and_another_is_refused() {
    test(false, async {
        let server = listen(Limits { connections: 2, per_client: 2, ..LIMITS }).await;
        let mut known = [connect(server, [127, 0, 0, 1]).await, connect(server, [127, 0, 0, 2]).await];
        for stream in &mut known {
            assert!(ask(stream, "/known").await.is_some());
        }
        wait_for_end(&mut connect(server, [127, 0, 0, 3]).await).await;
        for stream in &mut known {
            assert!(ask(stream, "/known").await.is_some());
        }
        drop(known);
        // The places are free as soon as the server has seen the ends.
        while ask(&mut connect(server, [127, 0, 0, 3]).await, "/known").await.is_none() {}
    });
}

#[test]
fn a_host_that_is_gone_or_takes_no_data_is_given_up() {
    test(false, async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        set_up(&stream, LIMITS).unwrap();
        let socket = SockRef::from(&stream);
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(LIMITS.unacknowledged));
        assert!(socket.keepalive().unwrap() && socket.tcp_keepalive_time().unwrap() == KEEPALIVE);
    });
}

#[test]
fn the_reserve_of_descriptors_is_filled_again() {
    let reserve = Reserve::new();
    let spare = || reserve.spare.lock().unwrap().len();
    assert_eq!(spare(), RESERVE);
    assert!((0..RESERVE).all(|_| reserve.release()) && !reserve.release());
    reserve.fill();
    assert_eq!(spare(), RESERVE);
    assert!(is_out_of_descriptors(&io::Error::from_raw_os_error(24)));
    assert!(!is_out_of_descriptors(&io::ErrorKind::ConnectionAborted.into()));
}
