//! Counters, for plots and metrics.

use super::Engine;
use api::{Sample, Samples};
use block::Device;
use layers::qos::Waited;
use layers::stats::{Snapshot, Stats};
use raid::array::SlotStatus;
use stack::array::wall_ns;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Of so many requests of a member one is timed: that costs a member's request a nanosecond or two.
const EVERY: u32 = 32;

impl Engine {
    /// The counters at present.
    pub fn samples(&self) -> Samples {
        let volumes = self.volume_snapshots().into_iter();
        let volumes = volumes.map(|VolumeSnapshot { volume, snapshot, own, group }| {
            let waits = Sample {
                throttled_requests: own.requests + group.requests,
                throttled_ns: own.ns + group.ns,
                group_throttled_ns: group.ns,
                ..sample(&snapshot, 1)
            };
            (volume, waits)
        });
        let members = self.member_snapshots().into_iter();
        let members = members.map(|member| {
            (format!("{}/{}", member.array, member.slot), sample(&member.snapshot, member.every))
        });
        Samples { at_ns: wall_ns(), volumes: volumes.collect(), members: members.collect() }
    }

    /// The counters of every member of a running array, by array and slot.
    pub fn member_snapshots(&self) -> Vec<MemberSnapshot> {
        let live = self.live();
        let members = live.arrays.iter().flat_map(|(array, running)| {
            let of_slot = move |status: SlotStatus| {
                let (array, device) = (array.clone(), status.device?);
                let (every, snapshot) = self.counted.snapshot(&device)?;
                Some(MemberSnapshot { array, slot: status.slot, device, every, snapshot })
            };
            running.array().slots().into_iter().filter_map(of_slot)
        });
        members.collect()
    }

    /// The counters of every volume that an export serves.
    pub fn volume_snapshots(&self) -> Vec<VolumeSnapshot> {
        let live = self.live();
        let open = |info: volume::Info| {
            let open = live.volumes.get(&info.uuid)?.upgrade()?;
            let (volume, snapshot) = (info.name.to_string(), open.device.snapshot());
            let waits = &open.limits.waits;
            Some(VolumeSnapshot { volume, snapshot, own: waits.for_device(), group: waits.for_group() })
        };
        live.all_volumes().filter_map(|(_, info)| open(info)).collect()
    }
}

/// The counters of a volume.
pub struct VolumeSnapshot {
    /// The volume's name.
    pub volume: String,
    /// The counters.
    pub snapshot: Snapshot,
    /// Waits for its own limits.
    pub own: Waited,
    /// Waits for the limits of its group.
    pub group: Waited,
}

/// The counters of a member.
pub struct MemberSnapshot {
    /// The array.
    pub array: String,
    /// The slot.
    pub slot: usize,
    /// The name of its device.
    pub device: String,
    /// One request in this many is timed, and its error counted.
    pub every: u32,
    /// The counters.
    pub snapshot: Snapshot,
}

/// Devices that are counted as members, by name.
#[derive(Default)]
pub struct Counted(Mutex<HashMap<String, Weak<Stats>>>);

impl Counted {
    /// A device whose requests are counted from now on.
    pub fn count(&self, device: Arc<dyn Device>) -> Arc<dyn Device> {
        let stats = Arc::new(Stats::sampled(device, EVERY));
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|_, stats| stats.strong_count() > 0);
        known.insert(stats.name().to_owned(), Arc::downgrade(&stats));
        stats
    }

    /// The counters of a device, and the number of requests of which one was timed.
    fn snapshot(&self, name: &str) -> Option<(u32, Snapshot)> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let stats = known.get(name)?.upgrade()?;
        drop(known);
        Some((stats.every(), stats.snapshot()))
    }
}

/// Counters of a device of which one request in `every` is timed.
pub(super) fn sample(snapshot: &Snapshot, every: u32) -> Sample {
    use block::Op;
    let every = u64::from(every);
    let mut sample = Sample { in_flight: snapshot.in_flight() * every, ..Sample::default() };
    for op in Op::ALL {
        let counts = snapshot.of(op);
        sample.errors += counts.errors * every;
        let timed = counts.latency_ns.count();
        let ns = counts.latency_ns.mean() * timed;
        match op {
            Op::Read => {
                sample.reads += counts.completed;
                sample.read_bytes += counts.bytes;
                sample.read_sum_ns += ns;
                sample.reads_timed += timed;
            }
            Op::Write | Op::WriteZeroes | Op::Discard => {
                sample.writes += counts.completed;
                sample.written_bytes += counts.bytes;
                sample.write_sum_ns += ns;
                sample.writes_timed += timed;
            }
            Op::Flush => {}
        }
    }
    sample
}
