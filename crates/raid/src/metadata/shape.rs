//! Computes the configuration of a new array from a user's choices: levels, member counts,
//! defaults.

use super::create_error::CreateError;
use super::layout::Layout;
use super::maintenance::Maintenance;
use crate::config::MAX_GROUP_MEMBERS;
use crate::{ArrayConfig, Consistency, Geometry, Level, Matrix, Uuid, Zones};

/// A user's choices for a new array. A field that is `None` has a default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The array's name.
    pub name: String,
    /// The level.
    pub level: Level,
    /// Groups, for levels 10, 50, 60, 70 and n+m. By default they follow from `copies`, or `data`
    /// and `parity`; two for levels 50, 60 and 70.
    pub groups: Option<usize>,
    /// Copies in a mirror, for level 10; default 2. Level 1 has as many as members.
    pub copies: Option<usize>,
    /// Data strips, for level n+m.
    pub data: Option<usize>,
    /// Parity strips, for level n+m.
    pub parity: Option<usize>,
    /// Bytes of a strip; by default the largest power of two from 16 to 128 KiB with at most 1 MiB
    /// of data in a stripe.
    pub strip_bytes: Option<u32>,
    /// The mechanism of consistency; by default `ppl`, `bitmap` for mirrors and `none` without
    /// redundancy.
    pub consistency: Option<Consistency>,
    /// Most bytes of each member to use.
    pub member_bytes: Option<u64>,
    /// Bytes of a member's data in a region; the default gives at most 64 Ki regions.
    pub region_bytes: Option<u64>,
    /// Lanes of the log, and bytes of each; by default 16 of 1 MiB, less on small members.
    pub lanes: Option<(u16, u32)>,
    /// The schedule of scrubs, and the limit of read errors of a member.
    pub maintenance: Maintenance,
}

/// Most regions of a new array by default.
const REGIONS: u64 = 64 << 10;
/// The smallest default region. With smaller ones, occasional writes would each cost a write of the
/// bitmap.
const LEAST_REGION: u64 = 64 << 10;
/// The log's largest share of a member by default, as a divisor.
const LOG_SHARE: u64 = 16;

impl Shape {
    /// A shape with every default.
    pub fn new(name: &str, level: Level) -> Shape {
        Shape {
            name: name.to_owned(),
            level,
            groups: None,
            copies: None,
            data: None,
            parity: None,
            strip_bytes: None,
            consistency: None,
            member_bytes: None,
            region_bytes: None,
            lanes: None,
            maintenance: Maintenance::default(),
        }
    }

    /// The configuration of an array of `members` members. `capacity` is the size of the smallest
    /// one, `block_size` the largest logical block of any.
    ///
    /// # Errors
    /// If members are too few, too many or too small, or the choices contradict each other.
    pub fn config(
        &self,
        uuid: Uuid,
        members: usize,
        capacity: u64,
        block_size: u32,
    ) -> Result<ArrayConfig, CreateError> {
        let (groups, data, parity) = self.groups(members)?;
        let strip_bytes = self.strip_bytes.unwrap_or_else(|| default_strip(data));
        let matrix = matrix_of(data, parity);
        let consistency = self.consistency.unwrap_or(match (data, parity) {
            (_, 0) => Consistency::None,
            (1, _) => Consistency::Bitmap,
            _ => Consistency::Ppl,
        });
        if matrix == Matrix::Copies && consistency == Consistency::Ppl && parity > 0 {
            return Err(CreateError::Shape(
                "a mirror has no write hole and needs no log: bitmap is enough".into(),
            ));
        }
        let capacity = self.member_bytes.map_or(capacity, |most| capacity.min(most));
        let strip = u64::from(strip_bytes.max(1));
        let region = |bytes: u64| bytes.next_power_of_two().max(LEAST_REGION).max(strip.next_power_of_two());
        let (lanes, lane_bytes) = self.lanes.unwrap_or_else(|| default_lanes(capacity, strip_bytes));
        let mut config = ArrayConfig {
            uuid,
            name: self.name.clone(),
            level: self.level,
            geometry: Geometry { groups, data, parity, strip_bytes, group_stripes: 1, zones: Zones::NONE },
            matrix,
            consistency,
            block_size,
            region_bytes: self.region_bytes.unwrap_or_else(|| region((capacity >> 1).div_ceil(REGIONS / 2))),
            lanes: if consistency == Consistency::None { 0 } else { lanes },
            lane_bytes: if consistency == Consistency::None { 0 } else { lane_bytes },
        };
        // Checked before arithmetic uses it, and again when it is complete.
        config.check().map_err(|error| CreateError::Shape(error.to_string()))?;
        config.geometry.group_stripes = Layout::most_group_stripes(capacity, &config);
        if config.geometry.group_stripes == 0 {
            return Err(CreateError::Shape(format!("{capacity} bytes of a member: too few for one strip")));
        }
        config.check().map_err(|error| CreateError::Shape(error.to_string()))?;
        Ok(config)
    }

