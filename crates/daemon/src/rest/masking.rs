//! Bodies of requests as the audit log shows them: without what may be a secret.
//!
//! The API takes secrets of hosts by value; options name files that hold one. A client can still
//! send one in the wrong place. So the log shows only values of fields that the OpenAPI document
//! has in some body. A field that the document marks as secret (`format: password`) is not shown.
//! Options and specifications are shown as [`spec::redact`] shows them.

use super::bounds;
use hosting::export;
use serde_json::{Map, Value};
use spec::{MASK, redact, redact_value};
use stack::kinds::device;
use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use utoipa::openapi::OpenApi;

/// Longest text of a body in the log, in bytes.
const MAX_SHOWN: usize = 2048;
/// Shorter hidden texts are not searched for in other texts: they would be found everywhere.
const MIN_HIDDEN: usize = 4;

/// Names of fields whose values may be shown.
#[derive(Clone, Debug)]
pub(super) struct Masking(Arc<HashSet<String>>);

impl Masking {
    /// The fields of all bodies in this document.
    pub(super) fn of(document: &OpenApi) -> Masking {
        let document = serde_json::to_value(document).expect("plain data");
        let mut fields = Fields { document: &document, names: HashSet::new(), seen: BTreeSet::new() };
        let operations = document["paths"].as_object().into_iter().flat_map(Map::values);
        for operation in operations.filter_map(Value::as_object).flat_map(Map::values) {
            fields.collect(&operation["requestBody"]);
        }
        Masking(Arc::new(fields.names))
    }

    /// A body as the log shows it.
    pub(super) fn mask(&self, body: &[u8]) -> Asked {
        let len = body.len();
        let opaque = |why: &str| Asked { text: format!("({len} bytes {why})"), hidden: None };
        let mut hidden = Vec::new();
        let text = match serde_json::from_slice::<Value>(body) {
            _ if body.is_empty() => String::new(),
            Err(_) => return opaque("without JSON"),
            Ok(value) if bounds::check(&value).is_err() => return opaque("beyond the limits of the API"),
            Ok(value @ Value::Object(_)) => self.value(&value, &mut hidden).to_string(),
            Ok(_) => return opaque("without an object"),
        };
        hidden.retain(|text| text.len() >= MIN_HIDDEN);
        Asked { text: shorten(text, MAX_SHOWN), hidden: Some(hidden.into()) }
    }

    fn value(&self, value: &Value, hidden: &mut Vec<String>) -> Value {
        match value {
            Value::Object(fields) => fields
                .iter()
                .map(|(name, value)| match (name.as_str(), value) {
                    ("options", Value::Object(options)) => (
                        name.clone(),
                        options.iter().map(|(key, value)| option(key, value, hidden)).collect(),
                    ),
                    // Events show them, too.
                    ("labels", Value::Object(labels)) if labels.values().all(is_text_or_null) => {
                        (name.clone(), value.clone())
                    }
                    _ if self.0.contains(name) => (name.clone(), self.value(value, hidden)),
                    _ => hide(name, value, hidden),
                })
                .collect(),
            Value::Array(items) => items.iter().map(|item| self.value(item, hidden)).collect(),
            Value::String(text) => redact(device::KINDS, text, hidden).into(),
            Value::Null | Value::Bool(_) | Value::Number(_) => value.clone(),
        }
    }
}

/// The body of a request.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    /// For the log.
    pub(super) text: String,
    /// Texts of the body that the log does not show. None: it shows nothing of the body.
    hidden: Option<Arc<[String]>>,
}

impl Asked {
    /// A text that may quote the body, without what the log does not show. None: it may quote any
    /// part of the body.
    pub(super) fn hide(&self, text: &str) -> Option<String> {
        let hidden = self.hidden.as_ref()?.iter();
        Some(hidden.fold(text.to_owned(), |text, hidden| {
            // Texts in JSON and debug output have escapes.
            let json = Value::from(hidden.as_str()).to_string();
            let debug = format!("{hidden:?}");
            let escaped = [json.trim_matches('"'), debug.trim_matches('"')].map(str::to_owned);
            escaped
                .iter()
                .fold(text.replace(hidden.as_str(), MASK), |text, escaped| text.replace(escaped, MASK))
        }))
    }
}

/// The first `most` bytes of a text, and a note when there were more.
pub(super) fn shorten(mut text: String, most: usize) -> String {
    let len = text.len();
    if len > most {
        let end = (0..=most).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        text.truncate(end);
        text.push_str(&format!("… ({len} bytes)"));
    }
    text
}

/// An option of an export. Keys mean the same in every kind that has them.
fn option(key: &str, value: &Value, hidden: &mut Vec<String>) -> (String, Value) {
    let known = export::KINDS.iter().flat_map(|kind| kind.keys).find(|known| known.name == key);
    match (known, value) {
        (Some(known), Value::String(text)) => (key.to_owned(), redact_value(known, text, hidden).into()),
        _ => hide(key, value, hidden),
    }
}

