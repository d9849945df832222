//! Metrics in the text format of Prometheus (exposition format 0.0.4). All begin with `freestone_`;
//! `docs/metrics.md` lists them.

use crate::engine::Engine;
use crate::engine::samples::{MemberSnapshot, VolumeSnapshot};
use api::{ArrayState, Drive, DriveHealth, ExportState, MemberState};
use block::Op;
use exports::Moved;
use layers::qos::Waited;
use layers::stats::{Histogram, OpSnapshot, Snapshot};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Upper ends of the buckets of latency histograms, in microseconds.
const BUCKETS_US: [u64; 16] = [
    10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000,
];

/// Most members with metrics of their requests, and most drives: a page of 1024 has about 8 MB.
const MAX_MEMBERS: usize = 1024;

/// Most NVMe hosts with metrics, of all exports together.
const MAX_NVME_HOSTS: usize = 1024;

/// Everything that is measured now.
pub fn text(engine: &Engine) -> String {
    let mut page = Page::default();
    system(&mut page, engine);
    health(&mut page, engine);
    volumes(&mut page, engine);
    exports(&mut page, engine);
    nvme_hosts(&mut page, engine.nvme_hosts());
    portals(&mut page, engine);
    arrays(&mut page, engine);
    members(&mut page, engine.member_snapshots());
    drives(&mut page, &engine.drives());
    jobs(&mut page, engine);
    history(&mut page, engine);
    page.0
}

/// Metrics so far.
#[derive(Default)]
struct Page(String);

impl Page {
    fn begin(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP freestone_{name} {help}\n# TYPE freestone_{name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl std::fmt::Display) {
        let _ = write!(self.0, "freestone_{name}");
        for (place, (label, text)) in labels.iter().enumerate() {
            let text = text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let _ = write!(self.0, "{}{label}=\"{text}\"", if place == 0 { '{' } else { ',' });
        }
        let end = if labels.is_empty() { "" } else { "}" };
        let _ = writeln!(self.0, "{end} {value}");
    }

    fn histogram(&mut self, name: &str, labels: &[(&str, &str)], histogram: &Histogram) {
        let bounds = BUCKETS_US.map(|us| us * 1000);
        let mut counts = [0; BUCKETS_US.len()];
        for (value, count) in histogram.iter() {
            if let Some(place) = bounds.iter().position(|bound| value <= *bound) {
                counts[place] += count;
            }
        }
        let mut below = 0;
        for (us, count) in BUCKETS_US.into_iter().zip(counts) {
            below += count;
            let bound = (us as f64 / 1e6).to_string();
            self.sample(&format!("{name}_bucket"), &[labels, &[("le", &*bound)]].concat(), below);
        }
        self.sample(&format!("{name}_bucket"), &[labels, &[("le", "+Inf")]].concat(), histogram.count());
        let sum = histogram.mean() as f64 * histogram.count() as f64 / 1e9;
        self.sample(&format!("{name}_sum"), labels, sum);
        self.sample(&format!("{name}_count"), labels, histogram.count());
    }
}

fn system(page: &mut Page, engine: &Engine) {
    let system = engine.system();
    page.begin("build_info", "gauge", "The daemon's version.");
    page.sample("build_info", &[("version", &system.version)], 1);
    page.begin("start_time_seconds", "gauge", "When the daemon was started, in seconds since 1970.");
    page.sample("start_time_seconds", &[], system.started_ns as f64 / 1e9);
    page.begin("state_generation", "counter", "Changes of the daemon's state.");
    page.sample("state_generation", &[], system.generation);
    page.begin(
        "state_write_failures_total",
        "counter",
        "Changes that failed because the state directory did not take them.",
    );
    page.sample("state_write_failures_total", &[], engine.state_write_failures());
    page.begin("core_cpu_seconds_total", "counter", "Processor time of each core: serving and polling.");
    for (core, seconds) in core_seconds() {
        page.sample("core_cpu_seconds_total", &[("core", &core)], seconds);
    }
    page.begin(
        "core_poll_seconds_total",
        "counter",
        "Time that each core has polled for work and found none.",
    );
    for (core, ns) in engine.polled_ns().into_iter().enumerate() {
        page.sample("core_poll_seconds_total", &[("core", &core.to_string())], ns as f64 / 1e9);
    }
}

