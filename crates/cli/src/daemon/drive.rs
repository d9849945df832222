//! Drives of the daemon's host, for people.

use api::{Drive, DriveHealth};
use base::Size;

/// Model and serial number, as far as they are known.
pub fn name(drive: &Drive) -> String {
    let parts = [&drive.model, &drive.serial];
    parts.into_iter().flatten().map(String::as_str).collect::<Vec<_>>().join(" ")
}

/// Names and values; those without a value are empty.
pub fn fields(drive: Option<&Drive>) -> Vec<(&'static str, String)> {
    let Some(drive) = drive else { return Vec::new() };
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let mut fields = vec![
        ("drive", text(&drive.model)),
        ("serial", text(&drive.serial)),
        ("firmware", text(&drive.firmware)),
        ("drive size", drive.size_bytes.map(|bytes| Size(bytes).to_string()).unwrap_or_default()),
        ("address", text(&drive.address)),
        ("temperature", drive.temperature_celsius.map(|celsius| format!("{celsius} °C")).unwrap_or_default()),
    ];
    if let Some(health) = &drive.health {
        let DriveHealth { wear_percent, spare_percent, spare_threshold_percent, media_errors, warnings } =
            health;
        let warnings: Vec<&str> = warnings.iter().map(|warning| warning.name()).collect();
        fields.extend([
            ("wear", format!("{wear_percent} %")),
            ("spare", format!("{spare_percent} % (warns below {spare_threshold_percent} %)")),
            ("media errors", media_errors.to_string()),
            ("warnings", warnings.join(", ")),
        ]);
    }
    fields.push(("note", text(&drive.reason)));
    fields
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::table;

    #[test]
    fn a_drive_has_a_line_for_each_known_value() {
        let some = |text: &str| Some(text.to_owned());
        let drive = Drive {
            model: some("Fast 2T"),
            serial: some("S1"),
            size_bytes: Some(2 << 40),
            ..Drive::default()
        };
        assert_eq!(name(&drive), "Fast 2T S1");
        let health = DriveHealth {
            wear_percent: 3,
            spare_percent: 100,
            spare_threshold_percent: 10,
            media_errors: 0,
            warnings: api::DriveWarning::of_bits(3),
        };
        let known = Drive { temperature_celsius: Some(41), health: Some(health), ..drive };
        assert_eq!(
            table::fields(&fields(Some(&known))),
            "drive         Fast 2T\nserial        S1\ndrive size    2 TiB\ntemperature   41 °C\nwear          3 %\n\
             spare         100 % (warns below 10 %)\nmedia errors  0\nwarnings      spare-low, temperature"
        );
        let unknown = fields(Some(&Drive::unknown("a file")));
        assert_eq!(table::fields(&unknown), "note        a file");
        assert!(fields(None).is_empty());
    }
}
