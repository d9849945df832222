//! Requests that roughly match the OpenAPI document.
//!
//! Each operation of the document is a choice. Its body is built from its schema: the input selects
//! properties and their values, and sometimes replaces a value by one of another type. Strings come
//! from a list that the daemon knows. Free text has neither `/` nor `:`, so that no request names a
//! file or host outside the test's directory.

use crate::input::Input;
use serde_json::{Map, Value, json};

/// Largest depth of a body.
const MAX_DEPTH: usize = 8;
/// Length of the longest string and list.
const LONG: usize = 70_000;

/// One operation of the document.
pub struct Operation {
    /// The method in upper case.
    pub method: String,
    path: String,
    query: Vec<String>,
    body: Option<Value>,
}

/// The operations, and the schemas that they refer to.
pub struct Document {
    operations: Vec<Operation>,
    schemas: Value,
    /// Directory of the test's files.
    directory: String,
}

/// A request.
pub struct Request {
    /// The method in upper case.
    pub method: String,
    /// Path and query.
    pub target: String,
    /// Lines without their ends.
    pub headers: Vec<String>,
    /// The body.
    pub body: Vec<u8>,
}

impl Document {
    /// Reads the document. Strings name files in `directory`.
    ///
    /// # Panics
    /// When the document does not have the form of OpenAPI.
    pub fn new(document: &Value, directory: &str) -> Document {
        let mut operations = Vec::new();
        for (path, methods) in document["paths"].as_object().expect("paths") {
            for (method, operation) in methods.as_object().expect("operations") {
                let parameters = operation["parameters"].as_array().cloned().unwrap_or_default();
                let of = |place: &str| -> Vec<String> {
                    let is_there = |parameter: &&Value| parameter["in"] == place;
                    let name = |parameter: &Value| parameter["name"].as_str().map(str::to_owned);
                    parameters.iter().filter(is_there).filter_map(name).collect()
                };
                let body = operation.pointer("/requestBody/content/application~1json/schema").cloned();
                // A stream never ends.
                if !path.ends_with("/stream") {
                    let method = method.to_uppercase();
                    operations.push(Operation { method, path: path.clone(), query: of("query"), body });
                }
            }
        }
        assert!(operations.iter().filter(|operation| operation.body.is_some()).count() > 10);
        let schemas = document["components"]["schemas"].clone();
        Document { operations, schemas, directory: directory.into() }
    }

    /// Builds the next request.
    pub fn request(&self, input: &mut Input<'_>) -> Request {
        let operation = &self.operations[input.below(self.operations.len())];
        let flags = input.u8();
        let parts = operation.path.split('/').map(|part| match part.starts_with('{') {
            true => encoded(&self.string("name", input)),
            false => part.to_owned(),
        });
        let mut target = parts.collect::<Vec<_>>().join("/");
        for (i, name) in operation.query.iter().enumerate() {
            if flags >> i & 1 == 1 {
                let value = encoded(&self.string(name, input));
                target += &format!("{}{name}={value}", if i == 0 { '?' } else { '&' });
            }
        }
        let mut headers = Vec::new();
        if flags & 0x10 != 0 {
            headers.push(format!("Idempotency-Key: k{}", input.u8() % 4));
        }
        if flags & 0xe0 == 0xe0 {
            headers.push(format!("If-Match: {}", input.one_of(&["*", "\"0\"", "", "x, *"])));
        }
        let mut body = Vec::new();
        if let Some(schema) = &operation.body {
            let value = self.value(schema, "", 0, input);
            body = serde_json::to_vec(&value).expect("plain data");
            let kind = if flags & 0xc0 == 0x40 { "text/plain" } else { "application/json" };
            headers.push(format!("Content-Type: {kind}"));
            if flags & 0xe0 == 0x20 {
                spoil(&mut body, input);
            }
        }
        Request { method: operation.method.clone(), target, headers, body }
    }

    fn value(&self, schema: &Value, key: &str, depth: usize, input: &mut Input<'_>) -> Value {
        if depth > MAX_DEPTH {
            return Value::Null;
        }
        if let Some(name) = schema["$ref"].as_str().and_then(|path| path.rsplit('/').next()) {
            return self.value(&self.schemas[name], key, depth + 1, input);
        }
        let choice = input.u8();
        if choice >= 250 {
            return anything(choice, input);
        }
        for word in ["oneOf", "anyOf"] {
            if let Some(all) = schema[word].as_array() {
                return self.value(&all[usize::from(choice) % all.len()], key, depth + 1, input);
            }
        }
        if let Some(all) = schema["allOf"].as_array() {
            let parts = all.iter().map(|part| self.value(part, key, depth + 1, input));
            let objects = parts.filter_map(|part| part.as_object().cloned());
            return objects.flatten().collect::<Map<_, _>>().into();
        }
        if let Some(words) = schema["enum"].as_array() {
            return words[usize::from(choice) % words.len()].clone();
        }
        let kinds: Vec<&str> = match &schema["type"] {
            Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
            kind => kind.as_str().into_iter().collect(),
        };
        match kinds.get(usize::from(choice) % kinds.len().max(1)).copied() {
            Some("string") => self.string(key, input).into(),
            Some("integer" | "number") => number(input),
            Some("boolean") => (choice & 4 != 0).into(),
            Some("array") => {
                let items = 0..input.below(5);
                items.map(|_| self.value(&schema["items"], key, depth + 1, input)).collect()
            }
            Some("object") => self.object(schema, depth, input),
            _ => Value::Null,
        }
    }

