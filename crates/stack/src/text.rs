//! A whole graph in one text, for callers that have one string: the C API, a line of a
//! configuration.
//!
//! ```text
//!   io_uring:path=/a,id=a  io_uring:path='/my disk'  concat  stats
//!   └── devices ────────────────────────────────┘  └ layers, from the bottom up ┘
//! ```
//!
//! Specifications are separated by white space. A layer stands on the devices before it, or on
//! those that it names, exactly as on the command line; at the end one device must be on top. `'…'`
//! and `"…"` keep white space and the other quote as they are; a quote may begin anywhere in a
//! specification.

use crate::kinds::member::standby_refused;
use crate::kinds::{device, layer};
use crate::stack::{DevicePlan, StackPlan};
use spec::{Kind, SpecError};

/// Longest text of a graph, in bytes.
pub const MAX_TEXT: usize = 64 << 10;

/// Why a text describes no graph.
#[derive(Debug, thiserror::Error)]
pub enum GraphError {
    /// A device or layer is invalid; the error names it.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// There is no such kind.
    #[error(
        "{spec}: no such device or layer: {kind:?}; there are devices {}, and layers {}",
        names(device::KINDS),
        names(layer::KINDS)
    )]
    UnknownKind {
        /// The specification.
        spec: String,
        /// The text before its colon.
        kind: String,
    },
    /// A quote is opened and never closed.
    #[error("graph: the quote at byte {at} is not closed: {rest}")]
    OpenQuote {
        /// Where it stands, from 0.
        at: usize,
        /// The rest of the text from this position on.
        rest: String,
    },
    /// The text is empty.
    #[error("graph: no device is given")]
    Empty,
    /// More than one device is on top.
    #[error("graph: {} devices on top ({}): one is needed, such as concat makes of several", .0.len(), .0.join(", "))]
    Several(Vec<String>),
    /// The text is longer than [`MAX_TEXT`].
    #[error("graph: {0} bytes of text: at most {MAX_TEXT}")]
    TooLong(usize),
}

/// The device that `text` describes, with everything beneath it.
///
/// # Errors
/// When the text is invalid. Nothing is opened.
pub fn parse(text: &str) -> Result<DevicePlan, GraphError> {
    if text.len() > MAX_TEXT {
        return Err(GraphError::TooLong(text.len()));
    }
    let mut plan = StackPlan::default();
    for spec in words(text)? {
        let kind = spec.split_once(':').map_or(&*spec, |(kind, _)| kind);
        if has(layer::KINDS, kind) {
            plan.add_layer(&spec)?;
        } else if has(device::KINDS, kind) {
            plan.add_device(&spec)?;
            let added = plan.devices().last();
            if added.is_some_and(|device| device.any_leaf(&|leaf| leaf.is_standby())) {
                return Err(standby_refused(&spec).into());
            }
        } else {
            let kind = kind.to_owned();
            return Err(GraphError::UnknownKind { spec, kind });
        }
    }
    let mut devices = plan.into_devices();
    match devices.len() {
        0 => Err(GraphError::Empty),
        1 => Ok(devices.remove(0)),
        _ => Err(GraphError::Several(devices.into_iter().map(|device| device.id).collect())),
    }
}

fn has(kinds: &[&Kind], name: &str) -> bool {
    kinds.iter().any(|kind| kind.name == name)
}

fn names(kinds: &[&Kind]) -> String {
    kinds.iter().map(|kind| kind.name).collect::<Vec<_>>().join(", ")
}

/// The parts between white space, without quotes.
fn words(text: &str) -> Result<Vec<String>, GraphError> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let from_here = rest;
        rest = &rest[c.len_utf8()..];
        match c {
            '\'' | '"' => {
                let (quoted, after) = rest.split_once(c).ok_or_else(|| GraphError::OpenQuote {
                    at: text.len() - from_here.len(),
                    rest: from_here.to_owned(),
                })?;
                word.get_or_insert_default().push_str(quoted);
                rest = after;
            }
            c if c.is_ascii_whitespace() => words.extend(word.take()),
            c => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: &str) -> String {
        parse(text).expect_err("refused").to_string()
    }

    #[test]
    fn devices_come_first_and_layers_stand_on_them_in_order() {
        let plan = parse("mem:size=1M  mem:size=2M\n\tconcat linear:offset=512K,len=1M stats").unwrap();
        assert_eq!((plan.id.as_str(), plan.layers.len()), ("device0+device1", 2));
        let stack = plan.open().unwrap();
        assert_eq!((stack.device.limits().capacity, stack.stats.len()), (1 << 20, 1));
    }

    #[test]
    fn quotes_keep_white_space() {
        assert_eq!(words("  a b\tc\n").unwrap(), ["a", "b", "c"]);
        assert_eq!(words(r#"io_uring:path='/my disk',direct"#).unwrap(), ["io_uring:path=/my disk,direct"]);
        assert_eq!(words(r#"path="it's" 'say "é"' ''"#).unwrap(), ["path=it's", r#"say "é""#, ""]);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("my disk, the second");
        std::fs::write(&path, [0; 4096]).unwrap();
        let text = format!("io_uring:path='{}' stats", path.to_str().unwrap().replace(',', ",,"));
        assert_eq!(parse(&text).unwrap().open().unwrap().device.limits().capacity, 4096);
    }

    #[test]
    fn messages_name_the_object_and_the_value() {
        assert_eq!(refusal(" \n"), "graph: no device is given");
        let standby = "rbd:pool=p,image=i,standby=on";
        let reason = "standby=on: only freestone serve follows the lock of an image";
        assert_eq!(refusal(standby), format!("device {standby}: {reason}"));
        let (devices, layers) = (names(device::KINDS), names(layer::KINDS));
        assert_eq!(
            refusal("null nul:size=1M"),
            format!(
                r#"nul:size=1M: no such device or layer: "nul"; there are devices {devices}, and layers {layers}"#
            )
        );
        assert!(devices.contains("io_uring, mem") && layers.contains("linear, concat"));
        assert_eq!(refusal("mem stats"), "device mem: size=SIZE is missing");
        assert_eq!(refusal("stats null"), "layer stats: no device is given before it");
        assert_eq!(refusal("null:id=é 'stats"), "graph: the quote at byte 11 is not closed: 'stats");
        assert_eq!(
            refusal("null null:id=b stats"),
            "graph: 2 devices on top (device0, b): one is needed, such as concat makes of several"
        );
        assert_eq!(refusal(&" ".repeat(MAX_TEXT + 1)), "graph: 65537 bytes of text: at most 65536");
    }

    proptest::proptest! {
        /// Whatever a caller writes gives a plan or a message.
        #[test]
        fn no_text_makes_the_parser_panic(
            pieces in proptest::collection::vec(
                proptest::sample::select(vec![
                    "mem", "null", "linear", "concat", "stats", "fault", ":", ",", "=", " ", "'", "\"", "+", "size",
                    "id", "devices", "device", "offset", "len", "error", "op", "1M", "4K", "a", "b", "on", "é", "\0",
                ]),
                0..40,
            ),
            noise in "\\PC{0,20}",
        ) {
            for text in [pieces.concat(), format!("null:id=a mem:size=1M,id=b {}", pieces.concat()), noise] {
                if let Err(error) = parse(&text) {
                    assert!(!error.to_string().is_empty());
                }
            }
        }
    }

    #[test]
    fn no_name_is_both_a_device_and_a_layer() {
        assert!(device::KINDS.iter().all(|kind| !has(layer::KINDS, kind.name)));
    }
}
