//! Answers: problems, and resources with their tags.

use crate::fault::{Fault, Kind};
use api::{Array, Device, Export, Job, Problem, Volume};
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

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Failure {
        let (status, kind, title) = match fault.kind {
            Kind::Invalid => (StatusCode::UNPROCESSABLE_ENTITY, "invalid", "This makes no sense"),
            Kind::NotFound => (StatusCode::NOT_FOUND, "not-found", "There is no such thing"),
            Kind::Unopened => (StatusCode::UNPROCESSABLE_ENTITY, "cannot-open", "It cannot be opened"),
            Kind::Exists => (StatusCode::CONFLICT, "exists", "There is one already"),
            Kind::InUse => (StatusCode::CONFLICT, "in-use", "It is in use"),
            Kind::NoRoom => (StatusCode::CONFLICT, "no-room", "There is no room"),
            Kind::Stale => (StatusCode::PRECONDITION_FAILED, "stale", "It has changed"),
            Kind::Unavailable => (StatusCode::CONFLICT, "unavailable", "It does not run"),
            Kind::Forbidden => (StatusCode::FORBIDDEN, "forbidden", "This role may not do that"),
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
    Failure::from(Fault::not_found("path", uri.path()))
}

/// A method that a path does not have.
pub async fn no_such_method(method: Method, uri: Uri) -> Failure {
    let detail = format!("{} cannot be asked to {method}", uri.path());
    Failure::new(StatusCode::METHOD_NOT_ALLOWED, "no-such-method", "There is no such method", detail)
}

/// Something with an identity, whose tag changes when it is changed.
pub trait Resource: Serialize + Clone {
    /// What somebody has to have changed for the tag to be another: not what changes by itself.
    fn essence(self) -> Self;
}

impl Resource for Device {
    fn essence(self) -> Device {
        self
    }
}

impl Resource for Array {
    fn essence(self) -> Array {
        Array { jobs: Vec::new(), scrub: None, contradictions: 0, ..self }
    }
}

impl Resource for Volume {
    fn essence(self) -> Volume {
        self
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

/// What was asked for, or the job that it has become.
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