    fn object(&self, schema: &Value, depth: usize, input: &mut Input<'_>) -> Value {
        let mut object = Map::new();
        let which = input.u16();
        let properties = schema["properties"].as_object().into_iter().flatten();
        for (i, (name, property)) in properties.enumerate() {
            let is_required = schema["required"].as_array().is_some_and(|all| all.contains(&json!(name)));
            // One in 64 leaves out a required property.
            let is_left_out = which % 64 == 63 && i == usize::from(which >> 6) % 16;
            if (is_required && !is_left_out) || which >> (i % 16) & 1 == 1 {
                object.insert(name.clone(), self.value(property, name, depth + 1, input));
            }
        }
        if let Some(more) = schema.get("additionalProperties").filter(|more| more.is_object()) {
            for _ in 0..input.below(4) {
                let name = self.string("option", input);
                object.insert(name.clone(), self.value(more, &name, depth + 1, input));
            }
        }
        if which == 0xffff {
            object.insert(free(input), Value::Null);
        }
        object.into()
    }

    /// A string for a name, a device, an option or another word.
    fn string(&self, key: &str, input: &mut Input<'_>) -> String {
        let names = &["v0", "e0", "g0", "d0", "data", "new", "other", "0", ""][..];
        let files = &["disk0", "disk1", "disk2", "m0", "m1", "missing", "sub/missing"][..];
        let choice = input.u8();
        let path = |name: &str| format!("{}/{name}", self.directory);
        match (choice, key) {
            (248..=255, _) => free(input),
            (246 | 247, _) => "x".repeat(LONG * usize::from(choice % 2) + 300),
            (240..=245, _) => path(input.one_of(files)),
            (_, "spec" | "members" | "spares" | "devices" | "device" | "replacement" | "with") => {
                match choice % 8 {
                    0 => "mem:size=8388608".into(),
                    1 => format!("io_uring:path={},direct=off", path(input.one_of(files))),
                    2 => format!("nbd:path={}", path("nowhere.sock")),
                    _ => path(input.one_of(files)),
                }
            }
            (_, "level") => input.one_of(&["1", "5", "0", "6", "10", "raid5", ""]).into(),
            // No kernel devices: they would outlive the run.
            (_, "kind") => input.one_of(&["vhost-user-blk", "nbd", "nvme-tcp", "x"]).into(),
            (_, "consistency") => input.one_of(&["bitmap", "ppl", "none", "x"]).into(),
            (_, "after" | "keep") => {
                input.one_of(&["0", "true", "false", "18446744073709551615", "x"]).into()
            }
            (_, "option") => {
                let known = [
                    "socket",
                    "listen",
                    "name",
                    "nqn",
                    "queues",
                    "queue-size",
                    "serial",
                    "cores",
                    "tls",
                    "psk",
                    "auth-keys",
                    "reservations",
                    "journal",
                    "permissions",
                    "hosts",
                    "uuid",
                    "x",
                ];
                input.one_of(&known).into()
            }
            (_, "socket" | "reservations" | "journal" | "auth-keys" | "psk") => {
                path(input.one_of(&["a.sock", "b.sock", "disk1", "sub/c", "."]))
            }
            (_, "listen") => {
                input.one_of(&["127.0.0.1:0", "[::1]:0", "127.0.0.1:1", "127.0.0.1", "x"]).into()
            }
            _ => match choice % 12 {
                9 => input.one_of(&["1", "0", "16", "65536", "-1", "on", "off"]).into(),
                10 => "nqn.2024-01.org.freestone:x".into(),
                11 => "8a1f2c34-0000-4000-8000-000000000001".into(),
                _ => input.one_of(names).into(),
            },
        }
    }
}

/// Any text without a path or an address.
fn free(input: &mut Input<'_>) -> String {
    let text = String::from_utf8_lossy(input.bytes(40)).into_owned();
    text.replace(['/', ':', '='], "_")
}

fn number(input: &mut Input<'_>) -> Value {
    match input.u8() {
        0 => json!(u64::MAX),
        1 => json!(1u64 << (input.u8() % 64)),
        2 => json!(-1),
        3 => json!(1.5),
        4 => json!(u64::from(input.u8()) * 512),
        5..=100 => json!(u64::from(input.u8() % 16) << 20),
        6.. => json!(input.u8()),
    }
}

/// A value of another type.
fn anything(choice: u8, input: &mut Input<'_>) -> Value {
    match choice {
        250 => Value::Null,
        251 => json!([]),
        252 => json!({ "a": { "b": [1, 2] } }),
        253 => number(input),
        254 => vec![json!("x"); LONG / 16].into(),
        _ => free(input).into(),
    }
}

/// Makes the body invalid or unusual JSON.
fn spoil(body: &mut Vec<u8>, input: &mut Input<'_>) {
    let at = usize::from(input.u16()) % (body.len() + 1);
    match input.below(6) {
        0 => body.truncate(at),
        1 => *body = b"[".repeat(LONG),
        2 => *body = b"{\"a\":".repeat(LONG / 8),
        3 => body.splice(at..at, input.bytes(16).iter().copied()).for_each(drop),
        // Repeats all names.
        4 => {
            if let Some(inner) = body.strip_prefix(b"{").and_then(|rest| rest.strip_suffix(b"}"))
                && !inner.is_empty()
            {
                *body = [b"{", inner, b",", inner, b"}"].concat();
            }
        }
        _ => *body = b" ".repeat(1 << 20 | usize::from(input.u8())),
    }
}

/// A percent-encoded part of a path or a query, truncated because a line has a maximum length.
fn encoded(text: &str) -> String {
    let letter = |byte: u8| match byte.is_ascii_alphanumeric() || b"-._".contains(&byte) {
        true => char::from(byte).to_string(),
        false => format!("%{byte:02x}"),
    };
    text.bytes().take(1000).map(letter).collect()
}
