//! Images that other hosts serve too.

use super::*;
use block::{HostRole, SharedRole};
use std::io;

const OTHER: &str = "10.0.0.9:0/77";

fn standby(name: &str) -> Options {
    Options { user: name.into(), standby: true, ..Options::new("pool", name) }
}

fn wait_for(role: &SharedRole, expected: HostRole, seconds: u64) {
    let start = Instant::now();
    while role.get() != expected {
        assert!(start.elapsed() < Duration::from_secs(seconds), "still {:?}", role.get());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_standby_takes_over_when_the_owner_of_the_lock_is_dead() {
    let image = FakeImage::create("standby", SIZE);
    *image.owner.lock().unwrap() = Some(OTHER.into());
    let device = open_with(standby("standby")).unwrap();
    let role = device.role().expect("a standby has a role").clone();
    let mut queue = device.open_queue().unwrap();
    let mut bytes = [7; 4096];
    let list = segment(&mut bytes);
    assert_eq!(ends_of(&mut queue, &Request::write(data(&list), Flags::NONE)), Err(IoError::DeviceGone));
    assert_eq!(ends_of(&mut queue, &Request::read(data(&list))), Err(IoError::DeviceGone));
    assert_eq!(ends_of(&mut queue, &Request::flush()), Ok(()), "a standby has written nothing");
    assert_eq!(image.flushes.load(SeqCst), 0);
    // An owner that lives keeps the lock.
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(role.get(), HostRole::Standby);
    assert_eq!(image.owner.lock().unwrap().as_deref(), Some(OTHER));
    image.resize(SIZE * 2);
    image.is_owner_dead.store(true, SeqCst);
    wait_for(&role, HostRole::Active, 10);
    assert_ne!(image.owner.lock().unwrap().as_deref(), Some(OTHER));
    assert_eq!(device.limits().capacity, SIZE as u64 * 2);
    assert_eq!(ends_of(&mut queue, &Request::write(data(&list), Flags::NONE)), Ok(()));
    assert_eq!(image.data.lock().unwrap()[..4096], [7; 4096]);
}

#[test]
fn the_first_of_the_hosts_is_active_at_once_and_its_lock_is_refused_to_others() {
    let image = FakeImage::create("first", SIZE);
    let device = open_with(standby("first")).unwrap();
    assert_eq!(device.role().unwrap().get(), HostRole::Active);
    drop(device);
    assert_eq!(*image.owner.lock().unwrap(), None, "the lock is free for others");
    assert!(open_with(Options { standby: false, ..standby("first") }).unwrap().role().is_none());
    *image.owner.lock().unwrap() = Some(OTHER.into());
    let device = open_with(Options { force: true, ..standby("first") }).unwrap();
    assert_eq!(device.role().unwrap().get(), HostRole::Active);
}

#[test]
fn a_host_that_the_cluster_has_shut_out_learns_of_it_without_a_request() {
    let image = FakeImage::create("fenced", SIZE);
    let device = open_with(standby("fenced")).unwrap();
    let role = device.role().unwrap().clone();
    let mut queue = device.open_queue().unwrap();
    image.fail_with.store(libc::ESHUTDOWN, SeqCst);
    wait_for(&role, HostRole::Fenced, 10);
    image.fail_with.store(0, SeqCst);
    let mut bytes = [0; 4096];
    let list = segment(&mut bytes);
    assert_eq!(ends_of(&mut queue, &Request::read(data(&list))), Err(IoError::DeviceGone));
}

#[test]
fn a_host_whose_cluster_does_not_answer_is_no_path_until_it_does() {
    let image = FakeImage::create("silent", SIZE);
    let device = open_with(standby("silent")).unwrap();
    let role = device.role().unwrap().clone();
    image.hold();
    wait_for(&role, HostRole::Standby, 20);
    image.release();
    wait_for(&role, HostRole::Active, 10);
    assert_eq!(image.owner.lock().unwrap().as_deref(), Some("127.0.0.1:0/1"), "it kept the lock");
}

#[test]
fn a_standby_needs_an_image_with_the_lock_and_without_a_cache() {
    let image = FakeImage::create("lockless", SIZE);
    image.features.store(0, SeqCst);
    let error = open_with(standby("lockless")).err().unwrap().to_string();
    assert_eq!(error, "rbd:pool/lockless: standby=on: the image lacks the feature exclusive-lock");
    let error = open_with(Options { cache: true, ..standby("lockless") }).err().unwrap().to_string();
    assert!(error.contains("not with cache=on"), "{error}");
}

#[test]
fn an_image_whose_lock_another_host_has_is_in_use() {
    let image = FakeImage::create("busy", SIZE);
    *image.owner.lock().unwrap() = Some(OTHER.into());
    let options = Options { user: "busy".into(), ..Options::new("pool", "busy") };
    let error = open_with(options).err().unwrap();
    let cause = std::error::Error::source(&error).and_then(|cause| cause.downcast_ref::<io::Error>());
    assert_eq!(cause.map(io::Error::kind), Some(io::ErrorKind::ResourceBusy), "{error}");
}
