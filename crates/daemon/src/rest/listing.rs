//! Lists of objects: a selection by labels, page by page.
//!
//! A page begins behind the object with a key, in the order of keys. Objects that are made or
//! deleted between two requests do not move the others to another page.

use super::answer::{Failure, malformed};
use api::{Export, Labels, Volume};
use axum::Json;
use axum::extract::{FromRequestParts, Query};
use axum::http::header::LINK;
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::IntoParams;

/// Most objects of a page.
const MAX_PAGE: usize = 1000;

/// The query of a list, for the document.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "the document alone shows it")]
pub struct ListQuery {
    /// Only objects with this label, `KEY=VALUE`. Repeated: with all of them.
    label: Option<Vec<String>>,
    /// Most objects of the answer, 1 to 1000. If there are more, the header `Link` has the address
    /// of the next ones (`rel="next"`).
    limit: Option<u32>,
    /// Only objects behind this key: the UUID of a volume, the name of an export.
    after: Option<String>,
}

/// A selection of objects.
pub struct Listing {
    labels: Vec<(String, String)>,
    limit: Option<usize>,
    after: Option<String>,
    path: String,
    query: String,
}

/// An object of a list.
pub trait Listed: Serialize {
    /// Its place in the order of pages.
    fn key(&self) -> &str;
    /// Its labels.
    fn labels(&self) -> &Labels;
}

impl Listed for Volume {
    fn key(&self) -> &str {
        &self.uuid
    }

    fn labels(&self) -> &Labels {
        &self.labels
    }
}

impl Listed for Export {
    fn key(&self) -> &str {
        &self.name
    }

    fn labels(&self) -> &Labels {
        &self.labels
    }
}

impl<S: Sync> FromRequestParts<S> for Listing {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Listing, Failure> {
        let Query(pairs) = Query::<Vec<(String, String)>>::try_from_uri(&parts.uri)?;
        let (path, query) = (parts.uri.path().to_owned(), parts.uri.query().unwrap_or_default().to_owned());
        let mut listing = Listing { labels: Vec::new(), limit: None, after: None, path, query };
        let refuse = |detail: String| malformed(StatusCode::BAD_REQUEST, detail);
        // Others were refused before.
        for (name, value) in pairs {
            match name.as_str() {
                "label" => match value.split_once('=') {
                    Some((key, value)) => listing.labels.push((key.to_owned(), value.to_owned())),
                    None => return Err(refuse(format!("label={value}: want KEY=VALUE"))),
                },
                "limit" => {
                    let limit = value.parse().ok().filter(|limit| (1..=MAX_PAGE).contains(limit));
                    let wrong = || refuse(format!("limit={value}: want 1 to {MAX_PAGE}"));
                    listing.limit = Some(limit.ok_or_else(wrong)?);
                }
                _ => listing.after = Some(value),
            }
        }
        Ok(listing)
    }
}

impl Listing {
    /// The selected ones of all objects.
    pub fn page<T: Listed>(&self, all: Vec<T>) -> Page<T> {
        let has = |object: &T, (key, value): &(String, String)| object.labels().get(key) == Some(value);
        let mut objects: Vec<T> =
            all.into_iter().filter(|object| self.labels.iter().all(|label| has(object, label))).collect();
        if self.limit.is_some() || self.after.is_some() {
            objects.sort_by(|one, other| one.key().cmp(other.key()));
        }
        if let Some(after) = &self.after {
            objects.retain(|object| object.key() > after.as_str());
        }
        let mut next = None;
        if let Some(limit) = self.limit.filter(|limit| *limit < objects.len()) {
            objects.truncate(limit);
            next = objects.last().map(|last| self.address_after(last.key()));
        }
        Page { objects, next }
    }

    /// The same request behind another key, which needs no escapes.
    fn address_after(&self, key: &str) -> String {
        let rest = self.query.split('&').filter(|part| !part.starts_with("after=") && !part.is_empty());
        let after = format!("after={key}");
        let query: Vec<&str> = rest.chain([after.as_str()]).collect();
        format!("{}?{}", self.path, query.join("&"))
    }
}

/// A page of a list, with the address of the next one.
pub struct Page<T> {
    objects: Vec<T>,
    next: Option<String>,
}

impl<T: Listed> IntoResponse for Page<T> {
    fn into_response(self) -> Response {
        let mut response = Json(self.objects).into_response();
        let link = self.next.and_then(|next| HeaderValue::from_str(&format!("<{next}>; rel=\"next\"")).ok());
        response.headers_mut().extend(link.map(|link| (LINK, link)));
        response
    }
}
