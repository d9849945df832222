//! Everything that a request brings is bounded. Requests are generated from the document, so that
//! none is forgotten.

use crate::common::{Daemon, MIB};
use reqwest::Method;
use serde_json::{Map, Value, json};

/// More than any text may have, and less than a body may have.
const LONG: usize = 1_000_000;

fn long() -> String {
    "x".repeat(LONG)
}

/// A daemon with one of everything, to which requests can be about.
fn with_everything() -> Daemon {
    let daemon = Daemon::new();
    let disk = daemon.file("disk", 64 * MIB);
    daemon.post("/v1/devices", &json!({ "name": "data", "spec": disk }));
    let members = ["m0", "m1"].map(|name| daemon.file(name, 24 * MIB));
    daemon.post("/v1/arrays", &json!({ "name": "mirror", "level": "1", "members": members }));
    daemon.volume("v1", MIB);
    daemon.send(Method::PUT, "/v1/groups/g1", &json!({}));
    daemon.post("/v1/exports", &json!({ "name": "e1", "kind": "nbd", "volumes": ["v1"] }));
    daemon.wait_for("the mirror", || daemon.get("/v1/jobs") == json!([]));
    daemon
}

/// The document, and what stands in it.
struct Document(Value);

impl Document {
    fn schema<'a>(&'a self, schema: &'a Value) -> &'a Value {
        match schema["$ref"].as_str() {
            Some(place) => self.0.pointer(place.trim_start_matches('#')).unwrap(),
            None => schema,
        }
    }

    /// A sensible value for a field, as far as the document and its name say.
    fn value(&self, schema: &Value, field: &str) -> Value {
        let schema = self.schema(schema);
        match field {
            "name" => return json!("new"),
            "backing" => return json!("data"),
            "kind" => return json!("nbd"),
            "level" => return json!("1"),
            "volumes" => return json!(["v1"]),
            "group" => return json!("g1"),
            "size_bytes" => return json!(2 * MIB),
            "member" => return json!("0"),
            "device" | "spec" => return json!("mem:size=64M"),
            "members" | "spares" | "devices" => return json!(["mem:size=64M"]),
            _ => {}
        }
        if let Some(one) = ["oneOf", "allOf", "anyOf"].iter().find_map(|key| schema[key].as_array()) {
            return self.value(&one[one.len() - 1], field);
        }
        if let Some(known) = schema["enum"].as_array() {
            return known[0].clone();
        }
        let kind = schema["type"].as_array().map_or(&schema["type"], |kinds| &kinds[0]);
        match kind.as_str() {
            Some("object") => {
                let fields = schema["properties"].as_object().cloned().unwrap_or_default();
                fields
                    .iter()
                    .map(|(name, field)| (name.clone(), self.value(field, name)))
                    .collect::<Map<_, _>>()
                    .into()
            }
            Some("array") => json!([]),
            Some("string") => json!("new"),
            Some("boolean") => json!(false),
            _ => json!(1),
        }
    }

    /// The bodies that a schema describes: one for each of its variants.
    fn variants<'a>(&'a self, schema: &'a Value) -> Vec<&'a Value> {
        let schema = self.schema(schema);
        match schema["oneOf"].as_array() {
            Some(variants) => variants.iter().collect(),
            None => vec![schema],
        }
    }

    /// Every way to make a body too large at one place. Objects of more than a level are objects of
    /// numbers.
    fn excesses(&self, schema: &Value) -> Vec<(String, Value)> {
        let body = self.value(schema, "");
        let mut all = Vec::new();
        let mut add = |place: String, field: &str, value: Value| {
            let mut body = body.clone();
            body[field] = value;
            all.push((place, body));
        };
        for (name, field) in schema["properties"].as_object().into_iter().flatten() {
            let field = self.schema(field);
            let kinds = field["type"].to_string();
            if kinds.contains("string") {
                add(format!("{name}: a long text"), name, json!(long()));
            }
            if kinds.contains("array") {
                add(format!("{name}: a long text in a list"), name, json!([long()]));
                add(format!("{name}: a long list of texts"), name, json!(vec!["x"; LONG / 8]));
                add(format!("{name}: a long list of numbers"), name, json!(vec![0; LONG / 8]));
            }
            if !field["additionalProperties"].is_null() && kinds.contains("object") {
                add(format!("{name}: a long text in a map"), name, json!({ "socket": long() }));
                add(format!("{name}: a long key in a map"), name, json!({ long(): "x" }));
                let many: Map<String, Value> =
                    (0..LONG / 16).map(|key| (key.to_string(), json!("x"))).collect();
                add(format!("{name}: a large map"), name, many.into());
            }
        }
        add("a long name of a field".into(), &long(), json!(1));
        add("a field that is not known, with a long text".into(), "surplus", json!(long()));
        all.push(("more than a body may have".into(), json!({ "name": "x".repeat(2 << 20) })));
        all
    }
}

fn state(daemon: &Daemon) -> Vec<u8> {
    std::fs::read(daemon.path("state/state.json")).unwrap()
}

