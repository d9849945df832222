//! Driver `nbd`: an export of an NBD server. Connecting may take as long as a network does, and can
//! be cancelled.

use super::{Address, Cancel, MAX_QUEUE_DEPTH, OpenError, Options, Session, StreamError};
use drivers::blkio::{
    Capacity, Driver, DriverKind, Error, Properties, Region, Result, Spec, Value, check_reconnect_delay,
    state_limits,
};
use drivers::direct::DirectQueue;
use std::sync::Arc;

/// The driver of the library.
pub static DRIVER: DriverKind = DriverKind { name: "nbd", create: || Ok(Box::new(Nbd::new()?)) };

struct Nbd {
    session: Option<Arc<Session>>,
    cancel: Cancel,
}

impl Nbd {
    fn new() -> Result<Nbd> {
        let cancel = Cancel::new().map_err(|e| Error::os("nbd", &e))?;
        Ok(Nbd { session: None, cancel })
    }

    fn session(&self) -> &Arc<Session> {
        self.session.as_ref().expect("the instance is connected")
    }

    /// A fresh one: what was cancelled stays so.
    fn renew_cancel(&mut self, error: OpenError) -> Error {
        if matches!(error, OpenError::Stream(StreamError::Cancelled))
            && let Ok(cancel) = Cancel::new()
        {
            self.cancel = cancel;
        }
        Error::new(error.errno(), error.to_string())
    }
}

impl Driver for Nbd {
    fn specs(&self) -> Vec<Spec> {
        vec![
            Spec::setting("uri", ""),
            Spec::setting("path", ""),
            Spec::setting("export", ""),
            Spec::setting("connect-timeout-ms", 10_000),
            Spec::setting("reconnect-delay", 0),
            Spec::tuning("num-entries", 128),
        ]
    }

    fn can_add_queues(&self) -> bool {
        true
    }

    fn check(&self, name: &str, value: &Value) -> Result<()> {
        match (name, value) {
            ("connect-timeout-ms" | "num-entries", Value::Int(number)) if *number <= 0 => {
                Err(Error::new(libc::EINVAL, format!("property {name}: {number} is not positive")))
            }
            ("reconnect-delay", Value::Int(seconds)) => check_reconnect_delay(*seconds),
            _ => Ok(()),
        }
    }

    fn connect(&mut self, p: &mut Properties) -> Result<()> {
        let options = options(p)?;
        let session = Session::open(&options, &self.cancel).map_err(|e| self.renew_cancel(e))?;
        state_limits(p, &session.limits());
        p.put("max-queues", i32::try_from(session.max_queues()).unwrap_or(0));
        self.session = Some(session);
        Ok(())
    }

    fn start(&mut self, p: &Properties) -> Result<()> {
        let entries = p.int("num-entries");
        if entries > MAX_QUEUE_DEPTH as i32 {
            let message = format!("num-entries is {entries}, a connection takes at most {MAX_QUEUE_DEPTH}");
            return Err(Error::new(libc::EINVAL, message));
        }
        Ok(())
    }

    fn open_queue(&mut self, p: &Properties, _: bool) -> Result<Box<dyn DirectQueue>> {
        let (session, entries) = (self.session().clone(), p.int("num-entries") as u32);
        let queue = session.start_queue_of(entries, &self.cancel).map_err(|e| self.renew_cancel(e))?;
        Ok(Box::new(queue))
    }

    fn capacity(&self) -> Capacity {
        let limits = self.session().shared_limits().clone();
        Arc::new(move || Ok(limits.capacity()))
    }

    fn map_region(&mut self, _: &Region) -> Result<()> {
        Ok(())
    }

    fn unmap_region(&mut self, _: &Region) {}

    fn canceller(&self) -> Option<Arc<dyn Fn() + Send + Sync>> {
        let cancel = self.cancel.clone();
        Some(Arc::new(move || cancel.cancel()))
    }
}

/// The export that the settings name, by a URI or by a Unix socket and a name.
fn options(p: &Properties) -> Result<Options> {
    let refuse = |message: String| Error::new(libc::EINVAL, message);
    let export = p.str("export");
    let mut options = match (p.str("uri"), p.str("path")) {
        ("", "") => return Err(refuse("one of the properties uri and path must be set".into())),
        ("", path) => {
            let options = Options::new(Address::Unix(path.into()));
            Options { export: export.to_owned(), ..options }
        }
        (uri, "") if export.is_empty() => Options::from_uri(uri).map_err(refuse)?,
        (uri, "") => return Err(refuse(format!("uri ({uri}) and export ({export}) both name the export"))),
        (uri, path) => {
            return Err(refuse(format!("uri ({uri}) and path ({path}) cannot be set at the same time")));
        }
    };
    options.read_only = p.bool("read-only");
    options.timeout_ms = p.int("connect-timeout-ms") as u64;
    options.reconnect_delay_s = p.int("reconnect-delay") as u32;
    Ok(options)
}
