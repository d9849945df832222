//! Sessions that outlive their server.

use super::server::Holds;
use super::*;
use drivers::direct::DirectQueue;
use drivers::shared_buffer::SharedBuffer;
use drivers::shared_memory::HUGE_PAGE;
use std::path::PathBuf;

/// Longer than any test, in seconds.
const LONG: u32 = 600;
/// Longest wait for an event.
const PATIENCE: Duration = Duration::from_secs(60);

/// A client of a server that serves in turns.
struct World {
    server: Server,
    session: Arc<Session>,
    memory: SharedMemory,
    path: PathBuf,
    _dir: tempfile::TempDir,
}

impl World {
    fn new(options: &Options, turns: Vec<Character>) -> World {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let server = Server::in_turn(&path, turns);
        let options = Options { path: path.clone(), ..options.clone() };
        let session = Session::open(&options).unwrap();
        let memory = SharedMemory::of_huge_pages(HUGE_PAGE).unwrap();
        session.add_region(&memory.region()).unwrap();
        World { server, session, memory, path, _dir: dir }
    }
}

fn patient(delay_s: u32) -> Options {
    Options { reconnect_delay_s: delay_s, ..options() }
}

fn holding(character: Character) -> Character {
    Character { holds: Holds::All, ..character }
}

/// A queue with a flush that the server has taken and does not answer.
fn held_flush(session: &Arc<Session>, server: &Server) -> VirtioBlkQueue {
    let mut queue = session.start_queue().unwrap();
    assert_eq!(flush(&mut queue), Ok(()));
    queue.kick();
    server.wait_for_held(1);
    queue
}

/// Waits for `count` results and returns them by slot.
fn ends(queue: &mut VirtioBlkQueue, count: usize) -> Vec<(u32, IoResult)> {
    let (start, mut ended) = (Instant::now(), Vec::new());
    while ended.len() < count {
        assert!(start.elapsed() < PATIENCE, "only {ended:?}");
        // A poll queue does not sleep.
        let _ = queue.wait(1, Some(Duration::from_millis(100)), None);
        queue.reap(&mut |slot, result| ended.push((slot, result)));
    }
    ended.sort_unstable_by_key(|(slot, _)| *slot);
    ended
}

/// Waits until the server has taken `count` requests, none of which may end.
fn wait_for_held_of<const N: usize>(server: &Server, count: usize, mut queues: [&mut VirtioBlkQueue; N]) {
    let start = Instant::now();
    while server.held() < count {
        assert!(start.elapsed() < PATIENCE, "only {} requests reach the server", server.held());
        for queue in &mut queues {
            queue.reap(&mut |slot, _| panic!("request {slot} is not answered"));
        }
        std::thread::yield_now();
    }
}

fn flush(queue: &mut VirtioBlkQueue) -> IoResult {
    // SAFETY: no memory.
    unsafe { queue.push(0, &Request::flush(), 0) }
}

/// Pushes a write of 4 KiB of `byte`.
fn written(queue: &mut VirtioBlkQueue, world: &World, slot: u32, byte: u8, block: usize) {
    // Different queues use different blocks, and different slots the same one.
    let at = (block + 8 * slot as usize) * 4096;
    world.memory.write(at, &[byte; 4096]);
    let list: &'static [Segment] = Box::leak(Box::new([world.memory.segment(at, 4096)]));
    assert_eq!(push(queue, slot, list, Some(Flags::NONE), block as u64 * 4096), Ok(()));
}

