//! The kinds of devices and layers: their tables, and those that are made of other devices.

pub mod blkio;
#[cfg(feature = "sandbox")]
pub mod confinement;
pub mod device;
pub mod discovery;
pub mod layer;
pub mod member;
pub mod qcow2;
pub mod raid;
pub mod restart_log;

#[cfg(test)]
mod tests {
    use super::*;
    use spec::{HELP_WIDTH, KEY_TEXT};

    #[test]
    fn help_keeps_to_its_columns() {
        let devices = spec::help(&[("Devices", device::KINDS), ("Layers", layer::KINDS)]);
        for line in devices.lines().filter(|line| line.starts_with("      ")) {
            assert!(line.chars().count() <= HELP_WIDTH, "{line}");
            let is_field_alone = !line.trim().contains(' ');
            let has_gap = line.chars().nth(KEY_TEXT - 1) == Some(' ');
            assert!(is_field_alone || has_gap, "a key runs into its text: {line}");
        }
    }
}
