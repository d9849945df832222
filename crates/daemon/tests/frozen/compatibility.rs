//! Compares two OpenAPI documents: does the new one keep the promises of the old one?
//!
//! ```text
//!             may be added                          is refused
//!   paths     paths, methods, answers               one that is gone
//!   requests  optional fields, enum values          a new required field, a narrower type or limit
//!   answers   fields, enum values                   a field that is gone or has another type
//! ```
//!
//! Descriptions, summaries and the order of fields do not count.

use serde_json::{Map, Value};
use std::collections::BTreeSet;

const METHODS: [&str; 5] = ["get", "put", "post", "patch", "delete"];
/// Depth of nested schemas at which a comparison ends: the API has no recursive type.
const MAX_DEPTH: usize = 32;

/// The side of a schema: a server may accept more in requests, and must not omit anything from
/// answers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Request,
    Answer,
}

/// The changes from `old` to `new` that break a client, each as `place: reason`.
pub fn breaking(old: &Value, new: &Value) -> Vec<String> {
    let mut comparison = Comparison { old, new, found: Vec::new() };
    comparison.paths();
    comparison.found
}

struct Comparison<'a> {
    old: &'a Value,
    new: &'a Value,
    found: Vec<String>,
}

impl<'a> Comparison<'a> {
    fn refuse(&mut self, place: &str, reason: impl Into<String>) {
        self.found.push(format!("{place}: {}", reason.into()));
    }

    fn paths(&mut self) {
        let (old, new) = (self.old, self.new);
        for (path, old_item) in fields(old, "paths") {
            let same = |(other, _): &(&String, &Value)| shape(other) == shape(path);
            let Some((_, new_item)) = fields(new, "paths").find(same) else {
                self.refuse(path, "the path is gone");
                continue;
            };
            for method in METHODS {
                match (old_item.get(method), new_item.get(method)) {
                    (Some(_), None) => self.refuse(path, format!("the method {method} is gone")),
                    (Some(old), Some(new)) => self.operation(&format!("{method} {path}"), old, new),
                    (None, _) => {}
                }
            }
        }
    }

    fn operation(&mut self, place: &str, old: &'a Value, new: &'a Value) {
        self.parameters(place, old, new);
        self.roles(place, old, new);
        match (old.get("requestBody"), new.get("requestBody")) {
            (Some(_), None) => self.refuse(place, "the request body is gone"),
            (None, Some(body)) if is_required(body) => self.refuse(place, "a request body is required"),
            (Some(old), Some(new)) => {
                if is_required(new) && !is_required(old) {
                    self.refuse(place, "a request body is required");
                }
                self.contents(&format!("{place}: request"), old, new, Side::Request);
            }
            (None, _) => {}
        }
        for (status, old) in fields(old, "responses") {
            let place = format!("{place}: answer {status}");
            match new["responses"].get(status) {
                None => self.refuse(&place, "the answer is gone"),
                Some(new) => self.contents(&place, old, new, Side::Answer),
            }
        }
    }

