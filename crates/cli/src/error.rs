//! Why the program ends with another exit code than 0.

use block::DeviceError;
use spec::SpecError;
use std::process::ExitCode;

/// Exit code of a run that failed: something could not be opened, served, written or verified.
pub const EXIT_FAILURE: u8 = 1;
/// Exit code of an invalid command line.
pub const EXIT_USAGE: u8 = 2;

/// An error that ends the program. Displayed as one line that names the object.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A device, layer or export specification is invalid; its role is the name of the option.
    #[error("--{0}")]
    Spec(#[from] SpecError),
    /// Another part of the command line is invalid.
    #[error("{0}")]
    Usage(String),
    /// A device cannot do what it was asked for; its name is in the message.
    #[error("device {0}")]
    Device(#[from] DeviceError),
    /// An export cannot be started; named as on the command line.
    #[error("export {name}: {source}")]
    Export {
        /// The export's kind and socket.
        name: String,
        /// Why.
        source: exports::Error,
    },
    /// Privileges cannot be dropped.
    #[error("sandbox: {0}")]
    Sandbox(#[from] sandbox::Error),
    /// An array, or its control socket.
    #[error(transparent)]
    Serving(#[from] hosting::Error),
    /// The daemon refuses a request or does not answer.
    #[error(transparent)]
    Client(#[from] client::Error),
    /// A core has ended before its time.
    #[error(transparent)]
    Core(#[from] reactor::CoreStopped),
    /// Something else failed at run time.
    #[error("{0}")]
    Runtime(String),
}

impl Error {
    /// The exit code that this error ends the program with.
    pub fn exit_code(&self) -> ExitCode {
        use exports::Error as ExportError;
        ExitCode::from(match self {
            Error::Spec(_) | Error::Usage(_) | Error::Export { source: ExportError::Config(_), .. } => {
                EXIT_USAGE
            }
            Error::Device(_)
            | Error::Export { .. }
            | Error::Sandbox(_)
            | Error::Serving(_)
            | Error::Client(_)
            | Error::Core(_)
            | Error::Runtime(_) => EXIT_FAILURE,
        })
    }
}
