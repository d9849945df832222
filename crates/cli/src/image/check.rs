//! `freestone image check` and `repair`.

use super::{FileArgs, failed, print_json};
use crate::error::Error;
use qcow2::{Level, Problem, Repaired, Report};
use serde_json::{Map, Value, json};
use std::process::ExitCode;

/// Exit code: the check found errors.
const CORRUPT: u8 = 2;
/// Exit code: the check found nothing but leaked clusters.
const LEAKS: u8 = 3;
/// Exit code: the format has no check.
const UNSUPPORTED: u8 = 63;

/// The arguments of `freestone image check`.
#[derive(clap::Args, Debug)]
pub(super) struct CheckArgs {
    #[command(flatten)]
    pub(super) file: FileArgs,
    /// Repair the image, which nothing else may have open
    #[arg(short, long, value_enum)]
    repair: Option<Repair>,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Repair {
    /// Free leaked clusters
    Leaks,
    /// Repair everything that can be repaired
    All,
}

pub(super) fn run(args: &CheckArgs, is_json: bool) -> Result<ExitCode, Error> {
    let level = args.repair.map(|repair| match repair {
        Repair::Leaks => Level::Leaks,
        Repair::All => Level::All,
    });
    run_at(level, &args.file, is_json)
}

/// Repairs everything that can be repaired.
pub(super) fn repair(file: &FileArgs, is_json: bool) -> Result<ExitCode, Error> {
    run_at(Some(Level::All), file, is_json)
}

fn run_at(level: Option<Level>, file: &FileArgs, is_json: bool) -> Result<ExitCode, Error> {
    let result = match level {
        None => {
            let device = file.device()?;
            reactor::run(async move { qcow2::check(&*device).await })
                .map(|after| Repaired { before: after.clone(), after })
        }
        Some(level) => {
            let device = file.writable_device()?;
            reactor::run(async move { qcow2::repair(&device, level).await })
        }
    };
    match result {
        Ok(repaired) => Ok(print(&file.name(), &repaired, is_json)),
        Err(error) if matches!(error.problem, Problem::NotQcow2(_)) => {
            eprintln!("freestone: {error}");
            Ok(ExitCode::from(UNSUPPORTED))
        }
        Err(error) => Err(failed(error)),
    }
}

fn print(name: &str, repaired: &Repaired, is_json: bool) -> ExitCode {
    let (leaks, corruptions) = (repaired.leaks_fixed(), repaired.corruptions_fixed());
    let report = &repaired.after;
    let is_changed = leaks > 0 || corruptions > 0;
    if is_json {
        print_json(&as_json(name, repaired));
    } else {
        if is_changed {
            println!("The following inconsistencies were found and repaired:\n");
            println!("    {leaks} leaked clusters\n    {corruptions} corruptions\n");
            println!("Double checking the fixed image now...");
        }
        print!("{}", as_text(report));
    }
    let ended = repaired.before.messages.iter().filter(|message| !report.messages.contains(message));
    ended.for_each(|message| eprintln!("{message}: repaired"));
    report.messages.iter().for_each(|message| eprintln!("{message}"));
    let in_use = |name| eprintln!("bitmap {name:?}: in use since a crash: it lacks writes");
    report.bitmaps_in_use.iter().for_each(in_use);
    ExitCode::from(match report {
        Report { check_errors: 1.., .. } => crate::error::EXIT_FAILURE,
        Report { corruptions: 1.., .. } => CORRUPT,
        Report { leaks: 1.., .. } => LEAKS,
        _ => 0,
    })
}

fn as_json(name: &str, repaired: &Repaired) -> Value {
    let report = &repaired.after;
    let always = json!({
        "filename": name,
        "format": "qcow2",
        "check-errors": report.check_errors,
        "image-end-offset": report.image_end_offset,
        "total-clusters": report.total_clusters,
    });
    let sometimes = [
        ("corruptions", report.corruptions),
        ("leaks", report.leaks),
        ("corruptions-fixed", repaired.corruptions_fixed()),
        ("leaks-fixed", repaired.leaks_fixed()),
        ("allocated-clusters", report.allocated_clusters),
        ("fragmented-clusters", report.fragmented_clusters),
        ("compressed-clusters", report.compressed_clusters),
    ];
    let mut object: Map<String, Value> = always.as_object().cloned().unwrap_or_default();
    let present = sometimes.into_iter().filter(|(_, value)| *value > 0);
    object.extend(present.map(|(key, value)| (key.to_owned(), value.into())));
    Value::Object(object)
}

fn as_text(report: &Report) -> String {
    let Report { corruptions, leaks, check_errors, .. } = report;
    let mut text = String::new();
    if [*corruptions, *leaks, *check_errors] == [0; 3] {
        text += "No errors were found on the image.\n";
    }
    if *corruptions > 0 {
        text += &format!("\n{corruptions} errors were found on the image.\n");
        text += "Data may be corrupted, or further writes to the image may corrupt it.\n";
    }
    if *leaks > 0 {
        text += &format!("\n{leaks} leaked clusters were found on the image.\n");
        text += "This means waste of disk space, but no harm to data.\n";
    }
    if *check_errors > 0 {
        text += &format!("\n{check_errors} internal errors have occurred during the check.\n");
    }
    let (total, allocated) = (report.total_clusters, report.allocated_clusters);
    if total > 0 && allocated > 0 {
        let percent = |part: u64, whole: u64| part as f64 * 100.0 / whole as f64;
        text += &format!(
            "{allocated}/{total} = {:.2}% allocated, {:.2}% fragmented, {:.2}% compressed clusters\n",
            percent(allocated, total),
            percent(report.fragmented_clusters, allocated),
            percent(report.compressed_clusters, allocated),
        );
    }
    if report.image_end_offset > 0 {
        text += &format!("Image end offset: {}\n", report.image_end_offset);
    }
    text
}
