//! Requests that exceed the available memory: they are split into fragments and end as all others.

use crate::client::*;
use crate::server::{MIB, Server, wait_until};
use block::IoError;
use conformance::slow::{SlowDevice, pattern};
use exports::Export;
use exports_nbd::{Config, MemoryBudget};
use std::io::{Read, Write};

const LEN: u64 = 12 * MIB;

/// A server with so little memory that a request of 12 MiB is split into fragments.
fn small(len: u64) -> (Server, MemoryBudget) {
    let memory = MemoryBudget::new(0);
    let config = memory.clone();
    (Server::over(SlowDevice::new(len), |other| Config { memory: config, ..other }), memory)
}

fn expected(offset: u64, len: u64) -> Vec<u8> {
    (offset..offset + len).map(pattern).collect()
}

#[test]
fn a_long_read_comes_in_chunks_or_as_one_reply_where_chunks_cannot_be() {
    let (server, memory) = small(16 * MIB);
    let mut structured = server.connect(Form::Structured);
    assert!(structured.read_chunks(512, LEN).unwrap() == expected(512, LEN));
    let mut unaware = Client::unaware(&server.socket, Form::Structured);
    assert!(unaware.read_chunks(517, LEN + 3).unwrap() == expected(517, LEN + 3));
    drop(unaware);
    for (form, flags) in [(Form::Simple, 0), (Form::Structured, 4)] {
        let mut client = server.connect(form);
        // Two replies that must not be interrupted, and short ones in between.
        for cookie in 0..2 {
            client.send(READ, flags, cookie, cookie * MIB, LEN);
            client.send(READ, 0, 10 + cookie, cookie * 4096, 4096);
        }
        for _ in 0..4 {
            let Reply { cookie, error, data, .. } = client.reply();
            let (offset, len) = if cookie < 10 { (cookie * MIB, LEN) } else { ((cookie - 10) * 4096, 4096) };
            assert_eq!((error, data.len() as u64), (0, len));
            assert!(data == expected(offset, len));
        }
    }
    assert!(memory.in_use() < memory.bytes());
    drop(structured);
    server.wait_for_clients(0);
    wait_until(|| memory.in_use() == 0);
}

#[test]
fn a_long_write_is_stored_fragment_by_fragment_and_answered_once() {
    let (server, memory) = small(16 * MIB);
    for form in FORMS {
        let mut client = server.connect(form);
        let data: Vec<u8> = (0..LEN).map(|i| (i / 1000) as u8 ^ form as u8).collect();
        assert_eq!(client.write(FUA, 512, &data), 0);
        assert!(server.device.bytes(512, LEN as usize) == data);
        assert_eq!(client.run(FLUSH, 0, 0, 0).error, 0);
        let mut unaware = Client::unaware(&server.socket, form);
        assert_eq!(unaware.write(0, 517, &data), 0);
        assert_eq!(server.device.bytes(512, 5), data[..5]);
        assert!(server.device.bytes(517, LEN as usize) == data);
        assert_eq!(server.device.bytes(517 + LEN, 1)[0], pattern(517 + LEN));
    }
    server.wait_for_clients(0);
    wait_until(|| memory.in_use() == 0);
}

#[test]
fn an_error_in_the_middle_is_told_where_there_is_a_way() {
    let (server, _) = small(20 * MIB);
    let mut structured = server.connect(Form::Structured);
    let mut simple = server.connect(Form::Simple);
    server.device.fail_at(5 * MIB, IoError::Medium);
    assert_eq!(structured.read_chunks(0, LEN), Err(EIO));
    assert_eq!(structured.read_chunks(5 * MIB, LEN), Err(EIO));
    assert_eq!(structured.write(0, 0, &vec![1; LEN as usize]), EIO);
    assert_eq!(structured.run(FLUSH, 0, 0, 0).error, 0, "the connection still works");
    simple.send(READ, 0, 1, 5 * MIB, LEN);
    assert_eq!(simple.reply().error, EIO, "nothing of it had been sent");
    simple.send(READ, 0, 1, 0, LEN);
    let mut front = [0; 16];
    simple.stream.read_exact(&mut front).unwrap();
    assert!(simple.is_disconnected(), "the data that was promised cannot come");
    server.wait_for_clients(1);
}

#[test]
fn clients_that_vanish_and_an_export_that_stops_in_the_middle_leave_nothing_behind() {
    let (mut server, memory) = small(16 * MIB);
    for form in [Form::Simple, Form::Structured] {
        let mut reader = server.connect(form);
        reader.send(READ, 0, 1, 0, LEN);
        reader.stream.read_exact(&mut [0; 1000]).unwrap();
        let mut writer = server.connect(form);
        let header = writer.request(WRITE, 0, 1, 0, LEN);
        writer.stream.write_all(&[header, vec![1; 3 * MIB as usize]].concat()).unwrap();
        drop((reader, writer));
        server.wait_for_clients(0);
        wait_until(|| memory.in_use() == 0);
    }
    let mut writer = server.connect(Form::Structured);
    let header = writer.request(WRITE, 0, 1, 0, LEN);
    let before = server.device.executed();
    writer.stream.write_all(&[header, vec![1; MIB as usize + 1000]].concat()).unwrap();
    wait_until(|| server.device.executed() >= before + 8);
    let export = server.export.take();
    let stopping = std::thread::spawn(move || drop(export));
    writer.stream.write_all(&vec![1; (LEN - MIB) as usize - 1000]).unwrap_or(());
    assert!(writer.is_disconnected());
    stopping.join().unwrap();
    wait_until(|| memory.in_use() == 0);
}

#[test]
fn a_client_without_memory_for_its_connection_is_refused() {
    let memory = MemoryBudget::new(0);
    let config = |other| Config { memory: memory.clone(), ..other };
    let server = Server::over(SlowDevice::new(MIB), config);
    // Half of 16 MiB, of 514 KiB each.
    let clients: Vec<Client> = (0..15).map(|_| server.connect(Form::Simple)).collect();
    assert!(server.connect(Form::Simple).is_disconnected());
    assert_eq!(server.export().stats().clients(), 15);
    drop(clients);
    server.wait_for_clients(0);
    server.connect(Form::Simple).read(0, 512);
}
