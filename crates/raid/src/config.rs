//! The configuration of an array: level, geometry, consistency. It is fixed at creation; only
//! growth and a reshape change it.

use crate::log::size;
use crate::{Code, Geometry, Matrix, Uuid};
use serde::{Deserialize, Serialize};

/// Most members of a group (data and parity together): a set of strips is a 64-bit mask.
pub const MAX_GROUP_MEMBERS: usize = 64;
/// Most members of an array, limited by the room in a superblock.
pub const MAX_MEMBERS: usize = 256;
/// Most parity strips of a stripe.
pub const MAX_PARITY: usize = 16;
/// The smallest strip, and the unit of parity.
pub const ROW_BYTES: u32 = 4096;
/// The largest strip: one buffer.
pub const MAX_STRIP_BYTES: u32 = 1 << 20;
/// Longest name of an array in bytes.
pub const MAX_NAME_BYTES: usize = 32;

/// The RAID levels, by their usual names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Level {
    /// Stripes without redundancy.
    #[serde(rename = "0")]
    Raid0,
    /// Every member holds a copy of all data.
    #[serde(rename = "1")]
    Raid1,
    /// Stripes over mirrors.
    #[serde(rename = "10")]
    Raid10,
    /// One parity.
    #[serde(rename = "5")]
    Raid5,
    /// Two parities.
    #[serde(rename = "6")]
    Raid6,
    /// Three parities.
    #[serde(rename = "7.3")]
    Raid7,
    /// Stripes over RAID 5 groups.
    #[serde(rename = "50")]
    Raid50,
    /// Stripes over RAID 6 groups.
    #[serde(rename = "60")]
    Raid60,
    /// Stripes over RAID 7.3 groups.
    #[serde(rename = "70")]
    Raid70,
    /// N data strips and M parities, both chosen.
    #[serde(rename = "n+m")]
    NPlusM,
}

impl Level {
    /// Every level.
    pub const ALL: [Level; 10] = [
        Level::Raid0,
        Level::Raid1,
        Level::Raid10,
        Level::Raid5,
        Level::Raid6,
        Level::Raid7,
        Level::Raid50,
        Level::Raid60,
        Level::Raid70,
        Level::NPlusM,
    ];

    /// The name on the command line and in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Level::Raid0 => "0",
            Level::Raid1 => "1",
            Level::Raid10 => "10",
            Level::Raid5 => "5",
            Level::Raid6 => "6",
            Level::Raid7 => "7.3",
            Level::Raid50 => "50",
            Level::Raid60 => "60",
            Level::Raid70 => "70",
            Level::NPlusM => "n+m",
        }
    }

    /// The level with this name.
    pub fn from_name(name: &str) -> Option<Level> {
        Level::ALL.into_iter().find(|level| level.name() == name)
    }
}

/// The mechanism that keeps an array consistent if the power fails in the middle of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Consistency {
    /// None, for level 0 without redundancy.
    None,
    /// Regions with writes in flight are marked; after a crash they are resynced. A crash together
    /// with a missing member may lose blocks.
    Bitmap,
    /// A partial parity log: no data is lost.
    Ppl,
}

impl Consistency {
    /// The name on the command line and in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Consistency::None => "none",
            Consistency::Bitmap => "bitmap",
            Consistency::Ppl => "ppl",
        }
    }
}

/// The configuration that is the same on all members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArrayConfig {
    /// The array's UUID.
    pub uuid: Uuid,
    /// The name for people; at most [`MAX_NAME_BYTES`] bytes.
    pub name: String,
    /// The level as the user named it; the geometry has its parameters.
    pub level: Level,
    /// The shape.
    pub geometry: Geometry,
    /// The matrix of the parity code.
    pub matrix: Matrix,
    /// The mechanism for consistency after a power loss.
    pub consistency: Consistency,
    /// Logical block size in bytes: the largest of the members'.
    pub block_size: u32,
    /// Bytes of a member's data per byte of the write-intent bitmap; a multiple of the strip.
    pub region_bytes: u64,
    /// Lanes of the log. A stripe's lane never depends on the number of cores.
    pub lanes: u16,
    /// Bytes of one lane on one member.
    pub lane_bytes: u32,
}

/// Why a configuration is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(pub String);

impl ArrayConfig {
    /// The code of a stripe.
    pub fn code(&self) -> Code {
        Code::new(self.matrix, self.geometry.data, self.geometry.parity).expect("a checked configuration")
    }

