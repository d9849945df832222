//! The listeners of the API as their clients find them: TLS, limits of connections, descriptors,
//! tokens that change.

use crate::common::Daemon;
use openssl::ssl::{SslConnector, SslMethod, SslStream};
use reqwest::StatusCode;
use reqwest::blocking::Client;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const ADMIN: &str = "admin-0123456789abcdef012345";
const OTHER: &str = "other-0123456789abcdef012345";
/// Only a test that fails waits as long.
const TIMEOUT: Duration = Duration::from_secs(60);

fn tokens(of: &[&str]) -> String {
    of.iter().map(|token| format!("admin {} {token}\n", &token[..5])).collect()
}

/// A daemon that listens with TLS too, its certificates, and its address.
fn with_tls() -> (Daemon, tempfile::TempDir, String) {
    let certificates = tempfile::tempdir().unwrap();
    tls::authority::write_all(certificates.path());
    let directory = certificates.path().to_str().unwrap();
    let (daemon, address) = Daemon::listening_with(&tokens(&[ADMIN]), &["--tls-certificates", directory]);
    (daemon, certificates, address)
}

/// A connection to `address` as `localhost`, of a client that trusts the authority in
/// `certificates`.
fn connect_tls(address: &str, certificates: &Path) -> Result<SslStream<TcpStream>, String> {
    let mut connector = SslConnector::builder(SslMethod::tls()).unwrap();
    connector.set_ca_file(certificates.join("ca-cert.pem")).unwrap();
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    connector.build().connect("localhost", stream).map_err(|error| error.to_string())
}

/// Asks for the daemon's state, and returns the answer up to the end of its connection.
fn ask(stream: &mut (impl Read + Write), token: &str) -> String {
    let head = "GET /v1/system HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n";
    write!(stream, "{head}Authorization: Bearer {token}\r\n\r\n").unwrap();
    let mut said = String::new();
    stream.read_to_string(&mut said).unwrap();
    said
}

/// A stream of events over TCP, read up to the end of its head.
fn watch(address: &str, token: &str) -> BufReader<TcpStream> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    let head = "GET /v1/events/stream HTTP/1.1\r\nHost: localhost\r\n";
    write!(stream, "{head}Authorization: Bearer {token}\r\n\r\n").unwrap();
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    assert!(line.starts_with("HTTP/1.1 200"), "{line}");
    while line != "\r\n" {
        line.clear();
        reader.read_line(&mut line).unwrap();
    }
    reader
}

#[test]
fn tls_is_spoken_where_it_is_asked_for_and_tokens_do_not_go_in_the_clear() {
    let (_daemon, certificates, address) = with_tls();
    let said = ask(&mut connect_tls(&address, certificates.path()).unwrap(), ADMIN);
    assert!(said.starts_with("HTTP/1.1 200 "), "{said}");
    let http = Client::builder().timeout(TIMEOUT).build().unwrap();
    assert!(http.get(format!("http://{address}/v1/system")).bearer_auth(ADMIN).send().is_err());
    let daemon = Daemon::prepare(&[]);
    secrets::write(&daemon.path("tokens"), tokens(&[ADMIN])).unwrap();
    let run = |args: &[&str]| {
        let output = daemon.command().arg("--tokens").arg(daemon.path("tokens")).args(args).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let said = run(&["--listen", "0.0.0.0:0"]);
    assert!(said.contains("0.0.0.0:0: this is no loopback address, so it takes TLS"), "{said}");
    let exposed = "other users have access to this secret file (mode 644)";
    let expose =
        |path: &Path| std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o644)).unwrap();
    let key = certificates.path().join("server-key.pem");
    expose(&key);
    let directory = certificates.path().to_str().unwrap();
    let said = run(&["--listen", "127.0.0.1:0", "--tls-certificates", directory]);
    assert!(said.contains(&format!("{}: {exposed}", key.display())), "{said}");
    expose(&daemon.path("tokens"));
    let said = run(&["--listen", "127.0.0.1:0"]);
    assert!(said.contains(&format!("{}: {exposed}", daemon.path("tokens").display())), "{said}");
}