    fn parameters(&mut self, place: &str, old: &'a Value, new: &'a Value) {
        let of = |operation: &'a Value| {
            let all = operation.get("parameters").and_then(Value::as_array).into_iter().flatten();
            all.filter(|parameter| parameter["in"] != "path").collect::<Vec<_>>()
        };
        let key = |parameter: &Value| (parameter["name"].clone(), parameter["in"].clone());
        let (old, new) = (of(old), of(new));
        for parameter in &old {
            let place = format!("{place}: parameter {}", parameter["name"]);
            match new.iter().find(|other| key(other) == key(parameter)) {
                None => self.refuse(&place, "the parameter is gone"),
                Some(other) => {
                    if is_required(other) && !is_required(parameter) {
                        self.refuse(&place, "the parameter is required");
                    }
                    self.schema(&place, &parameter["schema"], &other["schema"], Side::Request, 0);
                }
            }
        }
        for parameter in new.iter().filter(|parameter| is_required(parameter)) {
            if !old.iter().any(|other| key(other) == key(parameter)) {
                self.refuse(place, format!("the new parameter {} is required", parameter["name"]));
            }
        }
    }

    /// Each role keeps its rights: a part of a request may take a role of its own only if all roles
    /// have it that had the operation.
    fn roles(&mut self, place: &str, old: &'a Value, new: &'a Value) {
        for (ask, new_roles) in fields(new, "x-roles") {
            let Some(old_roles) = old["x-roles"].get(ask) else {
                if !texts(&old["x-roles"]["operation"]).is_subset(&texts(new_roles)) {
                    self.refuse(place, format!("`{ask}` takes a role of its own"));
                }
                continue;
            };
            for role in texts(old_roles).difference(&texts(new_roles)) {
                self.refuse(place, format!("the role {role} may not ask for `{ask}` any more"));
            }
        }
    }

    fn contents(&mut self, place: &str, old: &'a Value, new: &'a Value, side: Side) {
        for (kind, old) in fields(old, "content") {
            match new["content"].get(kind) {
                None => self.refuse(place, format!("{kind} is gone")),
                Some(new) => self.schema(place, &old["schema"], &new["schema"], side, 0),
            }
        }
    }

    fn schema(&mut self, place: &str, old: &'a Value, new: &'a Value, side: Side, depth: usize) {
        assert!(depth < MAX_DEPTH, "{place}: a recursive schema");
        let (old, new) = (resolve(self.old, old), resolve(self.new, new));
        if old.get("oneOf").is_some() || new.get("oneOf").is_some() {
            return self.variants(place, old, new, side, depth);
        }
        self.types(place, old, new, side);
        self.values(place, old, new, side);
        if side == Side::Request {
            self.limits(place, old, new);
        }
        self.properties(place, old, new, side, depth);
        if let (Some(old), Some(new)) = (old.get("items"), new.get("items")) {
            self.schema(&format!("{place}[]"), old, new, side, depth + 1);
        }
        match (old.get("additionalProperties"), new.get("additionalProperties")) {
            (Some(old @ Value::Object(_)), Some(new @ Value::Object(_))) => {
                self.schema(&format!("{place}.*"), old, new, side, depth + 1);
            }
            (Some(Value::Object(_)), None | Some(_)) => self.refuse(place, "any field was allowed"),
            (None | Some(Value::Bool(true)), Some(Value::Bool(false))) if side == Side::Request => {
                self.refuse(place, "unknown fields are refused");
            }
            _ => {}
        }
    }

    /// One schema of several. Each variant of the side that must be understood has a match on the
    /// other.
    fn variants(&mut self, place: &str, old: &'a Value, new: &'a Value, side: Side, depth: usize) {
        let (old_variants, new_variants) = (variants(old), variants(new));
        for old in &old_variants {
            let tag = |schema: &&&Value| tag(self.old, old) == tag(self.new, schema);
            let matched: Vec<_> = new_variants.iter().filter(tag).collect();
            let mut problems = Vec::new();
            let is_kept = matched.iter().any(|new| {
                let mut inner = Comparison { old: self.old, new: self.new, found: Vec::new() };
                inner.schema(place, old, new, side, depth + 1);
                let is_kept = inner.found.is_empty();
                problems.append(&mut inner.found);
                is_kept
            });
            match (is_kept, problems.is_empty()) {
                (true, _) => {}
                (false, false) => self.found.append(&mut problems),
                (false, true) => {
                    self.refuse(place, format!("the variant {} is gone", tag_text(self.old, old)))
                }
            }
        }
        // A client that reads a value does not expect null where there was none.
        let is_null = |schema: &&Value| schema["type"] == "null";
        if side == Side::Answer && new_variants.iter().any(is_null) && !old_variants.iter().any(is_null) {
            self.refuse(place, "the value may be null");
        }
    }

    fn types(&mut self, place: &str, old: &Value, new: &Value, side: Side) {
        let (old_types, new_types) = (texts(&old["type"]), texts(&new["type"]));
        let is_compatible = match side {
            Side::Request => old_types.is_subset(&new_types),
            Side::Answer => new_types.is_subset(&old_types),
        };
        if !is_compatible || old.get("format") != new.get("format") {
            let text = |schema: &Value, types: &BTreeSet<String>| {
                let types: Vec<&str> = types.iter().map(String::as_str).collect();
                format!("{} {}", types.join(" or "), schema["format"].as_str().unwrap_or_default())
            };
            let (before, after) = (text(old, &old_types), text(new, &new_types));
            self.refuse(place, format!("the type was {}, and is {}", before.trim(), after.trim()));
        }
    }

    fn values(&mut self, place: &str, old: &Value, new: &Value, side: Side) {
        match (old.get("enum"), new.get("enum"), side) {
            (Some(old), Some(new), _) => {
                for gone in texts(old).difference(&texts(new)) {
                    self.refuse(place, format!("the value {gone:?} is gone"));
                }
            }
            (None, Some(_), Side::Request) => self.refuse(place, "only some values are accepted"),
            (Some(_), None, Side::Answer) => self.refuse(place, "any value may be answered"),
            (None, _, _) | (Some(_), None, Side::Request) => {}
        }
    }

    /// No limit of a request is narrower.
    fn limits(&mut self, place: &str, old: &Value, new: &Value) {
        for key in ["maxLength", "maxItems", "maxProperties", "maximum"] {
            let (old, new) = (old[key].as_f64(), new[key].as_f64());
            if new.is_some_and(|new| old.is_none_or(|old| new < old)) {
                self.refuse(place, format!("{key} is smaller"));
            }
        }
        for key in ["minLength", "minItems", "minimum"] {
            let (old, new) = (old[key].as_f64(), new[key].as_f64());
            if new.is_some_and(|new| old.is_none_or(|old| new > old)) {
                self.refuse(place, format!("{key} is larger"));
            }
        }
        if new.get("pattern").is_some_and(|pattern| old.get("pattern") != Some(pattern)) {
            self.refuse(place, "the pattern is another");
        }
    }

    fn properties(&mut self, place: &str, old: &'a Value, new: &'a Value, side: Side, depth: usize) {
        for (name, old) in fields(old, "properties") {
            let place = format!("{place}.{name}");
            match new["properties"].get(name) {
                None => self.refuse(&place, "the field is gone"),
                Some(new) => self.schema(&place, old, new, side, depth + 1),
            }
        }
        let (old, new) = (texts(&old["required"]), texts(&new["required"]));
        match side {
            Side::Request => {
                for name in new.difference(&old) {
                    self.refuse(&format!("{place}.{name}"), "the field is required");
                }
            }
            Side::Answer => {
                for name in old.difference(&new) {
                    self.refuse(&format!("{place}.{name}"), "the field may be missing");
                }
            }
        }
    }
}