fn history(page: &mut Page, engine: &Engine) {
    let size = engine.history_size();
    page.begin("history_bytes", "gauge", "Memory of the points of the history.");
    page.sample("history_bytes", &[], size.bytes);
    page.begin("history_left_out", "gauge", "Objects without a history, since there are too many.");
    page.sample("history_left_out", &[], size.left_out);
}

fn health(page: &mut Page, engine: &Engine) {
    page.begin("health", "gauge", "A problem of an object; absent without one.");
    for problem in engine.health() {
        let labels = [
            ("code", problem.code.name()),
            ("severity", problem.severity.name()),
            ("kind", &problem.kind),
            ("object", &problem.object),
        ];
        page.sample("health", &labels, 1);
    }
}

/// Processor time of the threads called `core-N`, which the kernel counts.
fn core_seconds() -> Vec<(String, f64)> {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return Vec::new() };
    let of_task = |task: std::fs::DirEntry| {
        let name = std::fs::read_to_string(task.path().join("comm")).ok()?;
        let core = name.trim().strip_prefix("core-")?.to_owned();
        let times = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        let on_cpu_ns: u64 = times.split(' ').next()?.parse().ok()?;
        Some((core, on_cpu_ns as f64 / 1e9))
    };
    let mut cores: Vec<(String, f64)> = tasks.filter_map(|task| of_task(task.ok()?)).collect();
    cores.sort_by(|one, other| one.0.cmp(&other.0));
    cores
}

fn volumes(page: &mut Page, engine: &Engine) {
    page.begin("volume_size_bytes", "gauge", "Size of a volume.");
    for volume in engine.volumes() {
        page.sample(
            "volume_size_bytes",
            &[("volume", &volume.name), ("backing", &volume.backing)],
            volume.size_bytes,
        );
    }
    page.begin(
        "pool_rewritten_copies_total",
        "counter",
        "Damaged copies of a pool's table that were rewritten.",
    );
    for (backing, copies) in engine.rewritten_copies() {
        page.sample("pool_rewritten_copies_total", &[("backing", &backing)], copies);
    }
    let snapshots = engine.volume_snapshots();
    throttled(page, &snapshots);
    let counted = |VolumeSnapshot { volume, snapshot, .. }| Counted {
        labels: vec![("volume", volume)],
        every: 1,
        snapshot,
    };
    let snapshots: Vec<Counted> = snapshots.into_iter().map(counted).collect();
    requests(page, "volume", &snapshots, "From submission to completion, waiting for limits included.");
}

/// The waits of volumes for their limits and for those of their groups.
fn throttled(page: &mut Page, volumes: &[VolumeSnapshot]) {
    let mut each = |name: &str, help: &str, value: &dyn Fn(&Waited) -> f64| {
        page.begin(name, "counter", help);
        for VolumeSnapshot { volume, own, group, .. } in volumes {
            for (limit, waited) in [("volume", own), ("group", group)] {
                page.sample(name, &[("volume", volume), ("limit", limit)], value(waited));
            }
        }
    };
    let help = "Time that requests have waited for limits, added up.";
    each("volume_throttled_seconds_total", help, &|waited| waited.ns as f64 / 1e9);
    let help = "Requests that have waited for limits.";
    each("volume_throttled_requests_total", help, &|waited| waited.requests as f64);
}

/// Counters of requests to an object.
struct Counted {
    labels: Vec<(&'static str, String)>,
    /// One request in this many is timed, and its error counted.
    every: u32,
    snapshot: Snapshot,
}

impl Counted {
    /// The labels of the object, and more.
    fn labels<'a>(&'a self, more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
        self.labels.iter().map(|(name, text)| (*name, &**text)).chain(more.iter().copied()).collect()
    }
}

