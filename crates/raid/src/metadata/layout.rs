//! The layout of a member: the offset of each area.
//!
//! ```text
//!   0        4 KiB: zeroes, so that no program finds another format's signature
//!   4 KiB    superblock copies 0 and 1, 12 KiB each
//!   32 KiB   write-intent bitmap: pages of 4 KiB, two copies of each side by side
//!            bad blocks: two copies
//!            log: lane 0, lane 1, …
//!            reserve for a reshape
//!   data     the member's strips, aligned
//!   …        free
//!   end      superblock copies 2 and 3, 12 KiB each, before the last whole 4 KiB of the device
//! ```
//!
//! Every offset is stored in the member's superblock; [`Layout::new`] only chooses them for a new
//! member. So two members of an array may have different layouts.

use crate::{ArrayConfig, Consistency};

/// Alignment of all metadata: the largest logical block.
pub const PAGE_BYTES: u64 = 4096;
/// Bytes reserved for one superblock copy: a head of 1 KiB and 256 members of 32 bytes, in whole
/// pages.
pub const COPY_BYTES: u64 = 12 << 10;
/// Superblock copies on a member.
pub const COPIES: usize = 4;
/// Regions in one page of the write-intent bitmap.
pub const REGIONS_PER_PAGE: u64 = 4032;
/// Most regions of an array; bounds the memory of their state.
pub const MAX_REGIONS: u64 = 1 << 20;
/// Smallest member with generous areas and data aligned to 1 MiB. Smaller ones exist only in tests.
pub const ROOMY_MEMBER_BYTES: u64 = 256 << 20;

/// Offset of the write-intent bitmap: behind the first page and two superblock copies, rounded up.
const MAP_OFFSET: u64 = 32 << 10;
/// Pages of the write-intent bitmap on a roomy member: 64 Ki regions twice over, so that the array
/// can double.
const ROOMY_MAP_PAGES: u64 = 34;
/// Bytes of one copy of the bad blocks on a roomy member: 2728 ranges.
const ROOMY_BAD_BYTES: u64 = 64 << 10;
/// Least reserve on a roomy member.
const ROOMY_RESERVE_BYTES: u64 = 8 << 20;
/// Least size of the reserve, in strips.
const RESERVE_STRIPS: u64 = 4;

/// Offset and length of each area of a member, in bytes from the member's beginning; all are
/// multiples of [`PAGE_BYTES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Layout {
    /// Used bytes of the member; the device may be larger.
    pub member_bytes: u64,
    /// Alignment of `data_offset`.
    pub alignment: u32,
    /// Pages of the write-intent bitmap, each with two copies.
    pub map_pages: u32,
    /// Offset of the write-intent bitmap.
    pub map_offset: u64,
    /// Offset of the bad blocks.
    pub bad_offset: u64,
    /// Bytes of one of the two copies of the bad blocks.
    pub bad_bytes: u32,
    /// Offset of the log.
    pub log_offset: u64,
    /// Bytes of the log: all lanes.
    pub log_bytes: u64,
    /// Offset of the reserve for a reshape.
    pub reserve_offset: u64,
    /// Bytes of the reserve.
    pub reserve_bytes: u64,
    /// Offset of the strips.
    pub data_offset: u64,
    /// Bytes for strips.
    pub data_bytes: u64,
}

/// Why a member has no valid layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// The member is too small.
    #[error("{capacity} bytes: at least {needed} are needed")]
    TooSmall {
        /// Bytes of the member.
        capacity: u64,
        /// Bytes that it needs.
        needed: u64,
    },
    /// The write-intent bitmap would be too large.
    #[error("{regions} regions: at most {MAX_REGIONS}")]
    Regions {
        /// Regions of the array.
        regions: u64,
    },
    /// Areas overlap or have the wrong order.
    #[error("{area} at {offset}: overlaps another area, or is misplaced")]
    Area {
        /// The area.
        area: &'static str,
        /// Its offset.
        offset: u64,
    },
}

