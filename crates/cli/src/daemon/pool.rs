//! `freestone pool` where a daemon has the pool open.

use super::Session;
use crate::error::Error;
use crate::output::Output;
use api::{Pool, PoolAction, Repaired};
use client::Method;
use serde_json::json;
use std::path::Path;

/// Has the daemon at `socket` read the copies of the table of the pool on `on`.
///
/// # Errors
/// When it refuses, or a copy is damaged.
pub fn check(socket: &Path, on: &str, output: Output) -> Result<(), Error> {
    let session = Session::at(socket, false, false, false)?;
    let pool: Pool = session.client.get(&["pools", on])?;
    for copy in &pool.copies {
        let damage = if copy.is_damaged { ", damaged" } else { "" };
        let fields = json!({
            "offset": copy.offset_bytes,
            "sequence": copy.sequence,
            "volumes": copy.volumes,
            "is_whole": !copy.is_damaged,
            "state": copy.state,
        });
        output.event("copy", format!("{}: copy {}{damage}", pool.backing, copy.state), fields);
    }
    match pool.damaged {
        0 => Ok(()),
        damaged => Err(Error::Runtime(format!(
            "{on}: {damaged} copies of the table are damaged; no volume is lost (freestone pool repair {on} rewrites them)"
        ))),
    }
}

/// Has the daemon at `socket` rewrite damaged copies of the table of the pool on `on`.
///
/// # Errors
/// When it refuses, or the device fails.
pub fn repair(socket: &Path, on: &str, output: Output) -> Result<(), Error> {
    let session = Session::at(socket, false, false, false)?;
    let done: Option<Repaired> =
        session.client.change(Method::POST, &["pools", on, "actions"], &PoolAction::Repair)?;
    if let Some(Repaired { offsets_bytes: offsets, pool }) = done {
        let text = format!("{}: {} copies of the table rewritten", pool.backing, offsets.len());
        output.event("repaired", text, json!({ "device": pool.backing, "copies": offsets.len() }));
    }
    Ok(())
}
