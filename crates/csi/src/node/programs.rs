//! Programs of the system, with a deadline.

use crate::fault::{Fault, Result};
use std::ffi::OsStr;
use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const POLL: Duration = Duration::from_millis(20);
/// Most bytes of output that are kept.
const MAX_OUTPUT: u64 = 64 << 10;

/// A program that has ended by itself.
pub(super) struct Ended {
    /// Its exit code; none after a signal.
    pub code: Option<i32>,
    /// Its standard output.
    pub output: String,
    /// The end of its messages, on one line.
    pub messages: String,
}

/// Runs a program.
///
/// # Errors
/// When it cannot be run, and `DEADLINE_EXCEEDED` when it has not ended by itself in time.
pub(super) fn run(program: &str, arguments: &[&OsStr], limit: Duration) -> Result<Ended> {
    let mut command = Command::new(program);
    command.args(arguments).env("LC_ALL", "C").stdin(Stdio::null());
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.map_err(|error| Fault::internal(format!("{program}: {error}")))?;
    let output = child.stdout.take().map(reader);
    let messages = child.stderr.take().map(reader);
    let deadline = Instant::now() + limit;
    let status = loop {
        match child.try_wait().map_err(|error| Fault::internal(format!("{program}: {error}")))? {
            Some(status) => break status,
            None if Instant::now() < deadline => std::thread::sleep(POLL),
            None => {
                // One that waits for a dead disk ends when the disk is gone. Nothing waits for it.
                let _ = child.kill();
                let detail = format!("{program}: not done after {} s", limit.as_secs());
                return Err(Fault::new(tonic::Code::DeadlineExceeded, detail));
            }
        }
    };
    let text = |reader: Option<std::thread::JoinHandle<String>>| {
        reader.and_then(|reader| reader.join().ok()).unwrap_or_default()
    };
    let messages = text(messages).split_whitespace().collect::<Vec<_>>().join(" ");
    Ok(Ended { code: status.code(), output: text(output), messages })
}

/// Reads a pipe to its end, and keeps the beginning.
fn reader(mut pipe: impl Read + Send + 'static) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut kept = Vec::new();
        let _ = (&mut pipe).take(MAX_OUTPUT).read_to_end(&mut kept);
        let _ = std::io::copy(&mut pipe, &mut std::io::sink());
        String::from_utf8_lossy(&kept).into_owned()
    })
}

impl Ended {
    /// The messages of a program that has failed.
    pub fn fault(&self, program: &str) -> Fault {
        let code = self.code.map_or_else(|| "a signal".to_owned(), |code| format!("exit code {code}"));
        Fault::internal(format!("{program}: {code}: {}", self.messages))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tonic::Code;

    #[test]
    fn a_program_ends_by_itself_or_at_its_deadline() {
        let shell = |text: &str, limit| run("sh", &["-c".as_ref(), text.as_ref()], limit);
        let ended = shell("echo out; echo a b >&2; exit 3", Duration::from_secs(60)).unwrap();
        assert_eq!((ended.code, ended.output.as_str(), ended.messages.as_str()), (Some(3), "out\n", "a b"));
        assert!(ended.fault("sh").message.contains("exit code 3: a b"));
        let fault = shell("exec sleep 600", Duration::from_millis(50)).map(drop).unwrap_err();
        assert_eq!(fault.code, Code::DeadlineExceeded);
        assert!(
            run("no-such-program", &[], Duration::ZERO).map(drop).unwrap_err().message.contains("no-such")
        );
    }

    #[test]
    fn long_output_does_not_stop_a_program() {
        let ended =
            run("head", &["-c300000".as_ref(), "/dev/zero".as_ref()], Duration::from_secs(60)).unwrap();
        assert_eq!((ended.code, ended.output.len()), (Some(0), 64 << 10));
    }
}
