//! A hostile client of the daemon's REST API, and a daemon in this process, over its Unix socket.
//!
//! The client builds requests from the daemon's own OpenAPI document (`schema`) and invalidates
//! some of them. Each must be answered in time, in JSON, and not with a defect of the daemon. A
//! refused request must leave the state file unchanged. Every created object must be removable.

mod schema;
mod server;

use crate::input::Input;
use serde_json::Value;
use server::{Answer, Server, server};

const MAX_REQUESTS: usize = 8;

/// Runs one input.
///
/// # Panics
/// When the daemon violates a requirement.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let mut server = server().lock().expect("inputs come one after the other");
    for _ in 0..MAX_REQUESTS {
        if input.is_empty() {
            break;
        }
        ask(&server, &mut input);
    }
    if !server.is_as_built() {
        server.rebuild();
    }
}

fn ask(server: &Server, input: &mut Input<'_>) {
    let request = server.document.request(input);
    let before = server.state();
    let Answer { status, head, body } = server.ask(&request);
    let asked = || {
        let body = String::from_utf8_lossy(&request.body[..request.body.len().min(2000)]).into_owned();
        format!("{} {} {:?} {body}", request.method, request.target, request.headers)
    };
    let said = || String::from_utf8_lossy(&body[..body.len().min(2000)]).into_owned();
    if (200..300).contains(&status) {
        let is_json = body.is_empty() || serde_json::from_slice::<Value>(&body).is_ok();
        assert!(is_json, "{}: {status}: no JSON: {}", asked(), said());
        return;
    }
    assert!((400..600).contains(&status), "{}: {status} {}", asked(), said());
    // The system may refuse an operation, which the daemon reports.
    assert!(!said().contains("a defect of the daemon"), "{}: {status} {}", asked(), said());
    assert_eq!(server.state(), before, "refused, and the state has changed: {}: {}", asked(), said());
    assert!(head.contains("application/problem+json"), "{}: {head}", asked());
    let problem: Value = serde_json::from_slice(&body).unwrap_or_default();
    assert_eq!(problem["status"], status, "{}: {}", asked(), said());
    let is_said = problem["detail"].as_str().is_some_and(|detail| !detail.is_empty());
    assert!(is_said, "{}: {}", asked(), said());
}
