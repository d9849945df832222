//! Query parameters that an operation does not have are refused, so that a typo does not select
//! everything.

use super::answer::malformed;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::collections::HashMap;
use std::sync::Arc;
use utoipa::openapi::OpenApi;

/// The query parameters of each operation, by its path and its method in lower case.
#[derive(Clone, Debug)]
pub(super) struct Queries(Arc<HashMap<(String, String), Vec<String>>>);

impl Queries {
    /// The parameters in a document.
    pub(super) fn of(document: &OpenApi) -> Queries {
        let document = serde_json::to_value(document).expect("plain data");
        let mut known = HashMap::new();
        for (path, item) in document["paths"].as_object().into_iter().flatten() {
            for (method, operation) in item.as_object().into_iter().flatten() {
                let parameters = operation["parameters"].as_array().into_iter().flatten();
                let names = parameters
                    .filter(|parameter| parameter["in"] == "query")
                    .filter_map(|parameter| parameter["name"].as_str().map(str::to_owned));
                known.insert((path.clone(), method.clone()), names.collect());
            }
        }
        Queries(Arc::new(known))
    }

    /// Checks a query.
    fn check(&self, path: &str, method: &Method, query: &str) -> Result<(), String> {
        let method = if *method == Method::HEAD { Method::GET } else { method.clone() };
        let operation = (path.to_owned(), method.as_str().to_ascii_lowercase());
        // The router refuses what is no operation.
        let Some(known) = self.0.get(&operation) else { return Ok(()) };
        let names = query.split('&').filter(|part| !part.is_empty());
        let mut names = names.map(|part| part.split('=').next().unwrap_or_default());
        match names.find(|name| !known.iter().any(|known| known == name)) {
            None => Ok(()),
            Some(name) if known.is_empty() => {
                Err(format!("unknown query parameter {name:?}: {method} {path} has none"))
            }
            Some(name) => {
                Err(format!("unknown query parameter {name:?}: {method} {path} has {}", known.join(", ")))
            }
        }
    }
}

/// Lets requests through whose query has only parameters of their operation.
pub(super) async fn check(State(queries): State<Queries>, request: Request, next: Next) -> Response {
    let matched = request.extensions().get::<MatchedPath>().map(MatchedPath::as_str);
    let query = request.uri().query().unwrap_or_default();
    match matched.map_or(Ok(()), |path| queries.check(path, request.method(), query)) {
        Ok(()) => next.run(request).await,
        Err(detail) => malformed(StatusCode::BAD_REQUEST, detail).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_of_the_document_pass_and_others_are_named() {
        let queries = Queries::of(&crate::rest::document());
        let check = |method, path: &str, query: &str| queries.check(path, &method, query);
        for query in ["", "limit=1", "label=a%3Db&label=c&after=x", "&&limit="] {
            assert_eq!(check(Method::GET, "/v1/volumes", query), Ok(()), "{query}");
            assert_eq!(check(Method::HEAD, "/v1/exports", query), Ok(()), "{query}");
        }
        assert_eq!(
            check(Method::GET, "/v1/volumes", "limit=1&labels=x"),
            Err("unknown query parameter \"labels\": GET /v1/volumes has label, limit, after".into())
        );
        assert_eq!(
            check(Method::DELETE, "/v1/volumes/{name}", "force"),
            Err("unknown query parameter \"force\": DELETE /v1/volumes/{name} has none".into())
        );
        assert_eq!(check(Method::GET, "/", "token=x"), Ok(()), "the page is no operation");
    }
}
