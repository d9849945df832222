//! Drives of the host, below devices and members of arrays.

use crate::words::words;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The drive of the daemon's host that a device or member is on. The daemon reads it once a minute.
/// Values that the kernel or the drive does not tell are null.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Drive {
    /// Model.
    pub model: Option<String>,
    /// Serial number.
    pub serial: Option<String>,
    /// Revision of the firmware.
    pub firmware: Option<String>,
    /// Size of the drive in bytes; a partition on it is smaller.
    pub size_bytes: Option<u64>,
    /// Address: of the PCI function, SCSI device (`host:channel:target:lun`) or virtio device.
    pub address: Option<String>,
    /// Temperature in degrees Celsius.
    pub temperature_celsius: Option<i32>,
    /// Health of an NVMe drive, by its log.
    pub health: Option<DriveHealth>,
    /// Reason why values are null.
    pub reason: Option<String>,
}

impl Drive {
    /// A drive of which nothing is known.
    pub fn unknown(reason: impl Into<String>) -> Drive {
        Drive { reason: Some(reason.into()), ..Drive::default() }
    }
}

/// Health of a drive.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DriveHealth {
    /// Part of the endurance that is used, in percent; may be above 100, 255 at most.
    pub wear_percent: u8,
    /// Spare capacity that is left, in percent.
    pub spare_percent: u8,
    /// Spare capacity below which the drive warns, in percent.
    pub spare_threshold_percent: u8,
    /// Errors of the media and of data integrity over the life of the drive.
    pub media_errors: u64,
    /// Critical warnings of the drive.
    pub warnings: Vec<DriveWarning>,
}

words! {
    /// Critical warning of a drive (NVM Express Base Specification 2.0, 5.16.1.3).
    DriveWarning {
        /// The spare capacity is below its threshold.
        SpareLow = "spare-low",
        /// The temperature is above or below a threshold.
        Temperature = "temperature",
        /// Reliability is degraded by errors of media or of the drive.
        ReliabilityDegraded = "reliability-degraded",
        /// The media are read-only.
        ReadOnly = "read-only",
        /// The backup of volatile memory has failed.
        BackupFailed = "backup-failed",
        /// The persistent memory region is read-only or unreliable.
        MemoryRegionReadOnly = "memory-region-read-only",
    }
}

impl DriveWarning {
    /// The bit of the warning in the field of the log.
    pub const fn bit(self) -> u8 {
        1 << self as u8
    }

    /// The warnings of a field. Reserved bits have no meaning.
    pub fn of_bits(bits: u8) -> Vec<DriveWarning> {
        DriveWarning::ALL.iter().copied().filter(|warning| bits & warning.bit() != 0).collect()
    }
}

/// Wear from which on a drive is at risk, in percent.
const WORN_PERCENT: u8 = 90;

impl DriveHealth {
    /// Reasons why the drive is at risk: critical warnings, little spare capacity, wear.
    pub fn risks(&self) -> Vec<String> {
        let is_low = self.spare_percent < self.spare_threshold_percent;
        let warnings = self.warnings.iter().filter(|warning| **warning != DriveWarning::SpareLow || !is_low);
        let mut risks: Vec<String> = warnings.map(|warning| format!("warns of {warning}")).collect();
        if is_low {
            let (left, least) = (self.spare_percent, self.spare_threshold_percent);
            risks.push(format!("has {left} % of spare capacity, below {least} %"));
        }
        if self.wear_percent >= WORN_PERCENT {
            risks.push(format!("has used {} % of its endurance", self.wear_percent));
        }
        risks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_have_the_bits_of_the_specification() {
        let bits: Vec<u8> = DriveWarning::ALL.iter().map(|warning| warning.bit()).collect();
        assert_eq!(bits, [1, 2, 4, 8, 16, 32]);
        assert_eq!(
            DriveWarning::of_bits(0b1100_0101),
            [DriveWarning::SpareLow, DriveWarning::ReliabilityDegraded]
        );
    }

    #[test]
    fn a_drive_is_at_risk_with_little_spare_wear_or_a_warning() {
        let good = DriveHealth {
            spare_percent: 10,
            spare_threshold_percent: 10,
            wear_percent: 89,
            ..DriveHealth::default()
        };
        assert!(good.risks().is_empty());
        let worn = DriveHealth { wear_percent: 90, ..good.clone() };
        assert_eq!(worn.risks(), ["has used 90 % of its endurance"]);
        let low = DriveHealth { spare_percent: 9, warnings: DriveWarning::of_bits(0b11), ..good };
        assert_eq!(low.risks(), ["warns of temperature", "has 9 % of spare capacity, below 10 %"]);
    }
}