impl Layout {
    /// The layout of a new member of `capacity` bytes for all stripes of `config`. If the data does
    /// not fit, it takes room from the reserve: a reshape may have done so on all other members.
    ///
    /// # Errors
    /// If the member is too small even without a reserve, or `config` has too many regions.
    pub fn new(capacity: u64, config: &ArrayConfig) -> Result<Layout, LayoutError> {
        if config.regions() > MAX_REGIONS {
            return Err(LayoutError::Regions { regions: config.regions() });
        }
        let data_bytes = config.geometry.group_stripes * u64::from(config.geometry.strip_bytes);
        let mut layout = Layout::areas(capacity, config);
        let alignment = u64::from(layout.alignment);
        let least_offset = layout.reserve_offset.next_multiple_of(alignment);
        let needed = least_offset.saturating_add(data_bytes).saturating_add(2 * COPY_BYTES);
        if needed > layout.member_bytes || layout.map_capacity() < config.regions() {
            return Err(LayoutError::TooSmall { capacity, needed });
        }
        let room = layout.member_bytes - 2 * COPY_BYTES - data_bytes;
        layout.data_offset = layout.data_offset.min(room / alignment * alignment);
        layout.reserve_bytes = layout.reserve_bytes.min(layout.data_offset - layout.reserve_offset);
        layout.data_bytes = data_bytes;
        Ok(layout)
    }

    /// The layout of the same member with data that begins `shift` bytes lower and has the same
    /// end. The reserve gives the room. `None` if the reserve is too small, or data would not be
    /// aligned.
    pub fn shifted(&self, shift: u64) -> Option<Layout> {
        let alignment = u64::from(self.alignment).max(PAGE_BYTES);
        if !shift.is_multiple_of(alignment) || shift > self.reserve_room() {
            return None;
        }
        let data_offset = self.data_offset - shift;
        Some(Layout {
            data_offset,
            data_bytes: self.data_bytes.checked_add(shift)?,
            reserve_bytes: self.reserve_bytes.min(data_offset - self.reserve_offset),
            ..*self
        })
    }

    /// Unused bytes before the data.
    pub fn reserve_room(&self) -> u64 {
        self.data_offset.saturating_sub(self.reserve_offset)
    }

    /// The most stripes of a group whose smallest member has `capacity` bytes; 0 if the member has
    /// no room for any. The stripes in `config` do not matter.
    pub fn most_group_stripes(capacity: u64, config: &ArrayConfig) -> u64 {
        let layout = Layout::areas(capacity, config);
        let room = layout.member_bytes.saturating_sub(layout.data_offset).saturating_sub(2 * COPY_BYTES);
        let most_data = config.region_bytes.saturating_mul(MAX_REGIONS);
        room.min(most_data) / u64::from(config.geometry.strip_bytes)
    }

    /// The layout of the same member after its device has grown to `capacity` bytes, with all the
    /// new room behind the data. Areas before the data stay in place; the last superblock copies
    /// move.
    ///
    /// The end does not move unless the new copies lie completely behind the old ones: the old
    /// copies must be intact until the new ones are.
    #[must_use]
    pub fn grown(&self, capacity: u64) -> Layout {
        let end = capacity & !(PAGE_BYTES - 1);
        let moves = end.saturating_sub(2 * COPY_BYTES) >= self.member_bytes;
        let member_bytes = if moves { end } else { self.member_bytes };
        let last_copies = member_bytes - 2 * COPY_BYTES;
        Layout { member_bytes, data_bytes: last_copies - self.data_offset, ..*self }
    }

    /// The most bytes of data on a member of this layout that the write-intent bitmap can cover.
    pub fn most_mapped(&self, region_bytes: u64) -> u64 {
        region_bytes.saturating_mul(self.map_capacity().min(MAX_REGIONS))
    }

