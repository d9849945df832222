//! Creation of arrays by the code of `freestone array create`, on disks that hold old data.
//!
//! The disks hold garbage, and most of them are members of a former array. Power fails at any write
//! of the creation. Afterwards either no array is found, and the creation is repeated with the same
//! disks, or the array is found and follows the rules of every other one. Members that cannot zero
//! without a transfer of zeroes leave the array unsynced.

use crate::machine::CrashAt;
use crate::plan::Shape;
use base::Rng;
use raid::metadata::{self, CreateOptions, Identities};
use raid::{Geometry, Level, Uuid};

/// Bytes that a disk has beyond its member, so that the creation leaves the old data of strips: it
/// clears the last MiB of a disk.
const MORE_BYTES: u64 = (1 << 20) + (64 << 10);
/// Most tries that power interrupts.
const MOST_TRIES: u64 = 4;

/// The creation of a run's array.
#[derive(Clone, Debug)]
pub struct Creation {
    /// When power fails in each try. The one after the last is not interrupted.
    pub crashes: Vec<CrashAt>,
    /// Slots whose disks cannot zero without a transfer of zeroes, as a mask.
    pub unzeroed: u64,
    /// By how many places the disks are rotated that the former array has, if there was one.
    pub former: Option<usize>,
    /// Bytes of each member, if not all of its disk.
    member_bytes: Option<u64>,
}

/// Draws the creation of the array of a run. Before its boots are drawn: the code of the creation
/// chooses the number of stripes.
pub fn draw(shape: &mut Shape, rng: &mut Rng) {
    let members = shape.members() as u64;
    let unzeroed = match rng.below(3) {
        0 => 0,
        1 => u64::MAX >> (64 - members),
        _ => rng.below(1 << members),
    };
    let writes = 24 * members;
    let crash = |rng: &mut Rng| match rng.one_in(2) {
        true => CrashAt::WriteStarted(1 + rng.below(writes)),
        false => CrashAt::WriteEnded(1 + rng.below(writes)),
    };
    let crashes = (0..rng.below(MOST_TRIES)).map(|_| crash(rng)).collect();
    let former = (!rng.one_in(4)).then(|| rng.below(members) as usize);
    let member_bytes = (unzeroed != 0).then_some(shape.disk_bytes);
    if unzeroed != 0 {
        shape.disk_bytes += MORE_BYTES;
    }
    shape.is_unsynced = unzeroed != 0;
    // The array takes as much of each disk as the smallest has.
    if let Some(least) = shape.more_bytes.iter().min().copied() {
        shape.more_bytes.iter_mut().for_each(|bytes| *bytes -= least);
    }
    shape.creation = Some(Creation { crashes, unzeroed, former, member_bytes });
    let options = options(shape, shape.creation.as_ref().expect("just set"));
    let config = options.shape.config(Uuid([1; 16]), shape.members(), shape.disk_bytes, shape.block_size);
    let config = config.expect("a drawn shape is valid");
    (shape.geometry, shape.matrix) = (config.geometry, config.matrix);
    shape.most_stripes = shape.geometry.group_stripes;
}

/// The options of the creation of an array of that shape.
pub fn options(shape: &Shape, creation: &Creation) -> CreateOptions {
    let Geometry { groups, data, parity, strip_bytes, .. } = shape.geometry;
    let is_n_plus_m = shape.level == Level::NPlusM;
    let wanted = metadata::Shape {
        groups: (groups > 1).then_some(groups),
        copies: (shape.level == Level::Raid10).then_some(data + parity),
        data: is_n_plus_m.then_some(data),
        parity: is_n_plus_m.then_some(parity),
        strip_bytes: Some(strip_bytes),
        consistency: Some(shape.consistency),
        member_bytes: creation.member_bytes,
        region_bytes: Some(shape.region_strips * u64::from(strip_bytes)),
        lanes: Some((shape.lanes, shape.lane_bytes)),
        ..metadata::Shape::new("sim", shape.level)
    };
    CreateOptions {
        shape: wanted,
        force: true,
        zeroes: true,
        owner: String::new(),
        now_ns: crate::array::WALL_NS,
        identities: Identities::Core,
    }
}
