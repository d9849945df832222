//! The page: files that are part of the program. They need no token; the data that they show does.

use super::answer::Failure;
use crate::api_error::ApiError;
use axum::extract::Path;
use axum::http::header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE};
use axum::response::IntoResponse;
use include_dir::{Dir, include_dir};

static FILES: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/web");

/// Nothing comes from elsewhere, and nothing but our files is run.
const POLICY: &str = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Whether a path is one of the page's.
pub fn has(path: &str) -> bool {
    path == "/" || path.starts_with("/web/")
}

/// The page.
pub async fn index() -> Result<impl IntoResponse, Failure> {
    file("index.html")
}

/// A file of the page.
pub async fn part(Path(name): Path<String>) -> Result<impl IntoResponse, Failure> {
    file(&name)
}

fn file(name: &str) -> Result<impl IntoResponse + use<>, Failure> {
    let file = FILES
        .get_file(name)
        .ok_or_else(|| Failure::from(ApiError::not_found("path", &format!("/web/{name}"))))?;
    let kind = match name.rsplit_once('.').map(|(_, ending)| ending) {
        Some("html") => "text/html; charset=utf-8",
        Some("css") => "text/css; charset=utf-8",
        Some("js") => "text/javascript; charset=utf-8",
        Some("svg") => "image/svg+xml",
        _ => "application/octet-stream",
    };
    let headers = [(CONTENT_TYPE, kind), (CONTENT_SECURITY_POLICY, POLICY)];
    Ok((headers, file.contents()))
}