    /// The layout without the data's length. Sums stay far below 2^64: each area is at most 2^48
    /// bytes.
    fn areas(capacity: u64, config: &ArrayConfig) -> Layout {
        let member_bytes = capacity & !(PAGE_BYTES - 1);
        let is_roomy = member_bytes >= ROOMY_MEMBER_BYTES;
        let strip_bytes = u64::from(config.geometry.strip_bytes);
        let regions = member_bytes.div_ceil(config.region_bytes.max(1)).min(MAX_REGIONS);
        let pages = regions.div_ceil(REGIONS_PER_PAGE).max(1);
        let map_pages = if is_roomy { pages.max(ROOMY_MAP_PAGES) } else { pages };
        let bad_bytes = if is_roomy { ROOMY_BAD_BYTES } else { PAGE_BYTES };
        let log_bytes = match config.consistency {
            Consistency::None => 0,
            Consistency::Bitmap | Consistency::Ppl => u64::from(config.lanes) * u64::from(config.lane_bytes),
        };
        let least_reserve = RESERVE_STRIPS * strip_bytes;
        let reserve_bytes = if is_roomy { least_reserve.max(ROOMY_RESERVE_BYTES) } else { least_reserve };
        let alignment = if is_roomy { 1 << 20 } else { PAGE_BYTES };
        let bad_offset = MAP_OFFSET + 2 * map_pages * PAGE_BYTES;
        let log_offset = bad_offset + 2 * bad_bytes;
        let reserve_offset = log_offset + log_bytes;
        Layout {
            member_bytes,
            alignment: alignment as u32,
            map_pages: map_pages as u32,
            map_offset: MAP_OFFSET,
            bad_offset,
            bad_bytes: bad_bytes as u32,
            log_offset,
            log_bytes,
            reserve_offset,
            reserve_bytes,
            data_offset: (reserve_offset + reserve_bytes).next_multiple_of(alignment),
            data_bytes: 0,
        }
    }

    /// Checks a layout read from a disk: order, alignment, room for `config`.
    ///
    /// # Errors
    /// Names the invalid area.
    pub fn check(&self, config: &ArrayConfig) -> Result<(), LayoutError> {
        let log_bytes = u64::from(config.lanes) * u64::from(config.lane_bytes);
        let needs_log = config.consistency != Consistency::None;
        if config.regions() > MAX_REGIONS || config.regions() > self.map_capacity() {
            return Err(LayoutError::Regions { regions: config.regions() });
        }
        if needs_log && log_bytes > self.log_bytes {
            return Err(LayoutError::Area { area: "the log", offset: self.log_offset });
        }
        let needed = config.geometry.group_stripes.checked_mul(config.geometry.strip_bytes.into());
        if needed.is_none_or(|needed| needed > self.data_bytes) {
            return Err(LayoutError::Area { area: "the data", offset: self.data_offset });
        }
        self.check_order()
    }

    fn check_order(&self) -> Result<(), LayoutError> {
        let areas = [
            ("the write-intent bitmap", self.map_offset, 2 * u64::from(self.map_pages) * PAGE_BYTES),
            ("the bad blocks", self.bad_offset, 2 * u64::from(self.bad_bytes)),
            ("the log", self.log_offset, self.log_bytes),
            ("the reserve", self.reserve_offset, self.reserve_bytes),
            ("the data", self.data_offset, self.data_bytes),
            ("the last superblocks", self.member_bytes.saturating_sub(2 * COPY_BYTES), 2 * COPY_BYTES),
        ];
        let mut end = PAGE_BYTES + 2 * COPY_BYTES;
        for (area, offset, len) in areas {
            let is_whole = (offset | len).is_multiple_of(PAGE_BYTES);
            match offset.checked_add(len) {
                Some(after) if is_whole && offset >= end => end = after,
                _ => return Err(LayoutError::Area { area, offset }),
            }
        }
        let is_aligned = self.alignment.is_power_of_two()
            && self.data_offset.is_multiple_of(self.alignment.into())
            && (PAGE_BYTES..=ROOMY_BAD_BYTES).contains(&u64::from(self.bad_bytes));
        if is_aligned {
            Ok(())
        } else {
            Err(LayoutError::Area { area: "the data", offset: self.data_offset })
        }
    }

    /// Offsets of the superblock copies of a member of `capacity` bytes; `None` if it is too small.
    pub fn superblocks_at(capacity: u64) -> Option<[u64; COPIES]> {
        let end = capacity & !(PAGE_BYTES - 1);
        if end < MAP_OFFSET + 2 * COPY_BYTES {
            return None;
        }
        Some([PAGE_BYTES, PAGE_BYTES + COPY_BYTES, end - 2 * COPY_BYTES, end - COPY_BYTES])
    }

    /// Offsets of the superblock copies.
    pub fn superblocks(&self) -> [u64; COPIES] {
        Layout::superblocks_at(self.member_bytes).expect("a member that has been laid out")
    }

