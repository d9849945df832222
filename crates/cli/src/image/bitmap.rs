//! `freestone image bitmap`.

use super::{Format, failed, open_device, open_writable};
use crate::error::Error;
use base::Size;
use clap::{Arg, ArgAction, ArgMatches, Command, FromArgMatches};
use qcow2::Image;
use qcow2::offline::bitmaps::{Change, Source, change};
use std::path::{Path, PathBuf};

/// The arguments of `freestone image bitmap`.
#[derive(clap::Args, Debug)]
pub(super) struct BitmapArgs {
    #[command(flatten)]
    steps: Steps,
    /// Bytes of the disk for each bit of a new bitmap, e.g. 64K [default: a cluster, 4K to 64K]
    #[arg(short, long, value_name = "SIZE", value_parser = parse_size)]
    granularity: Option<u64>,
    /// The image that has the bitmap SOURCE [default: FILE]
    #[arg(short = 'b', long, value_name = "FILE")]
    source_file: Option<PathBuf>,
    /// Format of that image
    #[arg(short = 'F', long, value_enum)]
    source_format: Option<Format>,
    /// Format of the image
    #[arg(short, long, value_enum, default_value_t = Format::Qcow2)]
    format: Format,
    /// The image, which nothing else may have open
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Name of the bitmap
    #[arg(value_name = "BITMAP")]
    name: String,
}

/// The changes in the order of the command line.
#[derive(Clone, Debug)]
struct Steps(Vec<Step>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Add,
    Remove,
    Clear,
    Enable,
    Disable,
    /// The name of the bitmap with further bits.
    Merge(String),
}

/// Changes without a value: option, change, help.
const PLAIN: [(&str, Step, &str); 5] = [
    ("add", Step::Add, "Add the bitmap, enabled and without a bit"),
    ("remove", Step::Remove, "Remove the bitmap"),
    ("clear", Step::Clear, "Clear all bits"),
    ("enable", Step::Enable, "Have programs that write to the disk set bits"),
    ("disable", Step::Disable, "Keep the bits as they are"),
];
const MERGE: &str = "merge";

impl clap::Args for Steps {
    fn augment_args(command: Command) -> Command {
        let plain =
            PLAIN.map(|(name, _, help)| Arg::new(name).long(name).action(ArgAction::SetTrue).help(help));
        let merge = Arg::new(MERGE).long(MERGE).action(ArgAction::Append).value_name("SOURCE");
        command.args(plain).arg(merge.help("Set the bits that the bitmap SOURCE has"))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Steps::augment_args(command)
    }
}

impl FromArgMatches for Steps {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Steps, clap::Error> {
        let mut steps = Vec::new();
        for (name, step, _) in PLAIN.into_iter().filter(|(name, ..)| matches.get_flag(name)) {
            steps.extend(matches.index_of(name).map(|index| (index, step)));
        }
        let sources = matches.get_many::<String>(MERGE).into_iter().flatten();
        let places = matches.indices_of(MERGE).into_iter().flatten();
        steps.extend(places.zip(sources.map(|source| Step::Merge(source.clone()))));
        steps.sort_by_key(|(index, _)| *index);
        Ok(Steps(steps.into_iter().map(|(_, step)| step).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Steps::from_arg_matches(matches)?;
        Ok(())
    }
}

fn parse_size(text: &str) -> Result<u64, String> {
    Size::parse(text).map(|size| size.0).ok_or_else(|| "want a number with K, M or G".into())
}

pub(super) fn run(args: &BitmapArgs) -> Result<(), Error> {
    args.check().map_err(|text| Error::Usage(text.into()))?;
    let device = open_writable(&args.file)?;
    let changes = args.steps.0.iter().map(|step| args.change(step)).collect::<Result<Vec<_>, _>>()?;
    let name = args.name.clone();
    reactor::run(async move { change(&device, &name, &changes).await }).map_err(failed)
}

impl BitmapArgs {
    /// Checks that the options fit each other.
    fn check(&self) -> Result<(), &'static str> {
        let steps = &self.steps.0;
        let merges = steps.iter().any(|step| matches!(step, Step::Merge(_)));
        let is_raw = self.format == Format::Raw || self.source_format == Some(Format::Raw);
        let refusals = [
            (steps.is_empty(), "one of --add, --remove, --clear, --enable, --disable and --merge is needed"),
            (is_raw, "the format raw has no bitmaps"),
            (self.granularity.is_some() && !steps.contains(&Step::Add), "--granularity: only with --add"),
            (self.source_file.is_some() && !merges, "--source-file: only with --merge"),
            (
                self.source_format.is_some() && self.source_file.is_none(),
                "--source-format: only with --source-file",
            ),
        ];
        match refusals.into_iter().find(|(is_so, _)| *is_so) {
            Some((_, why)) => Err(why),
            None => Ok(()),
        }
    }

    fn change(&self, step: &Step) -> Result<Change, Error> {
        Ok(match step {
            Step::Add => Change::Add(self.granularity),
            Step::Remove => Change::Remove,
            Step::Clear => Change::Clear,
            Step::Enable => Change::Enable,
            Step::Disable => Change::Disable,
            Step::Merge(name) => Change::Merge(match &self.source_file {
                Some(file) => source(file, name)?,
                None => Source::Own(name.clone()),
            }),
        })
    }
}

/// A bitmap of another image.
fn source(file: &Path, name: &str) -> Result<Source, Error> {
    let device = open_device(file, false)?;
    let image = reactor::run(async move {
        let mut image = Image::open(device).await?;
        image.load_bitmaps().await?;
        Ok(image)
    });
    let image = image.map_err(failed)?;
    let found = image.loaded_bitmaps().find(|bitmap| bitmap.name() == name);
    let missing = || Error::Runtime(format!("{}: no bitmap {name:?} that is not in use", file.display()));
    Ok(Source::Other(found.ok_or_else(missing)?, image.size))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Args;

    fn parse(options: &str) -> BitmapArgs {
        let words = ["bitmap"].into_iter().chain(options.split(' ')).chain(["disk", "b"]);
        let matches = BitmapArgs::augment_args(Command::new("bitmap")).try_get_matches_from(words).unwrap();
        BitmapArgs::from_arg_matches(&matches).unwrap()
    }

    #[test]
    fn changes_have_the_order_of_the_command_line() {
        let merge = |name: &str| Step::Merge(name.into());
        let steps = |options: &str| parse(options).steps.0;
        assert_eq!(steps("--remove --add -g 4K"), [Step::Remove, Step::Add]);
        assert_eq!(steps("--add --remove"), [Step::Add, Step::Remove]);
        assert_eq!(
            steps("--merge x --clear --merge y --disable"),
            [merge("x"), Step::Clear, merge("y"), Step::Disable]
        );
    }

    #[test]
    fn options_that_do_not_fit_are_refused() {
        for (options, why) in [
            ("-g 4K --clear", "--granularity: only with --add"),
            ("-b other --add", "--source-file: only with --merge"),
            ("-F qcow2 --merge x", "--source-format: only with --source-file"),
            ("-f raw --add", "the format raw has no bitmaps"),
            ("-f qcow2", "one of --add, --remove, --clear, --enable, --disable and --merge is needed"),
        ] {
            assert_eq!(parse(options).check(), Err(why));
        }
        assert_eq!(parse("--add -g 64K --merge x -b other -F qcow2").check(), Ok(()));
    }
}
