//! Driver `nvme-tcp`: a namespace of an NVMe/TCP target. Connecting may take as long as a network
//! does, and can be cancelled.

use super::{
    Cancel, KeyFiles, Keyring, MAX_QUEUE_DEPTH, Nqn, OpenError, Options, Session, StreamError, parse_address,
};
use base::Uuid;
use drivers::blkio::{
    Capacity, Driver, DriverKind, Error, Properties, Region, Result, Spec, Value, state_limits,
};
use drivers::direct::DirectQueue;
use std::path::PathBuf;
use std::sync::Arc;

/// The driver of the library.
pub static DRIVER: DriverKind = DriverKind { name: "nvme-tcp", create: || Ok(Box::new(NvmeTcp::new()?)) };

struct NvmeTcp {
    session: Option<Arc<Session>>,
    cancel: Cancel,
}

impl NvmeTcp {
    fn new() -> Result<NvmeTcp> {
        let cancel = Cancel::new().map_err(|e| Error::os("nvme-tcp", &e))?;
        Ok(NvmeTcp { session: None, cancel })
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

impl Driver for NvmeTcp {
    fn specs(&self) -> Vec<Spec> {
        vec![
            Spec::setting("address", ""),
            Spec::setting("nqn", ""),
            Spec::setting("nsid", 0),
            Spec::setting("hostnqn", ""),
            Spec::setting("hostid", ""),
            Spec::setting("dhchap-key", ""),
            Spec::setting("dhchap-ctrl-key", ""),
            Spec::setting("tls-key", ""),
            Spec::setting("tls-keyring", ""),
            Spec::setting("hdgst", false),
            Spec::setting("ddgst", false),
            Spec::setting("kato", 5),
            Spec::setting("io-timeout", 30),
            Spec::setting("reconnect-delay", 10),
            Spec::setting("ctrl-loss-tmo", 600),
            Spec::setting("connect-timeout-ms", 10_000),
            Spec::tuning("num-entries", 128),
        ]
    }

    fn can_add_queues(&self) -> bool {
        true
    }

    fn check(&self, name: &str, value: &Value) -> Result<()> {
        let least = match name {
            "connect-timeout-ms" | "num-entries" | "io-timeout" => 1,
            "nsid" | "kato" | "reconnect-delay" | "ctrl-loss-tmo" => 0,
            _ => return Ok(()),
        };
        match value {
            Value::Int(number) if *number < least => {
                Err(Error::new(libc::EINVAL, format!("property {name}: {number} is less than {least}")))
            }
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
            let message = format!("num-entries is {entries}, a queue takes at most {MAX_QUEUE_DEPTH}");
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
        let session = self.session().clone();
        Arc::new(move || Ok(session.limits().capacity))
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

fn options(p: &Properties) -> Result<Options> {
    let refuse = |message: String| Error::new(libc::EINVAL, message);
    let name = |property: &str| {
        let text = p.str(property);
        Nqn::new(text).map_err(|why| refuse(format!("property {property}: {text:?}: {why}")))
    };
    let (address, host_id) = (p.str("address"), p.str("hostid"));
    if address.is_empty() || p.str("nqn").is_empty() {
        return Err(refuse("the properties address and nqn must be set".into()));
    }
    let mut options = Options::new(parse_address(address).map_err(refuse)?, name("nqn")?);
    if !p.str("hostnqn").is_empty() {
        options.host_nqn = Some(name("hostnqn")?);
    }
    if !host_id.is_empty() {
        let id =
            Uuid::parse(host_id).ok_or_else(|| refuse(format!("property hostid: {host_id:?} is no UUID")))?;
        options.host_id = Some(id.0);
    }
    let file =
        |property: &str| Some(PathBuf::from(p.str(property))).filter(|path| !path.as_os_str().is_empty());
    options.key_files = KeyFiles {
        key: file("dhchap-key"),
        controller_key: file("dhchap-ctrl-key"),
        tls_key: file("tls-key"),
    };
    if !p.str("tls-keyring").is_empty() {
        let keyring = Keyring::new(p.str("tls-keyring"));
        options.tls_keyring =
            Some(keyring.map_err(|error| refuse(format!("property tls-keyring: {error}")))?);
    }
    options.read_keys().map_err(|why| refuse(format!("property {why}")))?;
    options.nsid = Some(p.int("nsid") as u32).filter(|nsid| *nsid > 0);
    options.read_only = p.bool("read-only");
    options.header_digest = p.bool("hdgst");
    options.data_digest = p.bool("ddgst");
    options.keep_alive_s = p.int("kato") as u32;
    options.io_timeout_s = p.int("io-timeout") as u32;
    options.reconnect_delay_s = p.int("reconnect-delay") as u32;
    options.loss_timeout_s = p.int("ctrl-loss-tmo") as u32;
    options.timeout_ms = p.int("connect-timeout-ms") as u64;
    Ok(options)
}