    /// Regions that the write-intent bitmap has room for.
    pub fn map_capacity(&self) -> u64 {
        u64::from(self.map_pages) * REGIONS_PER_PAGE
    }

    /// Offset of a copy (0 or 1) of a page of the write-intent bitmap.
    pub fn map_page(&self, page: u32, copy: usize) -> u64 {
        debug_assert!(page < self.map_pages && copy < 2);
        self.map_offset + (2 * u64::from(page) + copy as u64) * PAGE_BYTES
    }

    /// Offset of a copy (0 or 1) of the bad blocks.
    pub fn bad_copy(&self, copy: usize) -> u64 {
        debug_assert!(copy < 2);
        self.bad_offset + copy as u64 * u64::from(self.bad_bytes)
    }

    /// Offset of a lane of the log.
    pub fn lane(&self, lane: u16, lane_bytes: u32) -> u64 {
        self.log_offset + u64::from(lane) * u64::from(lane_bytes)
    }
}

impl ArrayConfig {
    /// Lanes that fit in the logs of members with these layouts; the present number if there is no
    /// log.
    pub fn lanes_in(&self, layouts: impl Iterator<Item = Layout>) -> u16 {
        if self.lane_bytes == 0 {
            return self.lanes;
        }
        let lanes = layouts.map(|layout| layout.log_bytes / u64::from(self.lane_bytes)).min();
        u16::try_from(lanes.unwrap_or(0)).unwrap_or(u16::MAX).max(self.lanes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::testing::config;
    use proptest::prelude::*;

    #[test]
    fn a_member_of_the_simulator_keeps_most_of_itself_for_data() {
        let mut config = config(2, 1);
        config.lanes = 2;
        config.lane_bytes = 16 << 10;
        config.region_bytes = 16 << 10;
        config.geometry.group_stripes = Layout::most_group_stripes(256 << 10, &config);
        let layout = Layout::new(256 << 10, &config).unwrap();
        layout.check(&config).unwrap();
        assert!(layout.data_bytes >= 128 << 10, "{layout:?}");
        assert_eq!(layout.superblocks()[3] + COPY_BYTES, 256 << 10);
    }

    #[test]
    fn data_of_a_large_member_begins_at_a_mebibyte() {
        let mut config = config(8, 2);
        config.region_bytes = 64 << 20;
        config.geometry.group_stripes = Layout::most_group_stripes(4 << 40, &config);
        let layout = Layout::new(4 << 40, &config).unwrap();
        layout.check(&config).unwrap();
        assert!(layout.data_offset.is_multiple_of(1 << 20) && layout.data_offset <= 64 << 20);
    }

    #[test]
    fn a_member_without_room_is_refused_with_what_it_would_need() {
        let mut config = config(4, 1);
        config.geometry.group_stripes = 1000;
        let Err(LayoutError::TooSmall { capacity, needed }) = Layout::new(1 << 20, &config) else { panic!() };
        assert_eq!(capacity, 1 << 20);
        assert!(Layout::new(needed, &config).is_ok());
        assert_eq!(Layout::most_group_stripes(4096, &config), 0);
    }

    #[test]
    fn a_member_that_grows_keeps_its_old_superblocks_until_the_new_ones_lie_behind_them() {
        let config = config(2, 1);
        let layout = Layout::new(1 << 20, &config).unwrap();
        let ends = |capacity: u64| layout.grown(capacity).member_bytes;
        assert_eq!(ends(1 << 20), 1 << 20);
        assert_eq!(ends((1 << 20) + 2 * COPY_BYTES - 1), 1 << 20);
        assert_eq!(ends((1 << 20) + 2 * COPY_BYTES), (1 << 20) + 2 * COPY_BYTES);
        assert_eq!(ends(0), 1 << 20);
        let grown = layout.grown(3 << 20);
        assert_eq!(grown.data_offset + grown.data_bytes, grown.superblocks()[2]);
        assert_eq!(grown.check(&config), Ok(()));
    }

    #[test]
    fn data_that_begins_lower_takes_its_room_from_the_reserve() {
        let mut config = config(4, 1);
        let layout = Layout::new(1 << 20, &config).unwrap();
        assert_eq!((layout.reserve_bytes, layout.reserve_room()), (16 << 10, 16 << 10));
        for (shift, reserve) in [(0, 16 << 10), (4096, 12 << 10), (16 << 10, 0)] {
            let shifted = layout.shifted(shift).unwrap();
            assert_eq!(shifted.data_offset + shift, layout.data_offset);
            assert_eq!(shifted.data_bytes, layout.data_bytes + shift);
            assert_eq!(shifted.reserve_bytes, reserve);
            config.geometry.group_stripes = 16 + (shift >> 12);
            assert_eq!(shifted.check(&config), Ok(()));
        }
        assert_eq!(layout.shifted(20 << 10), None);
        assert_eq!(layout.shifted(512), None);
        let large = Layout::new(1 << 30, &config).unwrap();
        assert_eq!((large.alignment, large.shifted(4096)), (1 << 20, None));
        assert!(large.shifted(8 << 20).unwrap().check(&config).is_ok());
    }

    #[test]
    fn a_disk_of_the_same_size_has_room_for_what_the_reserves_of_others_hold() {
        for capacity in [1 << 20, 300 << 20] {
            let mut config = config(4, 1);
            config.region_bytes = 1 << 20;
            config.geometry.group_stripes = Layout::most_group_stripes(capacity, &config);
            let layout = Layout::new(capacity, &config).unwrap();
            let most = layout.reserve_room() / u64::from(layout.alignment) * u64::from(layout.alignment);
            for shift in (0..=most).step_by(layout.alignment as usize) {
                let mut larger = config.clone();
                larger.geometry.group_stripes += shift / 4096;
                let (shifted, new) =
                    (layout.shifted(shift).unwrap(), Layout::new(capacity, &larger).unwrap());
                assert_eq!(new, shifted);
                assert_eq!(new.check(&larger), Ok(()));
            }
            config.geometry.group_stripes += most / 4096 + u64::from(layout.alignment) / 4096;
            let Err(LayoutError::TooSmall { needed, .. }) = Layout::new(capacity, &config) else { panic!() };
            assert!(needed > capacity && needed <= capacity + u64::from(layout.alignment), "{needed}");
        }
    }

    proptest! {
        #[test]
        fn every_chosen_layout_passes_the_check(
            capacity in prop_oneof![0..=u64::MAX, 0..1u64 << 30], strip in 12..=20u32, region_strips in 1..=1u64 << 40,
            lanes in 1..=u16::MAX, lane_pages in 1..=4096u32,
        ) {
            let mut config = config(3, 2);
            config.geometry.strip_bytes = 1 << strip;
            config.region_bytes = region_strips << strip;
            config.lanes = lanes;
            config.lane_bytes = lane_pages * 4096;
            config.geometry.group_stripes = Layout::most_group_stripes(capacity, &config);
            if config.check().is_ok() {
                let layout = Layout::new(capacity, &config).unwrap();
                prop_assert_eq!(layout.check(&config), Ok(()));
                // As many as fit without a reserve, and one more.
                let least = layout.reserve_offset.next_multiple_of(layout.alignment.into());
                let room = layout.member_bytes - 2 * COPY_BYTES - least;
                config.geometry.group_stripes = room >> strip;
                if config.check().is_ok() && config.regions() <= layout.map_capacity() {
                    let layout = Layout::new(capacity, &config).unwrap();
                    prop_assert_eq!(layout.check(&config), Ok(()));
                    prop_assert!(layout.reserve_bytes <= layout.data_offset - layout.reserve_offset);
                }
                config.geometry.group_stripes += 1;
                prop_assert!(Layout::new(capacity, &config).is_err());
            }
        }

        #[test]
        fn a_layout_of_any_numbers_is_checked_without_overflow(
            n in proptest::collection::vec(prop_oneof![0..=u64::MAX, 0..1u64 << 20], 12),
        ) {
            let layout = Layout {
                member_bytes: n[0], alignment: n[1] as u32, map_pages: n[2] as u32, map_offset: n[3],
                bad_offset: n[4], bad_bytes: n[5] as u32, log_offset: n[6], log_bytes: n[7],
                reserve_offset: n[8], reserve_bytes: n[9], data_offset: n[10], data_bytes: n[11],
            };
            let _ = layout.check(&config(2, 1));
        }
    }
}
