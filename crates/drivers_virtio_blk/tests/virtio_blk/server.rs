//! A server that others wrote.

use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

pub const MIB: usize = 1 << 20;

/// A running server; it ends with this value.
pub struct Server {
    pub child: Child,
    dir: tempfile::TempDir,
}

impl Server {
    /// Serves a file of 16 MiB with two queues.
    pub fn start() -> Option<Server> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::File::create(dir.path().join("disk")).unwrap().set_len(16 * MIB as u64).unwrap();
        let (disk, socket) = (dir.path().join("disk"), dir.path().join("socket"));
        let pid_file = dir.path().join("pid");
        let spawned = Command::new("qemu-storage-daemon")
            .arg("--pidfile")
            .arg(&pid_file)
            .arg("--blockdev")
            .arg(format!("driver=file,node-name=disk,filename={},discard=unmap,cache.no-flush=on", disk.display()))
            .arg("--export")
            .arg(format!(
                "vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={},writable=on,num-queues=2",
                socket.display()
            ))
            .spawn();
        match spawned {
            Ok(child) => {
                let server = Server { child, dir };
                let start = Instant::now();
                // Written once it listens; the socket itself is there a moment before.
                while !pid_file.exists() {
                    assert!(start.elapsed() < Duration::from_secs(60), "the server does not start");
                    std::thread::sleep(Duration::from_millis(10));
                }
                Some(server)
            }
            Err(error) => {
                eprintln!("skipped: qemu-storage-daemon: {error}");
                None
            }
        }
    }

    /// Where it listens.
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    /// The file that is served.
    pub fn disk(&self) -> std::fs::File {
        std::fs::File::open(self.dir.path().join("disk")).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