fn is_text_or_null(value: &Value) -> bool {
    value.is_string() || value.is_null()
}

fn hide(name: &str, value: &Value, hidden: &mut Vec<String>) -> (String, Value) {
    hidden.push(name.to_owned());
    collect_texts(value, hidden);
    (MASK.to_owned(), MASK.into())
}

fn collect_texts(value: &Value, texts: &mut Vec<String>) {
    match value {
        Value::String(text) => texts.push(text.clone()),
        Value::Array(items) => items.iter().for_each(|item| collect_texts(item, texts)),
        Value::Object(fields) => fields.iter().for_each(|(name, value)| {
            texts.push(name.clone());
            collect_texts(value, texts);
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Names of fields that bodies have, at any depth.
struct Fields<'a> {
    document: &'a Value,
    names: HashSet<String>,
    /// References that were followed.
    seen: BTreeSet<&'a str>,
}

impl<'a> Fields<'a> {
    fn collect(&mut self, schema: &'a Value) {
        match schema {
            Value::Object(schema) => {
                if let Some(place) = schema.get("$ref").and_then(Value::as_str)
                    && self.seen.insert(place)
                    && let Some(schema) = self.document.pointer(place.trim_start_matches('#'))
                {
                    self.collect(schema);
                }
                let properties = schema.get("properties").and_then(Value::as_object);
                for (name, field) in properties.into_iter().flatten() {
                    if field["format"] != "password" {
                        self.names.insert(name.clone());
                    }
                }
                schema.values().for_each(|part| self.collect(part));
            }
            Value::Array(parts) => parts.iter().for_each(|part| self.collect(part)),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn mask(body: &Value) -> Asked {
        Masking::of(&crate::rest::document()).mask(body.to_string().as_bytes())
    }

    #[test]
    fn a_body_is_shown_with_the_fields_and_options_of_the_api() {
        for body in [
            json!({ "name": "v1", "backing": "data", "size_bytes": 4096, "force": true, "qos": { "iops": { "per_s": 5 } } }),
            json!({ "name": "v1", "labels": { "csi.name": "pvc-1", "old": null } }),
            json!({ "name": "a", "level": "5", "members": ["/dev/sda", "nbd:host=a,tls-psk=/etc/k"] }),
            json!({ "action": "add", "device": "/dev/sdb", "force": true }),
            json!({ "name": "e", "kind": "nbd", "volumes": ["v1"], "options": { "listen": "0.0.0.0:1", "tls-psk": "/k" } }),
        ] {
            assert_eq!(serde_json::from_str::<Value>(&mask(&body).text).unwrap(), body);
        }
    }

    #[test]
    fn possible_secrets_are_masked_in_every_text() {
        let secret = "c0ffee\"\n";
        for body in [
            json!({ "name": "v1", "password": secret }),
            json!({ "name": "v1", secret: 1 }),
            json!({ "name": "v1", "x": [{ "y": secret }] }),
            json!({ "name": "v1", "qos": { "token": secret } }),
            json!({ "name": "e", "kind": "nbd", "options": { "tls-psk": secret } }),
            json!({ "name": "e", "kind": "nbd", "options": { "psk": secret } }),
            json!({ "name": "e", "kind": "nbd", "options": { secret: "on" } }),
            json!({ "name": "d", "spec": format!("nbd:host=a,psk={secret}") }),
            json!({ "name": "d", "spec": format!("nbd:uri=nbds://me:{secret}@host/x") }),
            json!([secret, { "z": secret }]),
            json!(secret),
        ] {
            let asked = mask(&body);
            assert!(!asked.text.contains("c0ffee"), "{body}: {}", asked.text);
            assert_eq!(asked.hide("").is_some(), body.is_object());
            for quote in [secret.to_owned(), format!("{secret:?}"), json!(secret).to_string()] {
                let said = asked.hide(&format!("me:{secret}: bad value {quote}")).unwrap_or_default();
                assert!(!said.contains("c0ffee"), "{body}: {said}");
            }
        }
    }

    #[test]
    fn a_long_body_is_shown_in_part() {
        let members: Vec<String> = (0..200).map(|number| format!("/dev/disk/ä{number}")).collect();
        let asked = mask(&json!({ "members": members }));
        assert!(asked.text.len() < MAX_SHOWN + 30 && asked.text.contains("… ("), "{}", asked.text);
        assert_eq!(
            mask(&json!({ "name": "x".repeat(256) })).text,
            "(267 bytes beyond the limits of the API)"
        );
        assert_eq!(Masking::of(&crate::rest::document()).mask(b"{\"na").text, "(4 bytes without JSON)");
    }
}