    /// Groups, data and parity strips.
    fn groups(&self, members: usize) -> Result<(usize, usize, usize), CreateError> {
        let level = self.level.name();
        let fail = |text: String| Err(CreateError::Shape(text));
        let (group_members, parity) = match self.level {
            Level::Raid0 => (members, 0),
            Level::Raid1 => (members, members.saturating_sub(1)),
            Level::Raid10 => {
                let copies = self.copies.unwrap_or(2);
                (copies, copies.saturating_sub(1))
            }
            Level::Raid5 => (members, 1),
            Level::Raid6 => (members, 2),
            Level::Raid7 => (members, 3),
            Level::Raid50 | Level::Raid60 | Level::Raid70 => {
                let groups = self.groups.unwrap_or(2).max(1);
                if !members.is_multiple_of(groups) {
                    return fail(format!("level {level}: {members} members in {groups} groups of one size"));
                }
                let parity = match self.level {
                    Level::Raid50 => 1,
                    Level::Raid60 => 2,
                    _ => 3,
                };
                (members / groups, parity)
            }
            Level::NPlusM => match (self.data, self.parity) {
                (Some(data), Some(parity)) => (data.saturating_add(parity), parity),
                _ => return fail("level n+m: the numbers of data and parity strips are required".into()),
            },
        };
        let least = self.least_group(parity);
        if group_members < least {
            return fail(format!(
                "level {level}: at least {least} members in a group are needed, {group_members} were given"
            ));
        }
        if group_members > MAX_GROUP_MEMBERS {
            return fail(format!(
                "level {level}: at most {MAX_GROUP_MEMBERS} members in a group, {group_members} were given"
            ));
        }
        let groups = members / group_members;
        let is_whole = members.is_multiple_of(group_members) && groups > 0;
        if !is_whole || self.groups.is_some_and(|said| said != groups) {
            let said = self.groups.map_or_else(|| "groups".into(), |said| format!("{said} groups"));
            return fail(format!("level {level}: {members} members for {said} of {group_members}"));
        }
        Ok((groups, group_members - parity, parity))
    }

    /// Least members of a group of the level.
    fn least_group(&self, parity: usize) -> usize {
        match self.level {
            Level::Raid0 => 1,
            Level::Raid1 | Level::Raid10 => 2,
            Level::NPlusM => parity.saturating_add(1),
            _ => parity + 2,
        }
    }
}

/// The parity matrix of a new array.
pub(super) const fn matrix_of(data: usize, parity: usize) -> Matrix {
    match (data, parity) {
        (1, _) | (_, 0) => Matrix::Copies,
        (_, 1..=3) => Matrix::Powers,
        _ => Matrix::Cauchy,
    }
}

fn default_strip(data: usize) -> u32 {
    [128u32, 64, 32, 16]
        .map(|kib| kib << 10)
        .into_iter()
        .find(|strip| data as u64 * u64::from(*strip) <= 1 << 20)
        .unwrap_or(16 << 10)
}

