//! Specifications of devices, and the options that they describe.

use super::*;
use crate::kinds::member::member;

#[test]
fn a_specification_of_an_image_has_all_its_options() {
    let parse = |text| match DeviceConfig::parse(text).unwrap() {
        (DeviceConfig::Rbd(options), id) => (options, id),
        other => panic!("{other:?}"),
    };
    assert_eq!(parse("rbd:pool=p,image=i"), (rbd::Options::new("p", "i"), None));
    let (options, id) = parse(
        "rbd:pool=p,image=i,namespace=n,conf=/etc/ceph/b.conf,user=vm,exclusive=on,force=on,lock-file=f,cache=on,\
         queue-depth=8,timeout-ms=500,id=d",
    );
    let expected = rbd::Options {
        namespace: "n".into(),
        conf: Some("/etc/ceph/b.conf".into()),
        user: "vm".into(),
        exclusive: Some(true),
        force: true,
        lock_file: Some("f".into()),
        cache: true,
        queue_depth: 8,
        timeout_ms: 500,
        ..rbd::Options::new("p", "i")
    };
    assert_eq!((options, id.as_deref()), (expected, Some("d")));
    let (snapshot, _) = parse("rbd:pool=p,image=i,snapshot=s,readonly=on");
    assert_eq!((snapshot.name().as_str(), snapshot.read_only), ("rbd:p/i@s", true));
    let locked = "rbd:pool=p,image=i,exclusive=on,force=on,lock-file=f";
    let DeviceConfig::Rbd(read) = member(locked, true, true).unwrap() else { panic!() };
    assert_eq!((read.check(), read.read_only), (Ok(()), true), "a look at a member takes no lock");
    let text = "rbd:pool=p,image=i,standby=on";
    assert!(DeviceConfig::parse(text).unwrap().0.is_standby());
    let error = member(text, true, false).unwrap_err().to_string();
    assert!(error.ends_with("standby=on: only freestone serve follows the lock of an image"), "{error}");
}

#[test]
fn an_invalid_specification_of_an_image_is_refused_by_its_value() {
    let refused = [
        ("rbd:pool=p", "image=NAME is missing"),
        ("rbd:pool=p,image=a/b", "image=a/b: at most 4096 bytes without / and @"),
        ("rbd:pool=p,image=i,cache=maybe", "cache=maybe: expected on or off"),
        ("rbd:pool=p,image=i,queue-depth=0", "queue-depth=0: 1 to 4096"),
        (
            "rbd:pool=p,image=i,force=on,exclusive=off",
            "force=on: a read-only image, or one with exclusive=off, has no lock",
        ),
        ("rbd:pool=p,image=i,snapshot=s,exclusive=on", "exclusive=on: a read-only image"),
    ];
    for (text, reason) in refused {
        let error = DeviceConfig::parse(text).unwrap_err().to_string();
        assert!(error.contains(reason), "{text}: {error}");
    }
}

#[test]
fn a_specification_of_a_virtio_disk_has_all_its_options() {
    let parse = |text| match DeviceConfig::parse(text).unwrap() {
        (DeviceConfig::VirtioBlkUring(options), id) => (options, id),
        other => panic!("{other:?}"),
    };
    let plain = virtio_blk_uring::Options::new("/dev/vdac0");
    assert_eq!(parse("virtio-blk-uring:path=/dev/vdac0"), (plain.clone(), None));
    let text = "virtio-blk-uring:path=/dev/vdac0,readonly,queue-depth=8,poll=on,fixed-buffers=on,id=d";
    let expected = virtio_blk_uring::Options {
        read_only: true,
        queue_depth: 8,
        iopoll: true,
        fixed_buffers: true,
        ..plain
    };
    assert_eq!(parse(text), (expected, Some("d".into())));
    assert!(
        DeviceConfig::parse("virtio-blk-uring:").unwrap_err().to_string().contains("path=PATH is missing")
    );
    let (mut config, _) = DeviceConfig::parse("virtio-blk-uring:path=a,fixed-buffers=on").unwrap();
    assert!(config.pins_regions() && !config.needs_regions());
    config.make_read_only();
    assert!(matches!(config, DeviceConfig::VirtioBlkUring(options) if options.read_only));
}
