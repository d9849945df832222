//! Memory costs of clients that read nothing. Has its own process, whose memory it measures.

#[path = "nbd/client.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod client;

use client::{Client, FLUSH, Form, READ};
use drivers::mem::{MemDevice, Options};
use exports::Export;
use exports_nbd::{Address, Config, MemoryBudget, Nbd};
use reactor::{CoreConfig, Cores, PollWindow};
use std::mem::MaybeUninit;
use std::sync::Arc;

const MIB: usize = 1 << 20;
const LONG: u64 = 32 << 20;
const BUDGET: usize = 80 * MIB;

/// Bytes of memory that the process has.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}

fn byte(i: usize) -> u8 {
    (i / 777) as u8
}

#[test]
fn sixty_four_clients_with_an_unread_read_of_32_mib_stay_within_the_budget() {
    let memory = MemoryBudget::new(BUDGET);
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("nbd.sock");
    let core = CoreConfig { poll: PollWindow::up_to(20_000), ..CoreConfig::default() };
    let cores = Cores::start(&vec![core; 2]).unwrap();
    let address = Address::Unix { path: socket.clone(), permissions: 0o600 };
    let config = Config { clients: 70, memory: memory.clone(), ..Config::new(address) };
    let device = Arc::new(MemDevice::new(&Options::new(LONG)).unwrap());
    let export = Nbd::start(device, cores.all(), config).unwrap();
    let mut good = Client::connect(&socket, Form::Structured);
    let content: Vec<u8> = (0..LONG as usize).map(byte).collect();
    assert_eq!(good.write(0, 0, &content), 0);

    let before = resident();
    let mut greedy: Vec<Client> = (0..64).map(|_| Client::connect(&socket, Form::Structured)).collect();
    greedy.iter_mut().for_each(|client| client.send(READ, 0, 1, 0, LONG));
    // Each has been answered, as far as that goes without its reading, when its first bytes are
    // there.
    for client in &greedy {
        let peeked = socket2::SockRef::from(&client.stream).peek(&mut [MaybeUninit::uninit()]).unwrap();
        assert_eq!(peeked, 1);
    }
    for i in 0..200u64 {
        assert_eq!(good.read(i * 4096, 4096), content[i as usize * 4096..][..4096]);
    }
    let grown = resident().saturating_sub(before);
    assert!(grown < BUDGET + 16 * MIB, "{} MiB more than before", grown / MIB);
    assert!(memory.in_use() <= BUDGET, "{memory:?}");
    // Long requests are served, too, to those that wait and to those that come.
    assert!(good.read_chunks(0, LONG).unwrap() == content);
    assert_eq!(good.write(0, 0, &content), 0);
    let mut late = Client::connect(&socket, Form::Simple);
    assert!(late.read(0, LONG) == content);
    // A client that begins to read gets all of its data.
    for client in greedy.iter_mut().step_by(16) {
        assert!(client.chunks(0, LONG).unwrap() == content);
        assert_eq!(client.run(FLUSH, 0, 0, 0).error, 0);
    }
    drop((greedy, good, late));
    // Memory is given back before a client counts as gone.
    while memory.in_use() > 0 || export.stats().clients() > 0 {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}