/// The metrics of requests to objects of a kind. Errors and requests in flight of which only some
/// are counted are estimates.
fn requests(page: &mut Page, kind: &str, objects: &[Counted], latency: &str) {
    let mut each = |name: &str, help: &str, value: &dyn Fn(&OpSnapshot, u64) -> u64| {
        let name = format!("{kind}_{name}");
        page.begin(&name, "counter", help);
        for object in objects {
            for op in Op::ALL {
                let value = value(object.snapshot.of(op), object.every.into());
                page.sample(&name, &object.labels(&[("op", op.name())]), value);
            }
        }
    };
    each("requests_total", "Requests that have ended.", &|op, _| op.completed);
    each("bytes_total", "Bytes of requests that succeeded.", &|op, _| op.bytes);
    each("errors_total", "Requests that ended with an error.", &|op, every| op.errors * every);
    let name = format!("{kind}_in_flight");
    page.begin(&name, "gauge", "Requests in flight.");
    for object in objects {
        let in_flight = object.snapshot.in_flight() * u64::from(object.every);
        page.sample(&name, &object.labels(&[]), in_flight);
    }
    let name = format!("{kind}_latency_seconds");
    page.begin(&name, "histogram", latency);
    for object in objects {
        for op in Op::ALL {
            let histogram = &object.snapshot.of(op).latency_ns;
            if histogram.count() > 0 {
                page.histogram(&name, &object.labels(&[("op", op.name())]), histogram);
            }
        }
    }
}

/// The members of arrays, in order of array and slot.
fn members(page: &mut Page, mut members: Vec<MemberSnapshot>) {
    let left_out = members.len().saturating_sub(MAX_MEMBERS);
    members.truncate(MAX_MEMBERS);
    let counted = |member: MemberSnapshot| {
        let MemberSnapshot { array, slot, device, every, snapshot } = member;
        let labels = vec![("array", array), ("slot", slot.to_string()), ("device", device)];
        Counted { labels, every, snapshot }
    };
    let members: Vec<Counted> = members.into_iter().map(counted).collect();
    let latency = "From submission to completion, of one request in 32, which is timed.";
    requests(page, "member", &members, latency);
    page.begin("members_left_out", "gauge", "Members whose requests this page leaves out.");
    page.sample("members_left_out", &[], left_out);
}

/// The drives of devices, members and spares.
fn drives(page: &mut Page, drives: &BTreeMap<String, Drive>) {
    let left_out = drives.len().saturating_sub(MAX_MEMBERS);
    let drives = || drives.iter().take(MAX_MEMBERS);
    page.begin("device_info", "gauge", "The drive of a device, member or spare.");
    for (device, drive) in drives() {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let (model, serial, firmware) = (text(&drive.model), text(&drive.serial), text(&drive.firmware));
        if [&model, &serial, &firmware].iter().any(|text| !text.is_empty()) {
            let labels =
                [("device", &**device), ("model", &model), ("serial", &serial), ("firmware", &firmware)];
            page.sample("device_info", &labels, 1);
        }
    }
    let mut each = |name: &str, kind: &str, help: &str, value: &dyn Fn(&Drive) -> Option<f64>| {
        page.begin(name, kind, help);
        for (device, drive) in drives() {
            value(drive).iter().for_each(|value| page.sample(name, &[("device", device)], value));
        }
    };
    let help = "Temperature of a drive.";
    each("device_temperature_celsius", "gauge", help, &|drive| Some(drive.temperature_celsius?.into()));
    let of_health = |value: fn(&DriveHealth) -> f64| move |drive: &Drive| drive.health.as_ref().map(value);
    let help = "Part of a drive's endurance that is used; may be above 1.";
    each("device_wear_ratio", "gauge", help, &of_health(|health| f64::from(health.wear_percent) / 100.0));
    let help = "Spare capacity of a drive that is left.";
    each("device_spare_ratio", "gauge", help, &of_health(|health| f64::from(health.spare_percent) / 100.0));
    let help = "Spare capacity below which a drive warns.";
    let threshold = |health: &DriveHealth| f64::from(health.spare_threshold_percent) / 100.0;
    each("device_spare_threshold_ratio", "gauge", help, &of_health(threshold));
    let help = "Errors of media and data integrity over the life of a drive.";
    each("device_media_errors_total", "counter", help, &of_health(|health| health.media_errors as f64));
    let help = "Critical warnings of a drive, a bit for each.";
    let warnings =
        |health: &DriveHealth| health.warnings.iter().map(|warning| f64::from(warning.bit())).sum();
    each("device_critical_warning", "gauge", help, &of_health(warnings));
    page.begin("devices_left_out", "gauge", "Drives that this page leaves out.");
    page.sample("devices_left_out", &[], left_out);
}

