//! The sizes of everything that a request may bring. They are checked before a request means
//! anything, and shown in the document.
//!
//! A name that comes into being is checked where it does (`volume::Name`: 63 bytes). These limits
//! are for everything else that the daemon could be made to keep, log or send back.

use api::MAX_LABEL_VALUE;
use serde_json::Value;
use std::collections::BTreeSet;
use utoipa::openapi::schema::{AdditionalProperties, ArrayItems, Schema, SchemaType, Type};
use utoipa::openapi::{OpenApi, RefOr};

/// Longest body of a request in bytes: a path for each of 256 members.
pub const MAX_BODY: usize = 1 << 20;
/// Longest path and query of a request in bytes: the longest name, each byte written as three, and
/// an operation.
pub const MAX_TARGET: usize = 1024;
/// Most items of a list.
const MAX_ITEMS: usize = 1024;
/// Most fields of an object: no kind of export has as many options.
const MAX_FIELDS: usize = 64;
/// Longest text in bytes, where a path or the specification of a device may stand: Linux'
/// `PATH_MAX`.
const MAX_PATH: usize = 4096;
/// Longest other text in bytes, and longest name of a field: Linux' `NAME_MAX`.
const MAX_NAME: usize = 255;
/// Fields that hold paths and specifications. `options` is a map of them.
const WITH_PATHS: [&str; 7] = ["spec", "members", "spares", "devices", "device", "member", "options"];

/// Longest text in a field, in bytes.
fn longest(field: &str) -> usize {
    match field {
        "labels" => MAX_LABEL_VALUE,
        _ if WITH_PATHS.contains(&field) => MAX_PATH,
        _ => MAX_NAME,
    }
}

/// Checks every text, list and object of a body.
///
/// # Errors
/// Names the first that is too long.
pub fn check(body: &Value) -> Result<(), String> {
    check_value(body, "", MAX_NAME)
}

fn check_value(value: &Value, place: &str, most: usize) -> Result<(), String> {
    let is_within = |len: usize, most: usize, unit: &str| match len <= most {
        true => Ok(()),
        false => Err(format!(
            "{}: {len} {unit}: at most {most}",
            if place.is_empty() { "the body" } else { place }
        )),
    };
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => Ok(()),
        Value::String(text) => is_within(text.len(), most, "bytes"),
        Value::Array(items) => {
            is_within(items.len(), MAX_ITEMS, "items")?;
            let mut items = items.iter().enumerate();
            items.try_for_each(|(number, item)| check_value(item, &format!("{place}[{number}]"), most))
        }
        Value::Object(fields) => {
            is_within(fields.len(), MAX_FIELDS, "fields")?;
            fields.iter().try_for_each(|(name, value)| {
                is_within(name.len(), MAX_NAME, "bytes in the name of a field")?;
                let place = if place.is_empty() { name.clone() } else { format!("{place}.{name}") };
                check_value(value, &place, most.max(longest(name)))
            })
        }
    }
}

/// Shows the limits in the document, in everything that requests bring.
pub fn describe(document: &mut OpenApi) {
    let Some(components) = &mut document.components else { return };
    let items = document.paths.paths.values();
    let operations = items.flat_map(|item| [&item.post, &item.put, &item.patch].into_iter().flatten());
    let contents = operations
        .filter_map(|operation| match &operation.request_body {
            Some(RefOr::T(body)) => Some(body),
            Some(RefOr::Ref(_)) | None => None,
        })
        .flat_map(|body| body.content.values());
    let mut found: Vec<String> = Vec::new();
    for content in contents {
        if let RefOr::T(content) = content
            && let Some(RefOr::Ref(body)) = &content.schema
        {
            found.push(body.ref_location.clone());
        }
    }
    // Bodies, and the schemas that they refer to.
    let mut seen = BTreeSet::new();
    while let Some(place) = found.pop() {
        if seen.insert(place.clone())
            && let Some(name) = place.rsplit('/').next()
            && let Some(schema) = components.schemas.get_mut(name)
        {
            limit(schema, MAX_NAME, &mut found);
        }
    }
}

/// Shows the limits in a schema, and adds the places of the schemas that it refers to.
fn limit(schema: &mut RefOr<Schema>, most: usize, found: &mut Vec<String>) {
    let schema = match schema {
        RefOr::T(schema) => schema,
        RefOr::Ref(place) => return found.push(place.ref_location.clone()),
    };
    match schema {
        Schema::Object(object) => {
            let is_text = match &object.schema_type {
                SchemaType::Type(kind) => *kind == Type::String,
                SchemaType::Array(kinds) => kinds.contains(&Type::String),
                SchemaType::AnyValue => false,
            };
            if is_text && object.enum_values.is_none() && object.pattern.is_none() {
                object.max_length = Some(most);
            }
            for (name, field) in &mut object.properties {
                limit(field, most.max(longest(name)), found);
            }
            if let Some(more) = &mut object.additional_properties
                && let AdditionalProperties::RefOr(value) = &mut **more
            {
                object.max_properties = Some(MAX_FIELDS);
                limit(value, most, found);
            }
        }
        Schema::Array(array) => {
            array.max_items = Some(MAX_ITEMS);
            if let ArrayItems::RefOrSchema(items) = &mut array.items {
                limit(items, most, found);
            }
        }
        Schema::OneOf(any) => any.items.iter_mut().for_each(|one| limit(one, most, found)),
        Schema::AllOf(all) => all.items.iter_mut().for_each(|one| limit(one, most, found)),
        Schema::AnyOf(any) => any.items.iter_mut().for_each(|one| limit(one, most, found)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_text_a_list_and_an_object_are_as_long_as_they_may_be_and_no_longer() {
        let check = |body: Value| check(&body);
        let text = |len: usize| "x".repeat(len);
        assert_eq!(
            check(json!({ "name": text(255), "spec": text(4096), "options": { "socket": text(4096) } })),
            Ok(())
        );
        assert_eq!(check(json!({ "name": text(256) })), Err("name: 256 bytes: at most 255".into()));
        assert_eq!(
            check(json!({ "members": ["", text(4097)] })),
            Err("members[1]: 4097 bytes: at most 4096".into())
        );
        assert_eq!(
            check(json!({ "options": { "socket": text(4097) } })),
            Err("options.socket: 4097 bytes: at most 4096".into())
        );
        assert_eq!(check(json!({ "cores": vec![1; 1025] })), Err("cores: 1025 items: at most 1024".into()));
        assert_eq!(
            check(json!({ text(256): 1 })),
            Err("the body: 256 bytes in the name of a field: at most 255".into())
        );
        let many: Value =
            (0..65).map(|number| (number.to_string(), json!(1))).collect::<serde_json::Map<_, _>>().into();
        assert_eq!(check(many), Err("the body: 65 fields: at most 64".into()));
    }
}
