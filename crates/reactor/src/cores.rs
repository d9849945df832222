//! Threads, each of which runs one core.

use crate::core::{Core, CoreConfig};
use crate::remote::CoreRef;
use crate::threads::spawn_thread;
use std::io;
use std::sync::mpsc;
use std::thread::JoinHandle;

/// A set of running cores. Dropping it stops and joins them; the owner drains them before.
pub struct Cores {
    cores: Vec<CoreRef>,
    threads: Vec<JoinHandle<()>>,
}

impl Cores {
    /// Starts a thread for each configuration.
    ///
    /// # Errors
    /// If the system refuses a thread, its io_uring or its processor. Cores already started are
    /// stopped.
    pub fn start(configs: &[CoreConfig]) -> io::Result<Cores> {
        let mut cores = Cores { cores: Vec::new(), threads: Vec::new() };
        for (index, config) in configs.iter().enumerate() {
            let (sender, receiver) = mpsc::sync_channel(1);
            let config = config.clone();
            let run = move || run_core(index, &config, &sender);
            let thread = spawn_thread(&format!("core-{index}"), run)?;
            cores.threads.push(thread);
            cores.cores.push(receiver.recv().map_err(|_| io::Error::other("core thread died"))??);
        }
        Ok(cores)
    }

    /// Number of cores.
    pub fn len(&self) -> usize {
        self.cores.len()
    }

    /// Whether the set has no core.
    pub fn is_empty(&self) -> bool {
        self.cores.is_empty()
    }

    /// The core with this number.
    ///
    /// # Panics
    /// If no core has that number.
    pub fn get(&self, index: usize) -> CoreRef {
        self.cores[index].clone()
    }

    /// All cores, in order.
    pub fn all(&self) -> &[CoreRef] {
        &self.cores
    }
}

impl Drop for Cores {
    fn drop(&mut self) {
        for core in &self.cores {
            core.stop();
        }
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a core's thread panicked");
            }
        }
    }
}

fn run_core(index: usize, config: &CoreConfig, ready: &mpsc::SyncSender<io::Result<CoreRef>>) {
    let core = match bind_thread(config).and_then(|()| Core::start(index, config)) {
        Ok(core) => core,
        Err(error) => return drop(ready.send(Err(error))),
    };
    // Ends the core also when a task panics, so that threads that wait for an answer get an error.
    let core = EndOnDrop(core);
    if ready.send(Ok(core.0.remote())).is_ok() {
        core.0.run();
    }
}

struct EndOnDrop(Core);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.clone().end();
        block::release_pool();
    }
}

/// Allows the calling thread to use every processor that the operating system grants the process.
/// Threads that it starts inherit that. A library whose threads are started on a core calls it
/// first: otherwise they would all use the core's processor.
pub fn unbind_thread() {
    // SAFETY: the set is a plain bit array. The kernel ignores processors that do not exist or that
    // the process may not use.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        (0..libc::CPU_SETSIZE as usize).for_each(|cpu| libc::CPU_SET(cpu, &mut set));
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set);
    }
}

/// Binds the calling thread to the configured processor, if any.
///
/// # Errors
/// If the processor does not exist or the process may not use it.
pub fn bind_thread(config: &CoreConfig) -> io::Result<()> {
    let Some(cpu) = config.cpu else { return Ok(()) };
    if cpu >= libc::CPU_SETSIZE as usize {
        return Err(io::Error::other(format!("cpu {cpu}: no such processor")));
    }
    // SAFETY: the set is a plain bit array, valid when zeroed, and `cpu` is inside it.
    let result = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set)
    };
    if result != 0 {
        let error = io::Error::last_os_error();
        return Err(io::Error::new(error.kind(), format!("cpu {cpu}: cannot bind a thread to it: {error}")));
    }
    Ok(())
}
