//! The names under which clients reach the daemon over TCP, against DNS rebinding.
//!
//! A web page of an attacker can have its own name resolve to 127.0.0.1. Scripts of the page then
//! reach a daemon that listens there, and the browser takes both for one site. It sends the page's
//! name as `Host`, so requests under a name that is not the daemon's are refused. No name is behind
//! an address, so an address cannot be rebound.

use super::answer::Failure;
use super::current::Current;
use axum::extract::{Request, State};
use axum::http::header::HOST;
use axum::http::uri::Authority;
use axum::http::{HeaderValue, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::net::IpAddr;
use std::sync::Arc;

/// Names in lower case; `*.` stands for one label before the rest.
pub(super) type Names = Arc<[String]>;

/// The names of a listener.
#[derive(Clone, Debug)]
pub(super) struct Hosts {
    is_loopback: bool,
    /// Names that the operator gives the daemon.
    given: Names,
    /// Names of the certificate.
    certified: Current<Names>,
}

/// Names as they are compared.
pub(super) fn names<T: AsRef<str>>(names: impl IntoIterator<Item = T>) -> Names {
    names.into_iter().map(|name| name.as_ref().to_ascii_lowercase()).collect()
}

impl Hosts {
    /// The names of a listener on this address, whose certificate has names of its own.
    pub(super) fn new(address: IpAddr, given: &[String], certified: Current<Names>) -> Hosts {
        Hosts { is_loopback: address.to_canonical().is_loopback(), given: names(given), certified }
    }

    /// Whether a `Host`, with a port or without, is one of the listener's.
    fn accept(&self, host: &str) -> bool {
        let Ok(authority) = host.parse::<Authority>() else { return false };
        if authority.as_str().contains('@') {
            return false;
        }
        let name = authority.host().to_ascii_lowercase();
        let name = name.strip_suffix('.').unwrap_or(&name);
        let address = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
        match address.parse::<IpAddr>() {
            // The system decides what arrives at a listener on other addresses, perhaps behind a
            // translation of addresses.
            Ok(address) => !self.is_loopback || address.to_canonical().is_loopback(),
            Err(_) => {
                let is_known = |names: &[String]| names.iter().any(|known| matches(known, name));
                is_known(&self.given)
                    || is_known(&self.certified.get())
                    || (self.is_loopback && name == "localhost")
            }
        }
    }
}

fn matches(known: &str, name: &str) -> bool {
    match known.strip_prefix("*.") {
        Some(parent) => name.split_once('.').is_some_and(|(label, rest)| !label.is_empty() && rest == parent),
        None => known == name,
    }
}

/// Refuses requests under other names.
pub(super) async fn check(State(hosts): State<Hosts>, request: Request, next: Next) -> Response {
    let is_ours = |value: &HeaderValue| value.to_str().is_ok_and(|host| hosts.accept(host));
    let mut headers = request.headers().get_all(HOST).iter();
    let is_accepted = match (headers.next(), headers.next()) {
        (Some(host), None) => is_ours(host),
        _ => false,
    };
    // A request line may hold the name, too (RFC 9112, 3.2.2).
    let in_line = request.uri().authority();
    if is_accepted && in_line.is_none_or(|authority| hosts.accept(authority.as_str())) {
        return next.run(request).await;
    }
    let detail = "Host is no name of this daemon; freestoned --host NAME adds one";
    Failure::new(StatusCode::MISDIRECTED_REQUEST, "misdirected", "Unknown host name", detail).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(address: &str, given: &[&str], certified: &[&str]) -> Hosts {
        let given: Vec<String> = given.iter().map(|name| (*name).to_owned()).collect();
        Hosts::new(address.parse().unwrap(), &given, Current::new(names(certified)))
    }

    #[track_caller]
    fn check(hosts: &Hosts, accepted: &[&str], refused: &[&str]) {
        for host in accepted {
            assert!(hosts.accept(host), "{host}");
        }
        for host in refused {
            assert!(!hosts.accept(host), "{host}");
        }
    }

    #[test]
    fn a_listener_on_loopback_answers_to_localhost_and_loopback_addresses() {
        let foreign = [
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "10.0.0.1",
            "[2001:db8::1]",
            "",
            ":80",
            "a b",
            "x@localhost",
            "localhost..",
        ];
        let ours = [
            "localhost",
            "LOCALHOST:80",
            "localhost.",
            "127.0.0.1:8443",
            "127.0.0.2",
            "[::1]",
            "[::1]:80",
            "[::ffff:127.0.0.1]",
        ];
        for address in ["127.0.0.1", "::1", "::ffff:127.0.0.1"] {
            check(&hosts(address, &[], &[]), &ours, &foreign);
        }
    }

    #[test]
    fn a_listener_answers_to_names_of_the_operator_and_of_the_certificate() {
        let named = hosts("10.0.0.1", &["Storage.Example"], &["nas.example", "*.lab.example"]);
        check(
            &named,
            &[
                "storage.example:1",
                "NAS.example",
                "a.lab.example",
                "10.0.0.1:8443",
                "192.0.2.1",
                "[2001:db8::1]",
            ],
            &[
                "evil.example",
                "localhost",
                "lab.example",
                ".lab.example",
                "a.b.lab.example",
                "x.storage.example",
            ],
        );
        let local = hosts("127.0.0.1", &["storage.example"], &[]);
        check(&local, &["storage.example", "localhost"], &["nas.example"]);
        check(&hosts("0.0.0.0", &[], &[]), &["10.0.0.1"], &["any.example"]);
        let certified = Current::new(names(["old.example"]));
        let hosts = Hosts::new([10, 0, 0, 1].into(), &[], certified.clone());
        certified.set(names(["new.example"]));
        check(&hosts, &["new.example"], &["old.example"]);
    }
}
