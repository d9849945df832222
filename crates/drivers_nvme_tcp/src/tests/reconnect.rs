//! Lost connections, with and without a successful reconnect.

use super::*;
use nvme::Status;

#[test]
fn requests_wait_while_the_target_is_away_and_go_on_when_it_is_back() {
    let target = Target::start(Traits::default());
    let (_session, mut queue) = open(&options(&target));
    let mut memory = bytes(8 * 16384);
    let lists: Vec<_> = memory.chunks_mut(16384).map(segment).collect();
    // None of these is answered.
    target.hook(|_, _| Ok(true));
    for slot in 0..8 {
        let req = Request::write(data(&lists[slot as usize]), Flags::NONE);
        assert_eq!(push(&mut queue, slot, &req, u64::from(slot) * 16384), Ok(()));
    }
    queue.kick();
    while target.opcodes().len() < 8 {
        std::thread::sleep(Duration::from_millis(1));
    }
    target.hook(|_, _| Ok(false));
    target.cut();
    let ended = ends(&mut queue, 8);
    assert!(ended.iter().all(|(_, result)| *result == Ok(())), "{ended:?}");
    assert!(target.state.disk.lock().unwrap()[..8 * 16384] == bytes(8 * 16384));
    assert_eq!(target.opcodes().len(), 16);
}

#[test]
fn a_target_that_is_closed_for_a_while_is_found_again() {
    let target = Target::start(Traits::default());
    let (_session, mut queue) = open(&options(&target));
    target.close();
    let mut memory = bytes(4096);
    let list = segment(&mut memory);
    assert_eq!(push(&mut queue, 0, &Request::write(data(&list), Flags::NONE), 0), Ok(()));
    queue.kick();
    std::thread::sleep(Duration::from_millis(700));
    queue.reap(&mut |slot, result| panic!("slot {slot} ended with {result:?}"));
    let successor = Target::at(&target.address, Traits::default());
    assert_eq!(ends(&mut queue, 1), [(0, Ok(()))]);
    assert!(successor.state.disk.lock().unwrap()[..4096] == bytes(4096));
    assert!(queue.is_connected());
}

#[test]
fn after_the_loss_timeout_requests_fail() {
    let target = Target::start(Traits::default());
    let (session, mut queue) = open(&Options { loss_timeout_s: 1, ..options(&target) });
    target.close();
    let mut memory = bytes(4096);
    let list = segment(&mut memory);
    let req = Request::read(data(&list));
    assert_eq!(run(&mut queue, &req, 0), Err(IoError::DeviceGone));
    assert_eq!(push(&mut queue, 0, &req, 0), Err(IoError::DeviceGone));
    assert!(queue.lost().is_some());
    assert!(matches!(session.start_queue(&Cancel::never()), Err(OpenError::Lost(_))));
    assert!(session.refresh(&Cancel::never()).is_err());
}

#[test]
fn another_namespace_in_its_place_is_not_written_to() {
    let target = Target::start(Traits::default());
    let (_session, mut queue) = open(&options(&target));
    target.state.traits.lock().unwrap().nguid = 8;
    target.cut();
    let mut memory = bytes(4096);
    let list = segment(&mut memory);
    assert_eq!(run(&mut queue, &Request::write(data(&list), Flags::NONE), 0), Err(IoError::DeviceGone));
    assert!(queue.lost().unwrap().contains("replaced by another one"), "{:?}", queue.lost());
    assert_eq!(target.opcodes(), []);
}

#[test]
fn a_command_that_ends_every_connection_ends_with_an_error() {
    let target = Target::start(Traits::default());
    let (_session, mut queue) = open(&options(&target));
    target.hook(|_, _| Err(std::io::ErrorKind::Other.into()));
    let mut memory = bytes(4096);
    let list = segment(&mut memory);
    assert_eq!(run(&mut queue, &Request::read(data(&list)), 0), Err(IoError::TimedOut));
    assert_eq!(target.opcodes().len(), 6);
    target.hook(|_, _| Ok(false));
    assert_eq!(run(&mut queue, &Request::read(data(&list)), 0), Ok(()));
}

#[test]
fn a_command_that_is_never_answered_gives_the_connection_up() {
    let target = Target::start(Traits::default());
    let (_session, mut queue) = open(&Options { io_timeout_s: 1, ..options(&target) });
    let mut is_first = true;
    target.hook(move |_, _| Ok(std::mem::take(&mut is_first)));
    let mut memory = bytes(4096);
    let list = segment(&mut memory);
    assert_eq!(run(&mut queue, &Request::read(data(&list)), 0), Ok(()));
    assert_eq!(target.opcodes().len(), 2);
}

#[test]
fn a_target_that_does_not_answer_keep_alives_is_given_up() {
    let target = Target::start(Traits::default());
    let options = Options { keep_alive_s: 1, loss_timeout_s: 1, timeout_ms: 300, ..options(&target) };
    let (_session, mut queue) = open(&options);
    target.state.is_silent.store(true, Ordering::SeqCst);
    let mut memory = bytes(4096);
    let list = segment(&mut memory);
    assert_eq!(run(&mut queue, &Request::read(data(&list)), 0), Err(IoError::DeviceGone));
}

#[test]
fn an_answer_that_may_change_is_asked_for_again_and_one_that_stays_is_not() {
    let target = Target::start(Traits::default());
    let (_session, mut queue) = open(&options(&target));
    let mut refusals = 1;
    target.hook(move |client, entry| {
        if refusals == 0 {
            return Ok(false);
        }
        refusals -= 1;
        client.respond(entry.command_id, Status::NAMESPACE_NOT_READY, 0).map(|()| true)
    });
    let mut memory = bytes(4096);
    let list = segment(&mut memory);
    assert_eq!(run(&mut queue, &Request::read(data(&list)), 0), Ok(()));
    assert_eq!(target.opcodes().len(), 2);
    for error in [IoError::Medium, IoError::Corrupt, IoError::NoSpace, IoError::ReadOnly] {
        target
            .hook(move |client, entry| client.respond(entry.command_id, Status::of(error), 0).map(|()| true));
        assert_eq!(run(&mut queue, &Request::write(data(&list), Flags::NONE), 0), Err(error));
        let long = Request::write_zeroes(8192, Flags::NO_FALLBACK);
        assert_eq!(run(&mut queue, &long, 0), Err(error));
    }
}

#[test]
fn zeroes_are_sent_where_the_target_cannot_write_them_after_all() {
    let target = Target::start(Traits::default());
    let (_session, mut queue) = open(&options(&target));
    target.state.disk.lock().unwrap().fill(9);
    target.hook(|client, entry| match entry.opcode {
        opcode::WRITE_ZEROES => client.respond(entry.command_id, Status::INVALID_OPCODE, 0).map(|()| true),
        _ => Ok(false),
    });
    assert_eq!(run(&mut queue, &Request::write_zeroes(300 << 10, Flags::NONE), 512), Ok(()));
    let disk = target.state.disk.lock().unwrap();
    let end = 512 + (300 << 10);
    assert!(disk[512..end].iter().all(|byte| *byte == 0) && disk[511] == 9 && disk[end] == 9);
}

#[test]
fn a_session_ends_at_once_while_its_target_is_away() {
    let target = Target::start(Traits::default());
    let session = Session::open(&options(&target), &Cancel::never()).unwrap();
    target.close();
    std::thread::sleep(Duration::from_millis(300));
    let start = Instant::now();
    drop(session);
    assert!(start.elapsed() < Duration::from_secs(2));
}
