//! Version 1 of the API is frozen: `v1.json` is the document as it was frozen last, and the daemon
//! may add to it only.
//!
//! With UPDATE=1 the present document becomes the frozen one, unless it breaks a promise of the
//! last one. A release does this, so that its additions are frozen too.

mod compatibility;

use compatibility::breaking;
use serde_json::{Value, json};
use std::path::Path;

fn frozen() -> Value {
    serde_json::from_str(include_str!("v1.json")).expect("a document")
}

fn present() -> Value {
    serde_json::to_value(daemon::rest::document()).expect("plain data")
}

#[test]
fn the_api_keeps_the_promises_of_version_1() {
    let broken = breaking(&frozen(), &present());
    assert!(broken.is_empty(), "/v1 is frozen; these changes break clients:\n{}", broken.join("\n"));
    if std::env::var_os("UPDATE").is_some() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/frozen/v1.json");
        let text = serde_json::to_string_pretty(&without_texts(present())).expect("plain data");
        std::fs::write(path, text + "\n").unwrap();
    }
}

/// The document without descriptions, which may change.
fn without_texts(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let is_text =
                |name: &str, value: &Value| matches!(name, "description" | "summary") && value.is_string();
            let kept = fields.into_iter().filter(|(name, value)| !is_text(name, value));
            kept.map(|(name, value)| (name, without_texts(value))).collect()
        }
        Value::Array(items) => items.into_iter().map(without_texts).collect(),
        value => value,
    }
}

/// A document with every construct that the API's has.
fn example() -> Value {
    json!({
        "paths": { "/v1/things/{name}": {
            "get": {
                "parameters": [
                    { "name": "name", "in": "path", "required": true, "schema": { "type": "string" } },
                    { "name": "after", "in": "query", "required": false, "schema": { "type": "integer" } },
                ],
                "responses": { "200": { "content": { "application/json": {
                    "schema": { "type": "array", "items": { "$ref": "#/components/schemas/Thing" } }
                } } } },
                "x-roles": { "operation": ["read-only", "admin"] },
            },
            "post": {
                "requestBody": { "required": true, "content": { "application/json": {
                    "schema": { "$ref": "#/components/schemas/Action" }
                } } },
                "responses": { "204": {} },
                "x-roles": { "operation": ["admin"] },
            },
        } },
        "components": { "schemas": {
            "Thing": {
                "type": "object",
                "required": ["name", "state"],
                "properties": {
                    "name": { "type": "string" },
                    "state": { "$ref": "#/components/schemas/State" },
                    "free_bytes": { "type": ["integer", "null"], "format": "u-int64" },
                    "job": { "oneOf": [{ "$ref": "#/components/schemas/Job" }, { "type": "null" }] },
                },
            },
            "State": { "type": "string", "enum": ["active", "waiting"] },
            "Job": { "type": "object", "required": ["id"], "properties": { "id": { "type": "string" } } },
            "Action": { "oneOf": [
                {
                    "type": "object", "required": ["action"],
                    "properties": {
                        "action": { "type": "string", "enum": ["start"] },
                        "speed": { "type": "integer", "minimum": 0, "maximum": 9 },
                        "labels": { "type": "object", "additionalProperties": { "type": "string" } },
                    },
                },
                {
                    "type": "object", "required": ["action"],
                    "properties": { "action": { "type": "string", "enum": ["stop"] } },
                },
            ] },
        } },
    })
}

/// The example with one value replaced, added (the pointer ends with a new key) or, by null,
/// removed.
fn changed(pointer: &str, value: Value) -> Value {
    let mut document = example();
    let (parent, key) = pointer.rsplit_once('/').expect("a pointer");
    let key = &key.replace("~1", "/");
    match document.pointer_mut(parent).unwrap_or_else(|| panic!("{parent}: no such place")) {
        Value::Object(fields) if value.is_null() => assert!(fields.remove(key).is_some(), "{pointer}"),
        Value::Object(fields) => drop(fields.insert(key.clone(), value)),
        Value::Array(items) => match key.parse::<usize>() {
            Ok(at) if value.is_null() => drop(items.remove(at)),
            Ok(at) => items[at] = value,
            Err(_) => items.push(value),
        },
        other => panic!("{parent}: {other}"),
    }
    document
}

const GET: &str = "/paths/~1v1~1things~1{name}/get";
const THING: &str = "/components/schemas/Thing";
const START: &str = "/components/schemas/Action/oneOf/0";

