//! `freestone`: serves block devices, measures them, says what they can do.
//!
//! ```text
//!   cli ─► daemon ─► freestoned (volume, export, device, group, job, core, event, status, top)
//!   cli ─► graph (kind:key=value ─► devices under layers), export ─► serve | bench | info | discover | array | ublk
//! ```
//!
//! Needs no daemon, no state, no root and no hugepages. Results go to standard output ([`output`]),
//! logs to standard error ([`logging`]); everything that is wrong with a command line is said
//! before anything is opened.

#![forbid(unsafe_code)]

mod array;
mod bench;
mod cli;
mod daemon;
mod discover;
mod error;
mod fs;
mod image;
mod info;
mod logging;
mod output;
mod parse;
mod pool;
mod serve;
mod stack_args;
mod stats;
mod ublk;

use clap::error::ErrorKind;
use clap::{ArgMatches, FromArgMatches};
use cli::{Cli, Command};
use daemon::DaemonArgs;
use error::{EXIT_FAILURE, EXIT_USAGE, Error};
use parse::CommonArgs;
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_some_and(|first| first == fs::process::EXEC) {
        let error = fs::process::exec(&arguments.collect::<Vec<_>>());
        eprintln!("freestone: {error}");
        return ExitCode::from(EXIT_FAILURE);
    }
    let (cli, matches) = match parse_args() {
        Ok(parsed) => parsed,
        Err(error) if !error.use_stderr() => {
            let _ = error.print(); // help or version
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            match error.kind() {
                // Nothing at all was asked for: the help is the answer.
                ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => eprint!("{}", error.render()),
                _ => eprintln!("freestone: {}", cli::one_line(&error)),
            }
            return ExitCode::from(EXIT_USAGE);
        }
    };
    match run(cli, &matches) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("freestone: {error}");
            error.exit_code()
        }
    }
}

fn parse_args() -> Result<(Cli, ArgMatches), clap::Error> {
    let matches = cli::command().try_get_matches()?;
    let cli = Cli::from_arg_matches(&matches)?;
    Ok((cli, matches))
}

fn run(mut cli: Cli, matches: &ArgMatches) -> Result<ExitCode, Error> {
    cli.place_socket(matches)?;
    if let Command::Image(args) = &cli.command {
        logging::start(args.common.log.as_deref(), "warn", args.common.json)?;
        return image::run(args);
    }
    if let Command::Status(args) = &cli.command {
        logging::start(args.daemon.common.log.as_deref(), "warn", args.daemon.common.json)?;
        return args.run();
    }
    run_command(cli, matches).map(|()| ExitCode::SUCCESS)
}

fn run_command(cli: Cli, matches: &ArgMatches) -> Result<(), Error> {
    let (_, matches) = matches.subcommand().expect("clap asks for a command");
    let start_logs =
        |common: &CommonArgs, default| logging::start(common.log.as_deref(), default, common.json);
    let ask = |daemon: &DaemonArgs, run: &dyn Fn() -> Result<(), Error>| {
        start_logs(&daemon.common, "warn")?;
        run()
    };
    match cli.command {
        Command::Serve(args) => {
            start_logs(&args.common, "info")?;
            serve::run(&args, matches)
        }
        Command::Bench(args) => {
            start_logs(&args.common, "warn")?;
            bench::run(&args, matches)
        }
        Command::Info(args) => {
            start_logs(&args.common, "warn")?;
            info::run(&args, matches)
        }
        Command::Discover(args) => {
            start_logs(&args.common, "warn")?;
            discover::run(&args)
        }
        Command::Array(args) => {
            start_logs(&args.common, "warn")?;
            array::run(&args)
        }
        Command::Pool(args) => {
            start_logs(&args.common, "warn")?;
            pool::run(&args, matches)
        }
        Command::Device(args) => ask(&args.daemon, &|| args.run()),
        Command::Disks(args) => ask(&args.daemon, &|| args.run()),
        Command::Volume(args) => ask(&args.daemon, &|| args.run()),
        Command::Portal(args) => ask(&args.daemon, &|| args.run()),
        Command::Group(args) => ask(&args.daemon, &|| args.run()),
        Command::Export(args) => ask(&args.daemon, &|| args.run()),
        Command::Job(args) => ask(&args.daemon, &|| args.run()),
        Command::Core(args) => ask(&args.daemon, &|| args.run()),
        Command::Event(args) => ask(&args.daemon, &|| args.run()),
        Command::History(args) => ask(&args.daemon, &|| args.run()),
        Command::Support(args) => ask(&args.daemon, &|| args.run()),
        Command::Top(args) => ask(&args.daemon, &|| args.run()),
        Command::Completion(args) => {
            daemon::complete(&args, cli::command());
            Ok(())
        }
        Command::Man(args) => daemon::write_pages(&args, cli::command()),
        Command::Fs(args) => {
            start_logs(&args.common, "info")?;
            fs::run(&args)
        }
        Command::Image(_) | Command::Status(_) => unreachable!("run has its own way for them"),
        Command::Ublk(args) => {
            start_logs(&args.common, if args.command.is_serving() { "info" } else { "warn" })?;
            ublk::run(args, matches)
        }
    }
}
