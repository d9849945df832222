//! The SMART / Health Information log page (Base 5.16.1.3): the fields that an operator looks at.

use crate::wire::{put, u16_at, u64_at};

/// Bytes of the page.
pub const BYTES: usize = 512;

/// Places of the fields.
const CRITICAL_WARNING: usize = 0;
const TEMPERATURE: usize = 1;
const SPARE: usize = 3;
const SPARE_THRESHOLD: usize = 4;
const USED: usize = 5;
/// 128 bits.
const MEDIA_ERRORS: usize = 160;

/// The health of a controller and its media.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HealthLog {
    /// A bit for each critical warning: spare below its threshold, temperature, degraded
    /// reliability, read-only media, failed backup of volatile memory, read-only persistent memory
    /// region.
    pub critical_warning: u8,
    /// Composite temperature in kelvins; 0: not reported.
    pub temperature_k: u16,
    /// Spare capacity that is left, in percent.
    pub spare_percent: u8,
    /// The spare capacity below which the controller warns, in percent.
    pub spare_threshold_percent: u8,
    /// The part of the endurance that is used, in percent; may be above 100, 255 at most.
    pub used_percent: u8,
    /// Errors of the media and of data integrity, `u64::MAX` at most.
    pub media_errors: u64,
}

impl HealthLog {
    /// Parses the page.
    pub fn parse(page: &[u8; BYTES]) -> HealthLog {
        let is_huge = u64_at(page, MEDIA_ERRORS + 8) != 0;
        HealthLog {
            critical_warning: page[CRITICAL_WARNING],
            temperature_k: u16_at(page, TEMPERATURE),
            spare_percent: page[SPARE],
            spare_threshold_percent: page[SPARE_THRESHOLD],
            used_percent: page[USED],
            media_errors: if is_huge { u64::MAX } else { u64_at(page, MEDIA_ERRORS) },
        }
    }

    /// The page. Its other fields are 0.
    pub fn encode(&self) -> [u8; BYTES] {
        let mut page = [0; BYTES];
        page[CRITICAL_WARNING] = self.critical_warning;
        put(&mut page, TEMPERATURE, self.temperature_k.to_le_bytes());
        page[SPARE] = self.spare_percent;
        page[SPARE_THRESHOLD] = self.spare_threshold_percent;
        page[USED] = self.used_percent;
        put(&mut page, MEDIA_ERRORS, self.media_errors.to_le_bytes());
        page
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_of_a_page_are_found() {
        let mut page = [0xee; BYTES];
        page[..6].copy_from_slice(&[0b101, 0x3a, 0x01, 97, 10, 104]);
        page[160..176].fill(0);
        page[160..162].copy_from_slice(&[2, 1]);
        let log = HealthLog::parse(&page);
        let want = HealthLog {
            critical_warning: 5,
            temperature_k: 314,
            spare_percent: 97,
            spare_threshold_percent: 10,
            used_percent: 104,
            media_errors: 258,
        };
        assert_eq!(log, want);
        assert_eq!(HealthLog::parse(&log.encode()), log);
        page[175] = 1;
        assert_eq!(HealthLog::parse(&page).media_errors, u64::MAX);
    }
}
