//! `freestone completion` and `freestone man`.

use crate::error::Error;
use clap_complete::Shell;
use std::path::{Path, PathBuf};

/// The arguments of `freestone completion`.
#[derive(clap::Args, Debug)]
pub struct CompletionArgs {
    /// The shell
    shell: Shell,
}

/// The arguments of `freestone man`.
#[derive(clap::Args, Debug)]
pub struct ManArgs {
    /// The directory to write to
    directory: PathBuf,
}

/// Prints the completion script of a shell.
pub fn complete(args: &CompletionArgs, mut command: clap::Command) {
    clap_complete::generate(args.shell, &mut command, "freestone", &mut std::io::stdout());
}

/// Writes a manual page for each command.
///
/// # Errors
/// When they cannot be written.
pub fn write_pages(args: &ManArgs, command: clap::Command) -> Result<(), Error> {
    let write = |directory: &Path| {
        std::fs::create_dir_all(directory)?;
        clap_mangen::generate_to(command, directory)
    };
    write(&args.directory).map_err(|error| Error::Runtime(format!("{}: {error}", args.directory.display())))
}