#[test]
fn unanswered_requests_complete_once_when_the_server_returns() {
    for (options, (character, is_polled)) in every_ring().flat_map(|options| {
        [Character::good(), Character::tracking()]
            .into_iter()
            .flat_map(|character| [(character, false), (character, true)])
            .map(move |case| (options.clone(), case))
    }) {
        let options = Options { reconnect_delay_s: LONG, ..options };
        let world = World::new(&options, vec![holding(character), holding(character), character]);
        let mut queue = match is_polled {
            true => world.session.start_poll_queue().unwrap(),
            false => world.session.start_queue().unwrap(),
        };
        let mut other = world.session.start_queue().unwrap();
        for slot in 0..4 {
            written(&mut queue, &world, slot, slot as u8 + 1, slot as usize);
        }
        written(&mut other, &world, 3, 9, 100);
        queue.kick();
        other.kick();
        world.server.wait_for_held(5);
        world.server.end_turn();
        // While there is no server, and before the queue has noticed the next one.
        written(&mut queue, &world, 4, 5, 4);
        queue.kick();
        wait_for_held_of(&world.server, 10, [&mut queue, &mut other]);
        world.server.end_turn();
        assert_eq!(ends(&mut queue, 5), (0..5).map(|slot| (slot, Ok(()))).collect::<Vec<_>>());
        assert_eq!(ends(&mut other, 1), [(3, Ok(()))]);
        assert_eq!(queue.reap(&mut |_, _| panic!("completed twice")), 0);
        for slot in 0..5u8 {
            assert_eq!(world.server.disk(usize::from(slot) * 4096, 4096), [slot + 1; 4096], "{options:?}");
        }
        let seen = world.server.take_seen();
        let sectors = seen.iter().map(|seen| match seen {
            Seen::Transfer(VIRTIO_BLK_T_OUT, sector, _) => *sector,
            other => panic!("{other:?}"),
        });
        let mut of_queue: Vec<u64> = sectors.filter(|sector| *sector < 800).collect();
        if character.protocol.contains(Protocol::INFLIGHT_SHMFD) {
            of_queue.sort_unstable();
        }
        assert_eq!(of_queue, [0, 8, 16, 24, 32], "each once, {options:?}");
        // The session works as before.
        let list = [world.memory.segment(0, 4096)];
        world.memory.write(0, &[0; 4096]);
        assert_eq!(push(&mut queue, 2, &list, None, 3 * 4096), Ok(()));
        assert_eq!(ends(&mut queue, 1), [(2, Ok(()))]);
        let mut got = [0; 4096];
        world.memory.read(0, &mut got);
        assert_eq!(got, [4; 4096]);
    }
}

#[test]
fn writes_of_the_same_block_keep_their_order_on_empty_rings() {
    let good = Character::good();
    let world = World::new(&patient(LONG), vec![holding(good), good]);
    let mut queue = world.session.start_queue().unwrap();
    // Neither in the order of the slots, nor all before the loss.
    for slot in [6, 2, 9, 1] {
        written(&mut queue, &world, slot, slot as u8, 7);
    }
    queue.kick();
    world.server.wait_for_held(4);
    world.server.end_turn();
    written(&mut queue, &world, 0, 77, 7);
    assert_eq!(ends(&mut queue, 5).len(), 5);
    assert_eq!(world.server.disk(7 * 4096, 4096), [77; 4096]);
}

#[test]
fn a_write_with_fua_is_repeated_if_its_flush_was_not_answered() {
    let good = Character::good();
    let world = World::new(&patient(LONG), vec![Character { holds: Holds::Flushes, ..good }, good]);
    let mut queue = world.session.start_queue().unwrap();
    let list = [world.memory.segment(0, 512)];
    assert_eq!(push(&mut queue, 3, &list, Some(Flags::FUA), 0), Ok(()));
    queue.kick();
    wait_for_held_of(&world.server, 1, [&mut queue]);
    world.server.take_seen();
    world.server.end_turn();
    assert_eq!(ends(&mut queue, 1), [(3, Ok(()))]);
    assert_eq!(world.server.take_seen(), [Seen::Transfer(VIRTIO_BLK_T_OUT, 0, vec![512]), Seen::Flush]);
}