#[test]
fn silent_connections_of_one_address_are_bounded_and_keep_no_client_out() {
    let (daemon, address) = Daemon::listening(&tokens(&[ADMIN]));
    let descriptors = || std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap().count();
    let before = descriptors();
    let mut watcher = watch(&address, ADMIN);
    let silent: Vec<TcpStream> = (0..300).map(|_| TcpStream::connect(&address).unwrap()).collect();
    let said = ask(&mut TcpStream::connect(&address).unwrap(), ADMIN);
    assert!(said.starts_with("HTTP/1.1 200 "), "{said}");
    assert!(descriptors() <= before + 128 + 4, "{before}, then {}", descriptors());
    // The oldest is gone, the stream of a known client is not.
    silent[0].set_read_timeout(Some(TIMEOUT)).unwrap();
    assert!(matches!((&silent[0]).read(&mut [0]), Ok(0) | Err(_)));
    daemon.post("/v1/devices", &serde_json::json!({ "name": "d1", "spec": "mem:size=64M" }));
    let mut line = String::new();
    while !line.contains("\"d1\"") {
        line.clear();
        assert!(watcher.read_line(&mut line).unwrap() > 0, "the stream has ended");
    }
}

#[test]
fn the_unix_socket_answers_when_other_clients_hold_every_descriptor() {
    let (daemon, address) = Daemon::listening(&tokens(&[ADMIN]));
    // Descriptors have the lowest free numbers, and higher ones may have been inherited.
    let taken_below = |limit: usize| {
        let files = std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap();
        let number = |name: std::ffi::OsString| name.into_string().unwrap().parse::<usize>().unwrap();
        files.filter(|file| number(file.as_ref().unwrap().file_name()) < limit).count()
    };
    let limit = (1..).find(|limit| taken_below(*limit) < *limit).unwrap() + 4;
    let pid = daemon.pid().to_string();
    let mut prlimit = Command::new("prlimit");
    assert!(prlimit.args(["--pid", &pid, &format!("--nofile={limit}:")]).status().unwrap().success());
    let mut watchers = Vec::new();
    while taken_below(limit) < limit {
        watchers.push(watch(&address, ADMIN));
    }
    // More often than there are descriptors in the reserve.
    for _ in 0..40 {
        let mut stream = UnixStream::connect(daemon.path("d.sock")).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        let said = ask(&mut stream, "");
        assert!(said.starts_with("HTTP/1.1 200 "), "{said}");
    }
}

#[test]
fn tokens_are_read_again_at_sighup_and_a_bad_file_keeps_the_former_ones() {
    let (daemon, address) = Daemon::listening(&tokens(&[ADMIN, OTHER]));
    let status = |token: &str| {
        let http = Client::builder().timeout(TIMEOUT).build().unwrap();
        http.get(format!("http://{address}/v1/system")).bearer_auth(token).send().unwrap().status()
    };
    let reload = |content: &str, message: &'static str| -> Value {
        let count = daemon.logged(message).count();
        secrets::write(&daemon.path("tokens"), content).unwrap();
        daemon.signal("-HUP");
        daemon.wait_for(message, || daemon.logged(message).count() > count);
        daemon.logged(message).last().unwrap()
    };
    const REFUSED: &str = "API tokens not reloaded; the tokens in use stay valid";
    let mut watchers = [watch(&address, ADMIN), watch(&address, OTHER)];
    let said = reload(&format!("{}admin x short\n", tokens(&[OTHER])), REFUSED);
    let error = said["error"].as_str().unwrap();
    assert!(said["level"] == "ERROR" && error.contains("/tokens: line 2: the token has fewer"), "{said}");
    let path = daemon.path("tokens");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    daemon.signal("-HUP");
    daemon.wait_for("a refusal", || daemon.logged(REFUSED).count() > 1);
    assert_eq!((status(ADMIN), status(OTHER)), (StatusCode::OK, StatusCode::OK));
    reload(&tokens(&[OTHER]), "API tokens reloaded");
    assert_eq!((status(ADMIN), status(OTHER)), (StatusCode::UNAUTHORIZED, StatusCode::OK));
    // The connection of the token that is gone has ended, the other one has not.
    let mut rest = Vec::new();
    let _ = watchers[0].read_to_end(&mut rest);
    daemon.post("/v1/devices", &serde_json::json!({ "name": "d1", "spec": "mem:size=64M" }));
    let mut line = String::new();
    while !line.contains("\"d1\"") {
        line.clear();
        assert!(watchers[1].read_line(&mut line).unwrap() > 0, "the stream has ended");
    }
    assert!(!String::from_utf8(rest).unwrap().contains("\"d1\""));
}

