//! The counters of a stats layer, for users and for programs.

use block::Op;
use layers::stats::{OpSnapshot, Stats};
use serde_json::json;
use std::fmt::Write;

/// The current counters of `stats`.
pub fn of_layer(stats: &Stats) -> (String, serde_json::Value) {
    let snapshot = stats.snapshot();
    let mut human = format!("  in flight: {}", snapshot.in_flight());
    let mut json = json!({ "in_flight": snapshot.in_flight() });
    for op in Op::ALL {
        let counts = snapshot.of(op);
        if counts.submitted > 0 {
            let _ = write!(human, "\n  {}", human_op(op.name(), counts));
        }
        json[op.name()] = json_op(counts);
    }
    (human, json)
}

fn human_op(name: &str, counts: &OpSnapshot) -> String {
    let us = |ns: u64| ns as f64 / 1e3;
    let latency = &counts.latency_ns;
    format!(
        "{name}: {} requests, {} bytes, {} errors, latency µs: mean {:.1} p50 {:.1} p99 {:.1} p99.9 {:.1}",
        counts.completed,
        counts.bytes,
        counts.errors,
        us(latency.mean()),
        us(latency.percentile(50.0)),
        us(latency.percentile(99.0)),
        us(latency.percentile(99.9)),
    )
}

fn json_op(counts: &OpSnapshot) -> serde_json::Value {
    let latency = &counts.latency_ns;
    json!({
        "submitted": counts.submitted,
        "requests": counts.completed,
        "errors": counts.errors,
        "bytes": counts.bytes,
        "latency_ns": {
            "mean": latency.mean(),
            "p50": latency.percentile(50.0),
            "p90": latency.percentile(90.0),
            "p99": latency.percentile(99.0),
            "p99.9": latency.percentile(99.9),
        },
    })
}
