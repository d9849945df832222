//! An instance of `/dev/vhost-blk` for tests: it notes each call, and fails as it is asked to.

use super::vhost::{Call, DiskExtent, Event, Opener, RingStats, Vhost};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

/// Rings of an instance, as many as those of the module.
const RINGS: u32 = 16;

/// The behaviour of the kernel, and the calls that reached it.
#[derive(Debug, Default)]
pub(in super::super) struct Kernel {
    pub(in super::super) calls: Vec<String>,
    /// How often SET_DISK fails with EBUSY.
    pub(in super::super) busy: usize,
    /// An ioctl that fails, and its error.
    pub(in super::super) refuses: Option<(&'static str, i32)>,
    /// The error of open(2).
    pub(in super::super) refuses_open: Option<i32>,
    /// The answer to GET_VRING_BASE.
    pub(in super::super) base: u32,
}

/// An open instance.
pub(in super::super) struct Fake(Arc<Mutex<Kernel>>);

impl Fake {
    pub(in super::super) fn opener(kernel: Arc<Mutex<Kernel>>) -> Opener {
        Box::new(move || match kernel.lock().unwrap().refuses_open {
            Some(error) => Err(io::Error::from_raw_os_error(error)),
            None => Ok(Box::new(Fake(kernel.clone()))),
        })
    }

    fn kernel(&self) -> MutexGuard<'_, Kernel> {
        self.0.lock().unwrap()
    }
}

impl Vhost for Fake {
    fn call(&self, call: Call<'_>) -> io::Result<()> {
        let text = describe(&call);
        let mut kernel = self.kernel();
        if let Some((name, error)) = kernel.refuses
            && text.starts_with(name)
        {
            return Err(io::Error::from_raw_os_error(error));
        }
        if matches!(call, Call::SetDisk(_)) && kernel.busy > 0 {
            kernel.busy -= 1;
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        kernel.calls.push(text);
        Ok(())
    }

    fn base(&self, _: u32) -> io::Result<u32> {
        Ok(self.kernel().base)
    }

    fn stats(&self, ring: u32) -> io::Result<RingStats> {
        match ring {
            0..RINGS => Ok(RingStats { ring, ..RingStats::default() }),
            _ => Err(io::Error::from_raw_os_error(libc::ENOBUFS)),
        }
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.kernel().calls.push("close".into());
    }
}

fn describe(call: &Call<'_>) -> String {
    match *call {
        Call::SetOwner => "SET_OWNER".into(),
        Call::SetFeatures(features) => format!("SET_FEATURES {features:#x}"),
        Call::SetMemory(areas) => {
            let areas =
                areas.iter().map(|area| format!(" {:#x}+{} at {:#x}", area.guest_addr, area.len, area.addr));
            format!("SET_MEM_TABLE{}", areas.collect::<String>())
        }
        Call::SetLogBase(addr) => format!("SET_LOG_BASE {addr:#x}"),
        Call::SetSize { ring, size } => format!("SET_VRING_NUM {ring}: {size}"),
        Call::SetBase { ring, base } => format!("SET_VRING_BASE {ring}: {base}"),
        Call::SetAddresses(at) => {
            format!("SET_VRING_ADDR {}: {:#x} {:#x} {:#x}", at.ring, at.descriptors, at.available, at.used)
        }
        Call::SetEvent { ring, event, fd } => {
            let name = match event {
                Event::Kick => "KICK",
                Event::Call => "CALL",
                Event::Err => "ERR",
            };
            format!("SET_VRING_{name} {ring}: {}", if fd.is_some() { "some" } else { "none" })
        }
        Call::SetConfig(config) => {
            let serial = String::from_utf8_lossy(&config.serial);
            format!("SET_CONFIG flags {}, serial {}", config.flags, serial.trim_end_matches('\0'))
        }
        Call::SetDisk(_) => "SET_DISK".into(),
        Call::SetMap(DiskExtent { sector, sectors, disk_sector, rights, .. }) => {
            format!("SET_MAP {sector}+{sectors} at {disk_sector}, rights {rights}")
        }
        Call::Start { ring } => format!("START_VRING {ring}"),
        Call::Stop { ring } => format!("STOP_VRING {ring}"),
    }
}
