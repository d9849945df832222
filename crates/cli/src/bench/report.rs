//! The results of a benchmark, for people and for programs.

use super::plan::Plan;
use super::tally::{OpTally, Tally};
use base::Size;
use block::Op;
use hosting::text::grouped;
use serde_json::{Map, Value, json};
use std::fmt::Write;

/// Percentiles that are shown.
const PERCENTILES: [f64; 5] = [50.0, 90.0, 99.0, 99.9, 99.99];

/// The conditions of a run.
pub struct Subject<'a> {
    /// The device's name.
    pub device: &'a str,
    /// The engine's name.
    pub engine: &'a str,
    /// The requested run.
    pub plan: &'a Plan,
    /// The processors that it ran on.
    pub cpus: &'a [Option<usize>],
    /// Whether the user ended it.
    pub is_interrupted: bool,
}

/// The report for people.
pub fn human(subject: &Subject<'_>, tally: &Tally) -> String {
    let plan = subject.plan;
    let cpus: Vec<String> = subject.cpus.iter().flatten().map(usize::to_string).collect();
    let place = if cpus.is_empty() { String::new() } else { format!(" on processor {}", cpus.join(",")) };
    let mut text = format!(
        "{}: {} {}, depth {}, {} queue(s){place}, {} engine, {}, {:.2} s{}",
        subject.device,
        plan.workload.name(),
        Size(plan.request_bytes),
        plan.depth,
        plan.queues,
        subject.engine,
        if plan.event { "events" } else { "polling" },
        tally.elapsed_ns as f64 / 1e9,
        if subject.is_interrupted { " (interrupted)" } else { "" },
    );
    for op in Op::ALL {
        let counts = &tally.ops[op as usize];
        if counts.count > 0 {
            let _ = write!(text, "\n{}", human_op(op.name(), counts, tally));
        }
    }
    if tally.requests() == 0 {
        text.push_str("\n  no request was completed");
    } else if tally.ops.iter().filter(|op| op.count > 0).count() > 1 {
        let _ = write!(text, "\n{}", rates("all", tally.requests(), tally.bytes(), tally));
    }
    if plan.verify {
        let _ = write!(text, "\n  verified {} blocks: ", grouped(tally.verified));
        match tally.first_mismatch {
            None => text.push_str("all are as they were written"),
            Some(first) => {
                let _ = write!(
                    text,
                    "{} ARE WRONG, the first at byte {}: {:#018x} instead of {:#018x}",
                    grouped(tally.mismatches),
                    first.offset,
                    first.found,
                    first.expected
                );
            }
        }
    }
    if let Some(first) = tally.first_failure {
        let failures = grouped(tally.failures);
        let _ = write!(
            text,
            "\n  {failures} FAILED, the first: {} at byte {}: {}",
            first.op.name(),
            first.offset,
            first.error
        );
    }
    text
}

fn rates(name: &str, count: u64, bytes: u64, tally: &Tally) -> String {
    let rate = grouped(tally.per_second(count).round() as u64);
    let bandwidth = Size(tally.per_second(bytes).round() as u64);
    format!("  {name:<13}{rate:>12} IOPS  {bandwidth:>12}/s  {:>14} requests", grouped(count))
}

fn human_op(name: &str, op: &OpTally, tally: &Tally) -> String {
    let mut text = rates(name, op.count, op.bytes, tally);
    let latency = &op.latency;
    if latency.count() > 0 {
        let us = |ns: u64| format!("{:.2}", ns as f64 / 1e3);
        let _ = write!(text, "\n    latency µs: min {}  mean {:.2}", us(latency.min()), latency.mean() / 1e3);
        for percent in PERCENTILES {
            let _ = write!(text, "  p{percent} {}", us(latency.percentile(percent)));
        }
        let _ = write!(text, "  max {}", us(latency.max()));
    }
    text
}

/// The report for programs.
pub fn json(subject: &Subject<'_>, tally: &Tally) -> Value {
    let plan = subject.plan;
    let mut ops = Map::new();
    for op in Op::ALL {
        let counts = &tally.ops[op as usize];
        if counts.count > 0 {
            ops.insert(op.name().into(), json_op(counts, tally));
        }
    }
    let mut report = json!({
        "device": subject.device,
        "engine": subject.engine,
        "workload": plan.workload.name(),
        "request_bytes": plan.request_bytes,
        "depth": plan.depth,
        "queues": plan.queues,
        "cores": subject.cpus,
        "polling": !plan.event,
        "seconds": tally.elapsed_ns as f64 / 1e9,
        "interrupted": subject.is_interrupted,
        "requests": tally.requests(),
        "iops": tally.per_second(tally.requests()),
        "bytes_per_second": tally.per_second(tally.bytes()),
        "ops": ops,
        "failed": tally.failures,
    });
    if let Some(first) = tally.first_failure {
        report["first_failure"] =
            json!({ "op": first.op.name(), "offset": first.offset, "error": first.error.to_string() });
    }
    if plan.verify {
        report["verified"] = tally.verified.into();
        report["mismatches"] = tally.mismatches.into();
        if let Some(first) = tally.first_mismatch {
            report["first_mismatch"] =
                json!({ "offset": first.offset, "expected": first.expected, "found": first.found });
        }
    }
    report
}

fn json_op(op: &OpTally, tally: &Tally) -> Value {
    let mut value = json!({
        "requests": op.count,
        "bytes": op.bytes,
        "iops": tally.per_second(op.count),
        "bytes_per_second": tally.per_second(op.bytes),
    });
    let latency = &op.latency;
    if latency.count() > 0 {
        let mut ns = Map::new();
        ns.insert("min".into(), latency.min().into());
        ns.insert("mean".into(), latency.mean().into());
        for percent in PERCENTILES {
            ns.insert(format!("p{percent}"), latency.percentile(percent).into());
        }
        ns.insert("max".into(), latency.max().into());
        value["latency_ns"] = Value::Object(ns);
    }
    value
}
