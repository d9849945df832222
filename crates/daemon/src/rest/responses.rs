//! Descriptions of the answers in the OpenAPI document, which 3.1 requires ("Response Object").

use axum::http::StatusCode;
use utoipa::openapi::{OpenApi, RefOr};

/// The text of answers that no status is listed for: each is a problem.
const REFUSED: &str = "The daemon refuses the request; the problem says why";

/// Describes each answer that has no text of its own by the name of its status.
pub fn describe(document: &mut OpenApi) {
    for item in document.paths.paths.values_mut() {
        let operations = [&mut item.get, &mut item.put, &mut item.post, &mut item.delete, &mut item.patch];
        for (status, response) in
            operations.into_iter().flatten().flat_map(|operation| &mut operation.responses.responses)
        {
            if let RefOr::T(response) = response
                && response.description.is_empty()
            {
                response.description = name(status).to_owned();
            }
        }
    }
}

/// The name of a status ("201" is "Created").
fn name(status: &str) -> &'static str {
    let code = status.parse().ok();
    code.and_then(|code| StatusCode::from_u16(code).ok())
        .and_then(|code| code.canonical_reason())
        .unwrap_or(REFUSED)
}

#[cfg(test)]
mod tests {
    use crate::rest::document;

    #[test]
    fn every_answer_has_a_description() {
        let document = serde_json::to_value(document()).unwrap();
        let paths = document["paths"].as_object().unwrap();
        let operations = paths.values().flat_map(|item| item.as_object().unwrap().values());
        let answers: Vec<_> =
            operations.flat_map(|operation| operation["responses"].as_object().unwrap()).collect();
        assert!(answers.len() > 50, "{}", answers.len());
        for (status, answer) in answers {
            assert!(
                answer["description"].as_str().is_some_and(|text| !text.is_empty()),
                "{status}: {answer}"
            );
        }
    }
}