#[test]
fn certificates_are_read_again_at_sighup_and_bad_files_keep_the_former_ones() {
    let (daemon, certificates, address) = with_tls();
    let directory = certificates.path();
    let shown = || {
        let stream = connect_tls(&address, directory).unwrap();
        stream.ssl().peer_certificate().unwrap().to_pem().unwrap()
    };
    let reload = |message: &'static str| -> Value {
        let count = daemon.logged(message).count();
        daemon.signal("-HUP");
        daemon.wait_for(message, || daemon.logged(message).count() > count);
        daemon.logged(message).last().unwrap()
    };
    let first = shown();
    assert_eq!(first, std::fs::read(directory.join("server-cert.pem")).unwrap());
    let key = std::fs::read(directory.join("server-key.pem")).unwrap();
    secrets::write(&directory.join("server-key.pem"), "no key").unwrap();
    let said = reload("API certificates not reloaded; the certificate in use stays");
    let error = said["error"].as_str().unwrap();
    assert!(said["level"] == "ERROR" && error.contains("server-key.pem: no PEM private key"), "{said}");
    assert_eq!(shown(), first);
    secrets::write(&directory.join("server-key.pem"), key).unwrap();
    tls::authority::write_all(directory);
    reload("API certificates reloaded");
    let second = shown();
    assert!(second != first && second == std::fs::read(directory.join("server-cert.pem")).unwrap());
    let said = ask(&mut connect_tls(&address, directory).unwrap(), ADMIN);
    assert!(said.starts_with("HTTP/1.1 200 "), "{said}");
}

/// Sends a request head, and returns the head of the answer.
fn exchange(stream: &mut (impl Read + Write), head: &str) -> String {
    write!(stream, "{head}\r\n\r\n").unwrap();
    let (mut said, mut byte) = (Vec::new(), [0]);
    while !said.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).unwrap();
        said.push(byte[0]);
    }
    String::from_utf8(said).unwrap()
}

fn check_headers(stream: &mut (impl Read + Write), request: &str, status: &str, headers: &str) {
    let said = exchange(stream, &format!("{request} HTTP/1.1\r\n{headers}")).to_lowercase();
    let what = format!("{request} {headers}: {said}");
    assert!(said.starts_with(&format!("http/1.1 {status} ")), "{what}");
    for header in ["\r\ncache-control: no-store\r\n", "\r\nx-content-type-options: nosniff\r\n"] {
        assert_eq!(said.matches(header).count(), 1, "{what}");
    }
    assert_eq!(said.matches("\r\ncache-control:").count(), 1, "{what}");
}

