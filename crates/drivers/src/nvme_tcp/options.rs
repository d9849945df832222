//! How to reach a subsystem, and who the host says it is.

use crate::stream::Address;
use nvme::fabrics::Nqn;
use nvme_auth::Key;
use std::net::IpAddr;

/// The port that belongs to the protocol.
pub const DEFAULT_PORT: u16 = nvme::tcp::DEFAULT_PORT;
/// The port that belongs to discovery.
pub const DISCOVERY_PORT: u16 = nvme::tcp::DISCOVERY_PORT;
/// Most I/O queues, each on a connection of its own: more than a target has cores.
pub const MAX_QUEUES: u32 = 64;
/// Most requests in flight on a queue: what a command identifier has bits for, beside its generation.
pub const MAX_QUEUE_DEPTH: u32 = 1024;
/// Longest time that a host may stay silent: ten minutes.
const MAX_KEEP_ALIVE_S: u32 = 600;

/// How to open a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Where the target listens.
    pub address: Address,
    /// The subsystem.
    pub nqn: Nqn,
    /// The namespace; `None` for the first there is.
    pub nsid: Option<u32>,
    /// The host's name; `None` for that of this machine (`/etc/nvme/hostnqn`), or one made of its identifier.
    pub host_nqn: Option<Nqn>,
    /// The host's identifier; `None` for that of this machine (`/etc/nvme/hostid`), or a new one each time.
    pub host_id: Option<[u8; 16]>,
    /// By which the host proves who it is, where the target wants to know.
    pub key: Option<Key>,
    /// By which the target has to prove the same.
    pub controller_key: Option<Key>,
    /// Refuse writes, whatever the target allows.
    pub read_only: bool,
    /// Most I/O queues; 0 for as many as the target allows.
    pub queues: u32,
    /// Requests in flight on each queue: 1 to [`MAX_QUEUE_DEPTH`]. A target may allow less.
    pub queue_depth: u32,
    /// Protect headers by digests.
    pub header_digest: bool,
    /// Protect data by digests.
    pub data_digest: bool,
    /// The target takes the host for dead after this long without a word, in seconds, and the host the target; 0:
    /// nobody looks.
    pub keep_alive_s: u32,
    /// How long connecting may take, in milliseconds.
    pub timeout_ms: u64,
    /// How long a command may take before the connection is given up, in seconds.
    pub io_timeout_s: u32,
    /// Longest pause between attempts to connect again, in seconds.
    pub reconnect_delay_s: u32,
    /// How long to go on trying before requests fail, in seconds; 0: they fail at once.
    pub loss_timeout_s: u32,
}

impl Options {
    /// The defaults for the first namespace of the subsystem `nqn` at `address`.
    pub fn new(address: Address, nqn: Nqn) -> Options {
        Options {
            address,
            nqn,
            nsid: None,
            host_nqn: None,
            host_id: None,
            key: None,
            controller_key: None,
            read_only: false,
            queues: 0,
            queue_depth: 128,
            header_digest: false,
            data_digest: false,
            keep_alive_s: 5,
            timeout_ms: 10_000,
            io_timeout_s: 30,
            reconnect_delay_s: 10,
            loss_timeout_s: 600,
        }
    }

    /// Name for people.
    pub fn name(&self) -> String {
        match self.nsid {
            Some(nsid) => format!("nvme-tcp://{}/{}/{nsid}", self.address, self.nqn),
            None => format!("nvme-tcp://{}/{}", self.address, self.nqn),
        }
    }

    /// What is wrong with the options, if anything is.
    pub(super) fn check(&self) -> Result<(), String> {
        if !(1..=MAX_QUEUE_DEPTH).contains(&self.queue_depth) {
            return Err(format!("queue depth {}: 1 to {MAX_QUEUE_DEPTH}", self.queue_depth));
        }
        if self.queues > MAX_QUEUES {
            return Err(format!("{} queues: at most {MAX_QUEUES}", self.queues));
        }
        if self.timeout_ms == 0 || self.io_timeout_s == 0 {
            return Err("a timeout of 0 leaves no time for anything".into());
        }
        if self.keep_alive_s > MAX_KEEP_ALIVE_S {
            return Err(format!("keep-alive {} s: at most {MAX_KEEP_ALIVE_S}", self.keep_alive_s));
        }
        if self.nsid.is_some_and(|nsid| nsid == 0 || nsid == u32::MAX) {
            return Err(format!("namespace {}: 1 to {}", self.nsid.unwrap_or(0), u32::MAX - 1));
        }
        if self.controller_key.is_some() {
            match &self.key {
                None => return Err("a target that shall prove who it is wants the same of the host".into()),
                key if *key == self.controller_key => {
                    return Err("the host and the target have the same secret".into());
                }
                Some(_) => {}
            }
        }
        if self.nqn.is_discovery() {
            return Err("the discovery subsystem has no namespaces".into());
        }
        Ok(())
    }
}

/// Reads `HOST[:PORT]`, `[IPv6][:PORT]` or an IPv6 address without a port.
///
/// # Errors
/// A sentence that says what is wrong with it.
pub fn parse_address(text: &str) -> Result<Address, String> {
    parse_address_at(text, DEFAULT_PORT)
}

