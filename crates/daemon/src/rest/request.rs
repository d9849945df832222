//! Bodies, names and tags of requests; errors in them are answered as problems.

use super::Context;
use super::answer::{Failure, Resource, malformed, tag};
use super::asks::Asks;
use super::bounds;
use super::judged::Judged;
use crate::api_error::{ApiError, Kind};
use axum::Json;
use axum::extract::rejection::{JsonRejection, PathRejection, QueryRejection};
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::StatusCode;
use axum::http::header::IF_MATCH;
use axum::http::request::Parts;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::convert::Infallible;

/// A body in JSON: an object, whose sender may ask for what it says.
pub struct Body<T>(pub T);

impl<T: DeserializeOwned + Asks> FromRequest<Context> for Body<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, state: &Context) -> Result<Body<T>, Failure> {
        let judged = request.extensions().get::<Judged>().cloned();
        let Json(body) = Json::<Value>::from_request(request, state).await?;
        let refuse = |detail: String| malformed(StatusCode::UNPROCESSABLE_ENTITY, detail);
        // Serde would take a list of values for a structure.
        if !body.is_object() {
            return Err(refuse("the body is no object".into()));
        }
        bounds::check(&body).map_err(refuse)?;
        let body: T = serde_json::from_value(body).map_err(|error| refuse(error.to_string()))?;
        // A route without a row in the table is open to administrators alone.
        judged.map_or(Ok(()), |judged| judged.check(&body.asks(&state.own)))?;
        Ok(Body(body))
    }
}

/// Names in a path.
#[derive(FromRequestParts)]
#[from_request(via(axum::extract::Path), rejection(Failure))]
pub struct Path<T>(pub T);

/// The query of a request.
#[derive(FromRequestParts)]
#[from_request(via(axum::extract::Query), rejection(Failure))]
pub struct Query<T>(pub T);

impl From<JsonRejection> for Failure {
    fn from(rejection: JsonRejection) -> Failure {
        malformed(rejection.status(), rejection.body_text())
    }
}

impl From<PathRejection> for Failure {
    fn from(rejection: PathRejection) -> Failure {
        malformed(rejection.status(), rejection.body_text())
    }
}

impl From<QueryRejection> for Failure {
    fn from(rejection: QueryRejection) -> Failure {
        malformed(rejection.status(), rejection.body_text())
    }
}

/// The tag that a resource has to have, if one was said.
pub struct IfMatch(Option<String>);

impl<S: Sync> FromRequestParts<S> for IfMatch {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<IfMatch, Failure> {
        let Some(value) = parts.headers.get(IF_MATCH) else { return Ok(IfMatch(None)) };
        let text = value.to_str().ok().filter(|text| text.len() <= bounds::MAX_TARGET).ok_or_else(|| {
            let detail = format!("If-Match: want tags, in {} bytes at most", bounds::MAX_TARGET);
            malformed(StatusCode::BAD_REQUEST, detail)
        })?;
        Ok(IfMatch(Some(text.to_owned())))
    }
}

/// Whether the caller takes a job for an answer (`Prefer: respond-async`, RFC 7240).
pub struct Prefer {
    pub is_async: bool,
}

impl<S: Sync> FromRequestParts<S> for Prefer {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Prefer, Infallible> {
        let lines = parts.headers.get_all("prefer").into_iter().filter_map(|line| line.to_str().ok());
        let is_async = lines.flat_map(|line| line.split(',')).any(|word| word.trim() == "respond-async");
        Ok(Prefer { is_async })
    }
}

impl IfMatch {
    /// Whether the resource is as the caller knows it.
    ///
    /// # Errors
    /// When it is not.
    pub fn check(&self, resource: &impl Resource) -> Result<(), ApiError> {
        let Some(wanted) = &self.0 else { return Ok(()) };
        let found = tag(resource);
        match wanted.split(',').map(str::trim).any(|tag| tag == "*" || tag == found) {
            true => Ok(()),
            false => Err(ApiError::new(Kind::Stale, format!("the tag is {found}, not {wanted}"))),
        }
    }
}
