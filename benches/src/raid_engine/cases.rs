//! The measured cases: the engine alone, and its share of the drives' speed.

use super::load::Load;
use benches::array::{Members, Plan};
use benches::member::Drive;
use block::Op;
use raid::{Consistency, Level};

/// A case.
#[derive(Debug)]
pub struct Case {
    /// Table that the case belongs to.
    pub table: &'static str,
    /// Description of the array.
    pub array: &'static str,
    /// Description of the load.
    pub load_name: &'static str,
    /// The array.
    pub plan: Plan,
    /// The load.
    pub load: Load,
    /// Requests per second within the drives' limits; 0 without limits.
    pub theory: f64,
}

impl Case {
    /// Name of the case.
    pub fn name(&self) -> String {
        let mode = self.plan.consistency.name();
        format!("{}: {}, {mode}: {}, cores: {}", self.table, self.array, self.load_name, self.load.cores)
    }
}

/// A modelled drive, between a hard disk and an SSD. The total speed of 24 drives is well below
/// that of one core, so that the table measures the array's use of its drives, not the machine.
pub const DRIVE: Drive = Drive { iops: 10_000, bandwidth: 200 << 20, latency_ns: 50_000 };
/// Number of drives.
pub const DRIVES: usize = 24;
const MEMBER_BYTES: u64 = 4 << 30;
const MEBIBYTE: u64 = 1 << 20;
/// Requests in flight on drives: too few random requests leave a drive idle at times.
const RANDOM_DEPTH: usize = 2048;
const SEQUENTIAL_DEPTH: usize = 48;

/// The engine on members without cost: RAID 5 of 4+1 with strips of 64 KiB, as the peers are
/// measured.
pub fn engine() -> Vec<Case> {
    let case = |load_name, consistency, op, len, depth, cores| Case {
        table: "engine",
        array: "RAID 5, 4+1",
        load_name,
        plan: Plan {
            level: Level::Raid5,
            count: 5,
            members: Members::Hollow(MEMBER_BYTES, Drive::default()),
            strip_bytes: Some(64 << 10),
            consistency,
        },
        load: Load { op, len, is_sequential: false, depth, cores },
        theory: 0.0,
    };
    let mut cases = Vec::new();
    for cores in [1, 2] {
        cases.push(case("read 4K", Consistency::Ppl, Op::Read, 4096, 32, cores));
        for consistency in [Consistency::Ppl, Consistency::Bitmap] {
            cases.push(case("write 4K", consistency, Op::Write, 4096, 32, cores));
            cases.push(case("write full stripe", consistency, Op::Write, 256 << 10, 8, cores));
        }
    }
    cases
}

/// The engine on modelled drives, in both modes.
pub fn drives() -> Vec<Case> {
    let arrays =
        [("RAID 5, 23+1", Level::Raid5, 23.0 / 24.0), ("RAID 50, 2 x (11+1)", Level::Raid50, 22.0 / 24.0)];
    let mut cases = Vec::new();
    for (array, level, data_share) in arrays {
        for consistency in [Consistency::Ppl, Consistency::Bitmap] {
            let members = Members::Hollow(MEMBER_BYTES, DRIVE);
            let plan = Plan { level, count: DRIVES, members, strip_bytes: None, consistency };
            let mut add = |load_name, op, len, theory| {
                let is_sequential = len == MEBIBYTE;
                let depth = if is_sequential { SEQUENTIAL_DEPTH } else { RANDOM_DEPTH };
                let load = Load { op, len, is_sequential, depth, cores: 1 };
                cases.push(Case { table: "drives", array, load_name, plan, load, theory });
            };
            let iops = DRIVES as f64 * DRIVE.iops as f64;
            let mebibytes = DRIVES as f64 * DRIVE.bandwidth as f64 / MEBIBYTE as f64;
            // Two reads and two writes, plus one write for a log entry.
            let write_ios = if consistency == Consistency::Ppl { 5.0 } else { 4.0 };
            add("read 4K", Op::Read, 4096, iops);
            add("write 4K", Op::Write, 4096, iops / write_ios);
            add("read in sequence", Op::Read, MEBIBYTE, mebibytes);
            add("write in sequence", Op::Write, MEBIBYTE, mebibytes * data_share);
        }
    }
    cases
}
