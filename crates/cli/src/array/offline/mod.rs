//! Commands that work on the members themselves, because no process runs the array.

pub mod assemble;
pub mod check;
pub mod create;
pub mod edit;
pub mod examine;
pub mod fill;
pub mod grow;
pub mod members;
pub mod show;

use crate::output::Output;
use serde_json::json;

/// Says what people should know about the members that were found.
fn say_warnings(warnings: &[String], output: Output) {
    for warning in warnings {
        output.event("warning", format!("warning: {warning}"), json!({ "warning": warning }));
    }
}