#[test]
fn requests_fail_after_the_delay_and_later_ones_reach_the_next_server() {
    for character in [Character::good(), Character::tracking()] {
        let World { mut server, session, memory, path, _dir } =
            World::new(&patient(1), vec![holding(character)]);
        let mut queue = session.start_queue().unwrap();
        let list = [memory.segment(0, 4096)];
        memory.write(0, &[1; 4096]);
        assert_eq!(push(&mut queue, 0, &list, Some(Flags::NONE), 0), Ok(()));
        queue.kick();
        server.wait_for_held(1);
        server.end();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(ends(&mut queue, 1), [(0, Err(IoError::DeviceGone))]);
        assert_eq!(push(&mut queue, 0, &list, None, 0), Err(IoError::DeviceGone));
        assert!(session.start_queue().is_err());
        assert_eq!(session.lost(), None);
        let server = Server::in_turn(&path, vec![character]);
        let start = Instant::now();
        while flush(&mut queue).is_err() {
            assert!(start.elapsed() < PATIENCE, "the client does not reconnect");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(ends(&mut queue, 1), [(0, Ok(()))]);
        assert_eq!(server.take_seen(), [Seen::Flush], "the failed write is not executed");
        assert!(session.start_queue().is_ok());
    }
}

#[test]
fn a_server_that_completes_nothing_does_not_extend_the_delay() {
    let good = Character::good();
    let mut turns = vec![Character { closes_at: Some(FrontendReq::SET_VRING_ENABLE), ..good }; 200];
    turns[0] = holding(good);
    let world = World::new(&patient(1), turns);
    let mut queue = held_flush(&world.session, &world.server);
    world.server.end_turn();
    assert_eq!(ends(&mut queue, 1), [(0, Err(IoError::DeviceGone))]);
}

#[test]
fn another_disk_is_refused_with_both_values() {
    let good = Character::good();
    let config = |config| Character { config, ..good };
    let cases = [
        (
            config(ConfigSpace { capacity: 4096, ..good.config }),
            "capacity in bytes shrank from 4194304 to 2097152",
        ),
        (config(ConfigSpace { num_queues: 1, ..good.config }), "the disk has 1 queues, and 2 are in use"),
        (config(ConfigSpace { seg_max: 4, ..good.config }), "number of segments shrank from 8 to 4"),
        (
            Character { features: good.features & !VIRTIO_BLK_F_DISCARD, ..good },
            "the server lacks features 0x2000",
        ),
    ];
    for (other, why) in cases {
        let world = World::new(&patient(LONG), vec![holding(good), other]);
        let mut queue = held_flush(&world.session, &world.server);
        world.server.end_turn();
        assert_eq!(ends(&mut queue, 1), [(0, Err(IoError::DeviceGone))]);
        assert_eq!(flush(&mut queue), Err(IoError::DeviceGone));
        let lost = world.session.lost().unwrap();
        assert!(world.session.is_gone() && lost.contains(why), "{lost}");
        let error = world.session.start_queue().err().unwrap().to_string();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn a_disk_that_has_grown_is_taken_over_and_announces_its_next_size() {
    let good = Character::good();
    let grown = Character { config: ConfigSpace { capacity: 1 << 14, ..good.config }, ..good };
    let world = World::new(&patient(LONG), vec![good, grown]);
    let device = VirtioBlk::over(world.session.clone());
    let wait_for = |capacity: u64| {
        let start = Instant::now();
        while device.limits().capacity != capacity {
            assert!(start.elapsed() < PATIENCE, "{:?}", device.limits());
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    world.server.end_turn();
    wait_for(8 << 20);
    *world.server.resize.lock().unwrap() = Some(1 << 15);
    wait_for(16 << 20);
    assert_eq!(device.refresh().unwrap().capacity, 16 << 20);
}

#[test]
fn a_server_that_ends_in_the_middle_of_a_handshake_is_followed_by_the_next() {
    let messages = [
        FrontendReq::SET_OWNER,
        FrontendReq::GET_FEATURES,
        FrontendReq::GET_PROTOCOL_FEATURES,
        FrontendReq::SET_PROTOCOL_FEATURES,
        FrontendReq::GET_QUEUE_NUM,
        FrontendReq::GET_MAX_MEM_SLOTS,
        FrontendReq::SET_BACKEND_REQ_FD,
        FrontendReq::SET_FEATURES,
        FrontendReq::GET_CONFIG,
        FrontendReq::GET_INFLIGHT_FD,
        FrontendReq::SET_INFLIGHT_FD,
        FrontendReq::ADD_MEM_REG,
        FrontendReq::SET_VRING_NUM,
        FrontendReq::SET_VRING_BASE,
        FrontendReq::SET_VRING_ADDR,
        FrontendReq::SET_VRING_CALL,
        FrontendReq::SET_VRING_KICK,
        FrontendReq::SET_VRING_ENABLE,
    ];
    let survives = |character: Character, message: FrontendReq| {
        let closing = Character { closes_at: Some(message), ..character };
        let babbling = Character { babbles_at: Some(message), ..character };
        // A server that never gets the message serves as the last one does.
        let world = World::new(&patient(LONG), vec![holding(character), closing, babbling, character]);
        let mut queue = world.session.start_queue().unwrap();
        written(&mut queue, &world, 1, 3, 1);
        queue.kick();
        world.server.wait_for_held(1);
        world.server.end_turn();
        assert_eq!(ends(&mut queue, 1), [(1, Ok(()))], "{message:?}");
        assert_eq!(world.server.disk(4096, 4096), [3; 4096]);
    };
    // They mostly pause.
    for some in messages.chunks(6) {
        std::thread::scope(|scope| {
            for message in some {
                for character in [Character::good(), Character::tracking()] {
                    scope.spawn(move || survives(character, *message));
                }
            }
        });
    }
}

#[test]
fn memory_and_virtqueues_may_change_while_there_is_no_server() {
    for character in [Character::good(), Character::tracking()] {
        let World { mut server, session, memory, path, _dir } =
            World::new(&patient(LONG), vec![holding(character)]);
        let mut queue = session.start_queue().unwrap();
        let list = [memory.segment(0, 4096)];
        assert_eq!(push(&mut queue, 0, &list, Some(Flags::NONE), 0), Ok(()));
        queue.kick();
        server.wait_for_held(1);
        server.end();
        std::fs::remove_file(&path).unwrap();
        // Its request is given up with it.
        drop(queue);
        session.remove_region(&memory.region());
        let other = SharedMemory::of_huge_pages(4096).unwrap();
        session.add_region(&other.region()).unwrap();
        let mut queue = session.start_queue().unwrap();
        other.write(0, &[6; 4096]);
        let list = [other.segment(0, 4096)];
        assert_eq!(push(&mut queue, 0, &list, Some(Flags::NONE), 8192), Ok(()));
        assert_eq!(session.refresh().unwrap(), DISK as u64, "the last known capacity");
        let server = Server::in_turn(&path, vec![character]);
        assert_eq!(ends(&mut queue, 1), [(0, Ok(()))]);
        assert_eq!(server.disk(8192, 4096), [6; 4096]);
        assert_eq!(server.take_seen(), [Seen::Transfer(VIRTIO_BLK_T_OUT, 16, vec![4096])]);
    }
}

#[test]
fn a_session_ends_at_once_while_it_has_no_server() {
    let good = Character::good();
    for turns in [vec![holding(good)], vec![holding(good), Character { serves: false, ..good }]] {
        let World { server, session, memory: _memory, path, _dir } = World::new(&patient(LONG), turns);
        let mut queue = held_flush(&session, &server);
        server.end_turn();
        session.shutdown();
        assert_eq!(ends(&mut queue, 1), [(0, Err(IoError::DeviceGone))]);
        drop((queue, session, path));
    }
}

#[test]
fn a_server_that_does_not_answer_delays_neither_new_queues_nor_the_end() {
    let slow = Options { timeout_ms: 300_000, ..patient(LONG) };
    let World { mut server, session, memory: _memory, path, _dir } =
        World::new(&slow, vec![Character::good()]);
    let queue = session.start_queue().unwrap();
    server.end();
    std::fs::remove_file(&path).unwrap();
    let silent = std::os::unix::net::UnixListener::bind(&path).unwrap();
    // The client waits for an answer once it has sent its first message.
    let attempt = || {
        let (mut stream, _) = silent.accept().unwrap();
        std::io::Read::read_exact(&mut stream, &mut [0; 12]).unwrap();
        stream
    };
    let start = Instant::now();
    let _first = attempt();
    let other = session.start_queue().unwrap();
    let _second = attempt();
    drop(queue);
    let _third = attempt();
    drop((other, session));
    assert!(start.elapsed() < Duration::from_secs(200), "{:?}", start.elapsed());
}

#[test]
fn a_server_gets_memory_of_whole_huge_pages_only() {
    for protocol in [Character::tracking().protocol, Protocol::CONFIG | Protocol::MQ] {
        let character = Character { protocol, ..Character::good() };
        let (server, session, _memory) = {
            let world = World::new(&patient(LONG), vec![holding(character), character]);
            (world.server, world.session, world.memory)
        };
        let (memory, _buffers) = SharedBuffer::allocate(3, 5000).unwrap();
        session.add_region(&memory.region()).unwrap();
        let _queue = held_flush(&session, &server);
        let of_first = server.regions().len();
        assert!(of_first >= 3, "rings, and two regions of the test");
        for region in server.regions() {
            assert!(region.iter().all(|number| number % HUGE_PAGE as u64 == 0), "{region:x?}");
        }
    }
}