fn exports(page: &mut Page, engine: &Engine) {
    let exports = engine.exports();
    page.begin("export_up", "gauge", "Whether an export is served.");
    for export in &exports {
        let is_up = u8::from(export.state == ExportState::Active);
        page.sample("export_up", &[("export", &export.name), ("kind", &export.kind)], is_up);
    }
    let mut each = |name: &str, kind: &str, help: &str, value: &dyn Fn(&api::Traffic) -> u64| {
        page.begin(name, kind, help);
        for export in &exports {
            if let Some(traffic) = &export.traffic {
                page.sample(name, &[("export", &export.name), ("kind", &export.kind)], value(traffic));
            }
        }
    };
    each("export_clients", "gauge", "Clients that are connected.", &|traffic| traffic.clients);
    each("export_connections_total", "counter", "Clients that have connected.", &|traffic| {
        traffic.connections
    });
    each("export_reads_total", "counter", "Reads that have ended.", &|traffic| traffic.reads);
    each("export_writes_total", "counter", "Writes that have ended.", &|traffic| traffic.writes);
    each("export_read_bytes_total", "counter", "Bytes that clients have read.", &|traffic| {
        traffic.read_bytes
    });
    each("export_written_bytes_total", "counter", "Bytes that clients have written.", &|traffic| {
        traffic.written_bytes
    });
    each("export_errors_total", "counter", "Requests that were answered with an error.", &|traffic| {
        traffic.errors
    });
}

/// The bytes of NVMe hosts, by export and NQN.
fn nvme_hosts(page: &mut Page, exports: Vec<(String, BTreeMap<String, Moved>)>) {
    let hosts = |(export, hosts): (String, BTreeMap<String, Moved>)| {
        hosts.into_iter().map(move |(host, moved)| (export.clone(), host, moved))
    };
    let mut hosts: Vec<(String, String, Moved)> = exports.into_iter().flat_map(hosts).collect();
    let left_out = hosts.len().saturating_sub(MAX_NVME_HOSTS);
    hosts.truncate(MAX_NVME_HOSTS);
    let mut each = |name: &str, help: &str, value: fn(&Moved) -> u64| {
        page.begin(name, "counter", help);
        for (export, host, moved) in &hosts {
            page.sample(name, &[("export", export), ("host", host)], value(moved));
        }
    };
    each("nvme_host_read_bytes_total", "Bytes that an NVMe host has read.", |moved| moved.read);
    each("nvme_host_written_bytes_total", "Bytes that an NVMe host has written.", |moved| moved.written);
    page.begin("nvme_hosts_left_out", "gauge", "NVMe hosts that this page leaves out.");
    page.sample("nvme_hosts_left_out", &[], left_out);
}

fn portals(page: &mut Page, engine: &Engine) {
    let portals = engine.portals();
    let mut each = |name: &str, help: &str, value: &dyn Fn(&api::Portal) -> u64| {
        page.begin(name, "gauge", help);
        for portal in &portals {
            page.sample(name, &[("portal", &portal.name)], value(portal));
        }
    };
    each("portal_up", "Whether a portal listens.", &|portal| u64::from(portal.error.is_none()));
    each("portal_exports", "Exports that use a portal.", &|portal| portal.exports.len() as u64);
    each("portal_connections_limit", "Most connections of each address of a portal.", &|portal| {
        portal.clients.into()
    });
    each("portal_discovery_clients", "Discovery clients that are connected.", &|portal| {
        portal.discovery_clients
    });
    let name = "portal_connections";
    page.begin(name, "gauge", "Connections of clients at an address of a portal.");
    for portal in &portals {
        for (address, connections) in portal.addresses.iter().zip(&portal.connections) {
            page.sample(name, &[("portal", &portal.name), ("address", address)], connections);
        }
    }
}