#[test]
fn every_answer_forbids_caches_to_keep_it_and_browsers_to_guess_its_type() {
    let (daemon, address) = Daemon::listening(&tokens(&[ADMIN]));
    let bearer = format!("Host: localhost\r\nAuthorization: Bearer {ADMIN}");
    let cases = [
        ("GET /v1/system", "200", &*bearer),
        ("GET /v1/openapi.json", "200", &bearer),
        ("GET /v1/events/stream", "200", &bearer),
        ("GET /metrics", "200", &bearer),
        ("GET /", "200", "Host: localhost"),
        ("GET /web/nope", "404", "Host: localhost"),
        ("GET /v1/system", "401", "Host: localhost"),
        ("GET /v1/nope", "404", &bearer),
        ("PUT /v1/system", "405", &bearer),
        ("POST /v1/volumes", "415", &bearer),
        ("DELETE /v1/volumes/v1", "404", &bearer),
        ("GET /v1/system", "421", "Host: evil.example"),
    ];
    for (request, status, headers) in cases {
        check_headers(&mut TcpStream::connect(&address).unwrap(), request, status, headers);
        // The socket's clients need neither a token nor a name.
        if !["401", "421"].contains(&status) {
            check_headers(&mut UnixStream::connect(daemon.path("d.sock")).unwrap(), request, status, headers);
        }
    }
}

#[test]
fn a_request_under_a_name_that_is_not_the_daemons_is_refused() {
    let certificates = tempfile::tempdir().unwrap();
    tls::authority::write_all(certificates.path());
    tls::authority::Authority::new().vouch(certificates.path(), "server", &["nas.example"]);
    let directory = certificates.path().to_str().unwrap();
    let more = ["--tls-certificates", directory, "--host", "storage.example"];
    let (_daemon, address) = Daemon::listening_with(&tokens(&[ADMIN]), &more);
    let status = |target: &str, headers: &str| {
        let mut connector = SslConnector::builder(SslMethod::tls()).unwrap();
        connector.set_verify(openssl::ssl::SslVerifyMode::NONE);
        let mut stream = connector.build().connect("x", TcpStream::connect(&address).unwrap()).unwrap();
        let said = exchange(
            &mut stream,
            &format!("GET {target} HTTP/1.1\r\n{headers}Authorization: Bearer {ADMIN}"),
        );
        said.split(' ').nth(1).unwrap().to_owned()
    };
    for name in ["localhost", "127.0.0.1:1", "storage.example:1", "NAS.example"] {
        assert_eq!(status("/v1/system", &format!("Host: {name}\r\n")), "200", "{name}");
        assert_eq!(status(&format!("http://{name}/v1/system"), "Host: localhost\r\n"), "200", "{name}");
    }
    for name in ["evil.example", "10.0.0.1", "x.nas.example"] {
        assert_eq!(status("/v1/system", &format!("Host: {name}\r\n")), "421", "{name}");
        assert_eq!(status(&format!("http://{name}/v1/system"), "Host: localhost\r\n"), "421", "{name}");
        // The page is for all clients that mean this daemon.
        assert_eq!(status("/", &format!("Host: {name}\r\n")), "421", "{name}");
    }
    for headers in ["", "Host: localhost\r\nHost: evil.example\r\n", "Host:\r\n"] {
        assert_eq!(status("/v1/system", headers), "421", "{headers:?}");
    }
    let daemon = Daemon::prepare(&["--listen", "127.0.0.1:0", "--tokens", "t", "--host", "a:80"]);
    let said = String::from_utf8(daemon.command().output().unwrap().stderr).unwrap();
    assert!(said.contains("'a:80'") && said.contains("expected a host name without a port"), "{said}");
}

/// Runs `freestoned token FILE …`, and returns the token or the text of the refusal.
fn make_token(daemon: &Daemon, args: &[&str]) -> Result<String, String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_freestoned"));
    // Options of the daemon from the environment do not disturb the subcommand.
    command.env("FREESTONE_SOCKET", daemon.path("other.sock"));
    let output = command.arg("token").arg(daemon.path("tokens")).args(args).output().unwrap();
    let [stdout, stderr] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    match output.status.success() {
        true => Ok(stdout.strip_suffix('\n').unwrap().to_owned()),
        false => {
            assert_eq!(stdout, "");
            Err(stderr)
        }
    }
}

