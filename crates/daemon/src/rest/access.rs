//! The senders of requests, and their roles.
//!
//! Access to the Unix socket grants the role admin: its permission bits limit it. Over TCP each
//! request carries a token, which has a role.

use super::answer::Failure;
use super::connections::Connection;
use super::current::Current;
use super::page;
use super::roles::{Caller, Role};
use super::tokens::Tokens;
use axum::Extension;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::AUTHORIZATION;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;
use std::time::SystemTime;

/// Requests over the Unix socket: access to it grants everything.
pub async fn over_unix(
    Extension(connection): Extension<Arc<Connection>>,
    mut request: Request,
    next: Next,
) -> Response {
    connection.trust();
    let (who, identity) = (connection.peer.to_string().into(), connection.peer.client().to_string().into());
    request.extensions_mut().insert(Caller { who, identity, role: Role::Admin, label: "".into() });
    next.run(request).await
}

/// Requests over TCP, which take a token.
pub async fn over_tcp(
    State(tokens): State<Current<Tokens>>,
    Extension(connection): Extension<Arc<Connection>>,
    mut request: Request,
    next: Next,
) -> Response {
    if page::has(request.uri().path()) {
        return next.run(request).await;
    }
    let tokens = tokens.get();
    let bearer =
        request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
    let Some(secret) = bearer else { return refuse("want Authorization: Bearer TOKEN") };
    match tokens.check(secret.trim(), SystemTime::now()) {
        Ok(token) => {
            connection.recognize(token.digest);
            let who = format!("token {}", token.name).into();
            let identity = format!("token {} {}", token.role.name(), token.name).into();
            let caller = Caller { who, identity, role: token.role, label: token.name.as_str().into() };
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(refused) => refuse(&refused.to_string()),
    }
}

fn refuse(detail: &str) -> Response {
    let failure =
        Failure::new(StatusCode::UNAUTHORIZED, "unauthorized", "A request takes a valid token", detail);
    ([("www-authenticate", "Bearer")], failure).into_response()
}
