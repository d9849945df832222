//! Targets that violate the protocol: the connection ends, the next one works, and no memory
//! outside of a request is touched.

use super::target::{Client, digest_of};
use super::*;
use nvme::tcp::{C2hData, FatalStatus};
use nvme::{Status, SubmissionEntry};
use std::io;

/// Runs a read of 4096 bytes against a target that answers the first one with `trick` and all later
/// ones correctly. Returns the reason of the termination that the target received, if any.
fn survives(
    header_digest: bool,
    data_digest: bool,
    mut trick: impl FnMut(&mut Client, u16) -> io::Result<()> + Send + 'static,
) -> Option<FatalStatus> {
    let target = Target::start(Traits::default());
    target.state.disk.lock().unwrap().fill(5);
    let (_session, mut queue) = open(&Options { header_digest, data_digest, ..options(&target) });
    let mut is_first = true;
    target.hook(move |client: &mut Client, entry: &SubmissionEntry| {
        if !std::mem::take(&mut is_first) {
            return Ok(false);
        }
        trick(client, entry.command_id)?;
        Ok(true)
    });
    let mut memory = vec![1; 3 * 4096];
    let list = segment(&mut memory[4096..8192]);
    assert_eq!(run(&mut queue, &Request::read(data(&list)), 8192), Ok(()));
    assert!(memory[..4096].iter().chain(&memory[8192..]).all(|byte| *byte == 1), "outside of the request");
    assert!(memory[4096..8192].iter().all(|byte| *byte == 5));
    assert_eq!(target.opcodes().len(), 2, "once in vain");
    let start = Instant::now();
    loop {
        let told = target.state.terminations.lock().unwrap().first().map(|request| request.status.unwrap());
        if told.is_some() || start.elapsed() > Duration::from_millis(200) {
            return told;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn pdu(command_id: u16, offset: u32, len: u32) -> C2hData {
    C2hData { command_id, offset, len, is_last: false, is_success: false }
}

#[test]
fn data_outside_of_what_was_asked_for_ends_the_connection() {
    for (offset, len) in [(4096, 512), (0, 8192), (512, 512), (u32::MAX - 511, 508)] {
        let told = survives(false, false, move |client, id| {
            client.data_pdu(&pdu(id, offset, len), &vec![9; len as usize], [0; 4])
        });
        assert_eq!(told, Some(FatalStatus::DataOutOfRange), "{len} bytes at {offset}");
    }
    let told = survives(false, false, |client, id| {
        client.data_pdu(&pdu(id, 0, 2048), &[9; 2048], [0; 4])?;
        client.data_pdu(&pdu(id, 0, 2048), &[9; 2048], [0; 4])
    });
    assert_eq!(told, Some(FatalStatus::DataOutOfRange), "the same data twice");
}

#[test]
fn success_without_all_data_is_none() {
    let told = survives(false, false, |client, id| client.respond(id, Status::SUCCESS, 0));
    assert_eq!(told, Some(FatalStatus::Sequence));
    let told = survives(false, false, |client, id| {
        let data = C2hData { is_last: true, is_success: true, ..pdu(id, 0, 512) };
        client.data_pdu(&data, &[9; 512], [0; 4])
    });
    assert_eq!(told, Some(FatalStatus::Sequence));
}

#[test]
fn answers_to_nothing_end_the_connection() {
    let told = survives(false, false, |client, id| client.respond(id ^ 1, Status::SUCCESS, 0));
    assert_eq!(told, Some(FatalStatus::Sequence));
    let told = survives(false, false, |client, id| client.respond(id ^ 0x8000, Status::SUCCESS, 0));
    assert_eq!(told, Some(FatalStatus::Sequence), "an older command of the same slot");
    let told = survives(false, false, |client, id| client.data_pdu(&pdu(id ^ 2, 0, 512), &[9; 512], [0; 4]));
    assert_eq!(told, Some(FatalStatus::Sequence));
    let told = survives(false, false, |client, id| client.r2t(id, 0, 4096));
    assert_eq!(told, Some(FatalStatus::DataOutOfRange), "data for a read");
}

#[test]
fn headers_that_cannot_be_end_the_connection() {
    let headers: [&[u8]; 6] = [
        &[0x42; 128],
        &[4, 0, 72, 0, 72, 0, 0, 0],
        &[5, 0, 24, 0, 23, 0, 0, 0],
        &[5, 0, 24, 0, 255, 255, 255, 255],
        &[7, 0, 24, 3, 64, 0, 0, 0],
        &[5, 1, 24, 0, 28, 0, 0, 0],
    ];
    for header in headers {
        let told = survives(false, false, move |client, _| client.send(header));
        assert_eq!(told, Some(FatalStatus::InvalidHeader), "{header:?}");
    }
    // A response to Connect, long after it.
    let mut response = [0; 128];
    response[..8].copy_from_slice(&[1, 0, 128, 0, 128, 0, 0, 0]);
    let told = survives(false, false, move |client, _| client.send(&response));
    assert_eq!(told, Some(FatalStatus::Sequence));
}

#[test]
fn a_header_whose_digest_is_wrong_ends_the_connection() {
    let told = survives(true, false, |client, _| {
        client.send(&[5, 1, 24, 0, 28, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4])
    });
    assert_eq!(told, Some(FatalStatus::HeaderDigest));
}

#[test]
fn data_whose_digest_is_wrong_is_asked_for_again() {
    let told = survives(false, true, |client, id| {
        let data = C2hData { is_last: true, is_success: true, ..pdu(id, 0, 4096) };
        client.data_pdu(&data, &[9; 4096], digest_of(&[8; 4096]))
    });
    assert_eq!(told, None, "the connection still works");
}

#[test]
fn a_target_that_ends_the_connection_in_the_middle_of_data_is_asked_again() {
    for sent in [0, 1, 23, 24, 600] {
        survives(false, false, move |client, id| {
            let mut bytes = vec![7, 0, 24, 24, 24, 16, 0, 0];
            bytes.extend(id.to_le_bytes());
            bytes.extend([0; 6]);
            bytes.extend(4096u32.to_le_bytes());
            bytes.extend([0; 4]);
            bytes.resize(2000, 9);
            client.send(&bytes[..sent])?;
            Err(io::ErrorKind::Other.into())
        });
    }
}

#[test]
fn a_target_may_say_itself_that_it_ends_the_connection() {
    let told = survives(false, false, |client, _| {
        client.send(&[3, 0, 24, 0, 24, 0, 0, 0, 1, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])
    });
    assert_eq!(told, None);
}

/// As [`survives`], for a write of 64 KiB whose data the target requests.
fn write_survives(mut trick: impl FnMut(&mut Client, u16) -> io::Result<()> + Send + 'static) {
    let target = Target::start(Traits::default());
    let (_session, mut queue) = open(&options(&target));
    let mut is_first = true;
    target.hook(move |client: &mut Client, entry: &SubmissionEntry| {
        if !std::mem::take(&mut is_first) {
            return Ok(false);
        }
        trick(client, entry.command_id)?;
        // Later data is not checked.
        Err(io::ErrorKind::Other.into())
    });
    let mut memory = bytes(64 << 10);
    let list = segment(&mut memory);
    assert_eq!(run(&mut queue, &Request::write(data(&list), Flags::NONE), 0), Ok(()));
    assert!(target.state.disk.lock().unwrap()[..64 << 10] == bytes(64 << 10));
}

#[test]
fn a_wish_for_data_that_is_not_there_ends_the_connection() {
    for (offset, len) in [(0, (64 << 10) + 4), (64 << 10, 4), (4, 4), (0, 0), (u32::MAX, u32::MAX)] {
        write_survives(move |client, id| {
            client.r2t(id, offset, len)?;
            std::thread::sleep(Duration::from_millis(20));
            Ok(())
        });
    }
    write_survives(|client, id| {
        client.r2t(id, 0, 4096)?;
        client.respond(id, Status::SUCCESS, 0)?;
        std::thread::sleep(Duration::from_millis(20));
        Ok(())
    });
}

#[test]
fn a_refusal_in_the_middle_of_a_write_is_its_end() {
    let target = Target::start(Traits::default());
    let (_session, mut queue) = open(&options(&target));
    target.hook(|client: &mut Client, entry: &SubmissionEntry| {
        client.respond(entry.command_id, Status::WRITE_FAULT, 0).map(|()| true)
    });
    let mut memory = bytes(64 << 10);
    let list = segment(&mut memory);
    assert_eq!(run(&mut queue, &Request::write(data(&list), Flags::NONE), 0), Err(IoError::Medium));
    target.hook(|_, _| Ok(false));
    assert_eq!(run(&mut queue, &Request::write(data(&list), Flags::NONE), 0), Ok(()));
    assert_eq!(target.state.connections.load(Ordering::SeqCst), 2, "the connection went on");
}
