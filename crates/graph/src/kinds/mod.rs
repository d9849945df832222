//! The kinds of devices and layers: their keys, and how they are made.

#[cfg(feature = "sandbox")]
pub mod confinement;
pub mod device;
pub mod discovery;
pub mod layer;
pub mod raid;

use crate::spec::{Key, Kind, key};
use std::fmt::Write;

const ID: Key = key("id", "NAME", "the name by which layers and exports refer to this device");
/// The key of devices and exports that can be read-only.
pub const READ_ONLY: Key = key("readonly", "on|off", "refuse writes [off]");

/// Every kind with its keys, for `--help`.
pub fn help(roles: &[(&str, &[&'static Kind])]) -> String {
    let mut text = String::new();
    for (title, kinds) in roles {
        let _ = writeln!(text, "{title}:");
        for kind in *kinds {
            let _ = writeln!(text, "  {}: {}", kind.name, kind.about);
            for key in kind.keys {
                let field = format!("{}={}", key.name, key.value);
                let _ = writeln!(text, "      {field:<26}{}", key.about);
            }
        }
        text.push('\n');
    }
    text
}