/// 16 lanes of 1 MiB; on small members shorter lanes, then fewer. An entry takes at most half a
/// lane and holds a strip of parity and at least one strip of new data.
fn default_lanes(capacity: u64, strip_bytes: u32) -> (u16, u32) {
    let least = strip_bytes.saturating_mul(4).clamp(64 << 10, 4 << 20);
    let (mut lanes, mut lane_bytes) = (16u16, least.max(1 << 20));
    while u64::from(lanes) * u64::from(lane_bytes) > capacity / LOG_SHARE && lanes > 1 {
        if lane_bytes / 2 >= least { lane_bytes /= 2 } else { lanes /= 2 }
    }
    (lanes, lane_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(members: usize, shape: &Shape) -> Result<ArrayConfig, String> {
        shape.config(Uuid([1; 16]), members, 1 << 40, 512).map_err(|error| error.to_string())
    }

    fn shape(level: Level) -> Shape {
        Shape::new("a", level)
    }

    #[test]
    fn levels_are_groups_of_data_and_parity() {
        let n_plus_m = Shape { data: Some(4), parity: Some(4), ..shape(Level::NPlusM) };
        for (shape, members, expected, matrix) in [
            (shape(Level::Raid0), 1, (1, 1, 0), Matrix::Copies),
            (shape(Level::Raid0), 3, (1, 3, 0), Matrix::Copies),
            (shape(Level::Raid1), 2, (1, 1, 1), Matrix::Copies),
            (shape(Level::Raid1), 4, (1, 1, 3), Matrix::Copies),
            (shape(Level::Raid10), 6, (3, 1, 1), Matrix::Copies),
            (Shape { copies: Some(3), ..shape(Level::Raid10) }, 6, (2, 1, 2), Matrix::Copies),
            (shape(Level::Raid5), 24, (1, 23, 1), Matrix::Powers),
            (shape(Level::Raid6), 24, (1, 22, 2), Matrix::Powers),
            (shape(Level::Raid7), 24, (1, 21, 3), Matrix::Powers),
            (shape(Level::Raid50), 24, (2, 11, 1), Matrix::Powers),
            (Shape { groups: Some(3), ..shape(Level::Raid60) }, 24, (3, 6, 2), Matrix::Powers),
            (shape(Level::Raid70), 10, (2, 2, 3), Matrix::Powers),
            (n_plus_m.clone(), 8, (1, 4, 4), Matrix::Cauchy),
            (n_plus_m, 16, (2, 4, 4), Matrix::Cauchy),
        ] {
            let config = config(members, &shape).unwrap();
            let Geometry { groups, data, parity, .. } = config.geometry;
            assert_eq!(((groups, data, parity), config.matrix), (expected, matrix), "{shape:?}");
            assert!(config.regions() <= REGIONS + 1, "{}", config.regions());
        }
    }

    #[test]
    fn contradicting_choices_are_refused() {
        let n_plus_m = Shape { data: Some(60), parity: Some(5), ..shape(Level::NPlusM) };
        let n_plus_max = Shape { data: Some(2), parity: Some(usize::MAX), ..shape(Level::NPlusM) };
        let groups = |level, groups| Shape { groups: Some(groups), ..shape(level) };
        for (shape, members, part) in [
            (shape(Level::Raid0), 0, "at least 1"),
            (shape(Level::Raid1), 1, "at least 2 members in a group are needed, 1 were given"),
            (shape(Level::Raid1), 18, "17 parities: at most 16"),
            (shape(Level::Raid5), 2, "at least 3"),
            (shape(Level::Raid6), 3, "at least 4"),
            (shape(Level::Raid7), 4, "at least 5"),
            (shape(Level::Raid10), 5, "5 members for groups of 2"),
            (shape(Level::Raid50), 7, "7 members in 2 groups"),
            (groups(Level::Raid60, 3), 9, "at least 4 members in a group are needed, 3 were given"),
            (groups(Level::Raid10, 2), 6, "6 members for 2 groups of 2"),
            (shape(Level::NPlusM), 6, "numbers of data and parity strips are required"),
            (n_plus_m, 65, "at most 64"),
            (n_plus_max, 2, "at most 64"),
            (shape(Level::Raid6), 65, "at most 64"),
            (Shape { strip_bytes: Some(3000), ..shape(Level::Raid5) }, 3, "strip of 3000"),
            (Shape { consistency: Some(Consistency::Ppl), ..shape(Level::Raid1) }, 2, "needs no log"),
            (Shape { consistency: Some(Consistency::None), ..shape(Level::Raid5) }, 3, "consistency none"),
            (Shape { name: "a/b".into(), ..shape(Level::Raid5) }, 3, "name"),
            (Shape { member_bytes: Some(100 << 10), ..shape(Level::Raid5) }, 3, "too few"),
        ] {
            let error = config(members, &shape).unwrap_err();
            assert!(error.contains(part), "{error} lacks {part}");
        }
    }

    #[test]
    fn a_stripe_holds_at_most_a_mebibyte_by_default() {
        for (data, kib) in [(1, 128), (8, 128), (9, 64), (16, 64), (17, 32), (32, 32), (33, 16), (63, 16)] {
            assert_eq!(default_strip(data), kib << 10, "{data}");
        }
    }

    #[test]
    fn a_small_member_has_a_small_log() {
        assert_eq!(default_lanes(1 << 40, 128 << 10), (16, 1 << 20));
        assert_eq!(default_lanes(1 << 40, 1 << 20), (16, 4 << 20));
        assert_eq!(default_lanes(64 << 20, 128 << 10), (8, 512 << 10));
        assert_eq!(default_lanes(1 << 20, 4096), (1, 64 << 10));
        let config = shape(Level::Raid6).config(Uuid([1; 16]), 5, 64 << 20, 4096).unwrap();
        assert!(config.geometry.group_stripes * 128 >= 56 << 10, "{config:?}");
    }
}