#[test]
fn a_breaking_change_is_refused_with_its_place() {
    let get = |rest: &str| format!("{GET}{rest}");
    let thing = |rest: &str| format!("{THING}{rest}");
    let start = |rest: &str| format!("{START}{rest}");
    let post = |rest: &str| get(rest).replace("/get", "/post");
    let cases = [
        ("/paths/~1v1~1things~1{name}".into(), Value::Null, "/v1/things/{name}: the path is gone"),
        (get(""), Value::Null, "the method get is gone"),
        (get("/parameters/1"), Value::Null, "parameter \"after\": the parameter is gone"),
        (get("/parameters/1/required"), json!(true), "the parameter is required"),
        (get("/parameters/1/schema/type"), json!("string"), "the type was integer, and is string"),
        (
            get("/parameters/-"),
            json!({ "name": "kind", "in": "query", "required": true, "schema": { "type": "string" } }),
            "the new parameter \"kind\" is required",
        ),
        (get("/responses/200"), Value::Null, "answer 200: the answer is gone"),
        (get("/responses/200/content"), json!({ "text/plain": {} }), "answer 200: application/json is gone"),
        (get("/x-roles/operation/0"), Value::Null, "the role read-only may not ask for `operation` any more"),
        (get("/x-roles/force"), json!(["admin"]), "`force` takes a role of its own"),
        (thing("/properties/name"), Value::Null, "answer 200[].name: the field is gone"),
        (thing("/properties/name/type"), json!("integer"), "the type was string, and is integer"),
        (thing("/properties/name/type"), json!(["string", "null"]), "and is null or string"),
        (thing("/properties/free_bytes/format"), json!("int32"), "and is integer or null int32"),
        (thing("/required"), json!(["name"]), "[].state: the field may be missing"),
        ("/components/schemas/State/enum/0".into(), Value::Null, "the value \"active\" is gone"),
        ("/components/schemas/State/enum".into(), Value::Null, "any value may be answered"),
        ("/components/schemas/Job/properties/id".into(), Value::Null, "[].job.id: the field is gone"),
        (post("/requestBody"), Value::Null, "the request body is gone"),
        (get("/requestBody"), json!({ "required": true, "content": {} }), "a request body is required"),
        ("/components/schemas/Action/oneOf/1".into(), Value::Null, "the variant action \"stop\" is gone"),
        (start("/properties/speed"), Value::Null, "request.speed: the field is gone"),
        (start("/required"), json!(["action", "speed"]), "request.speed: the field is required"),
        (start("/properties/speed/type"), json!("string"), "the type was integer, and is string"),
        (start("/properties/speed/maximum"), json!(8), "maximum is smaller"),
        (start("/properties/speed/minimum"), json!(1), "minimum is larger"),
        (start("/properties/speed/enum"), json!(["1", "2"]), "only some values are accepted"),
        (start("/properties/labels/additionalProperties"), Value::Null, "any field was allowed"),
        (start("/additionalProperties"), json!(false), "unknown fields are refused"),
    ];
    for (pointer, value, want) in cases {
        let broken = breaking(&example(), &changed(&pointer, value.clone()));
        assert!(
            broken.iter().any(|line| line.contains(want)),
            "{pointer} = {value}: {broken:?}, not {want:?}"
        );
    }
}

#[test]
fn an_addition_passes() {
    let optional = json!({ "type": ["string", "null"] });
    let operation = json!({ "responses": { "204": {} }, "x-roles": { "operation": ["admin"] } });
    let cases = [
        ("/paths/~1v1~1others", json!({ "get": operation })),
        ("/paths/~1v1~1things~1{name}/delete", operation.clone()),
        (&format!("{GET}/parameters/-"), json!({ "name": "kind", "in": "query", "schema": optional })),
        (&format!("{GET}/responses/404"), json!({ "content": {} })),
        (&format!("{GET}/summary"), json!("Lists the things.")),
        (&format!("{GET}/x-roles/operation/-"), json!("operator")),
        (&format!("{GET}/x-roles/force"), json!(["read-only", "admin"])),
        (&format!("{THING}/properties/more"), optional.clone()),
        (&format!("{THING}/required/-"), json!("free_bytes")),
        (&format!("{THING}/properties/free_bytes/type"), json!("integer")),
        ("/components/schemas/State/enum/-", json!("starting")),
        (
            "/components/schemas/Action/oneOf/-",
            json!({
                "type": "object", "required": ["action"],
                "properties": { "action": { "type": "string", "enum": ["pause"] } },
            }),
        ),
        (&format!("{START}/properties/more"), optional.clone()),
        (&format!("{START}/properties/speed/maximum"), json!(10)),
        (&format!("{START}/properties/speed/type"), json!(["integer", "null"])),
    ];
    for (pointer, value) in cases {
        let broken = breaking(&example(), &changed(pointer, value.clone()));
        assert!(broken.is_empty(), "{pointer} = {value}: {broken:?}");
    }
    assert!(breaking(&example(), &example()).is_empty());
}

#[test]
fn a_breaking_change_of_the_present_document_is_refused() {
    let mut broken = present();
    let volume = broken.pointer_mut("/components/schemas/Volume/properties").expect("an object");
    volume.as_object_mut().expect("fields").remove("size_bytes");
    let found = breaking(&frozen(), &broken);
    assert!(found.iter().any(|line| line.contains("size_bytes: the field is gone")), "{found:?}");
}