    /// Whether members have copies of the data, as with levels 1 and 10.
    pub fn is_mirror(&self) -> bool {
        self.geometry.data == 1 && self.geometry.parity > 0
    }

    /// The log lane of a stripe.
    pub fn lane_of(&self, stripe: u64) -> u16 {
        // Multiplicative hashing (Knuth): neighbours have different lanes, so a sequential run uses
        // all of them.
        (((stripe.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) * u64::from(self.lanes)) >> 32) as u16
    }

    /// Regions of the array: one byte each in the write-intent bitmap. A region is the same part of
    /// every member.
    pub fn regions(&self) -> u64 {
        let member_bytes = self.geometry.group_stripes * u64::from(self.geometry.strip_bytes);
        member_bytes.div_ceil(self.region_bytes)
    }

    /// The region of a stripe.
    pub fn region_of(&self, stripe: u64) -> u64 {
        self.region_at(self.geometry.member_offset(stripe))
    }

    /// The region of a byte of every member's data.
    pub fn region_at(&self, position: u64) -> u64 {
        position / self.region_bytes
    }

    /// Checks the values that other arithmetic relies on. Must be called for a configuration from a
    /// disk or a user.
    ///
    /// # Errors
    /// Names the invalid value.
    pub fn check(&self) -> Result<(), ConfigError> {
        let Geometry { groups, data, parity, strip_bytes, group_stripes, zones } = self.geometry;
        let fail = |text: String| Err(ConfigError(text));
        let (group_members, members) = (data + parity, groups * (data + parity));
        if groups == 0 || data == 0 || group_members > MAX_GROUP_MEMBERS || members > MAX_MEMBERS {
            return fail(format!(
                "{groups} groups of {data}+{parity} members: at most 64 in a group, 256 in total"
            ));
        }
        if parity > MAX_PARITY {
            return fail(format!("{parity} parities: at most {MAX_PARITY}"));
        }
        if !strip_bytes.is_power_of_two() || !(ROW_BYTES..=MAX_STRIP_BYTES).contains(&strip_bytes) {
            return fail(format!(
                "a strip of {strip_bytes} bytes: a power of two from 4096 to 1048576 is needed"
            ));
        }
        if group_stripes == 0 || group_stripes.checked_mul((strip_bytes as u64) * (members as u64)).is_none()
        {
            return fail(format!("{group_stripes} stripes: 0, or too many for 64-bit offsets"));
        }
        if !zones.is_empty() && (zones.groups() != groups || zones.rows() > group_stripes) {
            let (known, rows) = (zones.groups(), zones.rows());
            return fail(format!(
                "zones of {known} groups of {rows} stripes: the array has {groups} of {group_stripes}"
            ));
        }
        if !self.block_size.is_power_of_two() || !(512..=ROW_BYTES).contains(&self.block_size) {
            return fail(format!(
                "blocks of {} bytes: a power of two from 512 to 4096 is needed",
                self.block_size
            ));
        }
        if self.region_bytes == 0 || !self.region_bytes.is_multiple_of(strip_bytes.into()) {
            return fail(format!(
                "regions of {} bytes: a multiple of the strip is needed",
                self.region_bytes
            ));
        }
        if self.name.is_empty() || self.name.len() > MAX_NAME_BYTES || self.name.contains(['/', '\0', ',']) {
            return fail(format!(
                "{:?}: a name of 1 to {MAX_NAME_BYTES} bytes without / and , is needed",
                self.name
            ));
        }
        if (self.consistency == Consistency::None) != (parity == 0) {
            return fail(format!(
                "consistency {} with {parity} parities: invalid combination",
                self.consistency.name()
            ));
        }
        if self.consistency != Consistency::None
            && (self.lanes == 0 || !self.lane_bytes.is_multiple_of(ROW_BYTES) || self.lane_bytes == 0)
        {
            return fail(format!("{} log lanes of {} bytes", self.lanes, self.lane_bytes));
        }
        if parity > 0
            && data > 1
            && size::max_len(self.lane_bytes, strip_bytes, self.block_size, data) < self.block_size
        {
            return fail(format!(
                "log lanes of {} bytes: too small for a block of every strip",
                self.lane_bytes
            ));
        }
        Code::new(self.matrix, data, parity).map(drop).map_err(|error| ConfigError(error.to_string()))
    }
}
