//! No content of a secret file appears in an answer, the log, an event, a metric, or on standard
//! error.
//!
//! The tests write a canary into files, in formats that the readers know and in others. They give
//! the files to every option of the API and of the command line that takes the path of a key,
//! token, certificate or configuration file.

use crate::common::{Daemon, MIB, PATIENCE};
use reqwest::Method;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Valid as hexadecimal and base64 digits and as part of a name.
const CANARY: &str = "c0ffee5ec2e7c0ffee";
/// The files of a directory of certificates.
const CERTIFICATE_FILES: [&str; 5] =
    ["ca-cert.pem", "server-cert.pem", "server-key.pem", "client-cert.pem", "client-key.pem"];

fn contents() -> Vec<(&'static str, String)> {
    let c = CANARY;
    let key = "5e".repeat(16);
    let dhhc = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
    let tls_key = "NVMeTLSkey-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
    vec![
        ("word", c.into()),
        ("shadow", format!("root:$y$j9T${c}:19000:0:99999:7:::\n")),
        ("password line", format!("root:$y$j9T${c}\n")),
        ("psk with a wrong key", format!("alice:{c}{c}x\n")),
        ("psk with a short key", format!("alice:{}\n", &c[..16])),
        ("psk twice", format!("{c}:{key}\n{c}:{key}\n")),
        ("psk of another", format!("{c}:{key}\nb{c}:{key}\n")),
        ("psk whose identity is too long", format!("{}:{key}\n", c.repeat(9))),
        ("secret with a wrong hash", format!("DHHC-1:{c}:{c}:")),
        ("secret that is too short", format!("DHHC-1:01:{}:", &c[..16])),
        ("host without a name", format!("{c} {dhhc}\n")),
        ("host twice", format!("nqn.{c} {dhhc}\nnqn.{c} {dhhc}\n")),
        ("host with a wrong secret", format!("nqn.{c} DHHC-1:00:{c}:\n")),
        ("host with three secrets", format!("nqn.a {dhhc} {dhhc} {c}\n")),
        ("TLS host twice", format!("nqn.{c} {tls_key}\nnqn.{c} {tls_key}\n")),
        ("TLS key with a wrong hash", format!("nqn.a NVMeTLSkey-1:{c}:{c}:\n")),
        ("TLS key", format!("NVMeTLSkey-1:01:{c}:\n")),
        ("private key", format!("-----BEGIN PRIVATE KEY-----\n{c}\n-----END PRIVATE KEY-----\n")),
        ("certificate", format!("-----BEGIN CERTIFICATE-----\n{c}\n-----END CERTIFICATE-----\n")),
        ("label", format!("-----BEGIN {c}-----\n{c}\n-----END {c}-----\n")),
        ("token with a wrong role", format!("{c} alice {c}{c}\n")),
        ("token that is too short", format!("admin {c} {c}\n")),
        ("hash that is too short", format!("admin {c} sha256:{c}\n")),
        ("hash with a wrong time", format!("admin {c} sha256:{} expires={c}\n", "5e".repeat(32))),
        ("four words", format!("admin {c} {c}{c} {c}\n")),
        ("JSON", format!("{{\"{c}\": \"{c}\"}}")),
        ("TOML with another key", format!("{c} = \"{c}\"\n")),
        (
            "TOML with a wrong value",
            format!("[[volume]]\nname = \"v9\"\nbacking = \"data\"\nsize_bytes = \"{c}, expected {c}\"\n"),
        ),
        ("TOML with a wrong word", format!("[[volume]]\nname = \"v9\"\n{c}.{c} = 1\n")),
        ("TOML of a password", format!("[{c}]\npassword = \"{c}\"\n")),
        ("TOML twice", format!("{c} = 1\n{c} = 2\n")),
        ("TOML that ends", format!("password = \"{c}\n")),
        ("bytes", format!("{c}\0\u{1}{c}")),
    ]
}

/// A file with this content, and a directory in which each certificate and key is such a file.
fn lay_out(dir: &Path, number: usize, content: &str) -> (PathBuf, PathBuf) {
    let (file, directory) = (dir.join(format!("file{number}")), dir.join(format!("dir{number}")));
    secrets::write(&file, content).unwrap();
    std::fs::create_dir_all(&directory).unwrap();
    for name in CERTIFICATE_FILES {
        secrets::write(&directory.join(name), content).unwrap();
    }
    (file, directory)
}

