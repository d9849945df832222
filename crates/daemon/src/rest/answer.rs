//! Answers: problems, and resources with their tags.

use crate::api_error::{ApiError, Kind};
use api::{Array, Device, Export, Job, Member, Portal, Problem, Reshape, Spare, Volume};
use axum::http::header::{CONTENT_TYPE, ETAG};
use axum::http::{HeaderValue, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use std::hash::{DefaultHasher, Hash, Hasher};

/// An answer that says why a request was not carried out.
#[derive(Clone, Debug)]
pub struct Failure(Problem);

impl Failure {
    /// With this status, and a word for programs.
    pub fn new(status: StatusCode, kind: &str, title: &str, detail: impl Into<String>) -> Failure {
        let (kind, title) = (kind.to_owned(), title.to_owned());
        Failure(Problem { kind, title, status: status.as_u16(), detail: detail.into() })
    }
}

/// The answer to a malformed request.
pub fn malformed(status: StatusCode, detail: String) -> Failure {
    Failure::new(status, "malformed", "Malformed request", detail)
}

impl From<ApiError> for Failure {
    fn from(fault: ApiError) -> Failure {
        let (status, kind, title) = match fault.kind {
            Kind::Invalid => (StatusCode::UNPROCESSABLE_ENTITY, "invalid", "The request is invalid"),
            Kind::NotFound => (StatusCode::NOT_FOUND, "not-found", "There is no such thing"),
            Kind::Unopened => (StatusCode::UNPROCESSABLE_ENTITY, "cannot-open", "It cannot be opened"),
            Kind::Exists => (StatusCode::CONFLICT, "exists", "There is one already"),
            Kind::InUse => (StatusCode::CONFLICT, "in-use", "It is in use"),
            Kind::NoRoom => (StatusCode::CONFLICT, "no-room", "There is no room"),
            Kind::Stale => (StatusCode::PRECONDITION_FAILED, "stale", "It has changed"),
            Kind::Unavailable => (StatusCode::CONFLICT, "unavailable", "It does not run"),
            Kind::Forbidden => (StatusCode::FORBIDDEN, "forbidden", "The role may not do that"),
            Kind::Failed => (StatusCode::INTERNAL_SERVER_ERROR, "failed", "Something failed"),
        };
        Failure::new(status, kind, title, fault.detail)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.0.status).expect("it was one");
        let body = serde_json::to_vec(&self.0).expect("plain data");
        (status, [(CONTENT_TYPE, Problem::MEDIA_TYPE)], body).into_response()
    }
}

/// A path that the API does not have.
pub async fn no_such_path(uri: Uri) -> Failure {
    Failure::from(ApiError::not_found("path", uri.path()))
}

/// A method that a path does not have.
pub async fn no_such_method(method: Method, uri: Uri) -> Failure {
    let detail = format!("{}: no method {method}", uri.path());
    Failure::new(StatusCode::METHOD_NOT_ALLOWED, "no-such-method", "Method not allowed", detail)
}

/// Something with an identity, whose tag changes when it is changed.
pub trait Resource: Serialize + Clone {
    /// The fields that the tag covers; counters and progress are excluded.
    fn essence(self) -> Self;
}

impl Resource for Device {
    fn essence(self) -> Device {
        Device { drive: None, full_in_s: None, ..self }
    }
}

impl Resource for Array {
    fn essence(self) -> Array {
        let members = self.members.into_iter().map(|member| Member { drive: None, ..member }).collect();
        let spares = self.spares.into_iter().map(|spare| Spare { drive: None, ..spare }).collect();
        let reshape = self.reshape.map(|reshape| Reshape { done_bytes: 0, ..reshape });
        Array {
            members,
            spares,
            full_in_s: None,
            reshape,
            is_clean: true,
            generation: 0,
            jobs: Vec::new(),
            scrub: None,
            contradictions: 0,
            ..self
        }
    }
}

impl Resource for Volume {
    fn essence(self) -> Volume {
        self
    }
}

impl Resource for Portal {
    fn essence(self) -> Portal {
        Portal { connections: Vec::new(), discovery_clients: 0, ..self }
    }
}

impl Resource for Export {
    fn essence(self) -> Export {
        Export { traffic: None, ..self }
    }
}

impl Resource for Job {
    fn essence(self) -> Job {
        Job { done_bytes: 0, bytes_per_s: 0, eta_s: None, is_urgent: false, ..self }
    }
}

/// The tag of a resource as it is.
pub fn tag(resource: &impl Resource) -> String {
    let mut hasher = DefaultHasher::new();
    serde_json::to_vec(&resource.clone().essence()).expect("plain data").hash(&mut hasher);
    format!("\"{:016x}\"", hasher.finish())
}

/// The result of a request, or the job that carries it out.
pub enum Answer<R> {
    /// It is done; with this status.
    Done(StatusCode, R),
    /// It takes longer.
    Job(Job),
}

impl<R: Resource> IntoResponse for Answer<R> {
    fn into_response(self) -> Response {
        match self {
            Answer::Done(status, resource) => Tagged(status, resource).into_response(),
            Answer::Job(job) => {
                let applied = [("preference-applied", "respond-async")];
                (applied, Tagged(StatusCode::ACCEPTED, job)).into_response()
            }
        }
    }
}

/// A resource as an answer, with its tag.
pub struct Tagged<R>(pub StatusCode, pub R);

impl<R: Resource> IntoResponse for Tagged<R> {
    fn into_response(self) -> Response {
        let Tagged(status, resource) = self;
        let tag = HeaderValue::from_str(&tag(&resource)).expect("hexadecimal digits");
        (status, [(ETAG, tag)], axum::Json(resource)).into_response()
    }
}