#[test]
fn a_made_token_is_accepted_until_it_expires_and_stands_nowhere_in_clear_text() {
    let (daemon, address) = Daemon::listening(&tokens(&[ADMIN]));
    let path = daemon.path("tokens");
    let is_warned = || {
        let said = format!("tokens {}: line 1: API token in clear text", path.display());
        daemon.log().contains(&said)
    };
    daemon.wait_for("a warning of the clear text", is_warned);

    let page = make_token(&daemon, &["read-only", "page", "--expires", "2999-12-31"]).unwrap();
    let later = "2999-12-30T00:00:00Z";
    let brief = make_token(&daemon, &["operator", "brief", "--expires", later]).unwrap();
    assert!(page.len() == 64 && page != brief);
    for (args, problem) in [
        (
            &["root", "x"][..],
            "invalid value 'root' for '<ROLE>': want read-only, provisioner, operator, admin",
        ),
        (&["admin", "page"], "/tokens: the token page exists already"),
        (&["admin", "a/b"], "token name \"a/b\": a name has letters"),
        (
            &["admin", "x", "--expires", "soon"],
            "invalid value 'soon' for '--expires <TIME>': want a UTC time",
        ),
        (&["admin", "x", "--expires", "2020-01-01"], "token x: expires 2020-01-01T00:00:00Z: want a time in"),
    ] {
        let said = make_token(&daemon, args).unwrap_err();
        assert!(said.contains(problem), "{args:?}: {said}");
    }
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.lines().count() == 3 && !text.contains(&page) && !text.contains(&brief), "{text}");
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);

    daemon.signal("-HUP");
    daemon.wait_for("the tokens", || daemon.logged("API tokens reloaded").next().is_some());
    let request = |token: &str| {
        let http = Client::builder().timeout(TIMEOUT).build().unwrap();
        let answer = http.get(format!("http://{address}/v1/system")).bearer_auth(token).send().unwrap();
        (answer.status(), answer.text().unwrap())
    };
    let mut watchers = [watch(&address, &page), watch(&address, &brief)];
    assert_eq!((request(&page).0, request(&brief).0), (StatusCode::OK, StatusCode::OK));
    let http = Client::builder().timeout(TIMEOUT).build().unwrap();
    let change = http.put(format!("http://{address}/v1/groups/g")).bearer_auth(&brief);
    assert!(change.json(&serde_json::json!({})).send().unwrap().status().is_success());
    // The daemon closes the stream of the token that expires, and no other one. The time may be
    // past when the file is read.
    let now = std::time::SystemTime::now();
    let end = humantime::format_rfc3339_seconds(now + Duration::from_secs(2)).to_string();
    std::fs::write(&path, text.replace(later, &end)).unwrap();
    daemon.signal("-HUP");
    let _ = watchers[1].read_to_end(&mut Vec::new());
    let (status, said) = request(&brief);
    assert_eq!(status, StatusCode::UNAUTHORIZED);
    assert!(said.contains(&format!("token brief: expired at {end}")), "{said}");
    let digest = text.split("sha256:").nth(1).unwrap().split_whitespace().next().unwrap();
    let (status, refused) = request(digest);
    assert!(status == StatusCode::UNAUTHORIZED && refused.contains("the token is not known"), "{refused}");
    daemon.post("/v1/devices", &serde_json::json!({ "name": "d1", "spec": "mem:size=64M" }));
    let mut line = String::new();
    while !line.contains("\"d1\"") {
        line.clear();
        assert!(watchers[0].read_line(&mut line).unwrap() > 0, "the stream has ended");
    }
    daemon.wait_for("an audit line", || {
        daemon.logged("change answered").any(|line| line["who"] == "token brief")
    });
    daemon.wait_for("a failed login", || daemon.logged("login failed").count() == 2);
    let log = daemon.log();
    for secret in [&*page, &brief, ADMIN, digest] {
        assert!(!log.contains(secret) && !said.contains(secret) && !refused.contains(secret), "{log}");
    }
}
