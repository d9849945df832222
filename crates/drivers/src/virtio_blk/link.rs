//! The connection as everybody of a session shares it, and the thread that listens to the server.
//!
//! The thread waits for the end of the connection (then every queue learns that the device is gone) and for
//! changes of the configuration space. It touches no request.

use super::frontend::{
    self, FLAG_NEED_REPLY, FLAG_REPLY, FLAG_VERSION, Frontend, FrontendError, FrontendReq,
};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use vhost::vhost_user::message::BackendReq;
use virtio::blk::ConfigSpace;
use vmm_sys_util::eventfd::EventFd;

/// Lengths of the configuration space to ask for: servers refuse what is longer than the one they know. The
/// second ends behind the fields of write zeroes.
const CONFIG_LENGTHS: [usize; 2] = [ConfigSpace::BYTES, 60];

/// What to call when the configuration space has changed.
type OnConfig = Box<dyn Fn(&ConfigSpace) + Send>;

/// The connection and what is known of the other side.
pub struct Link {
    name: String,
    frontend: Mutex<Frontend>,
    config: Mutex<ConfigSpace>,
    on_config: Mutex<Option<OnConfig>>,
    is_gone: AtomicBool,
    calls: Mutex<Vec<(u16, EventFd)>>,
}

impl Link {
    /// The link over `frontend`.
    pub fn new(name: String, frontend: Frontend) -> Link {
        Link {
            name,
            frontend: Mutex::new(frontend),
            config: Mutex::new(ConfigSpace::default()),
            on_config: Mutex::new(None),
            is_gone: AtomicBool::new(false),
            calls: Mutex::new(Vec::new()),
        }
    }

    /// The connection, for one exchange.
    pub fn frontend(&self) -> MutexGuard<'_, Frontend> {
        lock(&self.frontend)
    }

    /// Whether the server has vanished. Everything it did before is visible once this was seen.
    #[inline]
    pub fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Acquire)
    }

    /// The configuration space as it was last read.
    pub fn config(&self) -> ConfigSpace {
        *lock(&self.config)
    }

    /// Reads the configuration space.
    ///
    /// # Errors
    /// When the connection fails, or the server has none.
    pub fn read_config(&self) -> Result<ConfigSpace, FrontendError> {
        let request = FrontendReq::GET_CONFIG;
        for len in CONFIG_LENGTHS {
            // offset, size, flags, and as many bytes as are asked for.
            let mut payload = vec![0; 12 + len];
            payload[4..8].copy_from_slice(&(len as u32).to_le_bytes());
            let reply = self.frontend().call(request, &payload, &[])?;
            if reply.payload.len() > 12 {
                let config = ConfigSpace::from_bytes(&reply.payload[12..]);
                *lock(&self.config) = config;
                return Ok(config);
            }
        }
        Err(FrontendError::BadReply { request, what: "an empty configuration space".into() })
    }

    /// What to call, on the listening thread, when the configuration space has changed.
    pub fn set_on_config(&self, call: OnConfig) {
        *lock(&self.on_config) = Some(call);
    }

    /// The event that wakes queue `index`, to be written too when the server vanishes.
    pub fn add_call(&self, index: u16, call: EventFd) {
        lock(&self.calls).push((index, call));
    }

    /// Forgets the event of queue `index`.
    pub fn remove_call(&self, index: u16) {
        lock(&self.calls).retain(|(i, _)| *i != index);
    }

    fn set_gone(&self) {
        self.is_gone.store(true, Ordering::SeqCst);
        tracing::warn!(device = %self.name, "the vhost-user server closed the connection");
        for (_, call) in lock(&self.calls).iter() {
            // Fails only when the counter is full, and then the reader is awake.
            let _ = call.write(1);
        }
    }

    fn config_changed(&self) {
        match self.read_config() {
            Ok(config) => {
                tracing::info!(device = %self.name, sectors = config.capacity, "the configuration changed");
                if let Some(call) = &*lock(&self.on_config) {
                    call(&config);
                }
            }
            Err(error) => tracing::warn!(device = %self.name, %error, "the configuration cannot be read"),
        }
    }
}

/// The thread that listens; it ends with this value.
pub struct Listener {
    stop: EventFd,
    thread: Option<JoinHandle<()>>,
}

impl Listener {
    /// Starts to listen to the connection's end, and to `backend` where the server has such a channel.
    ///
    /// # Errors
    /// When the thread cannot be made.
    pub fn start(link: Arc<Link>, backend: Option<UnixStream>) -> io::Result<Listener> {
        let stop = EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)?;
        let stopped = stop.try_clone()?;
        let socket = link.frontend().stream().try_clone()?;
        let thread = std::thread::Builder::new()
            .name("virtio-blk-link".into())
            .spawn(move || listen(&link, &socket, backend, &stopped))?;
        Ok(Listener { stop, thread: Some(thread) })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Fails only when the counter is full, which this first write cannot meet.
        let _ = self.stop.write(1);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn listen(link: &Link, socket: &UnixStream, mut backend: Option<UnixStream>, stop: &EventFd) {
    loop {
        let backend_fd = backend.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let [stopped, ended, called] = wait([stop.as_raw_fd(), socket.as_raw_fd(), backend_fd]);
        if stopped {
            return;
        }
        if ended {
            link.set_gone();
            return;
        }
        if called && let Some(stream) = &backend {
            match serve(stream) {
                Ok(true) => link.config_changed(),
                Ok(false) => {}
                Err(_) => backend = None,
            }
        }
    }
}

/// Waits until the first can be read, the second has ended, or the third can be read.
fn wait([stop, socket, backend]: [RawFd; 3]) -> [bool; 3] {
    let entry = |fd, events| libc::pollfd { fd, events, revents: 0 };
    let mut fds = [entry(stop, libc::POLLIN), entry(socket, libc::POLLRDHUP), entry(backend, libc::POLLIN)];
    // SAFETY: the array outlives the call.
    if unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, -1) } < 0 {
        return [false; 3];
    }
    fds.map(|entry| entry.revents != 0)
}

/// Serves one message of the server. Whether it says that the configuration changed.
fn serve(stream: &UnixStream) -> io::Result<bool> {
    let (request, flags, _) = frontend::read_message(stream)?;
    let is_config = request == u32::from(BackendReq::CONFIG_CHANGE_MSG);
    if flags & FLAG_NEED_REPLY != 0 {
        // Answered before the configuration is read: the server may serve nothing else while it waits.
        let code = if is_config { 0 } else { libc::ENOSYS as u64 };
        let reply = frontend::message(request, FLAG_VERSION | FLAG_REPLY, &code.to_le_bytes());
        frontend::write_all(stream, &reply, &[])?;
    }
    Ok(is_config)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
