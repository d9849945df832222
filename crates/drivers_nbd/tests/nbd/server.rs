//! Servers that others wrote.

use drivers_nbd::{Address, Options, Tls};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub const MIB: u64 = 1 << 20;
/// Bytes of the export of every server here, unless its options differ.
pub const SIZE: u64 = 32 * MIB;

/// A running server; it ends with this value.
pub struct Server {
    pub child: Child,
    pub options: Options,
    _dir: tempfile::TempDir,
    _files: Option<tempfile::TempDir>,
}

/// How the two sides know each other.
#[derive(Clone, Copy, Debug)]
pub enum Secret {
    Certificates,
    Key,
}

impl Secret {
    pub const ALL: [Secret; 2] = [Secret::Certificates, Secret::Key];
}

/// How clients reach it.
#[derive(Clone, Copy)]
pub enum Over {
    Unix,
    Tcp,
}

impl Server {
    /// nbdkit with the arguments given, which name filters, plugin and parameters.
    pub fn nbdkit(over: Over, arguments: &[&str]) -> Option<Server> {
        let mut command = Command::new(program("nbdkit")?);
        command.args(["--foreground", "--exit-with-parent"]);
        Server::start(command, over, |command, at, dir| {
            match at {
                Address::Unix(path) => command.arg("--unix").arg(path),
                Address::Tcp { port, .. } => command.args(["--ipaddr=127.0.0.1", &format!("--port={port}")]),
            };
            command.arg("--pidfile").arg(dir.join("pid")).args(arguments);
        })
    }

    /// nbdkit over a RAM disk, for those who come through TLS; with one of [`Secret::ALL`]. The
    /// client is trusted.
    pub fn nbdkit_secured(over: Over, secret: Secret) -> Option<Server> {
        let files = tempfile::tempdir().unwrap();
        let keys = files.path().join("keys.psk");
        tls::authority::write_all(files.path());
        secrets::write(&keys, format!("alice:{}\n", "5e".repeat(32))).unwrap();
        let (certificates, keys_at) =
            (format!("--tls-certificates={}", files.path().display()), keys.display());
        let keys_at = format!("--tls-psk={keys_at}");
        let (arguments, tls) = match secret {
            Secret::Certificates => {
                let tls = Tls::new(Some(files.path()), None, None, None);
                (vec!["--tls=require", "--tls-verify-peer", &certificates, "memory", "32M"], tls)
            }
            Secret::Key => {
                let tls = Tls::new(None, Some(&keys), Some("alice"), None);
                (vec!["--tls=require", &keys_at, "memory", "32M"], tls)
            }
        };
        let mut server = Server::nbdkit(over, &arguments)?;
        (server.options.tls, server._files) = (Some(tls.unwrap()), Some(files));
        Some(server)
    }

    /// `qemu-nbd` over a raw file, for as many connections as given.
    pub fn qemu_nbd(over: Over, connections: u32) -> Option<Server> {
        let command = Command::new(program("qemu-nbd")?);
        Server::start(command, over, |command, at, dir| {
            match at {
                Address::Unix(path) => command.arg("--socket").arg(path),
                Address::Tcp { port, .. } => command.args(["--bind=127.0.0.1", &format!("--port={port}")]),
            };
            command.arg(format!("--shared={connections}")).args(["--persistent", "--format=raw"]);
            command.args(["--discard=unmap", "--detect-zeroes=off"]);
            command.arg("--pid-file").arg(dir.join("pid")).arg(disk(dir));
        })
    }

    /// `qemu-storage-daemon` over a raw file, with the export `disk`.
    pub fn storage_daemon(over: Over) -> Option<Server> {
        let command = Command::new(program("qemu-storage-daemon")?);
        let server = Server::start(command, over, |command, at, dir| {
            let blockdev = "driver=file,node-name=disk,discard=unmap,cache.no-flush=on,filename=";
            command.arg("--blockdev").arg(format!("{blockdev}{}", disk(dir).display()));
            let at = match at {
                Address::Unix(path) => format!("addr.type=unix,addr.path={}", path.display()),
                Address::Tcp { host, port } => format!("addr.type=inet,addr.host={host},addr.port={port}"),
            };
            command.arg("--nbd-server").arg(format!("{at},max-connections=16"));
            command.args(["--export", "type=nbd,id=export,node-name=disk,name=disk,writable=on"]);
            command.arg("--pidfile").arg(dir.join("pid"));
        });
        server.map(|mut server| {
            server.options.export = "disk".into();
            server
        })
    }

    fn start(
        mut command: Command,
        over: Over,
        arguments: impl FnOnce(&mut Command, &Address, &Path),
    ) -> Option<Server> {
        let dir = tempfile::tempdir().unwrap();
        let address = match over {
            Over::Unix => Address::Unix(dir.path().join("socket")),
            Over::Tcp => {
                let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
                Address::Tcp { host: "127.0.0.1".into(), port }
            }
        };
        arguments(&mut command, &address, dir.path());
        let mut child = command.stdin(Stdio::null()).spawn().unwrap_or_else(|e| panic!("{command:?}: {e}"));
        let (start, pid_file) = (Instant::now(), dir.path().join("pid"));
        // Written once it listens; the socket itself is there a moment before.
        while std::fs::read(&pid_file).map_or(0, |text| text.len()) == 0 {
            if let Some(status) = child.try_wait().unwrap() {
                panic!("{command:?}: {status}");
            }
            assert!(start.elapsed() < Duration::from_secs(60), "{command:?} does not start");
            std::thread::sleep(Duration::from_millis(10));
        }
        let mut options = Options::new(address);
        options.timeout_ms = 30_000;
        Some(Server { child, options, _dir: dir, _files: None })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn disk(dir: &Path) -> PathBuf {
    let path = dir.join("disk");
    std::fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
    path
}

/// A program of the lab (`tests/lab/setup`), else of this machine.
fn program(name: &str) -> Option<PathBuf> {
    let lab = std::env::var_os("LAB_DIR")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/lab"), PathBuf::from);
    let mut dirs = vec![lab.join("bin")];
    dirs.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()));
    dirs.extend(["/usr/sbin".into(), "/usr/bin".into()]);
    let found = dirs.into_iter().map(|dir| dir.join(name)).find(|path| path.is_file());
    if found.is_none() {
        eprintln!("skipped: {name} is not installed");
    }
    found
}
