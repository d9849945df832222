//! Labels: texts that programs attach to volumes and exports, and find them by.

use std::collections::BTreeMap;

/// Labels by key.
pub type Labels = BTreeMap<String, String>;

/// A change of labels: a new value for a key, or none to remove the label.
pub type LabelsChange = BTreeMap<String, Option<String>>;

/// Most labels of an object.
pub const MAX_LABELS: usize = 32;
/// Longest key, in bytes.
pub const MAX_LABEL_KEY: usize = 63;
/// Longest value, in bytes.
pub const MAX_LABEL_VALUE: usize = 256;