/// As [`parse_address`], with another port where there is none.
///
/// # Errors
/// A sentence that says what is wrong with it.
pub fn parse_address_at(text: &str, port_if_none: u16) -> Result<Address, String> {
    let wrong = || format!("{text:?} is no address: HOST, HOST:PORT or [IPV6]:PORT");
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => rest.split_once(']').ok_or_else(wrong)?,
        None if text.parse::<IpAddr>().is_ok() => (text, ""),
        None => text.find(':').map_or((text, ""), |at| text.split_at(at)),
    };
    if host.is_empty() || host.contains(['\0', '/']) {
        return Err(wrong());
    }
    let port = match port {
        "" => port_if_none,
        port => {
            let digits = port.strip_prefix(':').and_then(|digits| digits.parse().ok());
            digits.filter(|port| *port != 0).ok_or_else(wrong)?
        }
    };
    Ok(Address::Tcp { host: host.to_owned(), port })
}

/// Reads a UUID: 32 hexadecimal digits, with dashes or without.
pub fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let digits: Vec<u8> = text
        .chars()
        .filter(|c| *c != '-')
        .map(|c| c.to_digit(16).map(|digit| digit as u8))
        .collect::<Option<_>>()?;
    let bytes: Vec<u8> = digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect();
    if digits.len() == 32 { bytes.try_into().ok() } else { None }
}

/// Who the host says it is: what the options say, else this machine's files, else something new.
pub(super) fn host(options: &Options) -> ([u8; 16], Nqn) {
    let read = |path| std::fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default();
    let id = options.host_id.or_else(|| parse_uuid(&read("/etc/nvme/hostid")));
    // Without any of these all such hosts would be one: no target minds that but for reservations.
    let id = id.or_else(|| parse_uuid(&read("/proc/sys/kernel/random/uuid"))).unwrap_or([0xf5; 16]);
    let name = options.host_nqn.clone();
    let of_machine = || Nqn::new(&read("/etc/nvme/hostnqn")).ok().filter(|_| options.host_id.is_none());
    (id, name.or_else(of_machine).unwrap_or_else(|| Nqn::of_uuid(&id)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> Options {
        Options::new(parse_address("example.com").unwrap(), Nqn::new("nqn.2014-08.org.example:disk").unwrap())
    }

    #[test]
    fn addresses_name_host_and_port() {
        let cases = [
            ("example.com", "example.com:4420"),
            ("10.0.0.1:8009", "10.0.0.1:8009"),
            ("::1", "[::1]:4420"),
            ("[fe80::1]:99", "[fe80::1]:99"),
            ("[fe80::1]", "[fe80::1]:4420"),
        ];
        for (text, address) in cases {
            assert_eq!(parse_address(text).unwrap().to_string(), address);
        }
        for wrong in ["", ":4420", "a:0", "a:x", "a:70000", "[::1", "[::1]x", "/run/a"] {
            assert!(parse_address(wrong).unwrap_err().contains("no address"), "{wrong}");
        }
    }

    #[test]
    fn a_host_is_named_by_its_identifier_unless_it_has_a_name() {
        let id = parse_uuid("00112233-4455-6677-8899-aabbccddeeff").unwrap();
        assert_eq!((id[0], id[15]), (0x00, 0xff));
        assert_eq!(parse_uuid("00112233-4455"), None);
        assert_eq!(parse_uuid("00112233-4455-6677-8899-aabbccddeefg"), None);
        let known = Options { host_id: Some(id), ..options() };
        let name = "nqn.2014-08.org.nvmexpress:uuid:00112233-4455-6677-8899-aabbccddeeff";
        assert_eq!(host(&known), (id, Nqn::new(name).unwrap()));
        let named = Options { host_nqn: Some(Nqn::new("nqn.a").unwrap()), ..known };
        assert_eq!(host(&named).1.as_str(), "nqn.a");
    }

    #[test]
    fn options_out_of_range_are_errors_that_name_the_value() {
        let good = options();
        let key = Key::parse("DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:").unwrap();
        assert_eq!(good.check(), Ok(()));
        let cases = [
            (Options { queue_depth: 0, ..good.clone() }, "queue depth 0"),
            (Options { queue_depth: 5000, ..good.clone() }, "queue depth 5000"),
            (Options { queues: 65, ..good.clone() }, "65 queues"),
            (Options { timeout_ms: 0, ..good.clone() }, "timeout of 0"),
            (Options { keep_alive_s: 601, ..good.clone() }, "keep-alive 601 s"),
            (Options { nsid: Some(0), ..good.clone() }, "namespace 0"),
            (Options { controller_key: Some(key.clone()), ..good.clone() }, "the same of the host"),
            (
                Options { controller_key: Some(key.clone()), key: Some(key), ..good.clone() },
                "the same secret",
            ),
            (Options { nqn: Nqn::discovery(), ..good }, "no namespaces"),
        ];
        for (options, why) in cases {
            assert!(options.check().unwrap_err().contains(why), "{options:?}");
        }
    }
}