#[test]
fn a_request_with_a_megabyte_anywhere_is_refused_and_leaves_the_state_byte_for_byte() {
    let daemon = with_everything();
    let document = Document(daemon.get("/v1/openapi.json"));
    let (before, events) = (state(&daemon), daemon.get("/v1/events").as_array().unwrap().len());
    let mut sent = 0;
    let mut send = |method: &str, path: &str, body: Option<&Value>, what: &str| {
        let method = Method::from_bytes(method.to_uppercase().as_bytes()).unwrap();
        let request = daemon.request(method.clone(), path);
        let answer = body.into_iter().fold(request, |request, body| request.json(body)).send().unwrap();
        let (status, said) = (answer.status(), answer.text().unwrap());
        let shown = &path[..path.len().min(80)];
        assert!(
            status.is_client_error(),
            "{method} {shown}: {what}: {status}: {}",
            &said[..said.len().min(200)]
        );
        assert!(said.len() < 10_000, "{method} {shown}: {what}: an answer of {} bytes", said.len());
        assert!(state(&daemon) == before, "{method} {shown}: {what}: the state has changed");
        sent += 1;
    };
    for (path, item) in document.0["paths"].as_object().unwrap() {
        let real = path
            .replace("arrays/{name}", "arrays/mirror")
            .replace("volumes/{name}", "volumes/v1")
            .replace("devices/{name}", "devices/data")
            .replace("groups/{name}", "groups/g1")
            .replace("exports/{name}", "exports/e1")
            .replace("{backing}", "data")
            .replace("{id}", "nope");
        for (method, operation) in item.as_object().unwrap() {
            for name in ["{name}", "{id}", "{backing}"].iter().filter(|name| path.contains(**name)) {
                // Longer ones the server of HTTP refuses by itself.
                send(method, &path.replace(name, &"x".repeat(30_000)), None, "a long name in the path");
            }
            send(method, &format!("{real}?after={}", "1".repeat(30_000)), None, "a long query");
            let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
            if schema.is_null() {
                continue;
            }
            for variant in document.variants(schema) {
                for (what, body) in document.excesses(variant) {
                    send(method, &real, Some(&body), &what);
                }
            }
        }
    }
    assert!(sent > 150, "{sent} requests");
    assert_eq!(daemon.get("/v1/events").as_array().unwrap().len(), events, "something has happened");
    assert!(daemon.log().len() < 1 << 20, "the log has {} bytes", daemon.log().len());
}

/// The document shows a limit for each text and each list that a request brings.
#[test]
fn the_document_shows_the_limits() {
    let daemon = Daemon::new();
    let document = Document(daemon.get("/v1/openapi.json"));
    fn check(document: &Document, schema: &Value, place: &str) -> usize {
        let schema = document.schema(schema);
        let kinds = schema["type"].to_string();
        let mut found = 0;
        if kinds.contains("string") {
            let limits = [&schema["maxLength"], &schema["pattern"], &schema["enum"]];
            assert!(limits.iter().any(|limit| !limit.is_null()), "{place}: a text without a limit");
            found += 1;
        }
        if kinds.contains("array") {
            assert!(!schema["maxItems"].is_null(), "{place}: a list without a limit");
            found += 1 + check(document, &schema["items"], place);
        }
        for (name, field) in schema["properties"].as_object().into_iter().flatten() {
            found += check(document, field, &format!("{place}.{name}"));
        }
        for variant in schema["oneOf"].as_array().into_iter().flatten() {
            found += check(document, variant, place);
        }
        if schema["additionalProperties"].is_object() {
            found += check(document, &schema["additionalProperties"], place);
        }
        found
    }
    let mut found = 0;
    for (path, item) in document.0["paths"].as_object().unwrap() {
        for operation in item.as_object().unwrap().values() {
            found +=
                check(&document, &operation["requestBody"]["content"]["application/json"]["schema"], path);
        }
    }
    assert!(found > 30, "{found} texts and lists");
}

/// An invalid name never enters the state, not even for a moment. The previous state is the one
/// before the last change that was made.
#[test]
fn a_refused_action_on_an_array_is_in_no_file_of_the_state() {
    let daemon = with_everything();
    let previous = || std::fs::read(daemon.path("state/state.json.previous")).unwrap();
    let before = (state(&daemon), previous());
    let other = daemon.path("disk").display().to_string();
    for device in ["/nowhere/disk", &other, "mem:size=1M", "mem:sise=1M", "nonsense"] {
        for action in [
            json!({ "action": "add", "devices": [device] }),
            json!({ "action": "add", "devices": [device], "global": true }),
            json!({ "action": "re-add", "devices": [device] }),
            json!({ "action": "replace", "member": "0", "device": device }),
            json!({ "action": "replace", "member": "7", "device": device }),
        ] {
            daemon.refusal(Method::POST, "/v1/arrays/mirror/actions", &action);
            assert!(state(&daemon) == before.0 && previous() == before.1, "{action}");
        }
    }
}