/// A path without the names of its parameters.
fn shape(path: &str) -> Vec<&str> {
    path.split('/').map(|part| if part.starts_with('{') { "{}" } else { part }).collect()
}

fn fields<'a>(value: &'a Value, key: &str) -> impl Iterator<Item = (&'a String, &'a Value)> + use<'a> {
    value.get(key).and_then(Value::as_object).into_iter().flat_map(Map::iter)
}

fn is_required(value: &Value) -> bool {
    value["required"] == true
}

/// The schema that a reference names.
fn resolve<'a>(document: &'a Value, schema: &'a Value) -> &'a Value {
    match schema["$ref"].as_str() {
        Some(place) => document.pointer(place.trim_start_matches('#')).expect("a schema of this name"),
        None => schema,
    }
}

/// The texts of a list, or the text itself.
fn texts(value: &Value) -> BTreeSet<String> {
    match value {
        Value::String(text) => [text.clone()].into(),
        Value::Array(items) => items.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
        _ => BTreeSet::new(),
    }
}

fn variants(schema: &Value) -> Vec<&Value> {
    match schema["oneOf"].as_array() {
        Some(variants) => variants.iter().collect(),
        None => vec![schema],
    }
}

/// The part of a variant that tells it from the others: its type, and the fields with one value.
fn tag(document: &Value, schema: &Value) -> (BTreeSet<String>, Vec<(String, Value)>) {
    let schema = resolve(document, schema);
    let single = |(name, field): (&String, &Value)| {
        let values = field.get("enum")?.as_array()?;
        (values.len() == 1).then(|| (name.clone(), values[0].clone()))
    };
    let types = texts(&schema["type"]).into_iter().filter(|name| name != "null" || schema["type"] == "null");
    (types.collect(), fields(schema, "properties").filter_map(single).collect())
}

fn tag_text(document: &Value, schema: &Value) -> String {
    let (types, fields) = tag(document, schema);
    match fields.first() {
        Some((name, value)) => format!("{name} {value}"),
        None => types.into_iter().collect::<Vec<_>>().join(" or "),
    }
}
