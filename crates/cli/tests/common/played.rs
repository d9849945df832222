//! A daemon that is played by the test: it answers as often as it has answers.

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

/// The daemon.
pub struct Played {
    folder: tempfile::TempDir,
    thread: JoinHandle<Vec<(String, String)>>,
}

impl Played {
    /// A daemon that gives these answers, status and body, to the requests that come.
    pub fn new(answers: Vec<(u16, Value)>) -> Played {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("d.sock")).unwrap();
        let answer = move |(status, body): (u16, Value)| {
            let (stream, _) = listener.accept().unwrap();
            answer(&stream, status, &body)
        };
        let thread = std::thread::spawn(move || answers.into_iter().map(answer).collect());
        Played { folder, thread }
    }

    /// Its socket.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("d.sock")
    }

    /// A directory for other sockets.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The first line and the body of each request. Every answer must have been given.
    pub fn requests(self) -> Vec<(String, String)> {
        self.thread.join().unwrap()
    }
}

fn answer(mut stream: &UnixStream, status: u16, body: &Value) -> (String, String) {
    let mut reader = BufReader::new(stream);
    let (mut first, mut len) = (String::new(), 0);
    reader.read_line(&mut first).unwrap();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            len = value.trim().parse().unwrap();
        }
        if line.trim().is_empty() {
            break;
        }
    }
    let mut asked = vec![0; len];
    reader.read_exact(&mut asked).unwrap();
    let body = body.to_string();
    let head = format!(
        "HTTP/1.1 {status} x\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).unwrap();
    (first.trim().to_owned(), String::from_utf8(asked).unwrap())
}