/// Requests that have the daemon read `file`, or what is in `directory`: kind, key and body, of
/// exports and of devices.
fn requests(file: &Path, directory: &Path) -> Vec<(&'static str, String, String, Value)> {
    let path_for = |value: &str| match value {
        "FILE" => Some(file.display().to_string()),
        "DIR" => Some(directory.display().to_string()),
        _ => None,
    };
    let mut requests = Vec::new();
    for kind in hosting::export::KINDS {
        for key in kind.keys.iter().filter(|key| key.name != "reservations") {
            let Some(path) = path_for(key.value) else { continue };
            let mut options = json!({ "listen": "127.0.0.1:0", key.name: path });
            if kind.name == "nvme-tcp" {
                options["nqn"] = json!("nqn.2014-08.org:x");
            }
            let body = json!({ "name": "e1", "kind": kind.name, "volumes": ["v1"], "options": options });
            requests.push(("/v1/exports", kind.name.into(), key.name.into(), body));
            if key.name == "tls-certificates" {
                let mut body = requests.last().unwrap().3.clone();
                body["options"]["tls-verify-peer"] = json!("on");
                requests.push(("/v1/exports", kind.name.into(), key.name.into(), body));
            }
        }
    }
    let mut device = |kind: &str, key: &str, spec: String| {
        requests.push(("/v1/devices", kind.into(), key.into(), json!({ "name": "d1", "spec": spec })));
    };
    for kind in stack::kinds::device::KINDS {
        for key in kind.keys {
            let Some(path) = path_for(key.value) else { continue };
            let place = match kind.name {
                "nbd" => "host=127.0.0.1,port=1",
                _ => "address=127.0.0.1:1,nqn=nqn.2014-08.org:x",
            };
            device(kind.name, key.name, format!("{}:{place},{}={path}", kind.name, key.name));
        }
    }
    let uri = "nbd:uri=nbds://alice@127.0.0.1:1/x";
    device("nbd", "uri", format!("{uri}?tls-psk-file={}", file.display()));
    device("nbd", "uri", format!("{}?tls-certificates={}", uri.replace("alice@", ""), directory.display()));
    requests
}

#[test]
fn no_content_of_a_secret_file_is_in_an_answer_the_log_or_an_event() {
    let daemon = Daemon::with(&["--member-timeout", "1", "--json", "--log", "trace"]);
    let disk = daemon.file("disk", 64 * MIB);
    daemon.post("/v1/devices", &json!({ "name": "data", "spec": disk }));
    daemon.volume("v1", MIB);
    let mut read: Vec<(String, String)> = Vec::new();
    let check = |what: &str, text: &str| assert!(!text.to_lowercase().contains(CANARY), "{what}: {text}");
    for (number, (content, text)) in contents().iter().enumerate() {
        let (file, directory) = lay_out(daemon.dir.path(), number, text);
        for (place, (path, kind, key, body)) in requests(&file, &directory).into_iter().enumerate() {
            let id = format!("{number}.{place}");
            let request = daemon.request(Method::POST, path).header("idempotency-key", id);
            let response = request.json(&body).send().unwrap();
            let is_made = response.status().is_success();
            let answer = response.text().unwrap();
            check(&format!("{content}: {kind} {key}"), &answer);
            // A reader that is reached names the file, or takes it.
            if is_made
                || answer.contains(&format!("/file{number}"))
                || answer.contains(&format!("/dir{number}/"))
            {
                read.push((kind, key));
            }
            if is_made {
                daemon.delete(&format!("{path}/{}", body["name"].as_str().unwrap()));
            }
        }
    }
    read.sort();
    read.dedup();
    let read: Vec<(&str, &str)> = read.iter().map(|(kind, key)| (&**kind, &**key)).collect();
    let all = [
        ("nbd", "tls-certificates"),
        ("nbd", "tls-psk"),
        ("nbd", "uri"),
        ("nvme-tcp", "auth-keys"),
        ("nvme-tcp", "dhchap-ctrl-key"),
        ("nvme-tcp", "dhchap-key"),
        ("nvme-tcp", "tls-key"),
        ("nvme-tcp", "tls-keys"),
    ];
    assert_eq!(read, all, "options that read a file with secrets");
    // All that `freestone support collect` asks for, and more.
    for part in ["system", "devices", "arrays", "volumes", "groups", "exports", "jobs", "events", "samples"] {
        check(part, &daemon.get(&format!("/v1/{part}")).to_string());
    }
    check("metrics", &daemon.request(Method::GET, "/metrics").send().unwrap().text().unwrap());
    check("state.json", &std::fs::read_to_string(daemon.path("state/state.json")).unwrap());
    check("the log", &daemon.log());
    for file in std::fs::read_dir(daemon.path("state/idempotency")).unwrap() {
        check("the answer to a key", &std::fs::read_to_string(file.unwrap().path()).unwrap());
    }
}

/// Runs a command that ends by itself.
fn run(command: &mut Command) -> (ExitStatus, String) {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let deadline = Instant::now() + PATIENCE;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let output = child.wait_with_output().unwrap();
    (output.status, String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
}

#[test]
fn no_content_of_a_secret_file_is_on_standard_error() {
    let daemon = Daemon::prepare(&["--log", "trace"]);
    let good = daemon.path("tokens");
    secrets::write(&good, "admin a 0123456789abcdef01234567\n").unwrap();
    for (number, (content, text)) in contents().iter().enumerate() {
        let (file, directory) = lay_out(daemon.dir.path(), number, text);
        let listen = ["--listen".as_ref(), "127.0.0.1:0".as_ref()];
        let by_tokens = [&listen[..], &["--tokens".as_ref(), file.as_os_str()]].concat();
        let by_certificates = [
            &listen[..],
            &["--tokens".as_ref(), good.as_os_str(), "--tls-certificates".as_ref(), directory.as_os_str()],
        ]
        .concat();
        let readers =
            [vec!["--config".as_ref(), file.as_os_str(), "--plan".as_ref()], by_tokens, by_certificates];
        for args in readers {
            let (status, said) = run(daemon.command().args(&args));
            assert!(!said.to_lowercase().contains(CANARY), "{content}: {args:?}: {said}");
            let names = [format!("/file{number}"), format!("/dir{number}")];
            assert!(!status.success(), "{content}: {args:?}: {said}");
            assert!(names.iter().any(|name| said.contains(name)), "{content}: {args:?}: {said}");
        }
    }
}