fn arrays(page: &mut Page, engine: &Engine) {
    let arrays = engine.arrays();
    page.begin("array_info", "gauge", "An array's level and consistency.");
    for array in &arrays {
        let level = array.level.map_or("", api::Level::name);
        let consistency = array.consistency.map_or("", api::Consistency::name);
        let labels = [("array", &*array.name), ("level", level), ("consistency", consistency)];
        page.sample("array_info", &labels, 1);
    }
    page.begin("array_state", "gauge", "1 for the state that an array is in.");
    for array in &arrays {
        for state in ArrayState::ALL {
            let is_it = u8::from(array.state == *state);
            page.sample("array_state", &[("array", &array.name), ("state", state.name())], is_it);
        }
    }
    page.begin("array_members", "gauge", "Members of an array by state.");
    for array in &arrays {
        for state in MemberState::ALL {
            let count = array.members.iter().filter(|member| member.state == *state).count();
            page.sample("array_members", &[("array", &array.name), ("state", state.name())], count);
        }
    }
    let help = "Members that may still fail, whichever they are, without loss of data.";
    page.begin("array_redundancy_left", "gauge", help);
    for array in &arrays {
        let left = array.redundancy_left;
        left.iter().for_each(|left| page.sample("array_redundancy_left", &[("array", &array.name)], left));
    }
    page.begin("array_spares", "gauge", "Devices that wait for a member to fail.");
    arrays
        .iter()
        .for_each(|array| page.sample("array_spares", &[("array", &array.name)], array.spares.len()));
    page.begin("array_capacity_bytes", "gauge", "Bytes that an array holds.");
    arrays.iter().for_each(|array| {
        page.sample("array_capacity_bytes", &[("array", &array.name)], array.capacity_bytes)
    });
    page.begin("array_free_bytes", "gauge", "Bytes that new volumes can have.");
    for array in &arrays {
        array
            .free_bytes
            .iter()
            .for_each(|free| page.sample("array_free_bytes", &[("array", &array.name)], free));
    }
    page.begin("pool_full_in_seconds", "gauge", "Estimated time until a pool is full.");
    let devices = engine.devices().into_iter().map(|device| (device.name, device.full_in_s));
    for (backing, full_in_s) in
        arrays.iter().map(|array| (array.name.clone(), array.full_in_s)).chain(devices)
    {
        full_in_s.iter().for_each(|left| page.sample("pool_full_in_seconds", &[("backing", &backing)], left));
    }
    page.begin("array_mismatched_rows", "gauge", "Rows whose parity differed in the last scrub.");
    for array in &arrays {
        let rows = array.scrub.as_ref().map(|scrub| scrub.mismatched_rows);
        rows.iter().for_each(|rows| page.sample("array_mismatched_rows", &[("array", &array.name)], rows));
    }
    let help = "Rows whose strips contradicted each other when they were compared.";
    page.begin("array_contradictions_total", "counter", help);
    for array in &arrays {
        page.sample("array_contradictions_total", &[("array", &array.name)], array.contradictions);
    }
    let mut moment = |name: &str, help: &str, at_ns: &dyn Fn(&api::Array) -> Option<u64>| {
        page.begin(name, "gauge", help);
        for array in &arrays {
            let at_ns = at_ns(array);
            at_ns.iter().for_each(|ns| page.sample(name, &[("array", &array.name)], *ns as f64 / 1e9));
        }
    };
    let help = "When the last complete scrub ended, in seconds since 1970.";
    moment("array_last_scrub_timestamp_seconds", help, &|array| array.last_scrub_ns);
    let help = "When the next scheduled scrub is due, in seconds since 1970.";
    moment("array_next_scrub_timestamp_seconds", help, &|array| array.next_scrub_ns);
    page.begin("array_member_read_errors_total", "counter", "Corrected read errors of a member.");
    for array in &arrays {
        for member in &array.members {
            let labels = [("array", &*array.name), ("slot", &*member.slot.to_string())];
            page.sample("array_member_read_errors_total", &labels, member.read_errors);
        }
    }
}

