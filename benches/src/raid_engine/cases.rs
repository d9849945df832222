//! The measured cases: the engine alone, its share of the drives' speed, and the arrays that
//! SPDK has, too.

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
/// measured, and a mirror. Stable memory is that of network exports, other memory that of guests.
pub fn engine() -> Vec<Case> {
    let plan = |level, count, consistency| Plan {
        level,
        count,
        members: Members::Hollow(MEMBER_BYTES, Drive::default()),
        strip_bytes: Some(64 << 10),
        consistency,
    };
    let load = |op, len, is_stable, cores| {
        let depth = if len > 4096 { 8 } else { 32 };
        Load { op, len, is_sequential: false, is_stable, depth, cores }
    };
    let mut cases = Vec::new();
    for cores in [1, 2] {
        let mut add = |array, load_name, plan, load| {
            cases.push(Case { table: "engine", array, load_name, plan, load, theory: 0.0 });
        };
        let raid_5 = "RAID 5, 4+1";
        let read = load(Op::Read, 4096, false, cores);
        add(raid_5, "read 4K", plan(Level::Raid5, 5, Consistency::Ppl), read);
        for consistency in [Consistency::Ppl, Consistency::Bitmap] {
            let plan = plan(Level::Raid5, 5, consistency);
            add(raid_5, "write 4K", plan, load(Op::Write, 4096, false, cores));
            add(raid_5, "write full stripe", plan, load(Op::Write, 256 << 10, false, cores));
            add(raid_5, "write full stripe, stable memory", plan, load(Op::Write, 256 << 10, true, cores));
        }
        let (raid_1, plan) = ("RAID 1, 2 copies", plan(Level::Raid1, 2, Consistency::Bitmap));
        add(raid_1, "write 4K", plan, load(Op::Write, 4096, false, cores));
        add(raid_1, "write 4K, stable memory", plan, load(Op::Write, 4096, true, cores));
        add(raid_1, "write 128K", plan, load(Op::Write, 128 << 10, false, cores));
        add(raid_1, "write 128K, stable memory", plan, load(Op::Write, 128 << 10, true, cores));
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
                let load = Load { op, len, is_sequential, is_stable: false, depth, cores: 1 };
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

/// Bytes of a member in memory: two of them exceed any cache.
const MEMORY_BYTES: u64 = 128 << 20;

/// Arrays that SPDK has, too, on members without cost and in memory, on one core. SPDK keeps no
/// write-intent bitmap and writes whole stripes of RAID 5 only.
pub fn peer() -> Vec<Case> {
    let members = [
        ("null members", Members::Hollow(MEMBER_BYTES, Drive::default())),
        ("memory members", Members::Memory(MEMORY_BYTES)),
    ];
    let arrays = [
        ("RAID 0, 4 members", Level::Raid0, 4, Consistency::None),
        ("RAID 1, 2 copies", Level::Raid1, 2, Consistency::Bitmap),
        ("RAID 5, 4+1", Level::Raid5, 5, Consistency::Bitmap),
    ];
    let mut cases = Vec::new();
    for (table, members) in members {
        for (array, level, count, consistency) in arrays {
            let plan = Plan { level, count, members, strip_bytes: Some(64 << 10), consistency };
            let mut add = |load_name, op, len| {
                let depth = if len > 4096 { 8 } else { 32 };
                let load = Load { op, len, is_sequential: false, is_stable: true, depth, cores: 1 };
                cases.push(Case { table, array, load_name, plan, load, theory: 0.0 });
            };
            add("read 4K", Op::Read, 4096);
            add("read 128K", Op::Read, 128 << 10);
            if level == Level::Raid5 {
                add("write full stripe", Op::Write, 256 << 10);
            } else {
                add("write 4K", Op::Write, 4096);
                add("write 128K", Op::Write, 128 << 10);
            }
        }
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_peer_case_selects_no_other_case() {
        let names: Vec<String> = peer().iter().map(Case::name).collect();
        for name in &names {
            assert_eq!(names.iter().filter(|other| other.contains(name.as_str())).count(), 1, "{name}");
        }
    }

    #[test]
    fn peer_cases_write_whole_stripes_of_raid_5() {
        let writes: Vec<Case> = peer()
            .into_iter()
            .filter(|case| case.plan.level == Level::Raid5 && case.load.op == Op::Write)
            .collect();
        assert_eq!(writes.len(), 2);
        for Case { plan, load, .. } in writes {
            let strip_bytes = u64::from(plan.strip_bytes.expect("it is set"));
            assert_eq!(load.len, strip_bytes * (plan.count as u64 - 1));
        }
    }
}
