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

use crate::array::args::Place;
use crate::output::Output;
use serde_json::json;

/// A stopped array: its members, opened and locked here.
pub struct Members<'a> {
    /// The array's name or UUID.
    pub array: &'a str,
    /// Where its members are.
    pub place: &'a Place,
    /// Receiver of warnings.
    pub output: Output,
}

/// Says what people should know about the members that were found.
fn say_warnings(warnings: &[String], output: Output) {
    for warning in warnings {
        output.event("warning", format!("warning: {warning}"), json!({ "warning": warning }));
    }
}