fn jobs(page: &mut Page, engine: &Engine) {
    let jobs = engine.jobs();
    let mut each = |name: &str, help: &str, value: &dyn Fn(&api::Job) -> Option<u64>| {
        page.begin(name, "gauge", help);
        for job in &jobs {
            let labels = [("array", &*job.backing), ("kind", job.kind.name()), ("job", &job.id)];
            value(job).iter().for_each(|value| page.sample(name, &labels, value));
        }
    };
    each("job_done_bytes", "Bytes of a member that a job has done.", &|job| Some(job.done_bytes));
    each("job_total_bytes", "Bytes of a member that a job has to do.", &|job| Some(job.total_bytes));
    each("job_rate_bytes", "Bytes of a member that a job does in a second.", &|job| Some(job.bytes_per_s));
    each("job_eta_seconds", "Estimated time to the end of a job at its recent rate.", &|job| job.eta_s);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_quoted_and_buckets_add_up() {
        let mut page = Page::default();
        page.sample("x", &[("a", "q\"\\\n")], 1);
        assert_eq!(page.0, "freestone_x{a=\"q\\\"\\\\\\n\"} 1\n");
        let mut histogram = Histogram::default();
        [5_000, 15_000, 15_000, 3_000_000_000].iter().for_each(|ns| histogram.record(*ns));
        let mut page = Page::default();
        page.histogram("y", &[("v", "a")], &histogram);
        let value = |le: &str| {
            let line = page.0.lines().find(|line| line.contains(&format!("le=\"{le}\""))).unwrap();
            line.rsplit(' ').next().unwrap().to_owned()
        };
        assert_eq!([value("0.00001"), value("0.00002"), value("1"), value("+Inf")], ["1", "3", "3", "4"]);
        assert!(page.0.ends_with("freestone_y_count{v=\"a\"} 4\n"));
    }

    #[test]
    fn nvme_hosts_beyond_the_limit_are_left_out_and_counted() {
        let moved = Moved { read: 512, written: 4096 };
        let hosts = |hosts: usize| (0..hosts).map(|host| (format!("nqn.{host:04}"), moved)).collect();
        let mut page = Page::default();
        nvme_hosts(&mut page, vec![("e1".into(), hosts(MAX_NVME_HOSTS)), ("e2".into(), hosts(2))]);
        for line in [
            "freestone_nvme_host_read_bytes_total{export=\"e1\",host=\"nqn.0000\"} 512",
            "freestone_nvme_host_written_bytes_total{export=\"e1\",host=\"nqn.1023\"} 4096",
            "freestone_nvme_hosts_left_out 2",
        ] {
            assert!(page.0.lines().any(|it| it == line), "{line}");
        }
        assert!(!page.0.contains("e2"));
    }

    #[test]
    fn a_drive_has_the_metrics_that_are_known() {
        let some = |text: &str| Some(text.to_owned());
        let health = DriveHealth {
            wear_percent: 93,
            spare_percent: 100,
            spare_threshold_percent: 10,
            media_errors: 7,
            warnings: api::DriveWarning::of_bits(0b101),
        };
        let known = Drive {
            model: some("Fast \"2T\""),
            serial: some("S1"),
            temperature_celsius: Some(-3),
            health: Some(health),
            ..Drive::default()
        };
        let known = [("a".to_owned(), known), ("b".to_owned(), Drive::unknown("a file"))];
        let mut page = Page::default();
        drives(&mut page, &known.into());
        let samples: Vec<&str> = page.0.lines().filter(|line| !line.starts_with('#')).collect();
        let want = [
            r#"freestone_device_info{device="a",model="Fast \"2T\"",serial="S1",firmware=""} 1"#,
            r#"freestone_device_temperature_celsius{device="a"} -3"#,
            r#"freestone_device_wear_ratio{device="a"} 0.93"#,
            r#"freestone_device_spare_ratio{device="a"} 1"#,
            r#"freestone_device_spare_threshold_ratio{device="a"} 0.1"#,
            r#"freestone_device_media_errors_total{device="a"} 7"#,
            r#"freestone_device_critical_warning{device="a"} 5"#,
            "freestone_devices_left_out 0",
        ];
        assert_eq!(samples, want);
    }

    #[test]
    fn members_beyond_the_limit_are_left_out_and_counted() {
        let member = |slot| MemberSnapshot {
            array: "data".into(),
            slot,
            device: format!("/dev/sd{slot}"),
            every: 32,
            snapshot: Snapshot::default(),
        };
        let mut page = Page::default();
        members(&mut page, (0..MAX_MEMBERS + 2).map(member).collect());
        let last = format!(
            "freestone_member_in_flight{{array=\"data\",slot=\"{0}\",device=\"/dev/sd{0}\"}} 0",
            MAX_MEMBERS - 1
        );
        assert!(page.0.lines().any(|line| line == last), "{last}");
        assert!(!page.0.contains(&format!("slot=\"{MAX_MEMBERS}\"")));
        assert!(page.0.ends_with("freestone_members_left_out 2\n"));
    }
}
