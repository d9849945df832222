//! `freestone array check`.

use super::assemble::recover;
use super::members::select;
use crate::array::args::CheckArgs;
use crate::error::Error;
use crate::output::Output;
use raid::admin::check::{Checked, check, pending};
use raid::admin::open::{Selection, Wanted};
use raid::admin::verify::{Difference, Findings, Observer, Outcome};
use raid::log::PendingWrite;
use serde_json::{Value, json};
use std::io::{IsTerminal, Write};
use std::rc::Rc;

/// Most differences that are listed individually.
const MAX_TOLD: usize = 1000;

/// Verifies an array that does not run, and repairs it when told.
///
/// # Errors
/// When something is wrong and was not repaired, or the check cannot be done.
pub fn run(args: &CheckArgs, output: Output) -> Result<(), Error> {
    let wanted = Wanted { array: args.members.name.clone(), run: true, ..Wanted::default() };
    let mut selection = select(&args.members, &wanted)?;
    super::say_warnings(&selection.warnings, output);
    let mut was_recovered = false;
    if !selection.assembly.table.is_clean {
        selection = tell_log(selection, output)?;
        if args.repair {
            recover(selection)?;
            was_recovered = true;
            selection = select(&args.members, &wanted)?;
        }
    }
    let (selection, repair) = (Rc::new(selection), args.repair);
    let subject = selection.clone();
    let checked = reactor::run(async move {
        let mut teller = Teller { output, told: 0, percent: None };
        check(&subject, repair, &mut teller).await
    })
    .map_err(|error| Error::Runtime(error.to_string()))?;
    conclude(&selection, &checked, was_recovered, output)
}

/// Lists what a crash has left in the log.
fn tell_log(selection: Selection, output: Output) -> Result<Selection, Error> {
    let (selection, found) = reactor::run(async move {
        let found = pending(&selection).await;
        (selection, found)
    });
    let (writes, report) = found.map_err(|error| Error::Runtime(error.to_string()))?;
    for write in writes.iter().take(MAX_TOLD) {
        let PendingWrite { lane, sequence, stripe, offset, len, .. } = write;
        let strips: Vec<String> = write.strips.iter().map(usize::to_string).collect();
        let data = if write.has_data { ", with its data" } else { "" };
        let human = format!(
            "log lane {lane}, entry {sequence}: stripe {stripe}, bytes {offset} to {} of strips {}{data}",
            u64::from(*offset) + u64::from(*len),
            strips.join(", ")
        );
        output.event("log_entry", human, serde_json::to_value(write).unwrap_or(Value::Null));
    }
    let others = report.stale + report.superseded + report.incomplete;
    let human = format!(
        "array {}: {} entries of the log are to be replayed, {others} are of no account",
        selection.name(),
        writes.len()
    );
    let fields = json!({
        "array": selection.name(),
        "to_replay": writes.len(),
        "entries": report.entries,
        "retired": report.stale,
        "superseded": report.superseded,
        "incomplete": report.incomplete,
    });
    output.event("log", human, fields);
    Ok(selection)
}

fn conclude(
    selection: &Selection,
    checked: &Checked,
    was_recovered: bool,
    output: Output,
) -> Result<(), Error> {
    for problem in &checked.superblocks {
        let fields = json!({ "problem": problem, "repaired": checked.superblocks_repaired });
        output.event("problem", problem, fields);
    }
    let name = selection.name();
    let missing = selection.devices.iter().filter(|device| device.is_none()).count();
    let mut fields = serde_json::to_value(checked).unwrap_or(Value::Null);
    fields["array"] = name.into();
    fields["uuid"] = selection.assembly.table.config.uuid.to_string().into();
    fields["clean"] = checked.is_clean().into();
    fields["members_missing"] = missing.into();
    fields["recovered"] = was_recovered.into();
    let verdict = if checked.is_clean() { "clean" } else { "NOT clean" };
    let degraded = if missing > 0 { format!(", {missing} members missing") } else { String::new() };
    let human = format!(
        "array {name}: {verdict}{degraded}\n  superblocks   {} copies broken{}\n  bad blocks    {} ranges\n  \
         parity        {}",
        checked.superblocks.len(),
        if checked.superblocks_repaired { ", rewritten" } else { "" },
        checked.bad_blocks.len(),
        findings_text(&checked.parity)
    );
    output.event("checked", human, fields);
    match checked.is_clean() {
        true => Ok(()),
        false => Err(Error::Runtime(format!("array {name}: it is not clean"))),
    }
}

fn findings_text(found: &Findings) -> String {
    let mut text = format!(
        "{} stripes compared, {} never written, {} without redundancy; {} rows different, {} strips unreadable",
        found.stripes_checked,
        found.stripes_unwritten,
        found.stripes_without_redundancy,
        found.rows_different,
        found.strips_unreadable,
    );
    for (count, what) in [
        (found.rows_out_of_sync, "rows known to be out of sync"),
        (found.rows_repaired, "rows repaired"),
        (found.rows_unrepairable, "rows beyond repair"),
    ] {
        if count > 0 {
            text.push_str(&format!(", {count} {what}"));
        }
    }
    text
}

/// Tells people how far a check is and what it finds.
struct Teller {
    output: Output,
    told: usize,
    percent: Option<u64>,
}

impl Observer for Teller {
    fn progress(&mut self, done: u64, all: u64) {
        let percent = done.saturating_mul(100) / all.max(1);
        let mut stderr = std::io::stderr();
        if self.percent != Some(percent) && stderr.is_terminal() {
            self.percent = Some(percent);
            let end = if done == all { "\n" } else { "" };
            let _ = write!(stderr, "\rcompared {percent} %{end}");
        }
    }

    fn difference(&mut self, difference: &Difference) {
        self.told += 1;
        if self.told > MAX_TOLD {
            return;
        }
        let Difference { stripe, offset, len, slot, outcome } = difference;
        let who = match slot {
            Some(slot) => format!("slot {slot} is wrong"),
            None => "parity does not fit".into(),
        };
        let what = match outcome {
            Outcome::Found => "",
            Outcome::Repaired => ": repaired",
            Outcome::Unrepairable => ": beyond repair",
            Outcome::Refused => ": the member refuses the repair",
        };
        let human = format!("stripe {stripe}, bytes {offset} to {} of each strip: {who}{what}", offset + len);
        let fields = serde_json::to_value(difference).unwrap_or(Value::Null);
        self.output.event("difference", human, fields);
        if self.told == MAX_TOLD {
            self.output.event("more", "further differences are only counted", json!({}));
        }
    }
}
