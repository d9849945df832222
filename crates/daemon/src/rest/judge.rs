//! The check of each request's operation, before its body is read.

use super::answer::malformed;
use super::audit;
use super::bounds::MAX_TARGET;
use super::judged::Judged;
use super::roles::{ADMINISTERS, Caller, Role, find};
use axum::extract::{MatchedPath, Request};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

/// Lets requests through whose operation the caller may ask for.
pub async fn judge(mut request: Request, next: Next) -> Response {
    let caller = Caller::of(&request);
    let target = request.uri().path_and_query().map_or(0, |target| target.as_str().len());
    if target > MAX_TARGET {
        let detail = format!("the path and query of the request: {target} bytes: at most {MAX_TARGET}");
        return malformed(StatusCode::URI_TOO_LONG, detail).into_response();
    }
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let matched = request.extensions().get::<MatchedPath>().map(|matched| matched.as_str().to_owned());
    let response = match matched.as_deref().map(|matched| find(&method, matched)) {
        // The router answers that there is no such path.
        None => next.run(request).await,
        Some(Some(row)) if row.roles.contains(&caller.role) => {
            request.extensions_mut().insert(Judged { caller: caller.clone(), row });
            next.run(request).await
        }
        Some(None) if caller.role == Role::Admin => next.run(request).await,
        Some(row) => {
            let roles = row.map_or(ADMINISTERS, |row| row.roles);
            caller.refuse(&format!("{method} {path}"), roles).into_response()
        }
    };
    audit::note_refusal(&caller, &method, &path, &response);
    response
}
